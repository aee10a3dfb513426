//! The serving engine: one thread runs a model for many requests at a time, with continuous batching and a shared
//! prefix cache.
//!
//! [`Engine`] is the handle: jobs go in, events come back. [`Engine::submit`] takes a [`Job`] and returns a
//! [`GenerationHandle`], which receives the [`Event`]s; dropping it cancels the job. A separate thread owns the
//! scheduler, the cache and the KV memory. Only [`GenerationHandle::blocking_next`] blocks on it; the `async` functions
//! need no particular runtime.
//!
//! ```
//! use kvist_device::MemoryBudget;
//! use kvist_engine::devices::{self, Cpu};
//! use kvist_engine::memory::CacheConfig;
//! use kvist_engine::serving::{Engine, EngineConfig, Event, Job};
//! use kvist_model::{LoadOptions, Model, ModelFile};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let budget = MemoryBudget::unlimited();
//! let options = LoadOptions::default();
//! let model = Model::load(&ModelFile::Embedded, Cpu::default(), &options, &budget, &mut |_, _| {})?;
//! let tokenizer = model.tokenizer().ok_or("the embedded model has a tokenizer")?;
//! let prompt = tokenizer.encode("The borrow checker", true)?;
//! let config = EngineConfig::new(CacheConfig::new(1024)); // room for 1,024 tokens, over all requests
//! let engine = Engine::start(Arc::new(model), &devices::all(), config)?;
//!
//! let mut generation = engine.submit(Job::new(prompt, 16))?;
//! let mut text = String::new();
//! while let Some(event) = generation.blocking_next() {
//!     match event {
//!         Event::Token(token) => text += &token.text,
//!         Event::Done(done) => text += &done.text,
//!         Event::Failed(failure) => return Err(failure.into()),
//!         Event::Admitted { .. } | Event::Prompt(_) => {}
//!     }
//! }
//! assert!(!text.is_empty());
//! # Ok(())
//! # }
//! ```
mod below;
mod blocks;
mod config;
mod forget;
mod handle;
mod imports;
mod job;
mod many;
mod quota;
mod request;
mod resize;
pub(crate) mod thread;
pub(crate) mod tiers;
mod wait;

use crate::Error;
use crate::executor::ModelExecutor;
use crate::frozen::{self, IndexedPrefix};
use crate::speculate::Counts;
pub use below::BlocksBelow;
pub use blocks::TextBlocks;
pub use config::EngineConfig;
pub use forget::Forgotten;
use handle::UnreadEvents;
pub use handle::{Canceller, GenerationHandle};
use imports::Imports;
pub use imports::{Begun, ImportId};
pub use job::*;
use kvist_cache::StepPlan;
use kvist_cache::kinds::Visibility;
use kvist_device::{Purpose, Registry};
use kvist_model::Model;
use kvist_scheduler::{Ended, RequestId, Scheduler, SchedulerCounters};
pub use many::Unserved;
pub use quota::{QuotaFull, QuotaPermit, TenantQuota};
pub use resize::ResizeError;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};
use thread::{Arrival, Command, Thread};
pub use tiers::{
    LoadRule, OpenTiers, PackedStore, StoreStats, TellTier, TierBlock, TierConfig, TierEvent, TierOptions,
    TierStats, TierStore, WriteTime, check_shared_store, fingerprint, open_shared_store, store_runtime,
};
use tokio::sync::{mpsc, watch};
pub use wait::ready_within;

/// Observes the scheduler and the cache after every step. Runs on the engine thread, so it must be fast.
pub trait Watcher: Send {
    /// A job was queued under this id and name. [`Watcher::ended`] follows, possibly after some steps.
    fn arrived(&mut self, id: RequestId, name: &JobName) {
        let _ = (id, name);
    }
    /// A request ended, either in the step that the next [`Watcher::stepped`] reports, or between two steps.
    fn ended(&mut self, ended: &Ended) {
        let _ = ended;
    }
    /// A step ran from `now_ns` to `end_ns` on the engine's clock, or there was nothing to compute at `now_ns`.
    fn stepped(&mut self, now_ns: u64, end_ns: u64, state: &mut EngineState);
}

/// The scheduler and the executor of the engine thread. Watchers and [`Engine::inspect`] access them between steps.
pub struct EngineState {
    pub scheduler: Scheduler,
    pub executor: ModelExecutor,
    started: Instant,
    imports: Imports,
    /// Keeps the blocks of a frozen prefix from being evicted.
    prefix: Option<IndexedPrefix>,
}

impl EngineState {
    /// The engine's clock: nanoseconds since the engine started.
    pub fn now_ns(&self) -> u64 {
        self.ns_of(Instant::now())
    }

    /// Tells what the tiers have of this salt's blocks, as it changes, from now on; blocks that are stored and not cached now are told
    /// once they are cached again. A block is told after [watchers](Watcher) were called that hear of it from the cache. One at a time
    /// hears it. Returns the names of the tiers' stores, the fastest first: none without
    /// tiers.
    pub fn watch_tiers(&mut self, salt: &str, tell: TellTier) -> Vec<String> {
        self.executor.watch_tiers(salt, tell)
    }

    fn ns_of(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.started).as_nanos()).unwrap_or(u64::MAX)
    }

    fn instant_of(&self, ns: u64) -> Instant {
        self.started + Duration::from_nanos(ns)
    }
}

/// KV memory by the memory plan, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvBytes {
    /// K and V of one token, in all layers.
    pub per_token: u64,
    /// The most that K and V ever take.
    pub bound: u64,
}

/// Counters since the start, and cache occupancy at the end of the last step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStats {
    pub running: usize,
    pub waiting: usize,
    pub counters: SchedulerCounters,
    /// KV cells of the layer group in which the scheduler counts capacity.
    pub capacity_cells: u64,
    pub used_cells: u64,
    /// Cells that are cached in the prefix index and that no request references.
    pub evictable_cells: u64,
    pub free_cells: u64,
    /// Blocks that the prefix index stored, and blocks that were evicted from it.
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
    /// Hit rates of the most recent prefix lookups.
    pub recent_hits: kvist_cache::HitCounts,
    /// Bytes reserved for KV.
    pub kv_bytes: u64,
    /// KV bytes, as stored, that attention has read.
    pub kv_bytes_read: u64,
    /// Nanoseconds spent in steps.
    pub busy_ns: u64,
    /// What speculation has achieved; `None` without it. There is an entry for each position that a draft can have.
    pub speculation: Option<Counts>,
    /// Tokens of prompts that jobs asked to keep ([`Job::retain`]).
    pub retained_tokens: u64,
    /// What the tiers below the cache did; `None` without them.
    pub tiers: Option<TierStats>,
    /// Tokens removed to [keep only some](EngineConfig::keep_only) of each request; `None` if nothing is removed.
    pub removed_tokens: Option<u64>,
}

/// A handle on the engine thread. Cheap to clone. When the last handle is dropped, the thread ends.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    model: Arc<Model>,
    commands: Sender<Command>,
    next_id: AtomicU64,
    /// Permits of waiting jobs: reserved or submitted, and neither admitted nor ended.
    queue: TenantQuota,
    /// Requests that were rejected because the queue was full. Further answers of a running request do not count.
    rejected: AtomicU64,
    draining: AtomicBool,
    stats: Mutex<EngineStats>,
    /// Jobs that have not ended.
    live: watch::Sender<usize>,
    /// Closed when the thread has ended.
    is_gone: watch::Receiver<()>,
    capacity_tokens: AtomicU64,
    kv_bytes: KvBytes,
    /// They write and fail while the engine sleeps, so its published statistics do not have them.
    tier_stores: Option<Arc<tiers::Stores>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The thread may have ended already.
        let _ = self.commands.send(Command::Stop);
    }
}

fn rejected(full: QuotaFull) -> Rejected {
    Rejected::Full { waiting: full.taken, is_shared: full.is_shared }
}

impl Engine {
    /// Allocate the cache and its memory, and start the thread. Refused, before anything is allocated, if the cache
    /// does not fit into the model's budget.
    pub fn start(model: Arc<Model>, registry: &Registry, config: EngineConfig) -> Result<Engine, Error> {
        config.check_keep(registry.device())?;
        let thinned_above = config.keep.map(|keep| config.thinned_above(keep));
        let (mut cache, mut executor) = ModelExecutor::new(&model, registry, &config.paged)?;
        let prefix = config.prefix.as_ref().map(|of| {
            let (mut plan, aligned) = (StepPlan::default(), config.paged.block_aligned());
            frozen::index(&mut executor.rows(&mut cache, &mut plan, &aligned), of, config.paged.block_tokens)
        });
        let prefix = prefix.transpose()?;
        if let Some(keep) = config.keep {
            executor.keep(keep);
        }
        if let Some(speculator) = config.speculator {
            executor.speculate(speculator);
        }
        let plan = config.paged.plan(model.config(), registry)?;
        let kv_bytes = KvBytes { per_token: plan.kv_bytes_per_token, bound: plan.usage.of(Purpose::KvCache) };
        let (commands, inbox) = channel();
        let mut scheduler_config = config.scheduler;
        if let Some(mut tiers) = config.tiers {
            // What follows the K and V of another machine or version is other than what follows this one's.
            let maker = tiers::maker(&model.device().numerics());
            let other = config.prefix.as_ref().and_then(|of| of.prefix.other_than(&maker));
            tiers.fingerprint.extend(other.unwrap_or_default().into_bytes());
            let spec = cache.paged_spec();
            let cost = spec.and_then(|spec| Some(spec.prefix.as_ref()?.cost)).unwrap_or_default();
            let groups = spec.map_or(&[][..], |spec| &spec.groups);
            let groups: Vec<Visibility> = groups.iter().map(|group| group.visibility).collect();
            let multiply_adds = (cost.per_token, cost.per_pair);
            scheduler_config.tiers = Some(executor.open_tiers(
                tiers,
                &groups,
                config.paged.block_tokens,
                multiply_adds,
                commands.clone(),
            )?);
        }
        let mut scheduler = Scheduler::new(scheduler_config, cache, None)
            .map_err(|e| Error::Usage(format!("scheduler: {e}")))?;
        if let Some(of) = &config.prefix {
            scheduler.note_pinned_text(&of.salt, of.prefix.tokens());
        }
        if config.record {
            scheduler.record();
        }
        scheduler.explain_misses(true);
        let (gone, is_gone) = watch::channel(());
        let capacity_tokens = scheduler.used_cells() + scheduler.evictable_cells() + scheduler.free_cells();
        let stats = EngineStats {
            capacity_cells: capacity_tokens,
            tiers: executor.tier_stats(&scheduler),
            ..EngineStats::default()
        };
        let shared = Arc::new(Shared {
            model: model.clone(),
            commands,
            next_id: AtomicU64::new(0),
            queue: TenantQuota::new(config.max_queue, &config.tenants),
            rejected: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            stats: Mutex::new(stats),
            live: watch::Sender::new(0),
            is_gone,
            capacity_tokens: AtomicU64::new(capacity_tokens),
            kv_bytes,
            tier_stores: executor.tier_stores(),
        });
        let thread = Thread {
            model,
            state: EngineState {
                scheduler,
                executor,
                started: Instant::now(),
                imports: Imports::default(),
                prefix,
            },
            watchers: config.watchers,
            live: BTreeMap::new(),
            busy_ns: 0,
            step_started: Instant::now(),
            paced_tokens: 1,
            thinned_above,
            // Weak: a strong reference would keep the thread alive forever.
            shared: Arc::downgrade(&shared),
        };
        let named = std::thread::Builder::new().name("kvist-engine".into());
        named
            .spawn(move || {
                // Dropped last, also when the thread panics.
                let _gone = gone;
                thread.run(&inbox);
            })
            .map_err(|e| Error::Usage(format!("cannot start the thread of the engine: {e}")))?;
        Ok(Engine { shared })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }
    /// Tokens that the cache has room for now. See [`resize`](Self::resize).
    pub fn capacity_tokens(&self) -> u64 {
        self.shared.capacity_tokens.load(SeqCst)
    }
    /// KV memory by the memory plan, at the start.
    pub fn kv_bytes(&self) -> KvBytes {
        self.shared.kv_bytes
    }

    /// Add an observer. It sees the steps of all jobs that are submitted after this call. Never blocks. If the engine
    /// thread has ended, the observer is dropped.
    pub fn add_watcher(&self, watcher: Box<dyn Watcher>) {
        let _ = self.shared.commands.send(Command::Watch(watcher));
    }

    /// Returns whether a job of this tenant would be queued now. Only a hint: [`Engine::submit`] decides.
    pub fn has_room(&self, tenant: &str) -> bool {
        self.shared.queue.has_room(tenant)
    }

    /// The most jobs of this tenant that can wait at a time: [`Engine::reserve`] never grants more at once.
    pub fn most_queued(&self, tenant: &str) -> usize {
        self.shared.queue.most(tenant)
    }

    /// Occupied permits of the queue: jobs that were submitted and neither admitted nor ended, and permits that
    /// requests have reserved for jobs they will submit.
    pub fn queued(&self) -> usize {
        self.shared.queue.n_taken()
    }

    /// Requests that were rejected because the queue was full for their tenants.
    pub fn rejected(&self) -> u64 {
        self.shared.rejected.load(SeqCst)
    }

    /// Queue a job, unless the queue is full for its tenant or the engine is draining. Never blocks.
    pub fn submit(&self, job: Job) -> Result<GenerationHandle, Rejected> {
        let mut permits = self.reserve(&job.tenant, 1)?;
        match permits.pop() {
            Some(permit) => self.submit_in(job, permit),
            None => self.submit_sibling(job),
        }
    }

    /// Reserve queue permits for `n` jobs of this tenant: all of them, or none. A request that waits for something
    /// else before it submits its jobs counts as waiting too, and its jobs are not rejected after that wait. Dropping a
    /// permit frees it.
    pub fn reserve(&self, tenant: &Arc<str>, n: usize) -> Result<Vec<Arc<QuotaPermit>>, Rejected> {
        if self.shared.draining.load(SeqCst) {
            return Err(Rejected::Draining);
        }
        let permits: Result<_, QuotaFull> =
            (0..n).map(|_| self.shared.queue.take(tenant).map(Arc::new)).collect();
        permits.map_err(|full| {
            self.shared.rejected.fetch_add(1, SeqCst);
            rejected(full)
        })
    }

    /// Like [`Engine::submit`], for another job of a request that already runs. Allowed also while the engine
    /// drains.
    pub fn submit_sibling(&self, job: Job) -> Result<GenerationHandle, Rejected> {
        let permit = self.shared.queue.take(&job.tenant).map_err(rejected)?;
        self.submit_in(job, Arc::new(permit))
    }

    /// Like [`Engine::submit`], with a permit that was reserved before. The permit is free again when the job is
    /// admitted and its other owners have dropped it.
    pub fn submit_in(&self, job: Job, permit: Arc<QuotaPermit>) -> Result<GenerationHandle, Rejected> {
        self.shared.live.send_modify(|n| *n += 1);
        let id = RequestId(self.shared.next_id.fetch_add(1, SeqCst));
        let (sender, events) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let events = UnreadEvents { events, n: unread.clone() };
        let arrival = Arrival { id, job: Box::new(job), at: Instant::now(), permit, events: sender, unread };
        if self.shared.commands.send(Command::Arrive(arrival)).is_err() {
            self.shared.live.send_modify(|n| *n -= 1);
            return Err(Rejected::Draining);
        }
        Ok(GenerationHandle { id, events, ended: false, shared: self.shared.clone() })
    }

    /// Counters and occupancy at the end of the last step.
    pub fn stats(&self) -> EngineStats {
        let mut stats = self.shared.stats.lock().unwrap_or_else(|broken| broken.into_inner()).clone();
        if let (Some(tiers), Some(stores)) = (&mut stats.tiers, &self.shared.tier_stores) {
            tiers.store_bytes += stores.bytes_being_written();
            tiers.stores = stores.stats();
        }
        stats
    }

    /// Run `inspect` on the engine's state, between two steps. `None` if the engine thread has ended.
    pub async fn inspect<T: Send + 'static>(
        &self,
        inspect: impl FnOnce(&mut EngineState) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let inspect = move |state: &mut EngineState| drop(sender.send(inspect(state)));
        self.shared.commands.send(Command::Inspect(Box::new(inspect))).ok()?;
        answer.await.ok()
    }

    /// [`inspect`](Self::inspect) for callers without an async runtime: blocks this thread until the step has ended.
    ///
    /// # Panics
    /// If it is called on a thread that runs an async task.
    pub fn blocking_inspect<T: Send + 'static>(
        &self,
        inspect: impl FnOnce(&mut EngineState) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let inspect = move |state: &mut EngineState| drop(sender.send(inspect(state)));
        self.shared.commands.send(Command::Inspect(Box::new(inspect))).ok()?;
        answer.blocking_recv().ok()
    }

    /// Returns whether the engine thread is alive. Never blocks, even while a step runs.
    pub fn is_alive(&self) -> bool {
        self.shared.is_gone.has_changed().is_ok()
    }

    /// Why nothing can be computed any more: the engine thread has ended, or the device has failed, which stays so. Never
    /// blocks, even while a step runs. A loss of the device is noticed by the step that it breaks.
    pub fn failure(&self) -> Option<String> {
        if !self.is_alive() {
            return Some("the engine has stopped".into());
        }
        self.shared.model.device().check().err().map(|error| error.to_string())
    }

    /// Stop accepting jobs. Jobs that were accepted continue.
    pub fn drain(&self) {
        self.shared.draining.store(true, SeqCst);
    }
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(SeqCst)
    }
    /// End every job with [`FinishReason::Cancelled`].
    pub fn cancel_all(&self) {
        let _ = self.shared.commands.send(Command::CancelAll);
    }
    /// Waits until no job is live, or the thread has ended.
    pub async fn until_idle(&self) {
        let mut live = self.shared.live.subscribe();
        // This handle keeps the sender alive, so `wait_for` cannot fail.
        let mut no_jobs = pin!(async { drop(live.wait_for(|n| *n == 0).await) });
        let mut ended = pin!(self.until_ended());
        poll_fn(|context| match no_jobs.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => ended.as_mut().poll(context),
        })
        .await;
    }
    /// End the thread after the current step, also while there are other handles. Live jobs end without another event.
    pub fn stop(&self) {
        let _ = self.shared.commands.send(Command::Stop);
    }
    /// Waits until the thread has ended. While this handle exists, only [`stop`](Self::stop) or a panic ends it.
    pub async fn until_ended(&self) {
        let mut is_gone = self.shared.is_gone.clone();
        while is_gone.changed().await.is_ok() {}
    }
}
