//! llama.cpp's cache: a flat folder of `ORG_NAME_FILE.gguf` files. Since 2026 llama.cpp writes Hugging Face's
//! layout instead, also below `LLAMA_CACHE`.
use super::{Found, hugging_face, names, not_there, parts, untitled};
use crate::choose::{is_model, quant};
use crate::name::is_safe_path;
use crate::{Error, Places, Resolved};
use std::path::Path;

const STORE: &str = "llama.cpp";

pub(super) fn list(cache: &Path) -> Vec<Found> {
    let file = |file: String| {
        let (bytes, trouble) = parts(cache, &file);
        Found {
            name: format!("llama.cpp:{file}"),
            store: STORE,
            path: cache.join(&file),
            bytes,
            quant: quant(&file),
            trouble,
        }
    };
    let mut found: Vec<Found> = models(cache).into_iter().map(file).collect();
    // These models are listed by path: no `--model` name leads into this folder, as `hf:` only searches the
    // download folder.
    for mut model in hugging_face::named(cache, STORE, |repo| repo.into()) {
        model.name = model.path.display().to_string();
        found.push(model);
    }
    found
}

fn models(cache: &Path) -> Vec<String> {
    let mut files = names(cache, Path::is_file);
    files.retain(|file| is_model(file));
    files
}

pub(crate) fn resolve(places: &Places, file: &str) -> Result<Resolved, Error> {
    let caches = || places.llama_cpp.iter();
    for cache in caches().filter(|_| is_safe_path(file)) {
        let found = [file.to_string(), format!("{file}.gguf")].map(|file| cache.join(file));
        if let Some(path) = found.into_iter().find(|path| path.is_file()) {
            return Ok(untitled(path));
        }
    }
    Err(not_there(format!("llama.cpp:{file}"), STORE, file, caches().flat_map(|cache| models(cache))))
}
