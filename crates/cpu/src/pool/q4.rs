//! 4-bit codes, affine: `x ≈ minimum + scale × code`, code in 0..=15, an f16 scale and an f16 minimum per group.
//!
//! ```text
//! scores:      units = Σ code × q (four nibbles at once, q in units of one byte)
//!              s[query] += (units × q's unit + 7.5 × q's rest) × scale + minimum × Σ q    per group of 16 keys
//! accumulate:  w' = w × scale, in units of one byte; what rounding leaves goes to the cell 32 places on
//!              o[query] += Σ code × w' (four cells at once) × w's unit
//!                          + Σ w × minimum + 7.5 × w's rest                               per group and tile
//! ```
//!
//! Per 64 bytes and query: two integer products of 64 bytes (AVX2: four of 32, and a sum of words per block). Per cell,
//! head_dim / 2 + 4 × groups bytes are read once for all queries of a call.
//!
//! A byte contains element `j` of a group in its low half and element `j + half` in its high half, so that unpacking is
//! two straight loops. Values that do not fit f16 saturate. A NaN or an infinity makes its whole group NaN, so that the
//! error remains visible.
//!
//! Measured on two Zen 4 cores (docs/performance.md): 0.62 of the read limit with a KV head per query head (64 elements to a group); with
//! four query heads to a KV head of 128 0.57 of it, and 0.47 of the time of f16; bound by arithmetic, 0.28 of it, with eight of 64.
use super::quantised::{
    ByteUnits, Line, Packed, QUADS, blocks_at, byte_of, packed_products, param, put_scores, quads_at,
};
use super::{Blocks, Codec, Lines, Quads, Queries, Sums};
use crate::arch::{LANES, Simd};
use half::f16;

pub struct Q4;

/// The middle of the codes. What rounding has taken from a query or a weight is multiplied with it, because most codes are near.
const MIDDLE: f32 = 7.5;

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
    #[inline(always)]
    fn most_scores<S: Simd>() -> usize {
        most_abreast::<S>()
    }
    #[inline(always)]
    fn most_sums<S: Simd>() -> usize {
        S::ACCUMULATORS
    }

    #[inline(always)]
    fn begin<S: Simd>(s: S, blocks: &Blocks<'_>, quads: &mut Quads) {
        // A scale and a minimum per group.
        quads.begin(s, blocks, (blocks.head_dim.div_ceil(blocks.group), 2));
    }

    #[inline(always)]
    fn scores_of<S: Simd, const R: usize>(
        s: S,
        queries: &Queries<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        lines: &mut Lines<'_>,
    ) {
        for at in 0..blocks.list.len() {
            block_scores::<S, R>(s, queries, query, blocks, at, lines);
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
        quads.weigh::<S, R, true>(s, lines, query, blocks.list.len());
        for group in 0..n_groups {
            quads.pack::<S, R, true>(s, blocks, group);
            let mut minima = [0.0; R];
            for r in 0..R {
                minima[r] = quads.minima(s, lines, (query, r), (group, MIDDLE), blocks.list.len());
            }
            let first = group * blocks.group;
            let len = blocks.group.min(head_dim - first);
            let half = len.div_ceil(2);
            let byte0 = first / 2;
            // The two halves are aligned only if they are whole vectors. 16 elements are the smallest group of any real
            // model.
            let whole = if len.is_multiple_of(2 * LANES) { half } else { 0 };
            for j in (0..whole).step_by(LANES) {
                let at = (byte0 + j, [first + j, first + half + j]);
                // As many queries at a time as fit the registers.
                if const { R > most_abreast::<S>() } {
                    for r in (0..R).step_by(2) {
                        columns::<S, 2>(s, blocks, quads, (query, r), at, &minima, sums);
                    }
                } else {
                    columns::<S, R>(s, blocks, quads, (query, 0), at, &minima, sums);
                }
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

/// Queries whose products with both halves of bytes fit the registers. (With AVX2, scores of four took 1.2 to 1.6 times as long as
/// twice two in some builds.)
const fn most_abreast<S: Simd>() -> usize {
    S::ACCUMULATORS / 2
}

/// Adds one vector of columns for each half of the bytes from `byte` on to the sums of `N` queries, at the columns `at`. The
/// queries are rows of `quads` from `row` on.
#[inline(always)]
fn columns<S: Simd, const N: usize>(
    s: S,
    blocks: &Blocks<'_>,
    quads: &Quads,
    (query, row): (usize, usize),
    (byte, at): (usize, [usize; 2]),
    minima: &[f32],
    sums: &mut Sums<'_>,
) {
    let mut units = [[s.splat_i(0); N]; 2];
    for (b, block) in blocks.list.iter().enumerate() {
        let weights: [_; N] = std::array::from_fn(|n| quads.of_block(0, row + n, b));
        let Some(lines) = quads_at::<1>(block, blocks.row, byte) else { break };
        if row == 0 {
            lines.iter().flat_map(|lines| *lines).for_each(|line| s.prefetch(line, block.ahead));
        }
        let mut products = [[s.splat_i(0); N]; 2];
        for quad in 0..QUADS {
            let bytes = s.load_bytes(&lines[quad][0]);
            let halves = [s.low_nibbles(bytes), s.high_nibbles(bytes)];
            for n in 0..N {
                let weights = i32::from_le_bytes(weights[n][quad]);
                for half in 0..2 {
                    products[half][n] = s.dot_nibbles(products[half][n], halves[half], weights);
                }
            }
        }
        for half in 0..2 {
            for n in 0..N {
                units[half][n] = s.add_nibbles(units[half][n], products[half][n]);
            }
        }
    }
    for n in 0..N {
        let (unit, minimum) = (s.splat(quads.unit[row + n]), s.splat(minima[row + n]));
        let out = sums.row(query + row + n, blocks.head_dim);
        for half in 0..2 {
            if let Some(sum) = out[at[half]..].first_chunk_mut() {
                s.store(s.fma(s.to_f32(units[half][n]), unit, s.add(s.load(sum), minimum)), sum);
            }
        }
    }
}

/// Adds the products of up to [`QUADS`] quads of codes with the units of `R` queries to `units`.
#[inline(always)]
fn multiply<S: Simd, const R: usize>(
    s: S,
    codes: &[Line],
    ahead: usize,
    asked: [&ByteUnits; R],
    units: &mut [S::I; R],
) {
    let mut products = [s.splat_i(0); R];
    for (quad, bytes) in codes.iter().enumerate().take(QUADS) {
        s.prefetch(bytes, ahead);
        let bytes = s.load_bytes(bytes);
        let low = s.low_nibbles(bytes);
        for r in 0..R {
            products[r] = s.dot_nibbles(products[r], low, asked[r][0][quad]);
        }
        let high = s.high_nibbles(bytes);
        for r in 0..R {
            products[r] = s.dot_nibbles(products[r], high, asked[r][1][quad]);
        }
    }
    for r in 0..R {
        units[r] = s.add_nibbles(units[r], products[r]);
    }
}

/// Scores of `R` queries over block `at`.
#[inline(always)]
fn block_scores<S: Simd, const R: usize>(
    s: S,
    queries: &Queries<'_>,
    query: usize,
    blocks: &Blocks<'_>,
    at: usize,
    lines: &mut Lines<'_>,
) {
    let packed = &queries.packed[query..query + R];
    let Some(([block], [codes])) = blocks_at::<S, 1>(s, blocks, query, at) else { return };
    let params = block.params.as_chunks::<32>().0;
    let per_group = blocks.group / 8;
    let mut sums = [[s.splat(0.0)]; R];
    for (group, codes) in codes.chunks(per_group).enumerate() {
        let mut units = [s.splat_i(0); R];
        let asked = |chunk: usize| {
            let chunk = group * per_group / QUADS + chunk;
            std::array::from_fn(|r| &packed[r].byte_units[chunk])
        };
        let (whole, rest) = codes.as_chunks::<QUADS>();
        for (chunk, codes) in whole.iter().enumerate() {
            multiply::<S, R>(s, codes, block.ahead, asked(chunk), &mut units);
        }
        if !rest.is_empty() {
            multiply::<S, R>(s, rest, block.ahead, asked(whole.len()), &mut units);
        }
        let (scale, minimum) = (s.load_f16(&params[2 * group]), s.load_f16(&params[2 * group + 1]));
        for r in 0..R {
            let rest = s.splat(MIDDLE * packed[r].rest[group]);
            let units = s.fma(s.to_f32(units[r]), s.splat(packed[r].unit[group]), rest);
            sums[r][0] = s.fma(units, scale, sums[r][0]);
            sums[r][0] = s.fma(minimum, s.splat(packed[r].sum[group]), sums[r][0]);
        }
    }
    put_scores(s, lines, query, at, &sums);
}
