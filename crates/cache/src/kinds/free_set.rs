//! A set of small numbers (the free stripes or blocks of a space) as a two-level bitmap. Finding the next member
//! reads three words, plus one per 4,096 numbers skipped.

#[derive(Default)]
pub(super) struct FreeSet {
    words: Vec<u64>,
    /// Bit w is set if `words[w]` is not 0.
    summary: Vec<u64>,
}

impl FreeSet {
    /// Inserts the numbers `members`, growing the set as needed.
    pub fn extend(&mut self, members: std::ops::Range<u32>) {
        let n_words = self.words.len().max(members.end.div_ceil(64) as usize);
        self.words.resize(n_words, 0);
        self.summary.resize(n_words.div_ceil(64), 0);
        members.for_each(|member| self.insert(member));
    }
    pub fn insert(&mut self, member: u32) {
        let word = member as usize / 64;
        self.words[word] |= 1 << (member % 64);
        self.summary[word / 64] |= 1 << (word % 64);
    }
    pub fn remove(&mut self, member: u32) {
        let word = member as usize / 64;
        self.words[word] &= !(1 << (member % 64));
        if self.words[word] == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
    }
    /// Removes all members from `end` on.
    pub fn truncate(&mut self, end: u32) {
        while let Some(member) = self.at_or_after(end) {
            self.remove(member);
        }
    }
    pub fn contains(&self, member: u32) -> bool {
        self.words.get(member as usize / 64).is_some_and(|word| word >> (member % 64) & 1 == 1)
    }
    /// The first member at or above `member`.
    pub fn at_or_after(&self, member: u32) -> Option<u32> {
        let word = member as usize / 64;
        let here = self.words.get(word)? & (u64::MAX << (member % 64));
        if here != 0 {
            return Some(word as u32 * 64 + here.trailing_zeros());
        }
        let after = word + 1;
        let mut block = after / 64;
        let mut members = self.summary.get(block)? & (u64::MAX << (after % 64));
        while members == 0 {
            block += 1;
            members = *self.summary.get(block)?;
        }
        let word = block * 64 + members.trailing_zeros() as usize;
        Some(word as u32 * 64 + self.words[word].trailing_zeros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_next_free_member_is_found_across_words_and_blocks() {
        let n = 3 * 4096 + 70;
        let mut set = FreeSet::default();
        set.extend(0..70);
        set.extend(70..n);
        let mut model: BTreeSet<u32> = (0..n).collect();
        let mut random = kvist_testing::SplitMix64(7);
        for round in 0..40_000 {
            let member = random.below(n);
            if round % 20_000 < 19_000 || random.below(4) != 0 {
                set.remove(member);
                model.remove(&member);
            } else {
                set.insert(member);
                model.insert(member);
            }
            if round % 16 == 0 {
                let from = random.below(n + 100);
                assert_eq!(set.at_or_after(from), model.range(from..).next().copied(), "from {from}");
            }
        }
        model.iter().for_each(|&member| set.remove(member));
        assert_eq!(set.at_or_after(0), None);
    }
}
