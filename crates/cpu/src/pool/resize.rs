//! Fewer cells than before.
use super::{RowStore, Segment, copy};
use crate::arch::LANES;
use crate::pages::Pages;
use kvist_cache::CellRun;

impl RowStore {
    /// Gives the last segment the cells that its last block has room for.
    pub fn fill_last_block(&mut self) {
        if let Some(last) = self.segments.last_mut() {
            last.cells.len = last.cells.len.next_multiple_of(LANES as u32);
        }
    }

    /// Drops the segments that begin at `cell` or above.
    pub fn drop_segments_from(&mut self, cell: u32) {
        self.segments.retain(|segment| segment.cells.start < cell);
    }

    pub fn last_segment(&self) -> Option<CellRun> {
        self.segments.last().map(|segment| segment.cells)
    }

    /// Copies the first `len` cells of the last segment to byte `at` of a slab, which is the last segment then.
    pub fn shorten_last_segment(&mut self, len: u32, slab: usize, at: usize, slabs: &mut [Pages]) {
        let Some(old) = self.segments.pop() else { return };
        let cells = CellRun { start: old.cells.start, len };
        let n_blocks = |segment: &CellRun| (segment.len as usize).div_ceil(LANES);
        let params = at + self.shape.heads * n_blocks(&cells) * self.shape.block_codes();
        let new = Segment { cells, slab, codes: at, params };
        for (block, from, to) in [
            (self.shape.block_codes(), old.codes, new.codes),
            (self.shape.block_params(), old.params, new.params),
        ] {
            for head in 0..self.shape.heads {
                let (from, to) =
                    (from + head * n_blocks(&old.cells) * block, to + head * n_blocks(&cells) * block);
                copy(slabs, (old.slab, from), (slab, to), n_blocks(&cells) * block);
            }
        }
        self.segments.push(new);
    }

    /// The slabs of all segments.
    pub fn slabs(&self) -> impl Iterator<Item = usize> {
        self.segments.iter().map(|segment| segment.slab)
    }

    /// Slabs have other indices now: `new_index[old]`.
    pub fn renumber_slabs(&mut self, new_index: &[Option<usize>]) {
        for segment in &mut self.segments {
            segment.slab = new_index[segment.slab].expect("a slab with a segment was kept");
        }
    }
}
