//! `--speculate` and what belongs to it.
use super::{ModelArgs, registry, wrong_usage};
use crate::source::SourceArgs;
use clap::{Args, ValueEnum, ValueHint};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::speculate::*;
use kvist_model::{Model, Opened};
use std::path::PathBuf;
use std::sync::Arc;

/// What proposes tokens.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No drafts
    #[default]
    Off,
    /// Choose by what was measured, and draft only as much as pays
    Auto,
    /// What followed the last tokens earlier in the text
    Ngram,
    /// Trees of what followed them in the text and in earlier answers
    Suffix,
    /// A smaller model with the same vocabulary
    Draft,
}

#[derive(Args, Clone, Debug)]
pub struct SpeculationArgs {
    /// Propose tokens and verify several in one pass: the same text, sooner where proposals are right
    #[arg(long, value_name = "HOW", default_value = "off", hide_possible_values = false)]
    pub speculate: Mode,
    /// The draft model, as --model takes it
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub draft_model: Option<PathBuf>,
    /// Most tokens of a draft
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub draft_tokens: u32,
    /// Most tokens on one path of a draft
    #[arg(long, value_name = "TOKENS", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub draft_depth: u32,
    /// Most continuations that a draft proposes after the same token; 1 drafts chains
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub draft_width: u32,
}

/// A draft model whose headers have been read and found to fit.
pub struct OpenedDraft {
    opened: Opened,
    args: ModelArgs,
}

impl SpeculationArgs {
    pub fn is_on(&self) -> bool {
        self.speculate != Mode::Off
    }

    /// Gives `config` what verification needs: a row of logits for each draft token, and a kind that holds trees where none
    /// was asked for. `asked` is `--kind`.
    pub fn prepare(&self, config: &mut CacheConfig, asked: Option<&str>) -> anyhow::Result<()> {
        if !self.is_on() {
            return Ok(());
        }
        self.check_cache(config.context_tokens)?;
        if asked.is_none() && self.draft_width > 1 && self.speculate != Mode::Ngram {
            config.kind = "tree".into();
        }
        config.max_rows = config.max_rows.max(self.draft_tokens + 1);
        config.max_step_tokens = config.max_step_tokens.max(self.draft_tokens + 1);
        Ok(())
    }

    /// Refuses drafts that are larger than a cache of `context` tokens.
    pub fn check_cache(&self, context: u32) -> anyhow::Result<()> {
        if self.is_on() && self.draft_tokens >= context {
            return Err(wrong_usage(format!(
                "--draft-tokens {}: the cache holds {context} tokens; use fewer, or a larger --context",
                self.draft_tokens
            )));
        }
        Ok(())
    }

    /// Opens the draft model, if one is used, and refuses one that does not fit `target` before any weights are read.
    pub fn open_draft(
        &self,
        target: &Opened,
        model: &ModelArgs,
        quiet: bool,
    ) -> anyhow::Result<Option<OpenedDraft>> {
        let wanted = matches!(self.speculate, Mode::Draft | Mode::Auto);
        let Some(path) = self.draft_model.as_ref().filter(|_| wanted) else {
            return match self.speculate {
                Mode::Draft => Err(wrong_usage("--speculate draft needs a draft model: give --draft-model")),
                _ if self.draft_model.is_some() => {
                    Err(wrong_usage("--draft-model is used with --speculate draft or auto"))
                }
                _ => Ok(None),
            };
        };
        let source = SourceArgs { model: Some(path.clone()), ..model.source.clone() };
        let args = ModelArgs { source, ..model.clone() };
        let opened = args.open(quiet)?;
        check_vocabulary(
            (opened.config().vocab, opened.tokenizer()),
            (target.config().vocab, target.tokenizer()),
        )?;
        Ok(Some(OpenedDraft { opened, args }))
    }

    /// What the flags allow a draft.
    pub fn bounds(&self) -> Bounds {
        Bounds { tokens: self.draft_tokens, depth: self.draft_depth, width: self.draft_width }
    }

    /// The drafters, for `texts` texts of `config`'s context at once. `None` if speculation is off.
    pub fn speculator(
        &self,
        draft: Option<&LoadedDraft>,
        target: &Arc<Model>,
        config: &CacheConfig,
        texts: u32,
    ) -> anyhow::Result<Option<Speculator>> {
        let mut drafters: Vec<Box<dyn Drafter>> = match self.speculate {
            Mode::Off => return Ok(None),
            Mode::Ngram => vec![Box::new(Ngram::default())],
            Mode::Suffix | Mode::Auto => vec![Box::new(Suffix::default())],
            Mode::Draft => Vec::new(),
        };
        if let Some(LoadedDraft { model, args }) = draft
            && matches!(self.speculate, Mode::Draft | Mode::Auto)
        {
            let registry = registry(&args.compute.get()?);
            let config = draft_cache(config, texts, self.draft_tokens, self.draft_width);
            drafters.push(Box::new(DraftModel::new(model, target, &registry, &config)?));
        }
        let adaptive = self.speculate == Mode::Auto;
        Ok(Some(Speculator::new(drafters, SpeculationConfig { bounds: self.bounds(), adaptive })))
    }
}

/// The cache of a draft model, for `texts` texts that share the target's context.
fn draft_cache(target: &CacheConfig, texts: u32, tokens: u32, width: u32) -> CacheConfig {
    let context = target.context_tokens.saturating_add(texts.saturating_mul(tokens));
    let rows = texts.saturating_mul(width);
    CacheConfig {
        backend: target.backend.clone(),
        max_step_tokens: rows.max(256),
        max_rows: rows,
        k: target.k,
        v: target.v,
        kind: "tree".into(),
        ..CacheConfig::new(context)
    }
}

/// A draft model in memory.
pub struct LoadedDraft {
    model: Arc<Model>,
    args: ModelArgs,
}

impl OpenedDraft {
    /// Bytes of the weights, and of the cache that [`SpeculationArgs::speculator`] makes for `texts` texts.
    pub fn bytes(&self, of: &SpeculationArgs, target: &CacheConfig, texts: u32) -> anyhow::Result<u64> {
        let registry = registry(&self.args.compute.get()?);
        let config = draft_cache(target, texts, of.draft_tokens, of.draft_width);
        let plan = MemoryPlan::of_session(self.opened.config(), &registry, &config)?;
        let weights = self.opened.weight_bytes(registry.device(), self.args.weights)?;
        Ok(plan.session_bound().saturating_add(weights))
    }

    /// Reads the weights, if they and a cache like `config` fit into the target's budget.
    pub fn load(self, target: &Arc<Model>, config: &CacheConfig, quiet: bool) -> anyhow::Result<LoadedDraft> {
        let OpenedDraft { opened, args } = self;
        let config = draft_cache(config, 1, 0, 1);
        let (registry, budget) = (registry(&args.compute.get()?), target.budget());
        MemoryPlan::admit(&opened, args.weights, &registry, &config, 1, budget)?;
        let model = args.load(opened, Some(config.context_tokens), budget, quiet)?;
        Ok(LoadedDraft { model, args })
    }
}
