//! What a text begins with: `--resume` and `--prefix`; and `--save-session`.
use crate::options::wrong_usage;
use crate::output;
use anyhow::Context;
use clap::ValueHint;
use kvist_device::DType;
use kvist_engine::frozen::FrozenPrefix;
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::{Origin, SavedSession};
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use kvist_model::{Fingerprint, Opened};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub struct SavedArgs {
    /// At the end, save the text with its K and V to a file, for --resume
    #[arg(long, conflicts_with = "keep", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub save_session: Option<PathBuf>,
    /// Go on where a saved session ended, without computing it again
    #[arg(long, conflicts_with = "keep", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub resume: Option<PathBuf>,
    /// Begin with a prefix of `kvist prefix freeze`, without computing it; on the CPU all programs that use it share its memory
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["resume", "keep"])]
    pub prefix: Option<PathBuf>,
}

/// A file whose tokens need not be computed.
pub enum Beginning {
    Session(SavedSession),
    Prefix(FrozenPrefix),
}

impl Beginning {
    pub fn tokens(&self) -> &[u32] {
        match self {
            Beginning::Session(saved) => saved.tokens(),
            Beginning::Prefix(prefix) => prefix.tokens(),
        }
    }
    fn check_model(&self, now: &Fingerprint) -> Result<(), kvist_model::Error> {
        match self {
            Beginning::Session(saved) => saved.check_model(now),
            Beginning::Prefix(prefix) => prefix.check_model(now),
        }
    }
    fn check(&self, now: &Origin) -> Result<(), kvist_model::Error> {
        match self {
            Beginning::Session(saved) => saved.check(now),
            Beginning::Prefix(prefix) => prefix.check(now),
        }
    }
}

impl SavedArgs {
    /// True if the text begins with a file's.
    pub fn continues(&self) -> bool {
        self.resume.is_some() || self.prefix.is_some()
    }

    /// Reads what the text begins with, before any model is loaded.
    pub fn open(&self) -> anyhow::Result<Option<Beginning>> {
        Ok(match (&self.resume, &self.prefix) {
            (Some(path), _) => Some(Beginning::Session(SavedSession::open(path)?)),
            (None, Some(path)) => Some(Beginning::Prefix(FrozenPrefix::open(path)?)),
            (None, None) => None,
        })
    }

    /// Hashes all weights, if a session is saved or a text begins with a file, and compares the model with that of the file.
    pub fn fingerprint(
        &self,
        saved: Option<&Beginning>,
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

    /// What a session of this model and cache depends on. Compares it with that of the file.
    pub fn origin(
        &self,
        fingerprint: Option<Fingerprint>,
        saved: Option<&Beginning>,
        (architecture, format): (&ModelConfig, WeightFormat),
        config: &CacheConfig,
    ) -> anyhow::Result<Option<Origin>> {
        let stored = [config.k, config.v].map(|storage| storage.dtype);
        if fingerprint.is_some() && config.backend == "reference" && stored != [DType::F32; 2] {
            let what = "the reference backend stores K and V in f32 alone: add --kv f32 to save or to resume";
            return Err(wrong_usage(what));
        }
        let origin = fingerprint.map(|model| Origin::new(model, format, config, architecture));
        if let Some((saved, origin)) = saved.zip(origin.as_ref()) {
            saved.check(origin)?;
        }
        Ok(origin)
    }

    /// Says how much of a file's tokens were not computed again.
    pub fn note(&self, quiet: bool, resumed: usize, saved: &Beginning) {
        if !quiet {
            let of = saved.tokens().len();
            let path = self.resume.as_deref().or(self.prefix.as_deref()).unwrap_or(Path::new("")).display();
            let done = if self.resume.is_some() { "resumed" } else { "began with" };
            output::note(&format!("{done} {path}: {resumed} of {of} tokens were not computed again"));
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
