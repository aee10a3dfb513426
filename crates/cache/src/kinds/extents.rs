//! Where one sequence is stored: stretches of contiguous cells that store consecutive positions.
use crate::run::CellRun;

/// `len` tokens at consecutive positions in contiguous cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub position: u32,
    pub cell: u32,
    pub len: u32,
}

impl Extent {
    /// One past the last position.
    pub fn end(self) -> u32 {
        self.position + self.len
    }
    pub fn run(self) -> CellRun {
        CellRun { start: self.cell, len: self.len }
    }
    /// True if `next` continues this extent in both cells and positions. Only then do extents merge.
    pub fn precedes(self, next: Extent) -> bool {
        self.end() == next.position && self.run().end() == next.cell
    }
    /// The part at positions `from..until`, which must lie within the extent.
    pub fn cut(self, from: u32, until: u32) -> Extent {
        Extent { position: from, cell: self.cell + (from - self.position), len: until - from }
    }
}

/// Extents in position order, merged where possible. 12 bytes per extent: a sequence that decodes alone has one, a
/// sequence that decodes alternately with others has one per stripe.
#[derive(Default, Debug)]
pub(super) struct Extents {
    list: Vec<Extent>,
    n_tokens: u32,
}

impl Extents {
    pub fn clear(&mut self) {
        self.list.clear();
        self.n_tokens = 0;
    }
    pub fn list(&self) -> &[Extent] {
        &self.list
    }
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// Appends an extent, whose positions must come after all others.
    pub fn push(&mut self, extent: Extent) {
        self.n_tokens += extent.len;
        match self.list.last_mut() {
            Some(last) if last.precedes(extent) => last.len += extent.len,
            last => {
                debug_assert!(last.is_none_or(|last| last.end() <= extent.position));
                self.list.push(extent);
            }
        }
    }

    /// The parts of the extents that store positions `from..until`, in order.
    pub fn within(&self, from: u32, until: u32) -> impl Iterator<Item = Extent> {
        let first = self.list.partition_point(|extent| extent.end() <= from);
        self.list[first..]
            .iter()
            .take_while(move |extent| extent.position < until)
            .map(move |extent| extent.cut(extent.position.max(from), extent.end().min(until)))
            .filter(|extent| extent.len > 0)
    }

    /// Removes positions `from..until`, and calls `freed` with every run that stored them.
    pub fn remove(&mut self, from: u32, until: u32, mut freed: impl FnMut(CellRun)) {
        if from >= until {
            return;
        }
        for extent in self.within(from, until) {
            freed(extent.run());
        }
        let first = self.list.partition_point(|extent| extent.end() <= from);
        let past = self.list.partition_point(|extent| extent.position < until);
        if first == past {
            return;
        }
        let (left, right) = (self.list[first], self.list[past - 1]);
        let left = (left.position < from).then(|| left.cut(left.position, from));
        let right = (right.end() > until).then(|| right.cut(until, right.end()));
        self.list.splice(first..past, left.into_iter().chain(right));
        self.n_tokens = self.list.iter().map(|extent| extent.len).sum();
    }

    /// Updates the cells after a move: cell c is now `to(c)`.
    pub fn relocate(&mut self, to: impl Fn(u32) -> u32) {
        for extent in std::mem::take(self).list {
            for i in 0..extent.len {
                self.push(Extent { position: extent.position + i, cell: to(extent.cell + i), len: 1 });
            }
        }
    }
}
