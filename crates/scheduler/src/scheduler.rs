//! The scheduler: what it holds, what it is told, and one turn.
//!
//! A turn: form the batch (`form.rs`), place it in the cache, make room or preempt where there is none
//! (`relief.rs`), execute, commit, and take note of what was sampled.
use crate::cache_shape::CacheShape;
use crate::config::{BadConfig, Config};
use crate::entry::{Entry, Key, State};
use crate::executor::{Batch, Executor, Outcome, Work};
use crate::lengths::{Order, Truth};
use crate::log::{Decision, Log};
use crate::memory::{At, Memory};
use crate::request::*;
use kvist_cache::{Cache, MissReason, Refused, SeqId, Span, Step, StepPlan, StepRequest};
use std::collections::{BTreeSet, HashMap};

/// Decides who runs. See the crate's documentation for what it promises.
pub struct Scheduler {
    pub(crate) config: Config,
    pub(crate) order: Order,
    pub(crate) memory: Memory,
    /// A slab: a request keeps its slot from arrival to end.
    pub(crate) entries: Vec<Entry>,
    vacant: Vec<u32>,
    /// Asked by id, never iterated.
    by_id: HashMap<RequestId, u32>,
    pub(crate) waiting: BTreeSet<Key>,
    /// Those of `waiting` that hold cells.
    pub(crate) holders: BTreeSet<Key>,
    /// Slots in the order of admission: sequence numbers ascend.
    pub(crate) running: Vec<u32>,
    /// Prefills of the step that is being formed, by rank.
    pub(crate) prefilling: Vec<Key>,
    pub(crate) batch: Vec<Work>,
    spans: Vec<Span<'static>>,
    plan: StepPlan,
    outcome: Outcome,
    /// Has this turn changed who is in the batch, or made room? Then its step runs alone, and the driver can look.
    pub(crate) moved: bool,
    /// Tokens of prompts that the step may have at most: less than the budget where a window group is smaller.
    pub(crate) prompt_limit: u32,
    /// Nobody could be admitted, for want of memory, when this much was to spare. It stays so until there is more,
    /// the index learns something, or somebody arrives, ends or is released.
    pub(crate) blocked: Option<i128>,
    /// What conservative admission has set aside.
    pub(crate) reserved: u64,
    pub(crate) next_seq: u32,
    arrivals: u64,
    n_events: u64,
    failures: u32,
    pub(crate) explain: bool,
    pub(crate) ended: Vec<Ended>,
    pub(crate) counters: Counters,
    pub(crate) decisions: Log,
    events: Log,
}

/// What happened so far, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Steps that succeeded; a run of steps counts each.
    pub steps: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Tokens computed in steps that succeeded.
    pub computed_tokens: u64,
    /// Tokens sampled.
    pub sampled_tokens: u64,
    /// Tokens that the prefix index supplied, readmissions included.
    pub hit_tokens: u64,
    /// Tokens lost to preemptions.
    pub lost_tokens: u64,
    /// Requests that lost their place in the batch, each time.
    pub preemptions: u64,
    /// Times that indexed blocks were evicted for a step.
    pub make_rooms: u64,
}

/// Where a live request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its sequence, while it holds cells.
    pub seq: Option<SeqId>,
    /// Has it a place in the batch?
    pub running: bool,
    /// When it first had one.
    pub admitted_ns: Option<u64>,
    /// Tokens whose K and V it holds.
    pub cached_tokens: u32,
    /// Tokens that the prefix index supplied on its first admission.
    pub hit_tokens: u32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub generated: u32,
    /// How often it lost its place.
    pub preemptions: u32,
    /// Why the index supplied no more, as an operator may know it; if that was asked.
    pub miss: Option<MissReason>,
}

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It ran this many steps, in this time.
    Ran {
        /// More than 1 where the executor foresaw.
        steps: u32,
        /// All of them together.
        elapsed_ns: u64,
    },
    /// There is nothing to do until a request arrives.
    Idle,
}

/// A request with this id is live. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {0} is live: ids are unique among live requests")]
pub struct Duplicate(pub RequestId);

impl Scheduler {
    /// A scheduler over `cache`, of a kind that holds many sequences, and which holds none yet. `truth` is given exactly when the
    /// configuration says `oracle`.
    pub fn new(config: Config, cache: Cache, truth: Option<Box<dyn Truth>>) -> Result<Scheduler, BadConfig> {
        config.check()?;
        Ok(Scheduler {
            order: Order::build(&config, truth)?,
            memory: Memory::new(cache)?,
            config,
            entries: Vec::new(),
            vacant: Vec::new(),
            by_id: HashMap::new(),
            waiting: BTreeSet::new(),
            holders: BTreeSet::new(),
            running: Vec::new(),
            prefilling: Vec::new(),
            batch: Vec::new(),
            spans: Vec::new(),
            plan: StepPlan::default(),
            outcome: Outcome::default(),
            moved: false,
            prompt_limit: 0,
            blocked: None,
            reserved: 0,
            next_seq: 0,
            arrivals: 0,
            n_events: 0,
            failures: 0,
            explain: false,
            ended: Vec::new(),
            counters: Counters::default(),
            decisions: Log::default(),
            events: Log::default(),
        })
    }

    /// Write down what comes in and what is decided, from now on: call it before the first event.
    pub fn record(&mut self) {
        let cache = self.memory.cache.paged_spec().map(CacheShape::of);
        self.events.start("kvist-events", &self.config, cache.as_ref());
        self.decisions.start("kvist-decisions", &self.config, None);
    }
    /// No longer; what was not taken is gone.
    pub fn record_no_more(&mut self) {
        self.events.stop();
        self.decisions.stop();
    }
    /// Ask the prefix index, at every first admission, why it supplies no more: [`Ended::miss`]. No decision depends
    /// on it.
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
    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }
    /// The cache, for reports.
    pub fn cache(&self) -> &Cache {
        &self.memory.cache
    }
    /// The cache, for verbs that change no sequence of the scheduler's: event logs of the cache itself.
    pub fn cache_mut(&mut self) -> &mut Cache {
        &mut self.memory.cache
    }
    /// Requests that wait, paused ones included.
    pub fn n_waiting(&self) -> usize {
        self.waiting.len()
    }
    /// Requests in the batch.
    pub fn n_running(&self) -> usize {
        self.running.len()
    }
    /// Cells that sequences hold: those of the smallest layer group that keeps everything.
    pub fn held_cells(&self) -> u64 {
        self.memory.held()
    }
    /// Cells that an index knows and nobody holds, there.
    pub fn idle_cells(&self) -> u64 {
        self.memory.idle()
    }
    /// Cells that nobody holds and no index knows, there.
    pub fn free_cells(&self) -> u64 {
        self.memory.free()
    }
    /// Requests that hold cells, and the sequence that each of them has. In no order that means anything, but the same in
    /// every run.
    pub fn held(&self) -> impl Iterator<Item = (RequestId, SeqId)> {
        let live = self.entries.iter().filter(|entry| entry.state != State::Vacant);
        live.filter_map(|entry| Some((entry.id, entry.seq?)))
    }
    /// What is known of a live request, its answer excepted; `None` if there is none.
    pub fn standing(&self, id: RequestId) -> Option<Standing> {
        let entry = &self.entries[*self.by_id.get(&id)? as usize];
        Some(Standing {
            seq: entry.seq,
            running: entry.state == State::Running,
            admitted_ns: entry.admitted_ns,
            cached_tokens: entry.cached,
            hit_tokens: entry.hit_tokens,
            prompt_tokens: entry.prompt_tokens,
            generated: entry.generated(),
            preemptions: entry.preemptions,
            miss: entry.miss,
        })
    }
    /// What ended since the last call, in order.
    pub fn drain_ended(&mut self) -> std::vec::Drain<'_, Ended> {
        self.ended.drain(..)
    }

    fn event(&mut self) -> u64 {
        self.n_events += 1;
        self.n_events - 1
    }

    pub(crate) fn at(&self, now_ns: u64) -> At {
        At { step: self.counters.steps, now_ns }
    }

    pub(crate) fn key(&self, slot: u32) -> Key {
        let entry = &self.entries[slot as usize];
        Key { rank: self.order.rank(&entry.view()), arrival: entry.number, slot }
    }

    pub(crate) fn decide(&mut self, at: At, decision: Decision<'_>) {
        self.decisions.decide(at.step, at.now_ns, decision);
    }

    /// A request arrives, between turns. One that can never be served ends at once, with the reason.
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
            share: 0,
            stored: 0,
            computed: 0,
            id: request.id,
            number: self.arrivals,
            arrival_ns: request.arrival_ns,
            deadline_ns: request.deadline_ns,
            priority: request.priority,
            expected_new: 1,
            salt: request.salt,
            prompt: request.prompt,
            fresh: request.fresh,
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
        };
        self.arrivals += 1;
        if let Some(reason) = refused {
            let at = self.at(now_ns);
            self.ended.push(entry.ended(End::Refused(reason), now_ns));
            self.decide(at, Decision::End { id: entry.id, how: reason.name(), generated: 0 });
            return Ok(());
        }
        entry.expected_new = self.order.expect(&entry.view());
        let id = entry.id;
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.entries[slot as usize] = entry;
                slot
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.by_id.insert(id, slot);
        self.wait(slot);
        self.blocked = None;
        Ok(())
    }

    /// Why it can never be served, not even alone.
    fn unservable(&self, request: &Request) -> Option<Reason> {
        if request.prompt_tokens == 0 {
            return Some(Reason::EmptyPrompt);
        }
        if request.max_new == 0 {
            return Some(Reason::NothingToGenerate);
        }
        let content = match &request.prompt {
            Prompt::Unknown => u64::from(request.prompt_tokens),
            Prompt::Tokens(tokens) => tokens.len() as u64,
            Prompt::SharedTokens(tokens) => tokens.len() as u64,
            Prompt::Ids { ids, tokens_per_id, n_tokens } => {
                if u64::from(*n_tokens) > ids.len() as u64 * u64::from(*tokens_per_id) {
                    return Some(Reason::Malformed);
                }
                u64::from(*n_tokens)
            }
        };
        if content < u64::from(request.prompt_tokens) {
            return Some(Reason::Malformed);
        }
        if !self.memory.accepts(&request.prompt) {
            return Some(Reason::ForeignContent);
        }
        let Some(whole) = request.prompt_tokens.checked_add(request.max_new) else {
            return Some(Reason::Malformed);
        };
        // The last token is sampled and never fed.
        (self.memory.cells(whole - 1) > self.memory.capacity()).then_some(Reason::NeverFits)
    }

    /// The user went away, between turns: memory is free before the next step. `false` if no such request is live.
    pub fn cancel(&mut self, now_ns: u64, id: RequestId) -> bool {
        let Some(&slot) = self.by_id.get(&id) else { return false };
        let n = self.event();
        self.events.cancel(n, now_ns, id);
        let at = self.at(now_ns);
        self.end(at, slot, End::Cancelled);
        true
    }

    /// Form one step at `now_ns`, execute it and take note; or a run of steps, where the executor foresees.
    pub fn turn(&mut self, now_ns: u64, executor: &mut dyn Executor) -> Turn {
        let at = self.at(now_ns);
        let decided = self.ended.len();
        self.moved = false;
        self.prompt_limit = self.memory.chunk_limit();
        let mut admit = true;
        let steps = loop {
            if !self.form(at, admit) {
                if self.ended.len() > decided {
                    let n = self.event();
                    self.events.idle(n, now_ns);
                }
                return Turn::Idle;
            }
            let steps = if self.moved { 1 } else { self.foresee(now_ns, executor) };
            // Who runs, and with how many tokens, does not depend on blocks that nobody holds: as long as nobody has
            // come or gone, the step is the same once they are evicted, and need not be formed again.
            if steps == 1
                && !self.moved
                && let Some((group, needed, available)) = self.memory.shortfall(self.growth(1))
                && !self.relieve(at, group, needed, available)
            {
                admit = self.running.is_empty();
                continue;
            }
            self.spans.clear();
            let seq = |w: &Work| self.entries[w.slot as usize].seq.expect("who runs has a sequence");
            self.spans.extend(self.batch.iter().map(|w| Span::chain(seq(w), w.first, w.n_tokens)));
            let request = StepRequest { spans: &self.spans };
            match Step::begin(&mut self.memory.cache, &request, &mut self.plan) {
                Ok(mut step) => {
                    self.outcome.failed = false;
                    self.outcome.elapsed_ns = 0;
                    self.outcome.sampled.clear();
                    let batch = Batch { work: &self.batch, steps, entries: &self.entries };
                    executor.execute(now_ns, &mut step, batch, &mut self.outcome);
                    if !self.outcome.failed {
                        step.commit();
                    }
                    break steps;
                }
                // Another group than the one that is counted: one by one, then.
                Err(Refused::NoSpace { .. }) if steps > 1 => self.moved = true,
                Err(Refused::NoSpace { group, needed, free, reclaimable }) => {
                    self.relieve(at, group, needed, free.saturating_add(reclaimable));
                    // Who was preempted for space does not come back in the same turn, unless nobody is left.
                    admit = self.running.is_empty();
                }
                Err(refused) => panic!("the cache refused a step of {} spans: {refused}", self.spans.len()),
            }
        };
        let n = self.event();
        self.events.outcome(n, now_ns, steps, &self.outcome);
        let elapsed_ns = self.outcome.elapsed_ns;
        let end = now_ns.saturating_add(elapsed_ns);
        if self.outcome.failed {
            self.note_failure(at, end);
        } else {
            self.note_success(at, steps, end);
        }
        Turn::Ran { steps, elapsed_ns }
    }

    fn note_failure(&mut self, at: At, end_ns: u64) {
        self.counters.failed_steps += 1;
        self.failures += 1;
        self.decide(at, Decision::Failed);
        if self.failures < self.config.max_failures {
            return;
        }
        self.failures = 0;
        let at = At { now_ns: end_ns, ..at };
        for i in 0..self.batch.len() {
            self.end(at, self.batch[i].slot, End::Refused(Reason::StepsFailed));
        }
    }

    fn note_success(&mut self, at: At, steps: u32, end_ns: u64) {
        self.failures = 0;
        self.counters.steps += u64::from(steps);
        let n_sampled = self.batch.iter().filter(|w| w.samples).count();
        let got = self.outcome.sampled.len();
        assert_eq!(n_sampled, got, "{n_sampled} shares sample a token, the executor returned {got}");
        let log_chunks = self.decisions.is_on();
        let block = self.memory.block_tokens();
        let end = At { step: self.counters.steps - 1, now_ns: end_ns };
        let mut sampled = 0;
        for i in 0..self.batch.len() {
            let work = self.batch[i];
            if log_chunks && !work.decodes {
                let Work { request: id, first, n_tokens: n, .. } = work;
                self.decide(at, Decision::Chunk { id, first, n });
            }
            let entry = &mut self.entries[work.slot as usize];
            entry.cached += work.n_tokens;
            entry.computed += u64::from(work.n_tokens);
            self.counters.computed_tokens += u64::from(work.n_tokens);
            let mut finished = false;
            if work.samples {
                let token = self.outcome.sampled[sampled];
                sampled += 1;
                entry.append(token.token);
                entry.known += steps;
                self.counters.sampled_tokens += u64::from(steps);
                entry.first_token_ns.get_or_insert(end_ns);
                finished = token.finished || entry.generated() >= entry.max_new;
            }
            let full = entry.cached.min(entry.known_content());
            let full = full - full % block;
            if full > entry.stored {
                let stored = std::mem::replace(&mut entry.stored, full);
                let seq = entry.seq.expect("who runs has a sequence");
                if self.memory.store(seq, &entry.prompt, stored, full, end) > 0 {
                    self.blocked = None;
                }
            }
            if finished {
                self.end(end, work.slot, End::Finished);
            }
        }
    }

    /// Put a request into the queue, at its rank of this moment.
    pub(crate) fn wait(&mut self, slot: u32) {
        let key = self.key(slot);
        let entry = &mut self.entries[slot as usize];
        entry.state = State::Waiting(key);
        if entry.seq.is_some() {
            self.holders.insert(key);
        }
        self.waiting.insert(key);
    }

    /// Take a request out of the queue or the batch.
    pub(crate) fn leave(&mut self, slot: u32) {
        self.moved = true;
        match self.entries[slot as usize].state {
            State::Waiting(key) => {
                self.waiting.remove(&key);
                self.holders.remove(&key);
            }
            State::Running => self.running.retain(|&other| other != slot),
            State::Vacant => panic!("slot {slot} is vacant"),
        }
        self.entries[slot as usize].state = State::Vacant;
    }

    /// Give back what a request holds in the cache.
    pub(crate) fn release(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        self.reserved -= std::mem::take(&mut entry.reserved);
        entry.stored = 0;
        entry.cached = 0;
        if let Some(seq) = entry.seq.take() {
            self.memory.release(seq);
            self.blocked = None;
        }
    }

    /// The one place where requests end.
    pub(crate) fn end(&mut self, at: At, slot: u32, end: End) {
        self.leave(slot);
        self.release(slot);
        self.blocked = None;
        let entry = &mut self.entries[slot as usize];
        entry.prompt = Prompt::Unknown;
        let (id, generated) = (entry.id, entry.generated());
        self.ended.push(entry.ended(end, at.now_ns));
        self.by_id.remove(&id);
        self.vacant.push(slot);
        let how = match end {
            End::Finished => {
                self.order.observe(generated);
                "finished"
            }
            End::Cancelled => "cancelled",
            End::Refused(reason) => reason.name(),
        };
        self.decide(at, Decision::End { id, how, generated });
    }
}
