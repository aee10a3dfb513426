//! q4_K and q6_K: super-blocks of 256 weights, whose groups are scaled by small integers and those by one f16.
//!
//! ```text
//! q4_K   w = d × sc × code − dmin × m          8 groups of 32, sc and m in 6 bits, code in 0..=15     4.6 bits
//! q6_K   w = d × sc × (code − 32)              16 groups of 16, sc in 8 bits, code in 0..=63          6.6 bits
//!
//! per 32 inputs:   units = Σ dot4(codes, x's codes) [− 32 × Σ x's codes];   a += units × sc × x's scale
//! per super-block: y += d × a  [− dmin × Σ m × Σ x]
//! ```
//!
//! Per 32 inputs of 16 rows: 8 products of 64 bytes per token. q4_K's scales are held unpacked: 4.625 bits per
//! weight instead of 4.5.
//!
//! Measured on two Zen 5 cores (docs/performance.md): q4_K and q6_K read 24 to 28 GB/s for one token, 0.6 of the limit.
use super::inputs::{Form, Inputs, NEGATIVE_SUM, SUMS, scale_of};
use super::{AHEAD, Format, Panels, for_token_tiles, put};
use crate::arch::{Columns, LANES, Simd, widen};

pub struct Q4K;
pub struct Q6K;

const SUPER: usize = 256;

fn f16_at(bytes: &[u8], lane: usize) -> f32 {
    widen(u16::from_le_bytes([bytes[2 * lane], bytes[2 * lane + 1]]))
}

/// Put the bytes of row `lane` where its quads stand.
fn spread(row: &[u8], lane: usize, place: &mut [u8]) {
    for (place, quad) in place.chunks_exact_mut(4 * LANES).zip(row.chunks_exact(4)) {
        place[4 * lane..4 * lane + 4].copy_from_slice(quad);
    }
}

fn byte(place: &[u8], lane: usize, j: usize) -> u8 {
    place[(j / 4 * LANES + lane) * 4 + j % 4]
}

/// Scale and minimum of group `j` from their 12 bytes.
fn scale_min(j: usize, q: &[u8]) -> (u8, u8) {
    if j < 4 {
        (q[j] & 63, q[j + 4] & 63)
    } else {
        ((q[j + 4] & 15) | (q[j - 4] >> 6 << 4), (q[j + 4] >> 4) | (q[j] >> 6 << 4))
    }
}

/// Scales of a super-block of q4_K: sc `[8][16]`, m `[8][16]`, d `[16]`, dmin `[16]`.
const Q4K_MINS: usize = 8 * LANES;
const Q4K_D: usize = 16 * LANES;
const Q4K_DMIN: usize = Q4K_D + 2 * LANES;

impl Format for Q4K {
    const BLOCK: (usize, usize) = (SUPER, 144);
    const CODES: usize = 128 * LANES;
    const SCALES: usize = Q4K_DMIN + 2 * LANES;
    const FORM: Form = Form::Codes;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        spread(&block[16..], lane, codes);
        for j in 0..8 {
            (scales[j * LANES + lane], scales[Q4K_MINS + j * LANES + lane]) = scale_min(j, &block[4..16]);
        }
        scales[Q4K_D + 2 * lane..Q4K_D + 2 * lane + 2].copy_from_slice(&block[..2]);
        scales[Q4K_DMIN + 2 * lane..Q4K_DMIN + 2 * lane + 2].copy_from_slice(&block[2..4]);
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let (d, dmin) = (f16_at(&scales[Q4K_D..], lane), f16_at(&scales[Q4K_DMIN..], lane));
        for (j, out) in out.chunks_exact_mut(32).enumerate() {
            let scale = d * f32::from(scales[j * LANES + lane]);
            let minimum = dmin * f32::from(scales[Q4K_MINS + j * LANES + lane]);
            for (i, out) in out.iter_mut().enumerate() {
                let byte = byte(codes, lane, j / 2 * 32 + i);
                let code = if j % 2 == 0 { byte & 15 } else { byte >> 4 };
                *out = scale * f32::from(code) - minimum;
            }
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        for panel in 0..weights.n {
            let (codes, scales) = weights.get::<Self>(panel);
            for_token_tiles!(inputs.n, first, T => q4k::<S, T>(s, codes, scales, inputs, first, panel, out));
        }
    }
}

#[inline(always)]
fn q4k<S: Simd, const T: usize>(
    s: S,
    codes: &[u8],
    scales: &[u8],
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let (blocks, x) = (inputs.width / SUPER, inputs.groups_of::<T>(first));
    let mut sums = [s.splat(0.0); T];
    for b in 0..blocks {
        let codes = &codes[b * Q4K::CODES..(b + 1) * Q4K::CODES].as_chunks::<64>().0.as_chunks::<8>().0;
        let scales = &scales[b * Q4K::SCALES..(b + 1) * Q4K::SCALES];
        let small = scales[..Q4K_D].as_chunks::<LANES>().0;
        let large = scales[Q4K_D..].as_chunks::<32>().0;
        let (mut scaled, mut least) = ([s.splat(0.0); T], [s.splat(0.0); T]);
        for (chunk, codes) in codes.iter().enumerate() {
            for high in 0..2 {
                let group = 2 * chunk + high;
                let mut w = [s.splat_i(0); 8];
                for q in 0..8 {
                    let bytes = s.load_bytes(&codes[q]);
                    s.prefetch(&codes[q], AHEAD);
                    w[q] = if high == 0 { s.low_nibbles(bytes) } else { s.high_nibbles(bytes) };
                }
                // At most 63: the same as i8.
                let (sc, m) = (s.to_f32(s.load_i8(&small[group])), s.to_f32(s.load_i8(&small[8 + group])));
                for t in 0..T {
                    let at = b * 8 + group;
                    let mut units = s.splat_i(0);
                    for q in 0..8 {
                        units = s.dot4(units, w[q], s.splat_i(x[at][q][t]));
                    }
                    scaled[t] = s.fma(s.mul(s.to_f32(units), sc), s.splat(scale_of(&x[at], t)), scaled[t]);
                    let sum = -x[at][NEGATIVE_SUM][t] as f32 * scale_of(&x[at], t);
                    least[t] = s.fma(m, s.splat(sum), least[t]);
                }
            }
        }
        let (d, dmin) = (s.load_f16(&large[0]), s.load_f16(&large[1]));
        for t in 0..T {
            sums[t] = s.fma(d, scaled[t], sums[t]);
            sums[t] = s.sub(sums[t], s.mul(dmin, least[t]));
        }
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}

/// Codes of a super-block of q6_K: low halves `[128 / 4][16][4]`, then the upper two bits `[64 / 4][16][4]`.
const Q6K_UPPER: usize = 128 * LANES;
/// Scales: sc `[16][16]`, d `[16]`.
const Q6K_D: usize = 16 * LANES;

impl Format for Q6K {
    const BLOCK: (usize, usize) = (SUPER, 210);
    const CODES: usize = 192 * LANES;
    const SCALES: usize = Q6K_D + 2 * LANES;
    const FORM: Form = Form::Codes;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        spread(&block[..192], lane, codes);
        for (j, scale) in block[192..208].iter().enumerate() {
            scales[j * LANES + lane] = *scale;
        }
        scales[Q6K_D + 2 * lane..Q6K_D + 2 * lane + 2].copy_from_slice(&block[208..210]);
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let d = f16_at(&scales[Q6K_D..], lane);
        for (i, out) in out.iter_mut().enumerate() {
            let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
            let low = byte(codes, lane, half * 64 + quarter % 2 * 32 + l);
            let upper = byte(&codes[Q6K_UPPER..], lane, half * 32 + l);
            let low = if quarter < 2 { low & 15 } else { low >> 4 };
            let code = low | (upper >> (2 * quarter) & 3) << 4;
            let scale = scales[i / 16 * LANES + lane].cast_signed();
            *out = d * f32::from(scale) * (f32::from(code) - 32.0);
        }
    }

    #[inline(always)]
    fn multiply<S: Simd>(s: S, weights: &Panels<'_>, inputs: &Inputs, _: bool, out: &mut Columns<'_, f32>) {
        for panel in 0..weights.n {
            let (codes, scales) = weights.get::<Self>(panel);
            for_token_tiles!(inputs.n, first, T => q6k::<S, T>(s, codes, scales, inputs, first, panel, out));
        }
    }
}

#[inline(always)]
fn q6k<S: Simd, const T: usize>(
    s: S,
    codes: &[u8],
    scales: &[u8],
    inputs: &Inputs,
    first: usize,
    panel: usize,
    out: &mut Columns<'_, f32>,
) {
    let (blocks, x) = (inputs.width / SUPER, inputs.groups_of::<T>(first));
    let mut sums = [s.splat(0.0); T];
    for b in 0..blocks {
        let (low, upper) = codes[b * Q6K::CODES..(b + 1) * Q6K::CODES].split_at(Q6K_UPPER);
        let (low, upper) =
            (low.as_chunks::<64>().0.as_chunks::<8>().0, upper.as_chunks::<64>().0.as_chunks::<8>().0);
        let scales = &scales[b * Q6K::SCALES..(b + 1) * Q6K::SCALES];
        let small = scales[..Q6K_D].as_chunks::<LANES>().0;
        let mut scaled = [s.splat(0.0); T];
        for half in 0..2 {
            for quarter in 0..4 {
                let mut w = [s.splat_i(0); 8];
                for q in 0..8 {
                    let bytes = s.load_bytes(&low[half * 2 + quarter % 2][q]);
                    s.prefetch(&low[half * 2 + quarter % 2][q], AHEAD);
                    let crumbs = s.load_bytes(&upper[half][q]);
                    let nibbles = if quarter < 2 { s.low_nibbles(bytes) } else { s.high_nibbles(bytes) };
                    let crumbs = match quarter {
                        0 => s.high_crumbs::<0>(crumbs),
                        1 => s.high_crumbs::<1>(crumbs),
                        2 => s.high_crumbs::<2>(crumbs),
                        _ => s.high_crumbs::<3>(crumbs),
                    };
                    w[q] = s.or(nibbles, crumbs);
                }
                let group = half * 4 + quarter;
                let scale = [s.load_i8(&small[2 * group]), s.load_i8(&small[2 * group + 1])];
                for t in 0..T {
                    let at = b * 8 + group;
                    let mut units = [s.splat_i(-32 * x[at][SUMS][t]), s.splat_i(-32 * x[at][SUMS + 1][t])];
                    for q in 0..4 {
                        units[0] = s.dot4(units[0], w[q], s.splat_i(x[at][q][t]));
                        units[1] = s.dot4(units[1], w[q + 4], s.splat_i(x[at][q + 4][t]));
                    }
                    let units = s.add_i(s.mul_i(units[0], scale[0]), s.mul_i(units[1], scale[1]));
                    scaled[t] = s.fma(s.to_f32(units), s.splat(scale_of(&x[at], t)), scaled[t]);
                }
            }
        }
        let d = s.load_f16(scales[Q6K_D..].first_chunk().expect("a scale per row"));
        for t in 0..T {
            sums[t] = s.fma(d, scaled[t], sums[t]);
        }
    }
    for (t, sums) in sums.into_iter().enumerate() {
        put(s, out, first + t, panel, sums);
    }
}
