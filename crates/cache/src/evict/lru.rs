//! Least recently used.
//!
//! Mattson, Gecsei, Slutz, Traiger: *Evaluation techniques for storage hierarchies*, IBM Systems Journal 9(2), 1970.
//! Ranks increase with every use, so [`Order`](super::Order) keeps them in a list: O(1).
use super::{EvictionPolicy, Rank, Use};

pub(super) struct Lru;

impl EvictionPolicy for Lru {
    fn name(&self) -> &'static str {
        "lru"
    }
    fn stored(&mut self, _entry: u32, at: &Use) -> Rank {
        Rank::by_recency(at.tick)
    }
    fn used(&mut self, _entry: u32, at: &Use) -> Rank {
        Rank::by_recency(at.tick)
    }
    fn by_recency(&self) -> bool {
        true
    }
    fn removed(&mut self, _entry: u32) {}
}
