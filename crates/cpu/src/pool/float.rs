//! f32, f16 and bf16: values are stored directly.
//!
//! ```text
//! scores:      for each 16 cells:  for i in head_dim:  k = widen(16 keys' element i);  s[query] += q[query][i] * k
//! accumulate:  for each cell:      for 16 elements:    v = widen(16 elements);         o[query] += w[query] * v
//! ```
//!
//! Per cell, side and query: head_dim fused multiply-adds; head_dim × element bytes are read once for all queries of a
//! call. A register tile contains up to 8 queries × 2 vectors, or 6 × 1 with sixteen registers of half a vector, which share every
//! widened element. Lanes add in the order of i, and elements in the order of the cells: the result does not depend on the tile or its
//! alignment.
//!
//! Measured with f16 on two Zen 4 cores (docs/performance.md): 0.85 of the read limit with a KV head per query head, 0.88 with four
//! query heads to a KV head of 128; bound by arithmetic, 0.53 to 0.57 of it, with eight of 64. 512 queries with AVX2 (Zen 3): 0.66 of
//! the peak of f32; weighted sums run at 0.87 of it, scores at 0.75.
use super::{Blocks, Codec, Lines, QUERY_ROWS, Quads, Queries, Sums};
use crate::arch::{LANES, Simd};
use crate::element::Element;
pub use crate::element::{BF16, F16, F32};
use half::f16;

const CACHE_LINE: usize = 64;

impl<E: Element> Codec for E {
    const ELEMENT: Option<usize> = Some(E::BYTES);
    fn code_bytes(head_dim: usize, _: usize) -> usize {
        head_dim * E::BYTES
    }
    fn params(_: usize, _: usize) -> usize {
        0
    }

    #[inline(always)]
    fn encode(row: &[f32], _: usize, codes: &mut [u8], _: &mut [f16]) -> bool {
        E::encode_all(row, codes)
    }
    fn decode(codes: &[u8], _: &[f16], _: usize, row: &mut [f32]) {
        for (x, code) in row.iter_mut().zip(codes.chunks_exact(E::BYTES)) {
            *x = E::decode(code);
        }
    }

    #[inline(always)]
    fn scores<S: Simd>(s: S, queries: &Queries<'_>, blocks: &Blocks<'_>, lines: &mut Lines<'_>) {
        let mut query = 0;
        while query < queries.n {
            // Queries that are interleaved with each other.
            let n = (QUERY_ROWS - (queries.first + query) % QUERY_ROWS).min(queries.n - query);
            query += match n {
                8 if S::ACCUMULATORS >= 16 => scores_of::<S, E, 8, 2>(s, queries, query, blocks, lines),
                4.. if S::ACCUMULATORS >= 16 => scores_of::<S, E, 4, 4>(s, queries, query, blocks, lines),
                6.. => scores_of::<S, E, 6, 1>(s, queries, query, blocks, lines),
                4.. => scores_of::<S, E, 4, 1>(s, queries, query, blocks, lines),
                2.. => scores_of::<S, E, 2, 2>(s, queries, query, blocks, lines),
                _ => scores_of::<S, E, 1, 4>(s, queries, query, blocks, lines),
            };
        }
    }

    #[inline(always)]
    fn accumulate<S: Simd>(s: S, lines: &Lines<'_>, blocks: &Blocks<'_>, sums: &mut Sums<'_>, _: &mut Quads) {
        let mut query = 0;
        if blocks.may_have_nan {
            while query < sums.n {
                accumulate_carefully::<S, E>(s, lines, blocks, sums, query);
                query += 1;
            }
            return;
        }
        while S::ACCUMULATORS >= 16 && sums.n - query >= 8 {
            accumulate_for::<S, E, 8, 2>(s, lines, blocks, sums, query);
            query += 8;
        }
        while S::ACCUMULATORS < 16 && sums.n - query >= 6 {
            accumulate_for::<S, E, 6, 1>(s, lines, blocks, sums, query);
            query += 6;
        }
        while sums.n - query >= 4 {
            if S::ACCUMULATORS >= 16 {
                accumulate_for::<S, E, 4, 4>(s, lines, blocks, sums, query);
            } else {
                accumulate_for::<S, E, 4, 1>(s, lines, blocks, sums, query);
            }
            query += 4;
        }
        while sums.n - query >= 2 {
            accumulate_for::<S, E, 2, 2>(s, lines, blocks, sums, query);
            query += 2;
        }
        while query < sums.n {
            accumulate_for::<S, E, 1, 4>(s, lines, blocks, sums, query);
            query += 1;
        }
    }
}

/// Scores of `R` queries over all blocks, `B` blocks at a time. Returns `R`.
#[inline(always)]
fn scores_of<S: Simd, E: Element, const R: usize, const B: usize>(
    s: S,
    queries: &Queries<'_>,
    query: usize,
    blocks: &Blocks<'_>,
    lines: &mut Lines<'_>,
) -> usize {
    let mut block = 0;
    let n = blocks.n();
    while n - block >= B {
        scores_tile::<S, E, R, B>(s, queries, query, blocks, block, lines);
        block += B;
    }
    while block < n {
        scores_tile::<S, E, R, 1>(s, queries, query, blocks, block, lines);
        block += 1;
    }
    R
}

#[inline(always)]
fn scores_tile<S: Simd, E: Element, const R: usize, const B: usize>(
    s: S,
    queries: &Queries<'_>,
    query: usize,
    blocks: &Blocks<'_>,
    block: usize,
    lines: &mut Lines<'_>,
) {
    let head_dim = blocks.head_dim;
    let row = queries.first + query;
    let rows = queries.rows[row / QUERY_ROWS * QUERY_ROWS * head_dim..].as_chunks::<QUERY_ROWS>().0;
    let rows = &rows[..head_dim];
    let side = row % QUERY_ROWS;
    let list = &blocks.list[block..block + B];
    let mut keys: [&[E::Raw]; B] = [&[]; B];
    for (keys, block) in keys.iter_mut().zip(list) {
        *keys = &E::vectors(block.codes)[..head_dim];
    }
    // Blocks are prefetched one after the other, a part of one with each element: one address per block would not fit
    // the registers.
    let (part, fetched) = (head_dim.div_ceil(B), B * LANES * E::BYTES);
    let mut sums = [[s.splat(0.0); B]; R];
    for (b, block) in list.iter().enumerate() {
        let first = b * part;
        for i in first..(first + part).min(head_dim) {
            let at = (i - first) * fetched;
            if at.is_multiple_of(CACHE_LINE) {
                for line in 0..fetched.div_ceil(CACHE_LINE) {
                    s.prefetch(&block.codes[0], block.ahead.wrapping_add(at + line * CACHE_LINE));
                }
            }
            let mut k = [s.splat(0.0); B];
            for b in 0..B {
                k[b] = E::widen(s, &keys[b][i]);
            }
            for r in 0..R {
                let q = s.splat(rows[i][if R == QUERY_ROWS { r } else { (side + r) % QUERY_ROWS }]);
                for b in 0..B {
                    sums[r][b] = s.fma(q, k[b], sums[r][b]);
                }
            }
        }
    }
    for r in 0..R {
        let at = (query + r) * lines.stride + lines.at + block * LANES;
        let (out, _) = lines.data[at..at + B * LANES].as_chunks_mut();
        for b in 0..B {
            s.store(sums[r][b], &mut out[b]);
        }
    }
}

/// Weighted sums of `R` queries over all visible cells, `D` vectors of the row at a time.
#[inline(always)]
fn accumulate_for<S: Simd, E: Element, const R: usize, const D: usize>(
    s: S,
    lines: &Lines<'_>,
    blocks: &Blocks<'_>,
    sums: &mut Sums<'_>,
    query: usize,
) {
    let whole = blocks.head_dim / LANES;
    let mut d = 0;
    while whole - d >= D {
        accumulate_tile::<S, E, R, D>(s, lines, blocks, sums, query, d);
        d += D;
    }
    while d < whole {
        accumulate_tile::<S, E, R, 1>(s, lines, blocks, sums, query, d);
        d += 1;
    }
    // The remainder of a row that is not a whole number of vectors.
    for i in whole * LANES..blocks.head_dim {
        for r in 0..R {
            let line = &lines.data[(query + r) * lines.stride + lines.at..];
            let mut sum = sums.row(query + r, blocks.head_dim)[i];
            for lane in blocks.lanes.clone() {
                let (block, in_block) = blocks.at(lane);
                let at = in_block * blocks.row + i * E::BYTES;
                let value = E::decode(&block.codes[at..at + E::BYTES]);
                sum += line[lane] * value;
            }
            sums.row(query + r, blocks.head_dim)[i] = sum;
        }
    }
}

#[inline(always)]
fn accumulate_tile<S: Simd, E: Element, const R: usize, const D: usize>(
    s: S,
    lines: &Lines<'_>,
    blocks: &Blocks<'_>,
    sums: &mut Sums<'_>,
    query: usize,
    d: usize,
) {
    let lanes = blocks.lanes.clone();
    let n = lanes.len();
    let mut weights: [&[f32]; R] = [&[]; R];
    let mut acc = [[s.splat(0.0); D]; R];
    for r in 0..R {
        let at = (query + r) * lines.stride + lines.at;
        weights[r] = &lines.data[at + lanes.start..][..n];
        let row = &sums.row(query + r, blocks.head_dim)[d * LANES..].as_chunks().0[..D];
        // By index, here and below: where an iterator is not inlined the accumulators leave their registers.
        for j in 0..D {
            acc[r][j] = s.load(&row[j]);
        }
    }
    let mut first = 0;
    for (block, lanes) in blocks.seen() {
        let mut rows = &block.codes[lanes.start * blocks.row..];
        for cell in first..first + lanes.len() {
            let (row, rest) = rows.split_at(blocks.row);
            let row = &E::vectors(row)[d..d + D];
            rows = rest;
            let mut v = [s.splat(0.0); D];
            for j in 0..D {
                v[j] = E::widen(s, &row[j]);
                if (d + j).is_multiple_of(E::PER_LINE) {
                    s.prefetch(&row[j], block.ahead);
                }
            }
            for r in 0..R {
                let w = s.splat(weights[r][cell]);
                for j in 0..D {
                    acc[r][j] = s.fma(w, v[j], acc[r][j]);
                }
            }
        }
        first += lanes.len();
    }
    for r in 0..R {
        let row = &mut sums.row(query + r, blocks.head_dim)[d * LANES..].as_chunks_mut().0[..D];
        for j in 0..D {
            s.store(acc[r][j], &mut row[j]);
        }
    }
}

/// For cells that contain NaN or infinities: skips those of weight 0, which a query does not see. Its sums have the bits of
/// [`accumulate_for`].
#[inline(always)]
fn accumulate_carefully<S: Simd, E: Element>(
    s: S,
    lines: &Lines<'_>,
    blocks: &Blocks<'_>,
    sums: &mut Sums<'_>,
    query: usize,
) {
    let line = query * lines.stride + lines.at;
    for lane in blocks.lanes.clone() {
        let weight = lines.data[line + lane];
        if weight == 0.0 {
            continue;
        }
        let (block, in_block) = blocks.at(lane);
        let row = &block.codes[in_block * blocks.row..(in_block + 1) * blocks.row];
        let (vectors, rest) = sums.row(query, blocks.head_dim).as_chunks_mut();
        for (sum, value) in vectors.iter_mut().zip(E::vectors(row)) {
            s.store(s.fma(s.splat(weight), E::widen(s, value), s.load(sum)), sum);
        }
        let codes = &row[vectors.len() * LANES * E::BYTES..];
        for (sum, code) in rest.iter_mut().zip(codes.chunks_exact(E::BYTES)) {
            *sum += weight * E::decode(code);
        }
    }
}
