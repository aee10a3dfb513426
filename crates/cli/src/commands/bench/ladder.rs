//! `kvist bench ladder`: what each step from "no cache" to "int8 and shared layers" gains, in tokens per second and in
//! bytes, on the same model in the same run.
use super::plot;
use crate::options::*;
use crate::source::Source;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::SeqId;
use kvist_cpu::{Compute, Cpu};
use kvist_device::{MemoryBudget, Registry, Storage};
use kvist_engine::generate::{GenerateArgs, Limits, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::ModelSession;
use kvist_model::{LoadOptions, Model};
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Lengths to generate, each from one token on
    #[arg(long = "t", value_name = "T,T,…", default_value = "32,64,128,256,512,1024", value_parser = parse_lengths)]
    lengths: std::vec::Vec<u32>,
    /// Warm-up runs, which are not measured
    #[arg(long, default_value_t = 1)]
    warmups: u32,
    /// Measured runs; medians are reported
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    #[command(flatten)]
    source: SourceArgs,
    /// A model trained with cross-layer sharing, for v3 and v4. Without it every second layer of the model reads the K
    /// and V of the layer below: times and bytes are right, but the text is not
    #[arg(long, value_name = "MODEL")]
    shared: Option<PathBuf>,
    /// Only these steps: v0,v1,v1',v2,v3,v4
    #[arg(long, value_delimiter = ',', value_name = "STEPS")]
    only: Vec<String>,
    /// Write a plot
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    svg: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

fn parse_lengths(text: &str) -> Result<Vec<u32>, String> {
    let lengths = parse_tokens(text)?;
    if lengths.iter().any(|t| *t < 2) { Err("a length must be at least 2".into()) } else { Ok(lengths) }
}

/// One step of the ladder.
struct Variant {
    name: &'static str,
    what: &'static str,
    backend: &'static str,
    storage: Storage,
    cached: bool,
    shared: bool,
}

const fn variant(
    (name, what): (&'static str, &'static str),
    backend: &'static str,
    storage: Storage,
    cached: bool,
    shared: bool,
) -> Variant {
    Variant { name, what, backend, storage, cached, shared }
}

const LADDER: [Variant; 6] = [
    variant(("v0", "no cache"), "cpu", Storage::F32, false, false),
    variant(("v1", "concatenating cache"), "cpu-concat", Storage::F32, true, false),
    variant(("v1'", "preallocated cache"), "cpu", Storage::F32, true, false),
    variant(("v2", "int8"), "cpu", Storage::Q8, true, false),
    variant(("v3", "cross-layer sharing"), "cpu", Storage::F32, true, true),
    variant(("v4", "int8 and sharing"), "cpu", Storage::Q8, true, true),
];

/// `kvist bench ladder --json`
#[derive(Serialize)]
struct Report {
    version: u32,
    machine: String,
    cores: usize,
    model: String,
    shared_model: String,
    warmups: u32,
    runs: u32,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    step: &'static str,
    what: &'static str,
    tokens: u32,
    /// Median, minimum and maximum of the runs.
    seconds: f64,
    seconds_min: f64,
    seconds_max: f64,
    tokens_per_second: f64,
    /// Speed over v0 and over v1 at the same length, where they ran.
    over_v0: Option<f64>,
    over_v1: Option<f64>,
    kv_bytes_per_token: u64,
    kv_bytes: u64,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let chosen = |v: &&Variant| args.only.is_empty() || args.only.iter().any(|name| name == v.name);
    let variants: Vec<&Variant> = LADDER.iter().filter(chosen).collect();
    if variants.is_empty() || args.only.iter().any(|name| LADDER.iter().all(|v| v.name != name)) {
        return Err(wrong_usage("--only accepts v0, v1, v1', v2, v3 and v4"));
    }
    interrupt::listen();
    let compute = Compute::default();
    let load = |source: &Source, share: Option<usize>| -> anyhow::Result<Arc<Model>> {
        let options = LoadOptions { share_kv: share, ..LoadOptions::default() };
        Ok(Arc::new(Model::load(
            &source.file,
            Cpu::new(compute.clone()),
            &options,
            &MemoryBudget::unlimited(),
            &mut |_, _| {},
        )?))
    };
    let source = args.source.find(quiet)?;
    let plain = load(&source, None)?;
    let shared = match args.shared.clone() {
        Some(model) => load(&SourceArgs { model: Some(model), ..args.source.clone() }.find(quiet)?, None)?,
        None => load(&source, Some(2))?,
    };
    // v1 uses the `cpu-concat` backend: every step allocates new memory and copies the past.
    let concatenating = Cpu::new(compute.clone()).concatenating();
    let registry = registry(&compute).with(Box::new(concatenating));

    let rounds = u64::from(args.warmups) + u64::from(args.runs);
    let bar = progress::bar("measuring", rounds * (args.lengths.len() * variants.len()) as u64, quiet);
    let mut rows: Vec<Row> = Vec::new();
    for &tokens in &args.lengths {
        let mut runs: Vec<Vec<Measured>> = variants.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            // The variants alternate, so that a busy moment of the machine affects all of them.
            for (variant, runs) in variants.iter().zip(&mut runs) {
                let model = if variant.shared { &shared } else { &plain };
                let measured = measure(model, &registry, variant, tokens)?;
                if round >= u64::from(args.warmups) {
                    runs.push(measured);
                }
                bar.inc(1);
                anyhow::ensure!(!interrupt::interrupted(), "interrupted; an unfinished run has no report");
            }
        }
        rows.extend(compared(&variants, tokens, &runs)?);
    }
    bar.finish_and_clear();

    let report = Report {
        version: json::VERSION,
        machine: super::machine::cpu(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        model: plain.name().into(),
        shared_model: match &args.shared {
            Some(_) => shared.name().into(),
            None => format!("{}, every second layer made to borrow", plain.name()),
        },
        warmups: args.warmups,
        runs: args.runs,
        rows,
    };
    if let Some(path) = &args.svg {
        report.plot(path, &variants)?;
    }
    if args.json { output::show_json(&report) } else { output::show(&report.table()) }
}

/// The rows of one length: medians over `runs` of each variant, compared with v0 and v1.
fn compared(variants: &[&Variant], tokens: u32, runs: &[Vec<Measured>]) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (variant, runs) in variants.iter().zip(runs) {
        let last = runs.last().context("no run was measured")?;
        let mut seconds: Vec<f64> = runs.iter().map(|run| run.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let at = |p: f64| percentile(&seconds, p).unwrap_or(last.seconds);
        rows.push(Row {
            step: variant.name,
            what: variant.what,
            tokens,
            seconds: at(0.5),
            seconds_min: at(0.0),
            seconds_max: at(1.0),
            tokens_per_second: f64::from(tokens) / at(0.5),
            over_v0: None,
            over_v1: None,
            kv_bytes_per_token: last.kv_bytes_per_token,
            kv_bytes: last.kv_bytes,
        });
    }
    let of = |name: &str| rows.iter().find(|row| row.step == name).map(|row| row.seconds);
    let (v0, v1) = (of("v0"), of("v1"));
    for row in &mut rows {
        row.over_v0 = v0.map(|s| s / row.seconds);
        row.over_v1 = v1.map(|s| s / row.seconds);
    }
    Ok(rows)
}

struct Measured {
    seconds: f64,
    kv_bytes: u64,
    kv_bytes_per_token: u64,
}

/// Generates `tokens` tokens greedily from the first token on. Each run has its own session and cache.
fn measure(
    model: &Arc<Model>,
    registry: &Registry,
    variant: &Variant,
    tokens: u32,
) -> anyhow::Result<Measured> {
    let config = CacheConfig {
        backend: variant.backend.into(),
        k: variant.storage,
        v: variant.storage,
        max_step_tokens: if variant.cached { 1 } else { tokens },
        ..CacheConfig::new(tokens)
    };
    let prompt = [model.config().bos.unwrap_or(0)];
    let limits =
        Limits { max_tokens: tokens as usize, stop: Vec::new(), ignore_eos: true, no_cache: !variant.cached };
    let mut greedy = Sampler::new(SamplerConfig::greedy())?;
    let started = Instant::now();
    let mut session = ModelSession::new(model, registry, &config)?;
    let what = GenerateArgs {
        session: &mut session,
        seq: SeqId::ONLY,
        before: &[],
        prompt: &prompt,
        tokenizer: None,
        sampler: &mut greedy,
        limits: &limits,
        speculation: None,
    };
    generate(what, &mut ())?;
    let seconds = started.elapsed().as_secs_f64();
    let plan = kvist_engine::memory::MemoryPlan::of_session(model.config(), registry, &config)?;
    Ok(Measured { seconds, kv_bytes: session.kv_bytes(), kv_bytes_per_token: plan.kv_bytes_per_token })
}

impl Report {
    fn table(&self) -> String {
        let mut text = format!(
            "{} ({} cores); {}; v3 and v4: {}\n{} warm-ups, median of {} runs\n\n",
            self.machine, self.cores, self.model, self.shared_model, self.warmups, self.runs
        );
        text += "| T | step | | tokens/s | × v0 | × v1 | KV bytes per token | KV bytes |\n";
        text += "|--:|---|---|--:|--:|--:|--:|--:|\n";
        let ratio = |r: Option<f64>| r.map_or("".into(), |r| format!("{r:.2}"));
        for r in &self.rows {
            text += &format!(
                "| {} | {} | {} | {:.1} | {} | {} | {} | {} |\n",
                r.tokens,
                r.step,
                r.what,
                r.tokens_per_second,
                ratio(r.over_v0),
                ratio(r.over_v1),
                r.kv_bytes_per_token,
                r.kv_bytes
            );
        }
        text
    }

    fn plot(&self, path: &Path, variants: &[&Variant]) -> anyhow::Result<()> {
        let line = |variant: &&Variant| {
            let rows = self.rows.iter().filter(|row| row.step == variant.name);
            let points = rows.map(|row| (f64::from(row.tokens), row.tokens_per_second)).collect();
            (format!("{} {}", variant.name, variant.what), points)
        };
        let title = "Tokens per second when T tokens are generated";
        plot::write(path, title, "T (tokens)", "tokens/s", variants.iter().map(line).collect())
    }
}
