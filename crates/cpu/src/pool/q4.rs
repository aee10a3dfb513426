//! 4-bit codes, affine: `x ≈ minimum + scale × code`, code in 0..=15, an f16 scale and an f16 minimum per group.
//!
//! A byte holds element `j` of a group in its low half and element `j + half` in its high half, so that unpacking is
//! two straight loops. What does not fit f16 saturates; a NaN or an infinity makes its group NaN, so that it is seen
//! and not hidden.
use super::Codec;
use super::float::widen;
use half::f16;

pub struct Q4;

impl Codec for Q4 {
    type Code = u8;
    const PARAMS: usize = 2;
    fn codes(head_dim: usize) -> usize {
        head_dim.div_ceil(2)
    }

    fn encode(row: &[f32], group: usize, codes: &mut [u8], params: &mut [f16]) {
        let groups = row.chunks(group).zip(codes.chunks_mut(group / 2)).zip(params.chunks_exact_mut(2));
        for ((row, codes), params) in groups {
            codes.fill(0);
            if !row.iter().all(|x| x.is_finite()) {
                params.fill(f16::NAN);
                continue;
            }
            let (least, most) =
                row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, m), x| (l.min(*x), m.max(*x)));
            let limit = f16::MAX.to_f32();
            params[1] = f16::from_f32(least.clamp(-limit, limit));
            let minimum = params[1].to_f32();
            params[0] = f16::from_f32(((most - minimum) / 15.0).clamp(0.0, limit));
            // Codes belong to scale and minimum as they are stored.
            let stored = params[0].to_f32();
            let inverse = if stored > 0.0 { 1.0 / stored } else { 0.0 };
            let half = row.len().div_ceil(2);
            for (i, x) in row.iter().enumerate() {
                let code = ((x - minimum) * inverse).round_ties_even().clamp(0.0, 15.0) as u8;
                codes[i % half] |= if i < half { code } else { code << 4 };
            }
        }
    }

    #[inline(always)]
    fn decode<'r>(codes: &'r [u8], params: &[f16], group: usize, buffer: &'r mut [f32]) -> &'r [f32] {
        let groups = buffer.chunks_mut(group).zip(codes.chunks(group / 2)).zip(params.chunks_exact(2));
        for ((x, codes), params) in groups {
            let (scale, minimum) = (widen(params[0].to_bits()), widen(params[1].to_bits()));
            let (low, high) = x.split_at_mut(x.len().div_ceil(2));
            low.iter_mut().zip(codes).for_each(|(x, code)| *x = minimum + scale * f32::from(*code & 15));
            high.iter_mut().zip(codes).for_each(|(x, code)| *x = minimum + scale * f32::from(*code >> 4));
        }
        buffer
    }
}
