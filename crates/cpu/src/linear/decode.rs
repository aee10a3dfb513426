//! Decodes packed weights, for kernels that multiply something else than their codes.
use super::Format;
use super::inputs::GROUP;
use crate::arch::Simd;
use half::f16;

/// Weights that can be decoded.
pub trait Decode: Format {
    /// Inputs of a block of the file. Whole steps of a panel are whole blocks, or parts of one.
    const INPUTS: usize;
    /// Whether a panel consists of pairs of bf16 as they are.
    const ARE_PAIRS: bool = false;
    /// Decodes 32 inputs, number `group` of their block, of sixteen rows: eight quads.
    fn decode<S: Simd>(s: S, codes: &[u8], scales: &[u8], group: usize, take: &mut impl TakeQuads<S>);

    /// The codes of step `step` of a panel, the scales of its block, and which group of the block it is.
    #[inline(always)]
    fn step<'p>((codes, scales): (&'p [u8], &'p [u8]), step: usize) -> (&'p [u8], &'p [u8], usize) {
        let (per_block, size) = (Self::INPUTS / GROUP, Self::CODES * GROUP / Self::INPUTS);
        let (block, group) = (step / per_block, step % per_block);
        (&codes[step * size..][..size], &scales[block * Self::SCALES..(block + 1) * Self::SCALES], group)
    }
}

/// What becomes of decoded weights.
pub trait TakeQuads<S: Simd> {
    /// Four inputs of sixteen rows, `scale × code + zero`: quad `quad` of eight.
    fn take(&mut self, s: S, quad: usize, values: [S::F; 4]);
}

/// Passes `scale × code + zero` of four codes of sixteen rows on.
#[inline(always)]
pub fn quad<S: Simd>(
    s: S,
    (at, codes): (usize, S::I),
    [scale, zero]: [S::F; 2],
    take: &mut impl TakeQuads<S>,
) {
    let codes = [s.byte::<0>(codes), s.byte::<1>(codes), s.byte::<2>(codes), s.byte::<3>(codes)];
    let mut values = [zero; 4];
    for i in 0..4 {
        values[i] = s.fma(s.to_f32(codes[i]), scale, zero);
    }
    take.take(s, at, values);
}

/// An f16 whose NaN has no lower bits: rounding to bf16 keeps it a NaN.
pub fn one_nan(bytes: [u8; 2]) -> [u8; 2] {
    let x = f16::from_le_bytes(bytes);
    if x.is_nan() { f16::NAN.to_le_bytes() } else { bytes }
}
