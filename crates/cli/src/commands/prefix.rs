//! `kvist prefix`: beginnings of prompts in files.
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::SeqId;
use kvist_engine::frozen::{FrozenText, freeze, system_tokens};
use kvist_engine::saved::Origin;
use kvist_engine::session::ModelSession;
use kvist_model::Opened;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(clap::Subcommand)]
pub enum Command {
    /// Compute the beginning of prompts and write it with its K and V, for --prefix
    Freeze(Box<FreezeArgs>),
}

#[derive(clap::Args)]
pub struct FreezeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    /// The text: the system message of a model with a chat template, the beginning of the text with --raw
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    /// The file to write
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    out: PathBuf,
    /// Freeze plain text, even if the model has a chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// `kvist prefix freeze --json`
#[derive(Serialize)]
struct Report<'a> {
    version: u32,
    out: &'a Path,
    tokens: usize,
    bytes: u64,
}

pub fn run(command: Command, quiet: bool) -> anyhow::Result<()> {
    match command {
        Command::Freeze(args) => args.run(quiet),
    }
}

impl FreezeArgs {
    fn run(self, quiet: bool) -> anyhow::Result<()> {
        let text = read_text(&self.text)?;
        anyhow::ensure!(!text.is_empty(), "--text {}: the file is empty", self.text.display());
        let folder =
            self.out.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        anyhow::ensure!(
            folder.is_dir(),
            "--out {}: there is no folder {}",
            self.out.display(),
            folder.display()
        );
        let opened = self.model.open(quiet)?;
        let (tokens, system) = self.encode(&opened, &text)?;
        let mut config = self.cache.config(opened.config(), tokens.len() as u64 + 1)?;
        config.max_rows = 1;
        kvist_engine::check_prompt(&config, tokens.len())?;
        let fingerprint = opened.fingerprint()?;
        let origin = Origin::new(fingerprint, self.model.weights, &config, opened.config());
        let (model, _) = self.model.load_for(opened, &config, tokens.len(), quiet)?;
        interrupt::listen();
        let mut session = ModelSession::new(&model, &registry(&self.model.compute.get()?), &config)?;
        let bar = progress::bar("reading", tokens.len() as u64, quiet || tokens.len() < 512);
        let done = session.prefill(SeqId::ONLY, &tokens, &mut |done| {
            bar.set_position(done as u64);
            !interrupt::interrupted()
        })?;
        bar.finish_and_clear();
        anyhow::ensure!(done == tokens.len(), "interrupted: {} was not written", self.out.display());
        freeze(
            &mut session,
            SeqId::ONLY,
            FrozenText { tokens: &tokens, system: system.as_deref() },
            &origin,
            &self.out,
        )?;
        let bytes = std::fs::metadata(&self.out).map_or(0, |it| it.len());
        if self.json {
            let (version, out) = (json::VERSION, self.out.as_path());
            return output::show_json(&Report { version, out, tokens: tokens.len(), bytes });
        }
        if !quiet {
            let (tokens, out) = (tokens.len(), self.out.display());
            output::note(&format!("wrote {tokens} tokens to {out}: {}", kvist_device::Bytes(bytes)));
        }
        Ok(())
    }

    /// The tokens that every prompt begins with, and the system message.
    fn encode(&self, model: &Opened, text: &str) -> anyhow::Result<(Vec<u32>, Option<String>)> {
        let tokenizer = model.tokenizer().context(
            "this model has no tokenizer (no tokenizer.json next to it), so no text can be frozen",
        )?;
        let Some(template) = model.chat_template().filter(|_| !self.raw) else {
            return Ok((tokenizer.encode(text, true)?, None));
        };
        let tokens = system_tokens(tokenizer, template, text)?;
        Ok((tokens, Some(text.to_string())))
    }
}
