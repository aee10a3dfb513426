//! `kvist bench fork`: branches of a running sequence. Bytes are counted by the pools.
use super::machine::{Machine, Spread, Watch};
use super::measure::RunsArgs;
use super::rig::{Rig, Setup, TRUNK};
use super::shape::{Shape, ShapeArgs};
use crate::options::*;
use crate::{interrupt, json, output, progress};
use kvist_cache::kinds::Visibility;
use kvist_cache::{SeqId, Span};
use kvist_device::{MemoryBudget, Storage};
use serde::Serialize;
use std::time::Instant;

#[derive(clap::Args)]
#[command(mut_arg("json", |json| json.help("Print one JSON document")))]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens of the trunk
    #[arg(long, default_value_t = 16384, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Branches
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    branches: u32,
    /// Storage of K and V
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    kv: Storage,
    #[command(flatten)]
    compute: ComputeArgs,
    #[command(flatten)]
    measure: RunsArgs,
}

/// One step of some branches.
#[derive(Serialize)]
struct Steps {
    branches: u32,
    #[serde(flatten)]
    spread: Spread,
    bytes_read: u64,
}

#[derive(Serialize)]
struct Report {
    version: u32,
    shape: Shape,
    kv: String,
    tokens: u32,
    /// All forks together.
    fork_us: f64,
    /// Stored bytes that forking copied.
    fork_bytes_copied: u64,
    /// Bytes that a copy of the trunk would take.
    trunk_bytes: u64,
    one: Steps,
    all: Steps,
    /// Time of a step of all branches over that of one.
    ratio: f64,
    bytes_ratio: f64,
    machine: Machine,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let shape = args.shape.get()?;
    let compute = args.compute.get()?;
    let (tokens, branches) = (args.tokens, args.branches);
    let capacity = tokens.checked_add(branches).ok_or_else(|| wrong_usage("--tokens: too many"))?;
    let setup = Setup {
        shape,
        kind: "cells",
        k: args.kv,
        v: args.kv,
        visibility: Visibility::FULL,
        softcap: None,
        capacity,
        max_step_tokens: branches,
    };
    let budget = crate::memory::available().map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
    let mut rig = Rig::new(&compute, setup, &budget)?;
    interrupt::listen();
    let bar = progress::bar("filling", u64::from(tokens), quiet);
    let whole = rig.fill(tokens, &mut |done| {
        bar.set_position(u64::from(done));
        !interrupt::interrupted()
    })?;
    bar.finish_and_clear();
    anyhow::ensure!(whole, "interrupted before anything was measured");
    let before = rig.counters();
    let started = Instant::now();
    let mut sequences = rig.cache().sequences().ok_or_else(|| wrong_usage("cells fork"))?;
    for i in 0..branches {
        sequences.fork(TRUNK, SeqId(1 + i))?;
    }
    let fork_us = started.elapsed().as_secs_f64() * 1e6;
    let fork_bytes_copied = rig.counters().bytes_moved - before.bytes_moved;
    let spans: Vec<Span<'_>> = (0..branches).map(|i| Span::chain(SeqId(1 + i), tokens, 1)).collect();
    let watch = Watch::start();
    let (mut one, mut all) = (Vec::new(), Vec::new());
    let mut bytes = (0, 0);
    for run in 0..=args.measure.runs {
        for (spans, runs, bytes) in
            [(&spans[..1], &mut one, &mut bytes.0), (&spans[..], &mut all, &mut bytes.1)]
        {
            let before = rig.counters();
            let taken = rig.step(spans, false)?;
            if run > 0 {
                runs.push(taken);
            }
            *bytes = rig.counters().bytes_read - before.bytes_read;
        }
        if interrupt::interrupted() && run > 0 {
            break;
        }
    }
    let moved = rig.counters().bytes_moved - before.bytes_moved;
    let one = Steps { branches: 1, spread: Spread::of(&one), bytes_read: bytes.0 };
    let all = Steps { branches, spread: Spread::of(&all), bytes_read: bytes.1 };
    let report = Report {
        version: json::VERSION,
        shape,
        kv: args.kv.to_string(),
        tokens,
        fork_us,
        fork_bytes_copied: fork_bytes_copied.max(moved),
        trunk_bytes: one.bytes_read,
        ratio: all.spread.median_ms / one.spread.median_ms,
        bytes_ratio: all.bytes_read as f64 / one.bytes_read as f64,
        one,
        all,
        machine: watch.machine(&compute),
    };
    if args.measure.json { output::show_json(&report) } else { output::show(&report.text()) }
}

impl Report {
    fn text(&self) -> String {
        let Report { tokens, kv, fork_us, fork_bytes_copied, one, all, ratio, bytes_ratio, .. } = self;
        format!(
            "{}\n{} branches of {tokens} tokens ({kv}): {fork_us:.1} µs, {} copied, where a copy each would be {}\none step, all layers: one branch {:.2} ms and {}; all {:.2} ms and {}: {ratio:.2} × the time, {bytes_ratio:.3} × the bytes\n",
            self.machine,
            all.branches,
            Bytes(*fork_bytes_copied),
            Bytes(self.trunk_bytes),
            one.spread.median_ms,
            Bytes(one.bytes_read),
            all.spread.median_ms,
            Bytes(all.bytes_read),
        )
    }
}
