//! Blocks on their way to a kernel.
use super::Side;
use crate::arch::LANES;
use crate::pages::Pages;
use kvist_cache::Run;
use std::ops::Range;

/// How far ahead a stream is fetched, in bytes: hardware stops at every page of 4 KiB, and a block of keys is a short
/// stream. Without it two threads reached 60 % of the read limit.
const AHEAD: usize = 8192;

/// The bytes of [`LANES`] cells of one head.
#[derive(Clone, Copy, Default)]
pub struct Block<'b> {
    /// `[16 * row]`.
    pub codes: &'b [u8],
    /// `[params][16]` of f16.
    pub params: &'b [u8],
    /// How far ahead, in bytes, lies what is fetched while these codes are worked on; it may wrap around.
    pub ahead: usize,
}

impl Block<'_> {
    /// Meanwhile `codes` shall be fetched.
    fn fetch(&mut self, codes: &[u8]) {
        self.ahead = (codes.as_ptr() as usize).wrapping_sub(self.codes.as_ptr() as usize);
    }
}

/// Blocks of one head that follow each other in the sequence, wherever they lie.
pub struct Blocks<'b> {
    pub head_dim: usize,
    pub group: usize,
    /// Bytes of codes per cell.
    pub row: usize,
    pub list: &'b [Block<'b>],
    /// The cells that somebody sees; the others may hold anything.
    pub lanes: Range<usize>,
    /// May a cell hold what is not a number? Then a weight of 0 must not touch it.
    pub careful: bool,
    /// Must values be weighed one by one?
    pub exact: bool,
}

impl<'b> Blocks<'b> {
    pub fn n(&self) -> usize {
        self.list.len()
    }

    /// The block of a lane, and the lane in it.
    #[inline(always)]
    pub(super) fn at(&self, lane: usize) -> (&Block<'b>, usize) {
        (&self.list[lane / LANES], lane % LANES)
    }

    /// Every block, and its lanes that somebody sees.
    #[inline(always)]
    pub(super) fn seen(&self) -> impl Iterator<Item = (&Block<'b>, Range<usize>)> {
        let (start, end) = (self.lanes.start, self.lanes.end);
        self.list.iter().enumerate().map(move |(i, block)| {
            let first = i * LANES;
            (block, start.saturating_sub(first).min(LANES)..end.saturating_sub(first).min(LANES))
        })
    }
}

/// Most blocks of one call: a tile of 256 cells, cut anywhere.
pub const MAX_BLOCKS: usize = 18;

/// Blocks on their way to a kernel: as many as follow each other, whole but for the first and the last.
pub struct Gather<'b> {
    list: [Block<'b>; MAX_BLOCKS],
    n: usize,
    lanes: Range<usize>,
    /// Where the first lane of the first block stands in a line.
    at: usize,
    /// How many blocks ahead is fetched.
    distance: usize,
}

impl<'b> Gather<'b> {
    pub fn new() -> Self {
        Gather { list: [Block::default(); MAX_BLOCKS], n: 0, lanes: 0..0, at: 0, distance: 1 }
    }

    /// Add the cells `run` of `head`, the first of which stands at `at` in a line. What does not follow the blocks so far
    /// begins anew, once `full` has seen those.
    #[inline]
    pub fn add(
        &mut self,
        side: &Side,
        slabs: &'b [Pages],
        head: usize,
        run: Run,
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
            let lane = Side::lane_of(segment, cell);
            let lanes = lane..lane + (end - cell) as usize;
            let (first, n) = (Side::block_of(segment, head, cell), lanes.end.div_ceil(LANES));
            let at = at + (cell - run.start) as usize - lane;
            let follows = lane == 0 && self.lanes.end == self.n * LANES && at == self.at + self.lanes.end;
            if self.n > 0 && !(follows && self.n + n <= MAX_BLOCKS) {
                self.finish(std::iter::empty(), &mut full);
            }
            if self.n == 0 {
                (self.at, self.lanes) = (at, lane..lane);
            }
            let slab = slabs[segment.slab].bytes();
            for block in first..first + n {
                let part = |at: usize, len: usize| &slab[at + block * len..][..len];
                let codes = part(segment.codes, codes_len);
                // Where a stretch ends its neighbour in memory may go on; inside of it the next block is known.
                self.list[self.n] = Block { codes, params: part(segment.params, params_len), ahead: AHEAD };
                if let Some(before) = self.n.checked_sub(self.distance) {
                    self.list[before].fetch(codes);
                }
                self.n += 1;
            }
            self.lanes.end = (self.n - n) * LANES + lanes.end;
            cell = end;
        }
    }

    /// There is no more to add: `full` sees what there is. `next` are the codes that will be worked on then, block by block.
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

    /// Where the first lane of the first block stands in a line.
    pub fn at(&self) -> usize {
        self.at
    }
    /// The places in a line that the blocks take beside what somebody sees: before it, and behind it.
    pub fn beside(&self) -> [Range<usize>; 2] {
        [self.at..self.at + self.lanes.start, self.at + self.lanes.end..self.at + self.n * LANES]
    }
    /// What was gathered, of `side`.
    pub fn blocks(&self, side: &Side, exact: bool) -> Blocks<'_> {
        Blocks {
            head_dim: side.shape.head_dim,
            group: side.shape.group,
            row: side.shape.row,
            list: &self.list[..self.n],
            lanes: self.lanes.clone(),
            careful: side.broken,
            exact,
        }
    }
}
