//! First in, first out: later uses do not change the rank.
//!
//! Belady: *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal 5(2), 1966.
//! 16 bytes per entry.
use super::{EvictionPolicy, PerEntry, Rank, Use};

#[derive(Default)]
pub(super) struct Fifo {
    stored: PerEntry<u64>, // [entries], tick
}

impl EvictionPolicy for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }
    fn stored(&mut self, entry: u32, at: &Use) -> Rank {
        self.stored.set(entry, at.tick);
        Rank::by(at.tick, at.tick)
    }
    fn used(&mut self, entry: u32, _at: &Use) -> Rank {
        let tick = self.stored.get(entry);
        Rank::by(tick, tick)
    }
    fn removed(&mut self, entry: u32) {
        self.stored.clear(entry);
    }
    fn moved(&mut self, from: u32, to: u32) {
        self.stored.relocate(from, to);
    }
}
