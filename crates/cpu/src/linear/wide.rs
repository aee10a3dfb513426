//! Products of bytes with a scale per 256 inputs: int8 weights, whose scale is that of their row, and with
//! [`Compute::fast_prefill`] and many tokens all packed weights.
//!
//! ```text
//! units[8 tokens][2 × 16 outputs] += dot4(w's codes, x's codes)           64 quads of 256 inputs
//! y += units × (w's scale × x's scale)                                    once per 256 inputs
//! ```
//!
//! A scale per 32 inputs takes as many operations as two of its eight products. So x has a scale per token and 256 inputs,
//! and weights of whatever encoding become bytes with a scale per row and 256 inputs, once for all tokens of a batch. Both
//! are rounded to the nearest of 255 codes (weights of a negative extreme may take one more). int8 weights are such bytes.
//!
//! Per quad: 16 products of 64 bytes, 2 loads of weights from the second-level cache and 8 of inputs.
//!
//! Measured on a Zen 5 core (docs/performance.md): 512 tokens of int8 at 0.9 of the peak of byte products, q8_0 at 0.97 of int8.
use super::decode::{Decode, Map, TakeQuads};
use super::inputs::{GROUP, InputFormat, Inputs};
use super::room::{Line, Room};
use super::{Panels, for_token_tiles, put};
use crate::Compute;
use crate::arch::{Columns, Isa, Kernel, LANES, Simd, Uses};
use std::marker::PhantomData;

/// Inputs per scale.
const WIDE: usize = 256;
/// Quads of codes per scale.
const QUADS: usize = WIDE / 4;
/// Panels that a kernel multiplies together.
const PANELS: usize = 2;
/// Panels per unit of work.
pub const UNIT: usize = 8;
/// Fewest tokens: weights are decoded first, which takes as long as the products of some twenty.
const FROM: usize = 64;
/// The code that stands for 0 in weights: products of bytes want one unsigned factor.
const ZERO: i32 = 128;
/// Rows that inputs have for each scale besides their codes: the scale, and −128 times the sum of the codes.
const EXTRA: usize = 2;

/// Whether packed weights become bytes with wide scales for `n` tokens.
pub fn is_used(compute: &Compute, n: usize) -> bool {
    compute.fast_bytes() && n >= FROM
}

/// The format in which packed weights read `n` tokens, if as bytes with wide scales.
pub fn input(compute: &Compute, n: usize) -> Option<InputFormat> {
    is_used(compute, n).then_some(InputFormat::WideCodes)
}

/// Lines of codes that a kernel call decodes from rows of `width` inputs.
pub fn lines(width: usize) -> usize {
    PANELS * width.div_ceil(4)
}

/// Scales of these, of sixteen rows each.
pub fn scales(width: usize) -> usize {
    PANELS * width.div_ceil(WIDE)
}

/// Rows of a token's inputs: for every 256, the scale, −128 times the sum of the codes, and the codes four by four.
pub fn input_rows(width: usize) -> usize {
    width / 4 + EXTRA * width.div_ceil(WIDE)
}

/// Quantises one token's inputs: column `at` of `[rows][tile]`. 256 inputs with one that is not finite get the scale NaN.
pub struct Quantise<'q> {
    pub x: &'q [f32],
    pub rows: &'q mut [i32],
    pub at: usize,
    pub tile: usize,
}

impl Kernel for Quantise<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Quantise { x, rows, at, tile } = self;
        let chunks = rows.chunks_mut((QUADS + EXTRA) * tile);
        for (x, rows) in x.chunks(WIDE).zip(chunks) {
            let (vectors, _) = x.as_chunks::<LANES>();
            let (mut largest, mut broken) = (s.splat(0.0), s.splat(0.0));
            for x in vectors {
                let x = s.load(x);
                largest = s.max(s.max(x, s.sub(s.splat(0.0), x)), largest);
                broken = s.fma(x, s.splat(0.0), broken); // NaN from the first value that is not finite
            }
            let (largest, finite) = (s.largest(largest), s.sum(broken) == 0.0);
            let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 }; // subnormal inputs are 0
            let (mut codes, mut sum) = ([0u8; WIDE], s.splat_i(0));
            if finite {
                for (x, codes) in vectors.iter().zip(codes.as_chunks_mut().0) {
                    let code = s.to_i32(s.mul(s.load(x), s.splat(inverse)));
                    sum = s.add_i(sum, code);
                    s.store_low_bytes(code, codes);
                }
            }
            let scale = if finite { largest / 127.0 } else { f32::NAN };
            let mut put = |row: usize, x: i32| rows[row * tile + at] = x;
            put(0, scale.to_bits().cast_signed());
            put(1, -ZERO * s.sum(s.to_f32(sum)) as i32); // below 2²⁴: exact
            for (quad, bytes) in codes[..x.len()].as_chunks::<4>().0.iter().enumerate() {
                put(EXTRA + quad, i32::from_le_bytes(*bytes));
            }
        }
    }
}

/// 32 inputs of sixteen rows.
pub type Step = [u8; GROUP * LANES];

/// The bytes of `P` panels of sixteen rows.
pub trait Bytes<S: Simd, const P: usize> {
    /// 32 inputs of a panel, number `step`: eight lines of quads.
    fn codes(&self, panel: usize, step: usize) -> &Step;
    /// The scales of 256 inputs of a panel, number `chunk`.
    fn scale(&self, s: S, panel: usize, chunk: usize) -> S::F;
    /// Prefetches what later tiles of tokens want to have in the cache.
    fn prefetch(&self, _: S, _: &Step) {}
}

/// Weights that were decoded and rounded.
struct Rounded<'w> {
    /// `[panels][width / 4]`.
    codes: &'w [Line],
    /// `[panels][width / 256]`.
    scales: &'w [[f32; LANES]],
    width: usize,
}

impl<S: Simd, const P: usize> Bytes<S, P> for Rounded<'_> {
    #[inline(always)]
    fn codes(&self, panel: usize, step: usize) -> &Step {
        &self.codes.as_flattened().as_chunks().0[panel * (self.width / GROUP) + step]
    }
    #[inline(always)]
    fn scale(&self, s: S, panel: usize, chunk: usize) -> S::F {
        s.load(&self.scales[panel * self.width.div_ceil(WIDE) + chunk])
    }
}

/// Writes weights that were mapped to codes: a line per quad.
struct Codes<'o>(&'o mut [Line]);

impl<S: Simd> TakeQuads<S> for Codes<'_> {
    #[inline(always)]
    fn take(&mut self, s: S, quad: usize, [a, b, c, d]: [S::F; 4]) {
        let low = s.or(s.to_i32(a), s.shift_left(s.to_i32(b), 8));
        let high = s.or(s.shift_left(s.to_i32(c), 16), s.shift_left(s.to_i32(d), 24));
        s.store_bytes(s.or(low, high), &mut self.0[quad]);
    }
}

/// Rounds the weights of a panel.
#[inline(always)]
fn round<S: Simd, F: Decode>(s: S, panel: &[u8], codes: &mut [Line], scales: &mut [[f32; LANES]]) {
    const STEPS: usize = WIDE / GROUP;
    for (chunk, (codes, scale)) in codes.chunks_mut(QUADS).zip(scales).enumerate() {
        let steps = chunk * STEPS..chunk * STEPS + codes.len() * 4 / GROUP;
        let (mut bound, mut broken) = (s.splat(0.0), s.splat(0.0));
        for step in steps.clone() {
            let (_, scales, group) = F::step(panel, step);
            let largest = F::bound(s, scales, group);
            bound = s.max(largest, bound);
            broken = s.fma(largest, s.splat(0.0), broken); // NaN from the first weight that is not finite
        }
        // Rows whose largest weight is that small, or not a number, have codes of 0.
        let mut inverse = [0.0; LANES];
        s.store(bound, &mut inverse);
        for x in &mut inverse {
            *x = if *x > 1e-30 && x.is_finite() { 127.0 / *x } else { 0.0 };
        }
        let map = Map { factor: s.load(&inverse), shift: s.splat(ZERO as f32) };
        for (step, out) in steps.zip(codes.chunks_mut(GROUP / 4)) {
            let (codes, scales, group) = F::step(panel, step);
            F::decode(s, codes, scales, group, map, &mut Codes(out));
        }
        s.store(s.fma(bound, s.splat(1.0 / 127.0), broken), scale);
    }
}

/// All panels of a unit of work times all tokens.
struct Multiply<'k, 'o, F> {
    weights: Panels<'k>,
    inputs: &'k Inputs,
    room: &'k mut Room,
    out: &'k mut Columns<'o, f32>,
    format: PhantomData<F>,
}

/// Multiplies adjacent panels with all tokens.
pub fn multiply<F: Decode>(
    isa: Isa,
    weights: Panels<'_>,
    inputs: &Inputs,
    room: &mut Room,
    out: &mut Columns<'_, f32>,
) {
    isa.run(Multiply::<F> { weights, inputs, room, out, format: PhantomData });
}

impl<F: Decode> Kernel for Multiply<'_, '_, F> {
    type Out = ();
    const USES: Uses = Uses::Bytes;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        assert!(S::BYTE_DOTS || cfg!(test), "other products are faster");
        let Multiply { weights, inputs, room, out, .. } = self;
        let (codes, scales) = room.of_bytes(inputs.width);
        let (quads, chunks) = (inputs.width / 4, inputs.width.div_ceil(WIDE));
        let mut panel = 0;
        while panel < weights.n {
            let n = PANELS.min(weights.n - panel);
            for i in 0..n {
                let codes = &mut codes[i * quads..(i + 1) * quads];
                let scales = &mut scales[i * chunks..(i + 1) * chunks];
                round::<S, F>(s, weights.get(panel + i), codes, scales);
            }
            let wide = Rounded { codes, scales, width: inputs.width };
            for_token_tiles!(0..inputs.n, false, first, T => match n {
                PANELS => tile::<S, _, T, PANELS>(s, &wide, inputs, first, panel, out),
                _ => tile::<S, _, T, 1>(s, &wide, inputs, first, panel, out),
            });
            panel += n;
        }
    }
}

/// `T` tokens times `P` panels.
#[inline(always)]
pub fn tile<S: Simd, B: Bytes<S, P>, const T: usize, const P: usize>(
    s: S,
    weights: &B,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    const STEPS: usize = WIDE / GROUP;
    let steps = inputs.width / GROUP;
    let mut sums = [[s.splat(0.0); P]; T];
    let mut rows = inputs.wide_of::<T>(first);
    for chunk in 0..steps.div_ceil(STEPS) {
        let n = STEPS.min(steps - chunk * STEPS);
        let ([scale, minus_sum], rest) = rows.split_first_chunk().expect("two rows before the codes");
        let (x, rest) = rest.split_at(n * GROUP / 4);
        rows = rest;
        let mut units = [[s.splat_i(0); P]; T];
        for t in 0..T {
            units[t] = [s.splat_i(minus_sum[t]); P];
        }
        for (i, x) in x.as_chunks::<{ GROUP / 4 }>().0.iter().enumerate() {
            let mut w = [weights.codes(0, chunk * STEPS + i); P];
            for p in 1..P {
                w[p] = weights.codes(p, chunk * STEPS + i);
            }
            for p in 0..P {
                weights.prefetch(s, w[p]);
            }
            for q in 0..GROUP / 4 {
                let mut codes = [s.splat_i(0); P];
                for p in 0..P {
                    codes[p] = s.load_bytes(&w[p].as_chunks().0[q]);
                }
                for t in 0..T {
                    let x = s.splat_i(x[q][t]);
                    for p in 0..P {
                        units[t][p] = s.dot4(units[t][p], codes[p], x);
                    }
                }
            }
        }
        for p in 0..P {
            let w = weights.scale(s, p, chunk);
            for t in 0..T {
                let scale = s.mul(w, s.splat(f32::from_bits(scale[t].cast_unsigned())));
                sums[t][p] = s.fma(s.to_f32(units[t][p]), scale, sums[t][p]);
            }
        }
    }
    for t in 0..T {
        for p in 0..P {
            put(s, out, first + t, panel + p, sums[t][p]);
        }
    }
}
