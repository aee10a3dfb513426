//! Products of up to 2 × 2 tiles of sums.
use super::TILE;
use crate::arch::{LANES, Shapes, Tiles};

/// Tiles 0 to 3 are sums of two times `M` rows and two times 16 columns, 4 and 5 a part of the rows' queries or weights,
/// 6 and 7 a part of keys or values. Four independent sums hide the latency of a product.
pub struct Rows<const M: usize>;

impl<const M: usize> Shapes for Rows<M> {
    const ROWS: [usize; 8] = [M, M, M, M, M, M, 16, 16];
    const BYTES: [usize; 8] = [64; 8];
}

/// One product of up to 2 × 2 tiles.
#[derive(Clone, Copy)]
pub struct Square {
    /// Whether there are more than `M` rows, and more than 16 columns.
    pub two_rows: bool,
    pub two_columns: bool,
    /// Steps to sum up.
    pub steps: usize,
    /// Pairs per part of the rows.
    pub plane: usize,
}

/// `C += A × B`. `a` begins at the first row of the first part; `b` is `[columns / 16, steps, PARTS]` tiles.
#[inline(always)]
pub fn multiply<const M: usize, const LEFT: usize, const PARTS: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    square: Square,
    a: &[u32],
    b: &[u32],
) {
    let Square { two_rows, two_columns, steps, plane } = square;
    let second = steps * PARTS * TILE;
    for step in 0..steps {
        let a = &a[step * LEFT * plane..];
        let b = &b[step * PARTS * TILE..];
        for q in 0..PARTS {
            tiles.load::<6, u32>(&b[q * TILE..], LANES);
            if two_columns {
                tiles.load::<7, u32>(&b[second + q * TILE..], LANES);
            }
            for p in (0..LEFT - q).rev() {
                let a = &a[p * plane..];
                tiles.load::<4, u32>(a, LANES);
                tiles.dot_bf16::<0, 4, 6>();
                if two_columns {
                    tiles.dot_bf16::<1, 4, 7>();
                }
                if two_rows {
                    tiles.load::<5, u32>(&a[M * LANES..], LANES);
                    tiles.dot_bf16::<2, 5, 6>();
                    if two_columns {
                        tiles.dot_bf16::<3, 5, 7>();
                    }
                }
            }
        }
    }
}

/// Writes `rows` rows of `columns` elements of the sums, at most as many as there are.
#[inline(always)]
pub fn store_square<const M: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    out: &mut [f32],
    stride: usize,
    rows: usize,
    columns: usize,
) {
    store::<M, 0, T>(tiles, out, stride, rows, columns);
    if columns > LANES {
        store::<M, 1, T>(tiles, &mut out[LANES..], stride, rows, columns - LANES);
    }
    if rows > M {
        let out = &mut out[M * stride..];
        store::<M, 2, T>(tiles, out, stride, rows - M, columns);
        if columns > LANES {
            store::<M, 3, T>(tiles, &mut out[LANES..], stride, rows - M, columns - LANES);
        }
    }
}

/// The inverse of [`store_square`]; the rest of the tiles becomes 0.
#[inline(always)]
pub fn load_square<const M: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    from: &[f32],
    stride: usize,
    rows: usize,
    columns: usize,
) {
    load::<M, 0, T>(tiles, from, stride, rows, columns);
    if columns > LANES {
        load::<M, 1, T>(tiles, &from[LANES..], stride, rows, columns - LANES);
    }
    if rows > M {
        let from = &from[M * stride..];
        load::<M, 2, T>(tiles, from, stride, rows - M, columns);
        if columns > LANES {
            load::<M, 3, T>(tiles, &from[LANES..], stride, rows - M, columns - LANES);
        }
    }
}

/// Writes tile `N`, or the part of it that there is room for.
#[inline(always)]
fn store<const M: usize, const N: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    out: &mut [f32],
    stride: usize,
    rows: usize,
    columns: usize,
) {
    if rows >= M && columns >= LANES {
        return tiles.store::<N, f32>(out, stride);
    }
    let (mut whole, columns) = ([0.0; TILE], columns.min(LANES));
    tiles.store::<N, f32>(&mut whole, LANES);
    for (out, row) in out.chunks_mut(stride).zip(whole.chunks_exact(LANES)).take(rows.min(M)) {
        out[..columns].copy_from_slice(&row[..columns]);
    }
}

#[inline(always)]
fn load<const M: usize, const N: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    from: &[f32],
    stride: usize,
    rows: usize,
    columns: usize,
) {
    if rows >= M && columns >= LANES {
        return tiles.load::<N, f32>(from, stride);
    }
    let (mut whole, columns) = ([0.0; TILE], columns.min(LANES));
    for (from, row) in from.chunks(stride).zip(whole.chunks_exact_mut(LANES)).take(rows.min(M)) {
        row[..columns].copy_from_slice(&from[..columns]);
    }
    tiles.load::<N, f32>(&whole, LANES);
}
