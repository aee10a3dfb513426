//! Scores and weighted sums of many queries as products of tiles of bf16.
//!
//! ```text
//! scores:      S[16 queries][16 cells] += Q[queries][32 elements] × K[elements][cells]      per 32 elements of head_dim
//! accumulate:  O[16 queries][16 elements] += W[queries][32 cells] × V[cells][elements]      per 32 places of a sequence
//! ```
//!
//! bf16 has 8 significant bits, so every number is cut into parts of bf16: `x = high + middle + low`, exactly. A query
//! or a weight has three parts, a key or a value of bf16 one, of f16 two, of f32 three. Products whose parts lie
//! further down than the last bit of a f32 are left out: 3, 5 and 6 products remain.
//!
//! A row of a product depends on nothing else than this row, and the 32 places of a step are those of the sequence,
//! wherever their cells lie. So a query has the same result to the bit whichever queries share its tiles and however
//! the cache is cut into tiles, as long as all its products are tile products. One query also takes this path: its
//! tiles are mostly empty, but K and V must be read from memory, which takes longer.
//!
//! With [`Precision::Rounded`] every number is rounded to bf16 instead, and one product remains.
//!
//! Keys and values are cut into parts once per call and all rows of the call use them. Tiles count subnormal numbers
//! as 0: parts below 2⁻¹²⁶, of weights that are no larger than 2⁻¹⁰⁸.
mod places;
mod square;

use super::{Block, Blocks, Lines, Sums};
use crate::arch::{Kernel, LANES, Simd, TileIsa, TileKernel, Tiles};
use crate::element::Element;
use kvist_device::DType;
pub use places::Places;
use square::{Rows, Square, load_square, multiply, store_square};
use std::marker::PhantomData;
use std::ops::Range;

/// Elements of head_dim, or places of a sequence, that one product of tiles sums up.
pub const STEP: usize = 2 * LANES;
/// Pairs of bf16 in a tile.
const TILE: usize = 16 * LANES;
/// Parts of a query or of a weight.
const LEFT_PARTS: usize = 3;

/// How numbers become bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In parts whose sum they are.
    Exact,
    /// Rounded: one part, and so one product.
    Rounded,
}

/// A [`Precision`] as a type: parts of a query or of a weight.
pub trait Left: 'static {
    const PARTS: usize;
    const EXACT: bool = Self::PARTS == LEFT_PARTS;
    /// Parts of a key or of a value of `C`.
    fn right<C: Parts>() -> usize {
        if Self::EXACT { C::PARTS } else { 1 }
    }
}
pub struct Exact;
pub struct Rounded;
impl Left for Exact {
    const PARTS: usize = LEFT_PARTS;
}
impl Left for Rounded {
    const PARTS: usize = 1;
}
/// Blocks of keys that are cut into parts at once.
const ABREAST: usize = 4;
/// Most places per call.
pub const MAX_PLACES: usize = 256;
const MAX_STEPS: usize = MAX_PLACES / STEP;

/// A dtype whose rows can be cut into parts.
pub trait Parts: 'static {
    /// Parts of a key or of a value.
    const PARTS: usize;
    /// Element `i` of sixteen keys.
    fn key<S: Simd>(s: S, block: &Block<'_>, i: usize) -> S::F;
    /// Elements `16 * vector..` of the value in lane `lane`; 0 past the end.
    fn value<S: Simd>(s: S, codes: &[u8], vector: usize) -> S::F;
    /// Byte of the cache line that begins with element `i` of the keys, if one does.
    fn line_of_keys(i: usize) -> Option<usize>;
}

impl<E: Element> Parts for E {
    const PARTS: usize = E::BF16_PARTS;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, i: usize) -> S::F {
        E::widen(s, &E::vectors(block.codes)[i])
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, codes: &[u8], vector: usize) -> S::F {
        match E::vectors(codes).get(vector) {
            Some(raw) => E::widen(s, raw),
            None => {
                let (mut last, rest) = ([0; 4 * LANES], &codes[vector * LANES * E::BYTES..]);
                last[..rest.len()].copy_from_slice(rest);
                E::widen(s, &E::vectors(&last)[0])
            }
        }
    }
    #[inline(always)]
    fn line_of_keys(i: usize) -> Option<usize> {
        let at = i * LANES * E::BYTES;
        at.is_multiple_of(64).then_some(at)
    }
}

/// The buffer from the first cache line on: a row of a tile that lies in two lines takes two reads. Buffers have room
/// for what is left out.
fn whole_lines_mut(buffer: &mut [u32]) -> &mut [u32] {
    let skipped = buffer.as_ptr().align_offset(64).min(LANES - 1);
    &mut buffer[skipped..]
}

fn whole_lines(buffer: &[u32]) -> &[u32] {
    &buffer[buffer.as_ptr().align_offset(64).min(LANES - 1)..]
}

/// Pairs of bf16 that [`SplitRow`] writes for rows of `head_dim` elements, if `rows` rows are stored.
pub fn split_len(head_dim: usize, rows: usize) -> usize {
    head_dim.div_ceil(STEP) * LEFT_PARTS * plane(rows) + LANES
}

/// Pairs from one part of the queries to the next. A tile may extend past the last row.
fn plane(rows: usize) -> usize {
    (rows + 16) * LANES
}

/// Pairs of bf16 that a call needs for keys and values of `head_dim` elements.
pub fn packed_len(head_dim: usize, dtype: DType) -> usize {
    let keys = ABREAST * head_dim.div_ceil(STEP);
    let values = head_dim.div_ceil(LANES) * MAX_STEPS;
    keys.max(values) * parts(dtype).unwrap_or(0) * TILE + LANES
}

/// Pairs of bf16 of the weights of a call.
pub const WEIGHTS_LEN: usize = MAX_STEPS * LEFT_PARTS * WEIGHT_ROWS * LANES + LANES;
/// Rows of weights that are cut into parts at once.
const WEIGHT_ROWS: usize = 32;

/// Parts of a stored element; `None` if tiles do not multiply the dtype.
pub fn parts(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => Some(<crate::element::F32 as Parts>::PARTS),
        DType::F16 => Some(<crate::element::F16 as Parts>::PARTS),
        DType::BF16 => Some(<crate::element::BF16 as Parts>::PARTS),
        DType::Q8 | DType::Q4 | DType::T4 => None,
    }
}

/// Cuts row `at` of `rows` query rows into parts. A pair consists of elements that are 16 apart, because sixteen
/// elements are a vector.
pub struct SplitRow<'s> {
    pub precision: Precision,
    pub row: &'s [f32],
    pub at: usize,
    pub rows: usize,
    /// `[steps, parts, rows + 16, 16]` pairs.
    pub split: &'s mut [u32],
}

impl Kernel for SplitRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (plane, split) = (plane(self.rows), whole_lines_mut(self.split));
        for (step, row) in self.row.chunks(STEP).enumerate() {
            let mut pair = [0.0; STEP];
            pair[..row.len()].copy_from_slice(row);
            let [even, odd] = halves(s, &pair);
            match self.precision {
                Precision::Exact => {
                    cut::<S, LEFT_PARTS>(
                        s,
                        even,
                        odd,
                        &mut split[step * LEFT_PARTS * plane..],
                        plane,
                        self.at,
                    );
                }
                Precision::Rounded => round(s, even, odd, &mut split[step * plane..], self.at),
            }
        }
    }
}

#[inline(always)]
fn halves<S: Simd>(s: S, pair: &[f32; STEP]) -> [S::F; 2] {
    let vectors = pair.as_chunks::<LANES>().0;
    [s.load(&vectors[0]), s.load(&vectors[1])]
}

/// Writes the parts of a row of pairs, each to row `row` of its plane.
#[inline(always)]
fn cut<S: Simd, const PARTS: usize>(
    s: S,
    mut even: S::F,
    mut odd: S::F,
    out: &mut [u32],
    plane: usize,
    row: usize,
) {
    for part in 0..PARTS {
        if let Some(out) = out[part * plane + row * LANES..].first_chunk_mut() {
            s.store_i(s.cut_pairs(even, odd), out);
        }
        if part + 1 < PARTS {
            (even, odd) = (s.sub(even, s.cut(even)), s.sub(odd, s.cut(odd)));
        }
    }
}

/// Writes a row of pairs, rounded, to row `row`.
#[inline(always)]
fn round<S: Simd>(s: S, even: S::F, odd: S::F, out: &mut [u32], row: usize) {
    if let Some(out) = out[row * LANES..].first_chunk_mut() {
        s.store_i(s.round_pairs(even, odd), out);
    }
}

/// Writes the parts of a row of keys or of values to row `row` of their tiles.
#[inline(always)]
fn right<S: Simd, C: Parts, L: Left>(s: S, even: S::F, odd: S::F, out: &mut [u32], row: usize) {
    match C::PARTS {
        _ if !L::EXACT => round(s, even, odd, out, row),
        1 => cut::<S, 1>(s, even, odd, out, TILE, row),
        2 => cut::<S, 2>(s, even, odd, out, TILE, row),
        _ => cut::<S, 3>(s, even, odd, out, TILE, row),
    }
}

/// Query rows in parts, as [`SplitRow`] cuts them.
pub struct SplitQueries<'q> {
    pub precision: Precision,
    pub split: &'q [u32],
    /// Rows that are stored.
    pub rows: usize,
    /// The first row of the call, and how many.
    pub first: usize,
    pub n: usize,
}

/// [`Codec::scores`](super::Codec::scores).
struct Scores<'k, C, L, const M: usize> {
    queries: SplitQueries<'k>,
    blocks: &'k Blocks<'k>,
    lines: Lines<'k>,
    packed: &'k mut [u32],
    codec: PhantomData<(C, L)>,
}

impl<C: Parts, L: Left, const M: usize> TileKernel for Scores<'_, C, L, M> {
    type Shapes = Rows<M>;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Rows<M>>>(self, s: S, tiles: &mut T) {
        let Scores { queries, blocks, lines, packed, .. } = self;
        let (split, packed) = (whole_lines(queries.split), whole_lines_mut(packed));
        let (steps, plane) = (blocks.head_dim.div_ceil(STEP), plane(queries.rows));
        for (i, list) in blocks.list.chunks(ABREAST).enumerate() {
            for (block, out) in list.iter().zip(packed.chunks_mut(steps * L::right::<C>() * TILE)) {
                pack_keys::<S, C, L>(s, block, blocks.head_dim, out);
            }
            let at = lines.at + i * ABREAST * LANES;
            for row in (0..queries.n).step_by(2 * M) {
                for n in (0..list.len()).step_by(2) {
                    let rows = queries.n - row;
                    let square = Square { two_rows: rows > M, two_columns: list.len() - n > 1, steps, plane };
                    let a = &split[(queries.first + row) * LANES..];
                    let b = &packed[n * steps * L::right::<C>() * TILE..];
                    tiles.zero::<0>();
                    tiles.zero::<1>();
                    tiles.zero::<2>();
                    tiles.zero::<3>();
                    multiply_parts::<M, C, L, T>(tiles, square, a, b);
                    let out = &mut lines.data[row * lines.stride + at + n * LANES..];
                    let columns = LANES * (list.len() - n).min(2);
                    store_square(tiles, out, lines.stride, rows, columns);
                }
            }
        }
    }
}

#[inline(always)]
fn multiply_parts<const M: usize, C: Parts, L: Left, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    square: Square,
    a: &[u32],
    b: &[u32],
) {
    match C::PARTS {
        _ if !L::EXACT => multiply::<M, 1, 1, T>(tiles, square, a, b),
        1 => multiply::<M, LEFT_PARTS, 1, T>(tiles, square, a, b),
        2 => multiply::<M, LEFT_PARTS, 2, T>(tiles, square, a, b),
        _ => multiply::<M, LEFT_PARTS, 3, T>(tiles, square, a, b),
    }
}

/// Element `i` of the keys of a block; 0 past the end.
#[inline(always)]
fn key<S: Simd, C: Parts>(s: S, block: &Block<'_>, head_dim: usize, i: usize) -> S::F {
    if i >= head_dim {
        return s.splat(0.0);
    }
    if let Some(line) = C::line_of_keys(i) {
        s.prefetch(&block.codes[line], block.ahead);
    }
    C::key(s, block, i)
}

/// Cuts the keys of a block into parts: `[steps, parts]` tiles.
#[inline(always)]
fn pack_keys<S: Simd, C: Parts, L: Left>(s: S, block: &Block<'_>, head_dim: usize, out: &mut [u32]) {
    for (step, out) in out.chunks_exact_mut(L::right::<C>() * TILE).enumerate() {
        for row in 0..LANES {
            let i = step * STEP + row;
            let even = key::<S, C>(s, block, head_dim, i);
            let odd = key::<S, C>(s, block, head_dim, i + LANES);
            right::<S, C, L>(s, even, odd, out, row);
        }
    }
}

/// `lines[query][at + i] = query · key`, as [`Codec::scores`](super::Codec::scores) computes it without tiles.
pub fn scores(
    tiles: TileIsa,
    dtype: DType,
    queries: SplitQueries<'_>,
    blocks: &Blocks<'_>,
    lines: Lines<'_>,
    packed: &mut [u32],
) {
    fn run<C: Parts>(
        tiles: TileIsa,
        queries: SplitQueries<'_>,
        blocks: &Blocks<'_>,
        lines: Lines<'_>,
        packed: &mut [u32],
    ) {
        match (queries.precision, queries.n) {
            (Precision::Exact, ..=8) => {
                tiles.run(Scores::<C, Exact, 8> { queries, blocks, lines, packed, codec: PhantomData });
            }
            (Precision::Exact, _) => {
                tiles.run(Scores::<C, Exact, 16> { queries, blocks, lines, packed, codec: PhantomData });
            }
            (Precision::Rounded, _) => {
                tiles.run(Scores::<C, Rounded, 16> { queries, blocks, lines, packed, codec: PhantomData });
            }
        }
    }
    match dtype {
        DType::F32 => run::<super::F32>(tiles, queries, blocks, lines, packed),
        DType::F16 => run::<super::F16>(tiles, queries, blocks, lines, packed),
        DType::BF16 => run::<super::BF16>(tiles, queries, blocks, lines, packed),
        DType::Q8 | DType::Q4 | DType::T4 => unreachable!("tiles do not multiply packed keys"),
    }
}

/// Weights of the rows, which become bf16 in this way: lines whose place 0 is at `at`, zero outside `valid`.
pub struct Weights<'w> {
    pub precision: Precision,
    pub data: &'w [f32],
    pub stride: usize,
    pub at: usize,
    /// Vectors of the places that contain weights; the others may contain anything.
    pub valid: Range<usize>,
}

/// Shape of the rows of values.
#[derive(Clone, Copy)]
pub struct ValueShape {
    pub head_dim: usize,
    /// Code bytes per cell.
    pub row: usize,
}

struct Accumulate<'k, 'b, C, L, const M: usize> {
    places: &'k Places<'b>,
    shape: ValueShape,
    weights: Weights<'k>,
    sums: Sums<'k>,
    packed: &'k mut [u32],
    split: &'k mut [u32],
    codec: PhantomData<(C, L)>,
}

impl<C: Parts, L: Left, const M: usize> TileKernel for Accumulate<'_, '_, C, L, M> {
    type Shapes = Rows<M>;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Rows<M>>>(self, s: S, tiles: &mut T) {
        let Accumulate { places, shape, weights, sums, packed, split, .. } = self;
        let (packed, split) = (whole_lines_mut(packed), whole_lines_mut(split));
        let (steps, head_dim) = (places.n / STEP, shape.head_dim);
        pack_values::<S, C, L>(s, places, shape, packed);
        let per_tile = steps * L::right::<C>() * TILE;
        for row in (0..sums.n).step_by(2 * M) {
            let rows = sums.n - row;
            for r in 0..rows.min(2 * M) {
                split_weights::<S, L>(s, &weights, row + r, steps, r, split);
            }
            for first in (0..head_dim).step_by(2 * LANES) {
                let columns = (head_dim - first).min(2 * LANES);
                let (two_rows, two_columns) = (rows > M, columns > LANES);
                let square = Square { two_rows, two_columns, steps, plane: WEIGHT_ROWS * LANES };
                let at = sums.first + row * sums.stride + first;
                load_square(tiles, &sums.data[at..], sums.stride, rows, columns);
                let b = &packed[first / LANES * per_tile..];
                multiply_parts::<M, C, L, T>(tiles, square, split, b);
                store_square(tiles, &mut sums.data[at..], sums.stride, rows, columns);
            }
        }
    }
}

/// Cuts values into parts: `[head_dim / 16, steps, parts]` tiles.
#[inline(always)]
fn pack_values<S: Simd, C: Parts, L: Left>(s: S, places: &Places<'_>, shape: ValueShape, out: &mut [u32]) {
    let steps = places.n / STEP;
    for step in 0..steps {
        for row in 0..LANES {
            let place = step * STEP + row;
            let (even, odd) = (places.fetch(s, place, shape.row), places.fetch(s, place + LANES, shape.row));
            for n in 0..shape.head_dim.div_ceil(LANES) {
                let (even, odd) = (value::<S, C>(s, even, n), value::<S, C>(s, odd, n));
                let out = &mut out[(n * steps + step) * L::right::<C>() * TILE..];
                right::<S, C, L>(s, even, odd, out, row);
            }
        }
    }
}

/// Elements `16 * vector..` of a value; 0 if there is none.
#[inline(always)]
fn value<S: Simd, C: Parts>(s: S, codes: &[u8], vector: usize) -> S::F {
    match codes.is_empty() {
        true => s.splat(0.0),
        false => C::value(s, codes, vector),
    }
}

/// Cuts the weights of line `line` into parts: row `row` of `[steps, parts]` tiles.
#[inline(always)]
fn split_weights<S: Simd, L: Left>(
    s: S,
    weights: &Weights<'_>,
    line: usize,
    steps: usize,
    row: usize,
    split: &mut [u32],
) {
    let vectors = weights.data[line * weights.stride + weights.at..].as_chunks::<LANES>().0;
    let valid = &weights.valid;
    for (step, split) in split.chunks_exact_mut(L::PARTS * WEIGHT_ROWS * LANES).enumerate().take(steps) {
        let (even, odd) = (weight(s, vectors, valid, 2 * step), weight(s, vectors, valid, 2 * step + 1));
        match L::EXACT {
            true => cut::<S, LEFT_PARTS>(s, even, odd, split, WEIGHT_ROWS * LANES, row),
            false => round(s, even, odd, split, row),
        }
    }
}

#[inline(always)]
fn weight<S: Simd>(s: S, vectors: &[[f32; LANES]], valid: &Range<usize>, v: usize) -> S::F {
    match valid.contains(&v) {
        true => s.load(&vectors[v]),
        false => s.splat(0.0),
    }
}

/// Room for values and weights in parts.
pub struct Room<'r> {
    pub packed: &'r mut [u32],
    /// [`WEIGHTS_LEN`] pairs.
    pub split: &'r mut [u32],
}

/// `sums[query] += Σ weight × value` over the values at `places`.
pub fn accumulate(
    tiles: TileIsa,
    dtype: DType,
    places: &Places<'_>,
    shape: ValueShape,
    weights: Weights<'_>,
    sums: Sums<'_>,
    room: Room<'_>,
) {
    fn run<C: Parts>(
        tiles: TileIsa,
        places: &Places<'_>,
        shape: ValueShape,
        weights: Weights<'_>,
        sums: Sums<'_>,
        room: Room<'_>,
    ) {
        let Room { packed, split } = room;
        match (weights.precision, sums.n) {
            (Precision::Exact, ..=8) => {
                let codec = PhantomData::<(C, Exact)>;
                tiles.run(Accumulate::<C, Exact, 8> { places, shape, weights, sums, packed, split, codec });
            }
            (Precision::Exact, _) => {
                let codec = PhantomData::<(C, Exact)>;
                tiles.run(Accumulate::<C, Exact, 16> { places, shape, weights, sums, packed, split, codec });
            }
            (Precision::Rounded, _) => {
                let codec = PhantomData::<(C, Rounded)>;
                tiles.run(Accumulate::<C, Rounded, 16> {
                    places,
                    shape,
                    weights,
                    sums,
                    packed,
                    split,
                    codec,
                });
            }
        }
    }
    match dtype {
        DType::F32 => run::<super::F32>(tiles, places, shape, weights, sums, room),
        DType::F16 => run::<super::F16>(tiles, places, shape, weights, sums, room),
        DType::BF16 => run::<super::BF16>(tiles, places, shape, weights, sums, room),
        DType::Q8 | DType::Q4 | DType::T4 => unreachable!("tiles do not multiply packed values"),
    }
}

#[cfg(test)]
mod tests;
