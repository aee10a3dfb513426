//! f32, f16 and bf16 weights.
//!
//! ```text
//! for each input i:   y[16] += w[16] * x[i]
//! ```
//!
//! A fused multiply-add per 16 weights and token. bf16 stands in pairs of inputs, for machines that multiply pairs;
//! they take large batches, and round x to bf16.
//!
//! Measured on two Zen 5 cores (docs/performance.md): 0.98 of the read limit for one token; for 512 the peak of fused
//! multiply-adds, 460 GFLOP/s, and twice that in bf16 pairs.
use super::inputs::{Form, Inputs};
use super::{Format, Panels, for_token_tiles, put};
use crate::Compute;
use crate::arch::{Columns, Isa, LANES, Simd, widen};
use half::bf16;

pub struct F32;
pub struct F16;
pub struct BF16;

/// Batches from here on are worth the rounding.
const DOTS_FROM: usize = 16;

/// Will a batch of `n` tokens be multiplied in bf16 pairs?
pub fn uses_dots<F: Format>(compute: &Compute, n: usize) -> bool {
    let pairs = std::any::TypeId::of::<F>() == std::any::TypeId::of::<BF16>();
    pairs && n >= DOTS_FROM && !compute.deterministic && has_dots(compute.isa)
}

fn has_dots(isa: Isa) -> bool {
    struct Ask;
    impl crate::arch::Kernel for Ask {
        type Out = bool;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> bool {
            S::BF16_DOTS
        }
    }
    isa.run(Ask)
}

/// Two bytes of row `lane`.
fn half_at(codes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([codes[at], codes[at + 1]])
}

/// A float whose vectors stand one after the other.
trait Vectors: 'static {
    type Raw: Copy;
    fn of(codes: &[u8]) -> &[Self::Raw];
    fn widen<S: Simd>(s: S, raw: &Self::Raw) -> S::F;
}

impl Vectors for F32 {
    type Raw = [u8; 64];
    #[inline(always)]
    fn of(codes: &[u8]) -> &[[u8; 64]] {
        codes.as_chunks().0
    }
    #[inline(always)]
    fn widen<S: Simd>(s: S, raw: &[u8; 64]) -> S::F {
        s.load_f32_bytes(raw)
    }
}

impl Vectors for F16 {
    type Raw = [u8; 32];
    #[inline(always)]
    fn of(codes: &[u8]) -> &[[u8; 32]] {
        codes.as_chunks().0
    }
    #[inline(always)]
    fn widen<S: Simd>(s: S, raw: &[u8; 32]) -> S::F {
        s.load_f16(raw)
    }
}

impl Format for F32 {
    const BLOCK: (usize, usize) = (1, 4);
    const CODES: usize = 4 * LANES;
    const SCALES: usize = 0;
    const FORM: Form = Form::Rows;
    const PANELS: usize = 4;
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], _: &mut [u8]) {
        codes[4 * lane..4 * lane + 4].copy_from_slice(block);
    }
    fn unpack(codes: &[u8], _: &[u8], lane: usize, out: &mut [f32]) {
        let code = &codes[4 * lane..];
        out[0] = f32::from_le_bytes([code[0], code[1], code[2], code[3]]);
    }
    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        vectors::<S, Self>(s, weights, inputs, out);
    }
}

impl Format for F16 {
    const BLOCK: (usize, usize) = (1, 2);
    const CODES: usize = 2 * LANES;
    const SCALES: usize = 0;
    const FORM: Form = Form::Rows;
    const PANELS: usize = 4;
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], _: &mut [u8]) {
        codes[2 * lane..2 * lane + 2].copy_from_slice(block);
    }
    fn unpack(codes: &[u8], _: &[u8], lane: usize, out: &mut [f32]) {
        out[0] = widen(half_at(codes, 2 * lane));
    }
    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        vectors::<S, Self>(s, weights, inputs, out);
    }
}

impl Format for BF16 {
    const BLOCK: (usize, usize) = (2, 4);
    const CODES: usize = 4 * LANES;
    const SCALES: usize = 0;
    const FORM: Form = Form::Rows;
    const PANELS: usize = 4;
    fn pack(block: &[u8], lane: usize, codes: &mut [u8], _: &mut [u8]) {
        codes[4 * lane..4 * lane + 4].copy_from_slice(block);
    }
    fn unpack(codes: &[u8], _: &[u8], lane: usize, out: &mut [f32]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = bf16::from_bits(half_at(codes, 4 * lane + 2 * i)).to_f32();
        }
    }
    #[inline(always)]
    fn multiply<S: Simd>(
        s: S,
        weights: &Panels<'_>,
        inputs: &Inputs,
        deterministic: bool,
        out: &mut Columns<'_, f32>,
    ) {
        let mut panel = 0;
        while panel < weights.n {
            panel += if weights.n - panel >= 4 {
                for_token_tiles!(inputs.n, first, T => pairs::<S, T, 4>(s, weights, inputs, deterministic, first, panel, out));
                4
            } else {
                for_token_tiles!(inputs.n, first, T => pairs::<S, T, 1>(s, weights, inputs, deterministic, first, panel, out));
                1
            };
        }
    }
}

#[inline(always)]
fn vectors<S: Simd, F: Format + Vectors>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    out: &mut Columns<'_, f32>,
) {
    let mut panel = 0;
    while panel < weights.n {
        panel += if weights.n - panel >= 4 {
            for_token_tiles!(inputs.n, first, T => tile::<S, F, T, 4>(s, weights, inputs, first, panel, out));
            4
        } else {
            for_token_tiles!(inputs.n, first, T => tile::<S, F, T, 1>(s, weights, inputs, first, panel, out));
            1
        };
    }
}

/// `T` tokens times `P` panels. Eight tokens and four panels would not fit the registers: they go two by two.
#[inline(always)]
fn tile<S: Simd, F: Format + Vectors, const T: usize, const P: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    if T * P > 2 * S::ACCUMULATORS.min(8) && P == 4 {
        for half in [0, 2] {
            tile_of::<S, F, T, 2>(s, weights, inputs, first, panel + half, out);
        }
    } else {
        tile_of::<S, F, T, P>(s, weights, inputs, first, panel, out);
    }
}

#[inline(always)]
fn tile_of<S: Simd, F: Format + Vectors, const T: usize, const P: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let width = inputs.width;
    let x = inputs.rows_of::<T>(first);
    let mut w: [&[F::Raw]; P] = [&[]; P];
    for p in 0..P {
        w[p] = &F::of(weights.get::<F>(panel + p).0)[..width];
    }
    let mut sums = [[s.splat(0.0); P]; T];
    for i in 0..width {
        let mut v = [s.splat(0.0); P];
        for p in 0..P {
            v[p] = F::widen(s, &w[p][i]);
        }
        for t in 0..T {
            let x = s.splat(x[i][t]);
            for p in 0..P {
                sums[t][p] = s.fma(v[p], x, sums[t][p]);
            }
        }
    }
    for t in 0..T {
        for p in 0..P {
            put(s, out, first + t, panel + p, sums[t][p]);
        }
    }
}

#[inline(always)]
fn pairs<S: Simd, const T: usize, const P: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    deterministic: bool,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    if T * P > 2 * S::ACCUMULATORS.min(8) && P == 4 {
        for half in [0, 2] {
            pairs_of::<S, T, 2>(s, weights, inputs, deterministic, first, panel + half, out);
        }
    } else {
        pairs_of::<S, T, P>(s, weights, inputs, deterministic, first, panel, out);
    }
}

#[inline(always)]
fn pairs_of<S: Simd, const T: usize, const P: usize>(
    s: S,
    weights: &Panels<'_>,
    inputs: &Inputs,
    deterministic: bool,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let half = inputs.width / 2;
    let mut w: [&[[u8; 64]]; P] = [&[]; P];
    for p in 0..P {
        w[p] = &weights.get::<BF16>(panel + p).0.as_chunks().0[..half];
    }
    let mut sums = [[s.splat(0.0); P]; T];
    if deterministic {
        let x = &inputs.rows_of::<T>(first).as_chunks::<2>().0[..half];
        for i in 0..half {
            for p in 0..P {
                let (even, odd) = s.widen_pairs(s.load_bytes(&w[p][i]));
                for t in 0..T {
                    sums[t][p] = s.fma(even, s.splat(x[i][0][t]), sums[t][p]);
                    sums[t][p] = s.fma(odd, s.splat(x[i][1][t]), sums[t][p]);
                }
            }
        }
    } else {
        let x = inputs.pairs_of::<T>(first);
        for i in 0..half {
            let mut v = [s.splat_i(0); P];
            for p in 0..P {
                v[p] = s.load_bytes(&w[p][i]);
            }
            for t in 0..T {
                let x = s.splat_i(x[i][t]);
                for p in 0..P {
                    sums[t][p] = s.dot2(sums[t][p], v[p], x);
                }
            }
        }
    }
    for t in 0..T {
        for p in 0..P {
            put(s, out, first + t, panel + p, sums[t][p]);
        }
    }
}
