//! Products of pairs in vectors (AVX-512 with bf16).
//!
//! ```text
//! for each 8 rows × 2 columns of sixteen:  for each pair:   sum[row][column] += a[row][pair] · b[pair][column]
//! ```
//!
//! Per pair of 8 rows and 2 × 16 columns: 16 products of two multiply-adds, at the rate of one in f32, and 10 loads. `b` is
//! packed once per call and read again for every 8 rows: 16 KiB of keys of 64 elements, 32 KiB of values. `a` has 64 bytes per row
//! and step.
//!
//! Measured on a Zen 5 core (docs/performance.md): attention of 512 queries over f16 takes 0.68 of the peak of pairs, softmax and the
//! making of pairs included.
use super::*;
use std::marker::PhantomData;

/// A pair of bf16: an integer, or the bits of a float.
trait Pair: Copy {
    fn bits(self) -> u32;
}
impl Pair for u32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self
    }
}
impl Pair for f32 {
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }
}

/// Rows of pairs, and tiles of pairs to multiply them with.
#[derive(Clone, Copy)]
struct Factors<'f, P> {
    /// From the first row on; row `r` of step `t` begins at `t * plane + r * row`.
    a: &'f [P],
    plane: usize,
    row: usize,
    /// `[columns / 16, steps]` tiles, from the first column on.
    b: &'f [u32],
    steps: usize,
}

/// `sums += a × b`, for `R` rows and `16 * D` columns.
#[inline(always)]
fn multiply<S: Simd, P: Pair, const R: usize, const D: usize>(
    s: S,
    factors: Factors<'_, P>,
    sums: &mut [[S::F; D]; R],
) {
    let Factors { a, plane, row, b, steps } = factors;
    let mut columns: [&[[u32; LANES]]; D] = [&[]; D];
    for (d, column) in columns.iter_mut().enumerate() {
        *column = &b[d * steps * TILE..][..steps * TILE].as_chunks().0[..steps * LANES];
    }
    for step in 0..steps {
        let mut rows: [&[P]; R] = [&[]; R];
        for (r, pairs) in rows.iter_mut().enumerate() {
            *pairs = &a[step * plane + r * row..][..LANES];
        }
        for k in 0..LANES {
            let mut b = [s.splat_i(0); D];
            for d in 0..D {
                b[d] = s.load_i(&columns[d][step * LANES + k]);
            }
            for r in 0..R {
                let a = s.splat_i(rows[r][k].bits().cast_signed());
                for d in 0..D {
                    sums[r][d] = s.dot2(sums[r][d], a, b[d]);
                }
            }
        }
    }
}

/// Evaluates `$body` for groups of `$n` rows, as large as possible of the sizes given in descending order down to 1: `$first` is the
/// first row of a group, the constant `$R` its size.
macro_rules! in_groups {
    ([$($size:literal),+], $n:expr, |$first:ident, $R:ident| $body:expr) => {
        let mut $first = 0;
        $(while $n - $first >= $size {
            const $R: usize = $size;
            $body;
            $first += $R;
        })+
    };
}
pub(super) use in_groups;

struct Scores<'k, C> {
    asked: Asked<'k>,
    blocks: &'k Blocks<'k>,
    lines: Lines<'k>,
    codec: PhantomData<C>,
}

impl<C: Parts> Kernel for Scores<'_, C> {
    type Out = ();
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(S::BF16_DOTS || cfg!(test), "multiplying f32 is faster");
        let Scores { asked: Asked { queries, packed }, blocks, lines, .. } = self;
        let split = queries.split;
        let (steps, shape) = (blocks.head_dim.div_ceil(STEP), Shape::of(blocks));
        let factors = Factors { a: split, plane: plane(queries.rows), row: LANES, b: &[], steps };
        for (i, list) in blocks.list.chunks(ABREAST).enumerate() {
            for (block, out) in list.iter().zip(packed.chunks_mut(steps * TILE)) {
                pack_keys::<S, C, Rounded>(s, block, shape, out);
            }
            let at = lines.at + i * ABREAST * LANES;
            in_groups!([8, 4, 2, 1], queries.n, |row, R| {
                let a = &split[(queries.first + row) * LANES..];
                for block in (0..list.len()).step_by(2) {
                    let factors = Factors { a, b: &packed[block * steps * TILE..], ..factors };
                    let out = &mut lines.data[row * lines.stride + at + block * LANES..];
                    match list.len() - block {
                        1 => scores_of::<S, R, 1>(s, factors, out, lines.stride),
                        _ => scores_of::<S, R, 2>(s, factors, out, lines.stride),
                    }
                }
            });
        }
    }
}

#[inline(always)]
fn scores_of<S: Simd, const R: usize, const D: usize>(
    s: S,
    factors: Factors<'_, u32>,
    out: &mut [f32],
    stride: usize,
) {
    let mut sums = [[s.splat(0.0); D]; R];
    multiply(s, factors, &mut sums);
    for (r, sums) in sums.into_iter().enumerate() {
        let out = out[r * stride..][..D * LANES].as_chunks_mut().0;
        for (sum, out) in sums.into_iter().zip(out) {
            s.store(sum, out);
        }
    }
}

/// [`super::scores`].
pub fn scores(isa: Isa, dtype: DType, asked: Asked<'_>, blocks: &Blocks<'_>, lines: Lines<'_>) {
    with_codec!(dtype, C => isa.run(Scores::<C> { asked, blocks, lines, codec: PhantomData }));
}

struct Accumulate<'k, 'b, C> {
    places: &'k Places<'b>,
    shape: Shape,
    weights: Weights<'k>,
    sums: Sums<'k>,
    packed: &'k mut [u32],
    codec: PhantomData<C>,
}

impl<C: Parts> Kernel for Accumulate<'_, '_, C> {
    type Out = ();
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(S::BF16_DOTS || cfg!(test), "multiplying f32 is faster");
        let Accumulate { places, shape, weights, sums, packed, .. } = self;
        let (steps, head_dim) = (places.n / STEP, shape.head_dim);
        pack_values::<S, C, Rounded>(s, places, shape, packed);
        let weights_of = &weights.data[weights.at..];
        let factors = Factors { a: weights_of, plane: STEP, row: weights.stride, b: &[], steps };
        in_groups!([8, 4, 2, 1], sums.n, |row, R| {
            let a = &weights_of[row * weights.stride..];
            let data = &mut sums.data[sums.first + row * sums.stride..];
            for d in (0..head_dim.div_ceil(LANES)).step_by(2) {
                let factors = Factors { a, b: &packed[d * steps * TILE..], ..factors };
                let columns = d * LANES..head_dim.min((d + 2) * LANES);
                match columns.len() {
                    ..=LANES => add_to::<S, R, 1>(s, factors, data, sums.stride, columns),
                    _ => add_to::<S, R, 2>(s, factors, data, sums.stride, columns),
                }
            }
        });
    }
}

/// Adds products to `columns` of `R` rows.
#[inline(always)]
fn add_to<S: Simd, const R: usize, const D: usize>(
    s: S,
    factors: Factors<'_, f32>,
    data: &mut [f32],
    stride: usize,
    columns: Range<usize>,
) {
    let mut sums = [[s.splat(0.0); D]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        let row = &data[r * stride..][columns.clone()];
        let mut chunks = row.chunks(LANES);
        for sum in sums {
            *sum = load_part(s, chunks.next().unwrap_or_default());
        }
    }
    multiply(s, factors, &mut sums);
    for (r, sums) in sums.into_iter().enumerate() {
        let row = &mut data[r * stride..][columns.clone()];
        for (sum, out) in sums.into_iter().zip(row.chunks_mut(LANES)) {
            store_part(s, sum, out);
        }
    }
}

/// Up to sixteen floats; the rest is 0.
#[inline(always)]
pub(super) fn load_part<S: Simd>(s: S, from: &[f32]) -> S::F {
    match from.first_chunk() {
        Some(whole) => s.load(whole),
        None => {
            let mut whole = [0.0; LANES];
            whole[..from.len()].copy_from_slice(from);
            s.load(&whole)
        }
    }
}

#[inline(always)]
pub(super) fn store_part<S: Simd>(s: S, x: S::F, out: &mut [f32]) {
    match out.first_chunk_mut() {
        Some(whole) => s.store(x, whole),
        None => {
            let mut whole = [0.0; LANES];
            s.store(x, &mut whole);
            out.copy_from_slice(&whole[..out.len()]);
        }
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
    with_codec!(dtype, C => {
        isa.run(Accumulate::<C> { places, shape, weights, sums, packed, codec: PhantomData });
    });
}
