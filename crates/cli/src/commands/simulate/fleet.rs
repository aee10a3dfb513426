//! `--workers`: a fleet behind a router.
use super::requests::Requests;
use super::spec;
use super::{Args, What, show};
use crate::options::wrong_usage;
use crate::{output, progress};
use anyhow::Context;
use kvist_cache::PagedSpec;
use kvist_simulator::fleet::{
    self, Change, FleetError, FleetOptions, FleetRun, MAX_WORKERS, POLICIES, Policy, WhatChanges,
};
use kvist_simulator::report;
use kvist_simulator::request::Request;
use kvist_simulator::run::Options;
use std::str::FromStr;
use std::time::Duration;

const FLEET: &str = "Fleet";
/// What a subscriber of events waits for: a step is published when it is over, and arrives soon after.
const ROUTER_DELAY: Duration = Duration::from_millis(10);

#[derive(clap::Args, Clone, Debug, Default)]
pub struct FleetArgs {
    /// Simulate this many such machines behind a router
    #[arg(
        long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)),
        help_heading = FLEET
    )]
    pub workers: Option<u32>,
    /// Which worker gets a request: round_robin, least_loaded, session_hash, prefix_aware, cache_aware, overlap_cost
    /// [default: prefix_aware]
    #[arg(long, value_name = "NAME", value_parser = policy, help_heading = FLEET)]
    pub routing: Option<Policy>,
    /// Time until the router knows what a step stored and evicted [default: 10ms]
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = FLEET)]
    router_delay: Option<Duration>,
    /// Draw workers by the softmax of their costs, for prefix_aware (of the cost itself) and overlap_cost (of its share of
    /// the range) [default: 0, the lowest cost]
    #[arg(long, value_name = "T", help_heading = FLEET)]
    router_temperature: Option<f64>,
    /// What a cached block saves, in blocks to compute, for overlap_cost: Dynamo's overlap_score_credit, not its deprecated
    /// overlap-score weight [default: 1]
    #[arg(long, value_name = "W", help_heading = FLEET)]
    overlap_weight: Option<f64>,
    /// A worker fails, as 3@120s: worker 3 (the first is 0), 120 s after the beginning. Its requests are sent again. May be
    /// repeated
    #[arg(long = "fail", value_name = "WORKER@TIME", help_heading = FLEET)]
    failures: Vec<At>,
    /// A worker joins with an empty cache, as 3@300s: one that failed before, or a new one with the next number. May be
    /// repeated
    #[arg(long = "join", value_name = "WORKER@TIME", help_heading = FLEET)]
    joins: Vec<At>,
    /// This many times the load, in as much time: copies that share no content
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = FLEET)]
    scale: Option<u32>,
}

pub fn policy(name: &str) -> Result<Policy, String> {
    let known = || POLICIES.iter().map(|(_, name, _)| *name).collect::<Vec<_>>().join(", ");
    Policy::by_name(name).ok_or_else(|| format!("there is no such policy: use one of {}", known()))
}

/// A worker, and a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct At {
    worker: u32,
    time: Duration,
}

impl FromStr for At {
    type Err = String;
    fn from_str(text: &str) -> Result<At, String> {
        let (worker, time) = text
            .split_once('@')
            .ok_or_else(|| format!("`{text}` has no time: write it as 3@120s, worker 3 after 120 s"))?;
        let worker = worker.parse().ok().filter(|worker| *worker < MAX_WORKERS).ok_or_else(|| {
            format!("`{worker}` is not the number of a worker: give one from 0 to {}", MAX_WORKERS - 1)
        })?;
        Ok(At { worker, time: spec::duration(time)? })
    }
}

impl FleetArgs {
    /// The fleet of a cell of a sweep.
    pub fn set(&mut self, workers: u32, routing: &str) -> Result<(), String> {
        self.workers = Some(workers);
        self.routing = Some(policy(routing)?);
        if !matches!(self.routing, Some(Policy::OverlapCost { .. })) {
            self.overlap_weight = None; // only that policy has this parameter
        }
        if !self.policy().has_cost() {
            self.router_temperature = None; // only policies with a cost have it
        }
        Ok(())
    }

    /// The first flag given that means something for a fleet only.
    fn first_flag(&self) -> Option<&'static str> {
        let given = [
            (self.routing.is_some(), "--routing"),
            (self.router_delay.is_some(), "--router-delay"),
            (self.router_temperature.is_some(), "--router-temperature"),
            (self.overlap_weight.is_some(), "--overlap-weight"),
            (!self.failures.is_empty(), "--fail"),
            (!self.joins.is_empty(), "--join"),
            (self.scale.is_some(), "--scale"),
        ];
        given.into_iter().find_map(|(given, flag)| given.then_some(flag))
    }

    pub fn is_on(&self) -> bool {
        self.workers.is_some()
    }

    pub fn policy(&self) -> Policy {
        match (self.routing.unwrap_or(Policy::PrefixAware), self.overlap_weight) {
            (Policy::OverlapCost { .. }, Some(overlap_weight)) => Policy::OverlapCost { overlap_weight },
            (policy, _) => policy,
        }
    }

    /// How many times the load is served.
    pub fn scale(&self) -> u32 {
        self.scale.unwrap_or(1)
    }

    fn changes(&self) -> Vec<Change> {
        let changes = |list: &[At], what| {
            let change = move |at: &At| Change {
                at_ns: u64::try_from(at.time.as_nanos()).unwrap_or(u64::MAX),
                worker: at.worker,
                what,
            };
            list.iter().map(change).collect::<Vec<_>>()
        };
        // A worker that is to be replaced at the same moment fails first.
        [changes(&self.failures, WhatChanges::Fails), changes(&self.joins, WhatChanges::Joins)].concat()
    }

    pub fn options(
        &self,
        run: Options,
        objectives: report::Objectives,
        seed: u64,
        rows: bool,
    ) -> FleetOptions {
        let delay = self.router_delay.unwrap_or(ROUTER_DELAY);
        FleetOptions {
            run: Options { explain: false, watch: false, ..run },
            workers: self.workers.unwrap_or(1),
            policy: self.policy(),
            temperature: self.router_temperature.unwrap_or(0.0),
            view_delay_ns: u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX),
            changes: self.changes(),
            copies: self.scale(),
            objectives,
            rows,
            seed,
            ..FleetOptions::default()
        }
    }
}

impl What {
    /// Checks what a fleet does not support, and that flags for fleets have one.
    pub fn check_fleet(&self) -> anyhow::Result<()> {
        self.tiers.check(self.fleet.is_on())?;
        if !self.fleet.is_on() {
            return match self.fleet.first_flag() {
                Some(flag) => Err(wrong_usage(format!("{flag} needs a fleet: give --workers"))),
                None => Ok(()),
            };
        }
        for (given, flag, why) in [
            (self.zero.zero_service, "--zero-service", "where no worker is ever busy"),
            (self.speculation.is_on(), "--speculate", "which a fleet does not simulate yet"),
        ] {
            if given {
                return Err(wrong_usage(format!("--workers cannot be used with {flag}, {why}")));
            }
        }
        if let Some(lengths) = self.schedule.told_lengths() {
            return Err(wrong_usage(format!(
                "--workers cannot be used with --lengths {lengths}, which a fleet does not simulate yet"
            )));
        }
        if let Some(weight) = self.fleet.overlap_weight {
            if !matches!(self.fleet.policy(), Policy::OverlapCost { .. }) {
                return Err(wrong_usage(
                    "--overlap-weight needs --routing overlap_cost, which weighs overlap",
                ));
            }
            if !(weight.is_finite() && weight >= 0.0) {
                let range = "the weight must be a finite number, at least 0";
                return Err(wrong_usage(format!("--overlap-weight {weight}: {range}")));
            }
        }
        let options = self.fleet_options(0, false);
        fleet::check(&options).map_err(refused)
    }

    pub fn fleet_options(&self, seed: u64, rows: bool) -> FleetOptions {
        let options = self.fleet.options(self.options(seed), self.objectives(), seed, rows);
        // `check` reports tiers that are wrong. Until then there are none, and so there is no store.
        let has_tiers = options.run.scheduler.tiers.is_some();
        let store = self.tiers.store().filter(|_| has_tiers);
        let durable_tiers = if has_tiers { self.tiers.durable() } else { Vec::new() };
        FleetOptions { store, durable_tiers, ..options }
    }

    /// The cache of every worker.
    fn worker_cache(&self, requests: &[Request]) -> anyhow::Result<PagedSpec> {
        let mut spec = self.blocks.spec(requests, &self.costs, self.schedule.batch_tokens())?;
        if let Some(prefix) = &mut spec.prefix {
            prefix.n_ghosts = 0; // they only explain misses
        }
        Ok(spec)
    }
}

/// The error for a fleet that the simulator refuses: names the flag that asked for it.
fn refused(why: FleetError) -> anyhow::Error {
    let flag = match &why {
        FleetError::Temperature { .. } => "--router-temperature: ",
        FleetError::Change { what: WhatChanges::Fails, .. } => "--fail: ",
        FleetError::Change { what: WhatChanges::Joins, .. } => "--join: ",
        FleetError::TooManyCopies { .. } => "--scale: ",
        FleetError::OutOfRange { .. } | FleetError::Unsupported(_) => "--workers: ",
        FleetError::Tiers(_) => "--tier: ",
        // Of a worker, as without a fleet.
        FleetError::Run(_) | FleetError::Cache(_) => "",
    };
    wrong_usage(format!("{flag}{why}"))
}

/// One run of a fleet with empty caches.
pub fn simulate(
    what: &What,
    requests: &[Request],
    options: &FleetOptions,
    progress: &mut dyn FnMut(usize),
) -> anyhow::Result<FleetRun> {
    let cost = what.costs.get()?;
    let cache = what.worker_cache(requests)?;
    fleet::run(requests, &cache, &*cost, options, progress).map_err(refused)
}

/// Adds the load and the layers to the setting of the report.
pub fn describe(run: &mut FleetRun, what: &What, requests: &Requests, seed: u64) {
    let setting = &mut run.report.setting;
    what.describe_layers(setting);
    setting.insert("load".to_owned(), requests.name.clone());
    if requests.drawn {
        setting.insert("seed".to_owned(), seed.to_string());
    }
}

/// `kvist simulate --workers N`.
pub fn run(args: &Args, requests: &Requests, quiet: bool) -> anyhow::Result<()> {
    for (given, flag, instead) in [
        (args.show.record.is_some(), "--record", "a recording is of one scheduler"),
        (!args.show.beside.is_empty(), "--beside", "use sweep, which compares fleets"),
        (args.show.html.is_some(), "--html", "use sweep, which draws policies and fleet sizes"),
        (args.show.svg.is_some(), "--svg", "use sweep, which draws policies and fleet sizes"),
    ] {
        if given {
            return Err(wrong_usage(format!("{flag} cannot be used with --workers: {instead}")));
        }
    }
    let what = &args.what;
    let options = what.fleet_options(args.seed, args.show.csv.is_some());
    let n_requests = requests.list.len() as u64 * u64::from(options.copies);
    let bar = progress::bar("requests", n_requests, quiet);
    let mut run = simulate(what, &requests.list, &options, &mut |n| bar.set_position(n as u64))?;
    bar.finish_and_clear();
    describe(&mut run, what, requests, args.seed);
    if let Some(file) = &args.show.csv {
        let mut rows = Vec::new();
        report::write_csv(&mut rows, &run.rows).context("cannot write rows")?;
        output::write_file(file, &rows)?;
    }
    if args.show.json { output::show_json(&run.report) } else { output::show(&show::fleet(&run.report)) }
}
