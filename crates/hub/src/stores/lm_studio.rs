//! LM Studio's folder: `ORG/NAME/FILES`, with the Hub's file names.
use super::{Found, folders, in_folder, not_there, untitled};
use crate::cache::files_of;
use crate::choose::{Selection, choose};
use crate::{Error, HubName, Places, Resolved};
use std::path::Path;

const STORE: &str = "lmstudio";

pub(super) fn list(models: &Path) -> Vec<Found> {
    let found = repos(models).into_iter();
    found.flat_map(|repo| in_folder(STORE, &format!("lmstudio:{repo}"), &models.join(&repo))).collect()
}

fn repos(models: &Path) -> Vec<String> {
    let owners = folders(models).into_iter();
    owners
        .flat_map(|owner| {
            let names = folders(&models.join(&owner)).into_iter();
            names.map(|name| format!("{owner}/{name}")).collect::<Vec<_>>()
        })
        .collect()
}

pub(crate) fn resolve(places: &Places, typed: &str) -> Result<Resolved, Error> {
    let wrong = |problem: String| Error::Name {
        typed: format!("lmstudio:{typed}"),
        problem: problem.replace("hf:", "lmstudio:"),
    };
    let name = HubName::parse(typed).map_err(wrong)?;
    for models in &places.lm_studio {
        let folder = models.join(&name.owner).join(&name.name);
        if !folder.is_dir() {
            continue;
        }
        let files = files_of(&folder);
        let paths: Vec<&str> = files.iter().map(String::as_str).collect();
        return Ok(match choose(&name, &paths)? {
            Selection::Gguf(parts) => untitled(folder.join(&parts[0])),
            Selection::Folder { .. } => untitled(folder),
        });
    }
    let known = places.lm_studio.iter().flat_map(|models| repos(models));
    Err(not_there(format!("lmstudio:{typed}"), STORE, &name.repo(), known))
}
