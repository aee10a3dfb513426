//! Memory layout of the rows of K or of V of one layer.
//!
//! Cells are stored in blocks of [`LANES`]. Sixteen keys are scored at once, one per lane and without a horizontal sum;
//! sixteen values are weighted one after the other. Blocks of one head are adjacent (head-major), so that a step
//! streams them. Each dtype's file packs a row into codes and parameters. This file interleaves the codes of a block:
//!
//! ```text
//! keys     [row / unit][16 cells][unit bytes]      unit = one element of a float dtype, 4 bytes of a packed one
//! values   [16 / together][row][together cells]    together = 1 for float dtypes, 4 for packed ones
//! both     parameters [params][16 cells] of f16
//! ```
//!
//! [`rows`] takes single rows out of a block, and puts them back.
//!
//! One integer dot product combines four bytes of a cell's key with four bytes of the query, or the values of four
//! cells with their four weights.
mod encode;
mod float;
mod gather;
mod image;
mod lanes;
pub(crate) mod pairs;
mod q4;
mod q8;
pub(crate) mod quantised;
mod resize;
mod rows;
#[cfg(test)]
mod stored;
mod t4;

use crate::Growth;
use crate::arch::{Isa, Kernel, LANES, Simd, Uses};
use crate::pages::Pages;
pub use float::{BF16, F16, F32};
pub use gather::{Block, Blocks, Gather, MAX_BLOCKS};
use half::f16;
use kvist_cache::CellRun;
use kvist_device::rotation::{rotate, rotate_whole, rotate_whole_back};
use kvist_device::{DType, Side, Storage};
pub use q4::Q4;
pub use q8::Q8;
pub use quantised::{PackedQuery, Quads};
pub use rows::Incoming;
use rows::param_at;
pub use t4::T4;

/// Evaluates `$body` with the type `$C` that packs `$dtype`. To add a dtype, add a file and a line here.
macro_rules! with_codec {
    ($dtype:expr, $C:ident => $body:expr) => {
        match $dtype {
            kvist_device::DType::F32 => {
                type $C = $crate::pool::F32;
                $body
            }
            kvist_device::DType::F16 => {
                type $C = $crate::pool::F16;
                $body
            }
            kvist_device::DType::BF16 => {
                type $C = $crate::pool::BF16;
                $body
            }
            kvist_device::DType::Q8 => {
                type $C = $crate::pool::Q8;
                $body
            }
            kvist_device::DType::Q4 => {
                type $C = $crate::pool::Q4;
                $body
            }
            kvist_device::DType::T4 => {
                type $C = $crate::pool::T4;
                $body
            }
        }
    };
}
use with_codec;

/// How one dtype packs a row, and the two products with packed blocks that attention needs.
///
/// `group` is the number of elements that share a scale. For `T4`, whose rows have one scale, it is the number of
/// leading elements stored in a byte each: 0, or the number of outliers.
pub trait Codec: 'static {
    /// Bytes of one element of a float dtype; `None` if codes are interleaved in units of four bytes.
    const ELEMENT: Option<usize>;
    /// The products of [`scores`](Self::scores) and [`accumulate`](Self::accumulate): of codes they are those of bytes.
    const USES: Uses = if Self::ELEMENT.is_some() { Uses::Floats } else { Uses::Bytes };
    /// Code bytes of a row of `head_dim` elements.
    fn code_bytes(head_dim: usize, group: usize) -> usize;
    /// Number of f16 parameters of a row.
    fn params(head_dim: usize, group: usize) -> usize;
    /// Packs a row. Returns true if every stored value is finite. Plain code, which the compiler vectorises for the instruction
    /// set of [`encode`](encode::encode): it must be `#[inline(always)]`, and so must everything it calls.
    fn encode(row: &[f32], group: usize, codes: &mut [u8], params: &mut [f16]) -> bool;
    fn decode(codes: &[u8], params: &[f16], group: usize, row: &mut [f32]);

    /// `line[query][at + i] = query · key` for `queries` and every cell `i` of `blocks`. Leaves the rest of `line`
    /// unchanged.
    fn scores<S: Simd>(s: S, queries: &Queries<'_>, blocks: &Blocks<'_>, lines: &mut Lines<'_>);
    /// `sums[query] += Σ weight * value` over the cells of `blocks` with the weights `lines[query][at..]`.
    fn accumulate<S: Simd>(
        s: S,
        lines: &Lines<'_>,
        blocks: &Blocks<'_>,
        sums: &mut Sums<'_>,
        quads: &mut Quads,
    );
}

/// Number of query rows interleaved in [`Queries::rows`].
pub const QUERY_ROWS: usize = 8;

/// Query rows, prepared for any key dtype.
pub struct Queries<'q> {
    pub n: usize,
    /// `[n / 8, head_dim, 8]`: eight rows interleaved, so that a kernel needs one address for all of them.
    pub rows: &'q [f32],
    /// Row index of the first query.
    pub first: usize,
    /// The queries packed for integer products; empty for float dtypes.
    pub packed: &'q [PackedQuery],
}

/// One line of scores or weights per query, `stride` apart. The cells of the blocks start at place `at`.
pub struct Lines<'l> {
    pub data: &'l mut [f32],
    pub stride: usize,
    pub at: usize,
}

/// One row of sums per query, starting at `first`, `stride` apart.
pub struct Sums<'s> {
    pub n: usize,
    pub data: &'s mut [f32],
    pub first: usize,
    pub stride: usize,
}

impl Lines<'_> {
    /// The same lines with the cells starting at `at`.
    pub fn reborrow(&mut self, at: usize) -> Lines<'_> {
        Lines { data: &mut *self.data, stride: self.stride, at }
    }

    /// The line of a query, for `n` blocks.
    #[inline(always)]
    fn of_blocks(&self, query: usize, n: usize) -> &[[f32; LANES]] {
        self.data[query * self.stride + self.at..][..n * LANES].as_chunks().0
    }
}

impl Sums<'_> {
    #[inline(always)]
    fn row(&mut self, query: usize, head_dim: usize) -> &mut [f32] {
        let at = self.first + query * self.stride;
        &mut self.data[at..at + head_dim]
    }
}

pub struct ScoresKernel<'k, C> {
    pub queries: Queries<'k>,
    pub blocks: Blocks<'k>,
    pub lines: Lines<'k>,
    pub codec: std::marker::PhantomData<C>,
}

impl<C: Codec> Kernel for ScoresKernel<'_, C> {
    type Out = ();
    const USES: Uses = C::USES;
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        C::scores(s, &self.queries, &self.blocks, &mut self.lines);
    }
}

pub struct AccumulateKernel<'k, C> {
    pub lines: Lines<'k>,
    pub blocks: Blocks<'k>,
    pub sums: Sums<'k>,
    pub quads: &'k mut Quads,
    pub codec: std::marker::PhantomData<C>,
}

impl<C: Codec> Kernel for AccumulateKernel<'_, C> {
    type Out = ();
    const USES: Uses = C::USES;
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        C::accumulate(s, &self.lines, &self.blocks, &mut self.sums, self.quads);
    }
}

/// Runs [`Codec::scores`] of `dtype` on `isa`.
pub fn scores(isa: Isa, dtype: DType, queries: Queries<'_>, blocks: Blocks<'_>, lines: Lines<'_>) {
    with_codec!(dtype, C => isa.run(ScoresKernel::<C> { queries, blocks, lines, codec: std::marker::PhantomData }))
}

/// Runs [`Codec::accumulate`] of `dtype` on `isa`.
pub fn accumulate(
    isa: Isa,
    dtype: DType,
    lines: Lines<'_>,
    blocks: Blocks<'_>,
    sums: Sums<'_>,
    quads: &mut Quads,
) {
    with_codec!(dtype, C => isa.run(AccumulateKernel::<C> {
        lines, blocks, sums, quads, codec: std::marker::PhantomData
    }))
}

/// How the code bytes of a block are interleaved.
#[derive(Clone, Copy, Debug)]
enum Interleaving {
    Keys { unit: usize },
    Values { together: usize },
}

/// The shape of the rows of K or of V of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub storage: Storage,
    pub heads: usize,
    pub head_dim: usize,
    /// Code bytes per cell, padded to whole units.
    row: usize,
    /// f16 parameters per cell.
    params: usize,
    /// See [`Codec`].
    pub group: usize,
    interleaving: Interleaving,
}

impl Geometry {
    pub fn new(half: Side, storage: Storage, heads: u32, head_dim: u32) -> Self {
        let group = match storage.dtype {
            DType::T4 => storage.n_outliers(head_dim),
            _ => storage.group,
        } as usize;
        let (heads, head_dim) = (heads as usize, head_dim as usize);
        let (bytes, element, params) = with_codec!(storage.dtype, C => {
            (C::code_bytes(head_dim, group), C::ELEMENT, C::params(head_dim, group))
        });
        let (row, interleaving) = match half {
            Side::K => {
                let unit = element.unwrap_or(4);
                (bytes.next_multiple_of(unit), Interleaving::Keys { unit })
            }
            Side::V => (bytes, Interleaving::Values { together: if element.is_some() { 1 } else { 4 } }),
        };
        Geometry { storage, heads, head_dim, row, params, group, interleaving }
    }

    /// Bytes for `cells` cells: whole blocks of every head. `None` on overflow.
    pub fn bytes(&self, cells: u32) -> Option<u64> {
        let blocks = u64::from(cells).div_ceil(LANES as u64);
        let block = (self.block_codes() + self.block_params()) as u64;
        blocks.checked_mul(self.heads as u64)?.checked_mul(block)
    }

    fn block_codes(&self) -> usize {
        LANES * self.row
    }
    fn block_params(&self) -> usize {
        LANES * self.params * 2
    }
}

/// Consecutive cells of every head in one slab: codes `[heads][blocks]`, then parameters `[heads][blocks]`.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    cells: CellRun,
    slab: usize,
    codes: usize,
    params: usize,
}

/// The rows of K or of V of one layer.
#[derive(Debug)]
pub struct RowStore {
    pub shape: Geometry,
    segments: Vec<Segment>,
    /// True once a value that is not finite was stored. It may be gone since.
    broken: bool,
    /// For every head, the channels in the order in which they are stored; empty if they are stored in their original
    /// order.
    order: Vec<u16>,
    // Buffers for one row.
    codes: Vec<u8>,
    params: Vec<f16>,
}

impl RowStore {
    /// `order` is used only by storages with outliers.
    pub fn new(shape: Geometry, order: &[u16]) -> Self {
        let (codes, params) = (vec![0; shape.row], vec![f16::ZERO; shape.params]);
        let order = if shape.storage.outliers { order.to_vec() } else { Vec::new() };
        RowStore { shape, segments: Vec::new(), broken: false, order, codes, params }
    }

    /// The channels of `head` in the order in which they are stored; `None` for the original order.
    fn order(&self, head: usize) -> Option<&[u16]> {
        let d = self.shape.head_dim;
        self.order.get(head * d..(head + 1) * d)
    }

    /// Transforms a `row` of `head` into the stored form: channels reordered, then rotated. Dot products of two rows
    /// stay the same.
    pub fn transform(&self, head: usize, row: &[f32], transformed: &mut [f32]) {
        match self.order(head) {
            Some(order) => {
                transformed.iter_mut().zip(order).for_each(|(x, channel)| *x = row[usize::from(*channel)])
            }
            None => transformed.copy_from_slice(row),
        }
        match self.shape.storage {
            Storage { dtype: DType::T4, .. } => rotate_whole(&mut transformed[self.shape.group..]),
            Storage { rotate: true, .. } => rotate(transformed),
            _ => {}
        }
    }

    /// The inverse of [`transform`](Self::transform).
    pub fn restore(&self, head: usize, row: &mut [f32]) {
        match self.shape.storage {
            Storage { dtype: DType::T4, .. } => rotate_whole_back(&mut row[self.shape.group..]),
            Storage { rotate: true, .. } => rotate(row),
            _ => {}
        }
        if let Some(order) = self.order(head) {
            let transformed = row.to_vec();
            order.iter().zip(transformed).for_each(|(channel, x)| row[usize::from(*channel)] = x);
        }
    }

    /// True if rows are stored in a transformed form.
    pub fn transforms(&self) -> bool {
        self.shape.storage.rotate || self.shape.storage.dtype == DType::T4
    }

    /// Number of cells that fit into the segments.
    pub fn cells(&self) -> u32 {
        self.segments.last().map_or(0, |s| s.cells.end())
    }

    /// The segment that would be added to make room for `cells` cells, at byte `at` of slab `slab`.
    pub fn segment(&self, cells: u32, growth: Growth, slab: usize, at: usize) -> Segment {
        let start = if growth == Growth::Concatenate { 0 } else { self.cells() };
        let cells = CellRun { start, len: cells.saturating_sub(start) };
        let blocks = (cells.len as usize).div_ceil(LANES);
        Segment { cells, slab, codes: at, params: at + self.shape.heads * blocks * self.shape.block_codes() }
    }

    /// Adds a segment whose memory exists. A concatenating store copies its cells there and drops its old segment.
    pub fn adopt(&mut self, segment: Segment, growth: Growth, slabs: &mut [Pages]) {
        if growth == Growth::Concatenate
            && let Some(old) = self.segments.pop()
        {
            for (block, from, to) in [
                (self.shape.block_codes(), old.codes, segment.codes),
                (self.shape.block_params(), old.params, segment.params),
            ] {
                let head = |segment: &Segment| (segment.cells.len as usize).div_ceil(LANES) * block;
                for h in 0..self.shape.heads {
                    let (from, to) = (from + h * head(&old), to + h * head(&segment));
                    copy(slabs, (old.slab, from), (segment.slab, to), head(&old));
                }
            }
        }
        self.segments.push(segment);
    }

    fn segment_of(&self, cell: u32) -> &Segment {
        let found = self.segments.iter().rfind(|s| s.cells.start <= cell);
        found
            .filter(|s| cell < s.cells.end())
            .unwrap_or_else(|| panic!("cell {cell} lies past the {} the pool was grown to", self.cells()))
    }

    /// Index of the block of `head` and `cell` in a segment.
    fn block_of(segment: &Segment, head: usize, cell: u32) -> usize {
        let blocks = (segment.cells.len as usize).div_ceil(LANES);
        head * blocks + (cell - segment.cells.start) as usize / LANES
    }

    /// Codes of the block of `head` that contains `cell`.
    pub fn codes<'b>(&self, slabs: &'b [Pages], head: usize, cell: u32) -> &'b [u8] {
        let block = self.place(self.segment_of(cell), head, cell);
        &slabs[block.slab].bytes()[block.codes]
    }

    /// Code bytes of a row, padding included.
    pub fn row_codes(&self) -> usize {
        self.shape.row
    }

    /// True if a cell may contain a value that is not finite.
    pub fn may_have_nan(&self) -> bool {
        self.broken
    }

    fn lane_of(segment: &Segment, cell: u32) -> usize {
        (cell - segment.cells.start) as usize % LANES
    }

    pub fn write(&mut self, isa: Isa, slabs: &mut [Pages], head: usize, cell: u32, row: &[f32]) {
        let shape = self.shape;
        let (codes, params) = (&mut self.codes[..], &mut self.params[..]);
        self.broken |= !encode::encode(isa, shape.storage.dtype, (row, shape.group), codes, params);
        let segment = self.segment_of(cell);
        let (block, lane) = (self.place(segment, head, cell), Self::lane_of(segment, cell));
        let slab = slabs[block.slab].bytes_mut();
        shape.scatter(&mut slab[block.codes], lane, &self.codes);
        let line = &mut slab[block.params];
        for (p, param) in self.params.iter().enumerate() {
            line[param_at(p, lane)].copy_from_slice(&param.to_le_bytes());
        }
    }

    pub fn read(&self, slabs: &[Pages], head: usize, cell: u32, row: &mut [f32]) {
        let shape = self.shape;
        let segment = self.segment_of(cell);
        let (block, lane) = (self.place(segment, head, cell), Self::lane_of(segment, cell));
        let slab = slabs[block.slab].bytes();
        let mut codes = vec![0; shape.row];
        shape.gather(&slab[block.codes], lane, &mut codes);
        let line = &slab[block.params];
        let param = |p: usize| {
            let at = param_at(p, lane).start;
            f16::from_le_bytes([line[at], line[at + 1]])
        };
        let params: Vec<f16> = (0..shape.params).map(param).collect();
        with_codec!(shape.storage.dtype, C => C::decode(&codes, &params, shape.group, row));
    }

    /// Copies the packed bytes of `len` cells of every head. The ranges must not overlap.
    pub fn copy(&mut self, slabs: &mut [Pages], from: u32, to: u32, len: u32) {
        let shape = self.shape;
        for i in 0..len {
            let (a, b) = (*self.segment_of(from + i), *self.segment_of(to + i));
            let (la, lb) = (Self::lane_of(&a, from + i), Self::lane_of(&b, to + i));
            for head in 0..shape.heads {
                let (a, b) = (self.place(&a, head, from + i), self.place(&b, head, to + i));
                shape.gather(&slabs[a.slab].bytes()[a.codes], la, &mut self.codes);
                shape.scatter(&mut slabs[b.slab].bytes_mut()[b.codes], lb, &self.codes);
                for p in 0..shape.params {
                    let (from, to) = (param_at(p, la).start, param_at(p, lb).start);
                    copy(slabs, (a.slab, a.params.start + from), (b.slab, b.params.start + to), 2);
                }
            }
        }
    }

    /// Updates the slab index of the newest segment.
    pub fn moved_to(&mut self, slab: usize) {
        if let Some(segment) = self.segments.last_mut() {
            segment.slab = slab;
        }
    }

    /// Slab of the newest segment. A concatenating side has only this one.
    pub fn slab(&self) -> Option<usize> {
        self.segments.last().map(|s| s.slab)
    }
}

fn copy(slabs: &mut [Pages], from: (usize, usize), to: (usize, usize), len: usize) {
    if from.0 == to.0 {
        slabs[to.0].bytes_mut().copy_within(from.1..from.1 + len, to.1);
    } else if let Ok([a, b]) = slabs.get_disjoint_mut([from.0, to.0]) {
        b.bytes_mut()[to.1..to.1 + len].copy_from_slice(&a.bytes()[from.1..from.1 + len]);
    }
}
