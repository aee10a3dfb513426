//! Keys of evicted blocks, so that a miss can say that the prefix was here once.
use std::collections::{HashMap, VecDeque};

/// The last `capacity` evicted prefixes by hash, oldest forgotten first. Two prefixes with one hash are told apart by
/// nobody: a wrong `evicted` is one in 2^64, and a word in an explanation.
pub(super) struct Ghosts {
    capacity: usize,
    order: VecDeque<u64>,
    counts: HashMap<u64, u32>,
}

impl Ghosts {
    pub fn new(capacity: usize) -> Self {
        Ghosts { capacity, order: VecDeque::new(), counts: HashMap::new() }
    }
    pub fn remember(&mut self, hash: u64) {
        if self.capacity == 0 {
            return;
        }
        if self.order.len() == self.capacity
            && let Some(oldest) = self.order.pop_front()
            && let Some(count) = self.counts.get_mut(&oldest)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&oldest);
            }
        }
        self.order.push_back(hash);
        *self.counts.entry(hash).or_default() += 1;
    }
    pub fn knows(&self, hash: u64) -> bool {
        self.counts.contains_key(&hash)
    }
    pub fn clear(&mut self) {
        self.order.clear();
        self.counts.clear();
    }
}
