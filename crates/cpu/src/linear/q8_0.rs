//! q8_0: 32 codes of 8 bits and an f16 scale, 8.5 bits per weight.
//!
//! ```text
//! for each block:  units = Σ over 8 quads dot4(codes + 128, x's codes) − 128 × Σ x's codes
//!                  y += units × (scale × x's scale)
//! ```
//!
//! Per block of 16 rows: 544 bytes, 8 products of 64 bytes per token.
use super::inputs::{Form, GROUP, Inputs};
use super::{AHEAD, Format, Panels, for_token_tiles, put};
use crate::arch::{Columns, LANES, Simd, widen};

pub struct Q8_0;

const ZERO: u8 = 128;

impl Format for Q8_0 {
    const BLOCK: (usize, usize) = (32, 34);
    const CODES: usize = 32 * LANES;
    const SCALES: usize = 2 * LANES;
    const FORM: Form = Form::Codes;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        let (scale, block) = block.split_at(2);
        scales[2 * lane..2 * lane + 2].copy_from_slice(scale);
        for (place, quad) in codes.chunks_exact_mut(4 * LANES).zip(block.chunks_exact(4)) {
            let place = &mut place[4 * lane..4 * lane + 4];
            place.iter_mut().zip(quad).for_each(|(place, code)| *place = code ^ ZERO);
        }
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let scale = widen(u16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]));
        for (out, quad) in out.chunks_exact_mut(4).zip(codes.chunks_exact(4 * LANES)) {
            for (out, code) in out.iter_mut().zip(&quad[4 * lane..]) {
                *out = scale * f32::from((code ^ ZERO).cast_signed());
            }
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        for panel in 0..weights.n {
            let (codes, scales) = weights.get::<Self>(panel);
            for_token_tiles!(inputs.n, first, T => tile::<S, T>(s, codes, scales, inputs, first, panel, out));
        }
    }
}

#[inline(always)]
fn tile<S: Simd, const T: usize>(
    s: S,
    codes: &[u8],
    scales: &[u8],
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let (blocks, x) = (inputs.width / GROUP, inputs.codes_of::<T>(first));
    let codes = &codes.as_chunks::<64>().0.as_chunks::<8>().0[..blocks];
    let scales = &scales.as_chunks::<32>().0[..blocks];
    let mut sums = [s.splat(0.0); T];
    for b in 0..blocks {
        let mut w = [s.splat_i(0); 8];
        for q in 0..8 {
            w[q] = s.load_bytes(&codes[b][q]);
            s.prefetch(&codes[b][q], AHEAD);
        }
        let scale = s.load_f16(&scales[b]);
        for t in 0..T {
            let mut units = s.splat_i(-i32::from(ZERO) * (x.sums[b][0][t] + x.sums[b][1][t]));
            for q in 0..8 {
                units = s.dot4(units, w[q], s.splat_i(x.codes[b][q][t]));
            }
            sums[t] = s.fma(s.to_f32(units), s.mul(scale, s.splat(x.scales[b][t])), sums[t]);
        }
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}
