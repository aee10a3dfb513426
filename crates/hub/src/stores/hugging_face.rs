//! Hugging Face's cache, which all its clients share: `models--ORG--NAME/snapshots/COMMIT/...`.
use super::{Found, folders, in_folder};
use crate::cache::Repo;
use std::path::Path;

pub(crate) const STORE: &str = "huggingface";

pub(super) fn list(cache: &Path) -> Vec<Found> {
    named(cache, STORE, |repo| format!("hf:{repo}"))
}

/// Of every repository the snapshot that its name means: that of `main`, or else the newest.
pub(super) fn named(cache: &Path, store: &'static str, name: impl Fn(&str) -> String) -> Vec<Found> {
    let mut found = Vec::new();
    for folder in folders(cache) {
        let Some(repo) = folder.strip_prefix("models--") else { continue };
        let Some((owner, repo)) = repo.split_once("--") else { continue };
        let snapshots = Repo::at(cache.join(&folder)).snapshots(None);
        let name = name(&format!("{owner}/{repo}"));
        // A branch that has moved on may not have been downloaded again.
        found.extend(
            snapshots
                .iter()
                .map(|snapshot| in_folder(store, &name, snapshot))
                .find(|found| !found.is_empty())
                .unwrap_or_default(),
        );
    }
    found
}
