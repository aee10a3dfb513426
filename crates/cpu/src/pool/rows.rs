//! Stored rows, one by one: in the interleaved blocks of a side, and outside them.
//!
//! Outside, a row is its codes without padding, then its parameters: the content of a
//! [`HostBlock`](kvist_device::HostBlock).
use super::gather::AHEAD;
use super::{Block, Geometry, RowStore, Segment};
use crate::arch::LANES;
use crate::arch::uncached::{Uncached, prefetch};
use crate::pages::Pages;
use half::f16;
use kvist_cache::CellRun;
use kvist_device::DType;
use std::ops::Range;

impl Geometry {
    /// Code bytes of a row, without padding.
    pub(super) fn codes(&self) -> usize {
        self.row_bytes() - 2 * self.params
    }
    /// Bytes of a row outside a block.
    fn row_bytes(&self) -> usize {
        self.storage.row_bytes(self.head_dim as u32) as usize
    }

    /// Bytes of the rows of `cells` outside a block.
    pub fn bytes_outside(&self, cells: CellRun) -> usize {
        cells.len as usize * self.heads * self.row_bytes()
    }

    /// Whether the values of `lanes` of a block of V are finite.
    pub fn lanes_are_finite(&self, block: &Block<'_>, lanes: Range<usize>) -> bool {
        match self.params {
            0 => self.are_finite(&block.codes[lanes.start * self.row..lanes.end * self.row]),
            n => (0..n).all(|p| {
                let params = &block.params[param_at(p, lanes.start).start..param_at(p, lanes.end).start];
                params.as_chunks::<2>().0.iter().all(|param| f16::from_le_bytes(*param).is_finite())
            }),
        }
    }

    /// Whether all values of `rows` are finite.
    pub fn are_finite(&self, rows: &[u8]) -> bool {
        let halves = |bytes: &[u8], mask: u16| {
            let halves = bytes.as_chunks::<2>().0.iter();
            halves.fold(true, |finite, half| finite & (u16::from_le_bytes(*half) & mask != mask))
        };
        match self.storage.dtype {
            DType::F32 => rows.as_chunks::<4>().0.iter().fold(true, |finite, word| {
                const MASK: u32 = 0x7f80_0000;
                finite & (u32::from_le_bytes(*word) & MASK != MASK)
            }),
            DType::F16 => halves(rows, 0x7c00),
            DType::BF16 => halves(rows, 0x7f80),
            DType::Q8 | DType::Q4 | DType::T4 => {
                let codes = self.codes();
                rows.chunks_exact(self.row_bytes()).all(|row| halves(&row[codes..], 0x7c00))
            }
        }
    }
}

/// Bytes of a block in its slab.
pub(super) struct BlockPlace {
    pub slab: usize,
    pub codes: Range<usize>,
    pub params: Range<usize>,
}

/// Byte of parameter `param` of `lane` in a block's parameters.
pub(super) fn param_at(param: usize, lane: usize) -> Range<usize> {
    let at = 2 * (param * LANES + lane);
    at..at + 2
}

impl RowStore {
    /// The block of `head` that contains `cell`.
    pub(super) fn place(&self, segment: &Segment, head: usize, cell: u32) -> BlockPlace {
        let (block, shape) = (Self::block_of(segment, head, cell), &self.shape);
        let part = |at: usize, len: usize| at + block * len..at + (block + 1) * len;
        BlockPlace {
            slab: segment.slab,
            codes: part(segment.codes, shape.block_codes()),
            params: part(segment.params, shape.block_params()),
        }
    }

    /// The parameters of the blocks of `head` from that of `cell` on, to the end of its segment.
    pub(super) fn params_from<'b>(
        &self,
        slabs: &'b [Pages],
        head: usize,
        cell: u32,
    ) -> std::slice::ChunksExact<'b, u8> {
        let segment = self.segment_of(cell);
        let (first, end) =
            (self.place(segment, head, cell), self.place(segment, head, segment.cells.end() - 1));
        let params = &slabs[first.slab].bytes()[first.params.start..end.params.end];
        params.chunks_exact(self.shape.block_params().max(1))
    }

    /// The parts of a run that lie in one block of each head.
    fn parts(&self, cells: CellRun) -> impl Iterator<Item = (&Segment, CellRun)> {
        let mut start = cells.start;
        std::iter::from_fn(move || {
            let left = cells.end().checked_sub(start).filter(|left| *left > 0)?;
            let segment = self.segment_of(start);
            let lanes = (LANES - Self::lane_of(segment, start)) as u32;
            let part = CellRun { start, len: left.min(lanes).min(segment.cells.end() - start) };
            start = part.end();
            Some((segment, part))
        })
    }

    /// The blocks of `head` that contain `cells`: which lanes, and where the first of them comes in the run.
    pub fn blocks_of<'b>(
        &self,
        slabs: &'b [Pages],
        head: usize,
        cells: CellRun,
    ) -> impl Iterator<Item = (Block<'b>, Range<usize>, usize)> {
        self.parts(cells).map(move |(segment, part)| {
            let (place, lane) = (self.place(segment, head, part.start), Self::lane_of(segment, part.start));
            let lanes = lane..lane + part.len as usize;
            let slab = slabs[place.slab].bytes();
            let block =
                Block { codes: &slab[place.codes], params: &slab[place.params], ahead: AHEAD, soon: &[] };
            (block, lanes, (part.start - cells.start) as usize)
        })
    }

    /// Asks for the block of `head` and `cell` in the store that is copied after this one. Blocks of a head in other layers lie
    /// elsewhere, and without this every block waits for memory: exports took 2.3 times as long.
    fn prefetch(&self, next: Option<&RowStore>, slabs: &[Pages], head: usize, cell: u32) {
        if let Some(next) = next.filter(|next| head < next.shape.heads && cell < next.cells()) {
            let block = next.place(next.segment_of(cell), head, cell);
            let slab = slabs[block.slab].bytes();
            prefetch(&slab[block.codes]);
            prefetch(&slab[block.params]);
        }
    }

    /// Copies the stored rows of `cells` to `rows`, `[cells, heads, row_bytes]`. `next`: whose rows are copied after these.
    pub fn export(&self, slabs: &[Pages], cells: CellRun, rows: &mut [u8], next: Option<&RowStore>) {
        let (shape, len) = (self.shape, self.shape.row_bytes());
        let stride = shape.heads * len;
        for (segment, part) in self.parts(cells) {
            let lane = Self::lane_of(segment, part.start);
            let lanes = lane..lane + part.len as usize;
            for head in 0..shape.heads {
                let block = self.place(segment, head, part.start);
                self.prefetch(next, slabs, head, part.start);
                let slab = slabs[block.slab].bytes();
                let rows = &mut rows[(part.start - cells.start) as usize * stride + head * len..];
                shape.gather_lanes(&slab[block.codes], lanes.clone(), rows, stride);
                let params = slab[block.params].as_chunks::<2>().0;
                for (row, lane) in rows.chunks_mut(stride).zip(lanes.clone()) {
                    let row = row[shape.codes()..len].as_chunks_mut::<2>().0;
                    row.iter_mut()
                        .zip(params.iter().skip(lane).step_by(LANES))
                        .for_each(|(to, from)| *to = *from);
                }
            }
        }
    }

    /// The rows of `cells`, `[cells, heads, row_bytes]`, by the blocks that they go to: the inverse of [`export`](Self::export), once
    /// each is [written](Incoming::write). There must be room for the cells. `rows` may have more, which is copied next.
    ///
    /// Adds the bytes of those blocks to `places`, with their slab, [as many](Incoming::n_places) for each: codes of every head, then
    /// parameters of every head.
    pub fn incoming<'r>(
        &self,
        cells: CellRun,
        rows: &'r [u8],
        places: &mut Vec<(usize, Range<usize>)>,
    ) -> impl Iterator<Item = Incoming<'r>> {
        let (shape, stride) = (self.shape, self.shape.heads * self.shape.row_bytes());
        self.parts(cells).map(move |(segment, part)| {
            let lane = Self::lane_of(segment, part.start);
            let place = |head| self.place(segment, head, part.start);
            places.extend((0..shape.heads).map(|head| (segment.slab, place(head).codes)));
            places.extend((0..shape.heads).map(|head| (segment.slab, place(head).params)));
            let (_, rows) = rows.split_at((part.start - cells.start) as usize * stride);
            let (rows, next) = rows.split_at(part.len as usize * stride);
            Incoming { shape, lanes: lane..lane + part.len as usize, rows, next }
        })
    }

    /// Says that a value that is not finite was stored.
    pub fn note_broken(&mut self) {
        self.broken = true;
    }
}

/// Rows of all heads that go to one block of each head.
pub struct Incoming<'r> {
    shape: Geometry,
    lanes: Range<usize>,
    /// `[lanes, heads, row_bytes]`.
    rows: &'r [u8],
    /// What lies behind them, and is copied next.
    next: &'r [u8],
}

impl Incoming<'_> {
    /// How many places they go to.
    pub fn n_places(&self) -> usize {
        2 * self.shape.heads
    }

    /// Writes the rows to their [places](RowStore::incoming). Returns whether all values are finite.
    ///
    /// Whole blocks are put together in `block`, which is reused, and written past the caches.
    pub fn write(&self, places: &mut [&mut [u8]], uncached: &Uncached, block: &mut Vec<u8>) -> bool {
        let (shape, len) = (self.shape, self.shape.row_bytes());
        let stride = shape.heads * len;
        let (codes, params) = places.split_at_mut(shape.heads);
        let finite = shape.are_finite(self.rows);
        let mut ahead = self.next.chunks(self.rows.len().div_ceil(shape.heads));
        block.clear();
        block.resize(shape.block_codes(), 0);
        for (head, codes) in codes.iter_mut().enumerate() {
            // The hardware stops at every page, of which blocks on the host have many.
            ahead.next().into_iter().for_each(prefetch);
            // They are short, and written last, so that none has to wait for memory.
            prefetch(params[head]);
            let rows = &self.rows[head * len..];
            if self.lanes.len() == LANES {
                shape.scatter_lanes(block, self.lanes.clone(), rows, stride);
                uncached.copy(codes, block);
            } else {
                shape.scatter_lanes(codes, self.lanes.clone(), rows, stride);
            }
        }
        if shape.params > 0 {
            for (head, params) in params.iter_mut().enumerate() {
                let params = params.as_chunks_mut::<2>().0;
                for (row, lane) in self.rows[head * len..].chunks(stride).zip(self.lanes.clone()) {
                    let row = row[shape.codes()..len].as_chunks::<2>().0;
                    let lane = params.iter_mut().skip(lane).step_by(LANES);
                    lane.zip(row).for_each(|(to, from)| *to = *from);
                }
            }
        }
        finite
    }
}
