//! Which blocks a tier has, and which of them go when it is full.
use kvist_store::Regions;
use std::collections::{BTreeMap, HashMap};

/// In which order a full tier drops its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TierOrder {
    /// The least recently used first, as memory does.
    #[default]
    Lru,
    /// In the order in which they were written, as a log on a disk does: it is a ring of regions, each of which is emptied at once before
    /// it is written again. A block that is read from one of the next regions to go, a tenth of them and two at least, is written again.
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

/// A log of blocks, of which each write takes the next place. Its regions are those of a server's disk.
#[derive(Clone, Copy)]
struct Ring {
    regions: Regions,
    region_blocks: u64,
}

impl Ring {
    fn new(capacity_bytes: u64, block_bytes: u64) -> Ring {
        let mut regions = Regions::new(capacity_bytes, block_bytes);
        // A server's disk is not as small as that.
        regions.n = regions.n.max(2);
        Ring { regions, region_blocks: regions.blocks_each(block_bytes).max(1) }
    }

    /// The region of a place; places are counted from 1 on.
    fn region(&self, place: u64) -> u64 {
        place.saturating_sub(1) / self.region_blocks
    }

    /// Whether what was written `at` a place is still there when the place `tick` is written.
    fn stays(&self, at: u64, tick: u64) -> bool {
        self.region(at) >= self.regions.first(self.region(tick))
    }

    /// Whether what was written `at` a place goes soon.
    fn goes_soon(&self, at: u64, tick: u64) -> bool {
        self.regions.is_old(self.region(at), self.region(tick))
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
                Some(ring) => ring.stays(at, self.tick),
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

    /// A log against a plain one: regions in a queue, of which the oldest is emptied when the last empty one is taken.
    #[test]
    fn a_log_is_overwritten_in_turn() {
        const REGION_BYTES: u64 = 16 << 20;
        const BLOCK: u64 = 1_000_000; // 16 in a region, beside what a disk stores with them
        for (n_regions, n_old, seed) in [(8, 2, 1), (12, 2, 2), (24, 2, 3), (40, 4, 4)] {
            let mut random = SplitMix64(seed);
            let mut contents = Contents::new(Some(n_regions * REGION_BYTES), BLOCK, TierOrder::InTurn);
            let mut regions = VecDeque::from([Vec::new()]);
            let (mut n_rewritten, mut n_dropped) = (0, 0);
            // Those that are old are so from the moment when a region is emptied.
            let mut is_full = false;
            let mut write = |regions: &mut VecDeque<Vec<u64>>, is_full: &mut bool, hash: u64| {
                if regions.back().unwrap().len() == 16 {
                    regions.push_back(Vec::new());
                    if regions.len() as u64 == n_regions {
                        *is_full = true;
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
                        if is_full && at < n_old {
                            regions[at]
                                .iter_mut()
                                .filter(|one| **one == hash)
                                .for_each(|one| *one = u64::MAX);
                            write(&mut regions, &mut is_full, hash);
                            n_rewritten += 1;
                        }
                    }
                    None => {
                        contents.place(&[hash]);
                        write(&mut regions, &mut is_full, hash);
                    }
                }
            }
            assert_eq!(contents.counts.dropped_blocks, n_dropped as u64, "{n_regions} regions");
            assert!(n_dropped > 500 && n_rewritten > 50, "{n_dropped} {n_rewritten}");
        }
    }

    /// What a disk stores beside a block took no room: blocks of 1 MiB were 16 in a region of 16 MiB.
    #[test]
    fn a_region_has_room_for_less_than_its_bytes() {
        let ring = Ring::new(1 << 30, 1 << 20);
        assert_eq!((ring.regions.n, ring.region_blocks), (64, 15));
        // Small blocks take whole pages.
        assert_eq!(Ring::new(1 << 30, 100).region_blocks, 4_072);
        // One that is larger than a region makes larger ones.
        assert_eq!(Ring::new(1 << 30, 20 << 20).region_blocks, 1);
        assert_eq!(Ring::new(10, 20).region_blocks, 4_072);
    }

    /// Uses keep a block in memory, and not in a log.
    #[test]
    fn a_lookup_is_a_use_of_memory_alone() {
        for (order, stays) in [(TierOrder::Lru, true), (TierOrder::InTurn, false)] {
            let mut contents = Contents::new(Some(64 << 20), 4 << 20, order);
            contents.place(&[1, 2]);
            for hash in 10..40 {
                contents.look_up(&[1, 2]);
                contents.place(&[hash]);
            }
            assert_eq!((contents.has(1), contents.has(2)), (stays, stays));
        }
    }
}
