//! Least frequently used, where a use counts half as much after every half-life. Long half-lives approach `lfu`,
//! short ones `lru`.
//!
//! Lee et al., *LRFU*, 2001: see [`decay`](super::decay), which has the formula.
use super::decay::DecayedUses;
use super::{EvictionPolicy, Rank, Use};
use std::time::Duration;

pub(super) struct LfuDecay {
    uses: DecayedUses,
}

impl LfuDecay {
    pub fn new(half_life: Duration) -> Self {
        LfuDecay { uses: DecayedUses::new(half_life) }
    }
}

impl EvictionPolicy for LfuDecay {
    fn name(&self) -> &'static str {
        "lfu_decay"
    }
    fn stored(&mut self, entry: u32, at: &Use) -> Rank {
        Rank::by_score(self.uses.first(entry, at.now_ns), at.tick)
    }
    fn used(&mut self, entry: u32, at: &Use) -> Rank {
        Rank::by_score(self.uses.again(entry, at.now_ns), at.tick)
    }
    fn removed(&mut self, entry: u32) {
        self.uses.remove(entry);
    }
    fn moved(&mut self, from: u32, to: u32) {
        self.uses.relocate(from, to);
    }
}
