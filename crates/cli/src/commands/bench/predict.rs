//! `kvist bench predict` measures how accurate the simulator is: it serves a load that the table was not made from,
//! simulates it with the table, and compares.
//!
//! Requests with popular prefixes arrive as from independent users. The engine of `kvist serve` answers them in this
//! process, in real time, and each user records when its tokens come. The simulator gets the same requests, cache,
//! configuration and table. Then the table prices the steps that really ran, one by one: their error is the table's,
//! and the remaining error comes from how steps were composed.
mod users;

use crate::commands::bench::calibrate::steps::token;
use crate::commands::simulate::{costs, replay};
use crate::options::*;
use crate::{interrupt, json, output};
use anyhow::{Context, ensure};
use clap::ValueHint;
use kvist_cache::{PrefixSpec, Prompt};
use kvist_cpu::Compute;
use kvist_device::Storage;
use kvist_engine::executor::PagedConfig;
use kvist_engine::memory::CacheConfig;
use kvist_engine::serving::{Engine, EngineConfig, EngineStats};
use kvist_scheduler::{Admission, Config};
use kvist_simulator::cost::{MeasuredTable, StepCost};
use kvist_simulator::report::RequestRow;
use kvist_simulator::request::Request;
use kvist_simulator::run::{self, Options, Run};
use kvist_simulator::statistics::Spread;
use kvist_simulator::trace;
use kvist_simulator::workload::{Arrivals, Contents, Lengths, Prefixes, Workload};
use serde::Serialize;
use std::path::PathBuf;
use users::{Recording, User, serve};

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
    /// Requests to serve, however long they take to arrive
    #[arg(
        long, value_name = "N", conflicts_with = "seconds",
        value_parser = clap::value_parser!(u32).range(i64::from(FEWEST)..=100_000)
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
/// Tokens of a shared prefix, and how many there are.
const PREFIX_TOKENS: u32 = 128;
const N_PREFIXES: u32 = 12;
/// Mean length of a prompt after its prefix, and of an answer.
const PROMPT_TOKENS: u32 = 64;
const OUTPUT_TOKENS: u32 = 48;

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
    figures: Vec<Figure>,
    /// The replay of the served recording, with its steps priced by the table.
    replayed: replay::Summary,
}

#[derive(Serialize)]
struct Figure {
    figure: &'static str,
    unit: &'static str,
    served: f64,
    simulated: f64,
}

impl Figure {
    /// Simulated over served, less one; `None` if the served figure is 0.
    fn error(&self) -> Option<f64> {
        (self.served != 0.0).then(|| self.simulated / self.served - 1.0)
    }
}

/// A figure's name, its unit and its value.
type Named = (&'static str, &'static str, f64);

/// Measurements of users and scheduler.
struct Figures {
    ttft_s: Option<Spread>,
    tpot_s: Option<Spread>,
    busy_s: f64,
    duration_s: f64,
    steps: f64,
    hit_tokens: f64,
    preemptions: f64,
}

impl Figures {
    fn simulated(run: &Run) -> Figures {
        let record = &run.record;
        let spread = |of: fn(&RequestRow) -> Option<f64>| {
            Spread::of(&mut record.requests.iter().filter_map(of).collect::<Vec<_>>())
        };
        let last_ns = record.requests.iter().filter_map(|row| row.finished_ns).max().unwrap_or(0);
        Figures {
            ttft_s: spread(RequestRow::ttft_s),
            tpot_s: spread(RequestRow::tpot_s),
            busy_s: record.steps.busy_ns as f64 / 1e9,
            duration_s: last_ns as f64 / 1e9,
            steps: record.steps.steps as f64,
            hit_tokens: run.counters.hit_tokens as f64,
            preemptions: record.steps.preemptions as f64,
        }
    }

    fn served(users: &[User], stats: &EngineStats) -> Figures {
        let spread =
            |of: fn(&User) -> Option<f64>| Spread::of(&mut users.iter().filter_map(of).collect::<Vec<_>>());
        Figures {
            ttft_s: spread(|user| Some(user.first_s - user.arrival_s)),
            tpot_s: spread(User::tpot_s),
            busy_s: stats.busy_ns as f64 / 1e9,
            duration_s: users.iter().map(|user| user.last_s).fold(0.0, f64::max),
            steps: stats.counters.steps as f64,
            hit_tokens: stats.counters.hit_tokens as f64,
            preemptions: stats.counters.preemptions as f64,
        }
    }

    fn busy(&self) -> f64 {
        self.busy_s / self.duration_s
    }

    fn named(&self) -> Vec<Named> {
        let ms = |spread: &Option<Spread>, of: fn(&Spread) -> f64| spread.as_ref().map_or(0.0, of) * 1e3;
        vec![
            ("TTFT mean", "ms", ms(&self.ttft_s, |s| s.mean)),
            ("TPOT mean", "ms", ms(&self.tpot_s, |s| s.mean)),
            ("TTFT p50", "ms", ms(&self.ttft_s, |s| s.p50)),
            ("TTFT p90", "ms", ms(&self.ttft_s, |s| s.p90)),
            ("TPOT p50", "ms", ms(&self.tpot_s, |s| s.p50)),
            ("TPOT p90", "ms", ms(&self.tpot_s, |s| s.p90)),
            ("busy", "%", self.busy() * 100.0),
            ("steps", "", self.steps),
            ("tokens found", "", self.hit_tokens),
            ("preemptions", "", self.preemptions),
        ]
    }
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    args.check()?;
    let table = costs::table(&args.costs)?;
    let config = served(&args, &table)?;
    let compute = args.model.compute.get()?;
    let model = args.model.load(args.model.open(quiet)?, None, &args.model.budget(), quiet)?;
    check_machine(&args, &table, model.name(), &config.paged.cache, &compute)?;
    interrupt::listen();

    let vocab = model.config().vocab as u32;
    let longest = table.range().context_tokens as u32;
    let simulate = |requests: &[Request]| -> anyhow::Result<Run> {
        let options = Options { scheduler: config.scheduler.clone(), ..Options::default() };
        let cache = config.paged.cache(model.config())?;
        Ok(run::run(requests, cache, &table, &options, None, &mut |_| ())?)
    };
    let n_requests = |per_s: f64| match args.requests {
        Some(n) => n as usize,
        None => ((per_s * args.seconds).ceil() as usize).max(1),
    };
    let draw = |per_s: f64| load(per_s, n_requests(per_s), args.seed, longest, vocab);
    let per_s = rate(|per_s| {
        // A load too large to generate counts as too busy.
        let too_large = n_requests(per_s) > 100_000;
        Ok(too_large || Figures::simulated(&simulate(&draw(per_s)?)?).busy() > args.busy)
    })?;
    let requests = draw(per_s)?;
    ensure!(
        requests.len() >= FEWEST as usize,
        "{} requests in {} s would keep this machine busy for that share of the time, which is too few requests for \
         a mean: give more --seconds, --requests {FEWEST}, or a smaller model",
        requests.len(),
        args.seconds
    );
    if let Some(file) = &args.trace {
        let mut text = Vec::new();
        trace::write(&mut text, &requests).context("cannot write the trace")?;
        output::write_file(file, &text)?;
    }

    let before = load_average();
    let recording = Recording::default();
    let scheduler = config.scheduler.clone();
    let cache_tokens = config.paged.cache.context_tokens;
    let simulated = Figures::simulated(&simulate(&requests)?);
    let engine = EngineConfig { watchers: vec![Box::new(recording.clone())], ..config };
    let engine = Engine::start(model.clone(), &registry(&compute), engine)?;
    let users = serve(&engine, &requests, quiet)?;
    let stats = engine.stats();
    drop(engine);
    let load_average = [before, load_average()];
    let recording = recording.text();
    if let Some(file) = &args.record {
        output::write_file(file, recording.as_bytes())?;
    }
    let replayed = replay::check("the recording", &recording, &table)?;
    let served = Figures::served(&users, &stats);
    let pairs = served.named().into_iter().zip(simulated.named());
    let figure = |(a, b): (Named, Named)| Figure { figure: a.0, unit: a.1, served: a.2, simulated: b.2 };
    let prediction = Prediction {
        version: json::VERSION,
        table: table.name(),
        load: format!(
            "{per_s:.2} requests/s (Poisson){}, seed {}: one of {N_PREFIXES} prefixes of {PREFIX_TOKENS} tokens and a \
             prompt of its own ({PROMPT_TOKENS} on average, lognormal); answers of {OUTPUT_TOKENS} on average, lognormal",
            args.requests.map_or(format!(" for {} s", args.seconds), |_| String::new()),
            args.seed
        ),
        requests: requests.len(),
        cache_tokens,
        scheduler,
        load_average,
        figures: pairs.map(figure).collect(),
        replayed,
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

/// `n_requests` requests with token ids below `vocab`, each of at most `longest` tokens.
fn load(per_s: f64, n_requests: usize, seed: u64, longest: u32, vocab: u32) -> anyhow::Result<Vec<Request>> {
    let prefixes = Prefixes {
        n_prefixes: N_PREFIXES,
        exponent: 1.0,
        prefix_tokens: PREFIX_TOKENS,
        own_prompt: true,
        tokens_per_id: 16,
    };
    let lognormal = |mean: u32| Lengths::Lognormal { mean: f64::from(mean), variation: 1.0 };
    let workload = Workload {
        n_requests,
        arrivals: Arrivals::Poisson { per_s },
        prompt_tokens: lognormal(PROMPT_TOKENS),
        output_tokens: lognormal(OUTPUT_TOKENS),
        contents: Contents::Prefixes(prefixes),
    };
    let mut requests = workload.generate(seed)?;
    for request in &mut requests {
        // An opaque id always becomes the same tokens.
        let Prompt::Ids { ids, tokens_per_id, .. } = &request.content else { continue };
        request.output_tokens = request.output_tokens.min(longest / 2);
        request.prompt_tokens = request.prompt_tokens.min(longest - request.output_tokens);
        let n = request.prompt_tokens as usize;
        let tokens = ids.iter().flat_map(|id| (0..*tokens_per_id).map(move |i| token(*id, i, vocab)));
        request.content = Prompt::SharedTokens(tokens.take(n).collect());
    }
    Ok(requests)
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
        text += "| | served | simulated | error |\n|---|--:|--:|--:|\n";
        for row in &self.figures {
            let error = row.error().map_or(String::new(), |error| format!("{:+.1}%", error * 100.0));
            let number = |x: f64| match row.unit {
                "" => format!("{x:.0}"),
                unit => format!("{x:.2} {unit}"),
            };
            text += &format!(
                "| {} | {} | {} | {error} |\n",
                row.figure,
                number(row.served),
                number(row.simulated)
            );
        }
        text + "\nWhat was served, replayed:\n" + &self.replayed.text()
    }
}
