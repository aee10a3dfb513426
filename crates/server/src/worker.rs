//! Handle on the engine for HTTP handlers: jobs go in, events come back, and dropping a [`Generation`] cancels it.
//!
//! A separate thread ([`thread`]) owns the scheduler, the cache and the KV memory. No function here blocks on it.
mod request;
mod thread;

use crate::job::*;
use crate::live::{CacheBytes, LiveView};
use crate::shares::{NoPlace, Place, Shares};
use kvist_device::{Purpose, Registry};
use kvist_engine::Error;
use kvist_engine::executor::{ModelExecutor, PagedConfig};
use kvist_model::Model;
use kvist_scheduler::{Config, Counters, Ended, RequestId, Scheduler};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thread::{Arrival, Command, Thread};
use tokio::sync::{mpsc, watch};

/// Configuration of an engine, besides the model.
pub struct EngineConfig {
    /// The cache. [`EngineConfig::fit`] sets its `max_step_tokens` and `max_rows` to those of the largest batch.
    pub paged: PagedConfig,
    pub scheduler: Config,
    /// Largest number of waiting requests. More are rejected.
    pub max_queue: usize,
    /// Names of the API keys, each once. The queue is divided among them. If empty, all requests share one queue.
    pub names: Vec<Arc<str>>,
    /// Record the logs from which everything can be replayed. Watchers collect them.
    pub record: bool,
    /// Called after every turn.
    pub watchers: Vec<Box<dyn Watch>>,
}

impl EngineConfig {
    /// Set the cache's step and row limits to the largest batch that the scheduler can build.
    pub fn fit(&mut self) {
        self.paged.cache.max_step_tokens = self.scheduler.max_batch_tokens;
        self.paged.cache.max_rows = self.scheduler.max_batch;
    }
}

/// Observes the cache after every turn. Runs on the engine thread, so it must be fast.
pub trait Watch: Send {
    /// A job was queued under this id and name. [`Watch::ended`] follows, possibly after some turns.
    fn arrived(&mut self, id: RequestId, name: &Name) {
        let _ = (id, name);
    }
    /// A request ended, either in the turn that the next [`Watch::turn`] reports, or between two turns.
    fn ended(&mut self, ended: &Ended) {
        let _ = ended;
    }
    fn turn(&mut self, now_ns: u64, end_ns: u64, state: &mut State);
}

/// State of the engine thread. Watchers and [`Engine::inspect`] access it between turns.
pub struct State {
    pub scheduler: Scheduler,
    pub executor: ModelExecutor,
    started: Instant,
}

impl State {
    /// The engine's clock: nanoseconds since the engine started.
    pub fn now_ns(&self) -> u64 {
        self.ns_of(Instant::now())
    }

    fn ns_of(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.started).as_nanos()).unwrap_or(u64::MAX)
    }

    fn instant_of(&self, ns: u64) -> Instant {
        self.started + Duration::from_nanos(ns)
    }
}

/// Counters since the start, and cache occupancy at the end of the last turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    pub running: usize,
    pub waiting: usize,
    pub counters: Counters,
    /// KV cells of the layer group in which the scheduler counts capacity.
    pub capacity_cells: u64,
    pub held_cells: u64,
    /// Cells that are cached in the prefix index and that no request references.
    pub idle_cells: u64,
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
    /// Places of waiting jobs: reserved or submitted, and neither admitted nor ended.
    queue: Shares,
    /// Requests that were rejected because the queue was full. Further answers of a running request do not count.
    rejected: AtomicU64,
    draining: AtomicBool,
    stats: Mutex<Stats>,
    /// Jobs that have not ended.
    live: watch::Sender<usize>,
    /// Closed when the thread has ended.
    is_gone: watch::Receiver<()>,
    capacity_tokens: u64,
    view: LiveView,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The thread may be gone already.
        let _ = self.commands.send(Command::Stop);
    }
}

/// Events that the engine sent and the client has not received yet, and the number of tokens among them.
struct Unread {
    events: mpsc::UnboundedReceiver<Event>,
    n: Arc<AtomicUsize>,
}

/// A job in the queue or the batch. Dropping it cancels the job: its memory is free before the next step.
pub struct Generation {
    pub id: RequestId,
    events: Unread,
    over: bool,
    shared: Arc<Shared>,
}

impl Generation {
    /// The next event. `None` after the last one, or if the engine thread died.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.events.recv().await;
        if matches!(event, Some(Event::Token(_))) {
            self.events.n.fetch_sub(1, SeqCst);
        }
        self.over |= matches!(event, None | Some(Event::Done(_) | Event::Failed(_)));
        event
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.shared.commands.send(Command::Cancel(self.id));
        }
    }
}

fn full(none: NoPlace) -> Rejected {
    Rejected::Full { waiting: none.taken, is_shared: none.is_shared }
}

impl Engine {
    /// Allocate the cache and its memory, and start the thread. Refused, before anything is allocated, if the cache
    /// does not fit into the model's budget.
    pub fn start(model: Arc<Model>, registry: &Registry, config: EngineConfig) -> Result<Engine, Error> {
        let (cache, executor) = ModelExecutor::new(&model, registry, &config.paged)?;
        let plan = config.paged.plan(model.config(), registry)?;
        let bytes = CacheBytes { per_token: plan.kv_bytes_per_token, bound: plan.usage.of(Purpose::KvCache) };
        let mut scheduler = Scheduler::new(config.scheduler, cache, None)
            .map_err(|e| Error::Usage(format!("scheduler: {e}")))?;
        if config.record {
            scheduler.record();
        }
        scheduler.explain_misses(true);
        let (commands, inbox) = channel();
        let (gone, is_gone) = watch::channel(());
        let capacity_tokens = scheduler.held_cells() + scheduler.idle_cells() + scheduler.free_cells();
        let view = LiveView::new(bytes);
        let shared = Arc::new(Shared {
            model: model.clone(),
            commands,
            next_id: AtomicU64::new(0),
            queue: Shares::new(config.max_queue, &config.names),
            rejected: AtomicU64::new(0),
            draining: AtomicBool::new(false),
            stats: Mutex::new(Stats { capacity_cells: capacity_tokens, ..Stats::default() }),
            live: watch::Sender::new(0),
            is_gone,
            capacity_tokens,
            view: view.clone(),
        });
        let mut watchers = config.watchers;
        watchers.push(Box::new(view));
        let thread = Thread {
            model,
            state: State { scheduler, executor, started: Instant::now() },
            watchers,
            live: BTreeMap::new(),
            busy_ns: 0,
            turned: Instant::now(),
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
            .map_err(|e| Error::Usage(format!("the system refuses a thread for the engine: {e}")))?;
        Ok(Engine { shared })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }
    /// Live figures for dashboard listeners and recordings.
    pub fn live(&self) -> &LiveView {
        &self.shared.view
    }
    /// Tokens that the cache can hold.
    pub fn capacity_tokens(&self) -> u64 {
        self.shared.capacity_tokens
    }

    /// Returns whether a job of this key name would be queued now. Only a hint: [`Engine::submit`] decides.
    pub fn has_room(&self, name: &str) -> bool {
        self.shared.queue.has_room(name)
    }

    /// Occupied places of the queue: jobs that were submitted and neither admitted nor ended, and places that requests
    /// have reserved for jobs they will submit.
    pub fn queued(&self) -> usize {
        self.shared.queue.n_taken()
    }

    /// Requests that were rejected because the queue was full for their key names.
    pub(crate) fn rejected(&self) -> u64 {
        self.shared.rejected.load(SeqCst)
    }

    /// Queue a job, unless the queue is full for its name or the server is going down. Never blocks.
    pub fn submit(&self, job: Job) -> Result<Generation, Rejected> {
        let mut places = self.reserve(&job.tenant, 1)?;
        match places.pop() {
            Some(place) => self.submit_in(job, place),
            None => self.submit_sibling(job),
        }
    }

    /// Reserve queue places for `n` jobs of this key name: all of them, or none. A request that waits for something
    /// else before it submits its jobs counts as waiting too, and its jobs are not rejected after that wait. Dropping a
    /// place frees it.
    pub(crate) fn reserve(&self, tenant: &Arc<str>, n: usize) -> Result<Vec<Arc<Place>>, Rejected> {
        if self.shared.draining.load(SeqCst) {
            return Err(Rejected::Draining);
        }
        let places: Result<_, NoPlace> =
            (0..n).map(|_| self.shared.queue.take(tenant).map(Arc::new)).collect();
        places.map_err(|none| {
            self.shared.rejected.fetch_add(1, SeqCst);
            full(none)
        })
    }

    /// Like [`Engine::submit`], for another job of a request that already runs. Allowed also while the server shuts
    /// down.
    pub fn submit_sibling(&self, job: Job) -> Result<Generation, Rejected> {
        let place = self.shared.queue.take(&job.tenant).map_err(full)?;
        self.submit_in(job, Arc::new(place))
    }

    /// Like [`Engine::submit`], with a place that was reserved before. The place is free again when the job is admitted
    /// and its other owners have dropped it.
    pub(crate) fn submit_in(&self, job: Job, place: Arc<Place>) -> Result<Generation, Rejected> {
        self.shared.live.send_modify(|n| *n += 1);
        let id = RequestId(self.shared.next_id.fetch_add(1, SeqCst));
        let (sender, events) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let events = Unread { events, n: unread.clone() };
        let arrival = Arrival { id, job: Box::new(job), at: Instant::now(), place, events: sender, unread };
        if self.shared.commands.send(Command::Arrive(arrival)).is_err() {
            self.shared.live.send_modify(|n| *n -= 1);
            return Err(Rejected::Draining);
        }
        Ok(Generation { id, events, over: false, shared: self.shared.clone() })
    }

    /// Counters and occupancy at the end of the last turn.
    pub fn stats(&self) -> Stats {
        self.shared.stats.lock().unwrap_or_else(|broken| broken.into_inner()).clone()
    }

    /// Run `look` on the engine's state, between two turns. `None` if the engine thread has ended.
    pub async fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&mut State) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let look = move |state: &mut State| drop(sender.send(look(state)));
        self.shared.commands.send(Command::Inspect(Box::new(look))).ok()?;
        answer.await.ok()
    }

    /// Returns whether the engine thread is alive. Never blocks, even while a step runs.
    pub fn is_alive(&self) -> bool {
        self.shared.is_gone.has_changed().is_ok()
    }

    /// Stop accepting jobs. Jobs that were accepted continue.
    pub fn drain(&self) {
        self.shared.draining.store(true, SeqCst);
    }
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(SeqCst)
    }
    /// End every job with [`Finish::Cancelled`].
    pub fn cancel_all(&self) {
        let _ = self.shared.commands.send(Command::CancelAll);
    }
    /// Waits until no job is live, or the thread has ended.
    pub async fn idle(&self) {
        let mut live = self.shared.live.subscribe();
        tokio::select! {
            // This handle keeps the sender alive, so `wait_for` cannot fail.
            _ = live.wait_for(|n| *n == 0) => {}
            () = self.ended() => {}
        }
    }
    /// Waits until the thread has ended. While this handle exists, only a panic ends it.
    pub async fn ended(&self) {
        let mut is_gone = self.shared.is_gone.clone();
        while is_gone.changed().await.is_ok() {}
    }
}
