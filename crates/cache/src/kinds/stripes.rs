//! Reference-counted cells, handed out in aligned stripes of 16, so that sequences which decode in turn do not
//! shred each other into runs of one cell.
use crate::plan::{CellCopy, GroupPlan, grown};
use crate::run::Run;

/// Cells that one sequence fills before another may start among them.
pub(super) const STRIPE: u32 = 16;

/// 4 bytes per cell, one byte and a little over one bit per stripe; for the cells that were ever reached, not for all
/// that the capacity promises.
pub(super) struct Stripes {
    capacity: u32,
    refs: Vec<u32>, // the first cells; all behind them are free
    used_in_stripe: Vec<u8>,
    free_stripes: StripeSet,
    used: u32,
    high_water: u32,
}

/// How far a `prepare` has come in its search for cells; starts at the default.
#[derive(Default)]
pub(super) struct Cursor {
    fresh_stripe: u32,
    stray_cell: u32,
}

impl Stripes {
    pub fn new(capacity: u32) -> Self {
        Stripes {
            capacity,
            refs: Vec::new(),
            used_in_stripe: Vec::new(),
            free_stripes: StripeSet::default(),
            used: 0,
            high_water: 0,
        }
    }
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
    /// Keep books for `cells` cells at least, by doubling.
    fn reach(&mut self, cells: u32) {
        if cells as usize > self.refs.len() {
            let cells = grown(cells, self.capacity);
            self.refs.resize(cells as usize, 0);
            let before = self.used_in_stripe.len() as u32;
            self.used_in_stripe.resize(cells.div_ceil(STRIPE) as usize, 0);
            self.free_stripes.extend(before..self.used_in_stripe.len() as u32);
        }
    }
    /// The first free stripe that is not before `stripe`.
    fn fresh_stripe(&self, stripe: u32) -> Option<u32> {
        let behind = stripe.max(self.used_in_stripe.len() as u32);
        let behind = (behind < self.capacity.div_ceil(STRIPE)).then_some(behind);
        self.free_stripes.at_or_after(stripe).or(behind)
    }
    pub fn used(&self) -> u32 {
        self.used
    }
    pub fn free(&self) -> u32 {
        self.capacity() - self.used
    }
    /// One past the highest occupied cell.
    pub fn high_water(&self) -> u32 {
        self.high_water
    }

    /// Claim `n` free cells in `out` for a sequence whose last cell is `tail - 1`: the rest of its stripe, then
    /// fresh stripes, lowest first, then, under pressure, any free cell. The caller has counted that enough are
    /// free for all claims of the plan.
    pub fn place(&self, cursor: &mut Cursor, tail: Option<u32>, mut n: u32, out: &mut GroupPlan) {
        let mut tail = tail;
        while n > 0 {
            let run = match tail.and_then(|tail| self.rest_of_stripe(tail, n, out)) {
                Some(run) => run,
                None => match self.fresh_stripe(cursor.fresh_stripe) {
                    Some(stripe) => {
                        cursor.fresh_stripe = stripe + 1;
                        let start = stripe * STRIPE;
                        Run { start, len: n.min(STRIPE).min(self.capacity() - start) }
                    }
                    None => self.stray(cursor, n, out),
                },
            };
            out.claim(run, self.capacity);
            n -= run.len;
            tail = Some(run.end());
        }
    }

    fn is_open(&self, cell: u32, out: &GroupPlan) -> bool {
        self.refs.get(cell as usize).is_none_or(|refs| *refs == 0) && !out.claimed(cell)
    }

    /// Free cells from `cell` to the end of its stripe, if the stripe has begun before it.
    fn rest_of_stripe(&self, cell: u32, n: u32, out: &GroupPlan) -> Option<Run> {
        if cell.is_multiple_of(STRIPE) {
            return None;
        }
        let end = cell.next_multiple_of(STRIPE).min(self.capacity()).min(cell.saturating_add(n));
        let len = (cell..end).take_while(|&c| self.is_open(c, out)).count() as u32;
        (len > 0).then_some(Run { start: cell, len })
    }

    fn stray(&self, cursor: &mut Cursor, n: u32, out: &GroupPlan) -> Run {
        loop {
            let (cell, stripe) = (cursor.stray_cell, cursor.stray_cell / STRIPE);
            assert!(
                cell < self.capacity(),
                "a plan was admitted with {} cells free of {}, and {n} of its tokens found none",
                self.free(),
                self.capacity()
            );
            let end = ((stripe + 1) * STRIPE).min(self.capacity());
            let used = self.used_in_stripe.get(stripe as usize).copied().unwrap_or(0);
            if u32::from(used) == end - stripe * STRIPE {
                cursor.stray_cell = end;
            } else if self.is_open(cell, out) {
                let len =
                    (cell..end.min(cell.saturating_add(n))).take_while(|&c| self.is_open(c, out)).count();
                cursor.stray_cell = cell + len as u32;
                return Run { start: cell, len: len as u32 };
            } else {
                cursor.stray_cell += 1;
            }
        }
    }

    /// One more holder of every cell of `run`.
    pub fn hold(&mut self, run: Run) {
        self.reach(run.end());
        for cell in run.cells() {
            self.refs[cell as usize] += 1;
            if self.refs[cell as usize] == 1 {
                self.occupy(cell);
            }
        }
    }

    /// One holder less of every cell of `run`.
    pub fn release(&mut self, run: Run) {
        for cell in run.cells() {
            let refs = &mut self.refs[cell as usize];
            assert!(*refs > 0, "cell {cell} of {run:?} is released more often than it was held");
            *refs -= 1;
            if *refs == 0 {
                self.vacate(cell);
            }
        }
        self.lower_high_water();
    }

    /// The bytes have moved; their holders move with them.
    pub fn relocate(&mut self, moves: &[CellCopy]) {
        for copy in moves {
            self.reach(copy.to + copy.len);
            for i in 0..copy.len {
                let (from, to) = (copy.from + i, copy.to + i);
                assert!(self.refs[to as usize] == 0, "cell {from} moves onto occupied cell {to}");
                self.refs[to as usize] = std::mem::take(&mut self.refs[from as usize]);
                self.occupy(to);
                self.vacate(from);
            }
        }
        self.lower_high_water();
    }

    fn occupy(&mut self, cell: u32) {
        let stripe = cell / STRIPE;
        self.used += 1;
        self.used_in_stripe[stripe as usize] += 1;
        self.free_stripes.remove(stripe);
        self.high_water = self.high_water.max(cell + 1);
    }
    fn vacate(&mut self, cell: u32) {
        let stripe = cell / STRIPE;
        self.used -= 1;
        self.used_in_stripe[stripe as usize] -= 1;
        if self.used_in_stripe[stripe as usize] == 0 {
            self.free_stripes.insert(stripe);
        }
    }
    fn lower_high_water(&mut self) {
        while let Some(top) = self.high_water.checked_sub(1) {
            if self.used_in_stripe[(top / STRIPE) as usize] == 0 {
                self.high_water = top / STRIPE * STRIPE;
            } else if self.refs[top as usize] == 0 {
                self.high_water = top;
            } else {
                return;
            }
        }
    }

    /// Nobody holds anything.
    pub fn clear(&mut self) {
        self.refs.fill(0);
        self.used_in_stripe.fill(0);
        self.free_stripes.extend(0..self.used_in_stripe.len() as u32);
        self.used = 0;
        self.high_water = 0;
    }
}

/// A set of stripes in two levels of bits: the next member is found by looking at three words and at one more per
/// 4,096 stripes skipped.
#[derive(Default)]
struct StripeSet {
    words: Vec<u64>,
    /// Bit w: `words[w]` is not 0.
    summary: Vec<u64>,
}

impl StripeSet {
    /// These become members, and the set as large as they need.
    fn extend(&mut self, stripes: std::ops::Range<u32>) {
        let n_words = self.words.len().max(stripes.end.div_ceil(64) as usize);
        self.words.resize(n_words, 0);
        self.summary.resize(n_words.div_ceil(64), 0);
        stripes.for_each(|stripe| self.insert(stripe));
    }
    fn insert(&mut self, stripe: u32) {
        let word = stripe as usize / 64;
        self.words[word] |= 1 << (stripe % 64);
        self.summary[word / 64] |= 1 << (word % 64);
    }
    fn remove(&mut self, stripe: u32) {
        let word = stripe as usize / 64;
        self.words[word] &= !(1 << (stripe % 64));
        if self.words[word] == 0 {
            self.summary[word / 64] &= !(1 << (word % 64));
        }
    }
    fn at_or_after(&self, stripe: u32) -> Option<u32> {
        let word = stripe as usize / 64;
        let here = self.words.get(word)? & (u64::MAX << (stripe % 64));
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
    fn the_next_free_stripe_is_found_across_words_and_blocks() {
        let n = 3 * 4096 + 70;
        let mut set = StripeSet::default();
        set.extend(0..70);
        set.extend(70..n);
        let mut twin: BTreeSet<u32> = (0..n).collect();
        let mut state = 7u64;
        for round in 0..40_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let stripe = (state >> 33) as u32 % n;
            if round % 20_000 < 19_000 || state >> 20 & 3 != 0 {
                set.remove(stripe);
                twin.remove(&stripe);
            } else {
                set.insert(stripe);
                twin.insert(stripe);
            }
            if round % 16 == 0 {
                let from = (state >> 12) as u32 % (n + 100);
                assert_eq!(set.at_or_after(from), twin.range(from..).next().copied(), "from {from}");
            }
        }
        twin.iter().for_each(|&stripe| set.remove(stripe));
        assert_eq!(set.at_or_after(0), None);
    }
}
