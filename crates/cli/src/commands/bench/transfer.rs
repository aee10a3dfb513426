//! `kvist bench transfer`: K and V from the host's memory to blocks on a GPU.
mod timeline;

use super::machine::{Machine, Spread, Watch};
use super::measure::RunsArgs;
use super::shape::{Shape, ShapeArgs, parse_lengths};
use crate::options::*;
use crate::{interrupt, json, output, progress};
use clap::{ValueEnum, ValueHint};
use kvist_cpu::Compute;
use kvist_device::DeviceError;
use kvist_engine::devices::{
    HostMemory, MeasureTransfers, MeasuredSteps, PartSpans, RowsFrom, StepSpans, TransferCase,
};
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Most cells that a transfer writes.
const MAX_TOKENS: u32 = 65_535;

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("20")), mut_arg("shape", |shape| shape.default_value("llama-3-8b")))]
pub struct Args {
    /// The GPU: wgpu, wgpu:1, cuda, cuda:1, … (`kvist devices` lists them)
    #[arg(long, default_value = "wgpu", value_name = "NAME")]
    backend: String,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens whose K and V arrive in a step; one row for each
    #[arg(long, value_name = "T,T,…", default_value = "1,8,64", value_parser = parse_lengths)]
    tokens: std::vec::Vec<u32>,
    /// Memory that the rows are staged in; what the GPU has not is left out, with a line that says so
    #[arg(
        long,
        value_name = "HOW,HOW,…",
        default_value = "pageable,pinned,mapped,blocks",
        value_delimiter = ','
    )]
    staging: Vec<Staging>,
    /// Tokens per block of the page table
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    block: u32,
    /// Matrix products that a step computes; by default as many as take as long as its transfer
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    compute: Option<u32>,
    /// MiB of the copy that measures the link
    #[arg(long, default_value_t = 64, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1024))]
    link: u32,
    /// Warm-up steps, which are not measured
    #[arg(long, default_value_t = 10)]
    warmups: u32,
    /// Draw steps of the most tokens, one after the other and overlapped
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
    #[command(flatten)]
    measure: RunsArgs,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Staging {
    /// Ordinary memory, which the driver copies first
    Pageable,
    /// Memory that the device copies from
    Pinned,
    /// Memory that kernels read
    Mapped,
    /// None: the rows lie in blocks of the RAM tier, in pinned memory that the device copies from; nothing is packed
    Blocks,
}

impl Staging {
    fn rows(self) -> RowsFrom {
        match self {
            Staging::Pageable => RowsFrom::Host(HostMemory::Pageable),
            Staging::Pinned => RowsFrom::Host(HostMemory::Pinned),
            Staging::Mapped => RowsFrom::Host(HostMemory::Mapped),
            Staging::Blocks => RowsFrom::Blocks,
        }
    }
    fn name(self) -> &'static str {
        match self {
            Staging::Pageable => "pageable",
            Staging::Pinned => "pinned",
            Staging::Mapped => "mapped",
            Staging::Blocks => "blocks",
        }
    }
}

/// Medians of milliseconds, of all parts of a step together. Those on the device are null where it has no clock, and `copy_ms` where
/// nothing is copied, or where the driver copies by itself.
#[derive(Serialize)]
struct Parts {
    pack_ms: f64,
    stage_ms: f64,
    copy_ms: Option<f64>,
    scatter_ms: Option<f64>,
    compute_ms: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    version: u32,
    what: &'static str,
    backend: String,
    adapter: String,
    shape: Shape,
    staging: Staging,
    tokens: u32,
    block_tokens: u32,
    /// Whether rows are packed and copied while the step before computes.
    overlap: bool,
    /// Of K and V of a step, in f16.
    bytes: u64,
    /// Matrix products of a step's computation.
    compute: u32,
    /// Of a step.
    #[serde(flatten)]
    spread: Spread,
    #[serde(flatten)]
    parts: Parts,
    /// From the first row that is packed, or for blocks submitted, to the arrival of all; null with overlap.
    transfer_ms: Option<f64>,
    /// Bytes of a step over `transfer_ms`.
    gb_per_s: Option<f64>,
    /// The fastest copy of pinned memory in this run.
    link_gb_per_s: f64,
    /// `gb_per_s` over `link_gb_per_s`.
    of_link: Option<f64>,
    machine: Machine,
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    percentile(&values, 0.5)
}

impl Parts {
    fn of(steps: &MeasuredSteps) -> Self {
        let length = |(from, to): (Duration, Duration)| ms(to.saturating_sub(from));
        let all = |of: fn(&PartSpans) -> Option<(Duration, Duration)>| {
            let sum =
                |step: &StepSpans| step.parts.iter().map(|part| of(part).map(length)).sum::<Option<f64>>();
            median(steps.spans.iter().filter_map(sum))
        };
        Parts {
            pack_ms: all(|part| Some(part.pack)).unwrap_or_default(),
            stage_ms: all(|part| Some(part.stage)).unwrap_or_default(),
            copy_ms: all(|part| part.copy),
            scatter_ms: all(|part| part.scatter),
            compute_ms: median(steps.spans.iter().filter_map(|step| step.compute).map(length)),
        }
    }
}

struct Bench<'a> {
    args: &'a Args,
    gpu: Box<dyn MeasureTransfers>,
    shape: Shape,
    link: f64,
}

impl Bench<'_> {
    fn case(&self, staging: Staging, tokens: u32, overlap: bool, compute: u32) -> TransferCase {
        TransferCase {
            layers: self.shape.layers.into(),
            kv_heads: self.shape.kv_heads,
            head_dim: self.shape.head_dim,
            tokens,
            block_tokens: self.args.block,
            from: staging.rows(),
            overlap,
            compute,
        }
    }

    /// Products that take as long as a transfer.
    fn products(&self, staging: Staging, tokens: u32) -> Result<u32, DeviceError> {
        if let Some(n) = self.args.compute {
            return Ok(n);
        }
        let steps = self.gpu.steps(&self.case(staging, tokens, false, 1), 2, 5)?;
        let transfer = median(transfers(&steps)).unwrap_or_default();
        let unit = ms(self.gpu.unit()?);
        Ok((transfer / unit.max(1e-6)).ceil().clamp(1.0, 10_000.0) as u32)
    }

    fn row(&self, case: &TransferCase, staging: Staging, steps: &MeasuredSteps, machine: Machine) -> Row {
        let transfer = median(transfers(steps)).filter(|_| !case.overlap);
        let rate = transfer.map(|ms| case.bytes() as f64 / (ms / 1e3));
        Row {
            version: json::VERSION,
            what: "transfer",
            backend: self.args.backend.clone(),
            adapter: self.gpu.adapter().into(),
            shape: self.shape,
            staging,
            tokens: case.tokens,
            block_tokens: case.block_tokens,
            overlap: case.overlap,
            bytes: case.bytes(),
            compute: case.compute,
            spread: Spread::of(&steps.times),
            parts: Parts::of(steps),
            transfer_ms: transfer,
            gb_per_s: rate.map(|rate| rate / 1e9),
            link_gb_per_s: self.link / 1e9,
            of_link: rate.map(|rate| rate / self.link),
            machine,
        }
    }
}

/// Milliseconds of each step from the first row to the arrival of all.
fn transfers(steps: &MeasuredSteps) -> impl Iterator<Item = f64> + '_ {
    let transfer = |step: &StepSpans| step.transfer().1.saturating_sub(step.transfer().0);
    steps.spans.iter().map(transfer).map(ms)
}

impl Row {
    fn text(&self) -> String {
        let maybe = |ms: Option<f64>| ms.map_or("-".to_string(), |ms| format!("{ms:.3}"));
        let Parts { pack_ms, stage_ms, copy_ms, scatter_ms, compute_ms } = &self.parts;
        format!(
            "| {} | {} | {} | {} | {:.3} | {pack_ms:.3} | {stage_ms:.3} | {} | {} | {} | {} | {} |\n",
            self.staging.name(),
            self.tokens,
            if self.overlap { "yes" } else { "no" },
            self.bytes >> 10,
            self.spread.median_ms,
            maybe(*copy_ms),
            maybe(*scatter_ms),
            maybe(*compute_ms),
            self.gb_per_s.map_or("-".to_string(), |rate| format!("{rate:.2}")),
            self.of_link.map_or("-".to_string(), |share| format!("{:.0} %", 100.0 * share)),
        )
    }
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let shape = args.shape.get()?;
    if let Some(tokens) = args.tokens.iter().find(|tokens| **tokens > MAX_TOKENS) {
        return Err(wrong_usage(format!("--tokens {tokens}: a transfer has at most {MAX_TOKENS} tokens")));
    }
    let gpu = open_backend(&args.backend, &Compute::default())?.measure_transfers()?;
    interrupt::listen();
    let compute = Compute::default();
    let watch = Watch::start();
    let link = gpu.link(u64::from(args.link) << 20, args.measure.runs.min(5))?;
    let bench = Bench { gpu, shape, link, args: &args };
    if !args.measure.json {
        output::show(&format!(
            "{} ({}), {shape}, blocks of {} tokens; the link copies {:.2} GB/s; {}\n\
             \n\
             | staging | tokens | overlap | KiB | step ms | pack | stage | copy | scatter | compute | GB/s | of the link |\n\
             |---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n",
            args.backend,
            bench.gpu.adapter(),
            args.block,
            link / 1e9,
            watch.machine(&compute),
        ))?;
    }
    let bar = progress::bar("measuring", 2 * (args.staging.len() * args.tokens.len()) as u64, quiet);
    let most = args.tokens.iter().copied().max();
    let mut drawn = Vec::new();
    'all: for staging in &args.staging {
        for tokens in &args.tokens {
            let products = match bench.products(*staging, *tokens) {
                Err(DeviceError::Unsupported(what)) => {
                    output::note(&format!("{}: {what}", staging.name()));
                    bar.inc(2 * args.tokens.len() as u64);
                    continue 'all;
                }
                other => other?,
            };
            for overlap in [false, true] {
                let case = bench.case(*staging, *tokens, overlap, products);
                let steps = bench.gpu.steps(&case, args.warmups, args.measure.runs)?;
                let row = bench.row(&case, *staging, &steps, watch.machine(&compute));
                bar.inc(1);
                match args.measure.json {
                    true => output::show_json_line(&row)?,
                    false => output::show(&row.text())?,
                }
                if Some(*tokens) == most {
                    drawn.push((*staging, case, steps));
                }
                if interrupt::interrupted() {
                    break 'all;
                }
            }
        }
    }
    bar.finish_and_clear();
    if let Some(path) = &args.plot {
        // Pinned memory shows all parts.
        let chosen = drawn.iter().find(|(staging, ..)| *staging == Staging::Pinned).or(drawn.first());
        if let Some(staging) = chosen.map(|(staging, ..)| *staging) {
            let cases: Vec<_> = drawn
                .iter()
                .filter(|drawn| drawn.0 == staging)
                .map(|(_, case, steps)| (case, steps))
                .collect();
            let title = format!("K and V from the host: {}, {} staging", bench.gpu.adapter(), staging.name());
            output::write_file(path, timeline::svg(&title, &cases).as_bytes())?;
        }
    }
    Ok(())
}
