//! One worker: a scheduler over its cache, and the executor that prices its steps. A driver outside says when requests
//! arrive and when to iterate: the loop of one worker ([`run`](super::run)), or that of a fleet.
use super::Options;
use super::executor::SimExecutor;
use crate::cost::StepCost;
use crate::request::Request;
use kvist_cache::Cache;
use kvist_scheduler as scheduler;
use kvist_scheduler::{BadConfig, Batch, Executor, Iteration, Outcome, RequestId, Scheduler, Truth};
use std::sync::Arc;

pub(crate) struct Worker<'a> {
    pub scheduler: Scheduler,
    pub executor: SimExecutor<'a>,
    outcome: Outcome,
}

/// What a worker began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// There is nothing to do until a request arrives.
    Nothing,
    /// A step was computed.
    Ran { elapsed_ns: u64 },
    /// Several decode steps may run as one, for so long at most. Nothing was computed yet.
    Planned { ns: u64 },
}

impl<'a> Worker<'a> {
    /// A worker over `cache`, which must be empty. `truth` as in [`Scheduler::new`].
    pub fn new(
        cache: Cache,
        cost: &'a dyn StepCost,
        options: &Options,
        truth: Option<Box<dyn Truth>>,
        one_by_one: bool,
    ) -> Result<Self, BadConfig> {
        let block_tokens = cache.occupancy().next().map_or(1, |room| room.block_tokens);
        let mut scheduler = Scheduler::new(options.scheduler.clone(), cache, truth)?;
        scheduler.explain_misses(options.explain);
        let executor = SimExecutor::new(cost, block_tokens, one_by_one, options.itl);
        Ok(Worker { scheduler, executor, outcome: Outcome::default() })
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
        let Worker { scheduler, executor, outcome } = self;
        executor.next_arrival_ns = u64::MAX;
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
        self.executor.next_arrival_ns = next_arrival_ns;
        match self.scheduler.iterate(begin_ns, &mut self.executor) {
            Iteration::Ran { elapsed_ns, .. } => elapsed_ns,
            Iteration::NothingToDo => unreachable!("the same state gives the same plan"),
        }
    }
}
