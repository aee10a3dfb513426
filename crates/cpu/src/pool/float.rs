//! f32, f16 and bf16: a code is a value.
use super::Codec;
use half::{bf16, f16};

pub struct F32;
pub struct F16;
pub struct BF16;

impl Codec for F32 {
    type Code = f32;
    const PARAMS: usize = 0;
    fn codes(head_dim: usize) -> usize {
        head_dim
    }
    fn encode(row: &[f32], _: usize, codes: &mut [f32], _: &mut [f16]) {
        codes.copy_from_slice(row);
    }
    #[inline(always)]
    fn decode<'r>(codes: &'r [f32], _: &[f16], _: usize, _: &'r mut [f32]) -> &'r [f32] {
        codes
    }
}

impl Codec for F16 {
    type Code = u16;
    const PARAMS: usize = 0;
    fn codes(head_dim: usize) -> usize {
        head_dim
    }
    /// Values past ±65,504 become infinite.
    fn encode(row: &[f32], _: usize, codes: &mut [u16], _: &mut [f16]) {
        codes.iter_mut().zip(row).for_each(|(code, x)| *code = f16::from_f32(*x).to_bits());
    }
    #[inline(always)]
    fn decode<'r>(codes: &'r [u16], _: &[f16], _: usize, buffer: &'r mut [f32]) -> &'r [f32] {
        buffer.iter_mut().zip(codes).for_each(|(x, code)| *x = widen(*code));
        buffer
    }
}

/// f16 to f32 without a branch, so that a loop of it becomes vector code on any machine: shift the fields into
/// place, then correct the exponent's bias by a multiplication, which also normalises subnormals.
#[inline(always)]
pub fn widen(code: u16) -> f32 {
    let code = u32::from(code);
    let magnitude = (code & 0x7fff) << 13;
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000); // 2^112
    let special = f32::from_bits(magnitude | 0x7f80_0000); // infinite or NaN
    let value = if code & 0x7c00 == 0x7c00 { special } else { finite };
    f32::from_bits(value.to_bits() | (code & 0x8000) << 16)
}

impl Codec for BF16 {
    type Code = u16;
    const PARAMS: usize = 0;
    fn codes(head_dim: usize) -> usize {
        head_dim
    }
    fn encode(row: &[f32], _: usize, codes: &mut [u16], _: &mut [f16]) {
        codes.iter_mut().zip(row).for_each(|(code, x)| *code = bf16::from_f32(*x).to_bits());
    }
    #[inline(always)]
    fn decode<'r>(codes: &'r [u16], _: &[f16], _: usize, buffer: &'r mut [f32]) -> &'r [f32] {
        buffer.iter_mut().zip(codes).for_each(|(x, code)| *x = f32::from_bits(u32::from(*code) << 16));
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_as_the_half_crate_says() {
        for code in 0..=u16::MAX {
            let (found, expected) = (widen(code), f16::from_bits(code).to_f32());
            let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
            assert!(same, "{code:#06x} became {found}, not {expected}");
        }
    }
}
