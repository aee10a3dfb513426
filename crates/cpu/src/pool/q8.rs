//! 8-bit codes, symmetric: `x ≈ scale × (code − 128)`, code − 128 in −127..=127, one f16 scale per group. Codes are
//! stored unsigned, because integer dot products need one unsigned operand.
//!
//! ```text
//! scores:      units = Σ code × q (four bytes at once, q in units) − 128 × Σ q
//!              s[query] += units × scale × q's unit                                  per group of 16 keys
//! accumulate:  w' = w × scale, in units
//!              o[query] += (Σ code × w' (four cells at once) − 128 × Σ w') × w's unit    per group and tile
//! ```
//!
//! Per 64 codes and query: two integer products of 64 bytes (AVX2: four of 16 words). Per cell, head_dim + 2 × groups
//! bytes are read once for all queries of a call.
//!
//! All finite values can be stored: beyond 127 × 65,504 they saturate, below the smallest scale they become 0. A NaN or
//! an infinity makes its whole group NaN, so that the error remains visible.
//!
//! Measured on two Zen 4 cores (docs/performance.md): 0.72 of the read limit with a KV head per query head (64 elements to a group); with
//! four query heads to a KV head of 128 0.6 to 0.7 of it, and 0.67 to 0.85 of the time of f16; bound by arithmetic, 0.36 of it, with eight of 64.
use super::quantised::{
    Packed, QUADS, Units, blocks_at, byte_of, lines_from, packed_products, param, put_scores, quads_at,
    queries_that_fit, scores_in_pairs, units_from,
};
use super::{Blocks, Codec, Lines, Quads, Queries, Sums};
use crate::arch::{LANES, Simd};
use half::f16;

pub struct Q8;

const ZERO: u8 = 128;

impl Codec for Q8 {
    const ELEMENT: Option<usize> = None;
    fn code_bytes(head_dim: usize, _group: usize) -> usize {
        head_dim
    }
    fn params(head_dim: usize, group: usize) -> usize {
        head_dim.div_ceil(group)
    }

    #[inline(always)]
    fn encode(row: &[f32], group: usize, codes: &mut [u8], params: &mut [f16]) -> bool {
        let mut finite = true;
        for ((row, codes), scale) in row.chunks(group).zip(codes.chunks_mut(group)).zip(params) {
            if !row.iter().all(|x| x.is_finite()) {
                *scale = f16::NAN;
                codes.fill(ZERO);
                finite = false;
                continue;
            }
            let largest = row.iter().fold(0f32, |max, x| max.max(x.abs()));
            *scale = f16::from_f32((largest / 127.0).min(f16::MAX.to_f32()));
            // Compute the codes from the scale as stored.
            let stored = scale.to_f32();
            let inverse = if stored > 0.0 { 1.0 / stored } else { 0.0 };
            codes.iter_mut().zip(row).for_each(|(code, x)| {
                *code = ((x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8).cast_unsigned() ^ ZERO;
            });
        }
        finite
    }

    fn decode(codes: &[u8], params: &[f16], group: usize, row: &mut [f32]) {
        for ((row, codes), scale) in row.chunks_mut(group).zip(codes.chunks(group)).zip(params) {
            let scale = scale.to_f32();
            row.iter_mut().zip(codes).for_each(|(x, code)| *x = value(*code) * scale);
        }
    }

    packed_products!();
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
    let (per_row, per_group) = (blocks.row / 4, blocks.group / 4);
    let mut sums = [[s.splat(0.0); B]; R];
    for group in 0..blocks.head_dim.div_ceil(blocks.group) {
        let mut units = Units::<S, R, B>::new(s, packed, group, i32::from(ZERO));
        let (first, n) = (group * per_group, per_group.min(per_row - group * per_group));
        let (asked, lines) = (units_from(packed, first, n), lines_from(&codes, first, n));
        for quad in 0..n {
            let mut bytes = [s.splat_i(0); B];
            for b in 0..B {
                s.prefetch(&lines[b][quad], list[b].ahead);
                bytes[b] = s.load_bytes(&lines[b][quad]);
            }
            units.multiply(s, &asked, quad, &bytes);
        }
        units.add(s, packed, group, list, &mut sums);
    }
    put_scores(s, lines, query, at, &sums);
}

/// Adds `C` vectors of columns from column `d` on, of one group, to the sums of `R` queries.
#[inline(always)]
fn columns<S: Simd, const R: usize, const C: usize>(
    s: S,
    blocks: &Blocks<'_>,
    quads: &Quads,
    d: usize,
    query: usize,
    sums: &mut Sums<'_>,
) {
    let mut units = [[[s.splat_i(0); 2]; C]; R];
    for (b, block) in blocks.list.iter().enumerate() {
        let Some(lines) = quads_at::<C>(block, blocks.row, d) else { break };
        if query == 0 {
            lines.iter().flat_map(|lines| *lines).for_each(|line| s.prefetch(line, block.ahead));
        }
        let weights: [[_; 2]; R] = std::array::from_fn(|r| [0, 1].map(|part| quads.of_block(part, r, b)));
        for quad in 0..QUADS {
            let mut codes = [s.splat_i(0); C];
            for c in 0..C {
                codes[c] = s.load_bytes(&lines[quad][c]);
            }
            s.dot_units(&mut units, &codes, |r, part| i32::from_le_bytes(weights[r][part][quad]));
        }
    }
    for r in 0..R {
        let zero = s.splat_i(i32::from(ZERO).wrapping_mul(quads.units[r]));
        let row = sums.row(query + r, blocks.head_dim);
        for (c, sum) in row[d..].as_chunks_mut::<LANES>().0.iter_mut().enumerate().take(C) {
            let units = s.sub_i(s.sum_of_units(units[r][c]), zero);
            s.store(s.fma(s.to_f32(units), s.splat(quads.unit[r]), s.load(sum)), sum);
        }
    }
}

#[inline(always)]
fn value(code: u8) -> f32 {
    f32::from((code ^ ZERO).cast_signed())
}

impl Packed for Q8 {
    #[inline(always)]
    fn most_sums<S: Simd>() -> usize {
        queries_that_fit::<S>(1)
    }

    #[inline(always)]
    fn begin<S: Simd>(s: S, blocks: &Blocks<'_>, quads: &mut Quads) {
        quads.begin(s, blocks, (blocks.head_dim.div_ceil(blocks.group), 1));
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
        let n_groups = head_dim.div_ceil(blocks.group);
        quads.weigh::<S, R, false>(s, lines, query, blocks.list.len());
        for group in 0..n_groups {
            quads.pack::<S, R, false>(s, blocks, group);
            let (first, end) = (group * blocks.group, ((group + 1) * blocks.group).min(head_dim));
            let mut d = first;
            // Two vectors share the weights that they are multiplied with, where registers suffice.
            while 2 * R <= queries_that_fit::<S>(1) && end - d >= 2 * LANES {
                columns::<S, R, 2>(s, blocks, quads, d, query, sums);
                d += 2 * LANES;
            }
            while end - d >= LANES {
                columns::<S, R, 1>(s, blocks, quads, d, query, sums);
                d += LANES;
            }
            // The remainder of a group that is not a whole number of vectors.
            for (r, i) in (0..R).flat_map(|r| (d..end).map(move |i| (r, i))) {
                let line = &lines.data[(query + r) * lines.stride + lines.at..];
                for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                    let scale = param(blocks, group, lane);
                    let (block, in_block) = blocks.at(lane);
                    let code = block.codes[in_block / 4 * 4 * blocks.row + 4 * i + lane % 4];
                    sums.row(query + r, head_dim)[i] += line[lane] * scale * value(code);
                }
            }
        }
    }

    /// `o[query] += w × (scale × code)`.
    #[inline(always)]
    fn weigh_one_by_one<S: Simd>(s: S, lines: &Lines<'_>, blocks: &Blocks<'_>, sums: &mut Sums<'_>) {
        let head_dim = blocks.head_dim;
        for query in 0..sums.n {
            let line = &lines.data[query * lines.stride + lines.at..];
            let row = sums.row(query, head_dim);
            for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                let (block, in_block) = blocks.at(lane);
                let codes = &block.codes[in_block / 4 * 4 * blocks.row..];
                let zero = s.splat_i(i32::from(ZERO));
                for (chunk, sum) in row.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                    // Groups are whole vectors, so every vector has one scale.
                    let scale = param(blocks, chunk * LANES / blocks.group, lane);
                    let bytes =
                        s.load_bytes(codes[4 * chunk * LANES..].first_chunk().expect("four cells of a row"));
                    let code = s.sub_i(byte_of(s, bytes, lane % 4), zero);
                    let value = s.mul(s.to_f32(code), s.splat(scale));
                    s.store(s.fma(s.splat(line[lane]), value, s.load(sum)), sum);
                }
                for i in head_dim / LANES * LANES..head_dim {
                    let scale = param(blocks, i / blocks.group, lane);
                    row[i] += line[lane] * (scale * value(codes[4 * i + lane % 4]));
                }
            }
        }
    }
}
