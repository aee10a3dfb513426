//! `kvist simulate sweep`: policies x capacities x schedulers x seeds.
//!
//! Every run is a cell with its own file in the folder, named by the run and by a hash of everything it depends on. A
//! cell whose file exists is not run again; files are written atomically. So a sweep can be stopped at any time, and
//! its results do not depend on the number of threads.
mod present;

use super::spec::Capacity;
use super::tiers::TierSize;
use super::{What, write_pictures, zero};
use crate::options::wrong_usage;
use crate::{output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_simulator::fleet::{MAX_WORKERS, Policy};
use kvist_simulator::html::Page;
use kvist_simulator::report::{VERSION, over_seeds};
use kvist_simulator::request::Request;
use kvist_simulator::run::Options;
use kvist_simulator::statistics::Estimate;
use kvist_simulator::zero_service::BlockStream;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    what: What,
    /// Eviction policies to compare [default: that of --policy]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help_heading = "Sweep")]
    policies: Vec<String>,
    /// Capacities in blocks to compare [default: that of --capacity-blocks]
    #[arg(long, value_name = "N,...", value_delimiter = ',', help_heading = "Sweep")]
    capacities: Vec<Capacity>,
    /// Sizes of the last tier to compare: 0, 500GB, 2TB, inf [default: that of --tier]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', requires = "tiers", help_heading = "Sweep")]
    tier_sizes: Vec<TierSize>,
    /// Schedulers to compare [default: that of --schedule]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help_heading = "Sweep")]
    schedules: Vec<String>,
    /// Numbers of workers to compare, in fleets [default: that of --workers]
    #[arg(
        long, value_name = "N,...", value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WORKERS)), help_heading = "Sweep"
    )]
    fleet_sizes: Vec<u32>,
    /// Routing policies to compare, in fleets [default: that of --routing]
    #[arg(
        long, value_name = "NAME,...", value_delimiter = ',', value_parser = super::fleet::policy,
        help_heading = "Sweep"
    )]
    routings: Vec<Policy>,
    /// Seeds 1 to N of a generated load
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Sweep")]
    seeds: u64,
    /// Folder for the cells, the table and the page; existing cells are not run again
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath, help_heading = "Sweep")]
    out: PathBuf,
    /// Runs at the same time [default: cores]
    #[arg(short = 'j', long, value_name = "N", help_heading = "Sweep")]
    jobs: Option<usize>,
    /// Print the table as one JSON document on stdout
    #[arg(long, help_heading = "Sweep")]
    json: bool,
}

/// One run of the sweep.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Cell {
    schedule: String,
    policy: String,
    /// As given to the flag.
    capacity: String,
    /// Size of the last tier, if sizes are compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tier_size: Option<String>,
    /// If a fleet is simulated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fleet: Option<FleetCell>,
    seed: u64,
}

/// The fleet of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct FleetCell {
    workers: u32,
    routing: String,
}

impl Cell {
    fn name(&self) -> String {
        let tier = self.tier_size.as_ref().map_or(String::new(), |size| format!("-{size}"));
        let fleet = self.fleet.as_ref().map_or(String::new(), |it| format!("-{}-{}", it.workers, it.routing));
        format!("{}-{}-{}{tier}{fleet}-{}", self.schedule, self.policy, self.capacity, self.seed)
    }
}

/// The contents of a cell's file.
#[derive(Serialize, Deserialize)]
struct CellFile {
    version: u32,
    /// Hash of everything that the cell depends on.
    key: String,
    cell: Cell,
    figures: BTreeMap<String, f64>,
}

/// The result of one combination over its seeds.
#[derive(Serialize)]
struct Row {
    schedule: String,
    policy: String,
    capacity: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    tier_size: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    fleet: Option<FleetCell>,
    seeds: u64,
    figures: BTreeMap<String, Estimate>,
}

#[derive(Serialize)]
struct Table {
    version: u32,
    load: String,
    rows: Vec<Row>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let (as_json, out) = (args.json, args.out.clone());
    let (table, json) = write(args, quiet)?;
    if as_json { output::show(&json) } else { output::show(&present::text(&table, &out)) }
}

/// Runs what is missing and writes all files. Returns the table, also as JSON.
fn write(mut args: Args, quiet: bool) -> anyhow::Result<(Table, String)> {
    if args.what.zero.zero_service && !args.schedules.is_empty() {
        return Err(wrong_usage("--schedules cannot be used with --zero-service, where no request waits"));
    }
    if let (None, Some(size)) = (args.what.fleet.workers, args.fleet_sizes.first()) {
        args.what.fleet.workers = Some(*size); // so that flags for fleets are taken
    }
    if args.what.fleet.routing.is_none() {
        // Flags for policies are taken if one of the policies has them.
        let of = |has: fn(&Policy) -> bool| args.routings.iter().copied().find(has);
        let weighs: fn(&Policy) -> bool = |policy| matches!(policy, Policy::OverlapCost { .. });
        args.what.fleet.routing =
            of(weighs).or_else(|| of(|policy| policy.has_cost())).or_else(|| of(|_| true));
    }
    if !args.routings.is_empty() && !args.what.fleet.is_on() {
        return Err(wrong_usage("--routings needs fleets: give --workers or --fleet-sizes"));
    }
    args.what.read_inputs(quiet)?;
    let cells = cells(&args);
    twice("--schedules", &args.schedules)?;
    twice("--policies", &args.policies)?;
    twice("--capacities", &args.capacities.iter().map(Capacity::to_string).collect::<Vec<_>>())?;
    twice("--tier-sizes", &args.tier_sizes.iter().map(TierSize::to_string).collect::<Vec<_>>())?;
    twice("--fleet-sizes", &args.fleet_sizes.iter().map(u32::to_string).collect::<Vec<_>>())?;
    let routings: Vec<String> = args.routings.iter().map(|policy| policy.name().to_owned()).collect();
    twice("--routings", &routings)?;
    let seeds: Vec<u64> = if args.what.requests.is_drawn() { (1..=args.seeds).collect() } else { vec![1] };
    // Loads are read or generated once, and shared by all cells of their seed.
    let mut loads = BTreeMap::new();
    let mut name = String::new();
    for &seed in &seeds {
        let load = args.what.requests.get(seed)?;
        if !quiet {
            load.remarks.iter().for_each(|remark| output::note(remark));
        }
        let load = if args.what.zero.zero_service { load } else { load.in_order_of_arrival() };
        name = load.name;
        loads.insert(seed, load.list);
    }
    // Check every combination before hours are spent on any.
    for cell in &cells {
        what_of(&args.what, cell)?.check(&[])?;
    }
    for load in loads.values() {
        // Check the prompts' content once, since it is the same for all cells.
        match args.what.zero.zero_service {
            true => BlockStream::of(load, args.what.blocks.block_tokens).map(|_| ())?,
            false => args.what.check_cache(load)?,
        }
    }
    if !quiet && !args.what.zero.zero_service {
        let mut shown = BTreeSet::new();
        for cell in &cells {
            let remark = what_of(&args.what, cell)?.schedule.remark(&loads[&cell.seed]);
            remark.into_iter().filter(|it| shown.insert(it.clone())).for_each(|it| output::note(&it));
        }
    }
    let program = program()?;
    let loads = loads
        .into_iter()
        .map(|(seed, requests)| Ok((seed, Load { hash: hash_of(program, &requests)?, requests })))
        .collect::<anyhow::Result<BTreeMap<u64, Load>>>()?;
    std::fs::create_dir_all(args.out.join("cells"))
        .with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let files = run_all(&args, &cells, &loads, quiet)?;
    let table = table(&name, files);
    let json = serde_json::to_string_pretty(&table)? + "\n";
    output::write_file(&args.out.join("sweep.json"), json.as_bytes())?;
    output::write_file(&args.out.join("sweep.csv"), present::csv(&table).as_bytes())?;
    let title = format!("{}: a sweep", table.load);
    // If all rows have one capacity and one fleet size there is no curve over them.
    let comparison = present::comparison(&table);
    // With zero service a machine is not asked for: the cache has no bound.
    let auto = match args.what.zero.zero_service {
        true => None,
        false => args.what.blocks.auto_blocks(&args.what.costs)?,
    };
    let plots = if comparison.is_some() { Vec::new() } else { present::plots(&table, auto) };
    let page = Page { title: &title, comparison, plots, ..Page::default() };
    output::write_file(&args.out.join("sweep.html"), page.render().as_bytes())?;
    write_pictures(&args.out, &page)?;
    Ok((table, json))
}

/// [`run`] for programs: writes nothing to stdout and stderr. Returns the table as JSON.
pub fn quietly(mut args: Args, stop: Arc<AtomicBool>) -> anyhow::Result<String> {
    args.what.stop = Some(stop);
    Ok(write(args, true)?.1)
}

/// The requests of a seed.
struct Load {
    requests: Vec<Request>,
    /// Hash of the program and of the requests.
    hash: u64,
}

/// Returns an error if a flag's list has a value twice: its cells would be one file.
fn twice(flag: &str, values: &[String]) -> anyhow::Result<()> {
    match values.iter().enumerate().find(|(i, value)| values[..*i].contains(value)) {
        Some((_, value)) => Err(wrong_usage(format!("{flag} names {value} twice: give it once"))),
        None => Ok(()),
    }
}

/// FNV-1a (Fowler, Noll, Vo), continued from `hash`. It detects stale cells, not forged ones.
struct Fnv(u64);

const FNV: Fnv = Fnv(0xcbf2_9ce4_8422_2325);

impl std::io::Write for Fnv {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Hash of this program's binary: another build may compute other figures.
fn program() -> anyhow::Result<u64> {
    let cannot = || "cannot read this program, whose build is part of what a cell depends on";
    let file = crate::PROGRAM.get().cloned().map_or_else(std::env::current_exe, Ok).with_context(cannot)?;
    let mut hash = FNV;
    std::io::copy(&mut std::fs::File::open(file).with_context(cannot)?, &mut hash).with_context(cannot)?;
    Ok(hash.0)
}

fn hash_of(program: u64, requests: &[Request]) -> anyhow::Result<u64> {
    let mut hash = Fnv(program);
    kvist_simulator::trace::write(&mut hash, requests).context("cannot hash requests")?;
    Ok(hash.0)
}

/// Stands for the scheduler's name with `--zero-service`, where no scheduler runs.
const UNSCHEDULED: &str = "none";

fn cells(args: &Args) -> Vec<Cell> {
    let zero = args.what.zero.zero_service;
    let or = |list: &[String], one: &str| if list.is_empty() { vec![one.to_owned()] } else { list.to_vec() };
    let schedules =
        if zero { vec![UNSCHEDULED.to_owned()] } else { or(&args.schedules, &args.what.schedule.schedule) };
    let policies = or(&args.policies, &args.what.blocks.policy);
    let capacities: Vec<String> = match &args.capacities[..] {
        [] => vec![args.what.blocks.capacity_blocks.to_string()],
        list => list.iter().map(Capacity::to_string).collect(),
    };
    let tier_sizes: Vec<Option<String>> = match &args.tier_sizes[..] {
        [] => vec![None],
        list => list.iter().map(|size| Some(size.to_string())).collect(),
    };
    let fleets = fleets(args);
    let n_seeds = if args.what.requests.is_drawn() { args.seeds } else { 1 };
    let mut cells = Vec::new();
    for schedule in &schedules {
        for policy in &policies {
            for capacity in &capacities {
                for (tier_size, fleet) in
                    tier_sizes.iter().flat_map(|size| fleets.iter().map(move |fleet| (size, fleet)))
                {
                    cells.extend((1..=n_seeds).map(|seed| Cell {
                        schedule: schedule.clone(),
                        policy: policy.clone(),
                        capacity: capacity.clone(),
                        tier_size: tier_size.clone(),
                        fleet: fleet.clone(),
                        seed,
                    }));
                }
            }
        }
    }
    cells
}

/// The fleets to compare; only `None` if no fleet is simulated.
fn fleets(args: &Args) -> Vec<Option<FleetCell>> {
    let Some(workers) = args.what.fleet.workers else { return vec![None] };
    let sizes = if args.fleet_sizes.is_empty() { vec![workers] } else { args.fleet_sizes.clone() };
    let routings = match &args.routings[..] {
        [] => vec![args.what.fleet.policy()],
        list => list.to_vec(),
    };
    let fleet = |workers, policy: &Policy| Some(FleetCell { workers, routing: policy.name().to_owned() });
    routings.iter().flat_map(|policy| sizes.iter().map(move |&workers| fleet(workers, policy))).collect()
}

fn what_of(what: &What, cell: &Cell) -> anyhow::Result<What> {
    let mut what = what.clone();
    what.schedule.schedule.clone_from(&cell.schedule);
    what.blocks.policy.clone_from(&cell.policy);
    what.blocks.capacity_blocks = cell.capacity.parse().map_err(wrong_usage)?;
    if let Some(size) = &cell.tier_size {
        what.tiers.resize_last(size.parse().map_err(wrong_usage)?);
    }
    if let Some(fleet) = &cell.fleet {
        what.fleet.set(fleet.workers, &fleet.routing).map_err(wrong_usage)?;
    }
    if !matches!(cell.policy.as_str(), "lfu_decay" | "cost") {
        what.blocks.half_life = None; // only those two policies have this parameter
    }
    Ok(what)
}

fn run_all(
    args: &Args,
    cells: &[Cell],
    loads: &BTreeMap<u64, Load>,
    quiet: bool,
) -> anyhow::Result<Vec<CellFile>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let n_jobs = args.jobs.unwrap_or(cores).clamp(1, cells.len().max(1));
    let bar = progress::bar("runs", cells.len() as u64, quiet);
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<anyhow::Result<CellFile>>>> = Mutex::new(cells.iter().map(|_| None).collect());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(cell) = cells.get(at) else { return };
            let file = one(args, cell, &loads[&cell.seed]);
            if file.is_err() {
                next.store(cells.len(), Ordering::Relaxed); // stop the other threads from starting new cells
            }
            bar.inc(1);
            done.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[at] = Some(file);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..n_jobs {
            scope.spawn(work);
        }
    });
    bar.finish_and_clear();
    // In the order of the cells, whichever thread ran them; the first error is returned.
    done.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).into_iter().flatten().collect()
}

fn one(args: &Args, cell: &Cell, load: &Load) -> anyhow::Result<CellFile> {
    let requests = &load.requests;
    let what = what_of(&args.what, cell)?;
    let options = Options { itl: true, ..what.options(cell.seed) };
    let key = key(&what, &options, load)?;
    let path = args.out.join("cells").join(cell.name() + ".json");
    if let Some(file) = read(&path, &key) {
        return Ok(file);
    }
    let run = || format!("the run {}", cell.name());
    let figures = if what.zero.zero_service {
        zero::figures(&zero::replay(&what, requests).with_context(run)?)
    } else {
        super::figures(&what, requests, &options, cell.seed).with_context(run)?
    };
    let figures = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let file = CellFile { version: VERSION, key, cell: cell.clone(), figures };
    let text = serde_json::to_string_pretty(&file)? + "\n";
    output::write_file(&path, text.as_bytes())?;
    Ok(file) // numbers are read back to the last bit (serde_json's `float_roundtrip`)
}

/// Hash of everything that a cell depends on: the program, requests, cache, costs, scheduler, objectives.
fn key(what: &What, options: &Options, load: &Load) -> anyhow::Result<String> {
    let mut hash = Fnv(load.hash);
    write!(
        hash,
        "{:?} {:?} {:?} {:?} {:?} {:?} {:?}",
        Options { stop: None, ..options.clone() },
        (what.zero.zero_service, what.zero.touch_order),
        what.objectives(),
        what.blocks,
        what.costs.identity()?,
        what.fleet,
        (what.tiers.store(), what.tiers.durable()),
    )
    .context("cannot hash the setting")?;
    Ok(format!("{:016x}", hash.0))
}

/// The file of an earlier run, if its key matches.
fn read(path: &Path, key: &str) -> Option<CellFile> {
    let file: CellFile = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    (file.version == VERSION && file.key == key).then_some(file)
}

fn table(load: &str, files: Vec<CellFile>) -> Table {
    let mut groups: Vec<(Cell, Vec<BTreeMap<String, f64>>)> = Vec::new();
    for file in files {
        let CellFile { cell, figures, .. } = file;
        match groups.last_mut() {
            Some((of, runs)) if Cell { seed: 0, ..of.clone() } == Cell { seed: 0, ..cell.clone() } => {
                runs.push(figures);
            }
            _ => groups.push((cell, vec![figures])),
        }
    }
    let rows = groups.into_iter().map(|(cell, runs)| Row {
        schedule: cell.schedule,
        policy: cell.policy,
        capacity: cell.capacity,
        tier_size: cell.tier_size,
        fleet: cell.fleet,
        seeds: runs.len() as u64,
        figures: over_seeds(runs.into_iter().flatten()),
    });
    Table { version: VERSION, load: load.to_owned(), rows: rows.collect() }
}
