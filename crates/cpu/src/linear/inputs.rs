//! The inputs of linear layers, converted to the formats that kernels read. Layers with the same input share the
//! conversions.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd};

/// Most tokens per tile.
pub const TILE: usize = 8;
/// Inputs per scale.
pub const GROUP: usize = 32;

/// Input formats of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// f32.
    Rows,
    /// bf16 pairs.
    Pairs,
    /// 8 bits, with a scale per 32.
    Codes,
}

/// Buffers for one batch, reused. Tokens are grouped into tiles of 8, 4, 2 and 1, as kernels process them. The tokens
/// of a tile are interleaved: `[tile][…][tokens of the tile]`. So a kernel needs one address for all of them, and the
/// data of a single token is dense.
#[derive(Debug, Default)]
pub struct Inputs {
    pub n: usize,
    pub width: usize,
    ready: [bool; 3],
    /// `[tile][width][tokens]`.
    rows: Vec<f32>,
    /// `[tile][width / 2][tokens]`.
    pairs: Vec<i32>,
    /// `[tile][width / 32][12][tokens]`: the data of 32 inputs, see [`Group`].
    groups: Vec<i32>,
}

/// 32 inputs of `T` tokens: eight quads of signed codes; the negative sum of the codes; −32 times the sums of
/// their halves, for codes whose zero is 32; the scale, as the bits of an f32.
pub type Group<const T: usize> = [[i32; T]; GROUP_ROWS];
const GROUP_ROWS: usize = 12;
pub const NEGATIVE_SUM: usize = 8;
pub const MINUS_32_SUMS: usize = 9;
pub const SCALE: usize = 11;

/// The scale of token `t`.
#[inline(always)]
pub fn scale_of<const T: usize>(group: &Group<T>, t: usize) -> f32 {
    f32::from_bits(group[SCALE][t].cast_unsigned())
}

/// The tile that contains token `token` of `n`: its first token, and its width.
fn tile_of(n: usize, token: usize) -> (usize, usize) {
    let (mut first, mut width) = (token / TILE * TILE, TILE);
    while first + width > n || first + width <= token {
        if first + width <= n {
            first += width;
        }
        width /= 2;
    }
    (first, width)
}

impl Inputs {
    /// The tile of `T` tokens from `first` on.
    #[inline(always)]
    pub fn rows_of<const T: usize>(&self, first: usize) -> &[[f32; T]] {
        &self.rows[first * self.width..].as_chunks().0[..self.width]
    }
    #[inline(always)]
    pub fn pairs_of<const T: usize>(&self, first: usize) -> &[[i32; T]] {
        let half = self.width / 2;
        &self.pairs[first * half..].as_chunks().0[..half]
    }
    #[inline(always)]
    pub fn groups_of<const T: usize>(&self, first: usize) -> &[Group<T>] {
        let groups = self.width / GROUP;
        &self.groups[first * groups * GROUP_ROWS..].as_chunks().0.as_chunks().0[..groups]
    }
}

/// A batch of rows, and the buffers for its conversions.
pub struct Input<'x> {
    x: &'x [f32],
    inputs: &'x mut Inputs,
}

impl Inputs {
    /// `x: [n, width]`.
    pub fn of<'x>(&'x mut self, x: &'x [f32], width: usize) -> Input<'x> {
        (self.n, self.width, self.ready) = (x.len() / width.max(1), width, [false; 3]);
        Input { x, inputs: self }
    }

    /// Maximum bytes of the buffers for `n` rows of at most `width`. `None` on overflow.
    pub fn bytes(n: usize, width: usize) -> Option<usize> {
        let wide = width.checked_next_multiple_of(GROUP)?;
        // f32 rows, bf16 pairs, groups of codes.
        n.checked_mul(wide.checked_mul(4 + 2)?.checked_add(wide / GROUP * GROUP_ROWS * 4)?)
    }
}

impl Input<'_> {
    pub fn n(&self) -> usize {
        self.inputs.n
    }
    pub fn width(&self) -> usize {
        self.inputs.width
    }

    /// Converts the batch to `format` unless it already is.
    pub(super) fn prepare(&mut self, compute: &Compute, format: InputFormat) -> &Inputs {
        if !std::mem::replace(&mut self.inputs.ready[format as usize], true) {
            let Inputs { n, width, rows, pairs, groups, .. } = &mut *self.inputs;
            let (n, width, x) = (*n, *width, self.x);
            match format {
                InputFormat::Rows => {
                    rows.resize(n * width, 0.0);
                    each_tile(compute, n, rows, width, |first, tile, rows| {
                        for (t, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            rows.iter_mut().skip(t).step_by(tile).zip(x).for_each(|(y, x)| *y = *x);
                        }
                    });
                }
                InputFormat::Pairs => {
                    pairs.resize(n * (width / 2), 0);
                    each_tile(compute, n, pairs, width / 2, |first, tile, pairs| {
                        let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
                        for (t, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            let column = pairs.iter_mut().skip(t).step_by(tile);
                            for (pair, [low, high]) in column.zip(x.as_chunks().0) {
                                *pair = (bits(*low) | bits(*high) << 16).cast_signed();
                            }
                        }
                    });
                }
                InputFormat::Codes => {
                    let per_token = width / GROUP * GROUP_ROWS;
                    groups.resize(n * per_token, 0);
                    each_tile(compute, n, groups, per_token, |first, tile, groups| {
                        for (at, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            compute.isa.run(Quantise { x, groups: &mut *groups, at, tile });
                        }
                    });
                }
            }
        }
        self.inputs
    }
}

/// Calls `f(first token, tokens, their part)` for every tile, on several threads if there is enough work. A token has
/// `width` elements of `data`.
fn each_tile<T: Send>(
    compute: &Compute,
    n: usize,
    data: &mut [T],
    width: usize,
    f: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let (whole, rest) = data.split_at_mut(n / TILE * TILE * width);
    let mut no_scratch = vec![(); compute.threads.n()]; // takes no memory
    compute.threads.parts(whole, TILE * width, &mut no_scratch, |i, data, ()| f(i * TILE, TILE, data));
    let (mut first, mut rest) = (n / TILE * TILE, rest);
    while first < n {
        let (_, tile) = tile_of(n, first);
        let (data, others) = rest.split_at_mut(tile * width);
        f(first, tile, data);
        (first, rest) = (first + tile, others);
    }
}

/// Quantises one row: `x ≈ scale × code`, code in −127..=127. A group with a value that is not finite gets the scale
/// NaN. The row is number `at` in a tile of `tile` tokens.
struct Quantise<'q> {
    x: &'q [f32],
    groups: &'q mut [i32],
    at: usize,
    tile: usize,
}

impl Kernel for Quantise<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (zero, tile) = (s.splat(0.0), self.tile);
        let groups = self.groups.chunks_exact_mut(GROUP_ROWS * tile);
        for (x, group) in self.x.as_chunks::<GROUP>().0.iter().zip(groups) {
            let [a, b] = [&x.as_chunks::<LANES>().0[0], &x.as_chunks::<LANES>().0[1]];
            let (a, b) = (s.load(a), s.load(b));
            let (size_a, size_b) = (s.max(a, s.sub(zero, a)), s.max(b, s.sub(zero, b)));
            let largest = s.largest(s.max(size_a, size_b));
            // NaN and infinities survive a sum; `max` may drop NaN.
            let finite = s.sum(s.add(s.mul(a, zero), s.mul(b, zero))) == 0.0;
            let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 }; // a subnormal group is 0
            let mut bytes = [0u8; GROUP];
            let (out, _) = bytes.as_chunks_mut::<LANES>();
            let mut put = |row: usize, x: i32| group[row * tile + self.at] = x;
            let (mut low, mut high) = (0, 0);
            if finite {
                let (a, b) = (s.to_i32(s.mul(a, s.splat(inverse))), s.to_i32(s.mul(b, s.splat(inverse))));
                s.store_low_bytes(a, &mut out[0]);
                s.store_low_bytes(b, &mut out[1]);
                (low, high) = (s.sum(s.to_f32(a)) as i32, s.sum(s.to_f32(b)) as i32);
            }
            put(NEGATIVE_SUM, -(low + high));
            put(MINUS_32_SUMS, -32 * low);
            put(MINUS_32_SUMS + 1, -32 * high);
            put(SCALE, (if finite { largest / 127.0 } else { f32::NAN }).to_bits().cast_signed());
            for (quad, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
                put(quad, i32::from_le_bytes(*bytes));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_each_other() {
        for n in 1..40 {
            let mut token = 0;
            while token < n {
                let (first, width) = tile_of(n, token);
                assert_eq!(first, token, "{n} tokens");
                assert!((first..first + width).all(|token| tile_of(n, token) == (first, width)));
                let left = n - first;
                assert_eq!(width, [8, 4, 2, 1].into_iter().find(|width| *width <= left).unwrap());
                token += width;
            }
            assert_eq!(token, n);
        }
    }
}
