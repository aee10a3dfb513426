//! How a store on a disk divides its room: into regions, which it overwrites in turn. The rules are here, apart from the store,
//! because the simulator's disk follows them too.
use crate::Frame;

pub(crate) const PAGE: u64 = 4096;
pub(crate) const REGION_BYTES: u64 = 16 << 20;
/// Above that, regions get larger: each is an open file.
pub(crate) const MOST_REGIONS: u64 = 512;
/// The most that foyer stores beside a block: its own header and the key, to the end of a page, and the index of a region.
pub(crate) const OVERHEAD_BYTES: u64 = 2 * PAGE;
/// What foyer writes before a frame: its header, and the key.
const HEADER_BYTES: u64 = 36 + 32;
/// A page with an index precedes so many blocks.
const BLOCKS_PER_INDEX: u64 = (PAGE - 12) / 24;

/// How many regions a store has, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    pub n: u64,
    pub bytes: u64,
}

impl Regions {
    /// A store with fewer is not opened.
    pub const LEAST: u64 = 8;

    /// Of a new store.
    pub fn new(capacity_bytes: u64, largest_block_bytes: u64) -> Regions {
        let share = (capacity_bytes / MOST_REGIONS).next_multiple_of(PAGE);
        let bytes = room_bytes(largest_block_bytes).max(REGION_BYTES).max(share);
        Regions { n: capacity_bytes / bytes, bytes }
    }

    /// How many blocks of this size are in a full region.
    pub fn blocks_each(&self, block_bytes: u64) -> u64 {
        let entry = block_bytes.saturating_add(Frame::HEAD_BYTES as u64 + HEADER_BYTES);
        let entry = entry.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        let run = entry.saturating_mul(BLOCKS_PER_INDEX).saturating_add(PAGE);
        let rest = (self.bytes % run).saturating_sub(PAGE) / entry;
        self.bytes / run * BLOCKS_PER_INDEX + rest
    }

    /// Regions are counted from 0 on, in the order in which they are written, and go in that order: those before this one are gone while
    /// `current` is being written. One is always empty, to be written next.
    pub fn first(&self, current: u64) -> u64 {
        (current + 2).saturating_sub(self.n)
    }

    /// Whether a region is one of the next to go, while `current` is being written. A block that is read from there is written again.
    pub fn is_old(&self, region: u64, current: u64) -> bool {
        // foyer marks them when it takes the last empty region, and empties the first one at once.
        current + 1 >= self.n && region < self.first(current) + self.n_old()
    }

    /// How many are old: a tenth of all, and two at least. With one or none, what is used would go with all else, unless it is read
    /// just before.
    pub(crate) fn n_old(&self) -> u64 {
        (self.n / 10).max((self.n / 4).min(2))
    }
}

/// A bound of what a block takes in a region, with the index that precedes it.
pub(crate) fn room_bytes(block_bytes: u64) -> u64 {
    let bytes = block_bytes.saturating_add(Frame::HEAD_BYTES as u64 + OVERHEAD_BYTES);
    bytes.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_to_go_are_a_tenth_and_two_at_least() {
        let old = |n| Regions { n, bytes: REGION_BYTES }.n_old();
        let expected =
            [(0, 0), (3, 0), (4, 1), (8, 2), (12, 2), (19, 2), (20, 2), (29, 2), (30, 3), (512, 51)];
        assert_eq!(expected.map(|(n, _)| (n, old(n))), expected);
    }

    /// Blocks are put into a region one by one, an index before every 170.
    #[test]
    fn a_region_is_full_of_whole_blocks() {
        let mut random = kvist_testing::SplitMix64(1);
        for _ in 0..300 {
            let most = 1 << random.below(20);
            let block_bytes = u64::from(random.below(most));
            let regions = Regions { n: 8, bytes: u64::from(2 + random.below(4096)) * PAGE };
            let (mut used, mut n) = (0, 0);
            loop {
                let index = if n % BLOCKS_PER_INDEX == 0 { PAGE } else { 0 };
                let entry = (block_bytes + 156).div_ceil(PAGE) * PAGE;
                if used + index + entry > regions.bytes {
                    break;
                }
                used += index + entry;
                n += 1;
            }
            assert_eq!(regions.blocks_each(block_bytes), n, "{block_bytes} in {}", regions.bytes);
        }
        for block_bytes in [0, 1, 4096, 1 << 20, 1 << 30, u64::MAX] {
            let regions = Regions::new(1 << 40, block_bytes);
            assert!(regions.blocks_each(block_bytes) > 0 || regions.n == 0, "{block_bytes}");
        }
    }
}
