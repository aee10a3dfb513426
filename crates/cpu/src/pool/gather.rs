//! Collects blocks into stretches for the kernels.
use super::{Geometry, RowStore};
use crate::arch::{LANES, Simd, widen};
use crate::pages::Pages;
use kvist_cache::CellRun;
use std::ops::Range;

/// Prefetch distance in bytes. Hardware prefetching stops at every 4 KiB page, and a block of keys is a short stream.
/// On Zen 4, 16 KiB were up to 1.25 times as fast as 8, and no slower than 32.
pub(super) const AHEAD: usize = 16 << 10;

/// The bytes of [`LANES`] cells of one head.
#[derive(Clone, Copy, Default)]
pub struct Block<'b> {
    /// `[16 * row]`.
    pub codes: &'b [u8],
    /// `[params][16]` of f16.
    pub params: &'b [u8],
    /// Distance in bytes to the codes that are prefetched while these codes are read; it may wrap around.
    pub ahead: usize,
    /// Parameters of other rows of these cells, which are read soon.
    pub soon: &'b [u8],
}

impl Block<'_> {
    /// Fetches the parameters that are read soon. They are few lines far apart, which no prefetcher of the processor follows.
    #[inline(always)]
    pub fn fetch_soon<S: Simd>(&self, s: S) {
        self.soon.chunks(64).for_each(|line| s.prefetch(&line[0], 0));
    }

    /// Parameter `p` of the cell in lane `lane`.
    #[inline(always)]
    pub fn param(&self, p: usize, lane: usize) -> f32 {
        let at = 2 * (p * LANES + lane);
        widen(u16::from_le_bytes([self.params[at], self.params[at + 1]]))
    }
    /// Sets the codes to prefetch while this block is read.
    fn fetch(&mut self, codes: &[u8]) {
        self.ahead = (codes.as_ptr() as usize).wrapping_sub(self.codes.as_ptr() as usize);
    }
}

/// Blocks of one head that follow each other in the sequence, anywhere in memory.
pub struct Blocks<'b> {
    pub head_dim: usize,
    pub group: usize,
    /// Code bytes per cell.
    pub row: usize,
    pub list: &'b [Block<'b>],
    /// The cells that any query sees. The others may contain anything.
    pub lanes: Range<usize>,
    /// True if a cell may contain a value that is not finite. Cells with weight 0 must then be skipped.
    pub may_have_nan: bool,
    /// True if values must be weighted cell by cell.
    pub exact: bool,
}

impl<'b> Blocks<'b> {
    pub fn n(&self) -> usize {
        self.list.len()
    }

    /// Whether all visible values are finite. `shape` is that of the values.
    pub fn are_finite(&self, shape: &Geometry) -> bool {
        self.seen().all(|(block, lanes)| shape.lanes_are_finite(block, lanes))
    }

    /// The block that contains a lane, and the lane's index in it.
    #[inline(always)]
    pub(super) fn at(&self, lane: usize) -> (&Block<'b>, usize) {
        (&self.list[lane / LANES], lane % LANES)
    }

    /// Every block, with its visible lanes.
    #[inline(always)]
    pub(super) fn seen(&self) -> impl Iterator<Item = (&Block<'b>, Range<usize>)> {
        let (start, end) = (self.lanes.start, self.lanes.end);
        self.list.iter().enumerate().map(move |(i, block)| {
            let first = i * LANES;
            (block, start.saturating_sub(first).min(LANES)..end.saturating_sub(first).min(LANES))
        })
    }
}

/// Most blocks per call: a tile of 256 cells, cut anywhere.
pub const MAX_BLOCKS: usize = 18;

/// Collects blocks for one kernel call: as many as follow each other. Only the first and the last may be partial.
pub struct Gather<'b> {
    list: [Block<'b>; MAX_BLOCKS],
    n: usize,
    lanes: Range<usize>,
    /// The place in a line of the first block's first lane.
    at: usize,
    /// Prefetch distance in blocks.
    distance: usize,
}

impl<'b> Gather<'b> {
    pub fn new() -> Self {
        Gather { list: [Block::default(); MAX_BLOCKS], n: 0, lanes: 0..0, at: 0, distance: 1 }
    }

    /// Adds the cells `run` of `head` of `side`; the first is at place `at` in a line. If they do not continue the blocks
    /// collected so far, `full` is called with those first, and a new stretch begins. `soon` are the rows of the same cells
    /// that are read afterwards.
    #[inline]
    pub fn add(
        &mut self,
        (side, soon): (&RowStore, Option<&RowStore>),
        slabs: &'b [Pages],
        head: usize,
        run: CellRun,
        at: usize,
        mut full: impl FnMut(&Self),
    ) {
        let shape = &side.shape;
        let (codes_len, params_len) = (shape.block_codes(), shape.block_params());
        self.distance = (AHEAD / codes_len.max(1)).clamp(1, MAX_BLOCKS);
        let mut cell = run.start;
        while cell < run.end() {
            let segment = side.segment_of(cell);
            let end = run.end().min(segment.cells.end());
            let lane = RowStore::lane_of(segment, cell);
            let lanes = lane..lane + (end - cell) as usize;
            let (first, n) = (RowStore::block_of(segment, head, cell), lanes.end.div_ceil(LANES));
            let at = at + (cell - run.start) as usize - lane;
            let follows = lane == 0 && self.lanes.end == self.n * LANES && at == self.at + self.lanes.end;
            if self.n > 0 && !(follows && self.n + n <= MAX_BLOCKS) {
                self.finish(std::iter::empty(), &mut full);
            }
            if self.n == 0 {
                (self.at, self.lanes) = (at, lane..lane);
            }
            let slab = slabs[segment.slab].bytes();
            let mut soon = soon.into_iter().flat_map(|rows| rows.params_from(slabs, head, cell));
            for block in first..first + n {
                let part = |at: usize, len: usize| &slab[at + block * len..][..len];
                let codes = part(segment.codes, codes_len);
                // Default: prefetch what follows in memory, in case the run goes on. Inside a stretch the next block is
                // known.
                let params = part(segment.params, params_len);
                self.list[self.n] =
                    Block { codes, params, ahead: AHEAD, soon: soon.next().unwrap_or_default() };
                if let Some(before) = self.n.checked_sub(self.distance) {
                    self.list[before].fetch(codes);
                }
                self.n += 1;
            }
            self.lanes.end = (self.n - n) * LANES + lanes.end;
            cell = end;
        }
    }

    /// Ends the stretch and calls `full` with it. `next` yields the codes that are read afterwards, block by block.
    pub fn finish(&mut self, next: impl Iterator<Item = &'b [u8]>, mut full: impl FnMut(&Self)) {
        if self.n == 0 {
            return;
        }
        let first = self.n.saturating_sub(self.distance);
        let next = next.skip(self.distance.saturating_sub(self.n));
        for (block, codes) in self.list[first..self.n].iter_mut().zip(next) {
            block.fetch(codes);
        }
        full(self);
        (self.n, self.lanes) = (0, 0..0);
    }

    /// The place in a line of the first block's first lane.
    pub fn at(&self) -> usize {
        self.at
    }
    /// The places in a line covered by the blocks, but outside the visible cells: those before and those after them.
    pub fn margins(&self) -> [Range<usize>; 2] {
        [self.at..self.at + self.lanes.start, self.at + self.lanes.end..self.at + self.n * LANES]
    }
    /// The gathered blocks of `side`.
    pub fn blocks(&self, side: &RowStore, exact: bool) -> Blocks<'_> {
        Blocks {
            head_dim: side.shape.head_dim,
            group: side.shape.group,
            row: side.shape.row,
            list: &self.list[..self.n],
            lanes: self.lanes.clone(),
            may_have_nan: side.broken,
            exact,
        }
    }
}
