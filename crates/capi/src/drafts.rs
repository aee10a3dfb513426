//! Drafts of sessions and batches: a drafter by name, and the draft model or head that it uses.
mod ffi;

pub(crate) use ffi::{counts_of, drafts_of, kvist_draft_options, kvist_speculation};

use crate::model::Model;
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::Error;
use kvist_engine::kvist_device::Registry;
use kvist_engine::kvist_model::{Opened, OpenedHead};
use kvist_engine::memory::CacheConfig;
use kvist_engine::speculate::{
    DraftMode, DraftOptions, DraftWeights, OpenedDraft, PlacedDraft, Speculator, check_vocabulary,
};
use std::path::PathBuf;
use std::sync::Arc;

/// What a session or a batch drafts with.
pub(crate) struct Drafts {
    pub options: DraftOptions,
    model: Option<Arc<Model>>,
    /// The folder of a head.
    head: Option<PathBuf>,
}

/// An error of the engine, which names the flags of the program: here they are fields of options.
pub(crate) fn named(error: Error) -> Failure {
    let failure = Failure::from(error);
    Failure { text: fields(&failure.text), ..failure }
}

fn fields(text: &str) -> String {
    // Only these: a path may have two hyphens, too.
    const NAMES: [(&str, &str); 6] = [
        ("more memory with --memory", "more memory_bytes"),
        ("--draft-", "draft_"),
        ("--context", "context_tokens"),
        ("--speculate", "speculate"),
        ("--kind", "kind"),
        ("--keep", "keep"),
    ];
    NAMES.iter().fold(text.into(), |text: String, (flag, field)| text.replace(flag, field))
}

impl Drafts {
    pub fn new(options: DraftOptions, model: Option<Arc<Model>>, head: Option<PathBuf>) -> Outcome<Self> {
        options.check().map_err(named)?;
        let mode = options.mode.name();
        let unused = |name: &str, of: &str| {
            Err(Failure::argument(format!(
                "{name}: speculate {mode} uses none: leave it out, or speculate {of}"
            )))
        };
        match options.mode {
            DraftMode::Ngram | DraftMode::Suffix | DraftMode::Eagle if model.is_some() => {
                unused("draft_model", "draft or auto")
            }
            DraftMode::Ngram | DraftMode::Suffix | DraftMode::Draft if head.is_some() => {
                unused("draft_head", "eagle or auto")
            }
            _ if model.is_some() && head.is_some() => {
                Err(Failure::argument("draft_model, draft_head: give one of both"))
            }
            _ => Ok(Drafts { options, model, head }),
        }
    }

    /// Adds to the cache of a session what drafts need, and a kind for trees if none was asked for.
    pub fn prepare(&self, config: &mut CacheConfig, has_kind: bool) -> Outcome<()> {
        self.options.prepare(config).map_err(named)?;
        self.options.check_cache(config.context_tokens).map_err(named)?;
        if !has_kind && self.options.grows_trees() {
            config.kind = "tree".into();
        }
        Ok(())
    }

    /// Makes the drafters, for `texts` texts at once in a cache of `config`, whose plan asks for `beside` bytes that are not
    /// reserved yet. Reads the weights of a head.
    pub fn speculator(
        self,
        target: &Model,
        config: &CacheConfig,
        texts: u32,
        beside: u64,
    ) -> Outcome<Speculator> {
        let (options, weights) = (self.options, &target.weights);
        if let Some(model) = &self.model {
            let vocabulary = |of: &Model| of.weights.config().vocab;
            check_vocabulary(
                (vocabulary(model), model.weights.tokenizer()),
                (vocabulary(target), weights.tokenizer()),
            )
            .map_err(|why| Failure::argument(format!("draft_model: {why}")))?;
            let (registry, backend) = (&model.registry, &model.backend[..]);
            let draft =
                PlacedDraft { weights: &DraftWeights::Model(model.weights.clone()), registry, backend };
            return options.speculator(Some(draft), weights, config, texts).map_err(named);
        }
        let registry = &target.registry;
        let Some(opened) = self.open(target)? else {
            return options.speculator(None, weights, config, texts).map_err(named);
        };
        let loaded = load(opened, &options, (target, registry), (config, texts), beside)?;
        let draft = PlacedDraft { weights: &loaded, registry, backend: &config.backend };
        options.speculator(Some(draft), weights, config, texts).map_err(named)
    }

    /// Opens a head, or what the embedded model has. `None` if `auto` is to do without.
    fn open(&self, target: &Model) -> Outcome<Option<OpenedDraft>> {
        let config = target.weights.config();
        if let Some(folder) = &self.head {
            let head = OpenedHead::open(folder, config, target.options.mmap)?;
            return Ok(Some(OpenedDraft::Head(Box::new(head))));
        }
        match self.options.mode {
            DraftMode::Draft if target.is_embedded => {
                Ok(Some(OpenedDraft::Model(Box::new(Opened::embedded_draft()?))))
            }
            DraftMode::Eagle if target.is_embedded => {
                Ok(Some(OpenedDraft::Head(Box::new(OpenedHead::embedded(config)?))))
            }
            DraftMode::Draft => Err(Failure::argument(
                "draft_model is null: speculate draft needs a smaller model with the same vocabulary",
            )),
            DraftMode::Eagle => Err(Failure::argument(
                "draft_head is null: speculate eagle needs a head that was trained for this model: give its folder, with \
                 config.json and safetensors",
            )),
            _ => Ok(None),
        }
    }
}

/// Loads a draft model or head in the memory of its target, if it fits there.
fn load(
    opened: OpenedDraft,
    options: &DraftOptions,
    (target, registry): (&Model, &Registry),
    (config, texts): (&CacheConfig, u32),
    beside: u64,
) -> Outcome<DraftWeights> {
    let needed = opened.bytes(options, target.options.format, registry, config, texts)?;
    let budget = target.weights.budget();
    let free = budget.free().saturating_sub(beside);
    if let Some(why) = OpenedDraft::lacks_room(needed, free, budget.total()) {
        return Err(Failure::new(kvist_status::KVIST_OUT_OF_MEMORY, fields(&why)));
    }
    let context = options.draft_cache(config, texts).context_tokens;
    Ok(opened.load(&target.weights, &target.place, &target.options, context)?)
}
