//! Resolves a model name that the user typed to a folder or a file on this machine.
//!
//! A name is a path, a model of the Hugging Face Hub (`hf:ORG/NAME[@REVISION][:QUANT|:FILE]`), or a model that
//! another program has downloaded (`ollama:NAME`, `lmstudio:ORG/NAME`, `llama.cpp:FILE`). [`Hub::resolve`]
//! downloads missing files into Hugging Face's own cache folder, in the layout that its other clients read and
//! write. [`stores::list`] lists the models in all four caches.
//!
//! Guarantees: a file gets its final name only after its size and hash match those that the Hub reports. An
//! interrupted download resumes where it stopped. The token is sent to the Hub and to no other host. Errors
//! that can be detected early are returned before anything is written: an invalid name, a gated or missing
//! repository, a disk with too little space. This crate never reads model files; the engine does.
#![forbid(unsafe_code)]

mod cache;
mod choose;
mod client;
mod download;
mod error;
mod name;
mod settings;
pub mod stores;

pub use choose::quant;
pub use download::Progress;
pub use error::Error;
pub use name::{HubName, Name};
pub use settings::{Places, Settings, free_bytes};

use cache::Repo;
use choose::Selection;
use client::{Client, Listing};
use std::path::{Path, PathBuf};

const CONFIG: &str = "config.json";

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// A folder or a file. For a GGUF model in several parts, the first part.
    pub path: PathBuf,
    /// A display name, set if the path does not contain one: a snapshot folder is named after a commit, a blob
    /// after its hash.
    pub title: Option<String>,
}

/// Resolves names against the Hub and the caches of this machine.
#[derive(Clone, Debug)]
pub struct Hub {
    settings: Settings,
}

impl Hub {
    pub fn new(settings: Settings) -> Self {
        Hub { settings }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the folder or file that `typed` names, and downloads missing files. After an error no incomplete
    /// file has a final name. A partial download stays in the cache as an `.incomplete` file, and the next call
    /// resumes it.
    pub fn resolve(&self, typed: &Path, progress: &mut dyn Progress) -> Result<Resolved, Error> {
        let places = &self.settings.places;
        match Name::parse(typed)? {
            // The engine reports a path that is not a model.
            Name::Path(path) => Ok(Resolved { path, title: None }),
            Name::Ollama(name) => stores::ollama::resolve(places, &name),
            Name::LmStudio(name) => stores::lm_studio::resolve(places, &name),
            Name::LlamaCpp(file) => stores::llama_cpp::resolve(places, &file),
            Name::Hub(name) if self.settings.offline => self.cached(&name),
            Name::Hub(name) => self.newest(&name, progress),
        }
    }

    /// Resolves `typed` for a caller that only needs the model's sizes. Of a safetensors model that is not in
    /// the cache, only config.json is downloaded. A GGUF file has its config inside, so it would have to be
    /// downloaded whole; that returns [`Error::TooMuchForASize`] instead.
    pub fn resolve_config(&self, typed: &Path, progress: &mut dyn Progress) -> Result<Resolved, Error> {
        let name = match Name::parse(typed)? {
            Name::Hub(name) if !self.settings.offline => name,
            _ => return self.resolve(typed, progress),
        };
        if let Ok(resolved) = self.cached(&name) {
            return Ok(resolved);
        }
        let client = Client::new(&self.settings)?;
        let listing = client.list(&name)?;
        match choose::choose(&name, &listing.paths())? {
            Selection::Gguf(parts) => {
                let bytes = parts.iter().filter_map(|part| listing.files.get(part)?.size).sum();
                Err(Error::TooMuchForASize { name: name.to_string(), size: error::human(bytes) })
            }
            Selection::Folder { .. } => {
                let repo = Repo::new(&self.settings.places.hugging_face, &name);
                let config = client.complete(&name, &listing, CONFIG)?;
                let (settings, commit) = (&self.settings, &listing.commit);
                download::fetch(settings, &client, &repo, &name, commit, &[config], progress)?;
                let path = repo.snapshot(commit).join(CONFIG);
                Ok(Resolved { path, title: Some(name.name) })
            }
        }
    }

    /// Looks `name` up in the cache only; sends no request.
    fn cached(&self, name: &HubName) -> Result<Resolved, Error> {
        let repo = Repo::new(&self.settings.places.hugging_face, name);
        repo.find(name)?.ok_or_else(|| Error::NotInCache {
            name: name.to_string(),
            cache: repo.path().to_path_buf(),
            there: repo.there(),
        })
    }

    fn newest(&self, name: &HubName, progress: &mut dyn Progress) -> Result<Resolved, Error> {
        let client = Client::new(&self.settings)?;
        let listing = match client.list(name) {
            // If the Hub is unreachable, fall back to the cache.
            Err(error) if error.is_unreachable() => match self.cached(name) {
                Ok(resolved) => {
                    progress.note(&format!(
                        "{error}; using the cached files of {name} (--offline does this without asking the Hub)"
                    ));
                    return Ok(resolved);
                }
                Err(_) => return Err(error),
            },
            listing => listing?,
        };
        let repo = Repo::new(&self.settings.places.hugging_face, name);
        let choice = choose::choose(name, &listing.paths())?;
        let fetch = |paths: &[String], progress: &mut dyn Progress| {
            let files = paths.iter().map(|path| client.complete(name, &listing, path));
            let files = files.collect::<Result<Vec<_>, _>>()?;
            download::fetch(&self.settings, &client, &repo, name, &listing.commit, &files, progress)
        };
        let snapshot = repo.snapshot(&listing.commit);
        let resolved = match &choice {
            Selection::Gguf(parts) => {
                fetch(parts, progress)?;
                Resolved { path: snapshot.join(&parts[0]), title: None }
            }
            Selection::Folder { texts, weights } => {
                fetch(texts, progress)?;
                let weights = named_by_index(name, &listing, &snapshot, weights)?;
                let refuse = |why| Error::NotAccepted { name: name.to_string(), why };
                progress.accept(&snapshot.join(CONFIG)).map_err(refuse)?;
                fetch(&weights, progress)?;
                Resolved { path: snapshot, title: Some(name.name.clone()) }
            }
        };
        repo.write_ref(name.revision(), &listing.commit)?;
        Ok(resolved)
    }
}

/// The weight files of a folder: the single file, or the shards that its index names. Fails if the repository
/// lacks a shard.
fn named_by_index(
    name: &HubName,
    listing: &Listing,
    snapshot: &Path,
    weights: &choose::Weights,
) -> Result<Vec<String>, Error> {
    let index = match weights {
        choose::Weights::Single(file) => return Ok(vec![file.clone()]),
        choose::Weights::Index(index) => snapshot.join(index),
    };
    let shards = cache::shards(&index)?;
    match shards.iter().find(|shard| !listing.files.contains_key(*shard)) {
        Some(shard) => Err(Error::Answer {
            what: format!("{}: its index names {shard}, which the repository does not have", name.repo()),
        }),
        None => Ok(shards),
    }
}
