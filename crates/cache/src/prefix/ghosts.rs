//! Hashes of evicted prefixes, so that a miss can be explained as an eviction.
use super::as_is::AsIs;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, RandomState};

/// The last `capacity` evicted prefixes by hash; the oldest are dropped first. Two prefixes with the same hash are
/// not distinguished: that makes one answer in 2^64 wrong, and it only affects an explanation.
pub(super) struct Ghosts {
    capacity: usize,
    order: VecDeque<u64>,
    counts: HashMap<u64, u32, BuildHasherDefault<AsIs>>,
    /// A random seed, so that users cannot craft prompts whose hashes share a bucket.
    seed: u64,
}

impl Ghosts {
    pub fn new(capacity: usize) -> Self {
        Ghosts {
            capacity,
            order: VecDeque::new(),
            counts: HashMap::default(),
            seed: RandomState::new().hash_one(0),
        }
    }
    fn bucket(&self, hash: u64) -> u64 {
        let product = u128::from(hash ^ self.seed) * 0x9E37_79B9_7F4A_7C15;
        (product >> 64) as u64 ^ product as u64
    }
    pub fn remember(&mut self, hash: u64) {
        let hash = self.bucket(hash);
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
    pub fn contains(&self, hash: u64) -> bool {
        self.counts.contains_key(&self.bucket(hash))
    }
    pub fn clear(&mut self) {
        self.order.clear();
        self.counts.clear();
    }
}
