//! The engine, as handlers see it: jobs go in, events come back, and to drop a [`Generation`] cancels it.
//!
//! A thread of its own ([`thread`]) owns the scheduler, the cache and the bytes; nothing here waits for it.
mod request;
mod thread;

use crate::job::*;
use crate::live::{CacheBytes, LiveView};
use crate::shares::{NoPlace, Place, Shares};
use kvist_backend::{Purpose, Registry};
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

/// What an engine is made of, besides the model.
pub struct EngineConfig {
    /// The cache. Its `max_step_tokens` and `max_rows` are those of the largest batch: [`EngineConfig::fit`].
    pub paged: PagedConfig,
    pub scheduler: Config,
    /// Requests that may wait; more are rejected.
    pub max_queue: usize,
    /// Whose requests they are, each name once: names share the queue. Without any it is one for all.
    pub names: Vec<Arc<str>>,
    /// Keep the logs from which everything can be replayed; watchers take them.
    pub record: bool,
    /// Called behind every turn.
    pub watchers: Vec<Box<dyn Watch>>,
}

impl EngineConfig {
    /// Steps and rows as large as the scheduler can make them, and no larger.
    pub fn fit(&mut self) {
        self.paged.cache.max_step_tokens = self.scheduler.max_batch_tokens;
        self.paged.cache.max_rows = self.scheduler.max_batch;
    }
}

/// What looks at the cache behind every turn, on the engine thread: it has to be quick.
pub trait Watch: Send {
    /// A job was taken, under this number and this name; [`Watch::ended`] follows, and before it maybe some turns.
    fn arrived(&mut self, id: RequestId, name: &Name) {
        let _ = (id, name);
    }
    /// A request ended, in the turn of which [`Watch::turn`] will tell or between two.
    fn ended(&mut self, ended: &Ended) {
        let _ = ended;
    }
    fn turn(&mut self, now_ns: u64, end_ns: u64, state: &mut State);
}

/// What the engine thread owns, and others look at between turns.
pub struct State {
    pub scheduler: Scheduler,
    pub executor: ModelExecutor,
    started: Instant,
}

impl State {
    /// The engine's clock: nanoseconds since it started.
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

/// Counters since the start, and occupancy at the end of the last turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    pub running: usize,
    pub waiting: usize,
    pub counters: Counters,
    /// Cells of the layer group in which room is counted.
    pub capacity_cells: u64,
    pub held_cells: u64,
    /// Cells that the index knows and no request holds.
    pub idle_cells: u64,
    pub free_cells: u64,
    /// Blocks that the prefix index came to know, and that were evicted from it.
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
    /// Of the last prompts that were looked up.
    pub recent_hits: kvist_cache::HitCounts,
    /// KV bytes reserved.
    pub kv_bytes: u64,
    /// Stored bytes that attention has read.
    pub kv_bytes_read: u64,
    /// Nanoseconds spent in steps.
    pub busy_ns: u64,
}

/// A handle on the engine thread. Cheap to clone; when the last one is dropped, the thread ends.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    model: Arc<Model>,
    commands: Sender<Command>,
    next_id: AtomicU64,
    /// Places of jobs that wait: reserved or submitted, and neither admitted nor ended.
    queue: Shares,
    /// Jobs that were rejected because it was full, other answers of requests that run not counted.
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

/// What was told and not yet heard, and how many tokens of it.
struct Unread {
    events: mpsc::UnboundedReceiver<Event>,
    n: Arc<AtomicUsize>,
}

/// A job that was taken. Dropping it cancels the job: its memory is free before the next step.
pub struct Generation {
    pub id: RequestId,
    events: Unread,
    over: bool,
    shared: Arc<Shared>,
}

impl Generation {
    /// What happens next; `None` behind the end, or if the engine thread died.
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
    /// Make cache and bytes, and start the thread. Refused, before anything is allocated, if they do not fit into the
    /// model's budget.
    pub fn start(model: Arc<Model>, registry: &Registry, config: EngineConfig) -> Result<Engine, Error> {
        let (cache, executor) = ModelExecutor::new(&model, registry, &config.paged)?;
        let plan = config.paged.plan(model.decoder().config(), registry)?;
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
            // Weak, or the thread would keep itself alive.
            shared: Arc::downgrade(&shared),
        };
        let named = std::thread::Builder::new().name("kvist-engine".into());
        named
            .spawn(move || {
                // Dropped last, by a panic too.
                let _gone = gone;
                thread.run(&inbox);
            })
            .map_err(|e| Error::Usage(format!("the system refuses a thread for the engine: {e}")))?;
        Ok(Engine { shared })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }
    /// What is told to listeners and files.
    pub fn live(&self) -> &LiveView {
        &self.shared.view
    }
    /// Tokens that the cache holds at most.
    pub fn capacity_tokens(&self) -> u64 {
        self.shared.capacity_tokens
    }

    /// Would a job of this name be taken now? [`Engine::submit`] tells again.
    pub fn has_room(&self, name: &str) -> bool {
        self.shared.queue.has_room(name)
    }

    /// Places that are taken: by jobs that were submitted, and neither admitted nor ended, and by requests that are to
    /// submit some.
    pub fn queued(&self) -> usize {
        self.shared.queue.n_taken()
    }

    /// Jobs that were rejected because the queue was full for their names.
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

    /// Places for `n` jobs of this name, or none: what waits for something else before it is submitted counts as waiting
    /// too, and is not refused behind that. They are given back when they are dropped.
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

    /// The same for a job that belongs to a request which was taken before: also while the server is going down.
    pub fn submit_sibling(&self, job: Job) -> Result<Generation, Rejected> {
        let place = self.shared.queue.take(&job.tenant).map_err(full)?;
        self.submit_in(job, Arc::new(place))
    }

    /// The same, with a place that was taken before. It is free again when the job is admitted and no one else holds it.
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

    /// As of the end of the last turn.
    pub fn stats(&self) -> Stats {
        self.shared.stats.lock().unwrap_or_else(|broken| broken.into_inner()).clone()
    }

    /// Look at the engine's state between two turns.
    pub async fn inspect<T: Send + 'static>(
        &self,
        look: impl FnOnce(&mut State) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let look = move |state: &mut State| drop(sender.send(look(state)));
        self.shared.commands.send(Command::Inspect(Box::new(look))).ok()?;
        answer.await.ok()
    }

    /// Does the thread live? Answered at once, however long a step takes.
    pub fn is_alive(&self) -> bool {
        self.shared.is_gone.has_changed().is_ok()
    }

    /// Take no more jobs. Those that were taken go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, SeqCst);
    }
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(SeqCst)
    }
    /// End every job, with [`Finish::Cancelled`].
    pub fn cancel_all(&self) {
        let _ = self.shared.commands.send(Command::CancelAll);
    }
    /// Until no job is live, or the thread has ended.
    pub async fn idle(&self) {
        let mut live = self.shared.live.subscribe();
        tokio::select! {
            // The sender lives as long as this handle.
            _ = live.wait_for(|n| *n == 0) => {}
            () = self.ended() => {}
        }
    }
    /// Until the thread has ended, which while this handle lives it does by a panic alone.
    pub async fn ended(&self) {
        let mut is_gone = self.shared.is_gone.clone();
        while is_gone.changed().await.is_ok() {}
    }
}
