//! Ranges of numbers that are free or taken: what an arena has lent. A taken range never overlaps another one.
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Takes the smallest free range that is large enough, the first of equal ones: blocks of few sizes leave no holes that none of them
/// fits into. Neighbours that are free become one range. O(log n) for n free ranges.
#[derive(Debug)]
pub struct Ranges {
    /// Where free ranges begin, and how long they are.
    free: BTreeMap<usize, usize>,
    /// The same, by length.
    by_len: BTreeSet<(usize, usize)>,
    taken: usize,
}

impl Ranges {
    /// All of `0..len` is free.
    pub fn new(len: usize) -> Self {
        let mut ranges = Ranges { free: BTreeMap::new(), by_len: BTreeSet::new(), taken: 0 };
        ranges.insert(0, len);
        ranges
    }

    fn insert(&mut self, first: usize, len: usize) {
        if len > 0 {
            self.free.insert(first, len);
            self.by_len.insert((len, first));
        }
    }

    fn remove(&mut self, first: usize, len: usize) {
        self.free.remove(&first);
        self.by_len.remove(&(len, first));
    }

    /// The first number of a range of `len`, which is taken now. `None` if none is free.
    pub fn take(&mut self, len: usize) -> Option<usize> {
        let (found, first) = *self.by_len.range((len, 0)..).next()?;
        self.remove(first, found);
        self.insert(first + len, found - len);
        self.taken += len;
        Some(first)
    }

    /// Gives a range back that was taken.
    pub fn give_back(&mut self, range: Range<usize>) {
        self.taken -= range.len();
        let Range { mut start, mut end } = range;
        let before = self.free.range(..start).next_back().map(|(first, len)| (*first, *len));
        if let Some((first, len)) = before.filter(|(first, len)| first + len == start) {
            self.remove(first, len);
            start = first;
        }
        if let Some(len) = self.free.get(&end).copied() {
            self.remove(end, len);
            end += len;
        }
        self.insert(start, end - start);
    }

    /// How many numbers are taken.
    pub fn taken(&self) -> usize {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// A list of numbers that are taken.
    struct Naive(Vec<bool>);

    impl Naive {
        /// The smallest hole that is large enough, looked for number by number.
        fn take(&mut self, len: usize) -> Option<usize> {
            let (mut best, mut at) = (None, 0);
            while at < self.0.len() {
                let hole = self.0[at..].iter().take_while(|taken| !**taken).count();
                if hole >= len && best.is_none_or(|(smallest, _)| hole < smallest) {
                    best = Some((hole, at));
                }
                at += hole.max(1);
            }
            let (_, first) = best?;
            self.0[first..first + len].fill(true);
            Some(first)
        }
    }

    #[test]
    fn ranges_are_those_of_a_list_of_numbers() {
        for seed in 0..30 {
            let mut random = SplitMix64(seed);
            let len = 1 + random.index(200);
            let (mut ranges, mut naive) = (Ranges::new(len), Naive(vec![false; len]));
            let mut taken: Vec<Range<usize>> = Vec::new();
            for _ in 0..1000 {
                if random.below(5) < 3 {
                    let len = 1 + random.index(20);
                    let first = ranges.take(len);
                    assert_eq!(first, naive.take(len));
                    taken.extend(first.map(|first| first..first + len));
                } else if !taken.is_empty() {
                    let range = taken.swap_remove(random.index(taken.len()));
                    naive.0[range.clone()].fill(false);
                    ranges.give_back(range);
                }
                assert_eq!(ranges.taken(), naive.0.iter().filter(|taken| **taken).count());
            }
            taken.into_iter().for_each(|range| ranges.give_back(range));
            assert_eq!(ranges.take(len), Some(0), "all of it is one range again");
        }
    }
}
