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
//! Measured on two Zen 5 cores (docs/performance.md): q4_K reads at 0.55, q6_K at 0.7 of the limit for one token.
use super::inputs::{Form, Inputs, MINUS_32_SUMS, NEGATIVE_SUM, scale_of};
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
            let mut w = [[s.splat_i(0); 8]; 2];
            for q in 0..8 {
                s.prefetch(&codes[q], AHEAD);
                let bytes = s.load_bytes(&codes[q]);
                (w[0][q], w[1][q]) = (s.low_nibbles(bytes), s.high_nibbles(bytes));
            }
            for (high, w) in w.iter().enumerate() {
                let group = 2 * chunk + high;
                // At most 63: the same as i8.
                let (sc, m) = (s.to_f32(s.load_i8(&small[group])), s.to_f32(s.load_i8(&small[8 + group])));
                let x = &x[b * 8 + group];
                for t in 0..T {
                    let mut units = s.splat_i(0);
                    for q in 0..8 {
                        units = s.dot4(units, w[q], s.splat_i(x[q][t]));
                    }
                    scaled[t] = s.fma(s.mul(s.to_f32(units), sc), s.splat(scale_of(x, t)), scaled[t]);
                    let sum = -x[NEGATIVE_SUM][t] as f32 * scale_of(x, t);
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

/// Codes of half a super-block of q6_K, `[32 / 4][3][16][4]`: bytes of which the lower six bits are the codes of the
/// first three quarters, and the upper two together that of the last one, its lowest bits in the first.
const Q6K_HALF: usize = 96 * LANES;
/// Scales: sc `[16][16]`, d `[16]`.
const Q6K_D: usize = 16 * LANES;

/// Code `i` of a block of the file.
fn q6k_code(block: &[u8], i: usize) -> u8 {
    let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
    let low = block[half * 64 + quarter % 2 * 32 + l];
    let upper = block[128 + half * 32 + l];
    (if quarter < 2 { low & 15 } else { low >> 4 }) | (upper >> (2 * quarter) & 3) << 4
}

impl Format for Q6K {
    const BLOCK: (usize, usize) = (SUPER, 210);
    const CODES: usize = 2 * Q6K_HALF;
    const SCALES: usize = Q6K_D + 2 * LANES;
    const FORM: Form = Form::Codes;

    fn pack(block: &[u8], lane: usize, codes: &mut [u8], scales: &mut [u8]) {
        for (half, codes) in codes.chunks_exact_mut(Q6K_HALF).enumerate() {
            for i in 0..32 {
                let code = |quarter| q6k_code(block, half * 128 + quarter * 32 + i);
                for part in 0..3 {
                    let place = ((i / 4 * 3 + part) * LANES + lane) * 4 + i % 4;
                    codes[place] = code(part) | code(3) >> (2 * part) << 6;
                }
            }
        }
        for (j, scale) in block[192..208].iter().enumerate() {
            scales[j * LANES + lane] = *scale;
        }
        scales[Q6K_D + 2 * lane..Q6K_D + 2 * lane + 2].copy_from_slice(&block[208..210]);
    }

    fn unpack(codes: &[u8], scales: &[u8], lane: usize, out: &mut [f32]) {
        let d = f16_at(&scales[Q6K_D..], lane);
        for (i, out) in out.iter_mut().enumerate() {
            let (half, quarter, l) = (i / 128, i % 128 / 32, i % 32);
            let at = |part| codes[half * Q6K_HALF + ((l / 4 * 3 + part) * LANES + lane) * 4 + l % 4];
            let code =
                if quarter < 3 { at(quarter) & 63 } else { at(0) >> 6 | at(1) >> 6 << 2 | at(2) >> 6 << 4 };
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
    let x = inputs.groups_of::<T>(first).as_chunks::<4>().0.as_chunks::<2>().0;
    // [blocks][half][16 of 32 codes][4 quads][3 lines].
    let codes = codes.as_chunks::<64>().0.as_chunks::<3>().0.as_chunks::<4>().0;
    let codes = codes.as_chunks::<2>().0.as_chunks::<2>().0;
    let mut sums = [s.splat(0.0); T];
    for ((codes, scales), x) in codes.iter().zip(scales.as_chunks::<{ Q6K::SCALES }>().0).zip(x) {
        let small = scales.as_chunks::<LANES>().0.as_chunks::<2>().0.as_chunks::<4>().0;
        let mut scaled = [s.splat(0.0); T];
        for ((codes, small), x) in codes.iter().zip(small).zip(x) {
            for (i, codes) in codes.iter().enumerate() {
                let mut w = [[s.splat_i(0); 4]; 4];
                for (q, lines) in codes.iter().enumerate() {
                    lines.iter().for_each(|line| s.prefetch(line, AHEAD));
                    let [a, b, c, d] = s.sixes(lines.map(|line| s.load_bytes(&line)));
                    (w[0][q], w[1][q], w[2][q], w[3][q]) = (a, b, c, d);
                }
                for (quarter, w) in w.iter().enumerate() {
                    let (scale, x) = (s.load_i8(&small[quarter][i]), &x[quarter]);
                    for t in 0..T {
                        let mut units = s.splat_i(x[MINUS_32_SUMS + i][t]);
                        for q in 0..4 {
                            units = s.dot4(units, w[q], s.splat_i(x[4 * i + q][t]));
                        }
                        let units = s.to_f32(s.mul_i(units, scale));
                        scaled[t] = s.fma(units, s.splat(scale_of(x, t)), scaled[t]);
                    }
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
