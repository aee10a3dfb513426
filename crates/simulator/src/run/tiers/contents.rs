//! Which blocks a tier has, and which of them go when it is full.
use std::collections::{BTreeMap, HashMap};

/// In which order a full tier drops its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TierOrder {
    /// The least recently used first, as memory does.
    #[default]
    Lru,
    /// In the order in which they were written, as a log on a disk does: it is a ring of regions, each of which is emptied at once before
    /// it is written again. A block that is read from one of the next tenth of regions to go is written again.
    InTurn,
}

/// The blocks of one tier, by the hash of the prefix that ends with them.
pub(crate) struct Contents {
    capacity_blocks: u64,
    /// `None` if it drops the least recently used blocks.
    ring: Option<Ring>,
    /// Looked up only, never iterated.
    used_at: HashMap<u64, u64, ahash::RandomState>,
    /// By last use, or write.
    order: BTreeMap<u64, u64>,
    /// Uses so far, or writes.
    tick: u64,
    pub counts: TierCounts,
}

/// A log of blocks, of which each write takes the next place.
#[derive(Clone, Copy)]
struct Ring {
    n_regions: u64,
    region_blocks: u64,
}

/// As of the disk of a server: more regions make larger ones.
const REGION_BYTES: u64 = 16 << 20;
const MOST_REGIONS: u64 = 512;

impl Ring {
    fn new(capacity_bytes: u64, block_bytes: u64) -> Ring {
        let region_bytes = REGION_BYTES.max(capacity_bytes / MOST_REGIONS).max(block_bytes);
        Ring {
            n_regions: (capacity_bytes / region_bytes).max(2),
            region_blocks: (region_bytes / block_bytes.max(1)).max(1),
        }
    }

    /// Regions before this one are empty, when the place `tick` is written: one is kept empty, to be written next.
    fn first_region(&self, tick: u64) -> u64 {
        (tick / self.region_blocks + 2).saturating_sub(self.n_regions)
    }

    /// Whether what was written `at` a place goes soon.
    fn goes_soon(&self, at: u64, tick: u64) -> bool {
        // Nothing goes before all regions have been written to.
        at / self.region_blocks + self.n_regions < tick / self.region_blocks + 2 + self.n_regions / 10
    }
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
    pub fn new(capacity_bytes: Option<u64>, block_bytes: u64, order: TierOrder) -> Contents {
        let ring = capacity_bytes.filter(|_| order == TierOrder::InTurn);
        Contents {
            capacity_blocks: capacity_bytes.map_or(u64::MAX, |bytes| bytes / block_bytes.max(1)),
            ring: ring.map(|bytes| Ring::new(bytes, block_bytes)),
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
        if self.ring.is_some() {
            return;
        }
        for &hash in hashes.iter().rev() {
            if self.has(hash) {
                self.touch(hash);
            }
        }
    }

    /// These blocks are read.
    pub fn read(&mut self, hashes: &[u64]) {
        let Some(ring) = self.ring else { return };
        for &hash in hashes {
            if let Some(&at) = self.used_at.get(&hash)
                && ring.goes_soon(at, self.tick)
            {
                self.touch(hash);
                self.counts.written_blocks += 1;
                self.make_room();
            }
        }
        self.counts.blocks = self.order.len() as u64;
    }

    /// Blocks of one prompt, in order, are here from now on.
    pub fn place(&mut self, hashes: &[u64]) {
        for &hash in hashes.iter().rev() {
            // What a log has it does not write again.
            if self.ring.is_none() || !self.has(hash) {
                self.touch(hash);
                self.make_room();
            }
        }
        self.counts.blocks = self.order.len() as u64;
        self.counts.peak_blocks = self.counts.peak_blocks.max(self.counts.blocks);
    }

    fn make_room(&mut self) {
        while let Some((&at, _)) = self.order.first_key_value() {
            let stays = match self.ring {
                Some(ring) => at / ring.region_blocks >= ring.first_region(self.tick),
                None => self.order.len() as u64 <= self.capacity_blocks,
            };
            if stays {
                return;
            }
            let Some((_, hash)) = self.order.pop_first() else { return };
            self.used_at.remove(&hash);
            self.counts.dropped_blocks += 1;
        }
    }

    /// Begins to count anew, with the blocks that are here.
    pub fn restart_counts(&mut self) {
        let blocks = self.counts.blocks;
        self.counts = TierCounts { blocks, peak_blocks: blocks, ..TierCounts::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;
    use std::collections::VecDeque;

    /// A log against a plain one: regions in a queue, of which the oldest is emptied.
    #[test]
    fn a_log_is_overwritten_in_turn() {
        const BLOCK: u64 = 1 << 20; // 16 in a region
        for (n_regions, seed) in [(4, 1), (12, 2), (24, 3), (40, 4)] {
            let mut random = SplitMix64(seed);
            let mut contents = Contents::new(Some(n_regions * REGION_BYTES), BLOCK, TierOrder::InTurn);
            // Places are counted from 1 on, so the first region has one less.
            let mut regions = VecDeque::from([vec![u64::MAX]]);
            let (mut n_rewritten, mut n_dropped) = (0, 0);
            let mut write = |regions: &mut VecDeque<Vec<u64>>, hash: u64| {
                if regions.back().unwrap().len() == 16 {
                    regions.push_back(Vec::new());
                    if regions.len() as u64 == n_regions {
                        let gone = regions.pop_front().unwrap();
                        n_dropped += gone.iter().filter(|hash| **hash != u64::MAX).count();
                    }
                }
                regions.back_mut().unwrap().push(hash);
            };
            for _ in 0..6_000 {
                let hash = u64::from(random.below(n_regions as u32 * 20));
                let at = regions.iter().position(|region| region.contains(&hash));
                assert_eq!(contents.has(hash), at.is_some());
                match at {
                    Some(at) => {
                        contents.read(&[hash]);
                        // Which regions go next is known when as many are full as there may be.
                        let n_empty = (n_regions - 1).saturating_sub(regions.len() as u64);
                        if at as u64 + n_empty < n_regions / 10 {
                            regions[at]
                                .iter_mut()
                                .filter(|one| **one == hash)
                                .for_each(|one| *one = u64::MAX);
                            write(&mut regions, hash);
                            n_rewritten += 1;
                        }
                    }
                    None => {
                        contents.place(&[hash]);
                        write(&mut regions, hash);
                    }
                }
            }
            assert_eq!(contents.counts.dropped_blocks, n_dropped as u64, "{n_regions} regions");
            assert!(n_dropped > 500 && (n_rewritten > 50) == (n_regions >= 10), "{n_dropped} {n_rewritten}");
        }
    }

    /// Uses keep a block in memory, and not in a log.
    #[test]
    fn a_lookup_is_a_use_of_memory_alone() {
        for (order, stays) in [(TierOrder::Lru, true), (TierOrder::InTurn, false)] {
            let mut contents = Contents::new(Some(4 * REGION_BYTES), REGION_BYTES / 4, order);
            contents.place(&[1, 2]);
            for hash in 10..40 {
                contents.look_up(&[1, 2]);
                contents.place(&[hash]);
            }
            assert_eq!((contents.has(1), contents.has(2)), (stays, stays));
        }
    }
}
