//! `kvist bench predict` measures how accurate the simulator is: it serves a load that the table was not made from,
//! simulates it with the table, and compares.
//!
//! Requests with popular prefixes arrive as from independent users, or those of a trace. The engine of `kvist serve` answers them in this
//! process, in real time, and each user records when its tokens come. The simulator gets the same requests, cache,
//! configuration and table. Then the table prices the steps that really ran, one by one: their error is the table's,
//! and the remaining error comes from how steps were composed. A second simulation shows that: with the table's times multiplied by
//! what the steps took over what they should have taken, because the machine is not equally fast in both minutes.
mod disk;
mod figures;
mod load;
mod recorded;
mod speed;
mod users;

use crate::commands::simulate::{costs, replay, spec};
use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::{Context, ensure};
use clap::ValueHint;
use disk::DiskArgs;
use figures::{Figure, Figures, compared};
use kvist_cache::PrefixSpec;
use kvist_cpu::Compute;
use kvist_device::{Bytes, Storage};
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::CacheConfig;
use kvist_engine::serving::{Engine, EngineConfig, TierConfig};
use kvist_scheduler::{Admission, Config, Tiers};
use kvist_simulator::cost::{MeasuredTable, StepCost};
use kvist_simulator::request::Request;
use kvist_simulator::run::{self, Options, TierOrder};
use kvist_simulator::trace;
use load::{Kind, distinct_tokens, load};
use recorded::{Limits, RecordedArgs};
use serde::Serialize;
use speed::AtSpeed;
use std::path::PathBuf;
use std::time::Duration;
use users::{Recording, block_on, serve};

#[derive(clap::Args)]
pub struct Args {
    /// The table that `kvist bench calibrate` wrote for this model on this machine
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    costs: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// How long requests keep arriving
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", allow_negative_numbers = true)]
    seconds: f64,
    /// Requests to serve, however long they take to arrive; of a trace, so many from its beginning [default: all of it]
    #[arg(
        long, value_name = "N", conflicts_with = "seconds",
        value_parser = clap::value_parser!(u32).range(i64::from(FEWEST)..=i64::from(MOST))
    )]
    requests: Option<u32>,
    /// Share of the time that the machine is busy; the simulator finds the arrival rate for it
    #[arg(long, default_value_t = 0.7, value_name = "SHARE", allow_negative_numbers = true)]
    busy: f64,
    /// Seed of the load
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Capacity of the cache, in tokens
    #[arg(long, default_value_t = 8192, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1024..))]
    context: u32,
    /// Serve chats of several turns instead of single requests; a user thinks so long on average: 20s
    #[arg(long, value_name = "TIME", value_parser = spec::duration)]
    chats: Option<Duration>,
    #[command(flatten)]
    recorded: RecordedArgs,
    /// Goodput counts the requests whose first token comes within this time
    #[arg(long, value_name = "TIME", value_parser = spec::duration, default_value = "1s")]
    slo_ttft: Duration,
    #[command(flatten)]
    disk: DiskArgs,
    /// Write the requests as a trace
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    trace: Option<PathBuf>,
    /// Write the arrivals and decisions of the engine: a recording for `kvist simulate replay`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    record: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Fewer requests give no reliable mean.
const FEWEST: u32 = 20;
/// More would take days.
const MOST: u32 = 100_000;

/// A disk tier.
#[derive(Serialize)]
struct Disk {
    capacity_bytes: u64,
    bytes_per_s: u64,
    latency_s: f64,
}

/// `kvist bench predict --json`
#[derive(Serialize)]
struct Prediction {
    version: u32,
    table: String,
    load: String,
    requests: usize,
    /// Tokens of the cache.
    cache_tokens: u32,
    scheduler: Config,
    /// Runnable threads of the whole machine, mean of a minute: before and after the run.
    load_average: [Option<f64>; 2],
    /// Tokens of all prompts, common beginnings once.
    distinct_tokens: u64,
    slo_ttft_s: f64,
    /// With `--tier-disk`: what was measured before the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<Disk>,
    /// With the tier, if there is one.
    figures: Vec<Figure>,
    /// The same load without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    without_tier: Option<Vec<Figure>>,
    /// The replay of the served recording, with its steps priced by the table.
    replayed: replay::Summary,
    /// The same of the load without the tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    replayed_without_tier: Option<replay::Summary>,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    args.check()?;
    let table = costs::table(&args.costs)?;
    let config = served(&args, &table)?;
    let compute = args.model.compute.get()?;
    let model = args.model.load(args.model.open(quiet)?, None, &args.model.budget()?, quiet)?;
    check_machine(&args, &table, model.name(), &config.paged.cache, &compute)?;
    interrupt::listen();

    let vocab = model.config().vocab as u32;
    let longest = table.range().context_tokens as u32;
    let disk = args.disk.open(&config, model.config())?;
    // `slowdown`: over the times of the table.
    let simulate =
        |requests: &[Request], tiers: Option<&(Tiers, u64)>, slowdown: f64| -> anyhow::Result<Figures> {
            let scheduler = Config { tiers: tiers.map(|tiers| tiers.0.clone()), ..config.scheduler.clone() };
            let tier_capacities = tiers.map(|tiers| Some(tiers.1)).into_iter().collect();
            let tier_orders = vec![TierOrder::InTurn];
            let options = Options { scheduler, tier_capacities, tier_orders, ..Options::default() };
            let cache = config.paged.cache(model.config())?;
            let costs = AtSpeed { costs: &table, factor: slowdown };
            let run = run::run(requests, cache, &costs, &options, None, &mut |_| ())?;
            Ok(Figures::simulated(&run, args.slo_ttft.as_secs_f64()))
        };
    let start = |tiers: Option<TierConfig>, watcher: Option<Recording>| -> anyhow::Result<Engine> {
        let watchers = watcher.into_iter().map(|watcher| Box::new(watcher) as _).collect();
        let config = EngineConfig { watchers, tiers, ..served(&args, &table)? };
        Ok(Engine::start(model.clone(), &registry(&compute), config)?)
    };
    // What an engine makes of the tier is what is simulated.
    let tiers = match &disk {
        None => None,
        Some(disk) => {
            let engine = start(Some(disk.config()), None)?;
            let tiers = block_on(engine.inspect(|state| state.scheduler.config().tiers.clone()));
            tiers.flatten().flatten().map(|tiers| (tiers, disk.capacity_bytes))
        }
    };
    let longest_tokens = longest.min(config.paged.cache.context_tokens);
    let recorded =
        args.recorded.read(args.requests, Limits { longest_tokens, vocab, most_requests: MOST })?;
    let n_requests = |per_s: f64| match (&recorded, args.requests) {
        (Some(recorded), _) => recorded.len(),
        (None, Some(n)) => n as usize,
        (None, None) => ((per_s * args.seconds).ceil() as usize).max(1),
    };
    let kind = args.chats.map_or(Kind::Prefixes, |think| Kind::Chats { think_s: think.as_secs_f64() });
    let draw = |per_s: f64| match &recorded {
        Some(recorded) => Ok(recorded.at_rate(per_s)),
        None => load(kind, per_s, n_requests(per_s), args.seed, longest, vocab),
    };
    let per_s = rate(|per_s| {
        // A load too large to generate counts as too busy.
        let too_large = n_requests(per_s) > MOST as usize;
        Ok(too_large || simulate(&draw(per_s)?, tiers.as_ref(), 1.0)?.busy() > args.busy)
    })?;
    let requests = draw(per_s)?;
    ensure!(
        requests.len() >= FEWEST as usize,
        "{}, which is too few requests for a mean: give {}",
        match &recorded {
            Some(_) => format!("the trace has {} requests", requests.len()),
            None => format!(
                "{} requests in {} s would keep this machine busy for that share of the time",
                requests.len(),
                args.seconds
            ),
        },
        match &recorded {
            Some(_) => format!("one of {FEWEST} at least"),
            None => format!("more --seconds, --requests {FEWEST}, or a smaller model"),
        }
    );
    if let Some(file) = &args.trace {
        let mut text = Vec::new();
        trace::write(&mut text, &requests).context("cannot write the trace")?;
        output::write_file(file, &text)?;
    }

    let before = load_average();
    let cache_tokens = config.paged.cache.context_tokens;
    let run_for_real = |tiers: Option<TierConfig>| -> anyhow::Result<(Figures, String)> {
        let recording = Recording::default();
        let engine = start(tiers, Some(recording.clone()))?;
        let users = serve(&engine, &requests, quiet)?;
        let figures = Figures::served(&users, &engine.stats(), args.slo_ttft.as_secs_f64());
        drop(engine);
        Ok((figures, recording.text()))
    };
    let compare = |served: &Figures, recording: &str, tiers: Option<&(Tiers, u64)>| -> anyhow::Result<_> {
        let replayed = replay::check("the recording", recording, &table)?;
        let at_speed = simulate(&requests, tiers, replayed.slowdown().unwrap_or(1.0))?;
        Ok((compared(served, &simulate(&requests, tiers, 1.0)?, &at_speed), replayed))
    };
    // Without a tier first: it writes nothing that the other could find.
    let without = match &tiers {
        None => None,
        Some(_) => Some(run_for_real(None)?),
    };
    let (served, recording) = run_for_real(disk.as_ref().map(|disk| disk.config()))?;
    let (figures, replayed) = compare(&served, &recording, tiers.as_ref())?;
    let without = without.map(|(served, recording)| compare(&served, &recording, None)).transpose()?;
    let (without_tier, replayed_without_tier) = without.unzip();
    let load_average = [before, load_average()];
    if let Some(file) = &args.record {
        output::write_file(file, recording.as_bytes())?;
    }
    let prediction = Prediction {
        version: json::VERSION,
        table: table.name(),
        load: match &recorded {
            Some(recorded) => format!("{per_s:.2} requests/s: {}", recorded.text(per_s)),
            None => format!(
                "{per_s:.2} requests/s (Poisson){}, seed {}: {}",
                args.requests.map_or(format!(" for {} s", args.seconds), |_| String::new()),
                args.seed,
                kind.text()
            ),
        },
        requests: requests.len(),
        cache_tokens,
        distinct_tokens: distinct_tokens(&requests, config.paged.block_tokens),
        slo_ttft_s: args.slo_ttft.as_secs_f64(),
        disk: disk.as_ref().map(|disk| Disk {
            capacity_bytes: disk.capacity_bytes,
            bytes_per_s: disk.bytes_per_s,
            latency_s: disk.latency.as_secs_f64(),
        }),
        scheduler: config.scheduler.clone(),
        load_average,
        figures,
        without_tier,
        replayed,
        replayed_without_tier,
    };
    if args.json { output::show_json(&prediction) } else { output::show(&prediction.text()) }
}

impl Args {
    fn check(&self) -> anyhow::Result<()> {
        if !(self.seconds > 0.0 && self.seconds.is_finite()) {
            return Err(wrong_usage(format!(
                "--seconds {}: the time must be finite and above 0",
                self.seconds
            )));
        }
        if !(self.busy > 0.0 && self.busy < 1.0) {
            return Err(wrong_usage(format!("--busy {}: the share must be above 0 and below 1", self.busy)));
        }
        Ok(())
    }
}

/// Refuses a table that was measured with another model or under other conditions than those of this run.
fn check_machine(
    args: &Args,
    table: &MeasuredTable,
    model: &str,
    cache: &CacheConfig,
    compute: &Compute,
) -> anyhow::Result<()> {
    let called = format!("{}, K {} and V {}", model, cache.k, cache.v);
    ensure!(
        table.model() == called,
        "{} was measured with {}, and this is {called}: give the same --model, or calibrate with this one",
        args.costs.display(),
        table.model()
    );
    let setting = table.setting().cloned().unwrap_or_default();
    let threads = setting.threads;
    ensure!(
        threads == 0 || threads == compute.threads.n(),
        "{} was measured with {threads} threads, and {} compute here: give --threads {threads}",
        args.costs.display(),
        compute.threads.n()
    );
    for (what, measured, here) in [
        ("--weights", &setting.weights, args.model.weights.to_string()),
        ("KVIST_ISA", &setting.isa, compute.isa.to_string()),
    ] {
        ensure!(
            measured.is_empty() || *measured == here,
            "{} was measured with {what} {measured}, and this is {here}: give the same, or calibrate with this",
            args.costs.display()
        );
    }
    Ok(())
}

/// The highest rate of requests per second that is not `too_busy`, by bisection: the machine is busier the more often
/// requests arrive.
fn rate(mut too_busy: impl FnMut(f64) -> anyhow::Result<bool>) -> anyhow::Result<f64> {
    let (mut low, mut high) = (0.01f64, 10_000.0f64);
    for _ in 0..24 {
        let middle = (low * high).sqrt();
        if too_busy(middle)? { high = middle } else { low = middle }
    }
    Ok(low)
}

/// The configuration to serve and simulate: that of the table's measurement.
fn served(args: &Args, table: &MeasuredTable) -> anyhow::Result<EngineConfig> {
    let file = args.costs.display();
    let setting = table.setting();
    let setting = setting.with_context(|| {
        format!("{file} does not record the settings of its measurement: calibrate again")
    })?;
    let storage = |text: &str| -> anyhow::Result<Storage> {
        text.parse().map_err(|e| anyhow::anyhow!("{file}: `{text}` is not a storage of K and V: {e}"))
    };
    let cache = CacheConfig {
        kind: "paged".into(),
        k: storage(&setting.k)?,
        v: storage(&setting.v)?,
        ..CacheConfig::new(args.context)
    };
    let range = table.range();
    let scheduler = Config {
        max_batch: range.sequences as u32,
        max_batch_tokens: range.prefill_tokens as u32,
        admission: Admission::Optimistic { headroom_tokens: 128 },
        ..Config::default()
    };
    let prefix = Some(PrefixSpec::default());
    let mut config = EngineConfig {
        paged: PagedConfig { cache, block_tokens: setting.block_tokens, prefix },
        scheduler,
        max_queue: 100_000,
        tenants: Vec::new(),
        record: true,
        watchers: Vec::new(),
        max_draft_tokens: 0,
        speculator: None,
        tiers: None,
        prefix: None,
        keep: None,
    };
    config.fit();
    Ok(config)
}

/// Runnable threads of the whole machine over the last minute, where the system reports it.
fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

impl Prediction {
    fn text(&self) -> String {
        let load = |load: Option<f64>| load.map_or("unknown".to_owned(), |load| format!("{load:.2}"));
        let mut text = format!(
            "{}\n{}\n{} requests; a cache of {} tokens; up to {} sequences and {} tokens a step; load average {} before, \
             {} after\n\n",
            self.table,
            self.load,
            self.requests,
            self.cache_tokens,
            self.scheduler.max_batch,
            self.scheduler.max_batch_tokens,
            load(self.load_average[0]),
            load(self.load_average[1]),
        );
        if let Some(disk) = &self.disk {
            text += &format!(
                "a disk of {}, {}/s, {:.0} us a block; all prompts have {} tokens, {:.1} times the cache; goodput: first token within \
                 {} s\n\n",
                Bytes(disk.capacity_bytes),
                Bytes(disk.bytes_per_s),
                disk.latency_s * 1e6,
                self.distinct_tokens,
                self.distinct_tokens as f64 / f64::from(self.cache_tokens),
                self.slo_ttft_s
            );
        }
        if let Some(figures) = &self.without_tier {
            text += &format!("Without the disk:\n\n{}\nWith the disk:\n\n", table_of(figures));
        }
        text += &table_of(&self.figures);
        if let Some(replayed) = &self.replayed_without_tier {
            text += &format!("\nWhat was served without the disk, replayed:\n{}", replayed.text());
        }
        text + "\nWhat was served, replayed:\n" + &self.replayed.text()
    }
}

fn table_of(figures: &[Figure]) -> String {
    let mut text =
        "| | served | simulated | error | at the speed of the run | error |\n|---|--:|--:|--:|--:|--:|\n"
            .to_owned();
    for row in figures {
        let error = |predicted: f64| {
            row.error(predicted).map_or(String::new(), |error| format!("{:+.1}%", error * 100.0))
        };
        let number = |x: f64| match row.unit {
            "" => format!("{x:.0}"),
            unit => format!("{x:.2} {unit}"),
        };
        let (simulated, at_speed) = (number(row.simulated), number(row.at_speed));
        text += &format!(
            "| {} | {} | {simulated} | {} | {at_speed} | {} |\n",
            row.figure,
            number(row.served),
            error(row.simulated),
            error(row.at_speed)
        );
    }
    text
}
