//! One worker: a scheduler over its cache, and the executor that prices its steps. A driver outside says when requests
//! arrive and when to iterate: the loop of one worker ([`run`](super::run)), or that of a fleet.
use super::Options;
use super::executor::SimExecutor;
use super::tiers::{Shared, SimTiers, TierCounts};
use crate::cost::StepCost;
use crate::report::{TierRecord, TiersRecord};
use crate::request::Request;
use kvist_cache::Cache;
use kvist_scheduler as scheduler;
use kvist_scheduler::{BadConfig, Batch, Executor, Iteration, Outcome, RequestId, Scheduler, Truth};
use std::sync::Arc;

pub(crate) struct Worker<'a> {
    pub scheduler: Scheduler,
    pub executor: SimExecutor<'a>,
    /// Those below its cache, but for a store that it shares.
    pub tiers: Option<SimTiers>,
    outcome: Outcome,
}

/// What a worker began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// There is nothing to do until a request arrives, or a transfer of a tier ends.
    Nothing,
    /// A step was computed.
    Ran { elapsed_ns: u64 },
    /// Several decode steps may run as one, for so long at most. Nothing was computed yet.
    Planned { ns: u64 },
}

impl<'a> Worker<'a> {
    /// A worker over `cache`, which must be empty. `truth` as in [`Scheduler::new`]. `shares_last`: the last of its tiers is a
    /// store that it shares.
    pub fn new(
        cache: Cache,
        cost: &'a dyn StepCost,
        options: &Options,
        truth: Option<Box<dyn Truth>>,
        one_by_one: bool,
        shares_last: bool,
    ) -> Result<Self, BadConfig> {
        let block_tokens = cache.occupancy().next().map_or(1, |room| room.block_tokens);
        let mut scheduler = Scheduler::new(options.scheduler.clone(), cache, truth)?;
        scheduler.explain_misses(options.explain);
        let executor = SimExecutor::new(cost, block_tokens, one_by_one, options.itl);
        let tiers = options.scheduler.tiers.as_ref();
        let tiers = tiers
            .map(|config| SimTiers::new(config, &options.tier_capacities, &options.tier_orders, shares_last));
        Ok(Worker { scheduler, executor, tiers, outcome: Outcome::default() })
    }

    /// Tells the scheduler which transfers of its tiers have ended by `now`.
    pub fn report_transfers(&mut self, now: u64) {
        if let Some(tiers) = &mut self.tiers {
            tiers.report(now, &mut self.scheduler);
        }
    }

    /// Begins the transfers that the scheduler asked for in steps from `now` to `end_ns`. `shared`: see [`new`](Self::new).
    pub fn carry_out(&mut self, now: u64, end_ns: u64, shared: Option<Shared<'_>>) {
        if let Some(tiers) = &mut self.tiers {
            tiers.carry_out(now, end_ns, &mut self.scheduler, shared);
        }
    }

    /// When the next transfer of its tiers ends, or a request has waited long enough for one.
    pub fn next_transfer_ns(&self) -> Option<u64> {
        let tiers = self.tiers.as_ref()?;
        [tiers.next_ns(), self.scheduler.next_tier_deadline_ns()].into_iter().flatten().min()
    }

    /// When a worker goes on that waits at `now` for what its tiers have of a request that has just arrived: at the next end of a transfer,
    /// or when it has waited long enough. `None`: its next step begins now.
    pub fn waits_until(&self, now: u64) -> Option<u64> {
        let deadline_ns = self.scheduler.lookup_deadline_ns().filter(|deadline_ns| *deadline_ns > now)?;
        let next_ns = self.tiers.as_ref()?.next_ns();
        Some(next_ns.unwrap_or(deadline_ns).min(deadline_ns))
    }

    /// What its tiers did; of a store that it shares, what it loaded from there.
    pub fn tiers_record(&self, options: &Options) -> Option<TiersRecord> {
        let (tiers, counters) = self.tiers.as_ref().zip(self.scheduler.tier_counters())?;
        let config = options.scheduler.tiers.as_ref().map_or(&[][..], |config| &config.list);
        let own = tiers.counts().chain(std::iter::repeat(TierCounts::default()));
        let capacities = options.tier_capacities.iter().copied().chain(std::iter::repeat(None));
        let tier = |(i, ((config, counts), capacity_bytes)): (usize, ((&scheduler::Tier, TierCounts), _))| {
            let loaded_tokens = counters.loaded_tokens[i];
            let mut record = TierRecord {
                name: config.name.clone(),
                capacity_bytes,
                loaded_tokens,
                ..TierRecord::default()
            };
            record.note(&counts);
            record
        };
        let list = config.iter().zip(own).zip(capacities).enumerate().map(tier);
        Some(TiersRecord::of(list.collect(), &counters))
    }

    /// Gives the scheduler, at `now`, a request that arrived at `at_ns`. `id` must be unique among live requests; the
    /// memory of a worker grows with the highest one. Returns the request's deadline.
    pub fn submit(
        &mut self,
        now: u64,
        id: u64,
        request: &Request,
        at_ns: u64,
        options: &Options,
    ) -> Option<u64> {
        let default_ns = options.deadline_ns.map(|ns| at_ns.saturating_add(ns));
        let deadline_ns = request.deadline_ns.or(default_ns);
        let scheduled = scheduler::Request {
            id: RequestId(id),
            arrival_ns: at_ns,
            prompt_tokens: request.prompt_tokens,
            max_new: options.max_new.map_or(request.output_tokens, |n| n.max(request.output_tokens)),
            prompt: request.content.clone(),
            deadline_ns,
            priority: request.priority,
            salt: request.salt.clone().unwrap_or_else(|| Arc::from("")),
            skip_prefix_cache: false,
            retain: None,
        };
        self.executor.begin(id, request.output_tokens);
        // The caller's ids are unique.
        self.scheduler.arrive(now, scheduled).unwrap_or_else(|duplicate| panic!("{duplicate}"));
        deadline_ns
    }

    /// Begins what comes next at `now`, without knowing when the next request arrives: computes a step, or finds that several
    /// decode steps may run as one. Those wait for [`run_planned`](Self::run_planned), and nothing may happen to the worker
    /// before.
    pub fn begin(&mut self, now: u64) -> Begun {
        let next_transfer_ns = self.next_transfer_ns();
        let Worker { scheduler, executor, outcome, .. } = self;
        executor.next_arrival_ns = next_transfer_ns.unwrap_or(u64::MAX);
        let mut lookahead = |batch: Batch<'_>, limit| executor.max_fused_steps(now, batch, limit);
        let Some(mut planned) = scheduler.plan_run(now, &mut lookahead) else { return Begun::Nothing };
        let steps = planned.batch().steps;
        if steps > 1 {
            // The plan is dropped. A plan of several steps admits, evicts and preempts nothing, so the next one is the same.
            return Begun::Planned { ns: executor.run_ns(steps) };
        }
        outcome.clear();
        let (batch, step) = planned.split();
        executor.execute(now, step, batch, outcome);
        // The executor's outcome fits its batch.
        planned.complete(outcome).unwrap_or_else(|bad| panic!("{bad}"));
        Begun::Ran { elapsed_ns: outcome.elapsed_ns }
    }

    /// Computes the steps that were planned at `begin_ns`, up to the first that ends when or after the next request arrives.
    /// Returns how long they take, in nanoseconds.
    pub fn run_planned(&mut self, begin_ns: u64, next_arrival_ns: u64) -> u64 {
        let next_transfer_ns = self.next_transfer_ns().unwrap_or(u64::MAX);
        self.executor.next_arrival_ns = next_arrival_ns.min(next_transfer_ns);
        match self.scheduler.iterate(begin_ns, &mut self.executor) {
            Iteration::Ran { elapsed_ns, .. } => elapsed_ns,
            Iteration::NothingToDo => unreachable!("the same state gives the same plan"),
        }
    }
}
