//! 8-bit codes, symmetric: `x ≈ scale × (code − 128)`, code − 128 in −127..=127, one f16 scale per group. Codes are
//! stored unsigned, because integer dot products need one unsigned operand.
//!
//! ```text
//! scores:      units = Σ code × q (four bytes at once, q in two bytes) − 128 × Σ q
//!              s[query] += units × scale × q's unit                                  per group of 16 keys
//! accumulate:  w' = w × scale, in two bytes
//!              o[query] += (Σ code × w' (four cells at once) − 128 × Σ w') × w's unit    per group and tile
//! ```
//!
//! Per 64 codes and query: two integer products of 64 bytes. Per cell, head_dim + 2 × groups bytes are read once for
//! all queries of a call.
//!
//! All finite values can be stored: beyond 127 × 65,504 they saturate, below the smallest scale they become 0. A NaN or
//! an infinity makes its whole group NaN, so that the error remains visible.
//!
//! Measured on two Zen 5 cores (docs/performance.md): 0.7 of the read limit with a KV head per query head; bound by
//! arithmetic, 0.34 of it, with eight query heads on each.
use super::quantised::{MAX_ROWS, Packed, byte_of, packed_products, param};
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

#[inline(always)]
fn value(code: u8) -> f32 {
    f32::from((code ^ ZERO).cast_signed())
}

impl Packed for Q8 {
    const WEIGHED: usize = MAX_ROWS;

    #[inline(always)]
    fn scores_of<S: Simd, const R: usize>(
        s: S,
        queries: &Queries<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        lines: &mut Lines<'_>,
    ) {
        let packed = &queries.packed[query..query + R];
        let per_row = blocks.row / 4;
        let n_groups = blocks.head_dim.div_ceil(blocks.group);
        for (at, block) in blocks.list.iter().enumerate() {
            let codes = &block.codes.as_chunks::<64>().0[..per_row];
            let scales = &block.params.as_chunks::<32>().0[..n_groups];
            let mut sums = [s.splat(0.0); R];
            let groups = codes.chunks(blocks.group / 4).zip(scales);
            for (group, (codes, scale)) in groups.enumerate() {
                let (mut high, mut low) = ([s.splat_i(0); R], [s.splat_i(0); R]);
                let first = group * (blocks.group / 4);
                for (quad, codes) in codes.iter().enumerate() {
                    s.prefetch(codes, block.ahead);
                    let codes = s.load_bytes(codes);
                    for r in 0..R {
                        high[r] = s.dot4(high[r], codes, s.splat_i(packed[r].high[first + quad]));
                        low[r] = s.dot4(low[r], codes, s.splat_i(packed[r].low[first + quad]));
                    }
                }
                let scale = s.load_f16(scale);
                for r in 0..R {
                    let zero = s.splat_i(i32::from(ZERO) * packed[r].units[group]);
                    let units = s.sub_i(s.add_i(s.times_256(high[r]), low[r]), zero);
                    let unit = s.splat(packed[r].unit[group]);
                    sums[r] = s.fma(s.mul(s.to_f32(units), scale), unit, sums[r]);
                }
            }
            for (r, sums) in sums.iter().enumerate() {
                let at = (query + r) * lines.stride + lines.at + at * LANES;
                if let Some(out) = lines.data[at..].first_chunk_mut() {
                    s.store(*sums, out);
                }
            }
        }
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
        for group in 0..n_groups {
            for r in 0..R {
                let line = &lines.data[(query + r) * lines.stride + lines.at..];
                quads.pack(s, r, line, blocks.list, group);
            }
            let (first, end) = (group * blocks.group, ((group + 1) * blocks.group).min(head_dim));
            let mut d = first;
            while end - d >= LANES {
                let (mut high, mut low) = ([s.splat_i(0); R], [s.splat_i(0); R]);
                for (at, block) in blocks.list.iter().enumerate() {
                    for quad in 0..LANES / 4 {
                        let codes = &block.codes[quad * 4 * blocks.row..];
                        let Some(codes) = codes[4 * d..].first_chunk() else { break };
                        s.prefetch(codes, block.ahead);
                        let codes = s.load_bytes(codes);
                        for r in 0..R {
                            let (h, l) = quads.quad(r, at * LANES / 4 + quad);
                            high[r] = s.dot4(high[r], codes, s.splat_i(h));
                            low[r] = s.dot4(low[r], codes, s.splat_i(l));
                        }
                    }
                }
                for r in 0..R {
                    let zero = s.splat_i(i32::from(ZERO) * quads.units[r]);
                    let units = s.sub_i(s.add_i(s.times_256(high[r]), low[r]), zero);
                    if let Some(sum) = sums.row(query + r, head_dim)[d..].first_chunk_mut() {
                        s.store(s.fma(s.to_f32(units), s.splat(quads.unit[r]), s.load(sum)), sum);
                    }
                }
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
