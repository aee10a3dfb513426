//! The bytes of a side's first cells in one piece, as they lie in a file that is mapped: those of one segment.
use super::rows::param_at;
use super::{Interleaving, RowStore, Segment};
use crate::arch::LANES;
use crate::pages::Pages;
use kvist_cache::CellRun;

impl RowStore {
    /// Codes `[heads][blocks]`, then parameters `[heads][blocks]`, of the blocks of cells `0..cells`, which exist. Cells behind them
    /// in the last block are zero: they may store what is not to be in the file.
    pub fn image(&self, slabs: &[Pages], cells: u32) -> Vec<u8> {
        let shape = self.shape;
        let blocks = || {
            let heads = 0..shape.heads;
            heads.flat_map(|head| (0..cells).step_by(LANES).map(move |cell| (head, cell)))
        };
        let places =
            || blocks().map(|(head, cell)| (self.place(self.segment_of(cell), head, cell), cells - cell));
        let zeros = vec![0; LANES * shape.codes()];
        let mut bytes = Vec::with_capacity(shape.bytes(cells).unwrap_or(0) as usize);
        for (place, left) in places() {
            let first = bytes.len();
            bytes.extend_from_slice(&slabs[place.slab].bytes()[place.codes]);
            if (left as usize) < LANES {
                shape.scatter_lanes(&mut bytes[first..], left as usize..LANES, &zeros, shape.codes());
            }
        }
        for (place, left) in places() {
            let first = bytes.len();
            bytes.extend_from_slice(&slabs[place.slab].bytes()[place.params]);
            for param in (0..shape.params).filter(|_| (left as usize) < LANES) {
                let unused = param_at(param, left as usize).start..param_at(param, LANES).start;
                bytes[first..][unused].fill(0);
            }
        }
        bytes
    }

    /// True if every value in cells `0..cells` is finite. Of keys, where it does not matter: only if every one that was ever stored was.
    pub fn is_finite(&self, slabs: &[Pages], cells: u32) -> bool {
        let cells = CellRun { start: 0, len: cells.min(self.cells()) };
        let are_finite = |head: usize| {
            let mut blocks = self.blocks_of(slabs, head, cells);
            blocks.all(|(block, lanes, _)| self.shape.lanes_are_finite(&block, lanes))
        };
        let are_values = matches!(self.shape.interleaving, Interleaving::Values { .. });
        !self.broken || are_values && (0..self.shape.heads).all(are_finite)
    }

    /// Takes cells `0..cells` from an [image](Self::image) at byte `at` of slab `slab`. The side has no cells yet.
    pub fn map(&mut self, cells: u32, slab: usize, at: usize, finite: bool) {
        debug_assert!(self.segments.is_empty(), "cells before those of the file");
        let blocks = (cells as usize).div_ceil(LANES);
        let params = at + self.shape.heads * blocks * self.shape.block_codes();
        self.segments.push(Segment { cells: CellRun { start: 0, len: cells }, slab, codes: at, params });
        self.broken |= !finite;
    }
}
