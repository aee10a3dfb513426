//! Many texts at once: the serving engine without HTTP.
use crate::arguments::{CacheDefaults, Options, Prompt, Wanted, cache_config};
use crate::errors::{Class, argument, engine, file};
use crate::model::Model;
use crate::saved::PrefixArgument;
use crate::session::Beginning;
use crate::tiers::{self, BatchTiers, Tiers};
use crate::wait::{PATIENCE, exclusive, lock, ready_within};
use kvist_engine::frozen::EnginePrefix;
use kvist_engine::serving::{
    Done, Engine, EngineConfig, Event, Failure, FinishReason, GenerationHandle, Job, Rejected,
};
use kvist_engine::text::Stops;
use kvist_scheduler::MAX_TIERS;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

/// A model that serves many texts at a time, in a thread of its own: continuous batching, chunked prefill, and a paged
/// cache whose prefix index shares equal beginnings. A context manager.
///
/// Args:
///     model: the model, whose weights are shared.
///     context: tokens that the cache holds, over all texts.
///     kv, kv_v, window, sinks, recent: as for `Model.session`.
///     max_batch, batch_tokens: sequences and tokens of the largest step.
///     block_tokens: tokens of a block.
///     policy: order of the queue: fcfs, sjf, srpt, edf, laxity or priority.
///     prefix_cache: share equal beginnings of prompts.
///     max_queue: texts that may wait; more raise `Busy`.
///     prefix: a `Prefix`, or its path, that is in the prefix index from the start, in whole blocks, and stays there. `kv` is then
///         that of the file unless given.
///     tiers: `Tiers` below the cache.
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
}

/// Tokens of the cache over all requests, unless given.
const CONTEXT: u32 = 8192;

impl Batch {
    /// The engine, and the names of the tiers.
    fn engine(&self) -> PyResult<(Engine, Option<Arc<[String]>>)> {
        let running = lock(&self.running);
        let running = running.as_ref().ok_or_else(|| Class::Error.with("the batch is closed"))?;
        Ok((running.engine.clone(), running.tiers.as_ref().map(|tiers| tiers.names.clone())))
    }

    fn send(&self, prompt: Prompt, wanted: &Wanted, priority: i32) -> PyResult<BatchGeneration> {
        let prompt = prompt.encode(&self.model, true)?;
        if prompt.is_empty() {
            return Err(engine(kvist_model::Error::EmptyPrompt));
        }
        let n_prompt = prompt.len();
        let job = Job {
            sampling: wanted.sampling,
            stop: Arc::new(Stops::new(&wanted.limits.stop)),
            ignore_eos: wanted.limits.ignore_eos,
            priority,
            ..Job::new(prompt, u32::try_from(wanted.limits.max_tokens).unwrap_or(u32::MAX))
        };
        let (engine, tiers) = self.engine()?;
        let handle = engine.submit(job).map_err(|why| match why {
            Rejected::Full { .. } => Class::Busy.with(why.to_string()),
            Rejected::Draining => Class::Error.with("the batch is closed"),
        })?;
        let inner = Inner {
            handle: Some(handle),
            text: String::new(),
            tokens: Vec::new(),
            cached: 0,
            loaded: [0; MAX_TIERS],
            end: None,
        };
        Ok(BatchGeneration {
            inner: Mutex::new(inner),
            closed: AtomicBool::new(false),
            n_prompt,
            tiers,
            max_tokens: wanted.limits.max_tokens,
        })
    }
}

#[pymethods]
impl Batch {
    #[new]
    #[pyo3(signature = (model, *, max_batch=32, batch_tokens=512, block_tokens=16, policy="fcfs", prefix_cache=true, max_queue=4096, prefix=None, tiers=None, **options))]
    #[pyo3(
        text_signature = "(model, *, context=8192, kv='f16', kv_v=None, max_batch=32, batch_tokens=512, block_tokens=16, policy='fcfs', prefix_cache=True, max_queue=4096, prefix=None, tiers=None, window=None, sinks=0, recent=16)"
    )]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    fn new(
        py: Python<'_>,
        model: &Model,
        max_batch: u32,
        batch_tokens: u32,
        block_tokens: u32,
        policy: &str,
        prefix_cache: bool,
        max_queue: usize,
        prefix: Option<PrefixArgument<'_>>,
        tiers: Option<PyRef<'_, Tiers>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut options = Options::of("Batch", options)?;
        let prefix = prefix.map(|prefix| prefix.get(py)).transpose()?;
        let mut defaults = CacheDefaults::new(CONTEXT);
        if let Some(prefix) = &prefix {
            defaults = defaults.of_file(&prefix.origin().cache, prefix.tokens().len());
        }
        let cache = cache_config(&mut options, "paged", &defaults)?;
        options.end()?;
        if block_tokens == 0 || max_batch == 0 {
            return Err(argument("`block_tokens` and `max_batch` must be at least 1"));
        }
        let mut config = EngineConfig::new(cache);
        config.paged.block_tokens = block_tokens;
        if !prefix_cache {
            config.paged.prefix = None;
        }
        config.scheduler.policy = policy.to_owned();
        (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (max_batch, batch_tokens);
        config.scheduler.check().map_err(|why| argument(why.to_string()))?;
        config.max_queue = max_queue;
        config.fit();
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
            let engine = Engine::start(model.model.clone(), &registry, config).map_err(file)?;
            Ok::<_, PyErr>(Running { engine, tiers })
        })?;
        Ok(Batch { model: model.model.clone(), running: Mutex::new(Some(running)) })
    }

    /// Queues a prompt and returns a `BatchGeneration` at once. The options are those of `Session.generate`; a larger
    /// `priority` is more urgent, with the policy "priority".
    #[pyo3(signature = (prompt, *, priority=0, **options))]
    #[pyo3(
        text_signature = "($self, prompt, *, priority=0, max_tokens=256, temperature=None, top_k=None, top_p=None, min_p=None, repeat_penalty=None, repeat_last=None, seed=None, stop=(), ignore_eos=False)"
    )]
    fn submit(
        &self,
        prompt: Prompt,
        priority: i32,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<BatchGeneration> {
        let mut options = Options::of("submit", options)?;
        let wanted = Wanted::take(&mut options, &self.model)?;
        options.end()?;
        self.send(prompt, &wanted, priority)
    }

    /// Generates the texts of all prompts, and returns them in the order of the prompts.
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
        let sent = prompts.into_iter().map(|prompt| self.send(prompt, &wanted, 0));
        let sent = sent.collect::<PyResult<Vec<_>>>()?;
        sent.iter().map(|generation| generation.result(py)).collect()
    }

    /// Counters, and occupancy in cells, at the end of the last step; hits are those of recent prompts. With tiers, `tiers` has
    /// what they did, and in `stores` the figures of each.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.engine()?.0.stats();
        let dict = PyDict::new(py);
        dict.set_item("running", stats.running)?;
        dict.set_item("waiting", stats.waiting)?;
        dict.set_item("capacity_cells", stats.capacity_cells)?;
        dict.set_item("used_cells", stats.used_cells)?;
        dict.set_item("evictable_cells", stats.evictable_cells)?;
        dict.set_item("free_cells", stats.free_cells)?;
        dict.set_item("stored_blocks", stats.stored_blocks)?;
        dict.set_item("evicted_blocks", stats.evicted_blocks)?;
        dict.set_item("recent_hit_tokens", stats.recent_hits.hit_tokens)?;
        dict.set_item("recent_prompt_tokens", stats.recent_hits.prompt_tokens)?;
        dict.set_item("kv_bytes", stats.kv_bytes)?;
        dict.set_item("kv_bytes_read", stats.kv_bytes_read)?;
        dict.set_item("busy_s", stats.busy_ns as f64 / 1e9)?;
        if let Some(tiers) = &stats.tiers {
            dict.set_item("tiers", tiers::stats(py, tiers)?)?;
        }
        Ok(dict)
    }

    /// Cancels what runs, ends the thread, and writes what is on its way to the tiers, for two seconds at most. Their directory is
    /// free then. Can be called again.
    fn close(&self, py: Python<'_>) {
        let Some(Running { engine, tiers }) = lock(&self.running).take() else { return };
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

/// The pieces of a text that a batch generates.
#[pyclass(frozen, module = "kvist")]
pub struct BatchGeneration {
    inner: Mutex<Inner>,
    closed: AtomicBool,
    n_prompt: usize,
    /// Their names, the fastest first.
    tiers: Option<Arc<[String]>>,
    max_tokens: usize,
}

struct Inner {
    /// `None` once the text has ended or was closed; dropping it cancels the job.
    handle: Option<GenerationHandle>,
    text: String,
    tokens: Vec<u32>,
    cached: u32,
    /// By tier.
    loaded: [u32; MAX_TIERS],
    end: Option<Result<FinishReason, Failure>>,
}

const GENERATION: &str = "generation";

fn failed(failure: &Failure) -> PyErr {
    match failure {
        Failure::NeverFits { .. } | Failure::UnknownToken { .. } => argument(failure.to_string()),
        other => Class::Error.with(other.to_string()),
    }
}

impl BatchGeneration {
    /// The next piece; `None` at the end.
    fn next_piece(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            py.check_signals()?;
            let piece = py.detach(|| self.wait())?;
            if let Some(piece) = piece {
                return Ok(Some(piece).filter(|piece| !piece.is_empty()));
            }
        }
    }

    /// Waits for a while: a piece, an empty one at the end, `None` if there is none yet.
    fn wait(&self) -> PyResult<Option<String>> {
        let mut inner = exclusive(GENERATION, &self.inner)?;
        let inner = &mut *inner;
        loop {
            if self.closed.load(SeqCst) {
                inner.handle = None;
            }
            let Some(handle) = &mut inner.handle else {
                return match &inner.end {
                    Some(Err(failure)) => Err(failed(failure)),
                    _ => Ok(Some(String::new())),
                };
            };
            let Some(event) = ready_within(PATIENCE, handle.next()) else { return Ok(None) };
            let piece = match event {
                Some(Event::Admitted { cached_tokens, loaded_tokens, .. }) => {
                    (inner.cached, inner.loaded) = (cached_tokens, loaded_tokens);
                    continue;
                }
                Some(Event::Prompt(_)) => continue,
                Some(Event::Token(token)) => {
                    inner.tokens.push(token.id);
                    token.text
                }
                Some(Event::Done(Done { finish, text, .. })) => {
                    (inner.handle, inner.end) = (None, Some(Ok(finish)));
                    text
                }
                Some(Event::Failed(failure)) => {
                    (inner.handle, inner.end) = (None, Some(Err(failure)));
                    continue;
                }
                None => {
                    (inner.handle, inner.end) = (None, Some(Ok(FinishReason::Cancelled)));
                    continue;
                }
            };
            inner.text += &piece;
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
    }
}

#[pymethods]
impl BatchGeneration {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.next_piece(py)
    }
    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }
    fn __anext__<'py>(this: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        this.py().import("kvist._asynchronous")?.call_method1("next_piece", (this,))
    }
    fn _next(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.next_piece(py)
    }

    /// Waits for the rest and returns the whole text.
    fn result(&self, py: Python<'_>) -> PyResult<String> {
        while self.next_piece(py)?.is_some() {}
        self.text()
    }

    /// Cancels the generation: its memory is free before the next step.
    fn close(&self) {
        self.closed.store(true, SeqCst);
        if let Ok(mut inner) = self.inner.try_lock() {
            inner.handle = None;
        } // else the thread that waits drops it
    }

    /// The text so far.
    #[getter]
    fn text(&self) -> PyResult<String> {
        Ok(exclusive(GENERATION, &self.inner)?.text.clone())
    }
    /// The generated token ids so far.
    #[getter]
    fn tokens(&self) -> PyResult<Vec<u32>> {
        Ok(exclusive(GENERATION, &self.inner)?.tokens.clone())
    }
    /// Tokens of the prompt.
    #[getter]
    fn prompt_tokens(&self) -> usize {
        self.n_prompt
    }
    /// Tokens of the prompt that the prefix index or a tier had.
    #[getter]
    fn cached_tokens(&self) -> PyResult<u32> {
        Ok(exclusive(GENERATION, &self.inner)?.cached)
    }
    /// Those of them that came from each tier, by its name: `ram`, `disk`, `redis`, `s3` or `fs`. Empty without tiers.
    #[getter]
    fn loaded_tokens(&self) -> PyResult<BTreeMap<String, u32>> {
        let loaded = exclusive(GENERATION, &self.inner)?.loaded;
        Ok(self.tiers.iter().flat_map(|names| names.iter().cloned()).zip(loaded).collect())
    }
    /// Why the text has ended; `None` while it goes on.
    #[getter]
    fn finish_reason(&self) -> PyResult<Option<&'static str>> {
        let inner = exclusive(GENERATION, &self.inner)?;
        Ok(match &inner.end {
            Some(Ok(FinishReason::EndOfText)) => Some("end_of_text"),
            Some(Ok(FinishReason::Stop(_))) => Some("stop"),
            Some(Ok(FinishReason::Length)) if inner.tokens.len() >= self.max_tokens => Some("max_tokens"),
            Some(Ok(FinishReason::Length)) => Some("cache_full"),
            Some(Ok(FinishReason::Cancelled | FinishReason::Deadline)) => Some("cancelled"),
            Some(Err(_)) => Some("failed"),
            None if inner.handle.is_none() => Some("cancelled"),
            None => None,
        })
    }
}
