//! The event loop: the real scheduler and cache bookkeeping, driven in virtual time.
//!
//! Requests arrive between steps, ordered by time and, at equal times, by list position. A follow-up arrives after its
//! parent has finished; if that was refused or cancelled, never. The executor gets step times from a cost model and knows when answers end. It reports how
//! many decode steps pass before the next arrival or end; those run as one, and the results are byte-identical to
//! single steps.
//!
//! Guarantee: results are a function of the requests, cache, cost model and options. The loop makes no scheduling
//! decision.
mod estimates;
mod executor;
mod memory;
mod queue;
pub(crate) mod tiers;
mod watch;
pub(crate) mod worker;

pub use estimates::LengthError;
pub use kvist_scheduler::{Part, RECORDING_VERSION, Recorder};
pub(crate) use queue::{Arrivals, parents};
pub use tiers::TierOrder;

use crate::cost::StepCost;
use crate::report::{CacheCounts, Load, Record, RequestOutcome, RequestRow, Timeline};
use crate::request::Request;
use crate::speculation::{Speculation, SpeculationCounts};
use estimates::Lengths;
use kvist_cache::Cache;
use kvist_scheduler::{
    BadConfig, Clock, Config, End, Ended, Iteration, LengthSource, Recording, SchedulerCounters, Truth,
    VirtualClock,
};
use memory::{Blocks, Memory};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use watch::Watched;
use worker::Worker;

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The scheduler's configuration.
    pub scheduler: Config,
    /// With `lengths = oracle`: the scheduler is told estimates with this error instead of the truth. `max_new` bounds them,
    /// so without one of its own no estimate exceeds the true length.
    pub length_error: Option<LengthError>,
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
    /// Record when each request was worked on. Used for plots.
    pub watch: bool,
    /// Verify draft tokens while decoding. Steps then run one by one.
    pub speculation: Option<Speculation>,
    /// The capacity of each tier of the scheduler's configuration in bytes; `None` has no bound.
    pub tier_capacities: Vec<Option<u64>>,
    /// In which order each tier drops its blocks when it is full; the default where none is given.
    pub tier_orders: Vec<TierOrder>,
    /// Once it is true the run ends, with [`RunError::Stopped`]. Looked at between steps.
    pub stop: Option<Arc<AtomicBool>>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            scheduler: Config::default(),
            length_error: None,
            max_new: None,
            deadline_ns: None,
            one_by_one: false,
            explain: false,
            itl: true,
            watch: false,
            speculation: None,
            tier_capacities: Vec::new(),
            tier_orders: Vec::new(),
            stop: None,
        }
    }
}

/// Why a run has no result.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum RunError {
    /// The scheduler rejects this configuration.
    #[error(transparent)]
    BadConfig(#[from] BadConfig),
    /// Virtual time passed 2^63 ns. Results beyond it would be wrong, so the run fails.
    #[error(
        "virtual time has passed 292 years after {ended} of {requests} requests: steps take too long ({cost}), or \
         requests arrive too late"
    )]
    OutOfTime {
        /// Requests that had ended.
        ended: usize,
        /// Number of requests in the run.
        requests: usize,
        /// Name of the cost model.
        cost: String,
    },
    /// See [`Options::stop`].
    #[error("the run was stopped")]
    Stopped,
}

/// The result of a run.
#[derive(Debug)]
pub struct Run {
    /// Data for reports.
    pub record: Record,
    /// The scheduler's counters.
    pub counters: SchedulerCounters,
    /// Scheduler iterations that ran something. Fewer than steps if several steps ran as one.
    pub turns: u64,
}

/// Runs `requests` through a scheduler over `cache`, which must be empty. After every iteration in which a request
/// ended, `progress` gets the number of ended requests. `sink` gets all arrivals, decisions and block events as JSON
/// lines (docs/simulator.md), in which requests are named by list index.
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
    let one_by_one = options.one_by_one || sink.is_some();
    let mut simulation = Simulation::new(requests, cache, cost, options, one_by_one)?;
    let mut recording =
        sink.as_deref_mut().map(|sink| Recording::begin(&mut simulation.worker.scheduler, sink));
    let mut clock = VirtualClock::default();
    let mut turns = 0;
    clock.sleep_until(simulation.arrivals.next_ns().unwrap_or(0)); // time starts at the first arrival
    loop {
        let now = clock.now_ns();
        let n_ended = simulation.n_ended;
        if now > i64::MAX as u64 {
            return Err(RunError::OutOfTime { ended: n_ended, requests: requests.len(), cost: cost.name() });
        }
        if options.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(RunError::Stopped);
        }
        simulation.worker.report_transfers(now);
        simulation.submit_arrivals(now);
        if let Some(until_ns) = simulation.wait_for_answers(now) {
            clock.sleep_until(until_ns);
            continue;
        }
        let elapsed_ns = simulation.iterate(now, recording.as_mut());
        if simulation.n_ended > n_ended {
            progress(simulation.n_ended);
        }
        if let (Some(recording), Some(sink)) = (&mut recording, sink.as_deref_mut()) {
            let end_ns = now.saturating_add(elapsed_ns.unwrap_or(0));
            let scheduler = &mut simulation.worker.scheduler;
            recording.iteration(now, end_ns, scheduler, &simulation.memory.events, sink);
        }
        match (elapsed_ns, simulation.next_ns()) {
            (Some(ns), _) => {
                turns += 1;
                clock.advance(ns);
            }
            (None, Some(next)) => clock.sleep_until(next),
            (None, None) => break,
        }
    }
    Ok(simulation.finish(turns, cost))
}

/// A run in progress.
struct Simulation<'a> {
    requests: &'a [Request],
    options: &'a Options,
    worker: Worker<'a>,
    arrivals: Arrivals,
    memory: Memory,
    /// Per request, in list order.
    rows: Vec<RequestRow>,
    cache_counts: CacheCounts,
    timeline: Timeline,
    /// The load that the timeline has now.
    load: Load,
    /// Whether the last iteration changed the batch.
    changed: bool,
    n_ended: usize,
}

impl<'a> Simulation<'a> {
    fn new(
        requests: &'a [Request],
        cache: Cache,
        cost: &'a dyn StepCost,
        options: &'a Options,
        one_by_one: bool,
    ) -> Result<Self, BadConfig> {
        let oracle = options.scheduler.lengths == LengthSource::Oracle;
        let truth = oracle.then(|| Box::new(Lengths::of(requests, options.length_error)) as Box<dyn Truth>);
        let cache_counts = cache_counts(&cache);
        let mut worker = Worker::new(cache, cost, options, truth, one_by_one, false)?;
        let memory = Memory::new(worker.scheduler.cache_mut());
        worker.executor.watched = options.watch.then(Watched::default);
        worker.executor.speculation =
            options.speculation.clone().map(|speculation| (speculation, SpeculationCounts::default()));
        Ok(Simulation {
            requests,
            options,
            worker,
            arrivals: Arrivals::new(requests),
            memory,
            rows: requests.iter().map(RequestRow::expected).collect(),
            cache_counts,
            timeline: Timeline::default(),
            load: Load::default(),
            changed: false,
            n_ended: 0,
        })
    }

    /// Gives the scheduler every request that has arrived by `now`.
    fn submit_arrivals(&mut self, now: u64) {
        while let Some((at_ns, i)) = self.arrivals.pop(now) {
            let row = &mut self.rows[i];
            row.arrival_ns = at_ns;
            row.outcome = RequestOutcome::Unfinished;
            self.load.queued_requests += 1;
            self.timeline.note(at_ns, self.load);
            row.deadline_ns = self.worker.submit(now, i as u64, &self.requests[i], at_ns, self.options);
        }
        self.worker.carry_out(now, now, None);
        if self.changed {
            self.timeline.note(now, self.load); // end of a step, before the requests it ended free their memory
        }
        self.worker.executor.next_arrival_ns = self.next_ns().unwrap_or(u64::MAX);
    }

    /// When to go on if the next step waits for what the tiers have of a request that has just arrived. `None`: it begins.
    fn wait_for_answers(&mut self, now: u64) -> Option<u64> {
        let until_ns = self.worker.waits_until(now)?;
        let until_ns = until_ns.min(self.arrivals.next_ns().unwrap_or(until_ns));
        // Of requests that ended in the last step nothing is left.
        self.load = self.load_of(self.memory.now, 0);
        self.timeline.note(now, self.load);
        self.timeline.extend(until_ns - now, self.load, 0);
        self.changed = false;
        Some(until_ns)
    }

    /// The time of the next arrival, end of a transfer, or deadline of one. `None` if nothing is to come that a request
    /// waits for.
    fn next_ns(&self) -> Option<u64> {
        let arrival = self.arrivals.next_ns();
        let scheduler = &self.worker.scheduler;
        let live = scheduler.n_waiting() + scheduler.n_running() + scheduler.n_loading() > 0;
        let transfer = self.worker.next_transfer_ns().filter(|_| live || arrival.is_some());
        arrival.into_iter().chain(transfer).min()
    }

    /// One iteration of the scheduler at `now`. Returns how long its steps took; `None` if none ran.
    fn iterate(&mut self, now: u64, mut recording: Option<&mut Recording>) -> Option<u64> {
        let (n_running, preemptions) =
            (self.worker.scheduler.n_running(), self.worker.scheduler.counters().preemptions);
        let elapsed_ns = match self.worker.scheduler.iterate(now, &mut self.worker.executor) {
            Iteration::Ran { elapsed_ns, .. } => Some(elapsed_ns),
            Iteration::NothingToDo => None,
        };
        self.worker.carry_out(now, now.saturating_add(elapsed_ns.unwrap_or(0)), None);
        let ended_before = self.n_ended;
        let mut ended_later = 0;
        for ended in self.worker.scheduler.drain_ended() {
            self.n_ended += 1;
            ended_later += u64::from(ended.ended_ns > now);
            let i = ended.id.0 as usize;
            note_end(&mut self.rows[i], &ended, &mut self.cache_counts);
            if let Some(tiers) = &mut self.worker.tiers {
                tiers.forget(ended.id);
            }
            if let Some(recording) = &mut recording {
                recording.ended(&ended);
            }
            if ended.end == End::Finished {
                self.arrivals.ended(i, ended.ended_ns);
            }
        }
        self.note_load(now, elapsed_ns, ended_later);
        self.changed = self.n_ended > ended_before
            || self.worker.executor.prefilled
            || self.worker.scheduler.n_running() != n_running
            || self.worker.scheduler.counters().preemptions != preemptions;
        elapsed_ns
    }

    /// The load with so many blocks, and so many requests that are in the batch besides those that the scheduler has there.
    fn load_of(&self, blocks: Blocks, ended_later: u64) -> Load {
        let scheduler = &self.worker.scheduler;
        Load {
            queued_requests: (scheduler.n_waiting() + scheduler.n_loading()) as u64,
            running_requests: scheduler.n_running() as u64 + ended_later,
            used_blocks: blocks.used,
            cached_blocks: blocks.cached,
        }
    }

    /// Records the load during the iteration's steps, or until the next arrival if none ran. `ended_later`: requests
    /// that were in the batch until the end of the steps.
    fn note_load(&mut self, now: u64, elapsed_ns: Option<u64>, ended_later: u64) {
        let (at_end, after) = self.memory.update(self.worker.scheduler.cache_mut(), elapsed_ns.is_some());
        let late = if elapsed_ns.is_some() { self.worker.executor.late_blocks } else { 0 };
        let mut load = self.load_of(at_end, ended_later);
        load.used_blocks = load.used_blocks.saturating_sub(late); // 0 for kinds of cache without blocks
        let requests = |load: &Load| (load.queued_requests, load.running_requests);
        // Whether a sample is recorded must not depend on how many steps ran as one, so block growth alone does not
        // trigger one.
        if self.changed || requests(&load) != requests(&self.load) {
            self.timeline.note(now, load);
        }
        self.load = Load { used_blocks: at_end.used, ..load };
        match (elapsed_ns, self.next_ns()) {
            (Some(ns), _) => self.timeline.extend(ns, self.load, self.worker.executor.late_ns),
            (None, Some(next)) => {
                self.load.used_blocks = after.used;
                self.load.cached_blocks = after.cached;
                self.timeline.extend(next.saturating_sub(now), self.load, 0);
            }
            (None, None) => {}
        }
    }

    fn finish(mut self, turns: u64, cost: &dyn StepCost) -> Run {
        let counters = *self.worker.scheduler.counters();
        if let Some(prefixes) = self.worker.scheduler.cache_mut().prefixes() {
            let report = prefixes.report();
            self.cache_counts.stored_blocks = report.n_stored;
            self.cache_counts.evicted_blocks = report.n_evicted;
        }
        let mut steps = self.worker.executor.counts;
        steps.preemptions = counters.preemptions;
        let tiers = self.worker.tiers_record(self.options);
        let mut activity = self.worker.executor.watched.map(|watched| watched.activity).unwrap_or_default();
        // The scheduler names requests by list index; a report uses the ids of the trace.
        activity
            .iter_mut()
            .for_each(|activity| activity.request = self.requests[activity.request as usize].id);
        let record = Record {
            setting: setting(self.options, cost),
            requests: self.rows,
            itl_ns: self.worker.executor.itl_ns,
            timeline: self.timeline,
            cache: self.cache_counts,
            steps,
            speculation: self.worker.executor.speculation.map(|(_, counts)| counts),
            tiers,
            activity,
        };
        Run { record, counters, turns }
    }
}

/// The counts of an empty cache.
pub(crate) fn cache_counts(cache: &Cache) -> CacheCounts {
    let block_tokens = cache.occupancy().next().map_or(1, |room| room.block_tokens);
    let capacity = cache.occupancy().map(|room| room.capacity_cells).min().unwrap_or(0);
    let unbounded = capacity >= u32::MAX / block_tokens * block_tokens;
    CacheCounts {
        block_tokens,
        capacity_blocks: (!unbounded).then_some((capacity / block_tokens).into()),
        ..CacheCounts::default()
    }
}

/// Notes in its row, and in the counts of the cache that served it, how a request ended.
pub(crate) fn note_end(row: &mut RequestRow, ended: &Ended, cache: &mut CacheCounts) {
    row.admitted_ns = ended.admitted_ns;
    row.first_token_ns = ended.first_token_ns;
    row.output_tokens = ended.generated;
    row.hit_tokens = ended.hit_tokens;
    row.preemptions = ended.preemptions;
    row.outcome = match ended.end {
        End::Finished => {
            row.finished_ns = Some(ended.ended_ns);
            RequestOutcome::Finished
        }
        End::Cancelled => RequestOutcome::Cancelled,
        End::Refused(_) => RequestOutcome::Refused,
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

pub(crate) fn setting(options: &Options, cost: &dyn StepCost) -> std::collections::BTreeMap<String, String> {
    let config = &options.scheduler;
    let lengths = match (config.lengths, options.max_new) {
        (LengthSource::MaxNew, None) => format!("{}, which is the true length here", config.lengths.name()),
        (LengthSource::Oracle, _) if options.length_error.is_some() => {
            let variation = options.length_error.map_or(0.0, |error| error.variation);
            format!("noisy: the true length times a log-normal error of cv {variation}")
        }
        (lengths, _) => lengths.name().to_owned(),
    };
    [
        ("scheduler", config.policy.clone()),
        ("lengths", lengths),
        ("cost", cost.name()),
        ("max_batch", config.max_batch.to_string()),
        ("max_batch_tokens", config.max_batch_tokens.to_string()),
    ]
    .into_iter()
    .chain(options.speculation.as_ref().map(|it| ("speculation", it.name())))
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}
