//! Hugging Face's cache, shared by all its clients: `models--ORG--NAME/snapshots/COMMIT/...`.
use super::{Found, folders, in_folder};
use crate::cache::Repo;
use std::path::Path;

pub(crate) const STORE: &str = "huggingface";

pub(super) fn list(cache: &Path) -> Vec<Found> {
    named(cache, STORE, |repo| format!("hf:{repo}"))
}

/// The models of every repository, from its default snapshot: that of `main`, otherwise the newest.
pub(super) fn named(cache: &Path, store: &'static str, name: impl Fn(&str) -> String) -> Vec<Found> {
    let mut found = Vec::new();
    for folder in folders(cache) {
        let Some(repo) = folder.strip_prefix("models--") else { continue };
        let Some((owner, repo)) = repo.split_once("--") else { continue };
        let snapshots = Repo::at(cache.join(&folder)).snapshots(None);
        let name = name(&format!("{owner}/{repo}"));
        // The ref of `main` may point to a commit whose files were not downloaded; then an older snapshot is
        // used.
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
