//! `kvist bench layout`: how the order of rows and the size of pages affect a kernel that only reads.
use super::machine::{Machine, Spread, Watch};
use super::measure::RunsArgs;
use crate::options::*;
use crate::{interrupt, json, output, progress};
use kvist_cpu::stream::Stream;
use serde::Serialize;
use std::time::Duration;

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("9")))]
pub struct Args {
    /// Bytes to read
    #[arg(long, default_value = "512MiB", value_name = "SIZE")]
    size: Size,
    /// KV heads: rows of 64 f16 each
    #[arg(long, default_value = "8", value_name = "N", value_parser = ["2", "4", "8", "16", "32"])]
    heads: String,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    measure: RunsArgs,
}

#[derive(Serialize)]
struct Row {
    version: u32,
    order: &'static str,
    huge_pages_asked: bool,
    heads: usize,
    bytes: usize,
    #[serde(flatten)]
    spread: Spread,
    gb_per_s: f64,
    machine: Machine,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let compute = args.compute.get()?;
    let heads: usize = args.heads.parse()?;
    // Use whole parts of every head.
    let unit = heads as u64 * (256 << 10);
    let bytes = (args.size.0 / unit).max(1).saturating_mul(unit);
    if crate::memory::available().is_some_and(|free| bytes > free / 2) {
        return Err(wrong_usage(format!("--size: two buffers of {} do not fit", Bytes(bytes))));
    }
    interrupt::listen();
    let watch = Watch::start();
    let buffer = |huge| {
        let refused = |bytes| anyhow::anyhow!("the system refused {bytes} bytes");
        Stream::on(&compute, usize::try_from(bytes)?, huge).map_err(refused)
    };
    let mut streams = [buffer(true)?, buffer(false)?];
    let mut runs: [[Vec<Duration>; 2]; 2] = Default::default();
    let bar = progress::bar("measuring", u64::from(args.measure.runs), quiet);
    for run in 0..=args.measure.runs {
        for (stream, runs) in streams.iter_mut().zip(&mut runs) {
            let taken = [stream.read(&compute), stream.read_token_major(&compute, heads)];
            if run > 0 {
                runs.iter_mut().zip(taken).for_each(|(runs, taken)| runs.push(taken));
            }
        }
        bar.inc(1);
        if interrupt::interrupted() && run > 0 {
            break;
        }
    }
    bar.finish_and_clear();
    let mut text = String::new();
    for (huge, runs) in [true, false].into_iter().zip(&runs) {
        for (order, runs) in ["head-major", "token-major"].into_iter().zip(runs) {
            let (spread, bytes) = (Spread::of(runs), streams[0].bytes());
            let row = Row {
                version: json::VERSION,
                order,
                huge_pages_asked: huge,
                heads,
                bytes,
                gb_per_s: bytes as f64 / spread.median_ms / 1e6,
                spread,
                machine: watch.machine(&compute),
            };
            if args.measure.json {
                output::show_json_line(&row)?;
                continue;
            }
            if text.is_empty() {
                text = format!(
                    "{}; {heads} heads\n\n| rows | pages | GB/s | ms | min | max |\n|---|---|--:|--:|--:|--:|\n",
                    row.machine
                );
            }
            let pages = if huge { "huge ones asked for" } else { "ordinary" };
            let Spread { median_ms, min_ms, max_ms, .. } = row.spread;
            text += &format!(
                "| {order} | {pages} | {:.1} | {median_ms:.2} | {min_ms:.2} | {max_ms:.2} |\n",
                row.gb_per_s
            );
        }
    }
    output::show(&text)
}
