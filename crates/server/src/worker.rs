//! The engine thread: it owns the scheduler, the cache and the bytes, and takes one turn after the other.
//!
//! Between turns it hears what arrived, who went away and whose deadline has passed; behind a turn it says what came of
//! it. So a request that nobody waits for any more holds nothing when the next step begins.
mod request;

use crate::job::*;
use crate::live::{CacheBytes, LiveView};
use kvist_backend::{Purpose, Registry};
use kvist_engine::Error;
use kvist_engine::executor::{ModelExecutor, PagedConfig};
use kvist_engine::model::Model;
use kvist_engine::sampler::Sampler;
use kvist_scheduler::{Config, Counters, End, Ended, Prompt, Reason, Request, RequestId, Scheduler, Turn};
use request::{Chooser, Ending};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// What an engine is made of, besides the model.
pub struct EngineConfig {
    /// The cache. Its `max_step_tokens` and `max_rows` are those of the largest batch: [`EngineConfig::fit`].
    pub paged: PagedConfig,
    pub scheduler: Config,
    /// Requests that may wait; more are rejected.
    pub max_queue: usize,
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

/// Somebody who looks at the cache behind every turn, on the engine thread: be quick.
pub trait Watch: Send {
    /// A request ended, in the turn of which [`Watch::turn`] will tell or between two.
    fn ended(&mut self, ended: &Ended) {
        let _ = ended;
    }
    fn turn(&mut self, now_ns: u64, end_ns: u64, state: &mut State);
}

/// What the engine thread owns, for those who look at it between turns.
pub struct State {
    pub scheduler: Scheduler,
    pub executor: ModelExecutor,
    started: Instant,
}

impl State {
    /// The engine's clock: nanoseconds since it started.
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Counters since the start, and occupancy at the end of the last turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    pub running: usize,
    pub waiting: usize,
    pub counters: Counters,
    /// Tokens of prompts of admitted requests, those that were found included.
    pub prompt_tokens: u64,
    /// Cells of the layer group in which room is counted.
    pub capacity_cells: u64,
    pub held_cells: u64,
    /// Cells that the index knows and nobody holds.
    pub idle_cells: u64,
    pub free_cells: u64,
    /// Blocks that the prefix index came to know, and that were evicted from it.
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
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
    /// Jobs that wait: submitted, and neither admitted nor ended.
    queued: AtomicUsize,
    max_queue: usize,
    draining: AtomicBool,
    stats: Mutex<Stats>,
    /// Jobs that have not ended.
    live: watch::Sender<usize>,
    /// Closed when the thread has ended.
    is_gone: watch::Receiver<()>,
    capacity_tokens: u64,
    view: LiveView,
}

enum Command {
    Arrive { id: RequestId, job: Box<Job>, events: mpsc::UnboundedSender<Event>, unread: Arc<AtomicUsize> },
    Cancel(RequestId),
    CancelAll,
    Inspect(Box<dyn FnOnce(&mut State) + Send>),
    Stop,
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
            queued: AtomicUsize::new(0),
            max_queue: config.max_queue,
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
            totals: Totals::default(),
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

    /// Would a job be taken now? Who submits is told again.
    pub fn has_room(&self) -> bool {
        self.shared.queued.load(SeqCst) < self.shared.max_queue
    }

    /// Queue a job, unless the queue is full or the server is going down. Never blocks.
    pub fn submit(&self, job: Job) -> Result<Generation, Rejected> {
        if self.shared.draining.load(SeqCst) {
            return Err(Rejected::Draining);
        }
        self.submit_sibling(job)
    }

    /// The same for a job that belongs to a request which was taken before: also while the server is going down.
    pub fn submit_sibling(&self, job: Job) -> Result<Generation, Rejected> {
        let max = self.shared.max_queue;
        let one_more = |n: usize| (n < max).then_some(n + 1);
        if let Err(waiting) = self.shared.queued.fetch_update(SeqCst, SeqCst, one_more) {
            return Err(Rejected::Full { waiting });
        }
        self.shared.live.send_modify(|n| *n += 1);
        let id = RequestId(self.shared.next_id.fetch_add(1, SeqCst));
        let (sender, events) = mpsc::unbounded_channel();
        let unread = Arc::new(AtomicUsize::new(0));
        let events = Unread { events, n: unread.clone() };
        let command = Command::Arrive { id, job: Box::new(job), events: sender, unread };
        if self.shared.commands.send(command).is_err() {
            self.shared.queued.fetch_sub(1, SeqCst);
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

struct Thread {
    model: Arc<Model>,
    state: State,
    watchers: Vec<Box<dyn Watch>>,
    live: BTreeMap<RequestId, Live>,
    totals: Totals,
    shared: std::sync::Weak<Shared>,
}

#[derive(Default)]
struct Totals {
    prompt_tokens: u64,
    busy_ns: u64,
}

/// A job that has not ended.
struct Live {
    events: mpsc::UnboundedSender<Event>,
    end: Arc<Mutex<Ending>>,
    deadline: Option<Instant>,
    explain: bool,
    admitted: bool,
    /// Its deadline has passed.
    late: bool,
    needed_tokens: u64,
}

impl Thread {
    fn run(mut self, inbox: &Receiver<Command>) {
        let mut idle = true;
        loop {
            // A handle that was dropped on another thread: nobody can ask for anything any more.
            let command = if idle { inbox.recv().ok() } else { inbox.try_recv().ok() };
            match command {
                Some(Command::Stop) => return,
                Some(command) => {
                    self.hear(command);
                    idle = false; // look whether there is more before the turn
                    continue;
                }
                None if idle => return,
                None => {}
            }
            self.end_late();
            let now = self.state.now_ns();
            let State { scheduler, executor, .. } = &mut self.state;
            let turn = scheduler.turn(now, executor);
            let elapsed_ns = match turn {
                Turn::Ran { elapsed_ns, .. } => elapsed_ns,
                Turn::Idle => 0,
            };
            self.totals.busy_ns += elapsed_ns;
            self.tell();
            for watcher in &mut self.watchers {
                watcher.turn(now, now + elapsed_ns, &mut self.state);
            }
            self.note();
            idle = turn == Turn::Idle;
        }
    }

    fn hear(&mut self, command: Command) {
        match command {
            Command::Arrive { id, job, events, unread } => self.arrive(id, *job, events, unread),
            Command::Cancel(id) => {
                let now = self.state.now_ns();
                self.state.scheduler.cancel(now, id);
            }
            Command::CancelAll => {
                let now = self.state.now_ns();
                for id in self.live.keys() {
                    self.state.scheduler.cancel(now, *id);
                }
            }
            Command::Inspect(look) => look(&mut self.state),
            Command::Stop => {}
        }
        self.tell();
    }

    fn arrive(
        &mut self,
        id: RequestId,
        mut job: Job,
        events: mpsc::UnboundedSender<Event>,
        unread: Arc<AtomicUsize>,
    ) {
        let now = self.state.now_ns();
        let end = Arc::new(Mutex::new(Ending::default()));
        let prompt_tokens = u32::try_from(job.prompt.len()).unwrap_or(u32::MAX);
        let live = Live {
            events: events.clone(),
            end: end.clone(),
            deadline: job.deadline,
            explain: job.explain,
            admitted: false,
            late: false,
            needed_tokens: u64::from(prompt_tokens) + u64::from(job.max_new),
        };
        self.live.insert(id, live);
        // Found in a step, it would fail all who are in it.
        let vocab = self.model.decoder().config().vocab;
        if let Some(&token) = job.prompt.iter().find(|token| **token as usize >= vocab) {
            let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
            return self.fail(id, Failure::UnknownToken { token, vocab });
        }
        match Sampler::new(job.sampling) {
            Ok(mut sampler) => {
                sampler.observe(&job.prompt);
                let chooser = Chooser::new(self.model.clone(), sampler, &mut job, events, unread, end);
                self.state.executor.expect(id, Box::new(chooser));
            }
            Err(e) => return self.fail(id, Failure::Engine(e.to_string())),
        }
        let request = Request {
            id,
            arrival_ns: now,
            prompt_tokens,
            max_new: job.max_new,
            prompt: Prompt::SharedTokens(job.prompt),
            deadline_ns: job.deadline.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                now.saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
            }),
            priority: job.priority,
            salt: job.salt,
        };
        if let Err(duplicate) = self.state.scheduler.arrive(now, request) {
            self.fail(id, Failure::Engine(duplicate.to_string()));
        }
    }

    /// Cancel what is past its deadline.
    fn end_late(&mut self) {
        let now = Instant::now();
        let now_ns = self.state.now_ns();
        for (id, live) in &mut self.live {
            if !live.late && live.deadline.is_some_and(|deadline| deadline <= now) {
                live.late = true;
                self.state.scheduler.cancel(now_ns, *id);
            }
        }
    }

    /// Say who was admitted and what ended.
    fn tell(&mut self) {
        for (id, live) in self.live.iter_mut().filter(|(_, live)| !live.admitted) {
            let Some(standing) = self.state.scheduler.standing(*id) else { continue };
            if standing.admitted_ns.is_some() {
                let miss = standing.miss.filter(|_| live.explain).map(|miss| miss.for_tenant());
                live.admit(standing.hit_tokens, miss, standing.prompt_tokens, &mut self.totals, &self.shared);
            }
        }
        let ended: Vec<Ended> = self.state.scheduler.drain_ended().collect();
        for ended in ended {
            self.end(&ended);
        }
    }

    fn end(&mut self, ended: &Ended) {
        self.watchers.iter_mut().for_each(|watcher| watcher.ended(ended));
        self.state.executor.forget(ended.id);
        let Some(mut live) = self.live.remove(&ended.id) else { return };
        if ended.admitted_ns.is_some() && !live.admitted {
            let miss = ended.miss.filter(|_| live.explain).map(|miss| miss.for_tenant());
            live.admit(ended.hit_tokens, miss, ended.prompt_tokens, &mut self.totals, &self.shared);
        }
        let ending = std::mem::take(&mut *live.end.lock().unwrap_or_else(|broken| broken.into_inner()));
        let done = |finish| {
            Event::Done(Done {
                finish,
                text: ending.text.clone(),
                usage: Usage {
                    prompt_tokens: ended.prompt_tokens,
                    completion_tokens: ended.generated,
                    cached_tokens: ended.hit_tokens,
                    preemptions: ended.preemptions,
                },
            })
        };
        let event = match (ended.end, ending.failure) {
            (_, Some(failure)) => Event::Failed(failure),
            (End::Finished, None) => done(ending.finish.clone().unwrap_or(Finish::Length)),
            (End::Cancelled, None) if live.late => done(Finish::Deadline),
            (End::Cancelled, None) => done(Finish::Cancelled),
            // What it wrote until then is its answer.
            (End::Refused(Reason::CacheFull), None) => done(Finish::Length),
            (End::Refused(Reason::NeverFits), None) => {
                let capacity = self.shared.upgrade().map_or(0, |shared| shared.capacity_tokens);
                Event::Failed(Failure::NeverFits { needed: live.needed_tokens, capacity })
            }
            (End::Refused(reason), None) => {
                let failure = self.state.executor.failure().filter(|_| reason == Reason::StepsFailed);
                let why = failure.map_or_else(|| reason.name().to_owned(), |failure| failure.to_string());
                Event::Failed(Failure::Engine(why))
            }
        };
        live.over(event, &self.shared);
    }

    fn fail(&mut self, id: RequestId, failure: Failure) {
        self.state.executor.forget(id);
        if let Some(live) = self.live.remove(&id) {
            live.over(Event::Failed(failure), &self.shared);
        }
    }

    /// Figures for those who ask between turns.
    fn note(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let scheduler = &mut self.state.scheduler;
        let index = scheduler.cache_mut().prefixes().map(|prefixes| prefixes.report());
        let (held, idle, free) = (scheduler.held_cells(), scheduler.idle_cells(), scheduler.free_cells());
        let stats = Stats {
            running: scheduler.n_running(),
            waiting: scheduler.n_waiting(),
            counters: *scheduler.counters(),
            prompt_tokens: self.totals.prompt_tokens,
            capacity_cells: held + idle + free,
            held_cells: held,
            idle_cells: idle,
            free_cells: free,
            stored_blocks: index.as_ref().map_or(0, |index| index.n_stored),
            evicted_blocks: index.as_ref().map_or(0, |index| index.n_evicted),
            kv_bytes: self.state.executor.kv_bytes(),
            kv_bytes_read: self.state.executor.counters().bytes_read,
            busy_ns: self.totals.busy_ns,
        };
        *shared.stats.lock().unwrap_or_else(|broken| broken.into_inner()) = stats;
    }
}

impl Live {
    fn admit(
        &mut self,
        cached_tokens: u32,
        miss: Option<kvist_cache::MissReason>,
        prompt_tokens: u32,
        totals: &mut Totals,
        shared: &std::sync::Weak<Shared>,
    ) {
        self.admitted = true;
        totals.prompt_tokens += u64::from(prompt_tokens);
        if let Some(shared) = shared.upgrade() {
            shared.queued.fetch_sub(1, SeqCst);
        }
        let _ = self.events.send(Event::Admitted { cached_tokens, miss });
        let mut end = self.end.lock().unwrap_or_else(|broken| broken.into_inner());
        end.admitted = true;
        for event in end.early.drain(..) {
            let _ = self.events.send(event);
        }
    }

    fn over(self, event: Event, shared: &std::sync::Weak<Shared>) {
        let _ = self.events.send(event);
        if let Some(shared) = shared.upgrade() {
            if !self.admitted {
                shared.queued.fetch_sub(1, SeqCst);
            }
            shared.live.send_modify(|n| *n -= 1);
        }
    }
}
