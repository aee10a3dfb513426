//! Scores and weighted sums of many queries as products of pairs of bf16, or of words.
//!
//! ```text
//! scores:      S[queries][16 cells] += Q[queries][32 elements] × K[elements][cells]      per 32 elements of head_dim
//! accumulate:  O[queries][16 elements] += W[queries][32 cells] × V[cells][elements]      per 32 places of a sequence
//! ```
//!
//! Keys and values become pairs once per call, and all rows of the call use them ([`rows`]). Then [`tiles`] (AMX),
//! [`vectors`] (AVX-512 with bf16) or [`words`] (AVX2) multiply.
//!
//! With [`Precision::Rounded`] every number is rounded to bf16, with [`Precision::Words`] to a multiple of its row's unit: one product,
//! for every dtype.
//!
//! With [`Precision::Exact`], which tiles have for float dtypes, every number is cut into parts, because bf16 has 8
//! significant bits: `x = high + middle + low`, exactly. A query or a weight has three parts, a key or a value of bf16 one,
//! of f16 two, of f32 three. Products whose parts lie further down than the last bit of a f32 are left out: 3, 5 and 6
//! products remain.
//!
//! A row of a product of bf16 depends on nothing else than this row, and the 32 places of a step are those of the sequence,
//! wherever their cells lie. So a query has the same result to the bit whichever queries share its call and however
//! the cache is cut into tiles, as long as all its products are products of pairs. One query can also take this path: its
//! tiles are mostly empty, but K and V must be read from memory, which takes longer.
//!
//! Products count subnormal numbers as 0: parts below 2⁻¹²⁶, of weights that are no larger than 2⁻¹⁰⁸.
mod places;
mod rows;
mod square;
mod tiles;
mod vectors;
mod words;

use super::{Blocks, Geometry, Lines, Sums, with_codec};
use crate::arch::{Isa, Kernel, LANES, Simd, TileIsa, Uses};
use kvist_device::DType;
pub use places::{Cell, Places};
pub use rows::{Parts, Shape, parts};
use rows::{pack_keys, pack_values};
use std::ops::Range;

/// Elements of head_dim, or places of a sequence, that one product of tiles sums up: sixteen pairs.
pub const STEP: usize = 2 * LANES;
/// Pairs in a tile.
const TILE: usize = 16 * LANES;
/// Parts of a query or of a weight that are not rounded.
const LEFT_PARTS: usize = 3;

/// What numbers become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Parts of bf16 whose sum they are.
    Exact,
    /// bf16, rounded: one part, and so one product.
    Rounded,
    /// Words of 16 bits, in a unit of their row ([`words`]): one part.
    Words,
}

/// What multiplies pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    Tiles(TileIsa, Precision),
    /// Pairs of bf16, rounded.
    Vectors(Isa),
    /// Pairs of words.
    Words(Isa),
}

impl Products {
    pub fn precision(self) -> Precision {
        match self {
            Products::Tiles(_, precision) => precision,
            Products::Vectors(_) => Precision::Rounded,
            Products::Words(_) => Precision::Words,
        }
    }

    /// Whether they multiply rows of `dtype`.
    pub fn multiply(self, dtype: DType) -> bool {
        parts(dtype, self.precision()).is_some()
    }
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
const ABREAST: usize = 8;
/// Most places per call.
pub const MAX_PLACES: usize = 256;
const MAX_STEPS: usize = MAX_PLACES / STEP;

/// Pairs, and units, that [`SplitRow`] writes for rows of `head_dim` elements, if `rows` rows are stored.
pub fn split_len(head_dim: usize, rows: usize, precision: Precision) -> usize {
    let units = if precision == Precision::Words { rows } else { 0 };
    head_dim.div_ceil(STEP) * left_parts(precision) * plane(rows) + units
}

/// Parts of a query or of a weight.
fn left_parts(precision: Precision) -> usize {
    match precision {
        Precision::Exact => Exact::PARTS,
        Precision::Rounded | Precision::Words => Rounded::PARTS,
    }
}

/// Pairs from one part of the queries to the next. A tile may extend past the last row.
fn plane(rows: usize) -> usize {
    (rows + 16) * LANES
}

/// Pairs that a call needs for keys and values of `head_dim` elements.
pub fn packed_len(head_dim: usize, dtype: DType, precision: Precision) -> usize {
    let keys = ABREAST * head_dim.div_ceil(STEP);
    let values = head_dim.div_ceil(LANES) * MAX_STEPS;
    keys.max(values) * parts(dtype, precision).unwrap_or(0) * TILE
}

/// Pairs of the weights of a call, for tiles.
pub fn weights_len(precision: Precision) -> usize {
    MAX_STEPS * left_parts(precision) * WEIGHT_ROWS * LANES
}
/// Rows of weights that are cut into parts at once.
const WEIGHT_ROWS: usize = 32;

/// Cuts row `at` of `rows` query rows into parts, or turns it into words. A pair consists of elements that are 16 apart, because sixteen
/// elements are a vector.
pub struct SplitRow<'s> {
    pub precision: Precision,
    pub row: &'s [f32],
    pub at: usize,
    pub rows: usize,
    /// `[steps, parts, rows + 16, 16]` pairs. Behind those of words the units of all rows.
    pub split: &'s mut [u32],
}

impl Kernel for SplitRow<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (plane, split) = (plane(self.rows), self.split);
        if self.precision == Precision::Words {
            return words::split_row(s, self.row, self.at, plane, split);
        }
        for (step, row) in self.row.chunks(STEP).enumerate() {
            let [even, odd] = halves(s, &step_of(row));
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
                _ => round(s, even, odd, &mut split[step * plane..], self.at),
            }
        }
    }
}

/// Up to [`STEP`] elements; the rest is 0.
#[inline(always)]
fn step_of(row: &[f32]) -> [f32; STEP] {
    let mut step = [0.0; STEP];
    step[..row.len()].copy_from_slice(row);
    step
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
    pub split: &'q [u32],
    /// Rows that are stored.
    pub rows: usize,
    /// The first row of the call, and how many.
    pub first: usize,
    pub n: usize,
}

/// Weights of the rows: lines whose place 0 is at `at`. Rounded ones are pairs, as [`RoundWeights`] makes them.
pub struct Weights<'w> {
    pub data: &'w [f32],
    pub stride: usize,
    pub at: usize,
}

/// Rounds weights to bf16 where they are: the pairs of [`STEP`] places take the room of the first half of them. Pairs are 16 places
/// apart.
pub struct RoundWeights<'w> {
    pub lines: &'w mut [f32],
    pub stride: usize,
    /// Vectors of a line: whole steps.
    pub vectors: Range<usize>,
}

impl Kernel for RoundWeights<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for line in self.lines.chunks_exact_mut(self.stride) {
            let vectors = &mut line.as_chunks_mut::<LANES>().0[self.vectors.clone()];
            debug_assert!(vectors.len().is_multiple_of(2), "{} vectors are no pairs", vectors.len());
            for [even, odd] in vectors.as_chunks_mut().0 {
                s.store(s.as_floats(s.round_pairs(s.load(even), s.load(odd))), even);
            }
        }
    }
}

/// Writes the weights of line `line`, in parts or as the pairs that they are, to row `row` of `[steps, parts]` tiles.
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
    let steps = vectors.as_chunks().0[..steps].iter();
    for ([even, odd], split) in steps.zip(split.chunks_exact_mut(L::PARTS * WEIGHT_ROWS * LANES)) {
        match L::EXACT {
            true => {
                cut::<S, LEFT_PARTS>(s, s.load(even), s.load(odd), split, WEIGHT_ROWS * LANES, row);
            }
            false => {
                let pairs = &mut split[row * LANES..][..LANES];
                pairs.iter_mut().zip(even).for_each(|(pair, bits)| *pair = bits.to_bits());
            }
        }
    }
}

/// Room for values and weights in parts.
pub struct Room<'r> {
    pub packed: &'r mut [u32],
    /// [`weights_len`] pairs, if tiles multiply.
    pub split: &'r mut [u32],
}

/// Room for keys in parts, and the queries, of one call of [`scores`].
pub struct Asked<'q> {
    pub queries: SplitQueries<'q>,
    pub packed: &'q mut [u32],
}

/// `lines[query][at + i] = query · key`, as [`Codec::scores`](super::Codec::scores) computes it from numbers that are not
/// pairs.
pub fn scores(products: Products, dtype: DType, asked: Asked<'_>, blocks: &Blocks<'_>, lines: Lines<'_>) {
    match products {
        Products::Tiles(isa, precision) => tiles::scores((isa, precision), dtype, asked, blocks, lines),
        Products::Vectors(isa) => vectors::scores(isa, dtype, asked, blocks, lines),
        Products::Words(isa) => words::scores(isa, dtype, asked, blocks, lines),
    }
}

/// `sums[query] += Σ weight × value` over the values at some places. `broken`: the geometry of the values, if any of them may be infinite or NaN.
pub fn accumulate(
    products: Products,
    dtype: DType,
    values: (&Places<'_>, Shape),
    broken: Option<&Geometry>,
    weights: Weights<'_>,
    sums: Sums<'_>,
    room: Room<'_>,
) {
    match products {
        Products::Tiles(isa, precision) => {
            tiles::accumulate((isa, precision), dtype, values, weights, sums, room);
        }
        Products::Vectors(isa) => vectors::accumulate(isa, dtype, values, weights, sums, room.packed),
        Products::Words(isa) => {
            words::accumulate(isa, dtype, values, broken, weights, sums, room.packed);
        }
    }
}

#[cfg(test)]
mod tests;
