//! `kvist bench attention`: the time of attention alone, compared with reading the same bytes.
use super::machine::{Machine, ReadLimit, Spread, Watch};
use super::measure::{KvArgs, RunsArgs};
use super::plot;
use super::rig::{Rig, Setup, TRUNK};
use super::shape::{self, Shape, ShapeArgs};
use crate::options::*;
use crate::{interrupt, json, output, progress};
use clap::ValueHint;
use kvist_cache::kinds::{BLOCK_TOKENS, Visibility};
use kvist_cache::{New, NodeId, SeqId, Span};
use kvist_cpu::Compute;
use kvist_device::{MemoryBudget, Storage};
use serde::Serialize;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens in the cache: with --queries their own included, with --branches and --tree those of the trunk; one row
    /// for each
    #[arg(long, value_name = "T,T,…", default_value = "4096", value_parser = shape::parse_lengths)]
    tokens: std::vec::Vec<u32>,
    /// Queries of a step: 1 decodes, more are the last ones of a prompt
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    queries: u32,
    /// This many branches of a trunk of --tokens tokens, one query each
    #[arg(long, value_name = "N", conflicts_with_all = ["queries", "tree"], value_parser = clap::value_parser!(u32).range(1..=4096))]
    branches: Option<u32>,
    /// A draft tree of this many nodes, two children each, after a trunk of --tokens tokens
    #[arg(long, value_name = "N", conflicts_with = "queries", value_parser = clap::value_parser!(u32).range(1..=4096))]
    tree: Option<u32>,
    /// Blocks of 16 tokens of which no two are neighbours, as in a server that has run for a while
    #[arg(long, conflicts_with_all = ["branches", "tree"])]
    scattered: bool,
    #[command(flatten)]
    kv: KvArgs,
    /// A query sees at most this many positions
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    window: Option<u32>,
    /// Scores become cap · tanh(score / cap)
    #[arg(long, value_name = "CAP")]
    softcap: Option<f32>,
    /// Warm-up steps, which are not measured
    #[arg(long, default_value_t = 2)]
    warmups: u32,
    #[command(flatten)]
    compute: ComputeArgs,
    /// Plot milliseconds over tokens, with the read limit
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
    #[command(flatten)]
    measure: RunsArgs,
}

/// The work of one attention step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub k: Storage,
    pub v: Storage,
    pub queries: u32,
    pub branches: Option<u32>,
    pub tree: Option<u32>,
    pub scattered: bool,
    pub window: Option<u32>,
    pub softcap: Option<f32>,
    pub warmups: u32,
    pub runs: u32,
}

impl Case {
    /// One query that sees everything.
    pub fn of(kv: Storage, runs: u32) -> Self {
        Case {
            k: kv,
            v: kv.for_values(),
            queries: 1,
            branches: None,
            tree: None,
            scattered: false,
            window: None,
            softcap: None,
            warmups: 2,
            runs,
        }
    }

    /// Positions that all queries of a chain or of branches see together, without a window; for `tokens` tokens as
    /// `--tokens` counts them.
    pub fn visible(&self, tokens: u32) -> u64 {
        let (tokens, queries) = (u64::from(tokens), u64::from(self.queries));
        match self.branches {
            Some(n) => u64::from(n) * (tokens + 1),
            None => queries * tokens - queries * (queries - 1) / 2,
        }
    }

    /// Queries of the step.
    fn n_queries(&self) -> u32 {
        self.branches.or(self.tree).unwrap_or(self.queries)
    }

    fn name(&self) -> String {
        match (self.branches, self.tree) {
            (Some(n), _) => format!("{n} branches"),
            (_, Some(n)) => format!("a tree of {n}"),
            _ => {
                let n = self.queries;
                let queries = if n == 1 { "one query".into() } else { format!("{n} queries") };
                queries + if self.scattered { ", scattered" } else { "" }
            }
        }
    }

    /// The pools for this step over `tokens` tokens, and how many tokens are in the cache before it.
    fn setup(&self, shape: Shape, tokens: u32) -> anyhow::Result<(Setup, u32)> {
        let queries = self.n_queries();
        let chain = self.branches.is_none() && self.tree.is_none();
        if chain && queries > tokens {
            return Err(wrong_usage(format!(
                "--queries {queries} see {tokens} tokens: use --tokens {queries} or more"
            )));
        }
        let cached = if chain { tokens.saturating_sub(queries) } else { tokens };
        // Scattered blocks alternate with blocks of a second sequence.
        let cells = if self.scattered { cached.checked_mul(2) } else { Some(cached) };
        let capacity = cells
            .and_then(|cells| cells.checked_add(queries)?.checked_next_multiple_of(BLOCK_TOKENS))
            .ok_or_else(|| wrong_usage("--tokens: too many"))?;
        let setup = Setup {
            shape,
            kind: match (self.branches, self.tree, self.scattered) {
                (Some(_), ..) => "cells",
                (_, Some(_), _) => "tree",
                (.., true) => "paged",
                _ => "contiguous",
            },
            k: self.k,
            v: self.v,
            visibility: Visibility { window: self.window, sinks: 0 },
            softcap: self.softcap,
            capacity,
            max_step_tokens: queries,
        };
        Ok((setup, cached))
    }
}

impl Args {
    fn case(&self) -> Case {
        Case {
            k: self.kv.k,
            v: self.kv.v,
            queries: self.queries,
            branches: self.branches,
            tree: self.tree,
            scattered: self.scattered,
            window: self.window,
            softcap: self.softcap,
            warmups: self.warmups,
            runs: self.measure.runs,
        }
    }
}

#[derive(Serialize)]
pub(super) struct Row {
    version: u32,
    pub what: String,
    shape: Shape,
    k: String,
    v: String,
    tokens: u32,
    queries: u32,
    /// One step, all layers.
    #[serde(flatten)]
    pub spread: Spread,
    /// Stored bytes that the step read, as the pools count them.
    pub bytes_read: u64,
    gb_per_s: f64,
    /// The rate of reading as many bytes and doing nothing else, in the same run.
    pub read_limit_gb_per_s: f64,
    read_limit_ms: f64,
    share_of_limit: f64,
    machine: Machine,
}

pub fn run(args: Args, quiet: bool) -> anyhow::Result<()> {
    let shape = args.shape.get()?;
    let compute = args.compute.get()?;
    if args.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
        return Err(wrong_usage("--softcap must be above 0 and finite"));
    }
    interrupt::listen();
    let mut rows = Vec::new();
    for tokens in &args.tokens {
        let Some(row) = measure(&args.case(), shape, &compute, *tokens, quiet)? else { break };
        if args.measure.json {
            output::show_json_line(&row)?;
        } else {
            if rows.is_empty() {
                output::show(&head(&row.machine, &shape))?;
            }
            output::show(&row.line())?;
        }
        rows.push(row);
        if interrupt::interrupted() {
            break;
        }
    }
    if let Some(path) = &args.plot {
        let points = |f: fn(&Row) -> f64| rows.iter().map(|r| (f64::from(r.tokens), f(r))).collect();
        let lines = vec![
            (format!("attention, K {} V {}", args.kv.k, args.kv.v), points(|r| r.spread.median_ms)),
            ("reading alone".to_string(), points(|r| r.read_limit_ms)),
        ];
        plot::write(path, "One step of attention", "tokens", "ms", lines)?;
    }
    Ok(())
}

fn head(machine: &Machine, shape: &Shape) -> String {
    format!(
        "{machine}; {shape}\n\n| what | tokens | K | V | ms per step | min | max | read | of the limit |\n|---|--:|---|---|--:|--:|--:|--:|--:|\n"
    )
}

impl Row {
    fn line(&self) -> String {
        let Row { what, tokens, k, v, spread, gb_per_s, share_of_limit, .. } = self;
        format!(
            "| {what} | {tokens} | {k} | {v} | {:.2} | {:.2} | {:.2} | {gb_per_s:.1} GB/s | {:.0} % |\n",
            spread.median_ms,
            spread.min_ms,
            spread.max_ms,
            share_of_limit * 100.0
        )
    }
}

pub(super) fn measure(
    case: &Case,
    shape: Shape,
    compute: &Compute,
    tokens: u32,
    quiet: bool,
) -> anyhow::Result<Option<Row>> {
    let (setup, cached) = case.setup(shape, tokens)?;
    let queries = case.n_queries();
    let budget = crate::memory::available().map_or_else(MemoryBudget::unlimited, MemoryBudget::new);
    let mut rig = Rig::new(compute, setup, &budget)?;
    let bar = progress::bar("filling", u64::from(cached), quiet);
    let mut progress = |done| {
        bar.set_position(u64::from(done));
        !interrupt::interrupted()
    };
    let whole =
        if case.scattered { rig.scatter(cached, &mut progress)? } else { rig.fill(cached, &mut progress)? };
    bar.finish_and_clear();
    if !whole {
        return Ok(None);
    }
    let branch = |i: u32| SeqId(1 + i);
    if let (Some(branches), Some(mut sequences)) = (case.branches, rig.cache().sequences()) {
        for i in 0..branches {
            sequences.fork(TRUNK, branch(i))?;
        }
    }
    let parents: Vec<Option<NodeId>> =
        (0..queries).map(|i| (i > 0).then(|| NodeId((i.saturating_sub(1) / 2) as _))).collect();
    let spans: Vec<Span<'_>> = match (case.branches, case.tree) {
        (Some(branches), _) => (0..branches).map(|i| Span::chain(branch(i), cached, 1)).collect(),
        (_, Some(_)) => vec![Span { seq: TRUNK, start: cached, new: New::Tree(&parents) }],
        _ => vec![Span::chain(TRUNK, cached, queries)],
    };
    let before = rig.counters().bytes_read;
    rig.step(&spans, false)?;
    let bytes_read = rig.counters().bytes_read - before;
    for _ in 1..case.warmups {
        rig.step(&spans, false)?;
    }
    let watch = Watch::start();
    let mut limit = ReadLimit::new(compute, bytes_read)?;
    let mut runs = Vec::new();
    let bar = progress::bar("measuring", u64::from(case.runs), quiet);
    for _ in 0..case.runs {
        runs.push(rig.step(&spans, false)?);
        limit.measure(compute);
        bar.inc(1);
        if interrupt::interrupted() {
            break;
        }
    }
    bar.finish_and_clear();
    let spread = Spread::of(&runs);
    Ok(Some(Row {
        version: json::VERSION,
        what: case.name(),
        shape,
        k: case.k.to_string(),
        v: case.v.to_string(),
        tokens,
        queries,
        gb_per_s: bytes_read as f64 / spread.median_ms / 1e6,
        read_limit_gb_per_s: limit.rate() / 1e9,
        read_limit_ms: limit.ms(bytes_read),
        share_of_limit: limit.ms(bytes_read) / spread.median_ms,
        bytes_read,
        spread,
        machine: watch.machine(compute),
    }))
}
