//! How a fleet is made, and what it refuses.
use super::routing::Policy;
use crate::report::Objectives;
use crate::run::{Options, RunError};
use kvist_cache::PagedError;
use kvist_scheduler::{BadConfig, LengthSource};
use std::fmt::{self, Display, Formatter};

/// Maximum workers of a fleet.
pub const MAX_WORKERS: u32 = 65_536;

/// Maximum requests of a fleet, over all copies of its load.
pub const MAX_REQUESTS: u64 = 100_000_000;

/// How a fleet is run.
#[derive(Clone, Debug)]
pub struct FleetOptions {
    /// Options of every worker. Not supported in a fleet: the true lengths, speculation, explanations of misses and the activity
    /// for plots. Every worker has tiers of its own, but for the last one if there is a `store`.
    pub run: Options,
    /// The last tier is one store of all workers.
    pub store: Option<Store>,
    /// Which tiers keep their blocks when their worker fails: it finds them when it joins again. Those that are not named lose them.
    pub durable_tiers: Vec<bool>,
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
            store: None,
            durable_tiers: Vec::new(),
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

/// A store that all workers write to and find blocks in. The tier of the configuration describes the link of one worker: its
/// latency and its bandwidth in each direction. The capacity is that of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// What the store reads, and at the same time writes, over all workers. Workers that read at the same time get equal parts of it,
    /// and so do those that write. `None`: as much as the links of all workers carry.
    pub bytes_per_s: Option<u64>,
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
    /// The worker is gone, with its cache and the tiers that are not durable. Its requests are sent again.
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
    /// The tiers of a fleet do not fit together.
    #[error("{0}")]
    Tiers(&'static str),
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

/// Checks what does not depend on the requests.
///
/// # Errors
/// [`FleetError`]
pub fn check(options: &FleetOptions) -> Result<(), FleetError> {
    let run = &options.run;
    for (unsupported, what) in [
        (run.scheduler.lengths == LengthSource::Oracle, "the true lengths of answers (oracle)"),
        (run.speculation.is_some(), "speculative decoding"),
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
    check_tiers(options)?;
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

fn check_tiers(options: &FleetOptions) -> Result<(), FleetError> {
    let n_tiers = options.run.scheduler.tiers.as_ref().map_or(0, |tiers| tiers.list.len());
    let durable = options.durable_tiers.iter().rposition(|is_durable| *is_durable);
    let wrong = match (options.store, n_tiers, durable) {
        (Some(_), 0, _) => "a shared store is the last tier, and there are no tiers",
        (Some(Store { bytes_per_s: Some(0) }), ..) => "a shared store is read at 1 byte/s at least",
        (Some(_), _, Some(last)) if last + 1 >= n_tiers => {
            "a shared store does not fail with a worker, so it cannot be durable"
        }
        (None, _, Some(last)) if last >= n_tiers => "a tier that is not there cannot be durable",
        _ => return Ok(()),
    };
    Err(FleetError::Tiers(wrong))
}

/// Changes by time; those at the same time in the order given.
pub(super) fn in_order(changes: &[Change]) -> Vec<Change> {
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
