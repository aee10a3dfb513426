//! A fleet: many workers behind a router, in one virtual time.
//!
//! Every worker is the scheduler, the cache and the executor of a single run ([`run`](crate::run)). The router sends each
//! request to one of them by a [policy](Policy) that follows a published one. What it knows of their caches comes from the
//! cache's own events, a delay after the step that caused them ([`FleetOptions::view_delay_ns`]); what it knows of their
//! load are the requests it has sent and not seen end. Workers may fail and join at given times: a failed worker loses its
//! cache, and the router sends its requests again, to others.
//!
//! Guarantees: the result is a function of the requests, caches, cost model and options. A fleet of one worker gives what
//! a single run gives. Every request ends once, or is counted as unfinished. Memory grows with the requests that are live
//! and with what the caches store, not with the number of requests. Time grows with the number of requests, and for
//! most policies hardly with the number of workers: events lie in a heap, and the least loaded workers are found in sets in
//! order. `prefix_aware` and `cache_aware` look one by one at the workers that store a beginning of the prompt if they are
//! few; otherwise they pass workers in order of load until one stores it. `overlap_cost`, and every policy with a
//! temperature, looks at every worker for every request.
mod event;
mod load;
mod report;
mod router;
mod routing;
mod tally;
mod worker;

pub use report::{FleetReport, FleetSummary, Imbalance, OverWorkers, WorkerReport};
pub use routing::{POLICIES, Policy};

use crate::cost::StepCost;
use crate::report::{Objectives, RequestRow};
use crate::request::Request;
use crate::run::{Options, RunError, cache_counts};
use event::{Event, Events, Kind, Stamp};
use kvist_cache::{Cache, PagedError, PagedSpec};
use kvist_scheduler::{BadConfig, End, Ended, LengthSource};
use load::Load;
use router::Router;
use std::collections::VecDeque;
use std::fmt::{self, Display, Formatter};
use std::sync::atomic::Ordering;
use tally::Tally;
use worker::{Member, Ticket};

/// Maximum workers of a fleet.
pub const MAX_WORKERS: u32 = 65_536;

/// Maximum requests of a fleet, over all copies of its load.
pub const MAX_REQUESTS: u64 = 100_000_000;

/// How a fleet is run.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// Options of every worker. Not supported in a fleet: the true lengths, speculation, tiers, explanations of misses and
    /// the activity for plots.
    pub run: Options,
    /// The workers at the start, at least 1.
    pub workers: u32,
    pub policy: Policy,
    /// Softmax over costs instead of the lowest cost, for policies with a cost; 0: the lowest.
    pub temperature: f64,
    /// Time from the end of a step to the moment when the router knows what it stored and evicted.
    pub view_delay_ns: u64,
    /// Failures and joins, in any order. At equal times, in this order.
    pub changes: Vec<Change>,
    /// Copies of the load, at least 1. Copies share no content; they begin spread over a minute, or over a twentieth of the
    /// time in which the load arrives if that is shorter, so that the load keeps its course.
    pub copies: u32,
    pub objectives: Objectives,
    /// Keep a row per request. Memory then grows with their number.
    pub rows: bool,
    /// Seed of the draws of a policy with a temperature.
    pub seed: u64,
}

impl Default for FleetOptions {
    fn default() -> Self {
        FleetOptions {
            run: Options::default(),
            workers: 1,
            policy: Policy::RoundRobin,
            temperature: 0.0,
            view_delay_ns: 0,
            changes: Vec::new(),
            copies: 1,
            objectives: Objectives::default(),
            rows: false,
            seed: 1,
        }
    }
}

/// A worker fails or joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Nanoseconds of virtual time.
    pub at_ns: u64,
    /// Workers are numbered from 0.
    pub worker: u32,
    pub what: WhatChanges,
}

/// See [`Change`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhatChanges {
    /// The worker is gone, with its cache. Its requests are sent again.
    Fails,
    /// The worker is there from now on, with an empty cache: a new one, or one that failed before.
    Joins,
}

impl Display for WhatChanges {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WhatChanges::Fails => "fails",
            WhatChanges::Joins => "joins",
        })
    }
}

/// Why a fleet has no result.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum FleetError {
    /// A worker cannot run.
    #[error(transparent)]
    Run(#[from] RunError),
    /// There is no such cache.
    #[error(transparent)]
    Cache(#[from] PagedError),
    /// A fleet cannot do this.
    #[error("a fleet does not support {0}")]
    Unsupported(&'static str),
    /// The number of workers or copies is out of range.
    #[error("{what}: found {found}; expected 1 to {most}")]
    OutOfRange { what: &'static str, found: u64, most: u64 },
    /// The copies of the load are too many.
    #[error(
        "{copies} copies of a load of {requests} requests are more than {MAX_REQUESTS} requests; give at most {}",
        MAX_REQUESTS / (*requests).max(1)
    )]
    TooManyCopies { copies: u32, requests: u64 },
    /// The temperature is no finite number of at least 0, or the policy has no cost.
    #[error("the temperature is {found}: {expected}")]
    Temperature { found: f64, expected: &'static str },
    /// A change does not fit the workers at its time.
    #[error("worker {worker} {what} at {} s, but {why}", *at_ns as f64 / 1e9)]
    Change { worker: u32, what: WhatChanges, at_ns: u64, why: &'static str },
}

impl From<BadConfig> for FleetError {
    fn from(bad: BadConfig) -> Self {
        FleetError::Run(bad.into())
    }
}

/// The result of a fleet.
#[derive(Debug)]
pub struct FleetRun {
    pub report: FleetReport,
    /// In the order of the requests, copy after copy; empty unless [`FleetOptions::rows`].
    pub rows: Vec<RequestRow>,
    /// Iterations of schedulers that ran something.
    pub turns: u64,
}

/// Runs `requests` through a fleet whose workers have caches made from `cache`. Whenever a request ends, `progress` gets
/// the number of ended requests.
///
/// # Errors
/// [`FleetError`]
pub fn run(
    requests: &[Request],
    cache: &PagedSpec,
    cost: &dyn StepCost,
    options: &FleetOptions,
    progress: &mut dyn FnMut(usize),
) -> Result<FleetRun, FleetError> {
    check(options)?;
    let (copies, n_requests) = (options.copies, requests.len() as u64);
    // A list that is already there is served at least once.
    if copies > 1 && n_requests.max(1).saturating_mul(copies.into()) > MAX_REQUESTS {
        return Err(FleetError::TooManyCopies { copies, requests: n_requests });
    }
    let mut fleet = Fleet::new(requests, cache, cost, options)?;
    while let Some(event) = fleet.next_event() {
        if event.at_ns > i64::MAX as u64 {
            let (ended, requests) = (fleet.tally.n_ended(), fleet.load.n_requests());
            return Err(RunError::OutOfTime { ended, requests, cost: cost.name() }.into());
        }
        if options.run.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(RunError::Stopped.into());
        }
        let n_ended = fleet.tally.n_ended();
        fleet.handle(event)?;
        if fleet.tally.n_ended() > n_ended {
            progress(fleet.tally.n_ended());
        }
    }
    Ok(fleet.finish())
}

/// Checks what does not depend on the requests.
///
/// # Errors
/// [`FleetError`]
pub fn check(options: &FleetOptions) -> Result<(), FleetError> {
    let run = &options.run;
    for (unsupported, what) in [
        (run.scheduler.lengths == LengthSource::Oracle, "the true lengths of answers (oracle)"),
        (run.speculation.is_some(), "speculative decoding"),
        (run.scheduler.tiers.is_some(), "tiers below the caches"),
        (run.explain, "explanations of misses"),
        (run.watch, "the activity of single requests"),
    ] {
        if unsupported {
            return Err(FleetError::Unsupported(what));
        }
    }
    for (what, found, most) in
        [("workers", options.workers, MAX_WORKERS), ("copies of the load", options.copies, u32::MAX)]
    {
        if found == 0 || found > most {
            return Err(FleetError::OutOfRange { what, found: found.into(), most: most.into() });
        }
    }
    let (found, expected) = (options.temperature, "expected a finite number, at least 0");
    if !found.is_finite() || found < 0.0 {
        return Err(FleetError::Temperature { found, expected });
    }
    if found > 0.0 && !options.policy.has_cost() {
        let expected = "this policy has no cost to draw by; give 0, or another policy";
        return Err(FleetError::Temperature { found, expected });
    }
    check_changes(options)
}

/// Changes by time; those at the same time in the order given.
fn in_order(changes: &[Change]) -> Vec<Change> {
    let mut changes = changes.to_vec();
    changes.sort_by_key(|change| change.at_ns);
    changes
}

fn check_changes(options: &FleetOptions) -> Result<(), FleetError> {
    let mut alive = vec![true; options.workers as usize];
    for Change { at_ns, worker, what } in in_order(&options.changes) {
        let at = worker as usize;
        let wrong = |why| Err(FleetError::Change { worker, what, at_ns, why });
        match (what, alive.get(at).copied()) {
            (WhatChanges::Fails, Some(true)) => alive[at] = false,
            (WhatChanges::Fails, Some(false)) => return wrong("it has failed before"),
            (WhatChanges::Fails, None) => return wrong("there is no such worker"),
            (WhatChanges::Joins, Some(false)) => alive[at] = true,
            (WhatChanges::Joins, Some(true)) => return wrong("it is there already"),
            (WhatChanges::Joins, None) if at == alive.len() && worker < MAX_WORKERS => alive.push(true),
            (WhatChanges::Joins, None) => return wrong("new workers take the next number"),
        }
    }
    Ok(())
}

/// A fleet in progress.
struct Fleet<'a> {
    options: &'a FleetOptions,
    cache: &'a PagedSpec,
    cost: &'a dyn StepCost,
    load: Load<'a>,
    events: Events,
    /// Those to come, the next one last.
    changes: Vec<Change>,
    /// By worker number; `None` where the worker has failed.
    members: Vec<Option<Member<'a>>>,
    router: Router,
    /// How often a worker has joined, those at the start included.
    n_lives: u64,
    /// Requests that no worker was there for.
    held: VecDeque<Ticket>,
    tally: Tally,
    turns: u64,
    now: u64,
    /// Reused between steps.
    hashes: Vec<u64>,
}

impl<'a> Fleet<'a> {
    fn new(
        requests: &'a [Request],
        cache: &'a PagedSpec,
        cost: &'a dyn StepCost,
        options: &'a FleetOptions,
    ) -> Result<Self, FleetError> {
        let load = Load::new(requests, options.copies);
        let mut changes = in_order(&options.changes);
        changes.reverse();
        let n_workers = changes.iter().map(|change| change.worker + 1).max().unwrap_or(0);
        let n_workers = n_workers.max(options.workers);
        let mut fleet = Fleet {
            router: Router::new(options, n_workers, cache.block_tokens),
            tally: Tally::new(options, &load, n_workers, cache_counts(&Cache::paged(cache)?)),
            events: Events::default(),
            members: (0..n_workers).map(|_| None).collect(),
            n_lives: 0,
            held: VecDeque::new(),
            turns: 0,
            now: load.arrivals.next_ns().unwrap_or(0),
            hashes: Vec::new(),
            options,
            cache,
            cost,
            load,
            changes,
        };
        (0..options.workers).try_for_each(|worker| fleet.join(worker))?;
        Ok(fleet)
    }

    /// The next event; `None` if nothing is to come that a request waits for.
    fn next_event(&mut self) -> Option<Event> {
        let step = self.events.next();
        let arrival = self.load.arrivals.next_ns();
        let change = self.changes.last();
        if step.is_none() && arrival.is_none() && (self.held.is_empty() || change.is_none()) {
            return None;
        }
        let arrival =
            arrival.map(|at_ns| Event { at_ns, kind: Kind::Arrival, worker: 0, stamp: Stamp::default() });
        let change = change.map(|change| Event {
            at_ns: change.at_ns.max(self.now),
            kind: Kind::Change,
            worker: change.worker,
            stamp: Stamp::default(),
        });
        [step, arrival, change].into_iter().flatten().min()
    }

    fn handle(&mut self, event: Event) -> Result<(), FleetError> {
        self.now = event.at_ns;
        match event.kind {
            Kind::StepEnd | Kind::Begin => {
                self.events.pop();
                let member = self.members[event.worker as usize].as_ref();
                if member.is_none_or(|member| member.stamp() != event.stamp) {
                    return Ok(()); // the worker has failed since, or was cut short by an arrival
                }
                match event.kind {
                    Kind::StepEnd => self.end_step(event.worker),
                    _ => self.begin(event.worker),
                }
            }
            Kind::Change => match self.changes.pop().map(|change| change.what) {
                Some(WhatChanges::Fails) => self.fail(event.worker),
                Some(WhatChanges::Joins) => {
                    self.join(event.worker)?;
                    self.tally.n_joins += 1;
                    let held = std::mem::take(&mut self.held);
                    held.into_iter().for_each(|ticket| self.send(ticket));
                }
                None => {}
            },
            Kind::Arrival => {
                if let Some((at_ns, number)) = self.load.arrivals.pop(self.now) {
                    self.tally.arrived(at_ns);
                    self.send(Ticket::new(number, at_ns));
                }
            }
        }
        Ok(())
    }

    /// Routes a request, and gives it to its worker.
    fn send(&mut self, mut ticket: Ticket) {
        let request = self.load.request(ticket.number);
        self.hashes.clear();
        if self.router.needs_hashes()
            && let Some(member) = self.members.iter().flatten().next()
        {
            let content = request.content.content(request.prompt_tokens);
            self.hashes = member.worker.scheduler.cache().prefix_hashes(request.salt(), &content);
        }
        let session = self.load.session(ticket.number);
        let Some(choice) = self.router.choose(self.now, session, request.prompt_tokens, &self.hashes) else {
            return self.held.push_back(ticket);
        };
        ticket.credited_tokens = choice.credited_tokens;
        ticket.backlog_tokens = request.prompt_tokens - choice.credited_tokens;
        let member = self.members[choice.worker as usize].as_mut();
        let member = member.expect("the router chooses among the workers that are there");
        match member.arrive(self.now, ticket) {
            Some(Kind::StepEnd) => self.turns += 1,
            Some(_) => {}
            None => return,
        }
        self.push_next(choice.worker);
    }

    /// Enters the next event of a worker.
    fn push_next(&mut self, worker: u32) {
        if let Some(member) = &self.members[worker as usize]
            && let Some((at_ns, kind)) = member.next()
        {
            self.events.push(Event { at_ns, kind, worker, stamp: member.stamp() });
        }
    }

    fn begin(&mut self, worker: u32) {
        let Some(member) = &mut self.members[worker as usize] else { return };
        if member.begin(self.now, &self.load, &self.options.run) {
            self.turns += 1;
        }
        let refused = member.take_ended(self.now);
        self.note_ends(worker, refused);
        self.push_next(worker);
    }

    /// A step, or several as one, is over: its requests, and the router, are told.
    fn end_step(&mut self, worker: u32) {
        let Some(member) = &mut self.members[worker as usize] else { return };
        if member.end_step(self.now) {
            self.turns += 1;
        }
        for ticket in member.take_first_tokens() {
            self.router.prefilled(worker, &ticket);
        }
        if self.router.needs_view() {
            self.router.publish(self.now, worker, member.take_cache_events());
        }
        let ended = member.take_ended(self.now);
        self.note_ends(worker, ended);
        self.push_next(worker);
    }

    fn note_ends(&mut self, worker: u32, ended: Vec<(Ticket, Ended)>) {
        for (ticket, ended) in ended {
            let request = self.load.request(ticket.number);
            self.router.ended(worker, &ticket, request.prompt_tokens);
            self.tally.ended(worker, &ticket, &request, &ended, self.options.run.deadline_ns);
            if ended.end == End::Finished {
                self.load.arrivals.ended(ticket.number, ended.ended_ns);
            }
        }
    }

    fn fail(&mut self, worker: u32) {
        let Some(mut member) = self.members[worker as usize].take() else { return };
        if member.cut(self.now) {
            self.turns += 1;
        }
        self.router.left(worker);
        self.tally.left(self.now, worker, &mut member);
        let tickets = member.into_tickets();
        self.tally.n_failures += 1;
        self.tally.n_retried += tickets.len() as u64;
        tickets.into_iter().for_each(|ticket| self.send(ticket));
    }

    fn join(&mut self, worker: u32) -> Result<(), FleetError> {
        let cache = Cache::paged(self.cache)?;
        self.n_lives += 1;
        let watches_cache = self.router.needs_view();
        let member = Member::new(cache, self.cost, &self.options.run, watches_cache, self.n_lives)?;
        self.members[worker as usize] = Some(member);
        self.router.joined(worker);
        self.tally.joined(self.now, worker);
        Ok(())
    }

    fn finish(mut self) -> FleetRun {
        for (worker, member) in (0..).zip(&mut self.members) {
            if let Some(member) = member {
                // No event is left, so no worker has anything to do: what was sent to one that is there has ended.
                assert!(member.is_idle(), "worker {worker} still has requests");
                self.tally.left(self.now, worker, member);
            }
        }
        let (report, rows) = self.tally.finish(self.options, self.cost, self.router.name());
        FleetRun { report, rows, turns: self.turns }
    }
}
