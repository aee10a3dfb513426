//! q4_0: 32 codes of 4 bits and an f16 scale, 4.5 bits per weight: `w = scale × (code − 8)`.
//!
//! ```text
//! for each block:  units = Σ over 4 × 2 quads dot4(nibbles, x's codes) − 8 × Σ x's codes
//!                  y += units × (scale × x's scale)
//! ```
//!
//! Per block of 16 rows: 288 bytes, 8 products of 64 bytes per token.
use super::inputs::{Form, GROUP, Inputs};
use super::{AHEAD, Format, Panels, for_token_tiles, put};
use crate::arch::{Columns, LANES, Simd, widen};

pub struct Q4_0;

const ZERO: i32 = 8;

impl Format for Q4_0 {
    const BLOCK: (usize, usize) = (32, 18);
    const CODES: usize = 16 * LANES;
    const SCALES: usize = 2 * LANES;
    const FORM: Form = Form::Codes;

    // A byte of the file holds element j in its low half and element j + 16 in its high half; here too.
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        let (scale, block) = block.split_at(2);
        scales[2 * lane..2 * lane + 2].copy_from_slice(scale);
        for (place, quad) in codes.chunks_exact_mut(4 * LANES).zip(block.chunks_exact(4)) {
            place[4 * lane..4 * lane + 4].copy_from_slice(quad);
        }
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let scale = widen(u16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]));
        let (low, high) = out.split_at_mut(16);
        let places = low.chunks_exact_mut(4).zip(high.chunks_exact_mut(4));
        for ((low, high), quad) in places.zip(codes.chunks_exact(4 * LANES)) {
            for ((low, high), code) in low.iter_mut().zip(high).zip(&quad[4 * lane..]) {
                *low = scale * (i32::from(code & 15) - ZERO) as f32;
                *high = scale * (i32::from(code >> 4) - ZERO) as f32;
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
    let codes = &codes.as_chunks::<64>().0.as_chunks::<4>().0[..blocks];
    let scales = &scales.as_chunks::<32>().0[..blocks];
    let mut sums = [s.splat(0.0); T];
    for b in 0..blocks {
        let mut w = [s.splat_i(0); 8];
        for q in 0..4 {
            let bytes = s.load_bytes(&codes[b][q]);
            s.prefetch(&codes[b][q], AHEAD);
            (w[q], w[q + 4]) = (s.low_nibbles(bytes), s.high_nibbles(bytes));
        }
        let scale = s.load_f16(&scales[b]);
        for t in 0..T {
            let mut units = s.splat_i(-ZERO * (x.sums[b][0][t] + x.sums[b][1][t]));
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
