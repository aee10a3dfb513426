//! A map that forgets what was added to it longest ago.
use kvist_store::BlockKey;
use std::collections::{HashMap, VecDeque};

/// A few megabytes.
const MOST: usize = 1 << 16;

#[derive(Default)]
pub struct Recent<V> {
    values: HashMap<BlockKey, V>,
    /// The same keys, in the order in which they were added.
    order: VecDeque<BlockKey>,
}

impl<V: Default> Recent<V> {
    pub fn get(&self, key: &BlockKey) -> Option<&V> {
        self.values.get(key)
    }

    pub fn get_mut(&mut self, key: &BlockKey) -> Option<&mut V> {
        self.values.get_mut(key)
    }

    /// The value of a key. A new key gets the default one, and the oldest key may be forgotten for it.
    pub fn entry(&mut self, key: BlockKey) -> &mut V {
        if !self.values.contains_key(&key) {
            self.order.push_back(key);
            if self.order.len() > MOST
                && let Some(oldest) = self.order.pop_front()
            {
                self.values.remove(&oldest);
            }
        }
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
