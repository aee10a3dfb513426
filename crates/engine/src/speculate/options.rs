//! What a speculator is made of, for programs whose users choose: a drafter by name, the bounds of a draft, and the draft model or
//! head. The command line, Python and C share it.
use super::{
    Bounds, DraftModel, Drafter, Eagle, Ngram, SpeculationConfig, Speculator, Suffix, check_vocabulary,
};
use crate::devices::Place;
use crate::memory::{CacheConfig, MemoryPlan};
use kvist_device::{Bytes, Registry};
use kvist_model::weights::WeightFormat;
use kvist_model::{DraftHead, Error, LoadOptions, Model, Opened, OpenedHead};
use kvist_scheduler::Config;
use std::str::FromStr;
use std::sync::Arc;

/// What proposes drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftMode {
    /// Suffix first, then the draft model or head if there is one; only as much as pays off, by measurements.
    Auto,
    /// What followed the last tokens earlier in the text.
    Ngram,
    /// Trees of what followed them in the text and in earlier answers.
    Suffix,
    /// A smaller model with the same vocabulary.
    Draft,
    /// A head that reads the hidden states of the model.
    Eagle,
}

impl DraftMode {
    pub const ALL: [DraftMode; 5] =
        [DraftMode::Auto, DraftMode::Ngram, DraftMode::Suffix, DraftMode::Draft, DraftMode::Eagle];

    pub fn name(self) -> &'static str {
        match self {
            DraftMode::Auto => "auto",
            DraftMode::Ngram => "ngram",
            DraftMode::Suffix => "suffix",
            DraftMode::Draft => "draft",
            DraftMode::Eagle => "eagle",
        }
    }

    /// Whether it can use a draft model or a head.
    pub fn takes_draft(self) -> bool {
        matches!(self, DraftMode::Auto | DraftMode::Draft | DraftMode::Eagle)
    }
}

impl FromStr for DraftMode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = DraftMode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| {
            let names = DraftMode::ALL.map(DraftMode::name).join(", ");
            format!("`{name}` is not a drafter: use {names}, or off")
        })
    }
}

/// Draft tokens of a text, unless a user says otherwise.
pub const DRAFT_TOKENS: u32 = 16;

/// Largest number of draft tokens in a step of an engine, if a text has at most `draft_tokens`: whole drafts for up to eight texts,
/// and less for each of more.
pub fn step_draft_tokens(draft_tokens: u32, scheduler: &Config) -> u32 {
    draft_tokens.saturating_mul(scheduler.max_batch.min(8)).min(scheduler.max_batch_tokens)
}

/// What drafts, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftOptions {
    pub mode: DraftMode,
    /// Most tokens of a draft.
    pub tokens: u32,
    /// Most tokens on a path, and most children of a node; `None` as in [`Bounds::new`].
    pub depth: Option<u32>,
    pub width: Option<u32>,
}

/// A draft model or a head in memory.
#[derive(Clone)]
pub enum DraftWeights {
    Model(Arc<Model>),
    Head(Arc<DraftHead>),
}

/// A draft model or head, and where its cache is: a draft model may be on another device than its target.
#[derive(Clone, Copy)]
pub struct PlacedDraft<'d> {
    pub weights: &'d DraftWeights,
    pub registry: &'d Registry,
    pub backend: &'d str,
}

impl DraftOptions {
    pub fn new(mode: DraftMode) -> Self {
        DraftOptions { mode, tokens: DRAFT_TOKENS, depth: None, width: None }
    }

    /// Refuses numbers that are out of range.
    pub fn check(&self) -> Result<(), Error> {
        let numbers = [
            ("--draft-tokens", Some(self.tokens), 1024),
            ("--draft-depth", self.depth, 1024),
            ("--draft-width", self.width, 64),
        ];
        for (name, number, most) in numbers {
            if let Some(number) = number.filter(|number| !(1..=most).contains(number)) {
                return Err(Error::Usage(format!("{name}: {number} is not a number from 1 to {most}")));
            }
        }
        Ok(())
    }

    pub fn bounds(&self) -> Bounds {
        Bounds::new(self.tokens, self.depth, self.width, self.mode == DraftMode::Draft)
    }

    /// Whether the drafts are trees where the cache can verify them.
    pub fn grows_trees(&self) -> bool {
        self.bounds().width > 1 && self.mode != DraftMode::Ngram
    }

    /// Refuses drafts that are larger than a cache of `context` tokens.
    pub fn check_cache(&self, context: u32) -> Result<(), Error> {
        match self.tokens >= context {
            true => Err(Error::Usage(format!(
                "--draft-tokens {}: the cache holds {context} tokens; use fewer, or a larger --context",
                self.tokens
            ))),
            false => Ok(()),
        }
    }

    /// Adds to a session's cache what verification needs: a row of logits for each draft token, in one step.
    ///
    /// # Errors
    /// The session keeps only some tokens.
    pub fn prepare(&self, config: &mut CacheConfig) -> Result<(), Error> {
        if let Some(keep) = config.keep {
            return Err(Error::Usage(format!(
                "--speculate and --keep {keep}: drafts that are rejected would count in what is kept; leave one out"
            )));
        }
        // The rows of a draft need f16 slots of their own beside those of the recent group, or they would displace them. Twice,
        // because a rejected node keeps its slot until its cell is written again.
        let groups = 2 * (self.tokens + 1).div_ceil(config.recent.tokens.max(1));
        config.recent.sequences = config.recent.sequences.saturating_add(groups);
        config.max_rows = config.max_rows.max(self.tokens + 1);
        config.max_step_tokens = config.max_step_tokens.max(self.tokens + 1);
        Ok(())
    }

    /// The cache of a draft model or head, for `texts` texts that share the context of `target`.
    pub fn draft_cache(&self, target: &CacheConfig, texts: u32) -> CacheConfig {
        draft_cache(target, texts, self.bounds())
    }

    /// The drafters, for `texts` texts of `config`'s context at once. A draft that the mode does not use is left out.
    ///
    /// # Errors
    /// The draft model has another vocabulary than `target`, or its cache does not fit into its memory.
    pub fn speculator(
        &self,
        draft: Option<PlacedDraft<'_>>,
        target: &Model,
        config: &CacheConfig,
        texts: u32,
    ) -> Result<Speculator, Error> {
        let mut drafters: Vec<Box<dyn Drafter>> = match self.mode {
            DraftMode::Ngram => vec![Box::new(Ngram::default())],
            DraftMode::Suffix | DraftMode::Auto => vec![Box::new(Suffix::default())],
            DraftMode::Draft | DraftMode::Eagle => Vec::new(),
        };
        if let Some(PlacedDraft { weights, registry, backend }) = draft {
            let config = CacheConfig { backend: backend.into(), ..self.draft_cache(config, texts) };
            match (weights, self.mode) {
                (DraftWeights::Model(model), DraftMode::Draft | DraftMode::Auto) => {
                    drafters.push(Box::new(DraftModel::new(model, target, registry, &config)?));
                }
                (DraftWeights::Head(head), DraftMode::Eagle | DraftMode::Auto) => {
                    drafters.push(Box::new(Eagle::new(head, registry, &config)?));
                }
                _ => {}
            }
        }
        let adaptive = self.mode == DraftMode::Auto;
        Ok(Speculator::new(drafters, SpeculationConfig { bounds: self.bounds(), adaptive }))
    }
}

fn draft_cache(target: &CacheConfig, texts: u32, bounds: Bounds) -> CacheConfig {
    let Bounds { tokens, depth, width } = bounds;
    // Cells of a growing tree: all levels but the last are computed, each with at most `width` nodes.
    let nodes = tokens.max((depth - 1).saturating_mul(width.min(tokens)));
    let context = target.context_tokens.saturating_add(texts.saturating_mul(nodes));
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

/// A draft model or a head whose headers have been read, and fit its target.
pub enum OpenedDraft {
    Model(Box<Opened>),
    Head(Box<OpenedHead>),
}

impl OpenedDraft {
    /// A draft model. Refused if its vocabulary is not that of `target`.
    pub fn model(opened: Opened, target: &Model) -> Result<Self, Error> {
        check_vocabulary(
            (opened.config().vocab, opened.tokenizer()),
            (target.config().vocab, target.tokenizer()),
        )?;
        Ok(OpenedDraft::Model(Box::new(opened)))
    }

    /// Bytes of the weights, and of the cache that [`DraftOptions::speculator`] makes for `texts` texts. With a head also those of
    /// the hidden states that it reads.
    pub fn bytes(
        &self,
        of: &DraftOptions,
        format: WeightFormat,
        registry: &Registry,
        target: &CacheConfig,
        texts: u32,
    ) -> Result<u64, Error> {
        let (config, device) = (of.draft_cache(target, texts), registry.device());
        let (model, weights, states) = match self {
            OpenedDraft::Model(opened) => (opened.config(), opened.weight_bytes(device, format)?, 0),
            OpenedDraft::Head(opened) => {
                let layer = &opened.config().layer;
                let of_target = device.tap_bytes(layer.features, &target.step_limits());
                let of_head = device.tap_bytes(layer.hidden, &config.step_limits());
                let states = of_target.zip(of_head).map_or(u64::MAX, |(a, b)| a.saturating_add(b));
                (layer, opened.weight_bytes(device, format)?, states)
            }
        };
        let plan = MemoryPlan::of_session(model, registry, &config)?;
        Ok(plan.session_bound().saturating_add(weights).saturating_add(states))
    }

    /// Why `needed` bytes do not fit into the `free` ones of `total` that are left beside a model and its cache, and what to try.
    /// `None` if they do.
    pub fn lacks_room(needed: u64, free: u64, total: u64) -> Option<String> {
        (needed > free).then(|| {
            format!(
                "the draft model and its cache need {}; {} of {} are left beside the model and its cache: try a smaller \
                 --context or draft model, or more memory with --memory",
                Bytes(needed),
                Bytes(free),
                Bytes(total)
            )
        })
    }

    /// Reads the weights, in the budget of `target` and on its device, for a text of `context` tokens.
    pub fn load(
        self,
        target: &Model,
        place: &Place,
        options: &LoadOptions,
        context: u32,
    ) -> Result<DraftWeights, Error> {
        let context = Some(context);
        Ok(match self {
            OpenedDraft::Model(opened) => {
                let options = LoadOptions { context, ..options.clone() };
                let model = place.load(*opened, &options, target.budget(), &mut |_, _| {})?;
                DraftWeights::Model(Arc::new(model))
            }
            OpenedDraft::Head(opened) => {
                DraftWeights::Head(Arc::new(opened.load(target, options.format, context)?))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafters_have_the_names_of_the_command_line() {
        for mode in DraftMode::ALL {
            assert_eq!(mode.name().parse(), Ok(mode));
        }
        let refused = "lookup".parse::<DraftMode>().unwrap_err();
        assert_eq!(refused, "`lookup` is not a drafter: use auto, ngram, suffix, draft, eagle, or off");
    }

    #[test]
    fn bounds_are_checked_and_a_session_gets_rows_for_them() {
        let options = DraftOptions { width: Some(65), ..DraftOptions::new(DraftMode::Suffix) };
        assert!(options.check().unwrap_err().to_string().contains("--draft-width: 65"));
        let options = DraftOptions { tokens: 7, ..DraftOptions::new(DraftMode::Ngram) };
        options.check().unwrap();
        assert!(!options.grows_trees() && DraftOptions::new(DraftMode::Suffix).grows_trees());
        assert!(!DraftOptions::new(DraftMode::Draft).grows_trees(), "short chains");
        let mut config = CacheConfig { max_step_tokens: 4, ..CacheConfig::new(64) };
        options.prepare(&mut config).unwrap();
        assert_eq!((config.max_rows, config.max_step_tokens), (8, 8));
        options.check_cache(8).unwrap();
        assert!(options.check_cache(7).unwrap_err().to_string().contains("holds 7 tokens"));
        config.keep = Some("recent=9".parse().unwrap());
        assert!(options.prepare(&mut config).unwrap_err().to_string().contains("leave one out"));
        let scheduler = Config { max_batch: 3, max_batch_tokens: 20, ..Config::default() };
        assert_eq!((step_draft_tokens(5, &scheduler), step_draft_tokens(9, &scheduler)), (15, 20));
    }
}
