//! Weights of values in units, for the sums of packed values.
use super::{LARGEST, MAX_ROWS, Split};
use crate::arch::{LANES, Simd};
use crate::pool::{Block, Blocks, Lines, MAX_BLOCKS};
use std::ops::Range;

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

/// Most groups of a row whose weights are packed by bounds.
const MAX_GROUPS: usize = 64;

/// Weights of up to [`MAX_ROWS`] queries for the cells of one call, in units: a query's weight times the scale of the cell's group.
///
/// The unit of a row and group is bounded for all groups at once. With the largest scale `m[g]` of each group, `c[cell]` is the
/// largest `scale[g][cell] / m[g]` over the groups, and `b[row]` the largest `weight[row][cell] × c[cell]`. Then no weight times scale of
/// group `g` is larger than `b[row] × m[g]`. The bound is near: a cell with a large weight and small values, as an attention
/// sink is, does not make the unit coarse for the others.
pub struct Quads {
    /// Per query and four cells: the first and the second part of what [`Simd::dot_units`] takes.
    parts: [[[u8; MAX_BLOCKS * LANES]; MAX_ROWS]; 2],
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
            parts: [[[0; MAX_BLOCKS * LANES]; MAX_ROWS]; 2],
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
        // Of a single group the largest product itself takes no longer to find.
        self.bounded = !blocks.may_have_nan && (2..=MAX_GROUPS).contains(&n_groups);
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
            return self.pack_by_largest::<S, R>(s, n);
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

    /// The same by the largest product, row by row. Cells that a query does not see may have scales that are no numbers: only those
    /// that it sees count.
    #[inline(always)]
    fn pack_by_largest<S: Simd, const R: usize>(&mut self, s: S, n: usize) {
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

    /// Stores the units of sixteen cells.
    #[inline(always)]
    fn put<S: Simd>(&mut self, s: S, row: usize, block: usize, units: S::I) -> S::I {
        s.store_units(units, self.parts.each_mut().map(|rows| &mut rows[row].as_chunks_mut().0[block]));
        units
    }

    /// The units of cells `4 * quad..` of row `row`.
    #[inline(always)]
    pub fn quad(&self, row: usize, quad: usize) -> [i32; 2] {
        self.parts.each_ref().map(|rows| i32::from_le_bytes(rows[row].as_chunks().0[quad]))
    }
}
