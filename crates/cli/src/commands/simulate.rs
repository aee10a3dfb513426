//! `kvist simulate`: how a cache, a policy and a scheduler handle a load, before there is a machine to try them on.
mod arena;
mod blocks;
pub mod costs;
mod fleet;
mod function;
mod layers;
pub mod replay;
mod requests;
mod schedule;
mod seeds;
mod show;
pub mod spec;
mod speculate;
mod sweep;
mod tiers;
mod zero;

use crate::options::wrong_usage;
use crate::{output, progress};
use anyhow::Context;
use blocks::BlockArgs;
use clap::{Subcommand, ValueHint};
use costs::CostArgs;
use fleet::FleetArgs;
pub use function::{NoResult, Simulated};
pub use function::{simulate as simulate_with, sweep as sweep_with};
use kvist_cache::{Cache, evict};
use kvist_scheduler::Config;
use kvist_simulator::html;
use kvist_simulator::report::{self, Objectives, Record, Report};
use kvist_simulator::request::Request;
use kvist_simulator::run::{self, Options, Part, Recorder, Run};
use requests::{RequestArgs, Requests};
use schedule::ScheduleArgs;
use speculate::SpeculateArgs;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use tiers::TierArgs;
use zero::ZeroArgs;

#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Without a trace it draws chats. Examples:\n  \
        kvist simulate --hardware h100-sxm --shape llama-3.1-8b --arrivals poisson:per_s=8 --html report.html\n  \
        kvist simulate --trace conversation_trace.jsonl --capacity-blocks 200000 --slo-ttft 2s\n  \
        kvist simulate --speculate tokens=4,accept=0.8/0.6,draft_ms=0.3\n  \
        kvist simulate --tier ram:64GiB,bw=20GB/s,lat=10us --tier disk:2TB,bw=3GB/s,lat=100us\n  \
        kvist simulate --trace conversation_trace.jsonl --workers 8 --routing prefix_aware --fail 3@120s --join 3@300s\n  \
        kvist simulate --trace conversation_trace.jsonl --zero-service --policy lru --capacity-blocks 10000 --json\n  \
        kvist simulate sweep --policies lru,lfu --capacities 10000,100000,inf --out sweep\n  \
        kvist simulate sweep --trace conversation_trace.jsonl --zero-service --policies lru,opt --capacities 1000,10000 \
        --out bound"
)]
pub struct Args {
    #[command(subcommand)]
    of: Option<Of>,
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    show: ShowArgs,
    /// Seed of the workload: same seed, same bytes
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Simulate this many loads, with seeds from --seed on: reports the mean of every figure and its 95% interval
    #[arg(
        long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..10_000),
        conflicts_with_all = ["trace", "zero_service", "csv", "html", "svg", "beside", "record"]
    )]
    seeds: Option<u64>,
}

#[derive(Subcommand)]
enum Of {
    /// Policies x capacities x schedulers x seeds, on all cores, resumable
    Sweep(Box<sweep::Args>),
    /// The load in contiguous handles and in pages: what is moved, refused and wasted
    Arena(Box<arena::Args>),
    /// Replay the events of a recording, and compare the decisions with the recorded ones
    Replay(replay::Args),
}

/// What is simulated: shared with the sweep.
#[derive(clap::Args, Clone)]
pub struct What {
    #[command(flatten)]
    requests: RequestArgs,
    #[command(flatten)]
    blocks: BlockArgs,
    #[command(flatten)]
    schedule: ScheduleArgs,
    #[command(flatten)]
    costs: CostArgs,
    #[command(flatten)]
    speculation: SpeculateArgs,
    #[command(flatten)]
    tiers: TierArgs,
    #[command(flatten)]
    zero: ZeroArgs,
    #[command(flatten)]
    fleet: FleetArgs,
    /// Objective for the time to the first token: 2s, 500ms
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = "Objectives")]
    slo_ttft: Option<Duration>,
    /// Objective for the time per token after the first
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = "Objectives")]
    slo_tpot: Option<Duration>,
    /// Ends a run when it becomes true.
    #[arg(skip)]
    pub stop: Option<Arc<AtomicBool>>,
}

impl What {
    pub fn objectives(&self) -> Objectives {
        let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
        Objectives { ttft_s: seconds(self.slo_ttft), tpot_s: seconds(self.slo_tpot) }
    }
}

#[derive(clap::Args)]
struct ShowArgs {
    /// Print one JSON document on stdout
    #[arg(long, help_heading = "Results")]
    json: bool,
    /// Write one row per request
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    csv: Option<PathBuf>,
    /// Write one self-contained page with plots
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    html: Option<PathBuf>,
    /// Folder for the plots of that page, one SVG file each
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath, help_heading = "Results")]
    svg: Option<PathBuf>,
    /// Further schedulers to run on the same load, for comparison
    #[arg(
        long, value_name = "NAME,...", value_delimiter = ',', conflicts_with_all = ["json", "csv", "record"],
        help_heading = "Results"
    )]
    beside: Vec<String>,
    /// Record arrivals, decisions and block events as JSON lines. An existing file is replaced, as with all results
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Results")]
    record: Option<PathBuf>,
}

pub fn run(mut args: Args, quiet: bool) -> anyhow::Result<()> {
    match args.of {
        Some(Of::Sweep(args)) => return sweep::run(*args, quiet),
        Some(Of::Arena(args)) => return arena::run(*args, quiet),
        Some(Of::Replay(args)) => return replay::run(args, quiet),
        None => {}
    }
    args.what.read_inputs(quiet)?;
    if let Some(n_seeds) = args.seeds {
        return seeds::run(&args, n_seeds, quiet);
    }
    let requests = args.what.requests.get(args.seed)?;
    if !quiet {
        requests.remarks.iter().for_each(|remark| output::note(remark));
    }
    if args.what.zero.zero_service {
        return zero_service(&args, &requests);
    }
    let requests = requests.in_order_of_arrival();
    let whats: Vec<What> = std::iter::once(&args.what.schedule.schedule)
        .chain(&args.show.beside)
        .map(|schedule| {
            let mut what = args.what.clone();
            what.schedule.schedule.clone_from(schedule);
            what
        })
        .collect();
    whats.iter().try_for_each(|what| what.check(&requests.list))?;
    if !quiet {
        whats.iter().filter_map(|what| what.schedule.remark(&requests.list)).for_each(|it| output::note(&it));
        args.what.beyond_measurements(&requests.list)?.iter().for_each(|it| output::note(it));
    }
    if args.what.fleet.is_on() {
        return fleet::run(&args, &requests, quiet);
    }
    let objectives = args.what.objectives();
    let mut runs = Vec::new();
    for what in &whats {
        let record = watched(&args, what, &requests, quiet)?;
        runs.push((Report::of(&record, &objectives), record));
    }
    if let (Some(file), Some((_, record))) = (&args.show.csv, runs.first()) {
        let mut rows = Vec::new();
        report::write_csv(&mut rows, &record.requests).context("cannot write rows")?;
        output::write_file(file, &rows)?;
    }
    let drawn = whats.iter().zip(&runs).map(|(what, (report, record))| html::Run {
        name: &what.schedule.schedule,
        record,
        report,
    });
    let page = html::Page { title: &requests.name, runs: drawn.collect(), ..html::Page::default() };
    if let Some(file) = &args.show.html {
        output::write_file(file, page.render().as_bytes())?;
    }
    if let Some(folder) = &args.show.svg {
        write_pictures(folder, &page)?;
    }
    if let (true, Some((report, _))) = (args.show.json, runs.first()) {
        return output::show_json(report);
    }
    let texts: Vec<String> = runs.iter().map(|(report, _)| show::report(report)).collect();
    output::show(&texts.join("\n"))
}

/// Runs one of the schedulers to show, and records it if asked to.
fn watched(args: &Args, what: &What, requests: &Requests, quiet: bool) -> anyhow::Result<Record> {
    let bar = progress::bar("requests", requests.list.len() as u64, quiet);
    let mut recording = args.show.record.as_deref().map(output::FileInParts::create).transpose()?;
    let mut write = |lines: &str| match &mut recording {
        Some(file) => file.write(lines.as_bytes()),
        None => Ok(()),
    };
    let watch = args.show.html.is_some() || args.show.svg.is_some();
    let options = Options { explain: true, watch, ..what.options(args.seed) };
    let mut progress = |n: usize| bar.set_position(n as u64);
    let done =
        simulate(what, &requests.list, &options, args.show.record.is_some(), &mut write, &mut progress)?;
    bar.finish_and_clear();
    if let Some(file) = recording {
        file.finish()?;
    }
    let mut record = done.record;
    what.describe_layers(&mut record.setting);
    record.setting.insert("load".to_owned(), requests.name.clone());
    if requests.drawn {
        record.setting.insert("seed".to_owned(), args.seed.to_string());
    }
    Ok(record)
}

/// Writes the plots of `page`, one SVG file each.
fn write_pictures(folder: &Path, page: &html::Page<'_>) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for picture in page.pictures() {
        output::write_file(&folder.join(picture.name + ".svg"), picture.svg.as_bytes())?;
    }
    Ok(())
}

impl What {
    /// Checks flags that exclude each other, and reads what they name beside the load: the model, and the recording that
    /// drafts are taken from. To be called once, before [`options`](Self::options).
    pub fn read_inputs(&mut self, quiet: bool) -> anyhow::Result<()> {
        if self.zero.zero_service && self.speculation.is_on() {
            return Err(wrong_usage(
                "--speculate cannot be used with --zero-service, where nothing takes time",
            ));
        }
        if self.zero.zero_service && !self.tiers.tiers.is_empty() {
            return Err(wrong_usage("--tier cannot be used with --zero-service, where nothing takes time"));
        }
        if self.blocks.no_prefix_cache && !self.tiers.tiers.is_empty() {
            return Err(wrong_usage(
                "--tier cannot be used with --no-prefix-cache: tiers extend the prefix cache",
            ));
        }
        self.costs.layers.read(quiet)?;
        self.check_layers()?;
        self.schedule.check_lengths()?;
        self.check_fleet()?;
        self.speculation.read()
    }

    /// Refuses layers where the simulator knows none, or no windows.
    fn check_layers(&self) -> anyhow::Result<()> {
        let Some(flag) = self.costs.layers.flag() else { return Ok(()) };
        if self.zero.zero_service {
            return Err(wrong_usage(format!(
                "{flag} cannot be used with --zero-service, which knows no layers"
            )));
        }
        let has_windows = self.costs.layers.has_windows();
        for (given, other) in [(self.fleet.is_on(), "--workers"), (!self.tiers.tiers.is_empty(), "--tier")] {
            if given && has_windows {
                return Err(wrong_usage(format!(
                    "{other} cannot be used with layers that see a window only, which {flag} gives: simulate one worker \
                     without tiers, or a model whose layers see every token"
                )));
            }
        }
        Ok(())
    }

    /// Adds to the setting of a report what the layers see.
    fn describe_layers(&self, setting: &mut BTreeMap<String, String>) {
        setting.extend(self.costs.layers.describe().map(|text| ("layers".to_owned(), text)));
    }

    /// The options of a run of the load of `seed`.
    pub fn options(&self, seed: u64) -> Options {
        let (max_new, deadline_ns) = (self.schedule.max_new(), self.schedule.deadline_ns());
        let speculation = self.speculation.get(seed);
        let (stop, tier_capacities) = (self.stop.clone(), self.tiers.capacities());
        Options {
            scheduler: self.scheduler(),
            length_error: self.schedule.length_error(seed),
            max_new,
            deadline_ns,
            speculation,
            tier_capacities,
            tier_orders: self.tiers.orders(),
            stop,
            ..Options::default()
        }
    }

    fn scheduler(&self) -> Config {
        let config = self.schedule.config(self.costs.work(self.schedule.batch_tokens()));
        // `check` reports what is wrong with them.
        Config { tiers: self.tier_config().ok().flatten(), ..config }
    }

    fn tier_config(&self) -> anyhow::Result<Option<kvist_scheduler::Tiers>> {
        self.tiers.config(&self.costs, self.blocks.block_tokens(), self.schedule.batch_tokens())
    }

    /// Checks the settings, and that one cache can serve all requests, before hours are spent.
    pub fn check(&self, requests: &[Request]) -> anyhow::Result<()> {
        if self.zero.zero_service {
            let policy = evict::build(&self.blocks.policy, &self.blocks.parameters()?);
            return policy.map(|_| ()).map_err(|why| wrong_usage(why.to_string()));
        }
        self.tier_config()?;
        let config = self.scheduler();
        let sound = config.check().and_then(|()| kvist_scheduler::build_policy(&config).map(|_| ()));
        sound.map_err(|why| wrong_usage(why.to_string()))?;
        self.costs.get()?;
        self.check_cache(requests)
    }

    /// Warnings about where a measured table has no data and must extrapolate.
    fn beyond_measurements(&self, requests: &[Request]) -> anyhow::Result<Vec<String>> {
        let longest = requests.iter().map(|r| u64::from(r.prompt_tokens) + u64::from(r.output_tokens)).max();
        let (sequences, tokens) = (self.schedule.max_batch(), self.schedule.batch_tokens());
        let mut beyond =
            self.costs.beyond(sequences, tokens, longest.unwrap_or(0), self.blocks.block_tokens())?;
        beyond.extend(self.costs.beyond_drafts(sequences, tokens, self.speculation.max_tokens())?);
        Ok(beyond)
    }

    /// Checks that one cache can serve all requests.
    pub fn check_cache(&self, requests: &[Request]) -> anyhow::Result<()> {
        self.cache(requests).map(|_| ())
    }

    fn cache(&self, requests: &[Request]) -> anyhow::Result<Cache> {
        self.blocks.cache(requests, &self.costs, self.schedule.batch_tokens())
    }
}

/// One run with an empty cache and a new scheduler.
pub fn simulate(
    what: &What,
    requests: &[Request],
    options: &Options,
    recorded: bool,
    record: &mut dyn FnMut(&str) -> anyhow::Result<()>,
    progress: &mut dyn FnMut(usize),
) -> anyhow::Result<Run> {
    let cost = what.costs.get()?;
    let cache = what.cache(requests)?;
    let mut failed = None;
    let mut sink = |_: Part, lines: &str| {
        if failed.is_none() {
            failed = record(lines).err();
        }
    };
    let sink: Option<&mut Recorder<'_>> = if recorded { Some(&mut sink) } else { None };
    let done = run::run(requests, cache, &*cost, options, sink, progress)
        .map_err(|why| wrong_usage(why.to_string()))?;
    failed.map_or(Ok(done), Err)
}

/// The figures of one run, of one worker or of a fleet.
fn figures(
    what: &What,
    requests: &[Request],
    options: &Options,
    seed: u64,
) -> anyhow::Result<Vec<(&'static str, f64)>> {
    if what.fleet.is_on() {
        let options = what.fleet_options(seed, false);
        return Ok(fleet::simulate(what, requests, &options, &mut |_| ())?.report.figures());
    }
    let done = simulate(what, requests, options, false, &mut |_| Ok(()), &mut |_| ())?;
    Ok(Report::of(&done.record, &what.objectives()).figures())
}

fn zero_service(args: &Args, requests: &Requests) -> anyhow::Result<()> {
    for (given, flag) in [
        (&args.show.csv, "--csv"),
        (&args.show.html, "--html"),
        (&args.show.svg, "--svg"),
        (&args.show.record, "--record"),
    ] {
        if given.is_some() {
            return Err(wrong_usage(format!(
                "{flag} cannot be used with --zero-service, where nothing takes time: use --json, or sweep"
            )));
        }
    }
    if !args.show.beside.is_empty() {
        return Err(wrong_usage("--beside cannot be used with --zero-service, where no request waits"));
    }
    let result = zero::replay(&args.what, &requests.list)?;
    if args.show.json {
        return output::show_json(&result);
    }
    output::show(&show::zero_service(&result, &requests.name))
}
