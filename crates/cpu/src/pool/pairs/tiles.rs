//! Products of pairs as products of tiles (AMX).
//!
//! ```text
//! K or V of some blocks become pairs once per call
//! for each 2 × 16 rows × 2 columns of sixteen:  sum[4 tiles] += a[16 rows][32] × b[32][16]      per 32 elements or places,
//!                                                                                           and for each product of parts
//! ```
//!
//! Measured on an Intel Xeon (docs/performance.md): 128 queries take 0.42 to 0.58 of the time of vectors, one query 1.7 to 1.8 times.
use super::square::{Rows, Square, load_square, multiply, store_square};
use super::*;
use crate::arch::{TileKernel, Tiles};
use std::marker::PhantomData;

/// [`super::scores`].
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
        let split = queries.split;
        let (steps, plane, shape) = (blocks.head_dim.div_ceil(STEP), plane(queries.rows), Shape::of(blocks));
        for (i, list) in blocks.list.chunks(ABREAST).enumerate() {
            for (block, out) in list.iter().zip(packed.chunks_mut(steps * L::right::<C>() * TILE)) {
                pack_keys::<S, C, L>(s, block, shape, out);
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

struct Accumulate<'k, 'b, C, L, const M: usize> {
    places: &'k Places<'b>,
    shape: Shape,
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

/// Calls `$run` with the type that packs `$dtype` and a [`Precision`] as a type. Packed rows are always rounded.
macro_rules! with_parts {
    ($precision:expr, $dtype:expr, $run:ident($($argument:expr),*)) => {
        match ($precision, $dtype) {
            (Precision::Exact, DType::F32) => $run::<crate::pool::F32, Exact>($($argument),*),
            (Precision::Exact, DType::F16) => $run::<crate::pool::F16, Exact>($($argument),*),
            (Precision::Exact, DType::BF16) => $run::<crate::pool::BF16, Exact>($($argument),*),
            (Precision::Exact, _) => unreachable!("packed rows are rounded"),
            (Precision::Words, _) => unreachable!("tiles multiply bf16"),
            (Precision::Rounded, dtype) => with_codec!(dtype, C => $run::<C, Rounded>($($argument),*)),
        }
    };
}

/// [`super::scores`].
pub fn scores(
    (tiles, precision): (TileIsa, Precision),
    dtype: DType,
    asked: Asked<'_>,
    blocks: &Blocks<'_>,
    lines: Lines<'_>,
) {
    fn run<C: Parts, L: Left>(tiles: TileIsa, asked: Asked<'_>, blocks: &Blocks<'_>, lines: Lines<'_>) {
        let Asked { queries, packed } = asked;
        match L::EXACT && queries.n <= 8 {
            true => tiles.run(Scores::<C, L, 8> { queries, blocks, lines, packed, codec: PhantomData }),
            false => tiles.run(Scores::<C, L, 16> { queries, blocks, lines, packed, codec: PhantomData }),
        }
    }
    with_parts!(precision, dtype, run(tiles, asked, blocks, lines));
}

/// [`super::accumulate`].
pub fn accumulate(
    (tiles, precision): (TileIsa, Precision),
    dtype: DType,
    values: (&Places<'_>, Shape),
    weights: Weights<'_>,
    sums: Sums<'_>,
    room: Room<'_>,
) {
    fn run<C: Parts, L: Left>(
        tiles: TileIsa,
        (places, shape): (&Places<'_>, Shape),
        weights: Weights<'_>,
        sums: Sums<'_>,
        Room { packed, split }: Room<'_>,
    ) {
        let codec = PhantomData::<(C, L)>;
        match L::EXACT && sums.n <= 8 {
            true => {
                tiles.run(Accumulate::<C, L, 8> { places, shape, weights, sums, packed, split, codec });
            }
            false => {
                tiles.run(Accumulate::<C, L, 16> { places, shape, weights, sums, packed, split, codec });
            }
        }
    }
    with_parts!(precision, dtype, run(tiles, values, weights, sums, room));
}
