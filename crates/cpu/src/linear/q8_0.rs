//! q8_0: 32 codes of 8 bits and an f16 scale, 8.5 bits per weight.
//!
//! The kernel is that of `blocks.rs`. Per block of 16 rows: 544 bytes, 8 products of 64 bytes per token.
use super::blocks::{self, Blocks};
use super::inputs::{Form, Inputs};
use super::{Format, Panels};
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
        blocks::multiply::<S, Self>(s, weights, inputs, out);
    }
}

impl Blocks for Q8_0 {
    const ZERO_BITS: u32 = ZERO.trailing_zeros();

    #[inline(always)]
    fn load<S: Simd>(s: S, codes: &[u8]) -> [S::I; 8] {
        let mut w = [s.splat_i(0); 8];
        for (w, codes) in w.iter_mut().zip(codes.as_chunks::<64>().0) {
            *w = s.load_bytes(codes);
        }
        w
    }
}
