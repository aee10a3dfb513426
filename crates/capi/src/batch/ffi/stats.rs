//! The exported figures of batches.
#![allow(unsafe_code, non_camel_case_types)]
use super::job::KVIST_MAX_TIERS;
use super::{kvist_batch, with_batch};
use crate::batch::Batch;
use crate::drafts::{counts_of, kvist_speculation};
use crate::ffi::out;
use crate::status::kvist_status;
use kvist_engine::serving::{EngineStats, StoreStats};
use std::ffi::c_char;

/// A figure that a tier does not tell.
pub const KVIST_UNKNOWN: u64 = 0xFFFF_FFFF_FFFF_FFFF;

/// What a tier holds, and what happened to it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_tier_stats {
    /// "ram", "disk", "redis", "s3" or "fs"; null-terminated.
    pub name: [c_char; 16],
    /// Bytes that it holds, and that it can hold; `KVIST_UNKNOWN` if it does not tell.
    pub bytes: u64,
    pub capacity_bytes: u64,
    /// Tokens that came from it.
    pub loaded_tokens: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Blocks that were not written to it, because too much was on its way.
    pub unwritten_blocks: u64,
    /// Blocks that were found damaged, evicted, or older than their time, and dropped.
    pub damaged_blocks: u64,
    pub evicted_blocks: u64,
    pub expired_blocks: u64,
}

/// Counters since the start, and occupancy at the end of the last step. Cells hold a token each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvist_batch_stats {
    /// Texts that are computed, and that wait.
    pub running: usize,
    pub waiting: usize,
    /// Cells of the cache, and of them those that texts use, those that are cached for later prompts, and those that are free.
    pub capacity_cells: u64,
    pub used_cells: u64,
    pub evictable_cells: u64,
    pub free_cells: u64,
    /// Blocks that the prefix index stored, and that were evicted from it.
    pub stored_blocks: u64,
    pub evicted_blocks: u64,
    /// Tokens of prompts that stay because of `retain_s`.
    pub retained_tokens: u64,
    /// Of recent prompts: their tokens, and those that the prefix index had.
    pub recent_prompt_tokens: u64,
    pub recent_hit_tokens: u64,
    /// Tokens that `keep` has removed.
    pub removed_tokens: u64,
    /// Bytes reserved for K and V, and bytes that attention has read.
    pub kv_bytes: u64,
    pub kv_bytes_read: u64,
    /// Seconds spent in steps.
    pub busy_s: f64,
    /// Number of tiers. The figures below are 0 without them.
    pub n_tiers: usize,
    /// Of each tier, the fastest first.
    pub tiers: [kvist_tier_stats; KVIST_MAX_TIERS],
    /// Loads that began, and of them those that failed or were late.
    pub loads: u64,
    pub failed_loads: u64,
    pub late_loads: u64,
    /// Tokens of such loads, which were computed.
    pub wasted_tokens: u64,
    /// Tokens that a tier had and that were computed because that was expected to be faster.
    pub declined_tokens: u64,
    /// Loaded tokens of preempted texts, which had lost them.
    pub regained_tokens: u64,
    /// Seconds that loads took.
    pub load_s: f64,
    /// Blocks that were copied out of the cache for the tiers, that could not be copied, and that were left out because too much was on
    /// its way.
    pub copied_blocks: u64,
    pub failed_blocks: u64,
    pub skipped_blocks: u64,
    /// Bytes on their way from and to the tiers now.
    pub load_bytes: u64,
    pub store_bytes: u64,
}

const NO_TIER: kvist_tier_stats = kvist_tier_stats {
    name: [0; 16],
    bytes: 0,
    capacity_bytes: 0,
    loaded_tokens: 0,
    errors: 0,
    unwritten_blocks: 0,
    damaged_blocks: 0,
    evicted_blocks: 0,
    expired_blocks: 0,
};

fn tier(store: &StoreStats, loaded_tokens: u64) -> kvist_tier_stats {
    let mut name = [0; 16];
    // The last one stays 0.
    for (to, from) in name[..15].iter_mut().zip(store.name.bytes()) {
        *to = from as c_char;
    }
    kvist_tier_stats {
        name,
        bytes: store.usage.bytes.unwrap_or(KVIST_UNKNOWN),
        capacity_bytes: store.usage.capacity_bytes.unwrap_or(KVIST_UNKNOWN),
        loaded_tokens,
        errors: store.errors,
        unwritten_blocks: store.unwritten_blocks,
        damaged_blocks: store.counts.damaged,
        evicted_blocks: store.counts.evicted,
        expired_blocks: store.counts.expired,
    }
}

fn stats_of(stats: &EngineStats) -> kvist_batch_stats {
    let tiers = stats.tiers.clone().unwrap_or_default();
    let counters = tiers.counters;
    let mut each = [NO_TIER; KVIST_MAX_TIERS];
    for ((place, store), loaded) in each.iter_mut().zip(&tiers.stores).zip(counters.loaded_tokens) {
        *place = tier(store, loaded);
    }
    kvist_batch_stats {
        running: stats.running,
        waiting: stats.waiting,
        capacity_cells: stats.capacity_cells,
        used_cells: stats.used_cells,
        evictable_cells: stats.evictable_cells,
        free_cells: stats.free_cells,
        stored_blocks: stats.stored_blocks,
        evicted_blocks: stats.evicted_blocks,
        retained_tokens: stats.retained_tokens,
        recent_prompt_tokens: stats.recent_hits.prompt_tokens,
        recent_hit_tokens: stats.recent_hits.hit_tokens,
        removed_tokens: stats.removed_tokens.unwrap_or(0),
        kv_bytes: stats.kv_bytes,
        kv_bytes_read: stats.kv_bytes_read,
        busy_s: stats.busy_ns as f64 / 1e9,
        n_tiers: tiers.stores.len().min(KVIST_MAX_TIERS),
        tiers: each,
        loads: counters.loads,
        failed_loads: counters.failed_loads,
        late_loads: counters.late_loads,
        wasted_tokens: counters.wasted_tokens,
        declined_tokens: counters.declined_tokens,
        regained_tokens: counters.regained_tokens,
        load_s: counters.load_ns as f64 / 1e9,
        copied_blocks: counters.stored_blocks,
        failed_blocks: counters.failed_blocks,
        skipped_blocks: counters.skipped_blocks,
        load_bytes: tiers.load_bytes,
        store_bytes: tiers.store_bytes,
    }
}

/// Writes the figures of a batch. Never waits.
///
/// # Safety
/// `batch` came from `kvist_batch_new`; `stats` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_describe(
    batch: *const kvist_batch,
    stats: *mut kvist_batch_stats,
) -> kvist_status {
    let run = |batch: &Batch| {
        // SAFETY: the caller keeps the contract above.
        unsafe { out(stats, "stats") }?.write(stats_of(&batch.stats()));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}

/// Writes what drafts have achieved in a batch until the end of the last step; all zeros without drafts. Never waits.
///
/// # Safety
/// `batch` came from `kvist_batch_new`; `counts` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvist_batch_speculation(
    batch: *const kvist_batch,
    counts: *mut kvist_speculation,
) -> kvist_status {
    let run = |batch: &Batch| {
        let found = batch.stats().speculation.unwrap_or_default();
        // SAFETY: the caller keeps the contract above.
        unsafe { out(counts, "counts") }?.write(counts_of(&found));
        Ok(())
    };
    // SAFETY: the caller keeps the contract above.
    unsafe { with_batch(batch, run) }
}
