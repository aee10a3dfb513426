//! A flat cache of keys, for measuring a policy on a stream of block ids that no sequence uses.
//!
//! It has no notion of prefixes: any block may be evicted, a parent before its children. Replays and comparisons of
//! policies use it; a server does not.
use super::{EvictionPolicy, Order, Use};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A fixed maximum number of keys, evicted in the order of a policy.
pub struct Flat {
    entries: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    keys: Vec<u64>, // [entries]
    free: Vec<u32>,
    resident: FlatEntries,
}

/// The result of a touch. `K` is a key in a [`Flat`], an entry in [`FlatEntries`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched<K = u64> {
    /// The key was cached.
    pub hit: bool,
    /// The key that was evicted to make space.
    pub evicted: Option<K>,
}

impl Flat {
    /// Makes an empty cache. With capacity 0 nothing ever hits; capacity `u32::MAX` is never reached.
    pub fn new(capacity_blocks: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        Flat {
            entries: HashMap::default(),
            keys: Vec::new(),
            free: Vec::new(),
            resident: FlatEntries::new(capacity_blocks, policy),
        }
    }

    /// Number of cached keys.
    pub fn len(&self) -> u32 {
        self.resident.order.len()
    }
    /// Whether no key is cached.
    pub fn is_empty(&self) -> bool {
        self.resident.order.is_empty()
    }
    /// Whether `key` is cached. Does not count as a use.
    pub fn contains(&self, key: u64) -> bool {
        self.entries.contains_key(&key)
    }

    /// Uses `key`, and inserts it if it is not cached, evicting when full. A policy that
    /// [bypasses](EvictionPolicy::bypasses) may decline to insert it; then the result is no hit and no eviction.
    pub fn touch_or_insert(&mut self, key: u64, at: &Use) -> Touched {
        if let Some(&entry) = self.entries.get(&key) {
            let Touched { hit, .. } = self.resident.touch_or_insert(entry, at);
            return Touched { hit, evicted: None };
        }
        let entry = self.free.pop().unwrap_or(self.keys.len() as u32);
        if entry as usize == self.keys.len() {
            self.keys.push(key);
        }
        self.keys[entry as usize] = key;
        let evicted = self.resident.touch_or_insert(entry, at).evicted;
        if self.resident.contains(entry) {
            self.entries.insert(key, entry);
        } else {
            self.free.push(entry);
        }
        let evicted = evicted.map(|entry| {
            self.entries.remove(&self.keys[entry as usize]);
            self.free.push(entry);
            self.keys[entry as usize]
        });
        Touched { hit: false, evicted }
    }
}

/// Like [`Flat`], for callers that number their keys densely: nothing is hashed.
pub struct FlatEntries {
    capacity_blocks: u32,
    policy: Box<dyn EvictionPolicy>,
    order: Order,
}

impl FlatEntries {
    /// See [`Flat::new`].
    pub fn new(capacity_blocks: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        FlatEntries { capacity_blocks, policy, order: Order::default() }
    }
    /// See [`Flat::contains`].
    pub fn contains(&self, entry: u32) -> bool {
        self.order.contains(entry)
    }

    /// See [`Flat::touch_or_insert`].
    pub fn touch_or_insert(&mut self, entry: u32, at: &Use) -> Touched<u32> {
        if self.order.contains(entry) {
            let rank = self.policy.used(entry, at);
            self.order.update(entry, rank);
            return Touched { hit: true, evicted: None };
        }
        if self.capacity_blocks == 0 {
            return Touched::default();
        }
        let full = self.order.len() == self.capacity_blocks;
        let competes = self.policy.bypasses();
        let mut evicted = None;
        if full && !competes {
            evicted = self.evict();
        }
        self.order.insert(entry, self.policy.stored(entry, at));
        if full && competes {
            evicted = self.evict().filter(|&first| first != entry);
        }
        Touched { hit: false, evicted }
    }

    fn evict(&mut self) -> Option<u32> {
        let entry = self.order.pop()?;
        self.policy.removed(entry);
        Some(entry)
    }
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014). Ids of traces are small consecutive numbers, which it
/// spreads. Keys are not chosen by an adversary, and the map is never iterated.
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

#[cfg(test)]
mod tests {
    use super::Mix;
    use std::collections::BTreeSet;
    use std::hash::Hasher;

    /// Numbers and byte strings hash without collisions, and their lowest and highest bits vary.
    #[test]
    fn hashes_are_spread() {
        let of = |write: &dyn Fn(&mut Mix)| {
            let mut mix = Mix::default();
            write(&mut mix);
            mix.finish()
        };
        let numbers: Vec<u64> = (0..256).map(|i| of(&|mix| mix.write_u64(i))).collect();
        let bytes: Vec<u64> = (0..=255).map(|i: u8| of(&|mix| mix.write(&[7, i]))).collect();
        for hashes in [numbers, bytes] {
            assert_eq!(hashes.iter().collect::<BTreeSet<_>>().len(), 256);
            for shift in [0, 57] {
                let groups: BTreeSet<u64> = hashes.iter().map(|hash| (hash >> shift) & 127).collect();
                assert!(groups.len() > 64, "{} of 128 groups behind bit {shift}", groups.len());
            }
        }
    }
}
