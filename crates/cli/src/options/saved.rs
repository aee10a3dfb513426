//! `--save-session` and `--resume`.
use crate::output;
use anyhow::Context;
use clap::ValueHint;
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::{Origin, SavedSession};
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use kvist_model::{Fingerprint, Opened};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct SavedArgs {
    /// At the end, save the text with its K and V to a file, for --resume
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub save_session: Option<PathBuf>,
    /// Go on where a saved session ended, without computing it again
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub resume: Option<PathBuf>,
}

impl SavedArgs {
    /// Reads the session to resume, before any model is loaded.
    pub fn open(&self) -> anyhow::Result<Option<SavedSession>> {
        Ok(self.resume.as_deref().map(SavedSession::open).transpose()?)
    }

    /// Hashes all weights, if a session is saved or resumed, and compares the model with that of the session to resume.
    pub fn fingerprint(
        &self,
        saved: Option<&SavedSession>,
        opened: &Opened,
    ) -> anyhow::Result<Option<Fingerprint>> {
        if self.save_session.is_none() && saved.is_none() {
            return Ok(None);
        }
        if let Some(path) = &self.save_session {
            let folder =
                path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            // Not after minutes of work.
            anyhow::ensure!(!path.is_dir(), "--save-session {}: it is a folder", path.display());
            anyhow::ensure!(
                folder.is_dir(),
                "--save-session {}: there is no folder {}",
                path.display(),
                folder.display()
            );
        }
        let fingerprint = opened.fingerprint()?;
        if let Some(saved) = saved {
            saved.check_model(&fingerprint)?;
        }
        Ok(Some(fingerprint))
    }

    /// What a session of this model and cache depends on. Compares it with that of the session to resume.
    pub fn origin(
        &self,
        fingerprint: Option<Fingerprint>,
        saved: Option<&SavedSession>,
        (architecture, format): (&ModelConfig, WeightFormat),
        config: &CacheConfig,
    ) -> anyhow::Result<Option<Origin>> {
        let origin = fingerprint.map(|model| Origin::new(model, format, config, architecture));
        if let Some((saved, origin)) = saved.zip(origin.as_ref()) {
            saved.check(origin)?;
        }
        Ok(origin)
    }

    /// Says how much of a resumed session was not computed again.
    pub fn note(&self, quiet: bool, resumed: usize, saved: &SavedSession) {
        if !quiet {
            let of = saved.tokens().len();
            let path = self.resume.as_deref().unwrap_or(Path::new("")).display();
            output::note(&format!("resumed {path}: {resumed} of {of} tokens were not computed again"));
        }
    }

    /// Runs `save` if a session is to be saved.
    pub fn save(&self, save: impl FnOnce(&Path) -> Result<(), kvist_model::Error>) -> anyhow::Result<()> {
        match &self.save_session {
            Some(path) => save(path).context("the session was not saved"),
            None => Ok(()),
        }
    }
}
