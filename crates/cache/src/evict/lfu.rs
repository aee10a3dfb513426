//! Least frequently used. The count restarts when a block is evicted and cached again (in-cache LFU). Ties are broken
//! by least recent use.
//!
//! Aho, Denning, Ullman: *Principles of optimal page replacement*, Journal of the ACM 18(1), 1971: LFU is optimal if
//! uses are independent. Breslau, Cao, Fan, Phillips, Shenker: *Web caching and Zipf-like distributions*, INFOCOM
//! 1999, for the in-cache variant. 16 bytes per slot.
use super::{EvictionPolicy, PerSlot, Rank, Use};

#[derive(Default)]
pub(super) struct Lfu {
    n_uses: PerSlot<u64>, // [slots]
}

impl EvictionPolicy for Lfu {
    fn name(&self) -> &'static str {
        "lfu"
    }
    fn stored(&mut self, slot: u32, at: &Use) -> Rank {
        self.n_uses.set(slot, 1);
        Rank::by(1, at.tick)
    }
    fn used(&mut self, slot: u32, at: &Use) -> Rank {
        let n_uses = self.n_uses.get(slot) + 1;
        self.n_uses.set(slot, n_uses);
        Rank::by(n_uses, at.tick)
    }
    fn removed(&mut self, slot: u32) {
        self.n_uses.clear(slot);
    }
}
