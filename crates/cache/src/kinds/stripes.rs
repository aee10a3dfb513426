//! Reference-counted cells, handed out in aligned stripes of 16. Sequences that decode alternately therefore do not
//! fragment each other into runs of one cell.
use super::free_set::FreeSet;
use crate::plan::{CellCopy, GroupPlan, grown};
use crate::run::CellRun;

/// Number of cells that one sequence fills before another may allocate among them.
pub(super) const STRIPE: u32 = 16;

/// 4 bytes per cell, one byte and a little over one bit per stripe. Allocated for cells up to the highest one ever
/// used, not for the whole capacity.
pub(super) struct Stripes {
    capacity: u32,
    refs: Vec<u32>, // the first cells; all later ones are free
    used_in_stripe: Vec<u8>,
    free_stripes: FreeSet,
    used: u32,
    high_water: u32,
}

/// How far `prepare` has searched for cells. A search starts with the default.
#[derive(Default)]
pub(super) struct Cursor {
    next_stripe: u32,
    stray_cell: u32,
}

impl Stripes {
    pub fn new(capacity: u32) -> Self {
        Stripes {
            capacity,
            refs: Vec::new(),
            used_in_stripe: Vec::new(),
            free_stripes: FreeSet::default(),
            used: 0,
            high_water: 0,
        }
    }
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
    /// Makes the bookkeeping cover at least `cells` cells. It grows by doubling.
    fn reach(&mut self, cells: u32) {
        if cells as usize > self.refs.len() {
            let cells = grown(cells, self.capacity);
            self.refs.resize(cells as usize, 0);
            let before = self.used_in_stripe.len() as u32;
            self.used_in_stripe.resize(cells.div_ceil(STRIPE) as usize, 0);
            self.free_stripes.extend(before..self.used_in_stripe.len() as u32);
        }
    }
    /// The first free stripe at or after `stripe`.
    fn free_stripe(&self, stripe: u32) -> Option<u32> {
        let beyond = stripe.max(self.used_in_stripe.len() as u32);
        let beyond = (beyond < self.capacity.div_ceil(STRIPE)).then_some(beyond);
        self.free_stripes.at_or_after(stripe).or(beyond)
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

    /// Claims `n` free cells in `out` for a sequence whose last cell is `tail - 1`: first the rest of its stripe,
    /// then free stripes from the lowest on, and when those run out, any free cells. The caller has checked that
    /// enough cells are free for all claims of the plan.
    pub fn place(&self, cursor: &mut Cursor, tail: Option<u32>, mut n: u32, out: &mut GroupPlan) {
        let mut tail = tail;
        while n > 0 {
            let run = match tail.and_then(|tail| self.rest_of_stripe(tail, n, out)) {
                Some(run) => run,
                None => match self.free_stripe(cursor.next_stripe) {
                    Some(stripe) => {
                        cursor.next_stripe = stripe + 1;
                        let start = stripe * STRIPE;
                        CellRun { start, len: n.min(STRIPE).min(self.capacity() - start) }
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

    /// Free cells from `cell` to the end of its stripe; `None` if `cell` is the first cell of a stripe.
    fn rest_of_stripe(&self, cell: u32, n: u32, out: &GroupPlan) -> Option<CellRun> {
        if cell.is_multiple_of(STRIPE) {
            return None;
        }
        let end = cell.next_multiple_of(STRIPE).min(self.capacity()).min(cell.saturating_add(n));
        let len = (cell..end).take_while(|&c| self.is_open(c, out)).count() as u32;
        (len > 0).then_some(CellRun { start: cell, len })
    }

    fn stray(&self, cursor: &mut Cursor, n: u32, out: &GroupPlan) -> CellRun {
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
                return CellRun { start: cell, len: len as u32 };
            } else {
                cursor.stray_cell += 1;
            }
        }
    }

    /// Adds a reference to every cell of `run`.
    pub fn add_ref(&mut self, run: CellRun) {
        self.reach(run.end());
        for cell in run.cells() {
            self.refs[cell as usize] += 1;
            if self.refs[cell as usize] == 1 {
                self.occupy(cell);
            }
        }
    }

    /// Removes a reference from every cell of `run`.
    pub fn release(&mut self, run: CellRun) {
        for cell in run.cells() {
            let refs = &mut self.refs[cell as usize];
            assert!(*refs > 0, "cell {cell} of {run:?} is released more often than it was referenced");
            *refs -= 1;
            if *refs == 0 {
                self.vacate(cell);
            }
        }
        self.lower_high_water();
    }

    /// Moves the references along with the bytes that have moved.
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

    /// Frees every cell.
    pub fn clear(&mut self) {
        self.refs.fill(0);
        self.used_in_stripe.fill(0);
        self.free_stripes.extend(0..self.used_in_stripe.len() as u32);
        self.used = 0;
        self.high_water = 0;
    }
}
