//! A cache of keys without structure: what a policy is worth on a stream of block ids, nobody holding any.
//!
//! It knows no prefixes: any block may go, a parent before its children. Replays and comparisons of policies use it;
//! a server does not.
use super::{Order, Policy, Use};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// At most a fixed number of keys, which leave in the order of a policy.
pub struct Flat {
    capacity_blocks: u32,
    slots: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    keys: Vec<u64>, // [slots]
    free: Vec<u32>,
    policy: Box<dyn Policy>,
    order: Order,
}

/// What a touch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// The key was here.
    pub hit: bool,
    /// The key that left to make room.
    pub evicted: Option<u64>,
}

impl Flat {
    /// Empty. With capacity 0 nothing ever hits; `u32::MAX` is never reached.
    pub fn new(capacity_blocks: u32, policy: Box<dyn Policy>) -> Self {
        Flat {
            capacity_blocks,
            slots: HashMap::default(),
            keys: Vec::new(),
            free: Vec::new(),
            policy,
            order: Order::default(),
        }
    }

    /// Keys in it.
    pub fn len(&self) -> u32 {
        self.order.len()
    }
    /// Is no key in it?
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
    /// Is `key` in it? Does not count as a use.
    pub fn contains(&self, key: u64) -> bool {
        self.slots.contains_key(&key)
    }

    /// Use `key`, and insert it if it is not here, evicting when full. A policy that
    /// [bypasses](Policy::bypasses) may leave the newcomer out instead: then nothing hit and nothing left.
    pub fn touch_or_insert(&mut self, key: u64, at: &Use) -> Touched {
        if let Some(&slot) = self.slots.get(&key) {
            let rank = self.policy.used(slot, at);
            self.order.update(slot, rank);
            return Touched { hit: true, evicted: None };
        }
        if self.capacity_blocks == 0 {
            return Touched::default();
        }
        let full = self.len() == self.capacity_blocks;
        let competes = self.policy.bypasses();
        let mut evicted = None;
        if full && !competes {
            evicted = self.evict();
        }
        let slot = self.free.pop().unwrap_or(self.keys.len() as u32);
        if slot as usize == self.keys.len() {
            self.keys.push(key);
        }
        self.keys[slot as usize] = key;
        self.slots.insert(key, slot);
        self.order.insert(slot, self.policy.stored(slot, at));
        if full && competes {
            evicted = self.evict().filter(|&first| first != key);
        }
        Touched { hit: false, evicted }
    }

    fn evict(&mut self) -> Option<u64> {
        let slot = self.order.pop()?;
        let key = self.keys[slot as usize];
        self.slots.remove(&key);
        self.policy.forgotten(slot);
        self.free.push(slot);
        Some(key)
    }
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014): ids of traces are small successive numbers, which it
/// spreads; keys are not chosen by an adversary, and the map is never iterated.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(self.0 ^ u64::from(byte)));
    }
    fn write_u64(&mut self, key: u64) {
        let z = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.0 = z ^ (z >> 31);
    }
}
