//! Many texts at once: the serving engine without HTTP.
use crate::arguments::{CacheDefaults, Options, Prompt, Wanted, cache_config, keep};
use crate::batch_generation::{BatchGeneration, failed};
use crate::errors::{Class, argument, engine, file};
use crate::model::Model;
use crate::retained::retention;
use crate::saved::PrefixArgument;
use crate::session::Beginning;
use crate::speculation::{self, Drafts};
use crate::tiers::{self, BatchTiers, Tiers};
use crate::wait::{PATIENCE, block_on, lock, ready_within};
use kvist_device::DeviceError;
use kvist_engine::frozen::EnginePrefix;
use kvist_engine::memory::step_tokens;
use kvist_engine::serving::{Engine, EngineConfig, Job, Rejected, ResizeError, Unserved};
use kvist_engine::speculate::step_draft_tokens;
use kvist_engine::text::Stops;
use kvist_scheduler::Retention;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A model that serves many texts at a time, in a thread of its own: continuous batching, chunked prefill, and a paged
/// cache whose prefix index shares equal beginnings. A context manager.
///
/// Args:
///     model: the model, whose weights are shared.
///     context: tokens that the cache holds, over all texts.
///     kv, kv_v, window, sinks, recent: as for `Model.session`.
///     max_batch, batch_tokens: sequences and tokens of the largest step, of which there are 512 unless given, and over CUDA 1024.
///     block_tokens: tokens of a block.
///     policy: order of the queue: fcfs, sjf, srpt, edf, laxity or priority.
///     prefix_cache: share equal beginnings of prompts.
///     max_queue: texts that may wait, at least 1. With more, `submit` raises `Busy`, and `generate` waits.
///     prefix: a `Prefix`, or its path, that is in the prefix index from the start, in whole blocks, and stays there. `kv` is then
///         that of the file unless given.
///     tiers: `Tiers` below the cache.
///     keep: which tokens stay of each text, as for `Model.session`. A text may be longer than the cache then. There is no prefix
///         index: texts share nothing. Not with `prefix` and `tiers`.
///
/// Raises:
///     OutOfMemory: the cache, or what the tiers take of memory, does not fit.
///     FileError: the prefix cannot be used, or the directory of a tier.
#[pyclass(frozen, module = "kvist")]
pub struct Batch {
    model: Arc<kvist_model::Model>,
    /// `None` once it is closed.
    running: Mutex<Option<Running>>,
}

struct Running {
    engine: Engine,
    tiers: Option<BatchTiers>,
    has_prefix_index: bool,
}

/// What a text asks of the batch beside its sampling.
#[derive(Default)]
struct Place {
    priority: i32,
    salt: Arc<str>,
    retain: Option<Retention>,
}

/// Tokens of the cache over all requests, unless given.
const CONTEXT: u32 = 8192;

/// The largest capacity in tokens, as for `kvist serve`.
const MAX_CONTEXT: i64 = (u32::MAX / 2) as i64;

/// The longest that `resize` may wait: a day.
const MAX_TIMEOUT_S: f64 = 86_400.0;

impl Batch {
    /// Calls `get` with the engine and the tiers, unless the batch is closed.
    fn with<T>(&self, get: impl FnOnce(&Running) -> T) -> PyResult<T> {
        let running = lock(&self.running);
        running.as_ref().map(get).ok_or_else(closed)
    }

    fn engine(&self) -> PyResult<Engine> {
        self.with(|running| running.engine.clone())
    }

    fn job(&self, prompt: Prompt, wanted: &Wanted, stop: Arc<Stops>) -> PyResult<Job> {
        let prompt = prompt.encode(&self.model, true)?;
        if prompt.is_empty() {
            return Err(engine(kvist_model::Error::EmptyPrompt));
        }
        let max_tokens = u32::try_from(wanted.limits.max_tokens).unwrap_or(u32::MAX);
        let Wanted { sampling, limits } = wanted;
        let (sampling, ignore_eos) = (*sampling, limits.ignore_eos);
        Ok(Job { sampling, stop, ignore_eos, ..Job::new(prompt, max_tokens) })
    }

    fn send(&self, prompt: Prompt, wanted: &Wanted, place: Place) -> PyResult<BatchGeneration> {
        let Place { priority, salt, retain } = place;
        let stop = Arc::new(Stops::new(&wanted.limits.stop));
        let job = Job { priority, salt, retain, ..self.job(prompt, wanted, stop)? };
        let n_prompt = job.prompt.len();
        let (engine, tiers) = self.with(|running| {
            (running.engine.clone(), running.tiers.as_ref().map(|tiers| tiers.names.clone()))
        })?;
        let handle = engine.submit(job).map_err(not_queued)?;
        Ok(BatchGeneration::new(handle, n_prompt, wanted.limits.max_tokens, tiers))
    }
}

fn closed() -> PyErr {
    Class::Error.with("the batch is closed")
}

fn not_queued(why: Rejected) -> PyErr {
    match why {
        Rejected::Full { .. } => Class::Busy.with(why.to_string()),
        Rejected::Draining => closed(),
    }
}

fn not_resized(before: u64, why: &ResizeError) -> PyErr {
    let class = match why {
        ResizeError::Ended => return closed(),
        ResizeError::Refused(_) | ResizeError::Prefix { .. } => Class::Refused,
        ResizeError::Device(DeviceError::OutOfBudget(_)) => Class::OutOfMemory,
        ResizeError::Device(_) => Class::Error,
    };
    class.with(format!("the cache keeps its {before} tokens: {why}"))
}

/// Tokens of the largest step, unless given, at least.
const BATCH_TOKENS: u32 = 512;

#[pymethods]
impl Batch {
    #[new]
    #[pyo3(signature = (model, *, max_batch=32, batch_tokens=None, block_tokens=16, policy="fcfs", prefix_cache=true, max_queue=4096, prefix=None, tiers=None, **options))]
    #[pyo3(
        text_signature = "(model, *, context=8192, kv='f16', kv_v=None, max_batch=32, batch_tokens=None, block_tokens=16, policy='fcfs', prefix_cache=True, max_queue=4096, prefix=None, tiers=None, keep=None, window=None, sinks=0, recent=16, speculate=None, draft_model=None, draft_tokens=16, draft_depth=None, draft_width=None)"
    )]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        py: Python<'_>,
        model: &Model,
        max_batch: u32,
        batch_tokens: Option<u32>,
        block_tokens: u32,
        policy: &str,
        prefix_cache: bool,
        max_queue: usize,
        prefix: Option<PrefixArgument<'_>>,
        tiers: Option<PyRef<'_, Tiers>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut options = Options::of("Batch", options)?;
        let keep = keep(&mut options)?;
        if keep.is_some() && (prefix.is_some() || tiers.is_some()) {
            return Err(argument(
                "`keep`: what it leaves of a text is in no index, prefix or tier: leave out `keep`, or `prefix` and `tiers`",
            ));
        }
        let drafts = Drafts::take(&mut options)?;
        if keep.is_some() && drafts.is_some() {
            return Err(argument(
                "`speculate`: drafts that are rejected would count in what `keep` keeps: leave one out",
            ));
        }
        let prefix = prefix.map(|prefix| prefix.get(py)).transpose()?;
        let mut defaults = CacheDefaults::new(CONTEXT).on(&model.backend);
        if let Some(prefix) = &prefix {
            defaults = defaults.of_file(&prefix.origin().cache, prefix.tokens().len());
        }
        let cache = cache_config(&mut options, "paged", &defaults)?;
        options.end()?;
        if block_tokens == 0 || max_batch == 0 || max_queue == 0 {
            return Err(argument("`block_tokens`, `max_batch` and `max_queue` must be at least 1"));
        }
        let mut config = EngineConfig::new(cache);
        config.paged.block_tokens = block_tokens;
        if !prefix_cache {
            config.paged.prefix = None;
        }
        config.scheduler.policy = policy.to_owned();
        let batch_tokens = batch_tokens.unwrap_or_else(|| step_tokens(&model.backend).max(BATCH_TOKENS));
        (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (max_batch, batch_tokens);
        config.scheduler.check().map_err(|why| argument(why.to_string()))?;
        config.max_queue = max_queue;
        if let Some(Drafts { options, .. }) = &drafts {
            options.check_cache(config.paged.cache.context_tokens).map_err(engine)?;
            config.max_draft_tokens = step_draft_tokens(options.tokens, &config.scheduler);
        }
        config.fit();
        if let Some(keep) = keep {
            config.keep_only(keep);
        }
        let (registry, tiers) = (model.registry(), tiers.map(|tiers| tiers.clone()));
        let running = py.detach(|| {
            if let Some(prefix) = prefix {
                let aligned = config.paged.block_aligned();
                let origin = model.origin.of(&model.model, &aligned).map_err(engine)?;
                Beginning::Prefix(prefix.clone()).check(&origin)?;
                config.prefix = Some(EnginePrefix { prefix, salt: "".into(), origin });
            }
            let tiers =
                tiers.map(|tiers| BatchTiers::open(&tiers, model, &registry, &mut config)).transpose()?;
            let has_prefix_index = config.paged.prefix.is_some();
            if let Some(drafts) = drafts {
                let plan = config.paged.plan(model.model.config(), &registry).map_err(engine)?;
                let (cache, beside) = (&config.paged.cache, plan.session_bound());
                let speculator = drafts.speculator(model, &registry, cache, max_batch, beside)?;
                config.speculator = Some(speculator);
            }
            let engine = Engine::start(model.model.clone(), &registry, config).map_err(file)?;
            Ok::<_, PyErr>(Running { engine, tiers, has_prefix_index })
        })?;
        Ok(Batch { model: model.model.clone(), running: Mutex::new(Some(running)) })
    }

    /// Queues a prompt and returns a `BatchGeneration` at once. The options are those of `Session.generate`, and:
    ///
    /// Args:
    ///     priority: larger is more urgent, with the policy "priority".
    ///     salt: only prompts with the same salt share cached beginnings; `forget` drops what a salt has.
    ///     cache: keeps the prompt in the cache after its text has ended, in whole blocks: a dict with `ttl_s`, seconds from then on
    ///         (an hour); `priority`, 0 to 255: a smaller one gives way first when room is short (0); `pin`: gives way last, and only to
    ///         a text that could not be generated otherwise (False).
    ///
    /// Raises:
    ///     Busy: as many texts wait as may.
    #[pyo3(signature = (prompt, *, priority=0, salt="", cache=None, **options))]
    #[pyo3(
        text_signature = "($self, prompt, *, priority=0, salt='', cache=None, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False)"
    )]
    fn submit(
        &self,
        prompt: Prompt,
        priority: i32,
        salt: &str,
        cache: Option<Bound<'_, PyDict>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<BatchGeneration> {
        let mut options = Options::of("submit", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        options.end()?;
        let retain = cache.map(|cache| retention(&cache)).transpose()?;
        if retain.is_some() && !self.with(|running| running.has_prefix_index)? {
            return Err(argument(
                "`cache` keeps prompts in the prefix index: leave `prefix_cache` on, and `keep` out",
            ));
        }
        self.send(prompt, &wanted, Place { priority, salt: salt.into(), retain })
    }

    /// Generates the texts of all prompts, any number of them, and returns them in the order of the prompts. If one fails, so do all.
    #[pyo3(signature = (prompts, **options))]
    #[pyo3(
        text_signature = "($self, prompts, *, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False)"
    )]
    fn generate(
        &self,
        py: Python<'_>,
        prompts: Vec<Prompt>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Vec<String>> {
        let mut options = Options::of("generate", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        options.end()?;
        let stop = Arc::new(Stops::new(&wanted.limits.stop));
        let jobs = prompts.into_iter().map(|prompt| self.job(prompt, &wanted, stop.clone()));
        let jobs = jobs.collect::<PyResult<Vec<_>>>()?;
        let engine = self.engine()?;
        block_on(py, engine.generate_all(jobs))?.map_err(|why| match why {
            Unserved::Rejected(why) => not_queued(why),
            Unserved::Failed(failure) => failed(&failure),
        })
    }

    /// Counters, and occupancy in cells, at the end of the last step; hits are those of recent prompts. With tiers, `tiers` has
    /// what they did, and in `stores` the figures of each. With `keep` there is `removed_tokens`, and with `speculate` `speculation`, as
    /// `Session.speculation` has it.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.engine()?.stats();
        let dict = PyDict::new(py);
        dict.set_item("running", stats.running)?;
        dict.set_item("waiting", stats.waiting)?;
        dict.set_item("capacity_cells", stats.capacity_cells)?;
        dict.set_item("used_cells", stats.used_cells)?;
        dict.set_item("evictable_cells", stats.evictable_cells)?;
        dict.set_item("free_cells", stats.free_cells)?;
        dict.set_item("stored_blocks", stats.stored_blocks)?;
        dict.set_item("evicted_blocks", stats.evicted_blocks)?;
        dict.set_item("retained_tokens", stats.retained_tokens)?;
        dict.set_item("recent_hit_tokens", stats.recent_hits.hit_tokens)?;
        dict.set_item("recent_prompt_tokens", stats.recent_hits.prompt_tokens)?;
        dict.set_item("kv_bytes", stats.kv_bytes)?;
        dict.set_item("kv_bytes_read", stats.kv_bytes_read)?;
        dict.set_item("busy_s", stats.busy_ns as f64 / 1e9)?;
        if let Some(removed) = stats.removed_tokens {
            dict.set_item("removed_tokens", removed)?;
        }
        if let Some(counts) = &stats.speculation {
            dict.set_item("speculation", speculation::counts(py, counts)?)?;
        }
        if let Some(tiers) = &stats.tiers {
            dict.set_item("tiers", tiers::stats(py, tiers)?)?;
        }
        Ok(dict)
    }

    /// Drops what the cache has of prompts under a salt, kept ones too, as `DELETE /v1/cache` of `kvist serve` does. Blocks that texts use
    /// now stay until they are evicted. What tiers have is not found any more: by this batch at once, and by others when they
    /// read the note that each tier gets. Waits for these notes, two seconds at most.
    ///
    /// Returns:
    ///     dict: `deleted_blocks`, and in `pending_tiers` the names of tiers that have not got their note yet. They get it when they work
    ///         again, unless the batch is closed first; then other batches find what such a tier has.
    #[pyo3(signature = (salt=""))]
    fn forget<'py>(&self, py: Python<'py>, salt: &str) -> PyResult<Bound<'py, PyDict>> {
        let engine = self.engine()?;
        let forgotten = block_on(py, engine.forget(salt))?.ok_or_else(closed)?;
        let dict = PyDict::new(py);
        dict.set_item("deleted_blocks", forgotten.blocks)?;
        dict.set_item("pending_tiers", forgotten.untold)?;
        Ok(dict)
    }

    /// Gives the cache room for another number of tokens, between two steps. Texts that run go on and stay the same: what a smaller
    /// cache has no room for is evicted, or computed again. After Ctrl-C the cache may have either capacity.
    ///
    /// Args:
    ///     tokens: over all texts; rounded up to whole blocks.
    ///     timeout: seconds that copies to and from tiers may take to end.
    ///
    /// Returns:
    ///     int: the new capacity in tokens.
    ///
    /// Raises:
    ///     Refused: a text that waits or runs needs more, or copies took too long. The capacity stays what it was.
    ///     OutOfMemory: the model's memory has no room for it.
    #[pyo3(signature = (tokens, *, timeout=30.0))]
    fn resize(&self, py: Python<'_>, tokens: i64, timeout: f64) -> PyResult<u64> {
        if !(1..=MAX_CONTEXT).contains(&tokens) {
            return Err(argument(format!("`tokens`: {tokens} is not a number from 1 to {MAX_CONTEXT}")));
        }
        if !(0.0..=MAX_TIMEOUT_S).contains(&timeout) {
            return Err(argument(format!(
                "`timeout`: {timeout} is not a time from 0 to {MAX_TIMEOUT_S} seconds"
            )));
        }
        let engine = self.engine()?;
        let before = engine.capacity_tokens();
        let resized = block_on(py, engine.resize(tokens as u32, Duration::from_secs_f64(timeout)))?;
        resized.map_err(|why| not_resized(before, &why))
    }

    /// Cancels what runs, ends the thread, and writes what is on its way to the tiers, for two seconds at most. Their directory is
    /// free then. Can be called again.
    fn close(&self, py: Python<'_>) {
        let Some(Running { engine, tiers, .. }) = lock(&self.running).take() else { return };
        py.detach(|| {
            engine.drain();
            engine.cancel_all();
            if let Some(tiers) = &tiers {
                tiers.flush(&engine);
            }
            engine.stop();
            // Generations that were not closed have the engine too.
            while ready_within(PATIENCE, engine.until_ended()).is_none() {}
            drop(engine);
            if let Some(tiers) = tiers {
                tiers.close();
            }
        });
    }
    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }
    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }
}
