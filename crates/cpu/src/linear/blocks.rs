//! The kernel of formats with one scale per 32 codes.
//!
//! ```text
//! w = scale × (code − zero) [+ minimum]
//!
//! for each block:  units = Σ over 8 quads dot4(code, x's codes) − zero × Σ x's codes
//!                  y += units × (scale × x's scale) [+ minimum × Σ x]
//! ```
//!
//! Eight products of 64 bytes per block of 16 rows and token. Large batches are bound by loads (two per cycle), so two
//! panels share the broadcast values of x: 64 products with 58 loads instead of 96.
//!
//! Measured on two Zen 5 cores (docs/performance.md): q8_0 at 0.8 of the read limit for one token, q4_0 at 0.6 to 0.7;
//! 1.3 TFLOP/s for 512.
use super::codes::Codes;
use super::inputs::{GROUP, InputFormat, Inputs, NEGATIVE_SUM, scale_of};
use super::{AHEAD, Format, Panels, for_token_tiles, put};
use crate::arch::{Columns, LANES, Simd, widen};
use kvist_device::weights::blocks::Block;
use std::marker::PhantomData;

/// An encoding with one scale per 32 codes, and its layout in panels.
pub trait PackedBlock: Block {
    type Codes: Codes;
    #[inline(always)]
    fn load_scale<S: Simd>(s: S, scales: &[u8; 32]) -> S::F {
        if Self::BF16_SCALE { s.load_bf16(scales) } else { s.load_f16(scales) }
    }
}

/// Makes a [`PackedBlock`] a `Format`. Scales of 16 rows, then their minima.
pub struct Blocks<F>(PhantomData<F>);

impl<F: PackedBlock> Blocks<F> {
    const HAS_MINIMUM: bool = F::ZERO_BITS.is_none();
}

impl<F: PackedBlock> Format for Blocks<F> {
    const BLOCK: (usize, usize) = (32, F::BYTES);
    const CODES: usize = F::Codes::BYTES;
    const SCALES: usize = 2 * LANES * if Self::HAS_MINIMUM { 2 } else { 1 };
    const INPUT: InputFormat = InputFormat::Codes;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        F::Codes::put(&F::codes(block), lane, codes);
        // The minimum, if any, is an f16 after the scale.
        let both = [F::scale(block), F::minimum(block)];
        for (scales, bytes) in scales.chunks_exact_mut(2 * LANES).zip(both) {
            scales[2 * lane..2 * lane + 2].copy_from_slice(&bytes);
        }
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let at = |row: usize| u16::from_le_bytes([scales[2 * (row + lane)], scales[2 * (row + lane) + 1]]);
        let scale = if F::BF16_SCALE { f32::from_bits(u32::from(at(0)) << 16) } else { widen(at(0)) };
        let minimum = if Self::HAS_MINIMUM { widen(at(LANES)) } else { 0.0 };
        let zero = F::ZERO_BITS.map_or(0, |bits| 1i32 << bits);
        for (out, code) in out.iter_mut().zip(F::Codes::get(codes, lane)) {
            let code = F::TABLE.map_or(code, |table| table[usize::from(code)]);
            *out = scale * (i32::from(code) - zero) as f32 + minimum;
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        multiply::<S, F>(s, weights, inputs, out);
    }
}

#[inline(always)]
fn multiply<S: Simd, F: PackedBlock>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    out: &mut Columns<'_, f32>,
) {
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
fn two_panels<S: Simd, F: PackedBlock, const T: usize>(
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

/// `N` tokens, starting at number `side` of the tile of `T`, times `P` panels.
#[inline(always)]
fn tile<S: Simd, F: PackedBlock, const T: usize, const N: usize, const P: usize>(
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
    let per_block = if F::ZERO_BITS.is_none() { 2 } else { 1 };
    for p in 0..P {
        let (c, f) = weights.get::<Blocks<F>>(panel + p);
        (codes[p], scales[p]) = (&c[..blocks * F::Codes::BYTES], &f.as_chunks().0[..blocks * per_block]);
    }
    let mut sums = [[s.splat(0.0); P]; N];
    for b in 0..blocks {
        let (mut w, mut scale, mut min) = ([[s.splat_i(0); 8]; P], [s.splat(0.0); P], [s.splat(0.0); P]);
        for p in 0..P {
            let codes = &codes[p][b * F::Codes::BYTES..(b + 1) * F::Codes::BYTES];
            s.prefetch(&codes[0], AHEAD);
            for line in 1..F::Codes::BYTES / 64 {
                s.prefetch(&codes[64 * line], AHEAD);
            }
            w[p] = F::Codes::load(s, codes);
            if let Some(table) = &F::TABLE {
                for quad in &mut w[p] {
                    *quad = s.lookup(table, *quad);
                }
            }
            scale[p] = F::load_scale(s, &scales[p][b * per_block]);
            if F::ZERO_BITS.is_none() {
                min[p] = s.load_f16(&scales[p][b * per_block + 1]);
            }
        }
        for n in 0..N {
            let t = (side + n) % T;
            let zero = match F::ZERO_BITS {
                Some(bits) => s.shift_left(s.splat_i(x[b][NEGATIVE_SUM][t]), bits),
                None => s.splat_i(0),
            };
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
            if F::ZERO_BITS.is_none() {
                let sum = s.splat(-x[b][NEGATIVE_SUM][t] as f32 * scale_of(&x[b], t));
                for p in 0..P {
                    sums[n][p] = s.fma(min[p], sum, sums[n][p]);
                }
            }
        }
    }
    for n in 0..N {
        for p in 0..P {
            put(s, out, first + (side + n) % T, panel + p, sums[n][p]);
        }
    }
}
