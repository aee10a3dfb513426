//! 4-bit codes of a rotated row: `x ≈ scale × level[code]`, with sixteen levels that fit a normal distribution and one
//! f16 scale per row. A rotated row is nearly normal whatever its original values, so one table serves all rows
//! (TurboQuant: Zandieh et al., 2025) and no minimum is needed. 4.25 bits for rows of 64 are about as accurate as `q4`
//! with 4.75.
//!
//! For keys, some channels (the outliers) may come first, stored in a byte each as in `q8`, with their own scale and
//! not rotated. The remaining elements become so much smaller that a score is three times as accurate for the same
//! bits.
//!
//! ```text
//! row          [outliers: a byte each][the others: element j and element j + half in a byte]
//! scores:      units = Σ level × q (four at once, q in units) − 128 × Σ q
//!              s[query] += units × scale × q's unit                          of the outliers, and of the others
//! accumulate:  w' = w × scale, in units
//!              o[query] += (Σ level × w' (four cells at once) − 128 × Σ w') × w's unit     per tile
//! ```
//!
//! Levels are looked up as unsigned bytes with 128 added, so that they can use the integer dot products of `q8`.
//!
//! Values that do not fit f16 saturate. A NaN or an infinity makes its row NaN, so that the error remains visible.
//!
//! Measured on two Zen 4 cores (docs/performance.md): 0.4 of the read limit, 0.61 of the time of f16, with four query heads to a KV
//! head of 128. Two products of bytes per 64 codes and the look-up are the limit.
use super::quantised::{
    Packed, QUADS, Units, blocks_at, byte_of, lines_from, packed_products, param, put_scores, quads_at,
    queries_that_fit, scores_in_pairs, units_from,
};
use super::{Blocks, Codec, Lines, Q8, Quads, Queries, Sums};
use crate::arch::{LANES, Simd};
use half::f16;

pub struct T4;

const ZERO: i32 = 128;
/// The levels of least mean square error for a normal distribution (Max, 1960), scaled so that the largest is 127, plus
/// 128.
pub(super) const LEVELS: [u8; 16] = [1, 32, 53, 70, 84, 97, 110, 122, 134, 146, 159, 172, 186, 203, 224, 255];
/// Boundaries between the magnitudes of neighbouring levels.
const EDGES: [f32; 7] = [12.0, 24.5, 37.5, 51.0, 66.5, 85.5, 111.5];
/// The largest level in standard deviations.
const LARGEST: f32 = 2.7326;

#[inline(always)]
fn level(code: u8) -> f32 {
    (i32::from(LEVELS[usize::from(code & 15)]) - ZERO) as f32
}

/// The code of the level nearest to `x`.
#[inline(always)]
fn code(x: f32) -> u8 {
    let magnitude: u8 = EDGES.iter().map(|edge| u8::from(x.abs() >= *edge)).sum();
    if x < 0.0 { 7 - magnitude } else { 8 + magnitude }
}

/// Computes scale and codes of the rotated elements.
#[inline(always)]
fn encode(row: &[f32], codes: &mut [u8], scale: &mut f16) -> bool {
    codes.fill(0);
    let squares: f32 = row.iter().map(|x| x * x).sum();
    if !squares.is_finite() && !row.iter().all(|x| x.is_finite()) {
        *scale = f16::NAN;
        return false;
    }
    // Squares may overflow where elements do not: then the largest level represents the largest element.
    let unit = match squares.is_finite() {
        true => (squares / row.len().max(1) as f32).sqrt() * (LARGEST / 127.0),
        false => row.iter().fold(0f32, |max, x| max.max(x.abs())) / 127.0,
    };
    let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    let (low, high) = row.split_at(row.len().div_ceil(2));
    codes.iter_mut().zip(low).for_each(|(byte, x)| *byte = code(x * inverse));
    codes.iter_mut().zip(high).for_each(|(byte, x)| *byte |= code(x * inverse) << 4);
    // Choose the scale so that the stored row has the norm of the original, which avoids a bias.
    let of_low = codes.iter().zip(low).map(|(byte, _)| level(byte & 15).powi(2));
    let of_high = codes.iter().zip(high).map(|(byte, _)| level(byte >> 4).powi(2));
    let levels: f32 = of_low.sum::<f32>() + of_high.sum::<f32>();
    let stored = if squares.is_finite() && levels > 0.0 { (squares / levels).sqrt() } else { unit };
    *scale = f16::from_f32(stored.min(f16::MAX.to_f32()));
    true
}

impl Codec for T4 {
    const ELEMENT: Option<usize> = None;
    fn code_bytes(head_dim: usize, outliers: usize) -> usize {
        outliers + (head_dim - outliers).div_ceil(2)
    }
    fn params(_: usize, outliers: usize) -> usize {
        if outliers > 0 { 2 } else { 1 }
    }

    #[inline(always)]
    fn encode(row: &[f32], outliers: usize, codes: &mut [u8], params: &mut [f16]) -> bool {
        let ((wide, others), (wide_codes, codes)) = (row.split_at(outliers), codes.split_at_mut(outliers));
        match params {
            [wide_scale, scale] => {
                let finite = Q8::encode(wide, outliers.max(1), wide_codes, std::slice::from_mut(wide_scale));
                encode(others, codes, scale) && finite
            }
            [scale] => encode(others, codes, scale),
            _ => unreachable!("one parameter, or two"),
        }
    }

    fn decode(codes: &[u8], params: &[f16], outliers: usize, row: &mut [f32]) {
        let ((wide, others), (wide_codes, codes)) = (row.split_at_mut(outliers), codes.split_at(outliers));
        Q8::decode(wide_codes, params, outliers.max(1), wide);
        let scale = params[params.len() - 1].to_f32();
        let (low, high) = others.split_at_mut(others.len().div_ceil(2));
        low.iter_mut().zip(codes).for_each(|(x, byte)| *x = scale * level(byte & 15));
        high.iter_mut().zip(codes).for_each(|(x, byte)| *x = scale * level(byte >> 4));
    }

    packed_products!();
}

impl Packed for T4 {
    #[inline(always)]
    fn most_sums<S: Simd>() -> usize {
        queries_that_fit::<S>(2)
    }

    #[inline(always)]
    fn begin<S: Simd>(s: S, blocks: &Blocks<'_>, quads: &mut Quads) {
        quads.begin(s, blocks, (1, 1));
    }

    #[inline(always)]
    fn scores_of<S: Simd, const R: usize>(
        s: S,
        queries: &Queries<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        lines: &mut Lines<'_>,
    ) {
        scores_in_pairs!(S, R, blocks.list.len(), at, B => {
            blocks_scores::<S, R, B>(s, queries, query, blocks, at, lines);
        });
    }

    #[inline(always)]
    fn accumulate_for<S: Simd, const R: usize>(
        s: S,
        lines: &Lines<'_>,
        blocks: &Blocks<'_>,
        sums: &mut Sums<'_>,
        query: usize,
        quads: &mut Quads,
    ) {
        let head_dim = blocks.head_dim;
        quads.weigh::<S, R, false>(s, lines, query, blocks.list.len());
        quads.pack::<S, R, false>(s, blocks, 0);
        let half = head_dim.div_ceil(2);
        // Whole vectors of both halves; the high half may be shorter by one element.
        let whole = head_dim / 2 / LANES * LANES;
        for j in (0..whole).step_by(LANES) {
            let mut units = [[[s.splat_i(0); 2]; 2]; R];
            for (at, block) in blocks.list.iter().enumerate() {
                let Some(lines) = quads_at::<1>(block, blocks.row, j) else { break };
                if query == 0 {
                    lines.iter().flat_map(|lines| *lines).for_each(|line| s.prefetch(line, block.ahead));
                }
                let weights: [[_; 2]; R] =
                    std::array::from_fn(|r| [0, 1].map(|part| quads.of_block(part, r, at)));
                for quad in 0..QUADS {
                    let bytes = s.load_bytes(&lines[quad][0]);
                    let a = s.lookup(&LEVELS, s.low_nibbles(bytes));
                    let b = s.lookup(&LEVELS, s.high_nibbles(bytes));
                    s.dot_units(&mut units, &[a, b], |r, part| i32::from_le_bytes(weights[r][part][quad]));
                }
            }
            for r in 0..R {
                let (unit, zero) = (s.splat(quads.unit[r]), s.splat_i(ZERO.wrapping_mul(quads.units[r])));
                let row = sums.row(query + r, head_dim);
                for (at, units) in [(j, units[r][0]), (half + j, units[r][1])] {
                    let units = s.to_f32(s.sub_i(s.sum_of_units(units), zero));
                    if let Some(sum) = row[at..].first_chunk_mut() {
                        s.store(s.fma(units, unit, s.load(sum)), sum);
                    }
                }
            }
        }
        for (r, i) in (0..R).flat_map(|r| (0..head_dim).map(move |i| (r, i))) {
            if i % half < whole {
                continue;
            }
            let line = &lines.data[(query + r) * lines.stride + lines.at..];
            for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                let (block, in_block) = blocks.at(lane);
                let byte = block.codes[in_block / 4 * 4 * blocks.row + 4 * (i % half) + lane % 4];
                let code = if i < half { byte & 15 } else { byte >> 4 };
                sums.row(query + r, head_dim)[i] += line[lane] * (param(blocks, 0, lane) * level(code));
            }
        }
    }

    /// `o[query] += w × (scale × level)`.
    #[inline(always)]
    fn weigh_one_by_one<S: Simd>(s: S, lines: &Lines<'_>, blocks: &Blocks<'_>, sums: &mut Sums<'_>) {
        let head_dim = blocks.head_dim;
        let whole = head_dim / 2 / LANES;
        let zero = s.splat_i(ZERO);
        for query in 0..sums.n {
            let line = &lines.data[query * lines.stride + lines.at..];
            let (low, high) = sums.row(query, head_dim).split_at_mut(head_dim.div_ceil(2));
            for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                let (block, in_block) = blocks.at(lane);
                let codes = &block.codes[in_block / 4 * 4 * blocks.row..];
                let (weight, scale) = (line[lane], param(blocks, 0, lane));
                let vectors = low.as_chunks_mut::<LANES>().0.iter_mut().zip(high.as_chunks_mut::<LANES>().0);
                for (chunk, (low, high)) in vectors.take(whole).enumerate() {
                    let bytes =
                        s.load_bytes(codes[4 * chunk * LANES..].first_chunk().expect("four cells of a row"));
                    let byte = byte_of(s, bytes, lane % 4);
                    for (sum, code) in [(low, s.low_nibbles(byte)), (high, s.high_nibbles(byte))] {
                        // The lowest looked-up byte is the code's own; the others are those of code 0.
                        let level = s.sub_i(s.byte::<0>(s.lookup(&LEVELS, code)), zero);
                        let value = s.mul(s.to_f32(level), s.splat(scale));
                        s.store(s.fma(s.splat(weight), value, s.load(sum)), sum);
                    }
                }
                let add = |sum: &mut f32, code: u8| *sum += weight * (scale * level(code));
                for (i, sum) in low.iter_mut().enumerate().skip(whole * LANES) {
                    add(sum, codes[4 * i + lane % 4] & 15);
                }
                for (i, sum) in high.iter_mut().enumerate().skip(whole * LANES) {
                    add(sum, codes[4 * i + lane % 4] >> 4);
                }
            }
        }
    }
}

/// Scores of `R` queries over `B` blocks from block `at` on. The blocks share the queries' units.
#[inline(always)]
fn blocks_scores<S: Simd, const R: usize, const B: usize>(
    s: S,
    queries: &Queries<'_>,
    query: usize,
    blocks: &Blocks<'_>,
    at: usize,
    lines: &mut Lines<'_>,
) {
    let packed = &queries.packed[query..query + R];
    let Some((list, codes)) = blocks_at::<S, B>(s, blocks, query, at) else { return };
    let (per_row, outliers) = (blocks.row / 4, blocks.group / 4);
    let mut sums = [[s.splat(0.0); B]; R];
    // Outliers have a byte each, and are the first group if there are any.
    if outliers > 0 {
        let mut units = Units::<S, R, B>::new(s, packed, 0, ZERO);
        let (asked, lines) = (units_from(packed, 0, outliers), lines_from(&codes, 0, outliers));
        for quad in 0..outliers {
            let mut bytes = [s.splat_i(0); B];
            for b in 0..B {
                s.prefetch(&lines[b][quad], list[b].ahead);
                bytes[b] = s.load_bytes(&lines[b][quad]);
            }
            units.multiply(s, &asked, quad, &bytes);
        }
        units.add(s, packed, 0, list, &mut sums);
    }
    let group = usize::from(outliers > 0);
    let mut units = Units::<S, R, B>::new(s, packed, group, ZERO);
    // The quads of the low halves, then those of the high halves.
    let n = per_row - outliers;
    let (low, high) = (units_from(packed, outliers, n), units_from(packed, per_row, n));
    let rest = lines_from(&codes, outliers, n);
    for quad in 0..n {
        let (mut a, mut b) = ([s.splat_i(0); B], [s.splat_i(0); B]);
        for i in 0..B {
            s.prefetch(&rest[i][quad], list[i].ahead);
            let bytes = s.load_bytes(&rest[i][quad]);
            a[i] = s.lookup(&LEVELS, s.low_nibbles(bytes));
            b[i] = s.lookup(&LEVELS, s.high_nibbles(bytes));
        }
        units.multiply(s, &low, quad, &a);
        units.multiply(s, &high, quad, &b);
    }
    units.add(s, packed, group, list, &mut sums);
    put_scores(s, lines, query, at, &sums);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_those_of_the_nearest_level() {
        for i in -1400..1400 {
            let x = i as f32 * 0.1;
            let nearest = (0..16).map(|c| (level(c) - x).abs()).fold(f32::INFINITY, f32::min);
            assert!((level(code(x)) - x).abs() <= nearest + 1e-4, "{x}: level {}", level(code(x)));
        }
    }

    #[test]
    fn rows_of_any_size_come_back_and_what_is_no_number_is_seen() {
        for size in [1e-30f32, 1e-6, 1.0, 1e4, 1e30, f32::MAX] {
            let row: Vec<f32> = (0..24).map(|i| size * (((i * 7 % 11) as f32 - 5.0) / 5.0)).collect();
            let (mut codes, mut params, mut back) = (vec![9; 16], [f16::ZERO; 2], vec![0.0; 24]);
            assert!(T4::encode(&row, 8, &mut codes, &mut params), "{size}");
            T4::decode(&codes, &params, 8, &mut back);
            assert!(back.iter().all(|x| x.is_finite()), "{size}: {back:?}");
            if (1e-2..1e6).contains(&size) {
                let off: f32 = row.iter().zip(&back).map(|(x, y)| (x - y).powi(2)).sum();
                let own: f32 = row.iter().map(|x| x * x).sum();
                assert!(off < 0.02 * own, "{size}: {}", off / own);
            }
        }
        for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 9), (f32::NEG_INFINITY, 23)] {
            let mut row = vec![1.0; 24];
            row[at] = bad;
            let (mut codes, mut params, mut back) = (vec![0; 16], [f16::ZERO; 2], vec![0.0; 24]);
            assert!(!T4::encode(&row, 8, &mut codes, &mut params));
            T4::decode(&codes, &params, 8, &mut back);
            assert!(back[at].is_nan(), "{at}: {back:?}");
        }
    }
}
