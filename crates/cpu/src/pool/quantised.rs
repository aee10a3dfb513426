//! Shared code of the quantised dtypes: queries and weights as multiples of a unit.
//!
//! Integer dot products multiply bytes. Beside codes of 8 bits, a query or weight in 8 bits would add an error as large as that of the
//! cache. In two bytes (15 bits and a sign, about 3e-5 of the largest) the added error is negligible, and the second product
//! costs less than widening the codes. AVX2 has no product of bytes that adds to 32 bits, but one of words: codes become
//! words, one product takes whole units, and the sums are the same.
//!
//! The error of `q4` is sixteen times as large, so it has queries and weights of one byte, and half the products. [`Quads`] says
//! how small weights survive that. `t4` keeps two: it loses less, and its levels are numbers of 8 bits, whose products fill AVX2's
//! words at once.
mod quads;

use super::{Block, Blocks, Lines, Queries, Sums};
use crate::arch::{LANES, Simd, quad_of_units};
use kvist_device::weights::round::largest;
pub use quads::Quads;

/// Largest magnitude in two signed bytes: 127 * 256 + 127, with room for rounding.
const LARGEST: f32 = 32_000.0;
/// Largest magnitude in one signed byte, with room for half a unit that is carried from cell to cell, and for rounding.
const LARGEST_BYTE: f32 = 126.0;

/// Most queries per call of an integer kernel.
pub const MAX_ROWS: usize = 8;

/// A dtype whose kernels process several queries at once.
pub trait Packed {
    /// Most queries whose scores are computed at once: 1, 2, 4 or 8.
    #[inline(always)]
    fn most_scores<S: Simd>() -> usize {
        queries_that_fit::<S>(1)
    }
    /// Most queries whose values are weighted at once.
    fn most_sums<S: Simd>() -> usize;

    /// Scores of `R` queries, starting at `query`, over all blocks.
    fn scores_of<S: Simd, const R: usize>(
        s: S,
        queries: &Queries<'_>,
        query: usize,
        blocks: &Blocks<'_>,
        lines: &mut Lines<'_>,
    );
    /// Gives `quads` the parameters of all cells, before [`accumulate_for`](Self::accumulate_for).
    fn begin<S: Simd>(s: S, blocks: &Blocks<'_>, quads: &mut Quads);
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
        while 2 * $R <= $crate::pool::quantised::queries_that_fit::<$S>(1) && $n - $at >= 2 {
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

/// Four codes of every cell of a block.
pub type Line = [u8; 4 * LANES];

/// `B` blocks from block `at` on, and the lines of their codes: four of every cell. The first queries fetch what is read soon.
#[inline(always)]
pub fn blocks_at<'l, S: Simd, const B: usize>(
    s: S,
    blocks: &Blocks<'l>,
    query: usize,
    at: usize,
) -> Option<(&'l [Block<'l>; B], [&'l [Line]; B])> {
    let list = blocks.list[at..].first_chunk::<B>()?;
    let mut codes: [&[Line]; B] = [&[]; B];
    for b in 0..B {
        if query == 0 {
            list[b].fetch_soon(s);
        }
        codes[b] = &list[b].codes.as_chunks::<64>().0[..blocks.row / 4];
    }
    Some((list, codes))
}

/// `C` vectors of value codes from code byte `byte` on, of all cells of a block: four cells each.
#[inline(always)]
pub fn quads_at<'b, const C: usize>(
    block: &Block<'b>,
    row: usize,
    byte: usize,
) -> Option<[&'b [Line; C]; QUADS]> {
    let quad = |quad: usize| block.codes.get(quad * 4 * row + 4 * byte..)?.as_chunks().0.first_chunk();
    Some([quad(0)?, quad(1)?, quad(2)?, quad(3)?])
}

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

/// The most queries whose sums fit the registers if each has `vectors` vectors of them.
pub const fn queries_that_fit<S: Simd>(vectors: usize) -> usize {
    S::ACCUMULATORS / (S::UNIT_SUMS * vectors)
}

/// `n` quads of units of each query, from quad `first` on: slices of one length are checked once, and not at every quad.
#[inline(always)]
pub fn units_from<const R: usize>(packed: &[PackedQuery], first: usize, n: usize) -> [&[[i32; 2]]; R] {
    std::array::from_fn(|r| &packed[r].quads[first..][..n])
}

/// `n` lines of each block, from line `first` on.
#[inline(always)]
pub fn lines_from<'l, const B: usize>(codes: &[&'l [Line]; B], first: usize, n: usize) -> [&'l [Line]; B] {
    std::array::from_fn(|b| &codes[b][first..][..n])
}

/// Products of the codes of `B` blocks with the units of `R` queries, within one group.
pub struct Units<S: Simd, const R: usize, const B: usize>([[[S::I; 2]; B]; R]);

impl<S: Simd, const R: usize, const B: usize> Units<S, R, B> {
    /// For codes of group `group`, of which `zero` stands for 0.
    #[inline(always)]
    pub fn new(s: S, packed: &[PackedQuery], group: usize, zero: i32) -> Self {
        let mut sums = [[[s.splat_i(0); 2]; B]; R];
        for r in 0..R {
            // The last of the sums counts once in their total.
            let start = s.splat_i((-zero).wrapping_mul(packed[r].units[group]));
            for b in 0..B {
                sums[r][b][S::UNIT_SUMS - 1] = start;
            }
        }
        Units(sums)
    }

    /// Adds four codes of every cell times quad `quad` of the queries' units.
    #[inline(always)]
    pub fn multiply(&mut self, s: S, asked: &[&[[i32; 2]]; R], quad: usize, codes: &[S::I; B]) {
        s.dot_units(&mut self.0, codes, |r, part| asked[r][quad][part]);
    }

    /// Adds them to the scores, scaled by parameter `group` of the blocks.
    #[inline(always)]
    pub fn add(
        &self,
        s: S,
        packed: &[PackedQuery],
        group: usize,
        blocks: &[Block<'_>; B],
        sums: &mut [[S::F; B]; R],
    ) {
        for b in 0..B {
            let scale = s.load_f16(&blocks[b].params.as_chunks::<32>().0[group]);
            for r in 0..R {
                let scaled = s.mul(s.to_f32(s.sum_of_units(self.0[r][b])), scale);
                sums[r][b] = s.fma(scaled, s.splat(packed[r].unit[group]), sums[r][b]);
            }
        }
    }
}

/// Scores of all queries, in groups of eight, four, two and one.
#[inline(always)]
pub fn scores<S: Simd, P: Packed>(s: S, queries: &Queries<'_>, blocks: &Blocks<'_>, lines: &mut Lines<'_>) {
    let (most, mut query) = (P::most_scores::<S>(), 0);
    while query < queries.n {
        query += match queries.n - query {
            8.. if most >= 8 => {
                P::scores_of::<S, 8>(s, queries, query, blocks, lines);
                8
            }
            4.. if most >= 4 => {
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
    if blocks.exact {
        return P::weigh_one_by_one(s, lines, blocks, sums);
    }
    P::begin(s, blocks, quads);
    let (most, mut query) = (P::most_sums::<S>(), 0);
    while query < sums.n {
        query += match sums.n - query {
            MAX_ROWS.. if most >= MAX_ROWS => {
                P::accumulate_for::<S, MAX_ROWS>(s, lines, blocks, sums, query, quads);
                MAX_ROWS
            }
            4.. if most >= 4 => {
                P::accumulate_for::<S, 4>(s, lines, blocks, sums, query, quads);
                4
            }
            2.. if most >= 2 => {
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
    /// Four units for every four code bytes of a cell ([`quad_of_units`]). For nibbles there are twice as many: first those for the low
    /// halves.
    pub quads: Vec<[i32; 2]>,
    /// Units of one byte, for every four quads of a group's code bytes, or fewer at its end.
    pub byte_units: Vec<ByteUnits>,
    /// Per group: the value of one unit.
    pub unit: Vec<f32>,
    /// Per group: the sum of the units, and (`sum`) of the elements themselves.
    pub units: Vec<i32>,
    pub sum: Vec<f32>,
    /// Per group: what the elements sum to beyond their units.
    pub rest: Vec<f32>,
}

/// Code bytes of a cell, in quads, whose products with units of one byte are summed at once: a group of 32 nibbles.
pub const QUADS: usize = 4;

/// Units for the low halves of [`QUADS`] quads, then those for the high halves.
pub type ByteUnits = [[i32; QUADS]; 2];

/// Expresses elements in multiples of `unit`.
pub struct Split {
    pub unit: f32,
    inverse: f32,
}

impl Split {
    /// For elements of magnitude up to `largest`, as up to `units` units. A largest value that is not finite makes the unit NaN.
    #[inline(always)]
    pub fn new(largest: f32, units: f32) -> Self {
        if largest < 1e-30 {
            return Split { unit: 0.0, inverse: 0.0 };
        }
        let unit = largest / units;
        if unit.is_finite() {
            Split { unit, inverse: units / largest }
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

impl PackedQuery {
    /// Reserves room for a row of `head_dim` elements in groups of at least 32.
    pub fn new(head_dim: usize) -> Self {
        let quads = head_dim.div_ceil(4) + 2 * head_dim.div_ceil(32);
        let groups = head_dim.div_ceil(32).max(2);
        PackedQuery {
            quads: Vec::with_capacity(quads),
            byte_units: Vec::with_capacity(head_dim.div_ceil(32)),
            unit: Vec::with_capacity(groups),
            units: Vec::with_capacity(groups),
            sum: Vec::with_capacity(groups),
            rest: Vec::with_capacity(groups),
        }
    }

    /// Bytes that [`new`](Self::new) reserves.
    pub fn bytes(head_dim: usize) -> usize {
        let groups = head_dim.div_ceil(32);
        8 * (head_dim.div_ceil(4) + 2 * groups) + size_of::<ByteUnits>() * groups + 16 * groups.max(2)
    }

    fn clear(&mut self) {
        self.quads.clear();
        self.byte_units.clear();
        self.unit.clear();
        self.units.clear();
        self.sum.clear();
        self.rest.clear();
    }

    /// Packs one group of `row`. `parts` are the ranges of elements whose quads are packed in order.
    fn group<'p>(&mut self, words: bool, row: &[f32], parts: impl Iterator<Item = &'p [f32]>) {
        let split = Split::new(largest(row), LARGEST);
        let mut units = 0;
        for part in parts {
            for quad in part.chunks(4) {
                let mut of_quad = [0; 4];
                of_quad.iter_mut().zip(quad).for_each(|(n, x)| *n = split.units(*x));
                units += of_quad.iter().sum::<i32>();
                self.quads.push(quad_of_units(words, of_quad));
            }
        }
        self.close(&split, units, row);
    }

    fn close(&mut self, split: &Split, units: i32, row: &[f32]) {
        let sum: f32 = row.iter().sum();
        self.unit.push(split.unit);
        self.units.push(units);
        self.sum.push(sum);
        self.rest.push(sum - split.unit * units as f32);
    }

    /// Packs a row for codes of one byte per element. `words`: for [`Simd::WORD_DOTS`], here and below.
    pub fn pack_bytes(&mut self, words: bool, row: &[f32], group: usize) {
        self.clear();
        for group in row.chunks(group) {
            self.group(words, group, std::iter::once(group));
        }
    }

    /// Packs a row, in units of one byte, for codes of one nibble per element: a byte contains elements `j` and `j + half` of a group.
    pub fn pack_nibbles(&mut self, row: &[f32], group: usize) {
        self.clear();
        for group in row.chunks(group) {
            let split = Split::new(largest(group), LARGEST_BYTE);
            let (low, high) = group.split_at(group.len().div_ceil(2));
            let mut units = 0;
            // The high half may be shorter by one element.
            for first in (0..low.len()).step_by(4 * QUADS) {
                let mut of_both: ByteUnits = [[0; QUADS]; 2];
                for (of_half, half) in of_both.iter_mut().zip([low, high]) {
                    let half = &half[first.min(half.len())..half.len().min(first + 4 * QUADS)];
                    for (of_quad, quad) in of_half.iter_mut().zip(half.chunks(4)) {
                        let mut bytes = [0; 4];
                        for (byte, x) in bytes.iter_mut().zip(quad) {
                            let n = split.units(*x);
                            units += n;
                            *byte = n as u8;
                        }
                        *of_quad = i32::from_le_bytes(bytes);
                    }
                }
                self.byte_units.push(of_both);
            }
            self.close(&split, units, group);
        }
    }

    /// Packs a row whose first `outliers` elements have a byte each and the others a nibble: two groups, or one. The quads of the
    /// nibbles' low halves come first, then those of their high halves.
    pub fn pack_outliers(&mut self, words: bool, row: &[f32], outliers: usize) {
        self.clear();
        let (wide, others) = row.split_at(outliers);
        if outliers > 0 {
            self.group(words, wide, std::iter::once(wide));
        }
        self.halves(words, others);
    }

    fn halves(&mut self, words: bool, group: &[f32]) {
        let (low, high) = group.split_at(group.len().div_ceil(2));
        self.group(words, group, [low, high].into_iter());
        // Both halves get the same number of quads, so that kernels need no special case.
        if high.len().div_ceil(4) < low.len().div_ceil(4) {
            self.quads.push([0; 2]);
        }
    }
}

#[cfg(test)]
mod tests;
