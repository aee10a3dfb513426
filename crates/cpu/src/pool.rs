//! Rows of one side (K or V) of one layer: where they lie.
//!
//! Cells stand in blocks of [`LANES`], so that sixteen keys are scored at once with one lane for each and without a
//! horizontal sum, and sixteen values are weighted one after the other. Blocks of one head are neighbours
//! (head-major), so that a step streams them. How a row is packed into codes and parameters is its dtype's file;
//! this one interleaves the codes of a block:
//!
//! ```text
//! keys     [row / unit][16 cells][unit bytes]      unit = one element of a float dtype, 4 bytes of a packed one
//! values   [16 / together][row][together cells]    together = 1 for float dtypes, 4 for packed ones
//! both     parameters [params][16 cells] of f16
//! ```
//!
//! Four bytes of a cell's key meet four bytes of the query in one integer dot product; four cells' values meet their
//! four weights.
mod float;
mod gather;
mod q4;
mod q8;
pub(crate) mod quantised;
mod t4;

use crate::Growth;
use crate::arch::{Isa, Kernel, LANES, Simd};
use crate::pages::Pages;
use crate::rotation::{rotate, rotate_whole, rotate_whole_back};
pub use float::{BF16, F16, F32};
pub use gather::{Block, Blocks, Gather, MAX_BLOCKS};
use half::f16;
use kvist_backend::{DType, Side as Half, Storage};
use kvist_cache::Run;
pub use q4::Q4;
pub use q8::Q8;
pub use quantised::{PackedQuery, Quads};
pub use t4::T4;

/// Evaluate `$body` with the type `$C` that packs `$dtype`. A new dtype: one file and its line here.
macro_rules! with_codec {
    ($dtype:expr, $C:ident => $body:expr) => {
        match $dtype {
            kvist_backend::DType::F32 => {
                type $C = $crate::pool::F32;
                $body
            }
            kvist_backend::DType::F16 => {
                type $C = $crate::pool::F16;
                $body
            }
            kvist_backend::DType::BF16 => {
                type $C = $crate::pool::BF16;
                $body
            }
            kvist_backend::DType::Q8 => {
                type $C = $crate::pool::Q8;
                $body
            }
            kvist_backend::DType::Q4 => {
                type $C = $crate::pool::Q4;
                $body
            }
            kvist_backend::DType::T4 => {
                type $C = $crate::pool::T4;
                $body
            }
        }
    };
}

/// How one dtype packs a row, and the two products attention needs of packed blocks.
///
/// `group` is how many elements share a scale. Of `T4`, whose rows have one scale, it is how many come first with a byte each:
/// 0, or the outliers.
pub trait Codec: 'static {
    /// Bytes of one element of a float dtype; `None` if four bytes of a cell stand together.
    const ELEMENT: Option<usize>;
    /// Bytes of codes of a row of `head_dim` elements.
    fn code_bytes(head_dim: usize, group: usize) -> usize;
    /// f16 parameters of a row.
    fn params(head_dim: usize, group: usize) -> usize;
    /// Is every stored value a finite number?
    fn encode(row: &[f32], group: usize, codes: &mut [u8], params: &mut [f16]) -> bool;
    fn decode(codes: &[u8], params: &[f16], group: usize, row: &mut [f32]);

    /// `line[query][at + i] = query · key` for `queries` and every cell `i` of `blocks`, the rest of `line` alone.
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

/// Query rows that stand side by side in [`Queries::rows`].
pub const QUERY_ROWS: usize = 8;

/// Query rows, ready for any dtype of keys.
pub struct Queries<'q> {
    pub n: usize,
    /// `[n / 8, head_dim, 8]`: eight rows side by side, so that a kernel needs one address for all of them.
    pub rows: &'q [f32],
    /// Row of the first query.
    pub first: usize,
    /// What integer products need; empty for float dtypes.
    pub packed: &'q [PackedQuery],
}

/// One line of scores or weights per query, `stride` apart; the cells of the blocks stand at `at`.
pub struct Lines<'l> {
    pub data: &'l mut [f32],
    pub stride: usize,
    pub at: usize,
}

/// One row of sums per query, `stride` apart from `first` on.
pub struct Sums<'s> {
    pub n: usize,
    pub data: &'s mut [f32],
    pub first: usize,
    pub stride: usize,
}

impl Lines<'_> {
    /// The same lines; the cells stand at `at`.
    pub fn reborrow(&mut self, at: usize) -> Lines<'_> {
        Lines { data: &mut *self.data, stride: self.stride, at }
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
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        C::accumulate(s, &self.lines, &self.blocks, &mut self.sums, self.quads);
    }
}

/// `scores` of `storage`'s dtype on `isa`.
pub fn scores(isa: Isa, dtype: DType, queries: Queries<'_>, blocks: Blocks<'_>, lines: Lines<'_>) {
    with_codec!(dtype, C => isa.run(ScoresKernel::<C> { queries, blocks, lines, codec: std::marker::PhantomData }))
}

/// `accumulate` of `storage`'s dtype on `isa`.
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

/// Where the bytes of a block stand.
#[derive(Clone, Copy, Debug)]
enum Interleaving {
    Keys { unit: usize },
    Values { together: usize },
}

/// The shape of one side of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub storage: Storage,
    pub heads: usize,
    pub head_dim: usize,
    /// Bytes of codes per cell, filled up to whole units.
    row: usize,
    /// f16 parameters per cell.
    params: usize,
    /// See [`Codec`].
    pub group: usize,
    interleaving: Interleaving,
}

impl Geometry {
    pub fn new(half: Half, storage: Storage, heads: u32, head_dim: u32) -> Self {
        let group = match storage.dtype {
            DType::T4 => storage.n_outliers(head_dim),
            _ => storage.group,
        } as usize;
        let (heads, head_dim) = (heads as usize, head_dim as usize);
        let (bytes, element, params) = with_codec!(storage.dtype, C => {
            (C::code_bytes(head_dim, group), C::ELEMENT, C::params(head_dim, group))
        });
        let (row, interleaving) = match half {
            Half::K => {
                let unit = element.unwrap_or(4);
                (bytes.next_multiple_of(unit), Interleaving::Keys { unit })
            }
            Half::V => (bytes, Interleaving::Values { together: if element.is_some() { 1 } else { 4 } }),
        };
        Geometry { storage, heads, head_dim, row, params, group, interleaving }
    }

    /// Bytes that `cells` cells take: whole blocks of every head. `None` if it overflows.
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

    /// Where byte `j` of the row in lane `lane` stands in its block.
    fn place(&self, j: usize, lane: usize) -> usize {
        match self.interleaving {
            Interleaving::Keys { unit } => (j / unit * LANES + lane) * unit + j % unit,
            Interleaving::Values { together } => {
                lane / together * together * self.row + j * together + lane % together
            }
        }
    }
}

/// Neighbouring cells of every head, in one slab: codes `[heads][blocks]`, then parameters `[heads][blocks]`.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    cells: Run,
    slab: usize,
    codes: usize,
    params: usize,
}

/// One side of one layer.
#[derive(Debug)]
pub struct Side {
    pub shape: Geometry,
    segments: Vec<Segment>,
    /// Was anything stored that is not a finite number?
    broken: bool,
    /// Channels of every head, one head after the other, in the order in which they are stored; empty if as they come.
    order: Vec<u16>,
    // One row on its way.
    codes: Vec<u8>,
    params: Vec<f16>,
}

impl Side {
    /// `order` is looked at by storages with outliers.
    pub fn new(shape: Geometry, order: &[u16]) -> Self {
        let (codes, params) = (vec![0; shape.row], vec![f16::ZERO; shape.params]);
        let order = if shape.storage.outliers { order.to_vec() } else { Vec::new() };
        Side { shape, segments: Vec::new(), broken: false, order, codes, params }
    }

    /// The channels of `head` in the order in which they are stored.
    fn order(&self, head: usize) -> Option<&[u16]> {
        let d = self.shape.head_dim;
        self.order.get(head * d..(head + 1) * d)
    }

    /// `row` of `head` as it is stored: its channels in their order, rotated. Dot products of two rows stay what they are.
    pub fn turn(&self, head: usize, row: &[f32], turned: &mut [f32]) {
        match self.order(head) {
            Some(order) => {
                turned.iter_mut().zip(order).for_each(|(x, channel)| *x = row[usize::from(*channel)])
            }
            None => turned.copy_from_slice(row),
        }
        match self.shape.storage {
            Storage { dtype: DType::T4, .. } => rotate_whole(&mut turned[self.shape.group..]),
            Storage { rotate: true, .. } => rotate(turned),
            _ => {}
        }
    }

    /// The inverse of [`turn`](Self::turn).
    pub fn turn_back(&self, head: usize, row: &mut [f32]) {
        match self.shape.storage {
            Storage { dtype: DType::T4, .. } => rotate_whole_back(&mut row[self.shape.group..]),
            Storage { rotate: true, .. } => rotate(row),
            _ => {}
        }
        if let Some(order) = self.order(head) {
            let turned = row.to_vec();
            order.iter().zip(turned).for_each(|(channel, x)| row[usize::from(*channel)] = x);
        }
    }

    /// Are rows stored otherwise than they come?
    pub fn turns(&self) -> bool {
        self.shape.storage.rotate || self.shape.storage.dtype == DType::T4
    }

    /// Cells there is room for.
    pub fn cells(&self) -> u32 {
        self.segments.last().map_or(0, |s| s.cells.end())
    }

    /// The segment that room for cells up to `cells` would add, at byte `at` of slab `slab`.
    pub fn segment(&self, cells: u32, growth: Growth, slab: usize, at: usize) -> Segment {
        let start = if growth == Growth::Concatenate { 0 } else { self.cells() };
        let cells = Run { start, len: cells.saturating_sub(start) };
        let blocks = (cells.len as usize).div_ceil(LANES);
        Segment { cells, slab, codes: at, params: at + self.shape.heads * blocks * self.shape.block_codes() }
    }

    /// Take in room that exists now. A concatenating side copies what it holds, and lets go of where it was.
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

    /// Block of `head` and `cell` inside a segment.
    fn block_of(segment: &Segment, head: usize, cell: u32) -> usize {
        let blocks = (segment.cells.len as usize).div_ceil(LANES);
        head * blocks + (cell - segment.cells.start) as usize / LANES
    }

    /// Codes of the block of `head` that holds `cell`.
    pub fn codes<'b>(&self, slabs: &'b [Pages], head: usize, cell: u32) -> &'b [u8] {
        let segment = self.segment_of(cell);
        let at = segment.codes + Self::block_of(segment, head, cell) * self.shape.block_codes();
        &slabs[segment.slab].bytes()[at..at + self.shape.block_codes()]
    }

    fn lane_of(segment: &Segment, cell: u32) -> usize {
        (cell - segment.cells.start) as usize % LANES
    }

    pub fn write(&mut self, slabs: &mut [Pages], head: usize, cell: u32, row: &[f32]) {
        let shape = self.shape;
        let (codes, params) = (&mut self.codes[..], &mut self.params[..]);
        let finite = with_codec!(shape.storage.dtype, C => C::encode(row, shape.group, codes, params));
        self.broken |= !finite;
        let segment = *self.segment_of(cell);
        let (block, lane) = (Self::block_of(&segment, head, cell), Self::lane_of(&segment, cell));
        let slab = slabs[segment.slab].bytes_mut();
        let at = segment.codes + block * shape.block_codes();
        scatter(
            &mut slab[at..at + shape.block_codes()],
            &self.codes,
            |j| shape.place(j, lane),
            shape.interleaving,
        );
        let at = segment.params + block * shape.block_params();
        let line = slab[at..at + shape.block_params()].chunks_exact_mut(2 * LANES);
        for (line, param) in line.zip(&self.params) {
            line[2 * lane..2 * lane + 2].copy_from_slice(&param.to_le_bytes());
        }
    }

    pub fn read(&self, slabs: &[Pages], head: usize, cell: u32, row: &mut [f32]) {
        let shape = self.shape;
        let segment = self.segment_of(cell);
        let (block, lane) = (Self::block_of(segment, head, cell), Self::lane_of(segment, cell));
        let slab = slabs[segment.slab].bytes();
        let at = segment.codes + block * shape.block_codes();
        let codes: Vec<u8> = (0..shape.row).map(|j| slab[at + shape.place(j, lane)]).collect();
        let at = segment.params + block * shape.block_params();
        let param = |p: usize| {
            let at = at + (p * LANES + lane) * 2;
            f16::from_le_bytes([slab[at], slab[at + 1]])
        };
        let params: Vec<f16> = (0..shape.params).map(param).collect();
        with_codec!(shape.storage.dtype, C => C::decode(&codes, &params, shape.group, row));
    }

    /// Packed bytes of `len` cells of every head, from `from` to `to`; the runs do not overlap.
    pub fn copy(&mut self, slabs: &mut [Pages], from: u32, to: u32, len: u32) {
        let shape = self.shape;
        for i in 0..len {
            let (a, b) = (*self.segment_of(from + i), *self.segment_of(to + i));
            let (la, lb) = (Self::lane_of(&a, from + i), Self::lane_of(&b, to + i));
            for head in 0..shape.heads {
                let (ba, bb) = (Self::block_of(&a, head, from + i), Self::block_of(&b, head, to + i));
                for j in 0..shape.row {
                    let from = a.codes + ba * shape.block_codes() + shape.place(j, la);
                    let to = b.codes + bb * shape.block_codes() + shape.place(j, lb);
                    slabs[b.slab].bytes_mut()[to] = slabs[a.slab].bytes()[from];
                }
                for p in 0..shape.params {
                    let from = a.params + ba * shape.block_params() + (p * LANES + la) * 2;
                    let to = b.params + bb * shape.block_params() + (p * LANES + lb) * 2;
                    copy(slabs, (a.slab, from), (b.slab, to), 2);
                }
            }
        }
    }

    /// The newest segment's slab has another number now.
    pub fn moved_to(&mut self, slab: usize) {
        if let Some(segment) = self.segments.last_mut() {
            segment.slab = slab;
        }
    }

    /// Slab of the newest segment: where a concatenating side lies.
    pub fn slab(&self) -> Option<usize> {
        self.segments.last().map(|s| s.slab)
    }
}

/// Put `codes[j]` at `place(j)`: two loops, because most units are whole.
fn scatter(block: &mut [u8], codes: &[u8], place: impl Fn(usize) -> usize, interleaving: Interleaving) {
    match interleaving {
        Interleaving::Values { together: 1 } => {
            let at = place(0);
            block[at..at + codes.len()].copy_from_slice(codes);
        }
        Interleaving::Values { .. } => {
            for (j, code) in codes.iter().enumerate() {
                block[place(j)] = *code;
            }
        }
        Interleaving::Keys { unit } => {
            for (i, unit_codes) in codes.chunks_exact(unit).enumerate() {
                let at = place(i * unit);
                block[at..at + unit].copy_from_slice(unit_codes);
            }
        }
    }
}

fn copy(slabs: &mut [Pages], from: (usize, usize), to: (usize, usize), len: usize) {
    if from.0 == to.0 {
        slabs[to.0].bytes_mut().copy_within(from.1..from.1 + len, to.1);
    } else if let Ok([a, b]) = slabs.get_disjoint_mut([from.0, to.0]) {
        b.bytes_mut()[to.1..to.1 + len].copy_from_slice(&a.bytes()[from.1..from.1 + len]);
    }
}
