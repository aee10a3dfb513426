//! 4-bit codes, affine: `x ≈ minimum + scale × code`, code in 0..=15, an f16 scale and an f16 minimum per group.
//!
//! ```text
//! scores:      units = Σ code × q (four nibbles at once, q in units)
//!              s[query] += units × scale × q's unit + minimum × Σ q                   per group of 16 keys
//! accumulate:  w' = w × scale, in units
//!              o[query] += Σ code × w' (four cells at once) × w's unit + Σ w × minimum    per group and tile
//! ```
//!
//! Per 64 bytes and query: four integer products of 64 bytes (AVX2: eight of 16 words). Per cell, head_dim / 2 + 4 × groups bytes are read once
//! for all queries of a call.
//!
//! A byte contains element `j` of a group in its low half and element `j + half` in its high half, so that unpacking is
//! two straight loops. Values that do not fit f16 saturate. A NaN or an infinity makes its whole group NaN, so that the
//! error remains visible.
//!
//! Measured on two Zen 5 cores (docs/performance.md): 0.65 of the read limit with a KV head per query head; bound by
//! arithmetic, 0.2 of it, with eight query heads on each.
use super::quantised::{
    Packed, Units, blocks_at, byte_of, packed_products, param, put_scores, scores_in_pairs,
};
use super::{Blocks, Codec, Lines, Quads, Queries, Sums};
use crate::arch::{LANES, Simd};
use half::f16;

pub struct Q4;

impl Codec for Q4 {
    const ELEMENT: Option<usize> = None;
    fn code_bytes(head_dim: usize, _group: usize) -> usize {
        head_dim.div_ceil(2)
    }
    fn params(head_dim: usize, group: usize) -> usize {
        2 * head_dim.div_ceil(group)
    }

    #[inline(always)]
    fn encode(row: &[f32], group: usize, codes: &mut [u8], params: &mut [f16]) -> bool {
        let mut finite = true;
        let groups = row.chunks(group).zip(codes.chunks_mut(group / 2)).zip(params.chunks_exact_mut(2));
        for ((row, codes), params) in groups {
            codes.fill(0);
            if !row.iter().all(|x| x.is_finite()) {
                params.fill(f16::NAN);
                finite = false;
                continue;
            }
            let (min, max) =
                row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, m), x| (l.min(*x), m.max(*x)));
            let limit = f16::MAX.to_f32();
            params[1] = f16::from_f32(min.clamp(-limit, limit));
            let minimum = params[1].to_f32();
            params[0] = f16::from_f32(((max - minimum) / 15.0).clamp(0.0, limit));
            // Compute the codes from scale and minimum as stored.
            let stored = params[0].to_f32();
            let inverse = if stored > 0.0 { 1.0 / stored } else { 0.0 };
            let (low, high) = row.split_at(row.len().div_ceil(2));
            let code = |x: &f32| ((x - minimum) * inverse).round_ties_even().clamp(0.0, 15.0) as u8;
            codes.iter_mut().zip(low).for_each(|(byte, x)| *byte = code(x));
            codes.iter_mut().zip(high).for_each(|(byte, x)| *byte |= code(x) << 4);
        }
        finite
    }

    fn decode(codes: &[u8], params: &[f16], group: usize, row: &mut [f32]) {
        let groups = row.chunks_mut(group).zip(codes.chunks(group / 2)).zip(params.chunks_exact(2));
        for ((x, codes), params) in groups {
            let (scale, minimum) = (params[0].to_f32(), params[1].to_f32());
            let (low, high) = x.split_at_mut(x.len().div_ceil(2));
            low.iter_mut().zip(codes).for_each(|(x, code)| *x = minimum + scale * f32::from(*code & 15));
            high.iter_mut().zip(codes).for_each(|(x, code)| *x = minimum + scale * f32::from(*code >> 4));
        }
    }

    packed_products!();
}

impl Packed for Q4 {
    const VECTORS: usize = 2;

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
        // A scale and a minimum per group.
        quads.begin::<S, R>(s, lines, query, blocks, (n_groups, 2));
        for group in 0..n_groups {
            quads.pack::<S, R>(s, blocks, group, 2);
            let mut min = [s.splat(0.0); R];
            for (at, block) in blocks.list.iter().enumerate() {
                let minimum = s.load_f16(&block.params.as_chunks::<32>().0[2 * group + 1]);
                for r in 0..R {
                    let line = &lines.data[(query + r) * lines.stride + lines.at + at * LANES..];
                    if let Some(line) = line.first_chunk() {
                        min[r] = s.add(min[r], s.mul_nonzero(s.load(line), minimum));
                    }
                }
            }
            for r in 0..R {
                min[r] = s.splat(s.sum(min[r]));
            }
            let first = group * blocks.group;
            let len = blocks.group.min(head_dim - first);
            let half = len.div_ceil(2);
            let byte0 = first / 2;
            // The two halves are aligned only if they are whole vectors. 16 elements are the smallest group of any real
            // model.
            let whole = if len.is_multiple_of(2 * LANES) { half } else { 0 };
            let mut j = 0;
            while j < whole {
                let mut units = [[[s.splat_i(0); 2]; 2]; R];
                for (at, block) in blocks.list.iter().enumerate() {
                    for quad in 0..LANES / 4 {
                        let codes = &block.codes[quad * 4 * blocks.row..];
                        let Some(bytes) = codes[4 * (byte0 + j)..].first_chunk() else { break };
                        s.prefetch(bytes, block.ahead);
                        let bytes = s.load_bytes(bytes);
                        let (a, b) = (s.low_nibbles(bytes), s.high_nibbles(bytes));
                        for r in 0..R {
                            let weights = quads.quad(r, at * LANES / 4 + quad);
                            units[r][0] = s.dot_units(units[r][0], a, weights);
                            units[r][1] = s.dot_units(units[r][1], b, weights);
                        }
                    }
                }
                for r in 0..R {
                    let unit = s.splat(quads.unit[r]);
                    let row = sums.row(query + r, head_dim);
                    for (at, units) in [(first + j, units[r][0]), (first + half + j, units[r][1])] {
                        let units = s.to_f32(s.sum_of_units(units));
                        if let Some(sum) = row[at..].first_chunk_mut() {
                            s.store(s.fma(units, unit, s.add(s.load(sum), min[r])), sum);
                        }
                    }
                }
                j += LANES;
            }
            if whole > 0 {
                continue;
            }
            for (r, i) in (0..R).flat_map(|r| (0..len).map(move |i| (r, i))) {
                let line = &lines.data[(query + r) * lines.stride + lines.at..];
                for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                    let (block, in_block) = blocks.at(lane);
                    let byte = block.codes[in_block / 4 * 4 * blocks.row + 4 * (byte0 + i % half) + lane % 4];
                    let code = if i < half { byte & 15 } else { byte >> 4 };
                    let scale = param(blocks, 2 * group, lane);
                    let minimum = param(blocks, 2 * group + 1, lane);
                    sums.row(query + r, head_dim)[first + i] +=
                        line[lane] * (minimum + scale * f32::from(code));
                }
            }
        }
    }

    /// `o[query] += w × (minimum + scale × code)`.
    #[inline(always)]
    fn weigh_one_by_one<S: Simd>(s: S, lines: &Lines<'_>, blocks: &Blocks<'_>, sums: &mut Sums<'_>) {
        let head_dim = blocks.head_dim;
        for query in 0..sums.n {
            let line = &lines.data[query * lines.stride + lines.at..];
            let row = sums.row(query, head_dim);
            for lane in blocks.lanes.clone().filter(|lane| line[*lane] != 0.0) {
                let (block, in_block) = blocks.at(lane);
                let codes = &block.codes[in_block / 4 * 4 * blocks.row..];
                for (group, row) in row.chunks_mut(blocks.group).enumerate() {
                    let scale = param(blocks, 2 * group, lane);
                    let minimum = param(blocks, 2 * group + 1, lane);
                    let weight = line[lane];
                    let codes = &codes[4 * (group * blocks.group / 2)..];
                    let (low, high) = row.split_at_mut(row.len().div_ceil(2));
                    let whole = if low.len() == high.len() { low.len() / LANES } else { 0 };
                    let vectors =
                        low.as_chunks_mut::<LANES>().0.iter_mut().zip(high.as_chunks_mut::<LANES>().0);
                    for (chunk, (low, high)) in vectors.take(whole).enumerate() {
                        let bytes = s.load_bytes(
                            codes[4 * chunk * LANES..].first_chunk().expect("four cells of a row"),
                        );
                        let byte = byte_of(s, bytes, lane % 4);
                        for (sum, code) in [(low, s.low_nibbles(byte)), (high, s.high_nibbles(byte))] {
                            let value = s.fma(s.to_f32(code), s.splat(scale), s.splat(minimum));
                            s.store(s.fma(s.splat(weight), value, s.load(sum)), sum);
                        }
                    }
                    let add = |sum: &mut f32, code: u8| *sum += weight * (minimum + scale * f32::from(code));
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
    let (per_row, per_group) = (blocks.row / 4, blocks.group / 8);
    let mut sums = [[s.splat(0.0); B]; R];
    for group in 0..blocks.head_dim.div_ceil(blocks.group) {
        let mut units = Units::<S, R, B>::new(s);
        let quads = group * per_group..((group + 1) * per_group).min(per_row);
        for quad in quads.clone() {
            let (mut a, mut b) = ([s.splat_i(0); B], [s.splat_i(0); B]);
            for i in 0..B {
                s.prefetch(&codes[i][quad], list[i].ahead);
                let bytes = s.load_bytes(&codes[i][quad]);
                (a[i], b[i]) = (s.low_nibbles(bytes), s.high_nibbles(bytes));
            }
            // The quads of a group's low halves, then those of its high halves.
            units.multiply(s, packed, quads.start + quad, &a);
            units.multiply(s, packed, quads.end + quad, &b);
        }
        for b in 0..B {
            let params = list[b].params.as_chunks::<32>().0;
            let (scale, minimum) = (s.load_f16(&params[2 * group]), s.load_f16(&params[2 * group + 1]));
            for r in 0..R {
                let scaled = s.mul(s.to_f32(units.of(s, r, b)), scale);
                sums[r][b] = s.fma(scaled, s.splat(packed[r].unit[group]), sums[r][b]);
                sums[r][b] = s.fma(minimum, s.splat(packed[r].sum[group]), sums[r][b]);
            }
        }
    }
    put_scores(s, lines, query, at, &sums);
}
