//! A fleet: many workers behind a router, in one virtual time.
//!
//! Every worker is the scheduler, the cache and the executor of a single run ([`run`](crate::run)). The router sends each
//! request to one of them by a [policy](Policy) that follows a published one. What it knows of their caches comes from the
//! cache's own events, a delay after the step that caused them ([`FleetOptions::view_delay_ns`]); what it knows of their
//! load are the requests it has sent and not seen end. Workers may fail and join at given times: a failed worker loses its
//! cache, and the router sends its requests again, to others. Every worker may have tiers below its cache, the last of which may be
//! one [store](Store) of all workers; routers know nothing of tiers.
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
mod options;
mod report;
mod router;
mod routing;
mod tally;
mod worker;

pub use options::{Change, FleetError, FleetOptions, MAX_REQUESTS, MAX_WORKERS, Store, WhatChanges, check};
pub use report::{FleetReport, FleetSummary, Imbalance, OverWorkers, WorkerReport};
pub use routing::{POLICIES, Policy};

use crate::cost::StepCost;
use crate::report::RequestRow;
use crate::request::Request;
use crate::run::tiers::{Contents, Shared, SharedSpec, SharedStore};
use crate::run::{RunError, cache_counts};
use event::{Event, Events, Kind, Stamp};
use kvist_cache::{Cache, PagedSpec};
use kvist_scheduler::{End, Ended};
use load::Load;
use options::in_order;
use router::Router;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::Ordering;
use tally::Tally;
use worker::{Member, Ticket};

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
    /// The last tier of all workers, if they share it.
    store: Option<SharedStore>,
    /// What the durable tiers of failed workers have.
    durable: HashMap<u32, Vec<(usize, Contents)>, ahash::RandomState>,
    router: Router,
    /// How often a worker has joined, those at the start included.
    n_lives: u64,
    /// Requests that a worker has.
    n_live: usize,
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
            store: shared_store(options),
            durable: HashMap::default(),
            n_lives: 0,
            n_live: 0,
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
        if self.n_live == 0 && arrival.is_none() && (self.held.is_empty() || change.is_none()) {
            return None;
        }
        let of_fleet = |at_ns, kind| Event { at_ns, kind, worker: 0, stamp: Stamp::default() };
        let arrival = arrival.map(|at_ns| of_fleet(at_ns, Kind::Arrival));
        let in_store = self.store.as_ref().and_then(SharedStore::next_ns);
        let in_store = in_store.map(|at_ns| of_fleet(at_ns, Kind::Store));
        let change = change.map(|change| Event {
            at_ns: change.at_ns.max(self.now),
            kind: Kind::Change,
            worker: change.worker,
            stamp: Stamp::default(),
        });
        [in_store, step, arrival, change].into_iter().flatten().min()
    }

    fn handle(&mut self, event: Event) -> Result<(), FleetError> {
        self.now = event.at_ns;
        match event.kind {
            Kind::Store => self.run_store(),
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
                    self.tally.arrived(number, at_ns);
                    self.send(Ticket::new(number, at_ns));
                }
            }
        }
        Ok(())
    }

    /// Lets happen in the store what happens now, and tells the workers.
    fn run_store(&mut self) {
        let landed = self.store.as_mut().map(|store| store.run_until(self.now)).unwrap_or_default();
        for landed in landed {
            let shared = shared(&mut self.store, landed.worker);
            let member = self.members[landed.worker as usize].as_mut();
            let next = member.and_then(|member| member.landed(self.now, landed.transfer, shared));
            self.turns += u64::from(next == Some(Kind::StepEnd));
            if next.is_some() {
                self.push_next(landed.worker);
            }
        }
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
        self.n_live += 1;
        match member.arrive(self.now, ticket, shared(&mut self.store, choice.worker)) {
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
        let shared = shared(&mut self.store, worker);
        if member.begin(self.now, &self.load, &self.options.run, shared) {
            self.turns += 1;
        }
        // What a load has evicted is known when a step ends. There may be none.
        if self.router.needs_view() && member.is_asleep() {
            self.router.publish(self.now, worker, member.take_cache_events());
        }
        let refused = member.take_ended(self.now);
        self.note_ends(worker, refused);
        self.push_next(worker);
    }

    /// A step, or several as one, is over: its requests, and the router, are told.
    fn end_step(&mut self, worker: u32) {
        let Some(member) = &mut self.members[worker as usize] else { return };
        if member.end_step(self.now, shared(&mut self.store, worker)) {
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
        self.n_live -= ended.len();
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
        if member.cut(self.now, shared(&mut self.store, worker)) {
            self.turns += 1;
        }
        if let Some(store) = &mut self.store {
            store.fail(self.now, worker);
        }
        // What has been copied by now is in the tiers, as far as they outlive the worker.
        member.worker.report_transfers(self.now);
        self.router.left(worker);
        self.tally.left(self.now, worker, &mut member, &self.options.run, true);
        self.durable.insert(worker, member.take_durable(&self.options.durable_tiers));
        let tickets = member.into_tickets();
        self.tally.n_failures += 1;
        self.tally.n_retried += tickets.len() as u64;
        self.n_live -= tickets.len();
        tickets.into_iter().for_each(|ticket| self.send(ticket));
    }

    fn join(&mut self, worker: u32) -> Result<(), FleetError> {
        let cache = Cache::paged(self.cache)?;
        self.n_lives += 1;
        let watches_cache = self.router.needs_view();
        let (run, shares_store) = (&self.options.run, self.store.is_some());
        let mut member = Member::new(cache, self.cost, run, watches_cache, shares_store, self.n_lives)?;
        member.put_durable(self.durable.remove(&worker).unwrap_or_default());
        self.members[worker as usize] = Some(member);
        self.router.joined(worker);
        self.tally.joined(self.now, worker);
        Ok(())
    }

    fn finish(mut self) -> FleetRun {
        // What has been written by now counts, although no worker has begun anything since.
        self.run_store();
        for (worker, member) in (0..).zip(&mut self.members) {
            if let Some(member) = member {
                // No event is left, so no worker has anything to do: what was sent to one that is there has ended.
                assert!(member.is_idle(), "worker {worker} still has requests");
                member.worker.report_transfers(self.now);
                self.tally.left(self.now, worker, member, &self.options.run, false);
            }
        }
        if let Some(store) = &self.store {
            self.tally.note_store(&store.contents.counts);
        }
        let (report, rows) = self.tally.finish(self.options, self.cost, self.router.name());
        FleetRun { report, rows, turns: self.turns }
    }
}

/// The shared store, if there is one.
fn shared_store(options: &FleetOptions) -> Option<SharedStore> {
    let (store, config) = (options.store?, options.run.scheduler.tiers.as_ref()?);
    let last = config.list.len().checked_sub(1)?;
    Some(SharedStore::new(SharedSpec {
        capacity_bytes: options.run.tier_capacities.get(last).copied().flatten(),
        block_bytes: config.block_bytes,
        latency_ns: config.list[last].latency_ns,
        worker_bytes_per_s: config.list[last].bytes_per_s,
        total_bytes_per_s: store.bytes_per_s,
        max_store_bytes: config.max_store_bytes,
    }))
}

/// The shared store as a worker has it.
fn shared(store: &mut Option<SharedStore>, worker: u32) -> Option<Shared<'_>> {
    store.as_mut().map(|store| (store, worker))
}
