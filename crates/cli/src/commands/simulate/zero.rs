//! `--zero-service`: replays a trace against an eviction policy alone, as if serving took no time.
use super::What;
use crate::options::wrong_usage;
use clap::ValueEnum;
use kvist_simulator::request::Request;
use kvist_simulator::zero_service::{self, BlockStream, ZeroService};

const ZERO: &str = "Zero service";

#[derive(clap::Args, Clone)]
pub struct ZeroArgs {
    /// Replay the trace against the eviction policy alone: serving takes no time, and no prefix index restricts
    /// eviction
    #[arg(long, help_heading = ZERO)]
    pub zero_service: bool,
    /// In which order a request touches its blocks
    #[arg(
        long, value_enum, default_value_t = TouchOrder::Reverse, requires = "zero_service", help_heading = ZERO
    )]
    pub touch_order: TouchOrder,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum TouchOrder {
    /// Tail to head: tails are first in line for eviction
    Reverse,
    /// Head to tail
    Forward,
}

/// `requests` in the order of the file.
pub fn replay(what: &What, requests: &[Request]) -> anyhow::Result<ZeroService> {
    let blocks = &what.blocks;
    let stream = BlockStream::of(requests, blocks.block_tokens)?;
    let order = match what.zero.touch_order {
        TouchOrder::Reverse => zero_service::TouchOrder::Reverse,
        TouchOrder::Forward => zero_service::TouchOrder::Forward,
    };
    let capacity = blocks.capacity_blocks.blocks();
    zero_service::replay(&stream, &blocks.policy, &blocks.parameters()?, capacity, order)
        .map_err(|why| wrong_usage(why.to_string()))
}

/// The figures that a sweep compares.
pub fn figures(result: &ZeroService) -> Vec<(&'static str, f64)> {
    let hits = &result.cache;
    let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    vec![
        ("block_hit_ratio", ratio(hits.hit_blocks, hits.total_blocks)),
        ("token_hit_ratio", hits.token_hit_ratio),
        ("request_hit_ratio", ratio(hits.hit_requests, result.requests)),
        ("evicted_blocks", hits.evicted_blocks as f64),
    ]
}
