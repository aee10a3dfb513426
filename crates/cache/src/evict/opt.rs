//! The upper bound: evicts what is used farthest in the future, and does not cache a new block that would be evicted
//! first.
//!
//! Belady: *A study of replacement algorithms for a virtual-storage computer*, IBM Systems Journal 5(2), 1966 (MIN);
//! optimal by Mattson et al., 1970. With bypass: McFarling: *Cache replacement with dynamic exclusion*, ISCA 1992.
//! It needs the whole stream in advance, so it is available in replays only.
use super::{EvictionPolicy, Rank, Use};
use std::collections::HashMap;

pub(super) struct Opt;

fn rank(at: &Use) -> Rank {
    Rank::by(at.next_use.map_or(0, |next| u64::MAX - next), at.tick)
}

impl EvictionPolicy for Opt {
    fn name(&self) -> &'static str {
        "opt"
    }
    fn stored(&mut self, _entry: u32, at: &Use) -> Rank {
        rank(at)
    }
    fn used(&mut self, _entry: u32, at: &Use) -> Rank {
        rank(at)
    }
    fn removed(&mut self, _entry: u32) {}
    fn bypasses(&self) -> bool {
        true
    }
}

/// For every use in `stream`, the index of the next use of the same key. One backward pass, O(n).
pub fn next_uses(stream: &[u64]) -> Vec<Option<u64>> {
    let mut later = HashMap::new();
    let mut next: Vec<_> =
        stream.iter().enumerate().rev().map(|(i, &key)| later.insert(key, i as u64)).collect();
    next.reverse();
    next
}
