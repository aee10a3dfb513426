//! Stored rows, one by one: in the interleaved blocks of a side, and outside them.
//!
//! Outside, a row is its codes without padding, then its parameters: the content of a
//! [`HostBlock`](kvist_device::HostBlock).
use super::gather::AHEAD;
use super::{Block, Geometry, Interleaving, RowStore, Segment};
use crate::arch::LANES;
use crate::pages::Pages;
use half::f16;
use kvist_cache::CellRun;
use kvist_device::DType;
use std::ops::Range;

impl Geometry {
    /// Code bytes of a row, without padding.
    fn codes(&self) -> usize {
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

    /// Copies the codes of the row in `lane` out of a block; `codes` may end before the row's padding.
    pub(super) fn gather(&self, block: &[u8], lane: usize, codes: &mut [u8]) {
        match self.interleaving {
            Interleaving::Values { together: 1 } => {
                codes.copy_from_slice(&block[lane * self.row..][..codes.len()]);
            }
            Interleaving::Values { .. } => {
                let cells = &block[lane / 4 * 4 * self.row..][..4 * self.row];
                codes
                    .iter_mut()
                    .zip(cells.as_chunks::<4>().0)
                    .for_each(|(code, four)| *code = four[lane % 4]);
            }
            Interleaving::Keys { unit: 2 } => gather_units::<2>(block, lane, codes),
            Interleaving::Keys { .. } => gather_units::<4>(block, lane, codes),
        }
    }

    /// The inverse of [`gather`](Self::gather). Padding becomes zero.
    pub(super) fn scatter(&self, block: &mut [u8], lane: usize, codes: &[u8]) {
        match self.interleaving {
            Interleaving::Values { together: 1 } => {
                block[lane * self.row..][..codes.len()].copy_from_slice(codes);
            }
            Interleaving::Values { .. } => {
                let cells = &mut block[lane / 4 * 4 * self.row..][..4 * self.row];
                codes
                    .iter()
                    .zip(cells.as_chunks_mut::<4>().0)
                    .for_each(|(code, four)| four[lane % 4] = *code);
            }
            Interleaving::Keys { unit: 2 } => scatter_units::<2>(block, lane, codes),
            Interleaving::Keys { .. } => scatter_units::<4>(block, lane, codes),
        }
    }

    /// Whether these lanes begin with four packed values that are interleaved with each other. They are copied together.
    fn four_together(&self, lanes: &Range<usize>) -> bool {
        matches!(self.interleaving, Interleaving::Values { together: 4 })
            && lanes.start.is_multiple_of(4)
            && lanes.len() >= 4
    }

    /// Copies the codes of `lanes` out of a block; row `i` goes to byte `i * stride` of `rows`.
    fn gather_lanes(&self, block: &[u8], mut lanes: Range<usize>, mut rows: &mut [u8], stride: usize) {
        let codes = self.codes();
        while !lanes.is_empty() {
            let four = [0, 1, 2, 3].map(|i| i * stride..i * stride + codes);
            let n = if self.four_together(&lanes)
                && let Ok([a, b, c, d]) = rows.get_disjoint_mut(four)
            {
                let cells = block[lanes.start * self.row..].as_chunks::<4>().0.iter();
                for ((((cells, a), b), c), d) in cells.zip(a).zip(b).zip(c).zip(d) {
                    [*a, *b, *c, *d] = *cells;
                }
                4
            } else {
                self.gather(block, lanes.start, &mut rows[..codes]);
                1
            };
            lanes.start += n;
            rows = rows.get_mut(n * stride..).unwrap_or_default();
        }
    }

    /// The inverse of [`gather_lanes`](Self::gather_lanes).
    fn scatter_lanes(&self, block: &mut [u8], mut lanes: Range<usize>, mut rows: &[u8], stride: usize) {
        let codes = self.codes();
        while !lanes.is_empty() {
            let n = if self.four_together(&lanes) {
                let [a, b, c, d] = [0, 1, 2, 3].map(|i| &rows[i * stride..i * stride + codes]);
                let cells = block[lanes.start * self.row..].as_chunks_mut::<4>().0.iter_mut();
                for ((((cells, a), b), c), d) in cells.zip(a).zip(b).zip(c).zip(d) {
                    *cells = [*a, *b, *c, *d];
                }
                4
            } else {
                self.scatter(block, lanes.start, &rows[..codes]);
                1
            };
            lanes.start += n;
            rows = rows.get(n * stride..).unwrap_or_default();
        }
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

fn gather_units<const UNIT: usize>(block: &[u8], lane: usize, codes: &mut [u8]) {
    let mut lines = block.as_chunks::<UNIT>().0.as_chunks::<LANES>().0.iter();
    let (whole, rest) = codes.as_chunks_mut::<UNIT>();
    whole.iter_mut().zip(&mut lines).for_each(|(unit, line)| *unit = line[lane]);
    if let Some(line) = lines.next() {
        rest.copy_from_slice(&line[lane][..rest.len()]);
    }
}

fn scatter_units<const UNIT: usize>(block: &mut [u8], lane: usize, codes: &[u8]) {
    let mut lines = block.as_chunks_mut::<UNIT>().0.as_chunks_mut::<LANES>().0.iter_mut();
    let (whole, rest) = codes.as_chunks::<UNIT>();
    whole.iter().zip(&mut lines).for_each(|(unit, line)| line[lane] = *unit);
    if let Some(line) = lines.next() {
        let (start, padding) = line[lane].split_at_mut(rest.len());
        start.copy_from_slice(rest);
        padding.fill(0);
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

    /// Copies the stored rows of `cells` to `rows`, `[cells, heads, row_bytes]`.
    pub fn export(&self, slabs: &[Pages], cells: CellRun, rows: &mut [u8]) {
        let (shape, len) = (self.shape, self.shape.row_bytes());
        let stride = shape.heads * len;
        for (segment, part) in self.parts(cells) {
            let lane = Self::lane_of(segment, part.start);
            let lanes = lane..lane + part.len as usize;
            for head in 0..shape.heads {
                let block = self.place(segment, head, part.start);
                let slab = slabs[block.slab].bytes();
                let rows = &mut rows[(part.start - cells.start) as usize * stride + head * len..];
                shape.gather_lanes(&slab[block.codes], lanes.clone(), rows, stride);
                let params = &slab[block.params];
                for (row, lane) in rows.chunks_mut(stride).zip(lanes.clone()) {
                    for (p, param) in row[shape.codes()..len].chunks_exact_mut(2).enumerate() {
                        param.copy_from_slice(&params[param_at(p, lane)]);
                    }
                }
            }
        }
    }

    /// The inverse of [`export`](Self::export). There must be room for the cells.
    pub fn import(&mut self, slabs: &mut [Pages], cells: CellRun, rows: &[u8]) {
        let (shape, len) = (self.shape, self.shape.row_bytes());
        let stride = shape.heads * len;
        self.broken |= !shape.are_finite(rows);
        for (segment, part) in self.parts(cells) {
            let lane = Self::lane_of(segment, part.start);
            let lanes = lane..lane + part.len as usize;
            for head in 0..shape.heads {
                let block = self.place(segment, head, part.start);
                let slab = slabs[block.slab].bytes_mut();
                let rows = &rows[(part.start - cells.start) as usize * stride + head * len..];
                shape.scatter_lanes(&mut slab[block.codes], lanes.clone(), rows, stride);
                let params = &mut slab[block.params];
                for (row, lane) in rows.chunks(stride).zip(lanes.clone()) {
                    for (p, param) in row[shape.codes()..len].chunks_exact(2).enumerate() {
                        params[param_at(p, lane)].copy_from_slice(param);
                    }
                }
            }
        }
    }
}
