//! Lists the models that programs on this machine have downloaded. It only looks at folders, manifests and
//! safetensors indexes. Unreadable entries are skipped or reported in [`Found::trouble`]; listing never fails.
pub(crate) mod hugging_face;
pub(crate) mod llama_cpp;
pub(crate) mod lm_studio;
pub(crate) mod ollama;

use crate::cache::{files_of, folder_weights, missing_weights};
use crate::choose::{is_model, pick, quant, split};
use crate::{Error, Places, Resolved};
use std::path::{Path, PathBuf};

/// A model found in a program's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name to pass to `--model`.
    pub name: String,
    /// The program: `huggingface`, `llama.cpp`, `lmstudio`, `ollama`.
    pub store: &'static str,
    /// A folder or a file. For a GGUF model in several parts, the first part.
    pub path: PathBuf,
    /// Size on disk.
    pub bytes: u64,
    /// The quantisation named in the file name or manifest.
    pub quant: Option<String>,
    /// Why the model cannot be run, as far as this shows without opening it.
    pub trouble: Option<String>,
}

/// All models of all caches, grouped by program.
pub fn list(places: &Places) -> Vec<Found> {
    let mut found = hugging_face::list(&places.hugging_face);
    found.extend(places.llama_cpp.iter().flat_map(|cache| llama_cpp::list(cache)));
    found.extend(places.lm_studio.iter().flat_map(|folder| lm_studio::list(folder)));
    found.extend(places.ollama.iter().flat_map(|folder| ollama::list(folder)));
    // Two configured folders may be the same.
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|found| seen.insert((found.store, found.name.clone())));
    found
}

/// Sorted names of the subfolders of a folder.
fn folders(folder: &Path) -> Vec<String> {
    names(folder, Path::is_dir)
}

fn names(folder: &Path, is: fn(&Path) -> bool) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| is(&entry.path()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort();
    names
}

fn bytes_of(path: &Path) -> u64 {
    path.metadata().map_or(0, |m| m.len())
}

/// The models in a folder with the layout of a Hub repository: its safetensors model, and each GGUF model.
fn in_folder(store: &'static str, name: &str, folder: &Path) -> Vec<Found> {
    let files = files_of(folder);
    let mut found = Vec::new();
    let is_weights = |file: &&String| {
        let ends = [".safetensors", ".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack"];
        !file.contains('/') && ends.iter().any(|end| file.ends_with(end))
    };
    let weights: Vec<&String> = files.iter().filter(is_weights).collect();
    let of_transformers = folder_weights(&files);
    if files.iter().any(|file| file == "config.json") && (!weights.is_empty() || of_transformers.is_some()) {
        let trouble = match &of_transformers {
            None => Some("it has no weights in safetensors".into()),
            Some(weights) => match missing_weights(folder, weights) {
                Ok(None) => None,
                Ok(Some(file)) => Some(format!("{file} is missing: an incomplete download")),
                Err(error) => Some(error.to_string()),
            },
        };
        found.push(Found {
            name: name.into(),
            store,
            path: folder.into(),
            bytes: weights.iter().map(|file| bytes_of(&folder.join(file))).sum(),
            quant: None,
            trouble,
        });
    }
    let models: Vec<&str> = files.iter().map(String::as_str).filter(|file| is_model(file)).collect();
    for file in &models {
        let (bytes, trouble) = parts(folder, file);
        found.push(Found {
            name: format!("{name}:{}", pick(file, &models)),
            store,
            path: folder.join(file),
            bytes,
            quant: quant(file),
            trouble,
        });
    }
    found
}

/// Size in bytes of a GGUF model with all its parts, and an error text if a part is missing.
fn parts(folder: &Path, file: &str) -> (u64, Option<String>) {
    let Some((stem, _, count)) = split(file) else { return (bytes_of(&folder.join(file)), None) };
    let parts = (1..=count).map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf"));
    let mut trouble = None;
    let mut bytes = 0;
    for part in parts {
        let path = folder.join(&part);
        bytes += bytes_of(&path);
        if !path.exists() && trouble.is_none() {
            trouble = Some(format!("{part} is missing: an incomplete download"));
        }
    }
    (bytes, trouble)
}

/// Error for a name that this store lacks; its text lists the names that exist.
fn not_there(name: String, store: &str, asked: &str, known: impl IntoIterator<Item = String>) -> Error {
    let there = match crate::error::closest(asked, known) {
        Some(names) => format!("{store} has {names}"),
        None => format!("{store} has nothing here; `kvist models` says where it looks"),
    };
    Error::NotInStore { name, there }
}

fn untitled(path: PathBuf) -> Resolved {
    Resolved { path, title: None }
}
