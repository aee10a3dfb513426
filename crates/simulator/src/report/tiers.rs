//! What tiers below the cache did.
use super::{CacheCounts, ratio};
use kvist_scheduler::TierCounters;
use serde::Serialize;

/// One tier, fastest first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierRecord {
    pub name: String,
    /// `None`: without bound.
    pub capacity_bytes: Option<u64>,
    /// Tokens loaded from this tier.
    pub loaded_tokens: u64,
    /// Blocks in it at the end.
    pub blocks: u64,
    /// The most blocks that it had at a time.
    pub peak_blocks: u64,
    /// Blocks written to it.
    pub written_blocks: u64,
    /// Blocks that it had no room for any more. A slower tier may still have them.
    pub dropped_blocks: u64,
}

/// Counters of all tiers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TiersRecord {
    pub tiers: Vec<TierRecord>,
    pub loaded_tokens: u64,
    pub loads: u64,
    /// Loaded tokens of preempted requests, which had computed them before.
    pub regained_tokens: u64,
    /// Loads of blocks that were dropped after they had been found.
    pub failed_loads: u64,
    /// Loads that took so long that their tokens were computed.
    pub late_loads: u64,
    /// Tokens of failed and late loads.
    pub wasted_tokens: u64,
    /// Tokens that a tier had, and that were computed because that was faster.
    pub declined_tokens: u64,
    /// Time of loads, over those that arrived in time.
    pub load_ns: u64,
    /// Blocks copied to the tiers.
    pub stored_blocks: u64,
    /// Blocks not copied, because too many were on their way.
    pub skipped_blocks: u64,
}

impl TiersRecord {
    pub(crate) fn of(tiers: Vec<TierRecord>, counters: &TierCounters) -> TiersRecord {
        TiersRecord {
            loaded_tokens: counters.loaded_tokens.iter().sum(),
            loads: counters.loads,
            regained_tokens: counters.regained_tokens,
            failed_loads: counters.failed_loads,
            late_loads: counters.late_loads,
            wasted_tokens: counters.wasted_tokens,
            declined_tokens: counters.declined_tokens,
            load_ns: counters.load_ns,
            stored_blocks: counters.stored_blocks,
            skipped_blocks: counters.skipped_blocks,
            tiers,
        }
    }
}

/// What tiers achieved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TiersReport {
    #[serde(flatten)]
    pub record: TiersRecord,
    /// Prompt tokens loaded from a tier ÷ prompt tokens.
    pub loaded_token_ratio: f64,
    /// Prompt tokens found in the cache or loaded ÷ prompt tokens.
    pub reused_token_ratio: f64,
}

impl TiersReport {
    pub(super) fn of(record: &TiersRecord, cache: &CacheCounts) -> TiersReport {
        TiersReport {
            loaded_token_ratio: ratio(record.loaded_tokens, cache.total_tokens),
            reused_token_ratio: ratio(record.loaded_tokens + cache.hit_tokens, cache.total_tokens),
            record: record.clone(),
        }
    }
}
