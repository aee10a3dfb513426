//! Decodes packed weights, for kernels that multiply something else than their codes.
use super::inputs::GROUP;
use super::{Format, Layout};
use crate::arch::Simd;
use half::f16;

/// Weights that can be decoded.
pub trait Decode: Format + Sized {
    /// Inputs of a block of the file. Whole steps of a panel are whole blocks, or parts of one.
    const INPUTS: usize;
    /// Whether a panel consists of pairs of bf16 as they are.
    const ARE_PAIRS: bool = false;
    /// Decodes 32 inputs, number `group` of their block, of sixteen rows: eight quads. `map` is applied to every weight.
    fn decode<S: Simd>(
        s: S,
        codes: &[u8],
        scales: &[u8],
        group: usize,
        map: Map<S>,
        take: &mut impl TakeQuads<S>,
    );
    /// At least the largest magnitude of these weights by row, or NaN. Only negative weights may be larger, by a 127th.
    fn bound<S: Simd>(s: S, scales: &[u8], group: usize) -> S::F;

    /// The codes of step `step` of a panel, the scales of its block, and which group of the block it is.
    #[inline(always)]
    fn step(panel: &[u8], step: usize) -> (&[u8], &[u8], usize) {
        let (per_block, size) = (Self::INPUTS / GROUP, Self::CODES * GROUP / Self::INPUTS);
        let (block, group) = (step / per_block, step % per_block);
        let codes = &panel[Layout::<Self>::codes(block)][group * size..][..size];
        (codes, &panel[Layout::<Self>::scales(block)], group)
    }
}

/// `weight × factor + shift`, by row.
#[derive(Clone, Copy)]
pub struct Map<S: Simd> {
    pub factor: S::F,
    pub shift: S::F,
}

impl<S: Simd> Map<S> {
    #[inline(always)]
    pub fn identity(s: S) -> Self {
        Map { factor: s.splat(1.0), shift: s.splat(0.0) }
    }
    /// The same of `scale × code + zero`.
    #[inline(always)]
    pub fn of(self, s: S, [scale, zero]: [S::F; 2]) -> [S::F; 2] {
        [s.mul(scale, self.factor), s.fma(zero, self.factor, self.shift)]
    }
}

/// The larger magnitude. NaN stays if `y` is NaN.
#[inline(always)]
pub fn larger<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    let magnitude = |x| s.max(s.sub(s.splat(0.0), x), x);
    s.max(magnitude(x), magnitude(y))
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

/// The least and the largest code of `bits` bits, or of those in a table.
#[inline(always)]
pub fn range_of_codes(bits: u32, table: Option<&[u8; 16]>) -> [u8; 2] {
    match table {
        Some(table) => [table.iter().copied().fold(255, u8::min), table.iter().copied().fold(0, u8::max)],
        None => [0, (0xff >> (8 - bits)) as u8],
    }
}

/// [`Decode::bound`] of `scale × code + zero` for codes in a range.
#[inline(always)]
pub fn bound<S: Simd>(
    s: S,
    [scale, zero]: [S::F; 2],
    [least, most]: [u8; 2],
    zero_bits: Option<u32>,
) -> S::F {
    match zero_bits {
        // −128, which encoders do not write, may lie below. Of negative scales it would lie above.
        Some(7) if least == 0 => s.max(s.mul(scale, s.splat(127.0)), s.mul(scale, s.splat(-128.0))),
        _ => {
            let least = s.fma(scale, s.splat(f32::from(least)), zero);
            larger(s, least, s.fma(scale, s.splat(f32::from(most)), zero))
        }
    }
}

/// An f16 whose NaN has no lower bits: rounding to bf16 keeps it a NaN.
pub fn one_nan(bytes: [u8; 2]) -> [u8; 2] {
    let x = f16::from_le_bytes(bytes);
    if x.is_nan() { f16::NAN.to_le_bytes() } else { bytes }
}
