//! Buddy allocator: runs of a power of two, split and merged in pairs.
//!
//! Knowlton: *A fast storage allocator*, Communications of the ACM 8(10), 1965; Knuth: *The Art of Computer
//! Programming* 1, §2.5. A request is rounded up to a power of two. The excess is waste (reported as internal
//! fragmentation), but allows growth without a move. Takes the lowest run of the smallest sufficient size. If the
//! number of blocks is not a power of two, it is split into a sum of powers of two.
use super::{Allocator, Handle};
use std::collections::BTreeSet;

/// About 8 bytes per free run.
#[derive(Clone, Debug)]
pub(super) struct Buddy {
    n_blocks: u32,
    n_free: u32,
    /// `[orders]`: starts of the free runs of 2^order blocks. Never contains both of two buddies, because they are
    /// merged.
    free: Vec<BTreeSet<u32>>,
}

impl Buddy {
    /// Makes an allocator with all blocks free.
    pub fn new(n_blocks: u32) -> Self {
        let mut free = vec![BTreeSet::new(); 32];
        let mut start = 0;
        for order in (0..32).rev().filter(|order| n_blocks >> order & 1 == 1) {
            free[order].insert(start);
            start += 1 << order;
        }
        Buddy { n_blocks, n_free: n_blocks, free }
    }
}

/// Order of the smallest power of two that is at least `n`. `None` if it exceeds 32 bits.
fn order_of(n: u32) -> Option<usize> {
    n.checked_next_power_of_two().map(|size| size.trailing_zeros() as usize)
}

impl Allocator for Buddy {
    fn name(&self) -> &'static str {
        "buddy"
    }
    fn n_blocks(&self) -> u32 {
        self.n_blocks
    }
    fn n_free(&self) -> u32 {
        self.n_free
    }
    fn largest_free_run(&self) -> u32 {
        self.free.iter().rposition(|starts| !starts.is_empty()).map_or(0, |order| 1 << order)
    }

    fn find(&self, n: u32) -> Option<Handle> {
        let order = order_of(n).filter(|_| n > 0)?;
        let start = self.free[order..].iter().find_map(|starts| starts.first())?;
        Some(Handle { start: *start, len: n, reserved: 1 << order })
    }

    fn extended(&self, handle: Handle, n: u32) -> Option<Handle> {
        let (from, until) = (order_of(handle.reserved)?, order_of(n)?);
        if n < handle.len {
            return None;
        }
        // At every size the handle must be the lower of two buddies, and the upper one must be free as a whole.
        let grows = |order: usize| {
            handle.start & (1 << order) == 0 && self.free[order].contains(&(handle.start + (1 << order)))
        };
        let reserved = 1 << until.max(from);
        (from..until).all(grows).then_some(Handle { start: handle.start, len: n, reserved })
    }

    fn take(&mut self, handle: Handle) {
        let Handle { start, reserved, .. } = handle;
        let wanted = reserved.trailing_zeros() as usize;
        let whole = (wanted..32).find(|&order| self.free[order].remove(&(start >> order << order)));
        let aligned = reserved.is_power_of_two() && start.is_multiple_of(reserved);
        let Some(whole) = whole.filter(|_| aligned) else {
            panic!("{handle:?} is not free, or no buddy");
        };
        for order in (wanted..whole).rev() {
            // The half that does not contain the handle stays free.
            self.free[order].insert((start >> order ^ 1) << order);
        }
        self.n_free -= reserved;
    }

    fn release(&mut self, handle: Handle) {
        let Handle { mut start, reserved, .. } = handle;
        let end = u64::from(start) + u64::from(reserved);
        assert!(reserved.is_power_of_two() && end <= u64::from(self.n_blocks), "{handle:?} is no buddy");
        let mut order = reserved.trailing_zeros() as usize;
        let free_already = (order..32).any(|order| self.free[order].contains(&(start >> order << order)));
        assert!(!free_already, "{handle:?} is free already");
        while self.free[order].remove(&(start ^ 1 << order)) {
            start &= !(1 << order);
            order += 1;
        }
        self.free[order].insert(start);
        self.n_free += reserved;
    }

    fn new_empty(&self, n_blocks: u32) -> Box<dyn Allocator> {
        Box::new(Buddy::new(n_blocks))
    }
}
