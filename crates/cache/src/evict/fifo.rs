//! First in, first out: later uses do not change the rank.
//!
//! Belady: *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal 5(2), 1966.
//! 16 bytes per slot.
use super::{EvictionPolicy, PerSlot, Rank, Use};

#[derive(Default)]
pub(super) struct Fifo {
    stored: PerSlot<u64>, // [slots], tick
}

impl EvictionPolicy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }
    fn stored(&mut self, slot: u32, at: &Use) -> Rank {
        self.stored.set(slot, at.tick);
        Rank::by(at.tick, at.tick)
    }
    fn used(&mut self, slot: u32, _at: &Use) -> Rank {
        let tick = self.stored.get(slot);
        Rank::by(tick, tick)
    }
    fn removed(&mut self, slot: u32) {
        self.stored.clear(slot);
    }
}
