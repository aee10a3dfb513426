//! Our simulator beside dynamo-mocker: the Mooncake conversation trace, one worker, a cache that never fills, and the
//! same model of cost. Every run is a process of its own, so that CPU seconds and peak memory are its own, the reading
//! of the trace included; the sides take turns; medians. Linux.
//!
//! `simulator [TRACE.jsonl] [--rounds N]`: without a trace, the one that the tests carry. Prints Markdown.
mod cost;
mod sides;

use anyhow::{Context, Result, bail, ensure};
use cost::Rates;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sides::{Entry, Headline, MAX_BATCH, MAX_BATCH_TOKENS, ZeroService};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const CARRIED: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/simulator/tests/data/conversation_trace.jsonl.zst");
/// The trace arrives in 3,537 s. With the first rates it is all but served as it comes, by large batches; with the
/// second, the batch is full and thousands wait; with the third, most of the time nothing runs or little.
const RATES: [Rates; 3] = [
    Rates { prefill: 200.0, decode: 1.3 },
    Rates { prefill: 20.0, decode: 2.0 },
    Rates { prefill: 100.0, decode: 10.0 },
];
/// What a reader of the table has to know.
const PREAMBLE: &str = "
One worker, one trace, constant rates, a cache that never fills. A process per run, reading the trace included; the
sides take turns. `mocker-file` is `simulate_trace_file`; `mocker-loaded` is
`simulate_loaded_trace_with_router_mode_and_options`, which makes a prompt's tokens when it arrives. `kvist-itl` notes
the time between tokens too, as the mocker always does. × is how many times our CPU seconds the faster mocker needs.

Both simulate the same, up to two things. The mocker lets a request hit blocks that another computes in the same step;
ours are hit once they are computed. In the Mooncake trace that is one id of 512 tokens: the first two requests come
at once. And the mocker prices prompts by whole means over the sequences of a step.
";
const BLOCKS: [u32; 2] = [512, 16];
const SIDES: [&str; 4] = ["kvist", "kvist-itl", "mocker-file", "mocker-loaded"];

/// What a process says before it ends.
#[derive(Serialize, Deserialize)]
struct Answer<T> {
    cpu_s: f64,
    peak_bytes: u64,
    result: T,
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, side, trace, block_tokens, rest] = args.as_slice()
        && flag == "--side"
    {
        return one_run(side, Path::new(trace), block_tokens.parse()?, rest);
    }
    let (mut trace, mut rounds) = (None, 5);
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rounds" => {
                rounds = args.next().context("--rounds takes a number")?.parse().context("--rounds")?;
                ensure!(rounds > 0, "--rounds 0: give at least 1");
            }
            path if !path.starts_with('-') => trace = Some(PathBuf::from(path)),
            flag => bail!("unknown flag {flag}: simulator [TRACE.jsonl] [--rounds N]"),
        }
    }
    // Both sides read the same plain file: the rival does not decompress.
    let mut plain = tempfile::NamedTempFile::new()?;
    let trace = match trace {
        Some(trace) => trace,
        None => {
            let file = std::fs::File::open(CARRIED).context(CARRIED)?;
            std::io::copy(&mut ruzstd::decoding::StreamingDecoder::new(file)?, &mut plain)?;
            plain.path().to_owned()
        }
    };
    compare(&trace, rounds)?;
    touches(&trace, rounds)
}

/// A child's work.
fn one_run(side: &str, trace: &Path, block_tokens: u32, rest: &str) -> Result<()> {
    if side == "zero-service" {
        let capacity = if rest == "inf" { None } else { Some(rest.parse()?) };
        return say(sides::zero_service(trace, block_tokens, capacity)?);
    }
    let (prefill, decode) = rest.split_once('/').context("rates are PREFILL/DECODE")?;
    let rates = Rates { prefill: prefill.parse()?, decode: decode.parse()? };
    say(match side {
        "kvist" => sides::kvist(trace, block_tokens, rates, false)?,
        "kvist-itl" => sides::kvist(trace, block_tokens, rates, true)?,
        "mocker-file" => sides::mocker(trace, block_tokens, rates, Entry::File)?,
        "mocker-loaded" => sides::mocker(trace, block_tokens, rates, Entry::Loaded)?,
        other => bail!("no side {other:?}"),
    })
}

fn say<T: Serialize>(result: T) -> Result<()> {
    let answer = Answer { cpu_s: sides::cpu_seconds()?, peak_bytes: sides::peak_bytes()?, result };
    println!("{}", serde_json::to_string(&answer)?);
    Ok(())
}

fn ask<T: DeserializeOwned>(side: &str, trace: &Path, block_tokens: u32, rest: &str) -> Result<Answer<T>> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--side", side])
        .arg(trace)
        .args([&block_tokens.to_string(), rest])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "{side}, blocks of {block_tokens}: {}", output.status);
    serde_json::from_slice(&output.stdout).with_context(|| format!("{side}, blocks of {block_tokens}"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned()
}

fn compare(trace: &Path, rounds: usize) -> Result<()> {
    println!("{}", PREAMBLE.trim_start());
    println!("Batches of {MAX_BATCH}, {MAX_BATCH_TOKENS} tokens per step; medians of {rounds} runs.\n");
    println!(
        "| tokens per ms | block | side | CPU s | × | peak MB | completed | output tokens | TTFT mean s | TTFT p99 s | end to end mean s | makespan s | token hit ratio | mean running |"
    );
    println!("|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let before = load();
    for rates in RATES {
        for block_tokens in BLOCKS {
            let rest = format!("{}/{}", rates.prefill, rates.decode);
            let mut answers: Vec<Vec<Answer<Headline>>> = SIDES.iter().map(|_| Vec::new()).collect();
            for _ in 0..rounds {
                for (side, answers) in SIDES.iter().zip(&mut answers) {
                    answers.push(ask(side, trace, block_tokens, &rest)?);
                }
            }
            let cpu_s: Vec<f64> =
                answers.iter().map(|runs| median(runs.iter().map(|run| run.cpu_s).collect())).collect();
            let rival_s = cpu_s[2].min(cpu_s[3]);
            for ((side, runs), cpu_s) in SIDES.iter().zip(&answers).zip(&cpu_s) {
                let peak = median(runs.iter().map(|run| run.peak_bytes as f64).collect());
                let times =
                    if side.starts_with("kvist") { format!("{:.1}", rival_s / cpu_s) } else { String::new() };
                let h = &runs[0].result;
                println!(
                    "| {rest} | {block_tokens} | {side} | {cpu_s:.3} | {times} | {:.0} | {} | {} | {:.4} | {:.3} | {:.3} | {:.2} | {:.6} | {} |",
                    peak / 1e6,
                    h.completed,
                    h.output_tokens,
                    h.ttft_mean_s,
                    h.ttft_p99_s,
                    h.end_to_end_mean_s,
                    h.duration_s,
                    h.token_hit_ratio,
                    h.mean_batch.map_or(String::new(), |n| format!("{n:.1}")),
                );
            }
        }
    }
    println!("\nLoad of the machine: {before} before, {} after.\n", load());
    Ok(())
}

fn touches(trace: &Path, rounds: usize) -> Result<()> {
    println!("Zero-service replay, `lru`, from tail to head.\n");
    println!(
        "| block | capacity in blocks | hit blocks | million touches per second of CPU | cutting the prompts into blocks, s |"
    );
    println!("|--:|--:|--:|--:|--:|");
    for (block_tokens, capacity) in [(512, "inf"), (512, "10000"), (16, "inf"), (16, "320000")] {
        let mut answers: Vec<ZeroService> = Vec::new();
        for _ in 0..rounds {
            answers.push(ask("zero-service", trace, block_tokens, capacity)?.result);
        }
        let rate = median(answers.iter().map(|run| run.touches as f64 / run.replay_s / 1e6).collect());
        let cut_s = median(answers.iter().map(|run| run.cut_s).collect());
        println!("| {block_tokens} | {capacity} | {} | {rate:.1} | {cut_s:.3} |", answers[0].hit_blocks);
    }
    Ok(())
}
