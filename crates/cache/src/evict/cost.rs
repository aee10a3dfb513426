//! Evicts the least value per byte: recompute cost × likelihood of reuse ÷ bytes.
//!
//! The value function of Cherkasova: *Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
//! policy*, HP Laboratories HPL-98-69R1, 1998. GDSF ages blocks by a clock that advances with every eviction. This
//! policy estimates the likelihood of reuse by a use rate that decays with a half-life (see [`decay`](super::decay)),
//! so ageing follows time and not the pressure on the cache. Cost and bytes are those of the block's last use.
use super::decay::DecayedUses;
use super::{EvictionPolicy, Rank, Use};
use std::time::Duration;

pub(super) struct Cost {
    uses: DecayedUses,
}

impl Cost {
    pub fn new(half_life: Duration) -> Self {
        Cost { uses: DecayedUses::new(half_life) }
    }
}

/// `log2(cost · uses / bytes)`, computed as a sum of logarithms. A block that costs nothing to recompute ranks
/// lowest.
fn rank(log2_uses: f64, at: &Use) -> Rank {
    let cost = at.cost.clamp(0.0, f64::MAX).max(0.0); // `max` turns a NaN into 0
    Rank::by_score(cost.log2() + log2_uses - (at.bytes.max(1) as f64).log2(), at.tick)
}

impl EvictionPolicy for Cost {
    fn name(&self) -> &'static str {
        "cost"
    }
    fn stored(&mut self, entry: u32, at: &Use) -> Rank {
        rank(self.uses.first(entry, at.now_ns), at)
    }
    fn used(&mut self, entry: u32, at: &Use) -> Rank {
        rank(self.uses.again(entry, at.now_ns), at)
    }
    fn removed(&mut self, entry: u32) {
        self.uses.remove(entry);
    }
    fn moved(&mut self, from: u32, to: u32) {
        self.uses.relocate(from, to);
    }
}
