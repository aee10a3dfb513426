//! The inputs of linear layers, in the forms their kernels read. Layers that share an input share its forms.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd};

/// Most tokens of a tile.
pub const TILE: usize = 8;
/// Inputs of one scale.
pub const GROUP: usize = 32;

/// How a kernel wants its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// f32.
    Rows,
    /// bf16 pairs.
    Pairs,
    /// 8 bits, with a scale per 32.
    Codes,
}

/// Buffers for one batch, recycled. Tokens stand in tiles of 8, 4, 2 and 1, as kernels take them, and those of a
/// tile side by side: `[tile][…][tokens of the tile]`. So a kernel needs one address for all of them, and a token
/// alone is dense.
#[derive(Debug, Default)]
pub struct Inputs {
    pub n: usize,
    pub width: usize,
    ready: [bool; 3],
    /// `[tile][width][tokens]`.
    rows: Vec<f32>,
    /// `[tile][width / 2][tokens]`.
    pairs: Vec<i32>,
    /// `[tile][width / 4][tokens]`: four signed codes each.
    codes: Vec<i32>,
    /// `[tile][width / 32][tokens]`.
    scales: Vec<f32>,
    /// `[tile][width / 16][tokens]`: sums of codes.
    sums: Vec<i32>,
}

/// The tile of token `token` of `n`: its first token, and its width.
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

/// The codes of `T` tokens.
pub struct CodesOf<'c, const T: usize> {
    /// Eight quads of every 32 inputs.
    pub codes: &'c [[[i32; T]; 8]],
    pub scales: &'c [[f32; T]],
    /// Two sums of every 32 inputs.
    pub sums: &'c [[[i32; T]; 2]],
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
    pub fn codes_of<const T: usize>(&self, first: usize) -> CodesOf<'_, T> {
        let groups = self.width / GROUP;
        CodesOf {
            codes: &self.codes[first * groups * 8..].as_chunks().0.as_chunks().0[..groups],
            scales: &self.scales[first * groups..].as_chunks().0[..groups],
            sums: &self.sums[first * groups * 2..].as_chunks().0.as_chunks().0[..groups],
        }
    }
}

/// A batch of rows, and where its forms are kept.
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

    /// Bytes the buffers may come to take for `n` rows of at most `width`; `None` if it overflows.
    pub fn bytes(n: usize, width: usize) -> Option<usize> {
        let wide = width.checked_next_multiple_of(GROUP)?;
        // f32 rows, bf16 pairs; codes, scales and sums.
        n.checked_mul(wide.checked_mul(4 + 2 + 1)?.checked_add(wide / 32 * 4 + wide / 16 * 4)?)
    }
}

impl Input<'_> {
    pub fn n(&self) -> usize {
        self.inputs.n
    }
    pub fn width(&self) -> usize {
        self.inputs.width
    }

    /// The batch with `form` ready.
    pub(super) fn prepare(&mut self, compute: &Compute, form: Form) -> &Inputs {
        if !std::mem::replace(&mut self.inputs.ready[form as usize], true) {
            let Inputs { n, width, rows, pairs, codes, scales, sums, .. } = &mut *self.inputs;
            let (n, width, x) = (*n, *width, self.x);
            match form {
                Form::Rows => {
                    rows.resize(n * width, 0.0);
                    each_tile(compute, n, rows, width, |first, tile, rows| {
                        for (t, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            rows.iter_mut().skip(t).step_by(tile).zip(x).for_each(|(y, x)| *y = *x);
                        }
                    });
                }
                Form::Pairs => {
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
                Form::Codes => {
                    let groups = width / GROUP;
                    codes.resize(n * groups * 8, 0);
                    scales.resize(n * groups, 0.0);
                    sums.resize(n * groups * 2, 0);
                    for (token, x) in x.chunks_exact(width).enumerate() {
                        let (first, tile) = tile_of(n, token);
                        let at = token - first;
                        compute.isa.run(Quantise {
                            x,
                            codes: &mut codes[first * groups * 8 + at..],
                            scales: &mut scales[first * groups + at..],
                            sums: &mut sums[first * groups * 2 + at..],
                            step: tile,
                        });
                    }
                }
            }
        }
        self.inputs
    }
}

/// `f(first token, tokens, their part)` for every tile, on threads where there is enough to do. A token has `width`
/// elements of `data`.
fn each_tile<T: Send>(
    compute: &Compute,
    n: usize,
    data: &mut [T],
    width: usize,
    f: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let (whole, rest) = data.split_at_mut(n / TILE * TILE * width);
    let mut nothing = [(); 64];
    let nothing = &mut nothing[..compute.threads.n().min(64)];
    compute.threads.parts(whole, TILE * width, nothing, |i, data, ()| f(i * TILE, TILE, data));
    let (mut first, mut rest) = (n / TILE * TILE, rest);
    while first < n {
        let (_, tile) = tile_of(n, first);
        let (data, others) = rest.split_at_mut(tile * width);
        f(first, tile, data);
        (first, rest) = (first + tile, others);
    }
}

/// One row to codes: `x ≈ scale × code`, code in −127..=127. A group with what is not a finite number gets the scale
/// NaN. Elements of the outputs are `step` apart.
struct Quantise<'q> {
    x: &'q [f32],
    codes: &'q mut [i32],
    scales: &'q mut [f32],
    sums: &'q mut [i32],
    step: usize,
}

impl Kernel for Quantise<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let zero = s.splat(0.0);
        let step = self.step;
        for (group, x) in self.x.as_chunks::<GROUP>().0.iter().enumerate() {
            let [a, b] = [&x.as_chunks::<LANES>().0[0], &x.as_chunks::<LANES>().0[1]];
            let (a, b) = (s.load(a), s.load(b));
            let (size_a, size_b) = (s.max(a, s.sub(zero, a)), s.max(b, s.sub(zero, b)));
            let largest = s.largest(s.max(size_a, size_b));
            // A NaN or an infinity survives a sum; `max` may lose it.
            let finite = s.sum(s.add(s.mul(a, zero), s.mul(b, zero))) == 0.0;
            let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 }; // a subnormal group is 0
            let mut bytes = [0u8; GROUP];
            let (out, _) = bytes.as_chunks_mut::<LANES>();
            if finite {
                let (a, b) = (s.to_i32(s.mul(a, s.splat(inverse))), s.to_i32(s.mul(b, s.splat(inverse))));
                s.store_low_bytes(a, &mut out[0]);
                s.store_low_bytes(b, &mut out[1]);
                self.sums[2 * group * step] = s.sum(s.to_f32(a)) as i32;
                self.sums[(2 * group + 1) * step] = s.sum(s.to_f32(b)) as i32;
            } else {
                (self.sums[2 * group * step], self.sums[(2 * group + 1) * step]) = (0, 0);
            }
            self.scales[group * step] = if finite { largest / 127.0 } else { f32::NAN };
            for (quad, bytes) in bytes.as_chunks::<4>().0.iter().enumerate() {
                self.codes[(8 * group + quad) * step] = i32::from_le_bytes(*bytes);
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
