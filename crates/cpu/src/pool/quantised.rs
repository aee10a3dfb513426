//! Shared code of the quantised dtypes: splits queries and weights into pairs of bytes.
//!
//! Integer dot products multiply bytes. A query or weight in 8 bits would add an error as large as that of the cache.
//! In two bytes (15 bits and a sign, about 3e-5 of the largest) the added error is negligible, and the second product
//! costs less than widening the codes.
use super::{Block, Blocks, Lines, MAX_BLOCKS, Queries, Sums};
use crate::arch::{LANES, Simd};
use std::ops::Range;

/// Largest magnitude in two signed bytes: 127 * 256 + 127, with room for rounding.
const LARGEST: f32 = 32_000.0;

/// Most queries per call of an integer kernel.
pub const MAX_ROWS: usize = 8;

/// A dtype whose kernels process several queries at once.
pub trait Packed {
    /// Number of queries (4 or 8) whose sums over values fit the registers of AVX-512.
    const WEIGHED: usize;

    /// Scores of `R` queries, starting at `query`, over all blocks.
    fn scores_of<S: Simd, const R: usize>(
        s: S,
        queries: &Queries<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        lines: &mut Lines<'_>,
    );
    /// Weighted sums of `R` queries, starting at `query`, over all cells.
    fn accumulate_for<S: Simd, const R: usize>(
        s: S,
        lines: &Lines<'_>,
        blocks: &Blocks<'_>,
        sums: &mut Sums<'_>,
        query: usize,
        quads: &mut Quads,
    );
    /// Weighted sums of all queries, cell by cell: the result does not depend on where tiles end.
    fn weigh_one_by_one<S: Simd>(s: S, lines: &Lines<'_>, blocks: &Blocks<'_>, sums: &mut Sums<'_>);
}

/// The two products of [`Codec`](super::Codec), for a [`Packed`] dtype.
macro_rules! packed_products {
    () => {
        #[inline(always)]
        fn scores<S: Simd>(s: S, queries: &Queries<'_>, blocks: &Blocks<'_>, lines: &mut Lines<'_>) {
            $crate::pool::quantised::scores::<S, Self>(s, queries, blocks, lines);
        }

        #[inline(always)]
        fn accumulate<S: Simd>(
            s: S,
            lines: &Lines<'_>,
            blocks: &Blocks<'_>,
            sums: &mut Sums<'_>,
            quads: &mut Quads,
        ) {
            $crate::pool::quantised::accumulate::<S, Self>(s, lines, blocks, sums, quads);
        }
    };
}
pub(super) use packed_products;

/// Evaluates `$body` for the blocks `$at..$at + $B` of `$n`: two at a time where registers suffice.
macro_rules! scores_in_pairs {
    ($S:ident, $R:ident, $n:expr, $at:ident, $B:ident => $body:expr) => {{
        let mut $at = 0;
        while $R <= 4 && $S::ACCUMULATORS >= 16 && $n - $at >= 2 {
            const $B: usize = 2;
            $body;
            $at += $B;
        }
        while $at < $n {
            const $B: usize = 1;
            $body;
            $at += $B;
        }
    }};
}
pub(super) use scores_in_pairs;

/// Writes the scores of `R` queries over `B` blocks from block `at` on.
#[inline(always)]
pub fn put_scores<S: Simd, const R: usize, const B: usize>(
    s: S,
    lines: &mut Lines<'_>,
    query: usize,
    at: usize,
    sums: &[[S::F; B]; R],
) {
    for r in 0..R {
        let line = &mut lines.data[(query + r) * lines.stride + lines.at + at * LANES..];
        for (sums, out) in sums[r].iter().zip(line.as_chunks_mut().0) {
            s.store(*sums, out);
        }
    }
}

/// Products of the codes of `B` blocks with the high and the low bytes of `R` queries, within one group.
pub struct Units<S: Simd, const R: usize, const B: usize> {
    high: [[S::I; B]; R],
    low: [[S::I; B]; R],
}

impl<S: Simd, const R: usize, const B: usize> Units<S, R, B> {
    #[inline(always)]
    pub fn new(s: S) -> Self {
        Units { high: [[s.splat_i(0); B]; R], low: [[s.splat_i(0); B]; R] }
    }

    /// Adds four codes of every cell times quad `quad` of the queries.
    #[inline(always)]
    pub fn multiply(&mut self, s: S, packed: &[PackedQuery], quad: usize, codes: &[S::I; B]) {
        for r in 0..R {
            let (high, low) = (s.splat_i(packed[r].high[quad]), s.splat_i(packed[r].low[quad]));
            for b in 0..B {
                self.high[r][b] = s.dot4(self.high[r][b], codes[b], high);
                self.low[r][b] = s.dot4(self.low[r][b], codes[b], low);
            }
        }
    }

    /// In units of the query.
    #[inline(always)]
    pub fn of(&self, s: S, r: usize, b: usize) -> S::I {
        s.add_i(s.times_256(self.high[r][b]), self.low[r][b])
    }

    /// Adds them to the scores, scaled by parameter `group` of the blocks. `zero` is the code that stands for 0.
    #[inline(always)]
    pub fn add(
        &self,
        s: S,
        packed: &[PackedQuery],
        group: usize,
        blocks: &[Block<'_>; B],
        zero: i32,
        sums: &mut [[S::F; B]; R],
    ) {
        for b in 0..B {
            let scale = s.load_f16(&blocks[b].params.as_chunks::<32>().0[group]);
            for r in 0..R {
                let units = s.sub_i(self.of(s, r, b), s.splat_i(zero * packed[r].units[group]));
                let scaled = s.mul(s.to_f32(units), scale);
                sums[r][b] = s.fma(scaled, s.splat(packed[r].unit[group]), sums[r][b]);
            }
        }
    }
}

/// Scores of all queries, in groups of eight, four, two and one.
#[inline(always)]
pub fn scores<S: Simd, P: Packed>(s: S, queries: &Queries<'_>, blocks: &Blocks<'_>, lines: &mut Lines<'_>) {
    let mut query = 0;
    while query < queries.n {
        query += match queries.n - query {
            8.. if S::ACCUMULATORS >= 16 => {
                P::scores_of::<S, 8>(s, queries, query, blocks, lines);
                8
            }
            4.. if S::ACCUMULATORS >= 16 => {
                P::scores_of::<S, 4>(s, queries, query, blocks, lines);
                4
            }
            2.. => {
                P::scores_of::<S, 2>(s, queries, query, blocks, lines);
                2
            }
            _ => {
                P::scores_of::<S, 1>(s, queries, query, blocks, lines);
                1
            }
        };
    }
}

/// Weighted sums of all queries, as many at a time as fit the registers.
#[inline(always)]
pub fn accumulate<S: Simd, P: Packed>(
    s: S,
    lines: &Lines<'_>,
    blocks: &Blocks<'_>,
    sums: &mut Sums<'_>,
    quads: &mut Quads,
) {
    const { assert!(P::WEIGHED == 4 || P::WEIGHED == MAX_ROWS) };
    if blocks.exact {
        return P::weigh_one_by_one(s, lines, blocks, sums);
    }
    let (many, mut query) = (S::ACCUMULATORS >= 16, 0);
    while query < sums.n {
        query += match sums.n - query {
            MAX_ROWS.. if many && P::WEIGHED == MAX_ROWS => {
                P::accumulate_for::<S, MAX_ROWS>(s, lines, blocks, sums, query, quads);
                MAX_ROWS
            }
            4.. if many => {
                P::accumulate_for::<S, 4>(s, lines, blocks, sums, query, quads);
                4
            }
            2.. if many || P::WEIGHED == MAX_ROWS => {
                P::accumulate_for::<S, 2>(s, lines, blocks, sums, query, quads);
                2
            }
            _ => {
                P::accumulate_for::<S, 1>(s, lines, blocks, sums, query, quads);
                1
            }
        };
    }
}

/// Byte `n` of every lane.
#[inline(always)]
pub fn byte_of<S: Simd>(s: S, x: S::I, n: usize) -> S::I {
    match n {
        0 => s.byte::<0>(x),
        1 => s.byte::<1>(x),
        2 => s.byte::<2>(x),
        _ => s.byte::<3>(x),
    }
}

/// Parameter `p` of the cell in lane `lane`.
#[inline(always)]
pub fn param(blocks: &Blocks<'_>, p: usize, lane: usize) -> f32 {
    let (block, lane) = blocks.at(lane);
    block.param(p, lane)
}

/// One query row, prepared for dot products with bytes.
#[derive(Clone, Debug, Default)]
pub struct PackedQuery {
    /// Four bytes for every four code bytes of a cell: the high bytes here, the low bytes in `low`. For nibbles there
    /// are twice as many: first those for the low halves.
    pub high: Vec<i32>,
    pub low: Vec<i32>,
    /// Per group: the value of one unit.
    pub unit: Vec<f32>,
    /// Per group: the sum of the units, and (`sum`) of the elements themselves.
    pub units: Vec<i32>,
    pub sum: Vec<f32>,
}

/// Expresses elements in multiples of `unit`: two signed bytes each.
pub struct Split {
    pub unit: f32,
    inverse: f32,
}

impl Split {
    /// For elements of magnitude up to `largest`. A largest value that is not finite makes the unit NaN.
    #[inline(always)]
    pub fn new(largest: f32) -> Self {
        if largest < 1e-30 {
            return Split { unit: 0.0, inverse: 0.0 };
        }
        let unit = largest / LARGEST;
        if unit.is_finite() {
            Split { unit, inverse: LARGEST / largest }
        } else {
            Split { unit: f32::NAN, inverse: 0.0 }
        }
    }
    fn units(&self, x: f32) -> i32 {
        // Rounds to the nearest integer, ties to even: a float this large has no fraction bits. Without SSE 4.1
        // `round_ties_even` would be a function call.
        const INTEGERS: f32 = 1.5 * (1 << 23) as f32;
        ((x * self.inverse + INTEGERS) - INTEGERS) as i32
    }
}

/// The high and the low byte of `units`: `256 * high + low`, both signed.
fn bytes(units: i32) -> (u8, u8) {
    let low = units as i8;
    (((units - i32::from(low)) >> 8) as u8, low as u8)
}

impl PackedQuery {
    /// Reserves room for a row of `head_dim` elements in groups of at least 32.
    pub fn new(head_dim: usize) -> Self {
        let quads = head_dim.div_ceil(4) + 2 * head_dim.div_ceil(32);
        let groups = head_dim.div_ceil(32).max(2);
        PackedQuery {
            high: Vec::with_capacity(quads),
            low: Vec::with_capacity(quads),
            unit: Vec::with_capacity(groups),
            units: Vec::with_capacity(groups),
            sum: Vec::with_capacity(groups),
        }
    }

    /// Bytes that [`new`](Self::new) reserves.
    pub fn bytes(head_dim: usize) -> usize {
        8 * (head_dim.div_ceil(4) + 2 * head_dim.div_ceil(32)) + 12 * head_dim.div_ceil(32).max(2)
    }

    fn clear(&mut self) {
        self.high.clear();
        self.low.clear();
        self.unit.clear();
        self.units.clear();
        self.sum.clear();
    }

    /// Packs one group of `row`. `parts` are the ranges of elements whose quads are packed in order.
    fn group<'p>(&mut self, row: &[f32], parts: impl Iterator<Item = &'p [f32]>) {
        // Keep NaN: `max` would drop it.
        let largest = row.iter().fold(0f32, |max, x| if x.abs() > max || x.is_nan() { x.abs() } else { max });
        let split = Split::new(largest);
        let mut units = 0;
        for part in parts {
            for quad in part.chunks(4) {
                let (mut high, mut low) = ([0; 4], [0; 4]);
                for (i, x) in quad.iter().enumerate() {
                    let n = split.units(*x);
                    units += n;
                    (high[i], low[i]) = bytes(n);
                }
                self.high.push(i32::from_le_bytes(high));
                self.low.push(i32::from_le_bytes(low));
            }
        }
        self.unit.push(split.unit);
        self.units.push(units);
        self.sum.push(row.iter().sum());
    }

    /// Packs a row for codes of one byte per element.
    pub fn pack_bytes(&mut self, row: &[f32], group: usize) {
        self.clear();
        for group in row.chunks(group) {
            self.group(group, std::iter::once(group));
        }
    }

    /// Packs a row for codes of one nibble per element: a byte contains elements `j` and `j + half` of a group. The
    /// quads of a group's low halves come first, then those of its high halves.
    pub fn pack_nibbles(&mut self, row: &[f32], group: usize) {
        self.clear();
        for group in row.chunks(group) {
            self.halves(group);
        }
    }

    /// Packs a row whose first `outliers` elements have a byte each and the others a nibble: two groups, or one.
    pub fn pack_outliers(&mut self, row: &[f32], outliers: usize) {
        self.clear();
        let (wide, others) = row.split_at(outliers);
        if outliers > 0 {
            self.group(wide, std::iter::once(wide));
        }
        self.halves(others);
    }

    fn halves(&mut self, group: &[f32]) {
        let (low, high) = group.split_at(group.len().div_ceil(2));
        self.group(group, [low, high].into_iter());
        // Both halves get the same number of quads, so that kernels need no special case.
        if high.len().div_ceil(4) < low.len().div_ceil(4) {
            self.high.push(0);
            self.low.push(0);
        }
    }
}

/// Parameter `param` of a block's lanes, 0 in those that are not visible: they may contain anything.
#[inline(always)]
fn scales_of<S: Simd>(s: S, block: &Block<'_>, seen: Range<usize>, param: usize) -> S::F {
    let scales = s.load_f16(&block.params.as_chunks::<32>().0[param]);
    if seen.len() == LANES {
        return scales;
    }
    let mut lanes = [0.0; LANES];
    s.store(scales, &mut lanes);
    lanes[..seen.start].fill(0.0);
    lanes[seen.end..].fill(0.0);
    s.load(&lanes)
}

/// Most groups of a row whose weights are packed by bounds; rows of more groups take the slow way.
const MAX_GROUPS: usize = 64;

/// Weights of up to [`MAX_ROWS`] queries for the cells of one call, as pairs of bytes: a query's weight times the scale of
/// the cell's group.
///
/// The unit of a row and group is bounded for all groups at once. With the largest scale `m[g]` of each group, `c[cell]` is the
/// largest `scale[g][cell] / m[g]` over the groups, and `b[row]` the largest `weight[row][cell] × c[cell]`. Then no weight times scale of
/// group `g` is larger than `b[row] × m[g]`. The bound is near: a cell with a large weight and small values, as an attention
/// sink is, does not make the unit coarse for the others.
pub struct Quads {
    high: [[u8; MAX_BLOCKS * LANES]; MAX_ROWS],
    low: [[u8; MAX_BLOCKS * LANES]; MAX_ROWS],
    /// Per query: the weights over their bound.
    weights: [[[f32; LANES]; MAX_BLOCKS]; MAX_ROWS],
    bound: [f32; MAX_ROWS],
    /// The scales of a group; before, `c`.
    scales: [[f32; LANES]; MAX_BLOCKS],
    /// The largest scale of each group.
    largest: [f32; MAX_GROUPS],
    /// Whether bounds can be used.
    bounded: bool,
    /// Per query: the value of one unit, and (`units`) the sum of the units.
    pub unit: [f32; MAX_ROWS],
    pub units: [i32; MAX_ROWS],
}

impl Default for Quads {
    fn default() -> Self {
        Quads {
            high: [[0; MAX_BLOCKS * LANES]; MAX_ROWS],
            low: [[0; MAX_BLOCKS * LANES]; MAX_ROWS],
            weights: [[[0.0; LANES]; MAX_BLOCKS]; MAX_ROWS],
            bound: [0.0; MAX_ROWS],
            scales: [[0.0; LANES]; MAX_BLOCKS],
            largest: [0.0; MAX_GROUPS],
            bounded: false,
            unit: [0.0; MAX_ROWS],
            units: [0; MAX_ROWS],
        }
    }
}

impl Quads {
    /// Takes the weights of `R` queries from `query` on. The scales of group `g` of `n_groups` are parameter `g × step` of a
    /// block.
    #[inline(always)]
    pub fn begin<S: Simd, const R: usize>(
        &mut self,
        s: S,
        lines: &Lines<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        (n_groups, step): (usize, usize),
    ) {
        let n = blocks.list.len();
        let line = |r: usize| {
            let line = &lines.data[(query + r) * lines.stride + lines.at..][..n * LANES];
            line.as_chunks::<LANES>().0
        };
        self.bounded = !blocks.may_have_nan && n_groups <= MAX_GROUPS;
        if !self.bounded {
            for r in 0..R {
                self.weights[r][..n].copy_from_slice(line(r));
                self.bound[r] = 1.0;
            }
            return;
        }
        // All scales are finite here.
        self.scales[..n].fill([0.0; LANES]);
        for group in 0..n_groups {
            let mut largest = s.splat(0.0);
            for (block, seen) in blocks.seen() {
                largest = s.max(largest, scales_of(s, block, seen, group * step));
            }
            let largest = s.largest(largest);
            let inverse = s.splat(if largest > 1e-30 { 1.0 / largest } else { 0.0 });
            for ((block, seen), c) in blocks.seen().zip(&mut self.scales) {
                let scales = s.mul(scales_of(s, block, seen, group * step), inverse);
                s.store(s.max(s.load(c), scales), c);
            }
            self.largest[group] = largest;
        }
        for r in 0..R {
            let (mut bound, mut total) = (s.splat(0.0), s.splat(0.0));
            for (line, c) in line(r).iter().zip(&self.scales) {
                let weight = s.load(line);
                bound = s.max(bound, s.mul(weight, s.load(c)));
                total = s.add(total, weight);
            }
            // NaN survives a sum; `max` may drop it.
            let bound = if s.sum(total).is_finite() { s.largest(bound) } else { f32::NAN };
            let inverse = s.splat(if bound > 1e-30 { LARGEST / bound } else { 0.0 });
            for (line, out) in line(r).iter().zip(&mut self.weights[r]) {
                s.store(s.mul_nonzero(inverse, s.load(line)), out);
            }
            self.bound[r] = bound;
        }
    }

    /// Packs the weights of `R` queries times the scales of group `group`.
    #[inline(always)]
    pub fn pack<S: Simd, const R: usize>(&mut self, s: S, blocks: &Blocks<'_>, group: usize, step: usize) {
        for ((block, seen), out) in blocks.seen().zip(&mut self.scales) {
            s.store(scales_of(s, block, seen, group * step), out);
        }
        let n = blocks.list.len();
        if !self.bounded {
            return self.pack_what_may_be_nan::<S, R>(s, n);
        }
        let largest = self.largest[group];
        let inverse = s.splat(if largest > 1e-30 { 1.0 / largest } else { 0.0 });
        let mut units = [s.splat_i(0); R];
        for b in 0..n {
            let scales = s.mul(s.load(&self.scales[b]), inverse);
            for r in 0..R {
                let weights = s.load(&self.weights[r][b]);
                units[r] = s.add_i(units[r], self.put(s, r, b, s.to_i32(s.mul(weights, scales))));
            }
        }
        for r in 0..R {
            self.unit[r] = self.bound[r] * (largest / LARGEST);
            self.units[r] = s.sum(s.to_f32(units[r])) as i32; // below 2²⁴: exact
        }
    }

    /// The same where cells that a query does not see may have scales that are no numbers: only those that it sees count.
    #[inline(always)]
    fn pack_what_may_be_nan<S: Simd, const R: usize>(&mut self, s: S, n: usize) {
        for r in 0..R {
            let (mut largest, mut total) = (s.splat(0.0), s.splat(0.0));
            for b in 0..n {
                let weight = s.mul_nonzero(s.load(&self.weights[r][b]), s.load(&self.scales[b]));
                largest = s.max(largest, weight);
                total = s.add(total, weight);
            }
            let broken = !s.sum(total).is_finite();
            let split = Split::new(if broken { f32::NAN } else { s.largest(largest) });
            let (inverse, mut units) = (s.splat(split.inverse), s.splat_i(0));
            for b in 0..n {
                let weight = s.mul_nonzero(s.load(&self.weights[r][b]), s.load(&self.scales[b]));
                let n = s.to_i32(s.mul(weight, inverse));
                units = s.add_i(units, self.put(s, r, b, if broken { s.splat_i(0) } else { n }));
            }
            self.unit[r] = self.bound[r] * split.unit;
            self.units[r] = s.sum(s.to_f32(units)) as i32;
        }
    }

    /// Stores the units of sixteen cells as two bytes each.
    #[inline(always)]
    fn put<S: Simd>(&mut self, s: S, row: usize, block: usize, units: S::I) -> S::I {
        s.store_low_bytes(units, &mut self.low[row].as_chunks_mut().0[block]);
        let high = s.over_256(s.add_i(units, s.splat_i(128)));
        s.store_low_bytes(high, &mut self.high[row].as_chunks_mut().0[block]);
        units
    }

    /// The four weights of cells `4 * quad..` of row `row`.
    #[inline(always)]
    pub fn quad(&self, row: usize, quad: usize) -> (i32, i32) {
        let at = |bytes: &[u8; MAX_BLOCKS * LANES]| {
            i32::from_le_bytes([
                bytes[4 * quad],
                bytes[4 * quad + 1],
                bytes[4 * quad + 2],
                bytes[4 * quad + 3],
            ])
        };
        (at(&self.high[row]), at(&self.low[row]))
    }
}

#[cfg(test)]
mod tests;
