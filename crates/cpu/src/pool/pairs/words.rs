//! Products of pairs of words, 16 bits and a sign each, in vectors (AVX2).
//!
//! ```text
//! unit = ‖x‖ / 32,000;  words = round(x / unit)                       per query, key, line of weights, and element of all values
//! for each 6 rows, for each pair:   sum[row] += a[row][pair] · b[pair]                                       16 columns, integers
//! out[row][column] = sum · unit[row] · unit[column]
//! ```
//!
//! Because a unit is a share of the length of its row, and no sum of products is larger than the product of both lengths
//! (Cauchy-Schwarz), 32 bits hold every sum of any number of elements: 32,000² is less than 2³⁰. A row of 64 elements of similar size has
//! 12 bits for each, where bf16 has 8. Only a row with infinities or NaN, or one whose squares add up to more than a f32 holds, has no
//! unit: its products are NaN. A row shorter than 1e-15 counts as 0.
//!
//! AVX2 multiplies 16 pairs in one instruction and adds them in a second, so two multiply-adds in f32 take as long as three to four here.
//! Twelve registers keep the sums of six rows, the others a pair of the row, the columns, and a product.
use super::rows::{key, value};
use super::vectors::{Factors, Pair, in_groups, load_part, store_part};
use super::*;
use crate::pool::Block;
use std::marker::PhantomData;

/// Length of a row in units. With what rounding adds, the sums of products stay below 2³⁰.
const LENGTH: f32 = 32_000.0;
/// Rows shorter than this are 0: their squares are no longer exact.
const SHORTEST: f32 = 1e-15;

/// The unit of a row and its inverse, from the sum of its squares.
#[inline(always)]
fn unit(squares: f32) -> [f32; 2] {
    let length = squares.sqrt();
    if length < SHORTEST {
        [0.0; 2]
    } else if length < f32::INFINITY {
        [length / LENGTH, LENGTH / length]
    } else {
        [f32::NAN, 0.0]
    }
}

/// A vector of two rows in units, as pairs.
#[inline(always)]
fn words<S: Simd>(s: S, inverse: S::F, even: S::F, odd: S::F) -> S::I {
    s.word_pairs(s.to_i32(s.mul(even, inverse)), s.to_i32(s.mul(odd, inverse)))
}

/// Writes query row `at` of `rows` to `split`, and its unit behind all of them.
#[inline(always)]
pub(super) fn split_row<S: Simd>(s: S, row: &[f32], at: usize, rows: usize, split: &mut [u32]) {
    let (split, units) = split.split_at_mut(row.len().div_ceil(STEP) * plane(rows));
    let mut squares = s.splat(0.0);
    for row in row.chunks(STEP) {
        let [even, odd] = halves(s, &step_of(row));
        squares = s.fma(even, even, s.fma(odd, odd, squares));
    }
    let [unit, inverse] = unit(s.sum(squares));
    units[at] = unit.to_bits();
    for (step, row) in row.chunks(STEP).enumerate() {
        let [even, odd] = halves(s, &step_of(row));
        if let Some(out) = split[step * plane(rows) + at * LANES..].first_chunk_mut() {
            s.store_i(words(s, s.splat(inverse), even, odd), out);
        }
    }
}

/// Turns weights into pairs where they are, as [`RoundWeights`] does. Returns their sum by lane, and their unit.
#[inline(always)]
pub fn round_to_words<S: Simd>(s: S, vectors: &mut [[f32; LANES]]) -> (S::F, f32) {
    let steps = vectors.as_chunks_mut().0;
    let (mut sums, mut squares) = ([s.splat(0.0); 2], [s.splat(0.0); 2]);
    for [even, odd] in steps.iter() {
        let (even, odd) = (s.load(even), s.load(odd));
        sums = [s.add(sums[0], even), s.add(sums[1], odd)];
        squares = [s.fma(even, even, squares[0]), s.fma(odd, odd, squares[1])];
    }
    let [unit, inverse] = unit(s.sum(s.add(squares[0], squares[1])));
    for [even, odd] in steps {
        s.store(s.as_floats(words(s, s.splat(inverse), s.load(even), s.load(odd))), even);
    }
    (s.add(sums[0], sums[1]), unit)
}

/// Sixteen units, and their inverses, from sums of squares.
#[inline(always)]
fn units<S: Simd>(s: S, squares: S::F) -> [[f32; LANES]; 2] {
    let (mut units, mut inverses) = ([0.0; LANES], [0.0; LANES]);
    s.store(squares, &mut units);
    for i in 0..LANES {
        [units[i], inverses[i]] = unit(units[i]);
    }
    [units, inverses]
}

/// The keys of a block as `[steps]` tiles, and the units of all sixteen.
#[inline(always)]
fn pack_keys<S: Simd, C: Parts>(
    s: S,
    block: &Block<'_>,
    shape: Shape,
    out: &mut [u32],
    units_of: &mut [f32; LANES],
) {
    let inverse;
    [*units_of, inverse] = units(s, C::squares_of_keys(s, block, shape));
    let inverse = s.load(&inverse);
    for (step, out) in out.chunks_exact_mut(TILE).enumerate() {
        for (row, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let i = step * STEP + row;
            let even = key::<S, C>(s, block, shape, i);
            let odd = key::<S, C>(s, block, shape, i + LANES);
            s.store_i(words(s, inverse, even, odd), out);
        }
    }
}

/// The values at some places as `[head_dim / 16, steps]` tiles, and the units of all elements, as bits.
#[inline(always)]
fn pack_values<S: Simd, C: Parts>(
    s: S,
    places: &Places<'_>,
    shape: Shape,
    out: &mut [u32],
    units_of: &mut [[u32; LANES]],
) {
    // Their room has the sums of squares first.
    units_of.fill([0; LANES]);
    for place in 0..places.n {
        if let Some(cell) = places.fetch(s, place, shape.row) {
            for (n, squares) in units_of.iter_mut().enumerate() {
                let mut sum = squares.map(f32::from_bits);
                s.store(C::add_squares(s, &cell, shape, n, s.load(&sum)), &mut sum);
                *squares = sum.map(f32::to_bits);
            }
        }
    }
    let steps = places.n / STEP;
    for (n, units_of) in units_of.iter_mut().enumerate() {
        let [unit, inverse] = units(s, s.load(&units_of.map(f32::from_bits)));
        *units_of = unit.map(f32::to_bits);
        let inverse = s.load(&inverse);
        let out = out[n * steps * TILE..][..steps * TILE].as_chunks_mut().0;
        for (i, out) in out.iter_mut().enumerate() {
            let place = i / LANES * STEP + i % LANES;
            let even = value::<S, C>(s, &places.get(place), shape, n);
            let odd = value::<S, C>(s, &places.get(place + LANES), shape, n);
            s.store_i(words(s, inverse, even, odd), out);
        }
    }
}

/// `a × b` for `R` rows and 16 columns. `ROW`: what `factors.row` is if the compiler shall know it, else 0.
#[inline(always)]
fn multiply<S: Simd, P: Pair, const R: usize, const ROW: usize>(s: S, factors: Factors<'_, P>) -> [S::I; R] {
    let Factors { a, plane, row, b, steps } = factors;
    let row = if ROW == 0 { row } else { ROW };
    let columns = &b[..steps * TILE].as_chunks().0[..steps * LANES];
    let mut sums = [s.splat_i(0); R];
    for step in 0..steps {
        let mut rows: [&[P]; R] = [&[]; R];
        for (r, pairs) in rows.iter_mut().enumerate() {
            *pairs = &a[step * plane + r * row..][..LANES];
        }
        for k in 0..LANES {
            let b = s.load_i(&columns[step * LANES + k]);
            for r in 0..R {
                sums[r] = s.dot_words(sums[r], s.splat_i(rows[r][k].bits().cast_signed()), b);
            }
        }
    }
    sums
}

/// Turns up to [`ABREAST`] blocks of keys into pairs.
struct PackKeys<'k, C> {
    list: &'k [Block<'k>],
    shape: Shape,
    /// `[blocks, steps]` tiles.
    packed: &'k mut [u32],
    units: &'k mut [[f32; LANES]],
    codec: PhantomData<C>,
}

impl<C: Parts> Kernel for PackKeys<'_, C> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tiles = self.packed.chunks_mut(self.shape.head_dim.div_ceil(STEP) * TILE);
        for ((block, out), units) in self.list.iter().zip(tiles).zip(self.units) {
            pack_keys::<S, C>(s, block, self.shape, out, units);
        }
    }
}

/// Scores of rows over blocks of keys that are pairs.
struct Scores<'k> {
    queries: &'k SplitQueries<'k>,
    head_dim: usize,
    packed: &'k [u32],
    /// Those of the keys of every block.
    units: &'k [[f32; LANES]],
    lines: Lines<'k>,
}

impl Kernel for Scores<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Scores { queries, head_dim, packed, units, lines } = self;
        let (steps, plane) = (head_dim.div_ceil(STEP), plane(queries.rows));
        let (split, units_of_rows) = queries.split.split_at(steps * plane);
        in_groups!([6, 4, 2, 1], queries.n, |row, R| {
            let first = queries.first + row;
            let a = &split[first * LANES..];
            for (block, units) in units.iter().enumerate() {
                let b = &packed[block * steps * TILE..];
                let sums = multiply::<S, u32, R, LANES>(s, Factors { a, plane, row: LANES, b, steps });
                let out = &mut lines.data[row * lines.stride + lines.at + block * LANES..];
                for r in 0..R {
                    if let Some(out) = out[r * lines.stride..].first_chunk_mut() {
                        let unit = s.splat(f32::from_bits(units_of_rows[first + r]));
                        s.store(s.mul(s.to_f32(sums[r]), s.mul(unit, s.load(units))), out);
                    }
                }
            }
        });
    }
}

/// [`super::scores`].
pub fn scores(isa: Isa, dtype: DType, asked: Asked<'_>, blocks: &Blocks<'_>, mut lines: Lines<'_>) {
    let (Asked { queries, packed }, shape) = (asked, Shape::of(blocks));
    let mut units = [[0.0; LANES]; ABREAST];
    for (i, list) in blocks.list.chunks(ABREAST).enumerate() {
        let units = &mut units[..list.len()];
        with_codec!(dtype, C => {
            isa.run(PackKeys::<C> { list, shape, packed: &mut *packed, units: &mut *units, codec: PhantomData });
        });
        let lines = lines.reborrow(lines.at + i * ABREAST * LANES);
        isa.run(Scores {
            queries: &queries,
            head_dim: shape.head_dim,
            packed: &*packed,
            units: &*units,
            lines,
        });
    }
}

/// Turns values into pairs.
struct PackValues<'k, 'b, C> {
    places: &'k Places<'b>,
    shape: Shape,
    packed: &'k mut [u32],
    units: &'k mut [[u32; LANES]],
    codec: PhantomData<C>,
}

impl<C: Parts> Kernel for PackValues<'_, '_, C> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        pack_values::<S, C>(s, self.places, self.shape, self.packed, self.units);
    }
}

/// Weighted sums of values that are pairs. `LINE`: the stride of the weights' lines if the compiler shall know it, else 0.
struct Accumulate<'k, const LINE: usize> {
    steps: usize,
    head_dim: usize,
    weights: Weights<'k>,
    sums: Sums<'k>,
    packed: &'k [u32],
    /// Those of all elements, as bits.
    units: &'k [[u32; LANES]],
}

impl<const LINE: usize> Kernel for Accumulate<'_, LINE> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Accumulate { steps, head_dim, weights, sums, packed, units } = self;
        in_groups!([6, 4, 2, 1], sums.n, |row, R| {
            let lines = &weights.data[row * weights.stride..];
            let data = &mut sums.data[sums.first + row * sums.stride..];
            for (d, units) in units.iter().enumerate() {
                let (a, b) = (&lines[weights.at..], &packed[d * steps * TILE..]);
                let factors = Factors { a, plane: STEP, row: weights.stride, b, steps };
                let products = multiply::<S, f32, R, LINE>(s, factors);
                let columns = d * LANES..head_dim.min((d + 1) * LANES);
                for r in 0..R {
                    let unit = s.splat(lines[r * weights.stride + weights.unit]);
                    let unit = s.mul(unit, s.as_floats(s.load_i(units)));
                    let out = &mut data[r * sums.stride..][columns.clone()];
                    store_part(s, s.fma(s.to_f32(products[r]), unit, load_part(s, out)), out);
                }
            }
        });
    }
}

/// [`super::accumulate`].
pub fn accumulate(
    isa: Isa,
    dtype: DType,
    (places, shape): (&Places<'_>, Shape),
    weights: Weights<'_>,
    sums: Sums<'_>,
    packed: &mut [u32],
) {
    let (steps, head_dim) = (places.n / STEP, shape.head_dim);
    let (packed, units) = packed.split_at_mut(head_dim.div_ceil(LANES) * steps * TILE);
    let units = &mut units.as_chunks_mut().0[..head_dim.div_ceil(LANES)];
    with_codec!(dtype, C => {
        let (packed, units) = (&mut *packed, &mut *units);
        isa.run(PackValues::<C> { places, shape, packed, units, codec: PhantomData });
    });
    let (packed, units) = (&*packed, &*units);
    match weights.stride {
        // The addresses of six rows then take one register.
        LINE => isa.run(Accumulate::<LINE> { steps, head_dim, weights, sums, packed, units }),
        _ => isa.run(Accumulate::<0> { steps, head_dim, weights, sums, packed, units }),
    }
}
