//! A map that forgets what was added to it longest ago.
use kvist_store::BlockKey;
use std::collections::{HashMap, VecDeque};

/// A few megabytes.
pub(super) const MOST: usize = 1 << 16;

#[derive(Default)]
pub struct Recent<V> {
    values: HashMap<BlockKey, V>,
    /// The same keys, in the order in which they were added.
    order: VecDeque<BlockKey>,
}

impl<V> Recent<V> {
    /// That it takes when it is full. A hash table has up to twice as many places as entries, each with a byte of its own, and a queue
    /// grows likewise.
    pub const BYTES: u64 =
        (2 * MOST * (size_of::<(BlockKey, V)>() + 1 + size_of::<BlockKey>()) + 4096) as u64;
}

impl<V: Default> Recent<V> {
    pub fn get(&self, key: &BlockKey) -> Option<&V> {
        self.values.get(key)
    }

    pub fn get_mut(&mut self, key: &BlockKey) -> Option<&mut V> {
        self.values.get_mut(key)
    }

    /// The keys of values of which this is true, in the order in which they were added.
    pub fn keys_where(&mut self, mut is_so: impl FnMut(&mut V) -> bool) -> Vec<BlockKey> {
        let Recent { values, order } = self;
        order.iter().filter(|key| values.get_mut(key).is_some_and(&mut is_so)).copied().collect()
    }

    /// Adds a key with the default value, unless it is there. Returns the oldest key if that is forgotten for it.
    pub fn add(&mut self, key: BlockKey) -> Option<BlockKey> {
        if self.values.contains_key(&key) {
            return None;
        }
        self.values.insert(key, V::default());
        self.order.push_back(key);
        if self.values.len() <= MOST {
            return None;
        }
        let oldest = self.order.pop_front()?;
        self.values.remove(&oldest);
        Some(oldest)
    }

    /// The value of a key, which is [added](Self::add) first.
    pub fn entry(&mut self, key: BlockKey) -> &mut V {
        self.add(key);
        self.values.entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_store::KeyChain;

    #[test]
    fn the_oldest_key_is_forgotten_first() {
        let keys = KeyChain::root(b"a model", "").keys(&(0..MOST as u32 + 2).collect::<Vec<_>>(), 1);
        let mut recent = Recent::default();
        for (i, &key) in keys[..MOST].iter().enumerate() {
            *recent.entry(key) = i;
        }
        *recent.entry(keys[1]) += 100; // used again, and no younger for it
        assert_eq!((recent.get(&keys[0]), recent.get(&keys[1])), (Some(&0), Some(&101)));
        keys[MOST..].iter().for_each(|&key| *recent.entry(key) = 7);
        assert_eq!(keys[..3].iter().map(|key| recent.get(key)).collect::<Vec<_>>(), [None, None, Some(&2)]);
        assert_eq!((recent.values.len(), recent.order.len()), (MOST, MOST));
    }
}
