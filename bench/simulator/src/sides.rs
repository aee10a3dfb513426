//! One run of one side, in a process of its own: reads the trace, simulates, reports.
use crate::cost::Rates;
use anyhow::{Context, Result, ensure};
use dynamo_mocker::common::perf_model::PerfModel;
use dynamo_mocker::common::protocols::MockerConfig;
use dynamo_mocker::loadgen::Trace as MockerTrace;
use dynamo_mocker::replay::{self, ReplayRouterMode, SlaThresholds};
use kvist_cache::evict::Parameters;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_scheduler::Config;
use kvist_simulator::report::{Objectives, Report};
use kvist_simulator::run::{Options, run};
use kvist_simulator::trace::{ReadOptions, Trace};
use kvist_simulator::zero_service::{BlockStream, TouchOrder, replay as replay_zero_service};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub const MAX_BATCH: u32 = 256;
pub const MAX_BATCH_TOKENS: u32 = 8192;
/// Of an id of the trace.
pub const TOKENS_PER_ID: u32 = 512;

/// What a simulation came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Headline {
    pub completed: u64,
    pub output_tokens: u64,
    pub ttft_mean_s: f64,
    pub ttft_p99_s: f64,
    pub end_to_end_mean_s: f64,
    pub duration_s: f64,
    pub token_hit_ratio: f64,
    /// Requests in the batch, over time; the rival does not say.
    pub mean_batch: Option<f64>,
}

/// Ours. With `itl`, the time between tokens too, which the rival always notes.
pub fn kvist(trace: &Path, block_tokens: u32, rates: Rates, itl: bool) -> Result<Headline> {
    let requests = Trace::read(trace, &ReadOptions::default())?.into_arrival_order();
    let group = GroupSpec {
        capacity_tokens: u32::MAX,
        visibility: Visibility::FULL,
        max_step_tokens: MAX_BATCH_TOKENS,
    };
    let vocabulary = Vocabulary::Ids { tokens_per_id: TOKENS_PER_ID };
    let prefix = Some(PrefixSpec { vocabulary, ..PrefixSpec::default() });
    let cache = Cache::paged(&PagedSpec { block_tokens, groups: vec![group], rollback_tokens: 0, prefix })?;
    let scheduler = Config { max_batch: MAX_BATCH, max_batch_tokens: MAX_BATCH_TOKENS, ..Config::default() };
    let options = Options { scheduler, itl, ..Options::default() };
    let run = run(&requests, cache, &rates, &options, None, &mut |_| ())?;
    let report = Report::of(&run.record, &Objectives::default());
    let ttft = report.latency.ttft_s.context("nothing finished")?;
    let output_tokens = run.record.requests.iter().map(|row| u64::from(row.output_tokens)).sum();
    Ok(Headline {
        completed: report.requests.finished,
        output_tokens,
        ttft_mean_s: ttft.mean,
        ttft_p99_s: ttft.p99,
        end_to_end_mean_s: report.latency.end_to_end_s.context("nothing finished")?.mean,
        duration_s: report.throughput.duration_s,
        token_hit_ratio: report.cache.token_hit_ratio,
        mean_batch: Some(report.load.mean_running_requests),
    })
}

/// How the rival is given its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// `simulate_trace_file…`: all tokens of all requests are made at the beginning.
    File,
    /// `simulate_loaded_trace…`: a request's tokens are made when it arrives.
    Loaded,
}

/// Blocks that nothing of this trace can fill: distinct prompt blocks, and outputs.
fn endless_blocks(block_tokens: u32) -> u32 {
    110_000_000 / block_tokens + 40_000
}

/// The rival's.
pub fn mocker(trace: &Path, block_tokens: u32, rates: Rates, entry: Entry) -> Result<Headline> {
    let mut config = MockerConfig::from_value(serde_json::json!({"engine": {
        "backend": "vllm",
        "block_size": block_tokens,
        "num_gpu_blocks": endless_blocks(block_tokens),
        "max_num_seqs": MAX_BATCH,
        "max_num_batched_tokens": MAX_BATCH_TOKENS,
        "enable_prefix_caching": true,
        "enable_chunked_prefill": true,
    }}))?;
    config.perf_model = Arc::new(PerfModel::from_ais_callback(Arc::new(rates)));
    let report = match entry {
        Entry::File => replay::simulate_trace_file(config, trace, TOKENS_PER_ID as usize, 1, 1.0)?,
        Entry::Loaded => replay::simulate_loaded_trace_with_router_mode_and_options(
            config,
            None,
            None,
            MockerTrace::from_mooncake(trace, TOKENS_PER_ID as usize)?,
            1,
            1.0,
            ReplayRouterMode::RoundRobin,
            false,
            None,
            SlaThresholds::default(),
        )?,
    };
    Ok(Headline {
        completed: report.request_counts.completed_requests as u64,
        output_tokens: report.request_counts.total_output_tokens as u64,
        ttft_mean_s: report.latency.ttft.mean_ms / 1e3,
        ttft_p99_s: report.latency.ttft.p99_ms / 1e3,
        end_to_end_mean_s: report.latency.e2e.mean_ms / 1e3,
        duration_s: report.throughput.duration_ms / 1e3,
        token_hit_ratio: report.first_admission_prefix_cache_reused_ratio,
        mean_batch: None,
    })
}

/// A zero-service replay, reading apart.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ZeroService {
    pub touches: u64,
    pub hit_blocks: u64,
    /// CPU seconds of all replays.
    pub replay_s: f64,
    /// Seconds to cut the prompts into numbered blocks, once.
    pub cut_s: f64,
}

pub fn zero_service(trace: &Path, block_tokens: u32, capacity: Option<u32>) -> Result<ZeroService> {
    let requests = Trace::read(trace, &ReadOptions::default())?.requests;
    let begin = Instant::now();
    let stream = BlockStream::of(&requests, Some(block_tokens))?;
    let cut_s = begin.elapsed().as_secs_f64();
    // A short replay is repeated until it can be measured.
    let n_replays = (4_000_000 / stream.total_blocks()).max(1);
    let begin = cpu_seconds()?;
    let mut hit_blocks = None;
    for _ in 0..n_replays {
        let parameters = Parameters::default();
        let replayed = replay_zero_service(&stream, "lru", &parameters, capacity, TouchOrder::Reverse)?;
        let before = hit_blocks.replace(replayed.cache.hit_blocks);
        ensure!(before.is_none_or(|before| before == replayed.cache.hit_blocks), "two replays differ");
    }
    let touches = stream.total_blocks() * n_replays;
    Ok(ZeroService { touches, hit_blocks: hit_blocks.unwrap_or(0), replay_s: cpu_seconds()? - begin, cut_s })
}

/// User and system time of this process.
pub fn cpu_seconds() -> Result<f64> {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF)?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// The most memory this process ever had, in bytes: Linux counts it in KiB.
pub fn peak_bytes() -> Result<u64> {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF)?;
    Ok(u64::try_from(usage.max_rss())? * 1024)
}
