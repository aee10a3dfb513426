//! What tiers below the cache did.
use super::{CacheCounts, ratio};
use crate::run::tiers::TierCounts;
use kvist_scheduler::TierCounters;
use serde::Serialize;

/// One tier, fastest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
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

impl TierRecord {
    pub(crate) fn note(&mut self, counts: &TierCounts) {
        self.blocks = counts.blocks;
        self.peak_blocks = counts.peak_blocks;
        self.written_blocks = counts.written_blocks;
        self.dropped_blocks = counts.dropped_blocks;
    }

    /// The same tier of another worker.
    fn add(&mut self, other: &TierRecord) {
        self.loaded_tokens += other.loaded_tokens;
        self.blocks += other.blocks;
        self.peak_blocks = self.peak_blocks.max(other.peak_blocks);
        self.written_blocks += other.written_blocks;
        self.dropped_blocks += other.dropped_blocks;
    }
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

impl TiersRecord {
    /// Adds the same tiers of another worker, or of another life of a worker.
    pub(crate) fn add(&mut self, other: &TiersRecord) {
        self.tiers.iter_mut().zip(&other.tiers).for_each(|(tier, other)| tier.add(other));
        for (sum, n) in [
            (&mut self.loaded_tokens, other.loaded_tokens),
            (&mut self.loads, other.loads),
            (&mut self.regained_tokens, other.regained_tokens),
            (&mut self.failed_loads, other.failed_loads),
            (&mut self.late_loads, other.late_loads),
            (&mut self.wasted_tokens, other.wasted_tokens),
            (&mut self.declined_tokens, other.declined_tokens),
            (&mut self.load_ns, other.load_ns),
            (&mut self.stored_blocks, other.stored_blocks),
            (&mut self.skipped_blocks, other.skipped_blocks),
        ] {
            *sum = sum.saturating_add(n);
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
    pub(crate) fn of(record: &TiersRecord, cache: &CacheCounts) -> TiersReport {
        TiersReport {
            loaded_token_ratio: ratio(record.loaded_tokens, cache.total_tokens),
            reused_token_ratio: ratio(record.loaded_tokens + cache.hit_tokens, cache.total_tokens),
            record: record.clone(),
        }
    }

    /// The figures used to compare runs, by name.
    pub(crate) fn figures(&self) -> [(&'static str, f64); 3] {
        [
            ("loaded_token_ratio", self.loaded_token_ratio),
            ("reused_token_ratio", self.reused_token_ratio),
            ("late_loads", self.record.late_loads as f64),
        ]
    }
}
