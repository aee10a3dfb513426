//! The scheduler: its state, its inputs, and the queues of requests. `iteration.rs` plans and completes steps.
use crate::config::{BadConfig, Config};
use crate::drafts::BatchDrafts;
use crate::entry::{Entry, Key, Lower, State};
use crate::executor::Work;
use crate::lengths::{Order, Truth};
use crate::log::CacheShape;
use crate::log::{Decision, Log};
use crate::memory::{Memory, StepTime};
use crate::outcome::Outcome;
use crate::request::*;
use crate::resize::Resizing;
use crate::retain::Shelf;
use crate::tiers::{MAX_TIERS, NotLoaded, TierState};
use kvist_cache::{Cache, MissReason, Prompt, SeqId, Span, StepPlan};
use std::collections::{BTreeSet, HashMap};

/// Decides which requests run. The crate documentation lists its guarantees.
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) order: Order,
    pub(crate) memory: Memory,
    /// Slab of live requests. A request keeps its index from arrival to end.
    pub(crate) entries: Vec<Entry>,
    vacant: Vec<u32>,
    /// Index of each live request. Used for lookups only and never iterated, because its order is not deterministic.
    pub(crate) by_id: HashMap<RequestId, u32>,
    pub(crate) waiting: BTreeSet<Key>,
    /// The waiting requests (a subset of `waiting`) that still have a sequence in the cache.
    pub(crate) paused: BTreeSet<Key>,
    /// Indices of the running requests in ascending order of sequence id.
    pub(crate) running: Vec<u32>,
    /// Prefills of the step being built, ordered by rank.
    pub(crate) prefilling: Vec<Key>,
    pub(crate) batch: Vec<Work>,
    pub(crate) spans: Vec<Span<'static>>,
    pub(crate) plan: StepPlan,
    /// The drafts that were proposed for the batch.
    pub(crate) drafts: BatchDrafts,
    /// True if the batch was placed without them, because they did not fit.
    pub(crate) drafts_dropped: bool,
    pub(crate) outcome: Outcome,
    /// True if this iteration changed the batch membership or evicted blocks. The step then runs alone instead of as
    /// part of a multi-step run, so that the driver can observe the change.
    pub(crate) batch_changed: bool,
    /// Maximum prompt tokens in this step. Smaller than the token budget if a sliding-window group has less space.
    pub(crate) prompt_limit: u32,
    /// Set when an admission failed for lack of memory: the surplus at that time. Admission is not retried until
    /// the surplus has grown, the prefix index gains a block, or a request arrives, ends or loses its cells.
    pub(crate) blocked: Option<i128>,
    /// Cells reserved by conservative admission.
    pub(crate) reserved: u64,
    pub(crate) next_seq: u32,
    arrivals: u64,
    pub(crate) n_events: u64,
    pub(crate) failures: u32,
    pub(crate) explain: bool,
    pub(crate) ended: Vec<Ended>,
    pub(crate) counters: SchedulerCounters,
    pub(crate) decisions: Log,
    pub(crate) events: Log,
    pub(crate) tiers: Option<Box<TierState>>,
    pub(crate) shelf: Shelf,
    pub(crate) resizing: Option<Resizing>,
}

/// Running totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct SchedulerCounters {
    /// Successful steps. A multi-step run counts each of its steps.
    pub steps: u64,
    /// Failed steps.
    pub failed_steps: u64,
    /// Tokens computed in successful steps, rejected drafts included.
    pub computed_tokens: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Draft trees that were verified.
    pub drafts: u64,
    /// Tokens of those trees.
    pub draft_tokens: u64,
    /// Draft tokens that the target model accepted.
    pub accepted_tokens: u64,
    /// Tokens served from the prefix index, including on readmission after a preemption.
    pub hit_tokens: u64,
    /// Cached tokens lost to preemption.
    pub lost_tokens: u64,
    /// Preemptions: how often a running request was moved out of the batch.
    pub preemptions: u64,
    /// How often cached blocks were evicted to make a step fit.
    #[serde(rename = "make_rooms")]
    pub evictions: u64,
}

/// The state of a live request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestStatus {
    /// Its sequence, if it has cells in the cache.
    pub seq: Option<SeqId>,
    /// True if the request is in the batch.
    pub running: bool,
    /// When it was first admitted.
    pub admitted_ns: Option<u64>,
    /// Tokens whose K and V are in the cache.
    pub cached_tokens: u32,
    /// Tokens served from the prefix index at its first admission.
    pub hit_tokens: u32,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated: u32,
    /// How often it was preempted.
    pub preemptions: u32,
    /// Why the prefix index supplied no more, in the detail an operator may see. `None` unless
    /// [`Scheduler::explain_misses`] is on.
    pub miss: Option<MissReason>,
    /// Tokens loaded from tiers, by tier.
    pub loaded: [u32; MAX_TIERS],
    /// Why not more, if a tier has more or may have.
    pub not_loaded: Option<NotLoaded>,
}

/// A request with this id is already live. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is live: ids are unique among live requests")]
pub struct Duplicate(pub RequestId);

impl Scheduler {
    /// Creates a scheduler over `cache`, which must be a kind that supports many sequences and must contain none yet.
    /// `truth` must be given exactly when `config.lengths` is `oracle`.
    pub fn new(config: Config, cache: Cache, truth: Option<Box<dyn Truth>>) -> Result<Scheduler, BadConfig> {
        config.check()?;
        let memory = Memory::new(cache, config.thinned)?;
        let tiers = config
            .tiers
            .as_ref()
            .map(|tiers| TierState::new(tiers, config.max_batch_tokens, &memory))
            .transpose()?;
        Ok(Scheduler {
            order: Order::build(&config, truth)?,
            memory,
            config,
            tiers: tiers.map(Box::new),
            shelf: Shelf::default(),
            resizing: None,
            entries: Vec::new(),
            vacant: Vec::new(),
            by_id: HashMap::new(),
            waiting: BTreeSet::new(),
            paused: BTreeSet::new(),
            running: Vec::new(),
            prefilling: Vec::new(),
            batch: Vec::new(),
            spans: Vec::new(),
            plan: StepPlan::default(),
            drafts: BatchDrafts::default(),
            drafts_dropped: false,
            outcome: Outcome::default(),
            batch_changed: false,
            prompt_limit: 0,
            blocked: None,
            reserved: 0,
            next_seq: 0,
            arrivals: 0,
            n_events: 0,
            failures: 0,
            explain: false,
            ended: Vec::new(),
            counters: SchedulerCounters::default(),
            decisions: Log::default(),
            events: Log::default(),
        })
    }

    /// Starts recording the event log and the decision log. Call it before the first event.
    pub fn record(&mut self) {
        let cache = self.memory.cache.paged_spec().map(CacheShape::of);
        self.events.start("kvist-events", &self.config, cache.as_ref());
        self.decisions.start("kvist-decisions", &self.config, None);
    }
    /// Stops recording. Log lines that were not taken are discarded.
    pub fn stop_recording(&mut self) {
        self.events.stop();
        self.decisions.stop();
    }
    /// Asks the prefix index at every first admission why it supplies no more; the answer is in [`Ended::miss`]. No
    /// decision depends on it.
    pub fn explain_misses(&mut self, on: bool) {
        self.explain = on;
    }
    /// The event log.
    pub fn events(&mut self) -> &mut Log {
        &mut self.events
    }
    /// The decision log.
    pub fn decisions(&mut self) -> &mut Log {
        &mut self.decisions
    }
    /// Running totals.
    pub fn counters(&self) -> &SchedulerCounters {
        &self.counters
    }
    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }
    /// The cache, read-only, for reports.
    pub fn cache(&self) -> &Cache {
        &self.memory.cache
    }
    /// The cache, for operations that do not change the scheduler's sequences, such as the cache's own event logs.
    pub fn cache_mut(&mut self) -> &mut Cache {
        &mut self.memory.cache
    }
    /// Number of waiting requests, including paused ones (preempted but with their cache kept).
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }
    /// Number of requests in the batch.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }
    /// Cells in use by sequences, counted in the smallest layer group without a sliding window.
    pub fn used_cells(&self) -> u64 {
        self.memory.used()
    }
    /// Cells of cached blocks that no sequence uses (ref_count 0), in the same group. They can be evicted.
    pub fn evictable_cells(&self) -> u64 {
        self.memory.evictable()
    }
    /// Free cells (neither in use nor cached), in the same group.
    pub fn free_cells(&self) -> u64 {
        self.memory.free()
    }
    /// Requests that have cells in the cache, each with its sequence. The order has no meaning but is the same in
    /// every run.
    pub fn sequences(&self) -> impl Iterator<Item = (RequestId, SeqId)> {
        let live = self.entries.iter().filter(|entry| entry.state != State::Vacant);
        live.filter_map(|entry| Some((entry.id, entry.seq?)))
    }
    /// The state of a live request, without its generated tokens. `None` if no live request has this id.
    pub fn status(&self, id: RequestId) -> Option<RequestStatus> {
        let entry = &self.entries[*self.by_id.get(&id)? as usize];
        Some(RequestStatus {
            seq: entry.seq,
            running: entry.state == State::Running,
            admitted_ns: entry.admitted_ns,
            cached_tokens: entry.cached,
            hit_tokens: entry.hit_tokens,
            prompt_tokens: entry.prompt_tokens,
            generated: entry.generated(),
            preemptions: entry.preemptions,
            miss: entry.miss,
            loaded: entry.loaded,
            not_loaded: entry.not_loaded,
        })
    }
    /// Requests that ended since the last call, in the order they ended.
    pub fn drain_ended(&mut self) -> std::vec::Drain<'_, Ended> {
        self.ended.drain(..)
    }

    pub(crate) fn event(&mut self) -> u64 {
        self.n_events += 1;
        self.n_events - 1
    }

    pub(crate) fn timestamp(&self, now_ns: u64) -> StepTime {
        StepTime { step: self.counters.steps, now_ns }
    }

    pub(crate) fn key(&self, index: u32) -> Key {
        let entry = &self.entries[index as usize];
        Key { rank: self.order.rank(&entry.view()), arrival: entry.number, index }
    }

    pub(crate) fn decide(&mut self, now: StepTime, decision: Decision<'_>) {
        self.decisions.decide(now.step, now.now_ns, decision);
    }

    /// Adds a request; call it between iterations. A request that can never be served ends at once, with the reason.
    pub fn arrive(&mut self, now_ns: u64, request: Request) -> Result<(), Duplicate> {
        if self.by_id.contains_key(&request.id) {
            return Err(Duplicate(request.id));
        }
        let n = self.event();
        self.events.arrive(n, now_ns, &request);
        let refused = self.unservable(&request);
        let mut entry = Entry {
            state: State::Vacant,
            seq: None,
            cached: 0,
            known: request.prompt_tokens,
            prompt_tokens: request.prompt_tokens,
            max_new: request.max_new,
            scheduled: 0,
            stored: 0,
            computed: 0,
            draft_tokens: 0,
            accepted_tokens: 0,
            id: request.id,
            number: self.arrivals,
            arrival_ns: request.arrival_ns,
            deadline_ns: request.deadline_ns,
            priority: request.priority,
            expected_new: 1,
            salt: request.salt,
            prompt: request.prompt,
            skip_prefix_cache: request.skip_prefix_cache,
            retain: request.retain,
            reserved: 0,
            found: None,
            overtaken: 0,
            admitted_ns: None,
            first_token_ns: None,
            hit_tokens: 0,
            regained_tokens: 0,
            lost_tokens: 0,
            preemptions: 0,
            miss: None,
            was_opened: false,
            lower: Lower::Done,
            asked_ns: now_ns,
            found_until: 0,
            declined_until: 0,
            loaded: [0; MAX_TIERS],
            not_loaded: None,
        };
        self.arrivals += 1;
        if let Some(reason) = refused {
            let now = self.timestamp(now_ns);
            self.ended.push(entry.ended(End::Refused(reason), now_ns));
            self.decide(now, Decision::End { id: entry.id, how: reason.name(), generated: 0 });
            return Ok(());
        }
        entry.expected_new = self.order.expect(&entry.view());
        let id = entry.id;
        let index = match self.vacant.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.by_id.insert(id, index);
        self.ask_tiers(now_ns, index, false);
        self.wait(index);
        self.blocked = None;
        Ok(())
    }

    /// The reason why this request could not be served even with the whole cache to itself, if there is one.
    fn unservable(&self, request: &Request) -> Option<RefusalReason> {
        if request.prompt_tokens == 0 {
            return Some(RefusalReason::EmptyPrompt);
        }
        if request.max_new == 0 {
            return Some(RefusalReason::NothingToGenerate);
        }
        if let Prompt::Ids { ids, tokens_per_id, n_tokens } = &request.prompt
            && u64::from(*n_tokens) > ids.len() as u64 * u64::from(*tokens_per_id)
        {
            return Some(RefusalReason::Malformed);
        }
        if request.prompt.vocabulary().is_some() && request.prompt.known_tokens() < request.prompt_tokens {
            return Some(RefusalReason::Malformed);
        }
        if !self.memory.accepts(&request.prompt) {
            return Some(RefusalReason::ForeignContent);
        }
        let Some(whole) = request.prompt_tokens.checked_add(request.max_new) else {
            return Some(RefusalReason::Malformed);
        };
        // The last sampled token is never fed back, so it needs no cell.
        (self.memory.cells(whole - 1) > self.memory.capacity()).then_some(RefusalReason::NeverFits)
    }

    /// Cancels a request; call it between iterations. Its memory is free before the next step. Returns `false` if no
    /// live request has this id.
    pub fn cancel(&mut self, now_ns: u64, id: RequestId) -> bool {
        let Some(&index) = self.by_id.get(&id) else { return false };
        let n = self.event();
        self.events.cancel(n, now_ns, id);
        let now = self.timestamp(now_ns);
        self.end(now, index, End::Cancelled);
        true
    }

    /// Inserts a request into the waiting queue at its current rank.
    pub(crate) fn wait(&mut self, index: u32) {
        let key = self.key(index);
        let entry = &mut self.entries[index as usize];
        entry.state = State::Waiting(key);
        if entry.seq.is_some() {
            self.paused.insert(key);
        }
        self.waiting.insert(key);
    }

    /// Removes a request from the waiting queue or from the batch.
    pub(crate) fn leave(&mut self, index: u32) {
        self.batch_changed = true;
        match self.entries[index as usize].state {
            State::Waiting(key) => {
                self.waiting.remove(&key);
                self.paused.remove(&key);
            }
            State::Running => self.running.retain(|&other| other != index),
            State::Loading => {
                if let Some(tiers) = &mut self.tiers {
                    tiers.loading.retain(|&other| other != index);
                }
            }
            State::Vacant => panic!("entry {index} is vacant"),
        }
        self.entries[index as usize].state = State::Vacant;
    }

    /// Frees the cache memory of a request.
    pub(crate) fn release(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        self.reserved -= std::mem::take(&mut entry.reserved);
        entry.stored = 0;
        entry.cached = 0;
        if let Some(seq) = entry.seq.take() {
            self.memory.release(seq);
            self.blocked = None;
        }
    }

    /// Ends a request. Every request ends here.
    pub(crate) fn end(&mut self, now: StepTime, index: u32, end: End) {
        self.cancel_load(index);
        self.set_lower(index, Lower::Done);
        self.retain(now, index);
        self.leave(index);
        self.release(index);
        self.blocked = None;
        let entry = &mut self.entries[index as usize];
        entry.prompt = Prompt::Unknown;
        let (id, generated) = (entry.id, entry.generated());
        self.ended.push(entry.ended(end, now.now_ns));
        self.by_id.remove(&id);
        self.vacant.push(index);
        let how = match end {
            End::Finished => {
                self.order.observe(generated);
                "finished"
            }
            End::Cancelled => "cancelled",
            End::Refused(reason) => reason.name(),
        };
        self.decide(now, Decision::End { id, how, generated });
    }
}
