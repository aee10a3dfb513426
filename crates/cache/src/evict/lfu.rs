//! Least frequently used. The count restarts when a block is evicted and cached again (in-cache LFU). Ties are broken
//! by least recent use.
//!
//! Aho, Denning, Ullman: *Principles of optimal page replacement*, Journal of the ACM 18(1), 1971: LFU is optimal if
//! uses are independent. Breslau, Cao, Fan, Phillips, Shenker: *Web caching and Zipf-like distributions*, INFOCOM
//! 1999, for the in-cache variant. 16 bytes per entry.
use super::{EvictionPolicy, PerEntry, Rank, Use};

#[derive(Default)]
pub(super) struct Lfu {
    n_uses: PerEntry<u64>, // [entries]
}

impl EvictionPolicy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }
    fn stored(&mut self, entry: u32, at: &Use) -> Rank {
        self.n_uses.set(entry, 1);
        Rank::by(1, at.tick)
    }
    fn used(&mut self, entry: u32, at: &Use) -> Rank {
        let n_uses = self.n_uses.get(entry) + 1;
        self.n_uses.set(entry, n_uses);
        Rank::by(n_uses, at.tick)
    }
    fn removed(&mut self, entry: u32) {
        self.n_uses.clear(entry);
    }
    fn moved(&mut self, from: u32, to: u32) {
        self.n_uses.relocate(from, to);
    }
}
