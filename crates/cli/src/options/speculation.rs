//! The options of speculative decoding: `--speculate` and the flags of drafts.
use super::{ModelArgs, registry, wrong_usage};
use crate::source::SourceArgs;
use clap::{Args, ValueEnum, ValueHint};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::speculate::{self as engine, *};
use kvist_hub::Name;
use kvist_model::{Model, Opened, OpenedHead};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The drafter.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No drafts
    #[default]
    Off,
    /// Choose by measurements, and draft only as much as pays off
    Auto,
    /// What followed the last tokens earlier in the text
    Ngram,
    /// Trees of what followed them in the text and in earlier answers
    Suffix,
    /// A smaller model with the same vocabulary
    Draft,
    /// A head that was trained for the model (EAGLE-3, or EAGLE-1 and 2), which reads its hidden states
    Eagle,
}

#[derive(Args, Clone, Debug)]
pub struct SpeculationArgs {
    /// Propose tokens and verify several in one pass: the same text, sooner where proposals are right
    #[arg(long, value_name = "HOW", default_value = "off", hide_possible_values = false)]
    pub speculate: Mode,
    /// The draft model, as --model takes it; for eagle the folder of the head, with config.json and safetensors;
    /// the embedded model has both of its own
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    pub draft_model: Option<PathBuf>,
    /// Most tokens of a draft
    #[arg(long, value_name = "TOKENS", default_value_t = DRAFT_TOKENS, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub draft_tokens: u32,
    /// Most tokens on one path of a draft [default: 8; 5 with draft]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub draft_depth: Option<u32>,
    /// Most continuations that a draft proposes after the same token; 1 drafts chains [default: 4; 1 with draft]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub draft_width: Option<u32>,
}

/// A draft model or head. Its headers have been read and fit the target.
pub struct OpenedDraft {
    drafts: engine::OpenedDraft,
    args: ModelArgs,
}

impl Mode {
    /// `None` is [`Off`](Mode::Off).
    fn drafts(self) -> Option<DraftMode> {
        match self {
            Mode::Off => None,
            Mode::Auto => Some(DraftMode::Auto),
            Mode::Ngram => Some(DraftMode::Ngram),
            Mode::Suffix => Some(DraftMode::Suffix),
            Mode::Draft => Some(DraftMode::Draft),
            Mode::Eagle => Some(DraftMode::Eagle),
        }
    }
}

impl SpeculationArgs {
    pub fn is_on(&self) -> bool {
        self.speculate != Mode::Off
    }

    /// Adds to `config` what verification needs: a row of logits for each draft token, and a kind for trees if none was asked
    /// for. `asked` and `context` are `--kind` and `--context`: a context that follows from the prompt may be
    /// smaller than a draft, which is then cut.
    pub fn prepare(
        &self,
        config: &mut CacheConfig,
        asked: Option<&str>,
        context: Option<u32>,
    ) -> anyhow::Result<()> {
        let Some(options) = self.options() else { return Ok(()) };
        options.prepare(config).map_err(usage)?;
        if let Some(context) = context {
            self.check_cache(context)?;
        }
        if asked.is_none() && options.grows_trees() {
            config.kind = "tree".into();
        }
        Ok(())
    }

    /// `None` if speculation is off.
    fn options(&self) -> Option<DraftOptions> {
        let (tokens, depth, width) = (self.draft_tokens, self.draft_depth, self.draft_width);
        Some(DraftOptions { mode: self.speculate.drafts()?, tokens, depth, width })
    }

    /// Tokens that a cache for one text needs in addition: those of a draft, which may be rejected.
    pub fn room(&self) -> u64 {
        if self.is_on() { u64::from(self.draft_tokens) } else { 0 }
    }

    /// Refuses drafts with `--no-cache`: a pass without a cache has nothing to verify them against.
    pub fn check_no_cache(&self, no_cache: bool) -> anyhow::Result<()> {
        if no_cache && self.is_on() {
            return Err(wrong_usage(
                "--speculate needs the cache: leave out --no-cache, or give --speculate off",
            ));
        }
        Ok(())
    }

    /// Refuses drafts that are larger than a cache of `context` tokens.
    pub fn check_cache(&self, context: u32) -> anyhow::Result<()> {
        self.options().map_or(Ok(()), |options| options.check_cache(context)).map_err(usage)
    }

    /// Opens the draft model, if one is used, and refuses one that does not fit `target` before any weights are read.
    pub fn open_draft(
        &self,
        target: &Opened,
        model: &ModelArgs,
        quiet: bool,
    ) -> anyhow::Result<Option<OpenedDraft>> {
        let wanted = matches!(self.speculate, Mode::Draft | Mode::Eagle | Mode::Auto);
        let Some(path) = self.draft_model.as_ref().filter(|_| wanted) else {
            let is_embedded = model.source.model.is_none();
            return match self.speculate {
                Mode::Draft if is_embedded => {
                    Ok(Some(OpenedDraft::model(Opened::embedded_draft()?, model.clone())))
                }
                Mode::Draft => Err(wrong_usage("--speculate draft needs a draft model: give --draft-model")),
                Mode::Eagle if is_embedded => {
                    Ok(Some(OpenedDraft::head(OpenedHead::embedded(target.config())?, model)))
                }
                Mode::Eagle => Err(wrong_usage(
                    "--speculate eagle needs a head that was trained for this model: give its folder, with config.json \
                     and safetensors, as --draft-model",
                )),
                _ if self.draft_model.is_some() => {
                    Err(wrong_usage("--draft-model is used with --speculate draft, eagle or auto"))
                }
                _ => Ok(None),
            };
        };
        if self.speculate == Mode::Eagle || self.speculate == Mode::Auto && OpenedHead::is_head(path) {
            let head = Self::open_head(path, target, model)?;
            return Ok(Some(OpenedDraft::head(head, model)));
        }
        if OpenedHead::is_head(path) {
            let path = path.display();
            return Err(wrong_usage(format!(
                "--draft-model {path}: this is a head that reads another model's hidden states; use it with --speculate eagle"
            )));
        }
        let source = SourceArgs { model: Some(path.clone()), ..model.source.clone() };
        let args = ModelArgs { source, ..model.clone() };
        let opened = args.open(quiet)?;
        check_vocabulary(
            (opened.config().vocab, opened.tokenizer()),
            (target.config().vocab, target.tokenizer()),
        )?;
        Ok(Some(OpenedDraft::model(opened, args)))
    }

    fn open_head(path: &Path, target: &Opened, model: &ModelArgs) -> anyhow::Result<OpenedHead> {
        if !matches!(Name::parse(path)?, Name::Path(_)) {
            let path = path.display();
            return Err(wrong_usage(format!(
                "--draft-model {path}: heads are not downloaded by name; give a folder with config.json and safetensors"
            )));
        }
        Ok(OpenedHead::open(path, target.config(), !model.no_mmap)?)
    }

    /// Loads the model for a session of `config`, and its draft model. Refused, before any weights are read, if they do not fit
    /// into memory together. `min` is the shortest useful context.
    pub fn load(
        &self,
        model: &ModelArgs,
        opened: Opened,
        draft: Option<OpenedDraft>,
        config: &CacheConfig,
        min: usize,
        quiet: bool,
    ) -> anyhow::Result<(Arc<Model>, MemoryPlan, Option<LoadedDraft>)> {
        if let Some(draft) = &draft {
            let (registry, budget) = (registry(&model.compute.get()?), model.budget()?);
            let plan = MemoryPlan::admit(&opened, model.weights, &registry, config, min, &budget)?;
            let free = MemoryPlan::free_after(&opened, &registry, model.weights, &budget)?;
            let (free, needed) = (free.saturating_sub(plan.session_bound()), draft.bytes(self, config, 1)?);
            if let Some(why) = engine::OpenedDraft::lacks_room(needed, free, budget.total()) {
                anyhow::bail!(why);
            }
        }
        let (model, plan) = model.load_for(opened, config, min, quiet)?;
        let draft = draft.map(|draft| draft.load(&model, config, quiet)).transpose()?;
        Ok((model, plan, draft))
    }

    /// The bounds of a draft that the flags set.
    pub fn bounds(&self) -> Bounds {
        Bounds::new(self.draft_tokens, self.draft_depth, self.draft_width, self.speculate == Mode::Draft)
    }

    /// The drafters, for `texts` texts of `config`'s context at once. `None` if speculation is off.
    pub fn speculator(
        &self,
        draft: Option<&LoadedDraft>,
        target: &Arc<Model>,
        config: &CacheConfig,
        texts: u32,
    ) -> anyhow::Result<Option<Speculator>> {
        let Some(options) = self.options() else { return Ok(None) };
        let Some(LoadedDraft { weights, args }) = draft else {
            return Ok(Some(options.speculator(None, target, config, texts)?));
        };
        let registry = &registry(&args.compute.get()?);
        let draft = PlacedDraft { weights, registry, backend: &config.backend };
        Ok(Some(options.speculator(Some(draft), target, config, texts)?))
    }
}

/// An error of the engine about flags.
fn usage(error: kvist_engine::Error) -> anyhow::Error {
    wrong_usage(error.to_string())
}

/// A draft model or a head in memory.
pub struct LoadedDraft {
    weights: DraftWeights,
    args: ModelArgs,
}

impl OpenedDraft {
    fn model(opened: Opened, args: ModelArgs) -> Self {
        OpenedDraft { drafts: engine::OpenedDraft::Model(Box::new(opened)), args }
    }
    fn head(head: OpenedHead, args: &ModelArgs) -> Self {
        OpenedDraft { drafts: engine::OpenedDraft::Head(Box::new(head)), args: args.clone() }
    }

    /// Bytes of the weights, and of the cache that [`SpeculationArgs::speculator`] makes for `texts` texts. With a head also those of the
    /// hidden states that it reads.
    pub fn bytes(&self, of: &SpeculationArgs, target: &CacheConfig, texts: u32) -> anyhow::Result<u64> {
        let Some(options) = of.options() else { return Ok(0) };
        let registry = registry(&self.args.compute.get()?);
        Ok(self.drafts.bytes(&options, self.args.weights, &registry, target, texts)?)
    }

    /// Reads the weights, if they and a cache like `config` fit into the target's budget.
    pub fn load(self, target: &Arc<Model>, config: &CacheConfig, quiet: bool) -> anyhow::Result<LoadedDraft> {
        let OpenedDraft { drafts, args } = self;
        let least = DraftOptions { mode: DraftMode::Draft, tokens: 0, depth: Some(1), width: Some(1) };
        let config = least.draft_cache(config, 1);
        let context = Some(config.context_tokens);
        let weights = match drafts {
            engine::OpenedDraft::Model(opened) => {
                let (registry, budget) = (registry(&args.compute.get()?), target.budget());
                MemoryPlan::admit(&opened, args.weights, &registry, &config, 1, budget)?;
                DraftWeights::Model(args.load(*opened, context, budget, quiet)?)
            }
            engine::OpenedDraft::Head(opened) => {
                DraftWeights::Head(Arc::new(opened.load(target, args.weights, context)?))
            }
        };
        Ok(LoadedDraft { weights, args })
    }
}
