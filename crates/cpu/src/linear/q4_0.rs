//! q4_0: 32 codes of 4 bits and an f16 scale, 4.5 bits per weight: `w = scale × (code − 8)`.
//!
//! The kernel is that of `blocks.rs`. Per block of 16 rows: 288 bytes, 8 products of 64 bytes per token.
use super::blocks::{self, Blocks};
use super::inputs::{Form, Inputs};
use super::{Format, Panels};
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
        blocks::multiply::<S, Self>(s, weights, inputs, out);
    }
}

impl Blocks for Q4_0 {
    const ZERO_BITS: u32 = ZERO.trailing_zeros();

    #[inline(always)]
    fn load<S: Simd>(s: S, codes: &[u8]) -> [S::I; 8] {
        let mut w = [s.splat_i(0); 8];
        for (q, codes) in codes.as_chunks::<64>().0.iter().enumerate().take(4) {
            let bytes = s.load_bytes(codes);
            (w[q], w[q + 4]) = (s.low_nibbles(bytes), s.high_nibbles(bytes));
        }
        w
    }
}
