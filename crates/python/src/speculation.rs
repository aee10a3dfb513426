//! Drafts: the arguments of sessions and batches, the draft model, and what speculation has achieved.
use crate::arguments::{Options, from_json};
use crate::errors::{Class, argument, engine};
use crate::loading::{Loading, find};
use crate::model::Model;
use kvist_device::Registry;
use kvist_engine::devices::Place;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::speculate::{
    Counts, DraftMode, DraftOptions, DraftWeights, OpenedDraft, PlacedDraft, Speculator, check_vocabulary,
};
use kvist_hub::Name;
use kvist_model::{LoadOptions, ModelFile, Opened, OpenedHead};
use pyo3::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// `draft_model`: a model, or where one is.
#[derive(FromPyObject)]
enum DraftArgument<'py> {
    Model(PyRef<'py, Model>),
    Path(PathBuf),
}

enum DraftModel {
    /// Loaded already, perhaps on another device than its target, in a budget of its own.
    Loaded {
        model: Arc<kvist_model::Model>,
        place: Place,
        backend: String,
    },
    Path(PathBuf),
}

/// What a session or a batch drafts with.
pub struct Drafts {
    pub options: DraftOptions,
    draft: Option<DraftModel>,
}

/// The arguments of drafts, besides `speculate`.
const OTHERS: [&str; 4] = ["draft_model", "draft_tokens", "draft_depth", "draft_width"];

impl Drafts {
    /// Takes the arguments. `None` if nothing is drafted.
    pub fn take(options: &mut Options<'_>) -> PyResult<Option<Self>> {
        let mode: Option<String> = options.take("speculate")?;
        let draft: Option<DraftArgument<'_>> = options.take(OTHERS[0])?;
        let [tokens, depth, width] =
            [options.take(OTHERS[1])?, options.take(OTHERS[2])?, options.take(OTHERS[3])?];
        let Some(mode) = mode.filter(|mode| mode != "off") else {
            let given = [draft.is_some(), tokens.is_some(), depth.is_some(), width.is_some()];
            return match OTHERS.iter().zip(given).find(|(_, is_given)| *is_given) {
                Some((name, _)) => Err(argument(format!(
                    "`{name}`: nothing is drafted: give `speculate` too, such as \"auto\", or leave it out"
                ))),
                None => Ok(None),
            };
        };
        let mode: DraftMode = mode.parse().map_err(|why| argument(format!("`speculate`: {why}")))?;
        if draft.is_some() && !mode.takes_draft() {
            return Err(argument(format!(
                "`draft_model`: {} uses none: leave it out, or give `speculate` \"draft\", \"eagle\" or \"auto\"",
                mode.name()
            )));
        }
        let new = DraftOptions::new(mode);
        let options = DraftOptions { tokens: tokens.unwrap_or(new.tokens), depth, width, ..new };
        options.check().map_err(engine)?;
        let draft = draft.map(|draft| match draft {
            DraftArgument::Path(path) => DraftModel::Path(path),
            DraftArgument::Model(model) => {
                let Model { model, place, backend, .. } = &*model;
                DraftModel::Loaded { model: model.clone(), place: place.clone(), backend: backend.clone() }
            }
        });
        Ok(Some(Drafts { options, draft }))
    }

    /// Adds to the cache of a session what drafts need. `context`: tokens of the cache, if they do not follow from a prompt.
    pub fn prepare(&self, config: &mut CacheConfig, context: Option<u32>) -> PyResult<()> {
        self.options.prepare(config).map_err(engine)?;
        context.map_or(Ok(()), |context| self.options.check_cache(context)).map_err(engine)
    }

    /// Makes the drafters, for `texts` texts at once in a cache of `config`, whose plan asks for `beside` bytes that are not
    /// reserved yet. Reads the weights of a draft model that is given by its path.
    pub fn speculator(
        self,
        target: &Model,
        registry: &Registry,
        config: &CacheConfig,
        texts: u32,
        beside: u64,
    ) -> PyResult<Speculator> {
        let options = self.options;
        let made = |draft: Option<PlacedDraft<'_>>| {
            options.speculator(draft, &target.model, config, texts).map_err(engine)
        };
        match self.draft {
            Some(DraftModel::Loaded { model, place, backend }) => {
                if options.mode == DraftMode::Eagle {
                    return Err(argument(
                        "`draft_model`: eagle needs a head that was trained for this model: give its folder, with \
                         config.json and safetensors",
                    ));
                }
                let (theirs, ours) = (&*model, &*target.model);
                let (theirs, ours) =
                    ((theirs.config().vocab, theirs.tokenizer()), (ours.config().vocab, ours.tokenizer()));
                check_vocabulary(theirs, ours)
                    .map_err(|why| argument(format!("`draft_model` {}: {why}", model.name())))?;
                let weights = &DraftWeights::Model(model);
                made(Some(PlacedDraft { weights, registry: &place.registry(), backend: &backend }))
            }
            draft => {
                let path = draft
                    .and_then(|draft| if let DraftModel::Path(path) = draft { Some(path) } else { None });
                let Some(opened) = open(options.mode, path.as_deref(), target)? else { return made(None) };
                let context = options.draft_cache(config, texts).context_tokens;
                let weights = load(opened, &options, (target, registry), (config, texts, context), beside)?;
                made(Some(PlacedDraft { weights: &weights, registry, backend: &config.backend }))
            }
        }
    }

    /// As [`speculator`](Self::speculator), for a session.
    pub fn of_session(
        self,
        model: &Model,
        registry: &Registry,
        config: &CacheConfig,
    ) -> PyResult<Speculator> {
        let plan = MemoryPlan::of_session(model.model.config(), registry, config).map_err(engine)?;
        self.speculator(model, registry, config, 1, plan.session_bound())
    }
}

/// Opens a draft model or head, and refuses one that does not fit before weights are read. `None` if `auto` is to do without.
fn open(mode: DraftMode, path: Option<&Path>, target: &Model) -> PyResult<Option<OpenedDraft>> {
    let Loading { mmap, offline, is_embedded, .. } = target.loading;
    let Some(path) = path else {
        return match mode {
            DraftMode::Draft if is_embedded => {
                let opened = Opened::embedded_draft().map_err(engine)?;
                Ok(Some(OpenedDraft::Model(Box::new(opened))))
            }
            DraftMode::Eagle if is_embedded => {
                let head = OpenedHead::embedded(target.model.config()).map_err(engine)?;
                Ok(Some(OpenedDraft::Head(Box::new(head))))
            }
            DraftMode::Draft => Err(argument(
                "`speculate`: draft needs a smaller model with the same vocabulary: give it as `draft_model`",
            )),
            DraftMode::Eagle => Err(argument(
                "`speculate`: eagle needs a head that was trained for this model: give its folder, with config.json and \
                 safetensors, as `draft_model`",
            )),
            _ => Ok(None),
        };
    };
    let shown = path.display();
    let is_head = OpenedHead::is_head(path);
    if mode == DraftMode::Draft && is_head {
        return Err(argument(format!(
            "`draft_model` {shown}: this is a head that reads another model's hidden states: use it with `speculate` \"eagle\""
        )));
    }
    if mode == DraftMode::Eagle || is_head {
        if !matches!(Name::parse(path), Ok(Name::Path(_))) {
            return Err(argument(format!(
                "`draft_model` {shown}: heads are not downloaded by name: give a folder with config.json and safetensors"
            )));
        }
        let head = OpenedHead::open(path, target.model.config(), mmap).map_err(engine)?;
        return Ok(Some(OpenedDraft::Head(Box::new(head))));
    }
    let found = find(path, offline)?.path;
    let opened = Opened::open(&ModelFile::Path(found), mmap).map_err(engine)?;
    OpenedDraft::model(opened, &target.model)
        .map(Some)
        .map_err(|why| argument(format!("`draft_model` {shown}: {why}")))
}

/// Loads a draft model or head for `texts` texts beside a cache of `config`, in the memory of its target, if all of it fits.
fn load(
    opened: OpenedDraft,
    options: &DraftOptions,
    (target, registry): (&Model, &Registry),
    (config, texts, context): (&CacheConfig, u32, u32),
    beside: u64,
) -> PyResult<DraftWeights> {
    let Loading { format, mmap, .. } = target.loading;
    let needed = opened.bytes(options, format, registry, config, texts).map_err(engine)?;
    let budget = target.model.budget();
    let free = budget.free().saturating_sub(beside);
    if let Some(why) = OpenedDraft::lacks_room(needed, free, budget.total()) {
        return Err(Class::OutOfMemory.with(why));
    }
    let loading = LoadOptions { format, mmap, ..LoadOptions::default() };
    opened.load(&target.model, &target.place, &loading, context).map_err(engine)
}

/// What speculation has achieved, as a dict.
pub fn counts<'py>(py: Python<'py>, counts: &Counts) -> PyResult<Bound<'py, PyAny>> {
    let json = serde_json::to_string(counts).map_err(|why| Class::Error.with(why.to_string()))?;
    from_json(py, &json)
}
