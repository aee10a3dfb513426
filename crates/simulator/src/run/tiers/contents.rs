//! Which blocks a tier has, and which of them go when it is full.
use std::collections::{BTreeMap, HashMap};

/// The blocks of one tier, by the hash of the prefix that ends with them. A full tier drops the least recently used ones.
pub(crate) struct Contents {
    capacity_blocks: u64,
    /// Looked up only, never iterated.
    used_at: HashMap<u64, u64, ahash::RandomState>,
    /// By last use.
    order: BTreeMap<u64, u64>,
    /// Uses so far.
    tick: u64,
    pub counts: TierCounts,
}

/// What happened to a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierCounts {
    pub blocks: u64,
    pub peak_blocks: u64,
    pub written_blocks: u64,
    pub dropped_blocks: u64,
}

impl Contents {
    /// Nothing yet. `capacity_bytes`: `None` without bound.
    pub fn new(capacity_bytes: Option<u64>, block_bytes: u64) -> Contents {
        Contents {
            capacity_blocks: capacity_bytes.map_or(u64::MAX, |bytes| bytes / block_bytes.max(1)),
            used_at: HashMap::default(),
            order: BTreeMap::new(),
            tick: 0,
            counts: TierCounts::default(),
        }
    }

    pub fn has(&self, hash: u64) -> bool {
        self.used_at.contains_key(&hash)
    }

    /// Makes `hash` the most recently used block, and adds it if it is not there.
    fn touch(&mut self, hash: u64) {
        self.tick += 1;
        if let Some(before) = self.used_at.insert(hash, self.tick) {
            self.order.remove(&before);
        }
        self.order.insert(self.tick, hash);
    }

    /// A prompt with these blocks, in order, was looked up: those that are here are used. A prompt uses its first block most,
    /// because a block without those before it is of no use.
    pub fn look_up(&mut self, hashes: &[u64]) {
        for &hash in hashes.iter().rev() {
            if self.has(hash) {
                self.touch(hash);
            }
        }
    }

    /// Blocks of one prompt, in order, are here from now on.
    pub fn place(&mut self, hashes: &[u64]) {
        hashes.iter().rev().for_each(|&hash| self.touch(hash));
        while self.order.len() as u64 > self.capacity_blocks
            && let Some((_, hash)) = self.order.pop_first()
        {
            self.used_at.remove(&hash);
            self.counts.dropped_blocks += 1;
        }
        self.counts.blocks = self.order.len() as u64;
        self.counts.peak_blocks = self.counts.peak_blocks.max(self.counts.blocks);
    }

    /// Begins to count anew, with the blocks that are here.
    pub fn restart_counts(&mut self) {
        let blocks = self.counts.blocks;
        self.counts = TierCounts { blocks, peak_blocks: blocks, ..TierCounts::default() };
    }
}
