//! The kernel of formats with one scale per 32 codes.
//!
//! ```text
//! for each block:  units = Σ over 8 quads dot4(code + zero, x's codes) − zero × Σ x's codes
//!                  y += units × (scale × x's scale)
//! ```
//!
//! Eight products of 64 bytes per block of 16 rows and token. What bounds large batches is loads (two per cycle), so
//! two panels share what is broadcast of x: 64 products on 58 loads instead of 96.
//!
//! Measured on two Zen 5 cores (docs/performance.md): q8_0 at 0.8 of the read limit for one token, q4_0 at 0.6 to 0.7; 1.3
//! TFLOP/s for 512.
use super::inputs::{GROUP, Inputs, NEGATIVE_SUM, scale_of};
use super::{AHEAD, Format, Panels, for_token_tiles, put};
use crate::arch::{Columns, Simd};

/// A format with one scale per 32 codes.
pub trait Blocks: Format {
    /// What is added to a code so that it has no sign, as a power of two.
    const ZERO_BITS: u32;
    /// Eight quads of 16 rows, without a sign.
    fn load<S: Simd>(s: S, codes: &[u8]) -> [S::I; 8];
}

#[inline(always)]
pub fn multiply<S: Simd, F: Blocks>(s: S, weights: &Panels<'_>, inputs: &Inputs, out: &mut Columns<'_, f32>) {
    let mut panel = 0;
    while panel < weights.n {
        if S::ACCUMULATORS >= 16 && weights.n - panel >= 2 && inputs.n >= 4 {
            for_token_tiles!(inputs.n, first, T => two_panels::<S, F, T>(s, weights, inputs, first, panel, out));
            panel += 2;
        } else {
            for_token_tiles!(inputs.n, first, T => tile::<S, F, T, T, 1>(s, weights, inputs, first, 0, panel, out));
            panel += 1;
        }
    }
}

/// Four tokens at a time: sixteen vectors of weights and eight of sums fill the registers.
#[inline(always)]
fn two_panels<S: Simd, F: Blocks, const T: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    if T >= 4 {
        for side in (0..T).step_by(4) {
            tile::<S, F, T, 4, 2>(s, weights, inputs, first, side, panel, out);
        }
    } else {
        tile::<S, F, T, T, 2>(s, weights, inputs, first, 0, panel, out);
    }
}

/// `N` tokens, from number `side` of the tile of `T` on, times `P` panels.
#[inline(always)]
fn tile<S: Simd, F: Blocks, const T: usize, const N: usize, const P: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    side: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let (blocks, x) = (inputs.width / GROUP, inputs.groups_of::<T>(first));
    let (mut codes, mut scales): ([&[u8]; P], [&[[u8; 32]]; P]) = ([&[]; P], [&[]; P]);
    for p in 0..P {
        let (c, f) = weights.get::<F>(panel + p);
        (codes[p], scales[p]) = (&c[..blocks * F::CODES], &f.as_chunks().0[..blocks]);
    }
    let mut sums = [[s.splat(0.0); P]; N];
    for b in 0..blocks {
        let (mut w, mut scale) = ([[s.splat_i(0); 8]; P], [s.splat(0.0); P]);
        for p in 0..P {
            let codes = &codes[p][b * F::CODES..(b + 1) * F::CODES];
            s.prefetch(&codes[0], AHEAD);
            for line in 1..F::CODES / 64 {
                s.prefetch(&codes[64 * line], AHEAD);
            }
            w[p] = F::load(s, codes);
            scale[p] = s.load_f16(&scales[p][b]);
        }
        for n in 0..N {
            let t = (side + n) % T;
            let zero = s.shift_left(s.splat_i(x[b][NEGATIVE_SUM][t]), F::ZERO_BITS);
            let mut units = [zero; P];
            for q in 0..8 {
                let quad = s.splat_i(x[b][q][t]);
                for p in 0..P {
                    units[p] = s.dot4(units[p], w[p][q], quad);
                }
            }
            let x_scale = s.splat(scale_of(&x[b], t));
            for p in 0..P {
                sums[n][p] = s.fma(s.to_f32(units[p]), s.mul(scale[p], x_scale), sums[n][p]);
            }
        }
    }
    for n in 0..N {
        for p in 0..P {
            put(s, out, first + (side + n) % T, panel + p, sums[n][p]);
        }
    }
}
