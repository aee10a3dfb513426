//! First fit: takes the lowest free run that is long enough.
//!
//! Knuth: *The Art of Computer Programming* 1, §2.5. The free runs are the leaves of an implicit max-tree. There is
//! one leaf per block: the length of the free run that begins there, or 0. Descending finds the lowest run that is
//! long enough, climbing finds adjacent runs; nothing is scanned linearly.
use super::{Allocator, Handle};

/// 8 bytes per block, with the number of blocks rounded up to a power of two.
#[derive(Clone, Debug)]
pub(super) struct FirstFit {
    n_blocks: u32,
    n_free: u32,
    /// [2 · leaves]: node i has the children 2i and 2i + 1, the root is 1.
    longest: Vec<u32>,
}

impl FirstFit {
    /// Makes an allocator with all blocks free.
    pub fn new(n_blocks: u32) -> Self {
        let n_leaves = (n_blocks as usize).next_power_of_two();
        let mut it = FirstFit { n_blocks, n_free: n_blocks, longest: vec![0; 2 * n_leaves] };
        if n_blocks > 0 {
            it.set(0, n_blocks);
        }
        it
    }

    fn n_leaves(&self) -> usize {
        self.longest.len() / 2
    }
    /// Length of the free run that begins at `block`; 0 if none does.
    fn run_from(&self, block: u32) -> u32 {
        if block < self.n_blocks { self.longest[self.n_leaves() + block as usize] } else { 0 }
    }

    fn set(&mut self, start: u32, len: u32) {
        let mut node = self.n_leaves() + start as usize;
        self.longest[node] = len;
        while node > 1 {
            node /= 2;
            let longest = self.longest[2 * node].max(self.longest[2 * node + 1]);
            if self.longest[node] == longest {
                break;
            }
            self.longest[node] = longest;
        }
    }

    /// Start of the last free run that begins at or before `block`.
    fn run_before(&self, block: u32) -> Option<u32> {
        let mut node = self.n_leaves() + block as usize;
        if self.longest[node] == 0 {
            while node.is_multiple_of(2) || self.longest[node - 1] == 0 {
                node /= 2;
                if node <= 1 {
                    return None;
                }
            }
            node -= 1;
            while node < self.n_leaves() {
                node = 2 * node + usize::from(self.longest[2 * node + 1] > 0);
            }
        }
        Some((node - self.n_leaves()) as u32)
    }
}

impl Allocator for FirstFit {
    fn name(&self) -> &'static str {
        "first_fit"
    }
    fn n_blocks(&self) -> u32 {
        self.n_blocks
    }
    fn n_free(&self) -> u32 {
        self.n_free
    }
    fn largest_free_run(&self) -> u32 {
        self.longest[1]
    }

    fn find(&self, n: u32) -> Option<Handle> {
        if n == 0 || self.longest[1] < n {
            return None;
        }
        let mut node = 1;
        while node < self.n_leaves() {
            node = 2 * node + usize::from(self.longest[2 * node] < n);
        }
        Some(Handle { start: (node - self.n_leaves()) as u32, len: n, reserved: n })
    }

    fn extended(&self, handle: Handle, n: u32) -> Option<Handle> {
        let more = n.checked_sub(handle.len)?;
        (more <= self.run_from(handle.end())).then_some(Handle { start: handle.start, len: n, reserved: n })
    }

    fn take(&mut self, handle: Handle) {
        let Handle { start, reserved, .. } = handle;
        let run = self.run_before(start).unwrap_or(0);
        let (before, len) = (start - run, self.run_from(run));
        let fits = u64::from(before) + u64::from(reserved) <= u64::from(len);
        assert!(
            fits && reserved > 0,
            "{handle:?} is not free: the run before it has {len} blocks from {run}"
        );
        self.n_free -= reserved;
        self.set(run, before);
        let after = len - before - reserved;
        if after > 0 {
            self.set(start + reserved, after);
        }
    }

    fn release(&mut self, handle: Handle) {
        let Handle { start, reserved, .. } = handle;
        let end = u64::from(start) + u64::from(reserved);
        assert!(end <= u64::from(self.n_blocks), "{handle:?} of {} blocks", self.n_blocks);
        let (end, mut run, mut len) = (end as u32, start, reserved);
        if let Some(before) = self.run_before(start) {
            let its_end = before + self.run_from(before);
            assert!(its_end <= start, "{handle:?} is free already: so are {before}..{its_end}");
            if its_end == start {
                (run, len) = (before, len + start - before);
            }
        }
        if let Some(after) = (end < self.n_blocks).then(|| self.run_from(end)).filter(|&after| after > 0) {
            self.set(end, 0);
            len += after;
        }
        self.n_free += reserved;
        self.set(run, len);
    }

    fn new_empty(&self, n_blocks: u32) -> Box<dyn Allocator> {
        Box::new(FirstFit::new(n_blocks))
    }
}
