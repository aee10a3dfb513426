//! Hugging Face's cache folder: `models--ORG--NAME/{blobs,refs,snapshots}`. A blob is named after its hash, a
//! snapshot contains links to blobs, and a ref contains the commit of a branch.
use crate::choose::{INDEX, Selection, Weights, choose, is_model, pick};
use crate::name::is_safe_path;
use crate::{Error, HubName, Resolved};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// One repository in the cache.
#[derive(Clone, Debug)]
pub(crate) struct Repo {
    path: PathBuf,
    locks: PathBuf,
}

pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

impl Repo {
    pub(crate) fn new(cache: &Path, name: &HubName) -> Self {
        let folder = format!("models--{}--{}", name.owner, name.name);
        Repo { path: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }
    /// A repository folder found by listing a cache; it has no lock folder.
    pub(crate) fn at(path: PathBuf) -> Self {
        Repo { locks: PathBuf::new(), path }
    }
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
    pub(crate) fn blobs(&self) -> PathBuf {
        self.path.join("blobs")
    }
    /// The lock file for writing this blob; huggingface_hub uses the same one.
    pub(crate) fn lock(&self, blob: &str) -> PathBuf {
        self.locks.join(format!("{blob}.lock"))
    }
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.path.join("snapshots").join(commit)
    }

    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), Error> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.path.join("refs").join(revision);
        if std::fs::read_to_string(&path).is_ok_and(|known| known.trim() == commit) {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(&self.path);
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        // Another thread or program may write the same ref, so each write uses its own temporary file.
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let part = folder.join(format!(".{}-{number}.part", std::process::id()));
        std::fs::write(&part, commit).map_err(Error::file("write", &part))?;
        std::fs::rename(&part, &path).map_err(Error::file("write", &path))
    }

    /// Candidate snapshots, best first: the snapshot of the revision (default `main`). If no revision was asked
    /// for, all other snapshots follow, newest first.
    pub(crate) fn snapshots(&self, revision: Option<&str>) -> Vec<PathBuf> {
        let read = |name: &str| std::fs::read_to_string(self.path.join("refs").join(name)).ok();
        let of_ref = |name: &str| read(name).map(|text| text.trim().to_string()).filter(|c| is_commit(c));
        let commit = match revision {
            Some(revision) if is_commit(revision) => Some(revision.to_string()),
            Some(revision) => of_ref(revision),
            None => of_ref("main"),
        };
        let mut snapshots: Vec<PathBuf> = commit.iter().map(|commit| self.snapshot(commit)).collect();
        if revision.is_none() {
            let entries = std::fs::read_dir(self.path.join("snapshots")).into_iter().flatten().flatten();
            let mut others: Vec<_> = entries
                .map(|entry| (entry.metadata().and_then(|m| m.modified()).ok(), entry.path()))
                .filter(|(_, path)| path.is_dir() && !snapshots.contains(path))
                .collect();
            others.sort();
            snapshots.extend(others.into_iter().rev().map(|(_, path)| path));
        }
        snapshots.retain(|snapshot| snapshot.is_dir());
        snapshots
    }

    /// The model that `name` means, if the cache has all of it; otherwise `None`.
    pub(crate) fn find(&self, name: &HubName) -> Result<Option<Resolved>, Error> {
        for snapshot in self.snapshots(name.revision.as_deref()) {
            let files = files_of(&snapshot);
            let paths: Vec<&str> = files.iter().map(String::as_str).collect();
            match choose(name, &paths) {
                Ok(Selection::Gguf(parts)) => {
                    return Ok(Some(Resolved { path: snapshot.join(&parts[0]), title: None }));
                }
                Ok(Selection::Folder { weights, .. }) if missing_weights(&snapshot, &weights)?.is_none() => {
                    return Ok(Some(Resolved { path: snapshot, title: Some(name.name.clone()) }));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    /// Describes what the cache has of this repository, for error messages.
    pub(crate) fn there(&self) -> String {
        let mut there = BTreeSet::new();
        for snapshot in self.snapshots(None) {
            let files = files_of(&snapshot);
            let models: Vec<&str> = files.iter().map(String::as_str).filter(|path| is_model(path)).collect();
            there.extend(models.iter().map(|path| pick(path, &models)));
            if files.iter().any(|file| file.ends_with(".safetensors")) {
                there.insert("safetensors".into());
            }
        }
        let partly = std::fs::read_dir(self.blobs())
            .into_iter()
            .flatten()
            .flatten()
            .any(|file| file.file_name().to_string_lossy().ends_with(".incomplete"));
        match (there.is_empty(), partly) {
            (true, true) => "an incomplete download".into(),
            (true, false) => "nothing of this repository".into(),
            (false, _) => there.into_iter().collect::<Vec<_>>().join(", "),
        }
    }
}

/// The first weight file that is missing from the folder, if any.
pub(crate) fn missing_weights(folder: &Path, weights: &Weights) -> Result<Option<String>, Error> {
    let Weights::Index(index) = weights else { return Ok(None) };
    let shards = shards(&folder.join(index))?;
    Ok(shards.into_iter().find(|shard| !folder.join(shard).exists()))
}

/// The files that a safetensors index names, sorted and without duplicates. Fails if a name would leave the
/// folder.
pub(crate) fn shards(index: &Path) -> Result<Vec<String>, Error> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let odd = |what: &str| Error::Answer { what: format!("{}: {what}", index.display()) };
    let text = std::fs::read_to_string(index).map_err(Error::file("read", index))?;
    let parsed: Index =
        serde_json::from_str(&text).map_err(|error| odd(&format!("is not a safetensors index: {error}")))?;
    let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
    match shards.iter().find(|shard| !is_safe_path(shard)) {
        Some(shard) => Err(odd(&format!("names {shard}, which leaves its folder"))),
        None => Ok(shards.into_iter().collect()),
    }
}

/// Paths of all files below a folder, relative to it and sorted. Broken links are skipped.
pub(crate) fn files_of(folder: &Path) -> Vec<String> {
    /// Deeper than any repository. The limit stops a link to a parent folder from recursing forever.
    const DEPTH: usize = 6;
    fn walk(folder: &Path, prefix: &str, depth: usize, files: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{prefix}{name}");
            match entry.path() {
                file if file.is_file() => files.push(path),
                below if below.is_dir() && depth > 0 => walk(&below, &format!("{path}/"), depth - 1, files),
                _ => {}
            }
        }
    }
    let mut files = Vec::new();
    walk(folder, "", DEPTH, &mut files);
    files.sort();
    files
}

/// The weights of a folder that transformers can load; `None` if there are none.
pub(crate) fn folder_weights(files: &[String]) -> Option<Weights> {
    let has = |name: &str| files.iter().any(|file| file == name);
    if has("model.safetensors") {
        Some(Weights::Single("model.safetensors".into()))
    } else {
        has(INDEX).then(|| Weights::Index(INDEX.into()))
    }
}
