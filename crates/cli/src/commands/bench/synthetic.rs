//! `kvist bench synthetic`: the cache of a model without the model. K, V and q are generated; every growth of the pools
//! is logged.
use super::machine::{Machine, Spread, Watch};
use super::measure::KvArgs;
use super::rig::{Rig, Setup, TRUNK};
use super::shape::{Shape, ShapeArgs};
use crate::options::*;
use crate::{interrupt, json, output, progress};
use kvist_cache::Span;
use kvist_cache::kinds::Visibility;
use kvist_device::MemoryBudget;
use serde::Serialize;
use std::time::Duration;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Tokens generated after it
    #[arg(long, default_value_t = 64, value_name = "N")]
    generate: u32,
    /// Tokens of a prefill step
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
    #[command(flatten)]
    kv: KvArgs,
    /// A query sees at most this many positions
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    window: Option<u32>,
    /// Memory that the cache may take; by default the free memory of the machine
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Print one JSON document per line: the log, then the summary
    #[arg(long)]
    json: bool,
}

/// An event of the pools.
#[derive(Serialize)]
struct Event {
    event: &'static str,
    step: u32,
    tokens: u32,
    bytes_before: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Summary {
    version: u32,
    event: &'static str,
    shape: Shape,
    k: String,
    v: String,
    tokens: u32,
    bytes_reserved: u64,
    bytes_in_use: u64,
    bytes_written: u64,
    bytes_read: u64,
    prefill_ms: f64,
    /// Attention of one generated token, all layers.
    decode: Spread,
    machine: Machine,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let shape = args.shape.get()?;
    let compute = args.compute.get()?;
    let total = args.prompt.checked_add(args.generate).ok_or_else(|| wrong_usage("--generate: too many"))?;
    let setup = Setup {
        shape,
        kind: "contiguous",
        k: args.kv.k,
        v: args.kv.v,
        visibility: Visibility { window: args.window, sinks: 0 },
        softcap: None,
        capacity: total,
        max_step_tokens: args.chunk.min(total),
    };
    let memory = args.memory.map(|size| size.0).or_else(crate::memory::available);
    let budget = memory.map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
    let mut rig = Rig::new(&compute, setup, &budget)?;
    interrupt::listen();
    let watch = Watch::start();
    let bar = progress::bar("tokens", u64::from(total), quiet);
    let (mut at, mut step, mut prefill, mut decode) = (0, 0, Duration::ZERO, Vec::new());
    while at < total && !interrupt::interrupted() {
        let n = if at < args.prompt { args.chunk.min(args.prompt - at) } else { 1 };
        let before = rig.bytes();
        let taken = rig.step(&[Span::chain(TRUNK, at, n)], true)?;
        at += n;
        if at <= args.prompt {
            prefill += taken
        } else {
            decode.push(taken)
        }
        if rig.bytes() != before {
            let event = Event { event: "grow", step, tokens: at, bytes_before: before, bytes: rig.bytes() };
            if args.json {
                output::show_json_line(&event)?;
            } else {
                let (old, new) = (Bytes(before), Bytes(rig.bytes()));
                output::show(&format!("step {step}: {at} tokens, the pools grow from {old} to {new}\n"))?;
            }
        }
        step += 1;
        bar.set_position(u64::from(at));
    }
    bar.finish_and_clear();
    let counters = rig.counters();
    let row = args.kv.k.row_bytes(shape.head_dim) + args.kv.v.row_bytes(shape.head_dim);
    let per_token = row * u64::from(shape.kv_heads) * u64::from(shape.layers);
    let summary = Summary {
        version: json::VERSION,
        event: "summary",
        shape,
        k: args.kv.k.to_string(),
        v: args.kv.v.to_string(),
        tokens: at,
        bytes_reserved: rig.bytes(),
        bytes_in_use: per_token * u64::from(at),
        bytes_written: counters.bytes_written,
        bytes_read: counters.bytes_read,
        prefill_ms: prefill.as_secs_f64() * 1e3,
        decode: Spread::of(&decode),
        machine: watch.machine(&compute),
    };
    if args.json {
        return output::show_json_line(&summary);
    }
    let Shape { layers, heads, kv_heads, head_dim } = shape;
    output::show(&format!(
        "{layers} layers, {heads}:{kv_heads} heads of {head_dim}, K {} V {}: {at} tokens in {}, {} of it used; {} written, {} read\nattention alone: prompt {:.1} ms, then {:.3} ms per token\n",
        args.kv.k,
        args.kv.v,
        Bytes(summary.bytes_reserved),
        Bytes(summary.bytes_in_use),
        Bytes(summary.bytes_written),
        Bytes(summary.bytes_read),
        summary.prefill_ms,
        summary.decode.median_ms
    ))
}
