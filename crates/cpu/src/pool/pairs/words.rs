//! Products of pairs of words, 15 bits and a sign, in vectors (AVX2).
//!
//! ```text
//! scores:      query = words · ‖query‖ / 32,000                     key = words · ‖key‖ / 32,000
//! accumulate:  value = words · max |value| / 8,191                  weight · max |value| = words · unit of its row
//! for each 6 rows, for each pair:   sum[row] += a[row][pair] · b[pair]                                       16 columns, integers
//! ```
//!
//! 32 bits hold every sum. No sum of products is larger than the product of the lengths of both rows (Cauchy-Schwarz), and 32,000² is less
//! than 2³⁰, with what rounding adds up to two million elements. An element of a row of 64 has some 12 bits, where bf16 has 8.
//!
//! A value has a unit of its own, so no other value makes its elements coarse. Its size goes to the weights. An attention sink, with a
//! large weight and a small value, then does not make the unit of the other weights coarse. The weights of a row add up to 250,000 units at
//! most, and the largest is 32,000. Beside a much larger one, many small weights must not all be rounded the same way: every lane passes
//! on what rounding took from one place to the next, and begins with another remainder, so that their sum stays right. A weight of 0 stays 0.
//!
//! A row with infinities or NaN gives NaN, and so do a query or a key whose squares, and weights whose products with the largest elements,
//! add up to more than a f32 holds. A row shorter than 1e-15, or a value with no element above 1e-30, counts as 0.
//!
//! AVX2 multiplies 16 pairs in one instruction and adds them in a second. Twelve registers keep the sums of six rows, the others a pair of
//! the row, the columns, and a product. On two Zen 3 cores (docs/performance.md) attention of 512 queries over f16 runs at two thirds of the
//! peak of these products, softmax and the making of pairs included, and takes two thirds of the time of f32 products. Cores that start one
//! multiplication of words per cycle (Haswell, Zen 2) have no such gain.
use super::rows::{key, value};
use super::vectors::{in_groups, load_part, store_part};
use super::*;
use crate::pool::Block;
use std::marker::PhantomData;

/// Length of a query or key in units.
const LENGTH: f32 = 32_000.0;
/// Rows shorter than this are 0: their squares are no longer exact.
const SHORTEST: f32 = 1e-15;
/// The largest element of a value in units.
const VALUE: f32 = 8_191.0;
/// Most units of the weights of a row together, and of one. With what rounding adds, `WEIGHTS * VALUE` is less than 2³¹.
const WEIGHTS: f32 = 250_000.0;
const WEIGHT: f32 = 32_000.0;
/// Values without a larger element are 0.
const SMALLEST: f32 = 1e-30;
/// Rows whose sums registers hold.
const ROWS: usize = 6;

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

/// Two vectors times two factors, as pairs.
#[inline(always)]
fn words<S: Simd>(s: S, [even, odd]: [S::F; 2], factors: [S::F; 2]) -> S::I {
    s.word_pairs(s.to_i32(s.mul(even, factors[0])), s.to_i32(s.mul(odd, factors[1])))
}

/// Writes query row `at` to `split`, and its unit behind all rows.
#[inline(always)]
pub(super) fn split_row<S: Simd>(s: S, row: &[f32], at: usize, plane: usize, split: &mut [u32]) {
    let (split, units) = split.split_at_mut(row.len().div_ceil(STEP) * plane);
    let mut squares = s.splat(0.0);
    for row in row.chunks(STEP) {
        let [even, odd] = halves(s, &step_of(row));
        squares = s.fma(even, even, s.fma(odd, odd, squares));
    }
    let [unit, inverse] = unit(s.sum(squares));
    units[at] = unit.to_bits();
    for (step, row) in row.chunks(STEP).enumerate() {
        let pairs = words(s, halves(s, &step_of(row)), [s.splat(inverse); 2]);
        if let Some(out) = split[step * plane + at * LANES..].first_chunk_mut() {
            s.store_i(pairs, out);
        }
    }
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
            s.store_i(words(s, [even, odd], [inverse; 2]), out);
        }
    }
}

/// The values at some places as `[head_dim / 16, steps]` tiles, and the largest magnitude of each: 0 where there is none, NaN where a value
/// is not finite. `broken` is the geometry of the rows if there may be such values.
#[inline(always)]
fn pack_values<S: Simd, C: Parts>(
    s: S,
    places: &Places<'_>,
    shape: Shape,
    broken: Option<&Geometry>,
    out: &mut [u32],
    largest: &mut [f32; MAX_PLACES],
) {
    let (steps, vectors) = (places.n / STEP, shape.head_dim.div_ceil(LANES));
    for step in 0..steps {
        for row in 0..LANES {
            let pair = [0, LANES].map(|half| step * STEP + row + half);
            let mut inverse = [s.splat(0.0); 2];
            let mut cells = [None; 2];
            for half in 0..2 {
                cells[half] = places.fetch(s, pair[half], shape.row);
                let found = match &cells[half] {
                    Some(cell)
                        if broken.is_some_and(|rows| {
                            !rows.lanes_are_finite(&cell.block, cell.lane..cell.lane + 1)
                        }) =>
                    {
                        f32::NAN
                    }
                    Some(cell) => C::largest::<S>(s, cell, shape),
                    None => 0.0,
                };
                largest[pair[half]] = if found < SMALLEST { 0.0 } else { found };
                inverse[half] = s.splat(if found >= SMALLEST { VALUE / found } else { 0.0 });
            }
            for n in 0..vectors {
                let values = [value::<S, C>(s, &cells[0], shape, n), value::<S, C>(s, &cells[1], shape, n)];
                if let Some(out) = out[((n * steps + step) * LANES + row) * LANES..].first_chunk_mut() {
                    s.store_i(words(s, values, inverse), out);
                }
            }
        }
    }
}

/// The weights of a row, times the largest elements of the values, as pairs. Returns their unit.
#[inline(always)]
fn round_weights<S: Simd>(
    s: S,
    weights: &[[f32; LANES]],
    largest: &[[f32; LANES]],
    out: &mut [[u32; LANES]],
) -> f32 {
    let (mut sum, mut most) = (s.splat(0.0), s.splat(0.0));
    for (weights, largest) in weights.iter().zip(largest) {
        let product = s.mul(s.load(weights), s.load(largest));
        sum = s.add(sum, product);
        most = s.max(product, most);
    }
    let (sum, most) = (s.sum(sum), s.largest(most));
    let unit = match sum {
        ..SMALLEST => 0.0,
        ..f32::INFINITY => (sum / WEIGHTS).max(most / WEIGHT),
        _ => f32::NAN,
    };
    let inverse = s.splat(if unit > 0.0 { 1.0 / unit } else { 0.0 });
    let mut rest = REMAINDERS.map(|lanes| s.load(&lanes));
    let pairs = weights.as_chunks::<2>().0.iter().zip(largest.as_chunks::<2>().0);
    for ((weights, largest), out) in pairs.zip(out) {
        let mut words = [s.splat_i(0); 2];
        for half in 0..2 {
            let product = s.mul(s.load(&weights[half]), s.load(&largest[half]));
            let exact = s.fma(product, inverse, rest[half]);
            words[half] = s.to_i32(exact);
            rest[half] = s.sub(exact, s.to_f32(words[half]));
        }
        s.store_i(s.word_pairs(words[0], words[1]), out);
    }
    unit
}

/// What the lanes of both vectors of a step begin with: from −31/64 to 31/64, so that a place without weight stays without.
const REMAINDERS: [[f32; LANES]; 2] = {
    let mut all = [[0.0; LANES]; 2];
    let mut i = 0;
    while i < STEP {
        all[i % 2][i / 2] = (2 * i + 1) as f32 / (2 * STEP) as f32 - 0.5;
        i += 1;
    }
    all
};

/// `a × b` for `R` rows and 16 columns. `a`: from the first row on, row `r` of step `t` begins at `t * plane + r * ROW`. `b`: `[steps]` tiles.
#[inline(always)]
fn multiply<S: Simd, const R: usize, const ROW: usize>(
    s: S,
    (a, plane): (&[u32], usize),
    b: &[u32],
    steps: usize,
) -> [S::I; R] {
    let columns = &b[..steps * TILE].as_chunks().0[..steps * LANES];
    let mut sums = [s.splat_i(0); R];
    for step in 0..steps {
        let mut rows: [&[u32]; R] = [&[]; R];
        for (r, pairs) in rows.iter_mut().enumerate() {
            *pairs = &a[step * plane + r * ROW..][..LANES];
        }
        for k in 0..LANES {
            let b = s.load_i(&columns[step * LANES + k]);
            for r in 0..R {
                sums[r] = s.dot_words(sums[r], s.splat_i(rows[r][k].cast_signed()), b);
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
                let sums = multiply::<S, R, LANES>(s, (a, plane), b, steps);
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
    broken: Option<&'k Geometry>,
    packed: &'k mut [u32],
    largest: &'k mut [f32; MAX_PLACES],
    codec: PhantomData<C>,
}

impl<C: Parts> Kernel for PackValues<'_, '_, C> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        pack_values::<S, C>(s, self.places, self.shape, self.broken, self.packed, self.largest);
    }
}

/// Weighted sums of values that are pairs.
struct Accumulate<'k> {
    steps: usize,
    head_dim: usize,
    weights: Weights<'k>,
    sums: Sums<'k>,
    packed: &'k [u32],
    /// The largest magnitude of the value at each place.
    largest: &'k [f32; MAX_PLACES],
}

impl Kernel for Accumulate<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        /// Pairs of a row of weights.
        const ROW: usize = MAX_STEPS * LANES;
        let Accumulate { steps, head_dim, weights, sums, packed, largest } = self;
        let largest = &largest.as_chunks().0[..2 * steps];
        let mut pairs = [[[0; LANES]; MAX_STEPS]; ROWS];
        let mut units = [0.0; ROWS];
        in_groups!([6, 4, 2, 1], sums.n, |row, R| {
            for r in 0..R {
                let weights = &weights.data[(row + r) * weights.stride + weights.at..];
                units[r] = round_weights(s, &weights.as_chunks().0[..2 * steps], largest, &mut pairs[r]);
            }
            let a = pairs.as_flattened().as_flattened();
            let data = &mut sums.data[sums.first + row * sums.stride..];
            for d in 0..head_dim.div_ceil(LANES) {
                let products = multiply::<S, R, ROW>(s, (a, LANES), &packed[d * steps * TILE..], steps);
                let columns = d * LANES..head_dim.min((d + 1) * LANES);
                for r in 0..R {
                    let unit = s.splat(units[r] / VALUE);
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
    broken: Option<&Geometry>,
    weights: Weights<'_>,
    sums: Sums<'_>,
    packed: &mut [u32],
) {
    let mut largest = [0.0; MAX_PLACES];
    with_codec!(dtype, C => {
        let (packed, largest) = (&mut *packed, &mut largest);
        isa.run(PackValues::<C> { places, shape, broken, packed, largest, codec: PhantomData });
    });
    let (steps, head_dim) = (places.n / STEP, shape.head_dim);
    isa.run(Accumulate { steps, head_dim, weights, sums, packed: &*packed, largest: &largest });
}
