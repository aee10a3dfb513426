//! Cached blocks that a tier should have got and has not: with [`Write::Through`](super::Write::Through) they are copied when they are
//! about to be evicted.
//!
//! A copy is left out while too many bytes are on their way, and a write can fail later, when the block is long in the index. Most of
//! these blocks are copied again when a prompt hits them; this is for those that are never looked up before their eviction.
use super::orders::NamedBlock;
use kvist_cache::{BlockId, Cache, CachedBlock, GroupId};
use std::collections::BTreeMap;

/// Of a block, in a tree whose nodes are half full.
pub(super) const UNSAVED_BYTES: u64 = 40;

/// At most an entry for each block of the naming group, because it is by number.
#[derive(Default)]
pub(super) struct Unsaved {
    /// The hash of each block, by its number. Other content may have the number by now, with another hash.
    hashes: BTreeMap<u32, u64>,
}

impl Unsaved {
    pub fn add(&mut self, blocks: impl IntoIterator<Item = NamedBlock>) {
        self.hashes.extend(blocks.into_iter().map(|NamedBlock { block, hash }| (block, hash)));
    }

    pub fn remove(&mut self, blocks: impl IntoIterator<Item = NamedBlock>) {
        for NamedBlock { block, hash } in blocks {
            if self.hashes.get(&block) == Some(&hash) {
                self.hashes.remove(&block);
            }
        }
    }

    /// These blocks have just been put into the prefix index, so what was known of their numbers is of other blocks.
    pub fn begin_anew(&mut self, blocks: &[CachedBlock], naming: GroupId) {
        if !self.hashes.is_empty() {
            for number in blocks.iter().filter_map(|block| block.in_group(naming)) {
                self.hashes.remove(&number);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Forgets blocks that are cached no more, until it finds one that is. Returns whether there is one.
    pub fn any_cached(&mut self, cache: &Cache, group: GroupId) -> bool {
        while let Some((&block, &hash)) = self.hashes.first_key_value() {
            if cache.hash_of(BlockId { group, block }) == Some(hash) {
                return true;
            }
            self.hashes.pop_first();
        }
        false
    }

    /// Forgets a block. Returns whether it was there.
    pub fn take(&mut self, block: &CachedBlock, naming: GroupId) -> bool {
        let number = block.in_group(naming);
        number.and_then(|number| self.hashes.remove(&number)).is_some_and(|hash| hash == block.hash)
    }

    /// Cached blocks have other numbers now.
    pub fn moved(&mut self, renamed: &BTreeMap<BlockId, BlockId>, naming: GroupId) {
        let number = |block: u32| renamed.get(&BlockId { group: naming, block }).map_or(block, |to| to.block);
        self.hashes =
            std::mem::take(&mut self.hashes).into_iter().map(|(block, hash)| (number(block), hash)).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_of_the_memory_holds() {
        for n in [1_000u32, 30_000] {
            let (mut unsaved, up) = (Unsaved::default(), |i| NamedBlock { block: i, hash: u64::from(i) });
            let allocated = allocation_counter::measure(|| unsaved.add((0..n).map(up)));
            let (bound, bytes) = (UNSAVED_BYTES * u64::from(n), allocated.bytes_current as u64);
            assert!((bound / 3..bound).contains(&bytes), "{n} blocks: {bytes} of {bound}");
            // Other content takes the place of what was there.
            unsaved.add((0..n).map(|i| NamedBlock { block: i, hash: 1 }));
            assert_eq!(unsaved.hashes.len(), n as usize);
        }
    }
}
