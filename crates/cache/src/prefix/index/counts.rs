//! Two counters that an index keeps next to its tree.
use crate::prefix::tree::Node;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// For each block that begins a prompt, by the hash of its key: under how many salts it does. An explanation then
/// need not search every salt. One answer in 2^64 is wrong, and it only affects an explanation.
#[derive(Default)]
pub(super) struct FirstBlocks {
    hasher: RandomState,
    counts: HashMap<u64, u32>,
}

impl FirstBlocks {
    pub fn add(&mut self, key: &[u32]) {
        *self.counts.entry(self.hasher.hash_one(key)).or_default() += 1;
    }
    pub fn remove(&mut self, key: &[u32]) {
        let hash = self.hasher.hash_one(key);
        if let Some(count) = self.counts.get_mut(&hash) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&hash);
            }
        }
    }
    pub fn any(&self, key: &[u32]) -> bool {
        self.counts.contains_key(&self.hasher.hash_one(key))
    }
}

/// For each node, the number of sequences whose deepest node it is.
#[derive(Default)]
pub(super) struct SequenceEnds(Vec<u32>);

impl SequenceEnds {
    pub fn add(&mut self, node: Node) {
        if self.0.len() <= node as usize {
            self.0.resize(node as usize + 1, 0);
        }
        self.0[node as usize] += 1;
    }
    pub fn remove(&mut self, node: Node) {
        self.0[node as usize] -= 1;
    }
    pub fn any(&self, node: Node) -> bool {
        self.0.get(node as usize).is_some_and(|&n| n > 0)
    }
}
