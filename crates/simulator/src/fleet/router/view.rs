//! What the router knows of the caches: which workers store the block with which hash.
//!
//! A hash names a block and all before it. A cache of blocks that every position sees evicts children before their parents,
//! so a worker that stores a block stores all blocks before it, and the workers along a prompt become fewer and fewer.
use ahash::{HashMap, HashMapExt};
use std::collections::hash_map::Entry;

/// Most blocks are stored by one worker; those of popular beginnings by many.
enum Holders {
    One(u32),
    Many(Set),
}

/// A set of workers, as bits.
pub(in crate::fleet) struct Set {
    len: u32,
    words: Box<[u64]>,
}

impl Set {
    fn bit(worker: u32) -> (usize, u64) {
        (worker as usize / 64, 1 << (worker % 64))
    }
    fn contains(&self, worker: u32) -> bool {
        let (word, bit) = Set::bit(worker);
        self.words[word] & bit != 0
    }
    fn insert(&mut self, worker: u32) {
        let (word, bit) = Set::bit(worker);
        self.len += u32::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
    }
    fn remove(&mut self, worker: u32) {
        let (word, bit) = Set::bit(worker);
        self.len -= u32::from(self.words[word] & bit != 0);
        self.words[word] &= !bit;
    }
    fn iter(&self) -> impl Iterator<Item = u32> {
        (0..).step_by(64).zip(&self.words).flat_map(|(first, &word)| {
            let rest = |word: &u64| Some(word & (word - 1)).filter(|&rest| rest != 0);
            std::iter::successors(Some(word).filter(|&word| word != 0), rest)
                .map(move |word| first + word.trailing_zeros())
        })
    }
}

/// The workers that store one block.
#[derive(Clone, Copy)]
pub(in crate::fleet) struct HoldersOf<'v>(&'v Holders);

impl HoldersOf<'_> {
    pub fn len(self) -> u32 {
        match self.0 {
            Holders::One(_) => 1,
            Holders::Many(set) => set.len,
        }
    }
    pub fn contains(self, worker: u32) -> bool {
        match self.0 {
            Holders::One(one) => *one == worker,
            Holders::Many(set) => set.contains(worker),
        }
    }
    /// Calls `each` with every worker, in ascending order.
    pub fn for_each(self, mut each: impl FnMut(u32)) {
        match self.0 {
            Holders::One(one) => each(*one),
            Holders::Many(set) => set.iter().for_each(each),
        }
    }
}

pub(in crate::fleet) struct View {
    /// Never iterated to decide anything.
    holders: HashMap<u64, Holders>,
    n_workers: u32,
}

impl View {
    pub fn new(n_workers: u32) -> View {
        View { holders: HashMap::new(), n_workers }
    }

    /// `worker` stores the block with this hash from now on, or no longer.
    pub fn note(&mut self, worker: u32, hash: u64, is_stored: bool) {
        let n_words = (self.n_workers as usize).div_ceil(64);
        match (self.holders.entry(hash), is_stored) {
            (Entry::Vacant(entry), true) => {
                entry.insert(Holders::One(worker));
            }
            (Entry::Vacant(_), false) => {}
            (Entry::Occupied(mut entry), true) => match entry.get_mut() {
                Holders::One(one) if *one == worker => {}
                Holders::One(one) => {
                    let mut set = Set { len: 0, words: vec![0; n_words].into() };
                    set.insert(*one);
                    set.insert(worker);
                    entry.insert(Holders::Many(set));
                }
                Holders::Many(set) => set.insert(worker),
            },
            (Entry::Occupied(mut entry), false) => {
                if !without(entry.get_mut(), worker) {
                    entry.remove();
                }
            }
        }
    }

    /// The worker is gone. O(blocks of all workers).
    pub fn forget(&mut self, worker: u32) {
        self.holders.retain(|_, holders| without(holders, worker));
    }

    /// The workers that store the block with this hash; `None` if none does.
    pub fn holders(&self, hash: u64) -> Option<HoldersOf<'_>> {
        self.holders.get(&hash).map(HoldersOf)
    }
}

/// Removes a worker. Returns whether others are left.
fn without(holders: &mut Holders, worker: u32) -> bool {
    match holders {
        Holders::One(one) => *one != worker,
        Holders::Many(set) => {
            set.remove(worker);
            if set.len == 1 {
                let last = set.iter().next();
                last.into_iter().for_each(|one| *holders = Holders::One(one));
                return true;
            }
            set.len > 0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;
    use std::collections::{BTreeMap, BTreeSet};

    /// Compared with a plain map of sets.
    #[test]
    fn random_news() {
        let mut random = SplitMix64(5);
        let (mut view, mut plain) = (View::new(150), BTreeMap::<u64, BTreeSet<u32>>::new());
        for step in 0..20_000 {
            let (worker, hash) = (random.below(150), u64::from(random.below(40)));
            match random.below(200) {
                0 => {
                    view.forget(worker);
                    plain.values_mut().for_each(|set| _ = set.remove(&worker));
                }
                n => {
                    // Long stretches in which blocks are mostly evicted, so that sets become small again.
                    let is_stored = n % 8 < if step / 2000 % 2 == 0 { 6 } else { 1 };
                    view.note(worker, hash, is_stored);
                    let set = plain.entry(hash).or_default();
                    if is_stored {
                        set.insert(worker)
                    } else {
                        set.remove(&worker)
                    };
                }
            }
            let set = plain.get(&hash).filter(|set| !set.is_empty());
            let found = view.holders(hash);
            assert_eq!(found.map(HoldersOf::len), set.map(|set| set.len() as u32));
            if let (Some(found), Some(set)) = (found, set) {
                let mut listed = Vec::new();
                found.for_each(|worker| listed.push(worker));
                assert!(listed.iter().eq(set.iter()), "{listed:?} instead of {set:?}");
                assert_eq!(found.contains(worker), set.contains(&worker));
            }
        }
    }
}
