//! The engine thread. It owns the scheduler, the cache and the KV memory, and runs one step after the other.
//!
//! Between steps it processes arrivals, cancellations and expired deadlines. After a step it sends the results. So a
//! request whose client has disconnected uses no cache when the next step begins.
use super::job::*;
use super::quota::QuotaPermit;
use super::request::{Ending, RequestSampler};
use super::tiers::Report;
use super::{EngineState, EngineStats, Shared, Watcher};
use crate::sampler::Sampler;
use kvist_model::Model;
use kvist_scheduler::{
    End, Ended, Iteration, MAX_TIERS, NotLoaded, Prompt, RefusalReason, Request, RequestId,
};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

pub(crate) enum Command {
    Arrive(Arrival),
    Cancel(RequestId),
    CancelAll,
    Inspect(Box<dyn FnOnce(&mut EngineState) + Send>),
    Watch(Box<dyn Watcher>),
    /// A tier below the cache has answered.
    Tier(Report),
    Stop,
}

/// A job on its way to the engine thread.
pub(crate) struct Arrival {
    pub id: RequestId,
    pub job: Box<Job>,
    /// When the job was submitted. A step may have run since.
    pub at: Instant,
    /// The job's permit in the queue.
    pub permit: Arc<QuotaPermit>,
    pub events: mpsc::UnboundedSender<Event>,
    pub unread: Arc<AtomicUsize>,
}

pub(super) struct Thread {
    pub model: Arc<Model>,
    pub state: EngineState,
    pub watchers: Vec<Box<dyn Watcher>>,
    pub live: BTreeMap<RequestId, LiveJob>,
    /// Nanoseconds spent in steps.
    pub busy_ns: u64,
    /// Start of the last step.
    pub step_started: Instant,
    /// The most tokens that the last step emitted for a job with a pace, at least 1.
    pub paced_tokens: u32,
    /// Requests that store more tokens are thinned after a step.
    pub thinned_above: Option<u32>,
    pub shared: std::sync::Weak<Shared>,
}

/// A job that has not ended.
pub(super) struct LiveJob {
    events: mpsc::UnboundedSender<Event>,
    end: Arc<Mutex<Ending>>,
    deadline: Option<Instant>,
    explain: bool,
    /// Tokens that the frozen prefix can supply, if there is one and if an explanation is wanted.
    frozen_tokens: Option<u32>,
    /// The permit in the queue, until the job is admitted.
    permit: Option<Arc<QuotaPermit>>,
    /// False if only the prompt is computed.
    generates: bool,
    pace: Option<u32>,
    /// Tokens generated at the end of the last step, if the job has a pace.
    paced: u32,
    /// The deadline has passed.
    late: bool,
    needed_tokens: u64,
}

impl Thread {
    pub fn run(mut self, inbox: &Receiver<Command>) {
        let mut idle = true;
        loop {
            // If `recv` fails, the last handle was dropped on another thread and no more commands can come.
            let idle_wait = if idle { self.idle_wait() } else { None };
            let command = match self.pause() {
                _ if idle && idle_wait.is_some() => {
                    idle = false;
                    inbox.recv_timeout(idle_wait.unwrap_or_default()).ok()
                }
                _ if idle => inbox.recv().ok(),
                Some(pause) => inbox.recv_timeout(pause).ok(),
                None => match inbox.try_recv() {
                    Err(TryRecvError::Empty) => self.answer(inbox),
                    received => received.ok(),
                },
            };
            match command {
                Some(Command::Stop) => return,
                Some(command) => {
                    self.handle(command);
                    idle = false; // drain the inbox before the step
                    continue;
                }
                None if idle => return,
                None => {}
            }
            self.end_late();
            if !self.live.is_empty() {
                self.state.make_way(self.most_awaited_tokens());
            }
            self.step_started = Instant::now();
            let now = self.state.now_ns();
            let EngineState { scheduler, executor, .. } = &mut self.state;
            let iteration = scheduler.iterate(now, executor);
            executor.begin_tier_step();
            let transfers_ended = self.move_tiers();
            let elapsed_ns = match iteration {
                Iteration::Ran { elapsed_ns, .. } => elapsed_ns,
                Iteration::NothingToDo => 0,
            };
            self.busy_ns += elapsed_ns;
            self.thin();
            self.count_paced();
            self.send_results();
            for watcher in &mut self.watchers {
                watcher.stepped(now, now + elapsed_ns, &mut self.state);
            }
            self.state.executor.tell_tier_names();
            self.publish_stats();
            // The end of a transfer frees memory that a request may wait for, and nothing else would wake this thread.
            idle = iteration == Iteration::NothingToDo && !transfers_ended;
        }
    }

    /// Waits for what the tiers have of a request that has just arrived, so that it need not miss the next step, or for another command.
    fn answer(&self, inbox: &Receiver<Command>) -> Option<Command> {
        let until_ns = self.state.scheduler.lookup_deadline_ns()?;
        let left_ns = until_ns.checked_sub(self.state.now_ns()).filter(|left_ns| *left_ns > 0)?;
        inbox.recv_timeout(Duration::from_nanos(left_ns)).ok()
    }

    /// Removes tokens of requests that have grown beyond their budget.
    fn thin(&mut self) {
        let Some(most) = self.thinned_above else { return };
        let EngineState { scheduler, executor, .. } = &mut self.state;
        if let Err(error) = executor.thin(scheduler, most) {
            // The requests go on with what they have, until the cache is full.
            tracing::error!(target: "kvist::engine", "tokens could not be removed: {error}");
        }
    }

    /// Begins the transfers that the scheduler asks for, and tells it which have ended. Returns whether any has.
    fn move_tiers(&mut self) -> bool {
        let now = self.state.now_ns();
        let EngineState { scheduler, executor, .. } = &mut self.state;
        executor.move_tiers(scheduler, now)
    }

    /// Tokens of the largest job outside the batch, whether it was never admitted or has lost its place.
    fn most_awaited_tokens(&self) -> u64 {
        let runs = |id| self.state.scheduler.status(id).is_some_and(|it| it.running);
        let waiting = self.live.iter().filter(|(id, _)| !runs(**id));
        waiting.map(|(_, live)| live.needed_tokens).max().unwrap_or(0)
    }

    /// When the next live job is late.
    fn next_deadline(&self) -> Option<Instant> {
        self.live.values().filter(|live| !live.late).filter_map(|live| live.deadline).min()
    }

    /// How long an idle engine sleeps before it looks after its tiers, or after a job that waits for them and has a deadline. `None` if
    /// there is nothing to look after.
    fn idle_wait(&self) -> Option<Duration> {
        const COPIES: Duration = Duration::from_micros(200);
        if self.state.executor.is_copying() {
            return Some(COPIES);
        }
        let until_ns = self.state.scheduler.next_tier_deadline_ns();
        let of_tiers = until_ns.map(|until_ns| until_ns.saturating_sub(self.state.now_ns()));
        let of_jobs = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
        of_tiers.map(Duration::from_nanos).into_iter().chain(of_jobs).min()
    }

    /// How long to sleep before the next step, unless a command arrives. `Some` only while every live job has a pace,
    /// no running job is still in prefill, and none that waits may begin: prompts are computed at full speed. Without a
    /// pause while the engine drains.
    fn pause(&self) -> Option<Duration> {
        let paces = self.live.values().map(|live| live.pace);
        let fastest = paces.reduce(|a, b| Some(a?.max(b?)))??;
        let prefills = |id| self.state.scheduler.status(id).is_some_and(|it| it.running && it.generated == 0);
        let drains = self.shared.upgrade().is_none_or(|shared| shared.draining.load(SeqCst));
        let may_begin = self.state.scheduler.may_admit() || self.state.executor.is_copying();
        if drains || may_begin || self.live.keys().any(|id| prefills(*id)) {
            return None;
        }
        let next_step = self.step_started + Duration::from_secs(1) * self.paced_tokens / fastest.max(1);
        let until = self.next_deadline().map_or(next_step, |deadline| deadline.min(next_step));
        Some(until.saturating_duration_since(Instant::now())).filter(|pause| !pause.is_zero())
    }

    /// Counts the tokens of the last step for jobs with a pace: a step that verifies drafts emits several.
    fn count_paced(&mut self) {
        self.paced_tokens = 1;
        for (id, live) in self.live.iter_mut().filter(|(_, live)| live.pace.is_some()) {
            let generated = self.state.scheduler.status(*id).map_or(0, |status| status.generated);
            self.paced_tokens = self.paced_tokens.max(generated.saturating_sub(live.paced));
            live.paced = generated;
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Arrive(arrival) => self.arrive(arrival),
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
            Command::Inspect(inspect) => inspect(&mut self.state),
            Command::Watch(watcher) => self.watchers.push(watcher),
            Command::Tier(report) => {
                let now = self.state.now_ns();
                let EngineState { scheduler, executor, .. } = &mut self.state;
                executor.tier_report(report, scheduler, now);
            }
            Command::Stop => {}
        }
        self.move_tiers();
        self.send_results();
    }

    fn arrive(&mut self, arrival: Arrival) {
        let Arrival { id, mut job, at, permit, events, unread } = arrival;
        let now = self.state.now_ns();
        let end = Arc::new(Mutex::new(Ending::default()));
        let prompt_tokens = u32::try_from(job.prompt.len()).unwrap_or(u32::MAX);
        let prefix = self.state.prefix.as_ref().filter(|_| job.explain);
        let live = LiveJob {
            events: events.clone(),
            end: end.clone(),
            deadline: job.deadline,
            explain: job.explain,
            frozen_tokens: prefix.map(|prefix| prefix.supplies(&job.salt, &job.prompt)),
            permit: Some(permit),
            generates: job.max_new > 0,
            pace: job.pace,
            paced: 0,
            late: false,
            needed_tokens: u64::from(prompt_tokens) + u64::from(job.max_new),
        };
        self.live.insert(id, live);
        // An unknown token must be caught here: inside a step it would fail all requests of the batch.
        let vocab = self.model.config().vocab;
        if let Some(&token) = job.prompt.iter().find(|token| **token as usize >= vocab) {
            let vocab = u32::try_from(vocab).unwrap_or(u32::MAX);
            return self.fail(id, Failure::UnknownToken { token, vocab });
        }
        match Sampler::new(job.sampling) {
            Ok(sampler) => {
                let sampler = RequestSampler::new(self.model.clone(), sampler, &mut job, events, unread, end);
                self.state.executor.register(id, Box::new(sampler));
            }
            Err(e) => return self.fail(id, Failure::Engine(e.to_string())),
        }
        let request = Request {
            id,
            arrival_ns: self.state.ns_of(at),
            prompt_tokens,
            // The scheduler requires at least one new token. `generates` says whether it is wanted.
            max_new: job.max_new.max(1),
            prompt: Prompt::SharedTokens(job.prompt),
            deadline_ns: job.target.into_iter().chain(job.deadline).min().map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                now.saturating_add(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX))
            }),
            priority: job.priority,
            salt: job.salt,
            skip_prefix_cache: job.prompt_logprobs,
            retain: job.retain,
        };
        match self.state.scheduler.arrive(now, request) {
            Ok(()) => self.watchers.iter_mut().for_each(|watcher| watcher.arrived(id, &job.name)),
            Err(duplicate) => self.fail(id, Failure::Engine(duplicate.to_string())),
        }
    }

    /// Cancel the jobs whose deadline has passed.
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

    /// Report admissions and ends to the clients.
    fn send_results(&mut self) {
        for (id, live) in self.live.iter_mut().filter(|(_, live)| live.permit.is_some()) {
            let Some(status) = self.state.scheduler.status(*id) else { continue };
            if let Some(at) = status.admitted_ns {
                let miss = status.miss.filter(|_| live.explain).map(|miss| miss.for_tenant());
                let not_loaded = status.not_loaded.filter(|_| live.explain);
                live.admit(self.state.instant_of(at), status.hit_tokens, status.loaded, miss, not_loaded);
                // Its place in the queue is free.
                self.shared.upgrade().inspect(|shared| shared.live.send_modify(|_| ()));
            }
        }
        let ended: Vec<Ended> = self.state.scheduler.drain_ended().collect();
        for ended in ended {
            self.end(&ended);
        }
    }

    fn end(&mut self, ended: &Ended) {
        self.watchers.iter_mut().for_each(|watcher| watcher.ended(ended));
        self.state.executor.unregister(ended.id);
        let Some(mut live) = self.live.remove(&ended.id) else { return };
        if let Some(at) = ended.admitted_ns
            && live.permit.is_some()
        {
            let miss = ended.miss.filter(|_| live.explain).map(|miss| miss.for_tenant());
            let not_loaded = ended.not_loaded.filter(|_| live.explain);
            live.admit(self.state.instant_of(at), ended.hit_tokens, ended.loaded, miss, not_loaded);
        }
        let ending = std::mem::take(&mut *live.end.lock().unwrap_or_else(|broken| broken.into_inner()));
        let done = |finish| {
            Event::Done(Done {
                finish,
                text: ending.text.clone(),
                usage: Usage {
                    prompt_tokens: ended.prompt_tokens,
                    completion_tokens: if live.generates { ended.generated } else { 0 },
                    cached_tokens: ended.hit_tokens + ended.loaded.iter().sum::<u32>(),
                    loaded_tokens: ended.loaded.iter().sum(),
                    preemptions: ended.preemptions,
                    drafts: self.state.executor.speculation().map(|_| DraftUsage {
                        draft_tokens: ended.draft_tokens,
                        accepted_tokens: ended.accepted_tokens,
                    }),
                },
            })
        };
        let event = match (ended.end, ending.failure) {
            (_, Some(failure)) => Event::Failed(failure),
            (End::Finished, None) => done(ending.finish.clone().unwrap_or(FinishReason::Length)),
            (End::Cancelled, None) if live.late => done(FinishReason::Deadline),
            (End::Cancelled, None) => done(FinishReason::Cancelled),
            // What the request generated so far is its answer.
            (End::Refused(RefusalReason::CacheFull), None) => done(FinishReason::Length),
            (End::Refused(RefusalReason::NeverFits), None) => {
                let capacity = self.shared.upgrade().map_or(0, |shared| shared.capacity_tokens.load(SeqCst));
                Event::Failed(Failure::NeverFits { needed: live.needed_tokens, capacity })
            }
            (End::Refused(reason), None) => {
                let failure = self.state.executor.failure().filter(|_| reason == RefusalReason::StepsFailed);
                let why = failure.map_or_else(|| reason.name().to_owned(), |failure| failure.to_string());
                Event::Failed(Failure::Engine(why))
            }
        };
        live.finish(event, &self.shared);
    }

    fn fail(&mut self, id: RequestId, failure: Failure) {
        self.state.executor.unregister(id);
        if let Some(live) = self.live.remove(&id) {
            live.finish(Event::Failed(failure), &self.shared);
        }
    }

    /// Publish the figures that `Engine::stats` returns between steps.
    fn publish_stats(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        let scheduler = &mut self.state.scheduler;
        let index = scheduler.cache_mut().prefixes().map(|prefixes| prefixes.report());
        let (used, evictable, free) =
            (scheduler.used_cells(), scheduler.evictable_cells(), scheduler.free_cells());
        let stats = EngineStats {
            running: scheduler.n_running(),
            waiting: scheduler.n_waiting() + scheduler.n_loading(),
            counters: *scheduler.counters(),
            capacity_cells: used + evictable + free,
            used_cells: used,
            evictable_cells: evictable,
            free_cells: free,
            stored_blocks: index.as_ref().map_or(0, |index| index.n_stored),
            evicted_blocks: index.as_ref().map_or(0, |index| index.n_evicted),
            recent_hits: index.map(|index| index.recent).unwrap_or_default(),
            kv_bytes: self.state.executor.kv_bytes(),
            kv_bytes_read: self.state.executor.counters().bytes_read,
            busy_ns: self.busy_ns,
            speculation: self.state.executor.speculation(),
            retained_tokens: self.state.scheduler.retained_tokens(),
            tiers: self.state.executor.tier_stats(&self.state.scheduler),
            removed_tokens: self.state.executor.removed_tokens(),
        };
        *shared.stats.lock().unwrap_or_else(|broken| broken.into_inner()) = stats;
    }
}

impl LiveJob {
    fn admit(
        &mut self,
        at: Instant,
        hit_tokens: u32,
        loaded_tokens: [u32; MAX_TIERS],
        miss: Option<kvist_cache::MissReason>,
        not_loaded: Option<NotLoaded>,
    ) {
        self.permit = None;
        let cached_tokens = hit_tokens + loaded_tokens.iter().sum::<u32>();
        let frozen_tokens = self.frozen_tokens.map(|tokens| tokens.min(hit_tokens));
        let admitted = Event::Admitted { at, cached_tokens, loaded_tokens, frozen_tokens, miss, not_loaded };
        let _ = self.events.send(admitted);
        let mut end = self.end.lock().unwrap_or_else(|broken| broken.into_inner());
        end.admitted = true;
        for event in end.early.drain(..) {
            let _ = self.events.send(event);
        }
    }

    fn finish(mut self, event: Event, shared: &std::sync::Weak<Shared>) {
        // Free the permit before the client learns of the end.
        self.permit = None;
        let _ = self.events.send(event);
        if let Some(shared) = shared.upgrade() {
            shared.live.send_modify(|n| *n -= 1);
        }
    }
}
