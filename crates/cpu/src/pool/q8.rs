//! 8-bit codes, symmetric: `x ≈ scale × code`, code in −127..=127, one f16 scale per group.
//!
//! Values of any finite size are stored: past 127 × 65,504 they saturate, below the smallest scale they become 0.
//! A NaN or an infinity makes its group NaN, so that it is seen and not hidden.
use super::Codec;
use super::float::widen;
use half::f16;

pub struct Q8;

impl Codec for Q8 {
    type Code = i8;
    const PARAMS: usize = 1;
    fn codes(head_dim: usize) -> usize {
        head_dim
    }

    fn encode(row: &[f32], group: usize, codes: &mut [i8], params: &mut [f16]) {
        for ((row, codes), scale) in row.chunks(group).zip(codes.chunks_mut(group)).zip(params) {
            if !row.iter().all(|x| x.is_finite()) {
                *scale = f16::NAN;
                codes.fill(0);
                continue;
            }
            let largest = row.iter().fold(0f32, |max, x| max.max(x.abs()));
            *scale = f16::from_f32((largest / 127.0).min(f16::MAX.to_f32()));
            // Codes belong to the scale as it is stored.
            let stored = scale.to_f32();
            let inverse = if stored > 0.0 { 1.0 / stored } else { 0.0 };
            codes.iter_mut().zip(row).for_each(|(code, x)| {
                *code = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
            });
        }
    }

    #[inline(always)]
    fn decode<'r>(codes: &'r [i8], params: &[f16], group: usize, buffer: &'r mut [f32]) -> &'r [f32] {
        for ((x, codes), scale) in buffer.chunks_mut(group).zip(codes.chunks(group)).zip(params) {
            let scale = widen(scale.to_bits());
            x.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from(*code) * scale);
        }
        buffer
    }
}
