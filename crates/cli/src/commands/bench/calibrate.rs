//! `kvist bench calibrate`: measures the step times of a server on this machine, as a table for
//! `kvist simulate --costs`.
//!
//! Every cell is a step of the scheduler, the cache and the executor that `kvist serve` runs: the time is that of a
//! whole scheduler iteration, bookkeeping and the delivery of tokens included. Every token is sent to its
//! own listener on another thread, as in a server; this matters where computing uses all cores. Cells are visited in
//! rounds until the time is over, so a busy moment of the machine affects few visits of many cells, and medians hide
//! it. If a cell was never measured, no table is written.
mod cells;
pub mod steps;

use super::machine::{Machine, Watch};
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::{Context, ensure};
use cells::{Axes, Samples};
use clap::ValueHint;
use kvist_device::Storage;
use kvist_engine::memory::CacheConfig;
use kvist_simulator::cost::{
    DecodeAxes, DraftAxes, MeasuredTable, PrefillAxes, Setting, SharedAxes, StepCost, TableFile,
};
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use steps::{Ran, Served, Steps};

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Storage of K and V: f32, f16, bf16, q8, q4, t4, ...
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    kv: Storage,
    /// Storage of V, if it differs
    #[arg(long, value_name = "DTYPE")]
    kv_v: Option<Storage>,
    /// Tokens per block
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_tokens: u32,
    /// Maximum requests in the batch
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_batch: u32,
    /// Maximum tokens of a step
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    max_batch_tokens: u32,
    /// Tokens of the longest sequence that is measured [default: the model's context, 1024 at most]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(32..))]
    context: Option<u32>,
    /// Time to measure; a round over all cells is always finished
    #[arg(long, default_value_t = 60.0, value_name = "SECONDS", allow_negative_numbers = true)]
    seconds: f64,
    /// File for the table
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: PathBuf,
    /// Print one JSON document about the measurement
    #[arg(long)]
    json: bool,
}

/// Above this scatter a table is not reliable.
const MUCH_SCATTER: f64 = 0.2;

fn uninterrupted() -> anyhow::Result<()> {
    ensure!(!interrupt::interrupted(), "interrupted; no table is written for an unfinished measurement");
    Ok(())
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    percentile(&sorted, 0.5)
}

/// The medians of a grid.
fn medians(
    what: &str,
    rows: &[u32],
    columns: &[u32],
    samples: &[Vec<Vec<f64>>],
) -> anyhow::Result<Vec<Vec<f64>>> {
    let median = |row: u32, column: u32, cell: &[f64]| {
        median(cell).with_context(|| {
            format!("{what} of {row} at a context of {column} was never measured, which is a bug in kvist")
        })
    };
    let row = |(row, cells): (&u32, &Vec<Vec<f64>>)| {
        columns.iter().zip(cells).map(|(column, cell)| median(*row, *column, cell)).collect()
    };
    rows.iter().zip(samples).map(row).collect()
}

/// The spread of a cell's visits: their interquartile range over their median; the median of that over all cells.
fn scatter(samples: &[&[Vec<Vec<f64>>]]) -> f64 {
    let of = |cell: &Vec<f64>| {
        let mut sorted = cell.clone();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share).round() as usize];
        (at(0.75) - at(0.25)) / at(0.5)
    };
    let cells = samples.iter().flat_map(|grid| grid.iter().flatten()).filter(|cell| !cell.is_empty());
    median(&cells.map(of).collect::<Vec<_>>()).unwrap_or(0.0)
}

/// `kvist bench calibrate --json`
#[derive(Serialize)]
struct Summary {
    version: u32,
    table: PathBuf,
    model: String,
    setting: Setting,
    machine: Machine,
    /// Cells of all grids, and recorded steps.
    cells: usize,
    steps: usize,
    /// The interquartile range of a cell's visits over their median; median over the cells.
    scatter: f64,
    /// Tokens per second of full prefill steps, and of decode steps of one and of all sequences, at the shortest
    /// context.
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    decode_tokens_per_s_full: f64,
    shared_ns: f64,
    draft_costs: Vec<DraftCost>,
}

/// The time of a step of one sequence that computes `rows` tokens, the last known one and its drafts, over that of a
/// step that computes one, at the shortest context.
#[derive(Serialize)]
struct DraftCost {
    rows: u32,
    over_one: f64,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    if args.max_batch_tokens < args.max_batch {
        return Err(wrong_usage(format!(
            "--max-batch-tokens {}: give at least --max-batch {}, so that every decoding sequence fits into a step",
            args.max_batch_tokens, args.max_batch
        )));
    }
    if !(args.seconds >= 0.0 && args.seconds.is_finite()) {
        return Err(wrong_usage(format!(
            "--seconds {}: the time must be finite and not negative",
            args.seconds
        )));
    }
    let opened = args.model.open(quiet)?;
    let context_tokens = args.context.unwrap_or(opened.config().context.min(1024));
    let served = Served {
        cache: CacheConfig {
            k: args.kv,
            v: args.kv_v.unwrap_or(args.kv.for_values()),
            ..CacheConfig::new(context_tokens)
        },
        block_tokens: args.block_tokens,
        max_batch: args.max_batch,
        max_batch_tokens: args.max_batch_tokens,
        context_tokens,
    };
    let compute = args.model.compute.get()?;
    let model = args.model.load(opened, None, &args.model.budget()?, quiet)?;
    interrupt::listen();
    let axes = Axes::of(&served);
    let mut steps = Steps::new(&model, &registry(&compute), served.clone()).context(
        "the cache of the measurement: try a smaller --context, --max-batch or --max-batch-tokens",
    )?;

    let bar = progress::bar("reading prompts", served.context_tokens.into(), quiet);
    steps.warm(&mut |known| {
        bar.set_position(known.into());
        uninterrupted()
    })?;
    bar.finish_and_clear();

    let watch = Watch::start();
    let began = Instant::now();
    let mixes = served.max_batch_tokens > served.max_batch;
    let (samples, rounds) = measure(&mut steps, &axes, mixes, args.seconds, quiet)?;
    let seconds = began.elapsed().as_secs_f64();
    let machine = watch.machine(&compute);

    let setting = Setting {
        program: env!("CARGO_PKG_VERSION").into(),
        weights: args.model.weights.to_string(),
        k: served.cache.k.to_string(),
        v: served.cache.v.to_string(),
        block_tokens: served.block_tokens,
        threads: machine.threads,
        isa: machine.isa.clone(),
        rounds,
        seconds,
        busy: machine.busy,
    };
    let file = table(&axes, &samples, &machine, model.name(), setting)?;
    let summary = summary(&args, &file, &samples, machine);
    if summary.scatter > MUCH_SCATTER {
        output::note(&format!(
            "the middle half of a cell's visits spans {:.0}% of their median: other programs are using this \
             machine, and the table includes their effect; measure again when it is idle",
            summary.scatter * 100.0
        ));
    }
    output::write_file(&args.output, (serde_json::to_string_pretty(&file)? + "\n").as_bytes())?;
    if args.json { output::show_json(&summary) } else { output::show(&summary.text(&axes)) }
}

/// Visits all cells in rounds until the time is over, at least once. Returns the times, and the number of rounds.
fn measure(
    steps: &mut Steps,
    axes: &Axes,
    mixes: bool,
    seconds: f64,
    quiet: bool,
) -> anyhow::Result<(Samples, u32)> {
    let (began, mut samples, mut rounds) = (Instant::now(), Samples::new(axes), 0);
    let bar = progress::bar("measuring (s)", seconds.ceil() as u64, quiet);
    // The first round allocates and warms up; it is not recorded.
    samples.round(steps, axes, mixes, false)?;
    let mut longest = Duration::ZERO;
    while rounds == 0 || (began.elapsed() + longest).as_secs_f64() < seconds {
        let round = Instant::now();
        samples.round(steps, axes, mixes, true)?;
        longest = longest.max(round.elapsed());
        rounds += 1;
        bar.set_position(began.elapsed().as_secs());
    }
    bar.finish_and_clear();
    if rounds < 3 {
        output::note(&format!(
            "a round takes {:.0} s, so --seconds {} gave {rounds}: give {:.0} or more for medians that mean something",
            longest.as_secs_f64(),
            seconds,
            longest.as_secs_f64() * 6.0
        ));
    }
    Ok((samples, rounds))
}

fn floats(axis: &[u32]) -> Vec<f64> {
    axis.iter().map(|n| f64::from(*n)).collect()
}

/// The measurements in the simulator's format.
fn table(
    axes: &Axes,
    samples: &Samples,
    machine: &Machine,
    model: &str,
    setting: Setting,
) -> anyhow::Result<TableFile> {
    let threads = if machine.threads == 1 { "thread" } else { "threads" };
    let mut file = TableFile {
        format: TableFile::FORMAT.into(),
        version: TableFile::VERSION,
        machine: format!("{}, {} {threads}", machine.cpu, machine.threads),
        model: format!("{model}, K {} and V {}", setting.k, setting.v),
        setting: Some(setting),
        shared_ns: 0.0,
        shared: None,
        drafts: Some(DraftAxes {
            rows: floats(&axes.draft_rows),
            context: floats(&axes.decode_context),
            ns: medians("a draft", &axes.draft_rows, &axes.decode_context, &samples.drafts)?,
        }),
        prefill: PrefillAxes {
            tokens: floats(&axes.tokens),
            context: floats(&axes.prefill_context),
            ns: medians("prefill", &axes.tokens, &axes.prefill_context, &samples.prefill)?,
        },
        decode: DecodeAxes {
            sequences: floats(&axes.sequences),
            context: floats(&axes.decode_context),
            ns: medians("decode", &axes.sequences, &axes.decode_context, &samples.decode)?,
        },
    };
    // How much less a mixed step takes than its two parts separately, by this table.
    let apart = MeasuredTable::new("the measurement", file.clone())?;
    let saved = |cell: &Vec<Ran>| {
        let mut both: Vec<f64> = Vec::new();
        for ran in cell {
            let prefill = kvist_simulator::cost::BatchShape {
                decode_sequences: 0,
                decode_context_tokens: 0,
                ..ran.shape
            };
            let decode = kvist_simulator::cost::BatchShape {
                prefill_tokens: 0,
                prefill_sequences: 0,
                prefill_context_tokens: 0,
                ..ran.shape
            };
            both.push(apart.step_ns(&prefill) as f64 + apart.step_ns(&decode) as f64 - ran.ns);
        }
        median(&both).unwrap_or(0.0).max(0.0)
    };
    if samples.mixed.iter().flatten().any(|cell| !cell.is_empty()) {
        let ns: Vec<Vec<f64>> = samples.mixed.iter().map(|row| row.iter().map(saved).collect()).collect();
        file.shared_ns = median(&ns.concat()).unwrap_or(0.0);
        file.shared =
            Some(SharedAxes { tokens: floats(&axes.mixed_prompts), sequences: floats(&axes.sequences), ns });
    }
    Ok(file)
}

fn summary(args: &Args, file: &TableFile, samples: &Samples, machine: Machine) -> Summary {
    let last = |axis: &[f64]| axis.last().copied().unwrap_or(1.0);
    let first = |ns: Option<&Vec<f64>>| ns.and_then(|row| row.first()).copied().unwrap_or(1.0);
    let cells = |grid: &[Vec<Vec<f64>>]| grid.iter().flatten().map(Vec::len).collect::<Vec<_>>();
    let mixed: Vec<usize> = samples.mixed.iter().flatten().map(Vec::len).collect();
    let counts = [cells(&samples.prefill), cells(&samples.decode), mixed, cells(&samples.drafts)].concat();
    let of_rows = |drafts: &DraftAxes| {
        let one = first(drafts.ns.first());
        let cost =
            |(rows, ns): (&f64, &Vec<f64>)| DraftCost { rows: *rows as u32, over_one: first(Some(ns)) / one };
        drafts.rows.iter().zip(&drafts.ns).map(cost).collect()
    };
    Summary {
        version: json::VERSION,
        table: args.output.clone(),
        model: file.model.clone(),
        setting: file.setting.clone().unwrap_or_default(),
        machine,
        cells: counts.len(),
        steps: counts.iter().sum(),
        scatter: scatter(&[&samples.prefill, &samples.decode]),
        prefill_tokens_per_s: last(&file.prefill.tokens) * 1e9 / first(file.prefill.ns.last()),
        decode_tokens_per_s: 1e9 / first(file.decode.ns.first()),
        decode_tokens_per_s_full: last(&file.decode.sequences) * 1e9 / first(file.decode.ns.last()),
        shared_ns: file.shared_ns,
        draft_costs: file.drafts.as_ref().map(of_rows).unwrap_or_default(),
    }
}

impl Summary {
    /// The costs of drafts, as text.
    fn drafts(&self) -> String {
        let costs = self.draft_costs.iter().filter(|cost| cost.rows > 1);
        costs.map(|it| format!("{} tokens {:.2}", it.rows, it.over_one)).collect::<Vec<_>>().join(", ")
    }

    fn text(&self, axes: &Axes) -> String {
        let last = |axis: &[u32]| axis.last().copied().unwrap_or(0);
        let per_cent = |part: f64| format!("{:.0}%", part * 100.0);
        let busy = self.machine.busy.map_or("unknown".to_owned(), per_cent);
        [
            format!("model            {}", self.model),
            format!("machine          {}, {} threads; busy {busy}", self.machine.cpu, self.machine.threads),
            format!(
                "measured         {} cells, {} steps in {} rounds and {:.0} s; the middle half of a cell's visits spans {}",
                self.cells,
                self.steps,
                self.setting.rounds,
                self.setting.seconds,
                per_cent(self.scatter)
            ),
            format!(
                "prefill          up to {} tokens a step: {:.0} tokens/s",
                last(&axes.tokens),
                self.prefill_tokens_per_s
            ),
            format!(
                "decode           {:.0} tokens/s alone, {:.0} with {} sequences",
                self.decode_tokens_per_s,
                self.decode_tokens_per_s_full,
                last(&axes.sequences)
            ),
            format!("both in one step saves {:.2} ms", self.shared_ns / 1e6),
            format!("drafts           {} times a step of one token", self.drafts()),
            format!("table            {}: kvist simulate --costs {0}", self.table.display()),
        ]
        .join("\n")
            + "\n"
    }
}
