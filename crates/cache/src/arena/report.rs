//! The contents of an arena, as data.
use super::Arena;
use crate::ids::SeqId;

/// The state of an arena.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArenaReport {
    /// Name of the allocator.
    pub allocator: &'static str,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of blocks.
    pub total_blocks: u32,
    /// Blocks that handles reserve.
    pub used_blocks: u32,
    /// Blocks that no handle reserves.
    pub free_blocks: u32,
    /// The longest handle that could be allocated now.
    pub largest_free_run: u32,
    /// Ascending by id.
    pub sequences: Vec<ArenaSequence>,
    /// Event counts so far.
    pub counters: ArenaCounters,
}

/// One sequence of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaSequence {
    /// The sequence's id.
    pub seq: SeqId,
    /// Tokens stored.
    pub used_tokens: u32,
    /// Tokens that fit its handle.
    pub capacity_tokens: u64,
    /// First block.
    pub start: u32,
    /// Number of usable blocks.
    pub len: u32,
    /// Number of blocks taken.
    pub reserved: u32,
}

/// Events since the arena was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaCounters {
    /// Sequences made.
    pub allocated: u64,
    /// Sequences removed, evicted ones included.
    pub freed: u64,
    /// Sequences evicted.
    pub evicted: u64,
    /// Handles grown, in place or by moving.
    pub grown: u64,
    /// Blocks copied because handles moved.
    pub blocks_copied: u64,
    /// Requests refused for lack of space.
    pub refused: u64,
    /// Appends that halted.
    pub halted: u64,
    /// Resizes committed.
    pub resized: u64,
}

impl ArenaReport {
    /// 1 − largest free run ÷ free blocks: the share of the free blocks that the largest possible request cannot use.
    /// 0 if nothing is free.
    pub fn external_fragmentation(&self) -> f64 {
        external_fragmentation(self.free_blocks, self.largest_free_run)
    }

    /// 1 − used tokens ÷ the capacity of the reserved blocks in tokens. 0 if nothing is reserved.
    pub fn internal_fragmentation(&self) -> f64 {
        let used: u64 = self.sequences.iter().map(|s| u64::from(s.used_tokens)).sum();
        match u64::from(self.used_blocks) * u64::from(self.block_tokens) {
            0 => 0.0,
            reserved => 1.0 - used as f64 / reserved as f64,
        }
    }

    /// The sequence that reserves each block, `[total_blocks]`.
    pub fn block_map(&self) -> Vec<Option<SeqId>> {
        let mut map = vec![None; self.total_blocks as usize];
        for s in &self.sequences {
            map[s.start as usize..(s.start + s.reserved) as usize].fill(Some(s.seq));
        }
        map
    }
}

pub(super) fn external_fragmentation(free_blocks: u32, largest_free_run: u32) -> f64 {
    match free_blocks {
        0 => 0.0,
        free => 1.0 - f64::from(largest_free_run) / f64::from(free),
    }
}

impl Arena {
    /// The state of the arena. O(sequences).
    pub fn report(&self) -> ArenaReport {
        let sequences = self.sequences.iter().map(|(&seq, s)| ArenaSequence {
            seq,
            used_tokens: s.used_tokens,
            capacity_tokens: s.handle.tokens(self.block_tokens),
            start: s.handle.start,
            len: s.handle.len,
            reserved: s.handle.reserved,
        });
        let (total_blocks, free_blocks) = (self.allocator.n_blocks(), self.allocator.n_free());
        ArenaReport {
            allocator: self.allocator.name(),
            block_tokens: self.block_tokens,
            total_blocks,
            used_blocks: total_blocks - free_blocks,
            free_blocks,
            largest_free_run: self.allocator.largest_free_run(),
            sequences: sequences.collect(),
            counters: self.counters,
        }
    }
}
