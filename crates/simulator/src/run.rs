//! The event loop: the real scheduler and cache bookkeeping, driven in virtual time.
//!
//! Requests arrive between steps, ordered by time and, at equal times, by list position. A follow-up arrives after its
//! parent ends. The executor gets step times from a cost model and knows when answers end. It tells the scheduler how
//! many decode steps pass before the next arrival or end; those run as one, and the results are byte-identical to
//! single steps.
//!
//! Guarantee: results are a function of the requests, cache, cost model and options. The loop makes no scheduling
//! decision.
mod executor;
mod memory;
mod queue;
mod watch;

pub use executor::SimExecutor;
pub use kvist_scheduler::{Part, RECORDING_VERSION, Recorder};
pub use queue::Arrivals;

use crate::cost::StepCost;
use crate::report::{CacheCounts, Load, Outcome, Record, RequestRow};
use crate::request::{PromptContent, Request};
use kvist_cache::Cache;
use kvist_scheduler as scheduler;
use kvist_scheduler::{
    BadConfig, Clock, Config, Counters, End, Ended, LengthSource, Prompt, Recording, RequestId, Scheduler,
    Truth, Turn, VirtualClock,
};
use memory::Memory;
use std::sync::Arc;
use watch::{Blocks, Watched};

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The scheduler's configuration.
    pub scheduler: Config,
    /// Minimum `max_new` of every request; a longer answer gets its true length. `None`: exactly the true length, so
    /// that `max_new` predicts as well as an oracle.
    pub max_new: Option<u32>,
    /// Deadline relative to arrival, for requests that have none of their own.
    pub deadline_ns: Option<u64>,
    /// Run every step by itself. Slower, with the same result, which tests compare. Recorded runs always do this.
    pub one_by_one: bool,
    /// Ask the prefix index why each request missed.
    pub explain: bool,
    /// Record the time between tokens.
    pub itl: bool,
    /// Record when each request was worked on and, if the cache is bounded, the state of every block. Used for plots.
    pub watch: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            scheduler: Config::default(),
            max_new: None,
            deadline_ns: None,
            one_by_one: false,
            explain: false,
            itl: true,
            watch: false,
        }
    }
}

/// Why a run has no result.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The scheduler rejects this configuration.
    #[error(transparent)]
    BadConfig(#[from] BadConfig),
    /// Virtual time ends at 2^63 ns. Results beyond it would be wrong, so the run fails.
    #[error(
        "virtual time has passed 292 years after {ended} of {requests} requests: steps take too long ({cost}), or \
         requests arrive too late"
    )]
    TimeIsUp {
        /// Requests that had ended.
        ended: usize,
        /// Number of requests in the run.
        requests: usize,
        /// Name of the cost model.
        cost: String,
    },
}

/// The result of a run.
#[derive(Debug)]
pub struct Run {
    /// Data for reports.
    pub record: Record,
    /// The scheduler's counters.
    pub counters: Counters,
    /// Scheduler turns that ran something. Fewer than steps if several steps ran as one.
    pub turns: u64,
}

/// The true output lengths, which only a simulation knows.
struct Lengths(Arc<[u32]>);

impl Truth for Lengths {
    fn output_tokens(&self, id: RequestId) -> u32 {
        self.0[id.0 as usize]
    }
}

/// Runs `requests` through a scheduler over `cache`, which must be empty. After every turn in which a request ended,
/// `progress` gets the number of ended requests. `sink` gets all arrivals, decisions and block events as JSON lines
/// (docs/simulator.md), in which requests are named by list index.
///
/// # Errors
/// [`RunError`]
pub fn run<'s>(
    requests: &[Request],
    cache: Cache,
    cost: &dyn StepCost,
    options: &Options,
    mut sink: Option<&'s mut Recorder<'s>>,
    progress: &mut dyn FnMut(usize),
) -> Result<Run, RunError> {
    let lengths: Arc<[u32]> = requests.iter().map(|r| r.output_tokens).collect();
    let oracle = options.scheduler.lengths == LengthSource::Oracle;
    let truth = oracle.then(|| Box::new(Lengths(lengths.clone())) as Box<dyn Truth>);
    let block_tokens = cache.occupancy().next().map_or(1, |room| room.block_tokens);
    let capacity = cache.occupancy().map(|room| room.capacity_cells).min().unwrap_or(0);
    let endless = capacity >= u32::MAX / block_tokens * block_tokens;
    let mut scheduler = Scheduler::new(options.scheduler.clone(), cache, truth)?;
    scheduler.explain_misses(options.explain);
    let one_by_one = options.one_by_one || sink.is_some();
    let mut memory = Memory::new(scheduler.cache_mut());
    let mut recording = sink.as_deref_mut().map(|sink| Recording::begin(&mut scheduler, sink));
    let mut executor = SimExecutor::new(cost, &lengths, block_tokens, one_by_one, options.itl);
    executor.watched = options.watch.then(Watched::default);
    let n_blocks = capacity / block_tokens;
    let mut blocks = (options.watch && !endless).then(|| Blocks::new(n_blocks));
    let mut arrivals = Arrivals::new(requests);
    let mut clock = VirtualClock::default();
    let mut rows: Vec<RequestRow> = requests.iter().map(waiting_row).collect();
    let mut cache_counts = CacheCounts {
        block_tokens,
        capacity_blocks: (!endless).then_some((capacity / block_tokens).into()),
        ..CacheCounts::default()
    };
    let mut record = Record::default();
    let mut run = Notes { load: Load::default(), changed: false, preemptions: 0 };
    let (mut n_ended, mut turns) = (0, 0);
    clock.sleep_until(arrivals.next_ns().unwrap_or(0)); // time starts at the first arrival
    loop {
        let now = clock.now_ns();
        if now > i64::MAX as u64 {
            return Err(RunError::TimeIsUp { ended: n_ended, requests: requests.len(), cost: cost.name() });
        }
        while let Some((at_ns, i)) = arrivals.pop(now) {
            rows[i].arrival_ns = at_ns;
            run.load.queued_requests += 1;
            record.timeline.note(at_ns, run.load);
            let promised_ns = options.deadline_ns.map(|ns| at_ns.saturating_add(ns));
            rows[i].deadline_ns = requests[i].deadline_ns.or(promised_ns);
            let request = scheduler::Request {
                deadline_ns: rows[i].deadline_ns,
                ..as_scheduled(&requests[i], i, at_ns, options.max_new)
            };
            // List indices are unique.
            scheduler.arrive(now, request).unwrap_or_else(|duplicate| panic!("{duplicate}"));
        }
        if run.changed {
            record.timeline.note(now, run.load); // end of a step, before the requests it ended free their memory
        }
        executor.next_arrival_ns = arrivals.next_ns().unwrap_or(u64::MAX);
        let n_running = scheduler.n_running();
        let turn = scheduler.turn(now, &mut executor);
        let mut ended_later = 0;
        let ended_before = n_ended;
        for ended in scheduler.drain_ended() {
            n_ended += 1;
            ended_later += u64::from(ended.ended_ns > now);
            let i = ended.id.0 as usize;
            note_end(&mut rows[i], &ended, &mut cache_counts);
            if let Some(recording) = &mut recording {
                recording.ended(&ended);
            }
            if ended.end == End::Finished {
                arrivals.ended(i, ended.ended_ns);
            }
        }
        if n_ended > ended_before {
            progress(n_ended);
        }
        let elapsed_ns = match turn {
            Turn::Ran { elapsed_ns, .. } => Some(elapsed_ns),
            Turn::Idle => None,
        };
        let (at_end, after) = memory.turn(scheduler.cache_mut(), elapsed_ns.is_some());
        let late = if elapsed_ns.is_some() { executor.late_blocks } else { 0 };
        let load = Load {
            queued_requests: scheduler.n_waiting() as u64,
            running_requests: scheduler.n_running() as u64 + ended_later,
            used_blocks: at_end.used.saturating_sub(late), // 0 for kinds of cache without blocks
            cached_blocks: at_end.cached,
        };
        let requests = |load: &Load| (load.queued_requests, load.running_requests);
        // Whether a sample is recorded must not depend on how many steps ran as one, so block growth alone does not
        // trigger one.
        if run.changed || requests(&load) != requests(&run.load) {
            record.timeline.note(now, load);
        }
        run.load = Load { used_blocks: at_end.used, ..load };
        match (elapsed_ns, arrivals.next_ns()) {
            (Some(ns), _) => record.timeline.hold(ns, run.load, executor.late_ns),
            (None, Some(next)) => {
                run.load.used_blocks = after.used;
                run.load.cached_blocks = after.cached;
                record.timeline.hold(next.saturating_sub(now), run.load, 0);
            }
            (None, None) => {}
        }
        let preemptions = scheduler.counters().preemptions;
        run.changed = n_ended > ended_before
            || executor.prefilled
            || scheduler.n_running() != n_running
            || preemptions != run.preemptions;
        run.preemptions = preemptions;
        if let Some(blocks) = blocks.as_mut().filter(|_| run.changed) {
            blocks.note(now, &scheduler);
        }
        if let (Some(recording), Some(sink)) = (&mut recording, sink.as_deref_mut()) {
            let end_ns = now.saturating_add(elapsed_ns.unwrap_or(0));
            recording.turn(now, end_ns, &mut scheduler, &memory.events, sink);
        }
        match (turn, arrivals.next_ns()) {
            (Turn::Ran { elapsed_ns, .. }, _) => {
                turns += 1;
                clock.advance(elapsed_ns);
            }
            (Turn::Idle, Some(next)) => clock.sleep_until(next),
            (Turn::Idle, None) => break,
        }
    }
    let counters = *scheduler.counters();
    if let Some(prefixes) = scheduler.cache_mut().prefixes() {
        let report = prefixes.report();
        cache_counts.stored_blocks = report.n_stored;
        cache_counts.evicted_blocks = report.n_evicted;
    }
    record.setting = setting(options, cost);
    record.requests = rows;
    record.cache = cache_counts;
    record.steps = executor.counts;
    record.steps.preemptions = counters.preemptions;
    record.itl_ns = executor.itl_ns;
    record.activity = executor.watched.map(|watched| watched.activity).unwrap_or_default();
    // The scheduler names requests by list index; a report uses the ids of the trace.
    record.activity.iter_mut().for_each(|activity| activity.request = requests[activity.request as usize].id);
    record.block_map = blocks.map(|blocks| blocks.map);
    Ok(Run { record, counters, turns })
}

/// The last values passed to the timeline.
struct Notes {
    load: Load,
    changed: bool,
    preemptions: u64,
}

fn waiting_row(request: &Request) -> RequestRow {
    RequestRow {
        id: request.id,
        arrival_ns: request.arrival_ns,
        prompt_tokens: request.prompt_tokens,
        deadline_ns: request.deadline_ns,
        outcome: Outcome::Unfinished,
        ..RequestRow::default()
    }
}

fn as_scheduled(request: &Request, i: usize, at_ns: u64, max_new: Option<u32>) -> scheduler::Request {
    let prompt = match &request.content {
        PromptContent::Unknown => Prompt::Unknown,
        PromptContent::Tokens(tokens) => Prompt::SharedTokens(tokens.clone()),
        PromptContent::Ids { ids, tokens_per_id, n_tokens } => {
            Prompt::Ids { ids: ids.clone(), tokens_per_id: *tokens_per_id, n_tokens: *n_tokens }
        }
    };
    scheduler::Request {
        id: RequestId(i as u64),
        arrival_ns: at_ns,
        prompt_tokens: request.prompt_tokens,
        max_new: max_new.map_or(request.output_tokens, |n| n.max(request.output_tokens)),
        prompt,
        deadline_ns: request.deadline_ns,
        priority: request.priority,
        salt: request.salt.clone().unwrap_or_else(|| Arc::from("")),
        fresh: false,
    }
}

fn note_end(row: &mut RequestRow, ended: &Ended, cache: &mut CacheCounts) {
    row.admitted_ns = ended.admitted_ns;
    row.first_token_ns = ended.first_token_ns;
    row.output_tokens = ended.generated;
    row.hit_tokens = ended.hit_tokens;
    row.preemptions = ended.preemptions;
    row.outcome = match ended.end {
        End::Finished => {
            row.finished_ns = Some(ended.ended_ns);
            Outcome::Finished
        }
        End::Cancelled => Outcome::Cancelled,
        End::Refused(_) => Outcome::Refused,
    };
    if ended.admitted_ns.is_none() {
        return;
    }
    cache.total_requests += 1;
    cache.hit_requests += u64::from(ended.hit_tokens > 0);
    cache.total_tokens += u64::from(ended.prompt_tokens);
    cache.hit_tokens += u64::from(ended.hit_tokens);
    cache.total_blocks += u64::from(ended.prompt_tokens.div_ceil(cache.block_tokens));
    cache.hit_blocks += u64::from(ended.hit_tokens / cache.block_tokens);
    if let Some(miss) = ended.miss {
        *cache.miss_reasons.entry(miss.name().to_owned()).or_default() += 1;
    }
}

fn setting(options: &Options, cost: &dyn StepCost) -> std::collections::BTreeMap<String, String> {
    let config = &options.scheduler;
    let lengths = match (config.lengths, options.max_new) {
        (LengthSource::MaxNew, None) => format!("{}, which is the true length here", config.lengths.name()),
        (lengths, _) => lengths.name().to_owned(),
    };
    [
        ("scheduler", config.policy.clone()),
        ("lengths", lengths),
        ("cost", cost.name()),
        ("max_batch", config.max_batch.to_string()),
        ("max_batch_tokens", config.max_batch_tokens.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}
