//! The kernel of formats with one scale per 32 codes.
//!
//! ```text
//! w = scale × (code − zero) [+ minimum]
//!
//! for each block:  units = Σ over 8 quads dot4(code, x's codes) − zero × Σ x's codes
//!                  y += units × (scale × x's scale) [+ minimum × Σ x]
//! ```
//!
//! Eight products of 64 bytes per block of 16 rows and token, a product and a multiply-add for the scales.
//!
//! Measured on two Zen 5 cores (docs/performance.md): q8_0 at 0.8 of the read limit for one token, q4_0 at 0.6 to 0.7;
//! 1.2 TFLOP/s for 512. Two panels that share the broadcast values of x were slower: for 8 and 16 tokens by 10
//! to 20 %, and no faster for 512, where the products themselves are the limit.
use super::codes::Codes;
use super::inputs::{InputFormat, Inputs, NEGATIVE_SUM, scale_of};
use super::{Format, Panels, for_token_tiles, put};
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
    fn multiply<S: Simd, const MANY: bool>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        _: bool,
        out: &mut Columns<'_, f32>,
    ) {
        for panel in 0..weights.n {
            for_token_tiles!(inputs.n, first, T => {
                tile::<S, F, T, MANY>(s, weights, inputs, first, panel, out);
            });
        }
    }
}

#[inline(always)]
fn tile<S: Simd, F: PackedBlock, const T: usize, const MANY: bool>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let (codes, scales) = weights.get::<Blocks<F>>(panel);
    let ahead = weights.ahead::<MANY>(inputs.n, first);
    let scales = scales.as_chunks::<{ 2 * LANES }>().0;
    let scales = scales.chunks_exact(if F::ZERO_BITS.is_none() { 2 } else { 1 });
    let mut sums = [s.splat(0.0); T];
    for ((codes, scales), x) in
        codes.chunks_exact(F::Codes::BYTES).zip(scales).zip(inputs.groups_of::<T>(first))
    {
        ahead.prefetch::<S, MANY>(s, codes);
        let mut w = F::Codes::load(s, codes);
        if let Some(table) = &F::TABLE {
            for quad in &mut w {
                *quad = s.lookup(table, *quad);
            }
        }
        let scale = F::load_scale(s, &scales[0]);
        for t in 0..T {
            let mut units = match F::ZERO_BITS {
                Some(bits) => s.shift_left(s.splat_i(x[NEGATIVE_SUM][t]), bits),
                None => s.splat_i(0),
            };
            for q in 0..8 {
                units = s.dot4(units, w[q], s.splat_i(x[q][t]));
            }
            sums[t] = s.fma(s.to_f32(units), s.mul(scale, s.splat(scale_of(x, t))), sums[t]);
            if F::ZERO_BITS.is_none() {
                let sum = s.splat(-x[NEGATIVE_SUM][t] as f32 * scale_of(x, t));
                sums[t] = s.fma(s.load_f16(&scales[1]), sum, sums[t]);
            }
        }
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}
