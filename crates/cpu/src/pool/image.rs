//! The bytes of a side's first cells in one piece, as they lie in a file that is mapped: those of one segment.
use super::{RowStore, Segment};
use crate::arch::LANES;
use crate::pages::Pages;
use kvist_cache::CellRun;

impl RowStore {
    /// Codes `[heads][blocks]`, then parameters `[heads][blocks]`, of the blocks of cells `0..cells`, which exist.
    pub fn image(&self, slabs: &[Pages], cells: u32) -> Vec<u8> {
        let blocks = || {
            let heads = 0..self.shape.heads;
            heads.flat_map(|head| (0..cells).step_by(LANES).map(move |cell| (head, cell)))
        };
        let places = || blocks().map(|(head, cell)| self.place(self.segment_of(cell), head, cell));
        let mut bytes = Vec::with_capacity(self.shape.bytes(cells).unwrap_or(0) as usize);
        places().for_each(|place| bytes.extend_from_slice(&slabs[place.slab].bytes()[place.codes]));
        places().for_each(|place| bytes.extend_from_slice(&slabs[place.slab].bytes()[place.params]));
        bytes
    }

    /// True if every stored value is finite.
    pub fn is_finite(&self) -> bool {
        !self.broken
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
