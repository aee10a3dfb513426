//! `kvist bench decode` and `kvist bench prefill`: a whole model at a depth.
use super::machine::{Machine, ReadLimit, Spread, Watch};
use super::measure::{KvArgs, RunsArgs};
use super::plot;
use super::rig::element;
use super::shape::parse_lengths;
use crate::options::*;
use crate::{interrupt, json, output, progress};
use anyhow::Context;
use clap::ValueHint;
use kvist_cache::{NodeId, SeqId};
use kvist_cpu::Compute;
use kvist_device::Registry;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::Model;
use kvist_model::ModelSize;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(clap::Args)]
#[command(mut_arg("runs", |runs| runs.default_value("5")))]
pub struct Common {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    kv: KvArgs,
    /// Where the model runs: cpu, or wgpu, wgpu:N, cuda or cuda:N (GPUs, if this program has them; `kvist devices` lists
    /// them)
    #[arg(long, default_value = "cpu")]
    backend: String,
    /// Plot tokens per second over depth or length
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath)]
    plot: Option<PathBuf>,
    #[command(flatten)]
    measure: RunsArgs,
}

#[derive(clap::Args)]
pub struct DecodeArgs {
    #[command(flatten)]
    common: Common,
    /// Tokens in the cache before the measured ones; one row for each
    #[arg(long, value_name = "N,N,…", default_value = "0", value_parser = parse_depths)]
    depth: std::vec::Vec<u32>,
    /// Verify a tree of that many nodes, two children each, instead of decoding: a pass counts as one token
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    tree: Option<u32>,
    /// Tokens of a run
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: u32,
}

#[derive(clap::Args)]
pub struct PrefillArgs {
    #[command(flatten)]
    common: Common,
    /// Tokens of the prompt; one row for each
    #[arg(long, value_name = "T,T,…", default_value = "512", value_parser = parse_lengths)]
    tokens: std::vec::Vec<u32>,
    /// Tokens in the cache before the prompt
    #[arg(long, default_value_t = 0, value_name = "N")]
    depth: u32,
    /// Tokens of a step
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    chunk: u32,
}

fn parse_depths(text: &str) -> Result<Vec<u32>, String> {
    let one = |part: &str| {
        part.trim().parse().map_err(|_| format!("`{}` is not a depth: write them as 0,4096", part.trim()))
    };
    text.split(',').map(one).collect()
}

#[derive(Serialize)]
struct Row {
    version: u32,
    what: &'static str,
    model: String,
    weights: String,
    k: String,
    v: String,
    depth: u32,
    /// Tokens of a run.
    tokens: u32,
    tokens_per_s: f64,
    ms_per_token: f64,
    /// Times of whole runs.
    #[serde(flatten)]
    spread: Spread,
    /// Bytes that decoding one token reads at this depth: weights, and the visible cache.
    weight_bytes: u64,
    kv_bytes: u64,
    /// Of the host's memory, so only on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_limit_gb_per_s: Option<f64>,
    /// Time of reading these bytes alone, over the time of a token. Decode on the CPU only.
    #[serde(skip_serializing_if = "Option::is_none")]
    share_of_limit: Option<f64>,
    machine: Machine,
}

struct Bench<'a> {
    common: &'a Common,
    compute: Compute,
    registry: Registry,
    model: Arc<Model>,
    size: ModelSize,
    quiet: bool,
}

impl<'a> Bench<'a> {
    fn new(common: &'a Common, quiet: bool) -> anyhow::Result<Self> {
        let compute = common.model.compute.get()?;
        use_backend(&common.backend, &compute)?;
        let opened = common.model.open(quiet)?;
        let registry = registry(&compute);
        let size = ModelSize::of_opened(&opened, registry.device(), common.model.weights)?;
        let model = common.model.load(opened, None, &common.model.budget()?, quiet)?;
        interrupt::listen();
        Ok(Bench { compute, registry, model, common, size, quiet })
    }

    /// The rate of reading the host's memory; `None` on a GPU, whose memory is another.
    fn read_limit(&self) -> anyhow::Result<Option<ReadLimit>> {
        match self.registry.device().adapter() {
            None => ReadLimit::new(&self.compute, self.size.read_per_token).map(Some),
            Some(_) => Ok(None),
        }
    }

    fn config(&self, tokens: u32) -> CacheConfig {
        CacheConfig {
            backend: backend_id(&self.common.backend).into(),
            k: self.common.kv.k,
            v: self.common.kv.v,
            ..CacheConfig::new(tokens)
        }
    }

    /// A session with `depth` tokens of a fixed random text, and room for `more`.
    fn session(&self, kind: &str, depth: u32, more: u32, chunk: u32) -> anyhow::Result<Option<ModelSession>> {
        let tokens = depth.checked_add(more).ok_or_else(|| wrong_usage("--depth: too large"))?;
        let mut config =
            CacheConfig { kind: kind.into(), max_step_tokens: chunk.min(tokens), ..self.config(tokens) };
        if config.kind_traits().many_sequences {
            config.max_rows = more;
        }
        let mut session = ModelSession::new(&self.model, &self.registry, &config)?;
        let bar = progress::bar("filling", u64::from(depth), self.quiet);
        let mut whole = true;
        if depth > 0 {
            session.prefill(SeqId::ONLY, &self.text(0, depth), &mut |done| {
                bar.set_position(done as u64);
                whole = !interrupt::interrupted();
                whole
            })?;
        }
        bar.finish_and_clear();
        Ok(whole.then_some(session))
    }

    fn text(&self, from: u32, n: u32) -> Vec<u32> {
        let vocab = self.model.config().vocab as f32;
        let token = |i| ((element(0, i) * 0.5 + 0.5) * vocab) as u32;
        (from..from + n).map(|i| token(u64::from(i)).min(vocab as u32 - 1)).collect()
    }

    /// Rewinds to `depth` tokens.
    fn rewind(session: &mut ModelSession, depth: u32) -> anyhow::Result<()> {
        match session.cache().rewinds() {
            Some(mut rewind) => Ok(rewind.rewind(depth)?),
            None => anyhow::bail!("a contiguous cache rewinds"),
        }
    }

    fn row(
        &self,
        what: &'static str,
        depth: u32,
        tokens: u32,
        runs: &[Duration],
        limit: Option<&ReadLimit>,
        watch: &Watch,
    ) -> anyhow::Result<Row> {
        let compute = &self.compute;
        let config = self.config(depth.max(1));
        let plan = MemoryPlan::of_session(&self.size.config, &self.registry, &config)?;
        let kv_bytes = plan.kv_bytes_visible(&self.size.config, &config) * u64::from(depth > 0);
        let spread = Spread::of(runs);
        let ms_per_token = spread.median_ms / f64::from(tokens);
        let bytes = self.size.read_per_token + kv_bytes;
        Ok(Row {
            version: json::VERSION,
            what,
            model: self.model.name().into(),
            weights: self.common.model.weights.to_string(),
            k: self.common.kv.k.to_string(),
            v: self.common.kv.v.to_string(),
            depth,
            tokens,
            tokens_per_s: 1e3 / ms_per_token,
            ms_per_token,
            weight_bytes: self.size.read_per_token,
            kv_bytes,
            read_limit_gb_per_s: limit.map(|limit| limit.rate() / 1e9),
            share_of_limit: limit.filter(|_| what == "decode").map(|limit| limit.ms(bytes) / ms_per_token),
            spread,
            machine: Machine {
                adapter: self.registry.device().adapter().map(str::to_string),
                ..watch.machine(compute)
            },
        })
    }

    fn show(&self, row: &Row, first: bool) -> anyhow::Result<()> {
        if self.common.measure.json {
            return output::show_json_line(row);
        }
        if first {
            output::show(&format!(
                "{}; {}, K {} V {}\n\n| | depth | tokens | tokens/s | ms per token | of the read limit |\n|---|--:|--:|--:|--:|--:|\n",
                row.machine, row.model, row.k, row.v
            ))?;
        }
        let share = row.share_of_limit.map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
        let Row { what, depth, tokens, tokens_per_s, ms_per_token, .. } = row;
        output::show(&format!(
            "| {what} | {depth} | {tokens} | {tokens_per_s:.1} | {ms_per_token:.3} | {share} |\n"
        ))
    }

    fn plot(&self, x: &str, rows: &[Row], at: fn(&Row) -> u32) -> anyhow::Result<()> {
        let Some(path) = &self.common.plot else { return Ok(()) };
        let points = rows.iter().map(|r| (f64::from(at(r).max(1)), r.tokens_per_s)).collect();
        let name = format!("K {} V {}", self.common.kv.k, self.common.kv.v);
        plot::write(path, self.model.name(), x, "tokens/s", vec![(name, points)])
    }
}

pub fn decode(args: DecodeArgs, quiet: bool) -> anyhow::Result<()> {
    let bench = Bench::new(&args.common, quiet)?;
    let compute = &bench.compute;
    let parents: Option<Vec<_>> =
        args.tree.map(|n| (0..n).map(|i| (i > 0).then(|| NodeId(i.saturating_sub(1) / 2))).collect());
    let (kind, what) = if parents.is_some() { ("tree", "a tree") } else { ("contiguous", "decode") };
    let mut rows = Vec::new();
    for depth in &args.depth {
        if interrupt::interrupted() {
            break;
        }
        let Some(mut session) = bench.session(
            kind,
            *depth,
            args.tokens.max(args.tree.unwrap_or(0)),
            args.tree.unwrap_or(0).max(512),
        )?
        else {
            break;
        };
        let mut limit = bench.read_limit()?;
        let text = bench.text(*depth, args.tokens.max(args.tree.unwrap_or(0)));
        let watch = Watch::start();
        let runs = args.common.measure.measure(compute, limit.as_mut(), quiet, || {
            let started = Instant::now();
            for token in &text[..args.tokens as usize] {
                match &parents {
                    None => {
                        let feed = SequenceInput::chain(SeqId::ONLY, std::slice::from_ref(token));
                        session.forward(&[feed], LogitRows::LastOfEach)?;
                    }
                    Some(parents) => {
                        let nodes = &text[..parents.len()];
                        session.forward(
                            &[SequenceInput::draft_tree(SeqId::ONLY, nodes, parents)],
                            LogitRows::All,
                        )?;
                        session.cache().trees().context("a tree cache has trees")?.discard(SeqId::ONLY)?;
                    }
                }
            }
            let taken = started.elapsed();
            if parents.is_none() {
                Bench::rewind(&mut session, *depth)?;
            }
            Ok(Some(taken))
        })?;
        let row = bench.row(what, *depth, args.tokens, &runs, limit.as_ref(), &watch)?;
        bench.show(&row, rows.is_empty())?;
        rows.push(row);
    }
    bench.plot("depth (tokens)", &rows, |r| r.depth)
}

pub fn prefill(args: PrefillArgs, quiet: bool) -> anyhow::Result<()> {
    let bench = Bench::new(&args.common, quiet)?;
    let compute = &bench.compute;
    let mut rows = Vec::new();
    for tokens in &args.tokens {
        if interrupt::interrupted() {
            break;
        }
        let Some(mut session) = bench.session("contiguous", args.depth, *tokens, args.chunk)? else { break };
        let mut limit = bench.read_limit()?;
        let text = bench.text(args.depth, *tokens);
        let watch = Watch::start();
        let runs = args.common.measure.measure(compute, limit.as_mut(), quiet, || {
            let started = Instant::now();
            let fed = session.prefill(SeqId::ONLY, &text, &mut |_| !interrupt::interrupted())?;
            let taken = started.elapsed();
            Bench::rewind(&mut session, args.depth)?;
            Ok((fed == text.len()).then_some(taken))
        })?;
        if runs.is_empty() {
            break;
        }
        let row = bench.row("prefill", args.depth, *tokens, &runs, limit.as_ref(), &watch)?;
        bench.show(&row, rows.is_empty())?;
        rows.push(row);
    }
    bench.plot("tokens of the prompt", &rows, |r| r.tokens)
}
