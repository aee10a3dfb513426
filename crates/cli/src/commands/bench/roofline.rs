//! `kvist bench roofline`: attention of each dtype under the limits of memory and of arithmetic (Williams, Waterman and
//! Patterson, 2009).
use super::attention::{self, Case};
use super::machine::{Machine, Watch};
use super::measure::RunsArgs;
use super::plot;
use super::shape::{Shape, ShapeArgs};
use crate::options::*;
use crate::{interrupt, json, output};
use clap::ValueHint;
use kvist_cpu::peak::{self, Product};
use kvist_device::Storage;
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("9")))]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens in the cache, the prompt's included
    #[arg(long, value_name = "T", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    tokens: u32,
    /// Queries of the prompt
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    queries: u32,
    /// Branches of a trunk
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    branches: u32,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    measure: RunsArgs,
    /// Plot operations per second over operations per byte
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    version: u32,
    what: String,
    kv: String,
    shape: Shape,
    tokens: u32,
    median_ms: f64,
    bytes_read: u64,
    /// Multiplications and additions of scores and sums: four per query head, visible position and element.
    operations: u64,
    operations_per_byte: f64,
    gflop_per_s: f64,
    read_limit_gb_per_s: f64,
    /// Peaks of f32 products, of pairs of bf16 or of words (`--fast-prefill`), and of byte products; q8 needs two byte products where one f32
    /// product is counted.
    f32_peak_gflop_per_s: f64,
    pairs_peak_gflop_per_s: f64,
    bytes_peak_gop_per_s: f64,
    machine: Machine,
}

const DTYPES: [&str; 3] = ["f16", "q8-64", "q4-64"];

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let (shape, compute) = (args.shape.get()?, args.compute.get()?);
    if args.queries > args.tokens {
        return Err(wrong_usage(format!("--queries {0} see more: use --tokens {0} or more", args.queries)));
    }
    interrupt::listen();
    let mut rows: Vec<Row> = Vec::new();
    for kv in DTYPES {
        let storage: Storage = kv.parse().map_err(anyhow::Error::msg)?;
        let one = Case::of(storage, args.measure.runs);
        let branches = Case { branches: Some(args.branches), ..one };
        for case in [one, branches, Case { queries: args.queries, ..one }] {
            let watch = Watch::start();
            let peaks = [Product::F32, Product::Pairs, Product::Bytes]
                .map(|product| peak::operations_per_s(&compute, product));
            let Some(row) = attention::measure(&case, shape, &compute, args.tokens, quiet)? else { break };
            let per_position =
                4 * u64::from(shape.layers) * u64::from(shape.heads) * u64::from(shape.head_dim);
            let operations = per_position * case.visible(args.tokens);
            let row = Row {
                version: json::VERSION,
                kv: kv.into(),
                shape,
                tokens: args.tokens,
                median_ms: row.spread.median_ms,
                bytes_read: row.bytes_read,
                operations,
                operations_per_byte: operations as f64 / row.bytes_read as f64,
                gflop_per_s: operations as f64 / row.spread.median_ms / 1e6,
                read_limit_gb_per_s: row.read_limit_gb_per_s,
                f32_peak_gflop_per_s: peaks[0] / 1e9,
                pairs_peak_gflop_per_s: peaks[1] / 1e9,
                bytes_peak_gop_per_s: peaks[2] / 1e9,
                what: row.what,
                machine: watch.machine(&compute),
            };
            show(&row, args.measure.json, rows.is_empty())?;
            rows.push(row);
            if interrupt::interrupted() {
                break;
            }
        }
    }
    match &args.plot {
        Some(path) if !rows.is_empty() => draw(path, &rows),
        _ => Ok(()),
    }
}

fn show(row: &Row, json: bool, first: bool) -> anyhow::Result<()> {
    if json {
        return output::show_json_line(row);
    }
    if first {
        output::show(&format!(
            "{}; {}, {} tokens\n\n| what | K, V | operations per byte | GFLOP/s | read limit | f32 peak | pairs | bytes |\n|---|---|--:|--:|--:|--:|--:|--:|\n",
            row.machine, row.shape, row.tokens
        ))?;
    }
    output::show(&format!(
        "| {} | {} | {:.1} | {:.0} | {:.1} GB/s | {:.0} | {:.0} | {:.0} |\n",
        row.what,
        row.kv,
        row.operations_per_byte,
        row.gflop_per_s,
        row.read_limit_gb_per_s,
        row.f32_peak_gflop_per_s,
        row.pairs_peak_gflop_per_s,
        row.bytes_peak_gop_per_s
    ))
}

/// Draws the roof (memory's slope up to each peak) and a point per row.
fn draw(path: &std::path::Path, rows: &[Row]) -> anyhow::Result<()> {
    let median = |f: fn(&Row) -> f64| {
        let mut all: Vec<f64> = rows.iter().map(f).collect();
        all.sort_by(f64::total_cmp);
        percentile(&all, 0.5).unwrap_or_default()
    };
    let (limit, f32_peak) = (median(|r| r.read_limit_gb_per_s), median(|r| r.f32_peak_gflop_per_s));
    // Queries and weights have one byte beside q4, and two beside other codes: then two byte products count as one.
    let bytes_peak = median(|r| r.bytes_peak_gop_per_s);
    let end = rows.iter().map(|r| r.operations_per_byte).fold(64.0, f64::max) * 1.5;
    let slope = (bytes_peak.max(f32_peak) / limit).min(end);
    let roof = |peak: f64| vec![(peak / limit, peak), (end.max(peak / limit), peak)];
    let mut lines = vec![
        (format!("reading: {limit:.0} GB/s"), vec![(0.5, 0.5 * limit), (slope, slope * limit)]),
        (format!("f32: {f32_peak:.0} GFLOP/s"), roof(f32_peak)),
        (format!("bytes: {bytes_peak:.0} GOP/s"), roof(bytes_peak)),
        (format!("two bytes: {:.0} GOP/s", bytes_peak / 2.0), roof(bytes_peak / 2.0)),
    ];
    let n_roofs = lines.len();
    for kv in DTYPES {
        let points = rows.iter().filter(|r| r.kv == kv).map(|r| (r.operations_per_byte, r.gflop_per_s));
        lines.push((kv.to_string(), points.collect()));
    }
    let Shape { heads, kv_heads, head_dim, .. } = rows[0].shape;
    let title = format!("Attention, {heads}:{kv_heads} heads of {head_dim}, {} tokens", rows[0].tokens);
    plot::write_roofline(path, &title, lines, n_roofs)
}
