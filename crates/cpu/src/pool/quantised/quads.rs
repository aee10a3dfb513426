//! Weights of values in units, for the sums of packed values.
use super::{LARGEST, LARGEST_BYTE, MAX_ROWS, QUADS, Split};
use crate::arch::{LANES, Simd};
use crate::pool::{Blocks, Lines, MAX_BLOCKS};

/// Most parameters of a row that are kept at once: scales and minima of 24 groups.
const MAX_PARAMS: usize = 48;

/// Weights of up to [`MAX_ROWS`] queries for the cells of one call, in units: a query's weight times the scale of the cell's group.
///
/// The unit of a row and group is bounded for all groups at once. With the largest scale `m[g]` of each group, `c[cell]` is the
/// largest `scale[g][cell] / m[g]` over the groups, and `b[row]` the largest `weight[row][cell] × c[cell]`. Then no weight times
/// scale of group `g` is larger than `b[row] × m[g]`. The bound is near: a cell with a large weight and small values, as an
/// attention sink is, does not make the unit coarse for the others.
///
/// Units of one byte are coarse beside the largest product all the same. Rounded one by one, a hundred cells of a third of a unit
/// would all become 0. So what rounding takes from a cell, or adds to it, goes to the cell 32 places on: every third of them gets
/// a unit. At the end up to half a unit is left over in each of the 32 sequences. They begin with different fractions of a unit
/// ([`FRACTIONS`]), so that equal weights are not rounded up in the same step, and what is left over does not add up.
pub struct Quads {
    /// Per query and four cells: the first and the second part of what [`Simd::dot_units`] takes. Units of one byte are in the first.
    parts: [[[u8; MAX_BLOCKS * LANES]; MAX_ROWS]; 2],
    /// Per query: the weights over their bound.
    weights: [[[f32; LANES]; MAX_BLOCKS]; MAX_ROWS],
    bound: [f32; MAX_ROWS],
    /// The cells' parameters, 0 in cells that no query sees: those may contain anything.
    params: [[[f32; LANES]; MAX_BLOCKS]; MAX_PARAMS],
    /// The largest scale of each group, and 1 over it.
    largest: [f32; MAX_PARAMS],
    inverse: [f32; MAX_PARAMS],
    /// `c`.
    cells: [[f32; LANES]; MAX_BLOCKS],
    /// Parameters of a group. The first is its scale.
    step: usize,
    /// Whether `params` has those of all groups, and not only those of the group packed last.
    has_all: bool,
    /// Whether bounds can be used.
    bounded: bool,
    /// Whether a parameter may be no number.
    may_have_nan: bool,
    /// Per query: the value of one unit, and (`units`, of two bytes) the sum of the units.
    pub unit: [f32; MAX_ROWS],
    pub units: [i32; MAX_ROWS],
    /// Per query: what the weights sum to beyond the units of one byte, as a number of units, in sixteen parts.
    rest: [[f32; LANES]; MAX_ROWS],
}

/// 32 fractions between −1/2 and 1/2, in bit-reversed order, so that neighbours differ much. Their sum is 0.
const FRACTIONS: [[f32; LANES]; 2] = {
    let mut fractions = [[0.0; LANES]; 2];
    let mut i = 0;
    while i < 32 {
        let reversed = (i as u32).reverse_bits() >> 27;
        fractions[i / LANES][i % LANES] = (reversed as f32 + 0.5) / 32.0 - 0.5;
        i += 1;
    }
    fractions
};

/// In how many units the largest product is expressed.
const fn largest_units(bytes: bool) -> f32 {
    if bytes { LARGEST_BYTE } else { LARGEST }
}

impl Default for Quads {
    fn default() -> Self {
        Quads {
            parts: [[[0; MAX_BLOCKS * LANES]; MAX_ROWS]; 2],
            weights: [[[0.0; LANES]; MAX_BLOCKS]; MAX_ROWS],
            bound: [0.0; MAX_ROWS],
            params: [[[0.0; LANES]; MAX_BLOCKS]; MAX_PARAMS],
            largest: [0.0; MAX_PARAMS],
            inverse: [0.0; MAX_PARAMS],
            cells: [[0.0; LANES]; MAX_BLOCKS],
            step: 1,
            has_all: false,
            bounded: false,
            may_have_nan: false,
            unit: [0.0; MAX_ROWS],
            units: [0; MAX_ROWS],
            rest: [[0.0; LANES]; MAX_ROWS],
        }
    }
}

impl Quads {
    /// Takes the parameters of the cells of a call: `step` for each of `n_groups` groups, the first its scale.
    #[inline(always)]
    pub fn begin<S: Simd>(&mut self, s: S, blocks: &Blocks<'_>, (n_groups, step): (usize, usize)) {
        self.step = step;
        self.may_have_nan = blocks.may_have_nan;
        self.has_all = n_groups * step <= MAX_PARAMS;
        // Of a single group the largest product itself takes no longer to find.
        self.bounded = !blocks.may_have_nan && n_groups > 1 && self.has_all;
        if self.has_all {
            for param in 0..n_groups * step {
                self.load(s, blocks, param, param);
            }
        }
        if !self.bounded {
            return;
        }
        // All scales are finite here.
        let n = blocks.list.len();
        self.cells[..n].fill([0.0; LANES]);
        for group in 0..n_groups {
            let scales = &self.params[group * step][..n];
            let mut largest = s.splat(0.0);
            for scales in scales {
                largest = s.max(largest, s.load(scales));
            }
            let largest = s.largest(largest);
            let inverse = if largest > 1e-30 { 1.0 / largest } else { 0.0 };
            for (scales, c) in scales.iter().zip(&mut self.cells) {
                s.store(s.max(s.load(c), s.mul(s.load(scales), s.splat(inverse))), c);
            }
            (self.largest[group], self.inverse[group]) = (largest, inverse);
        }
    }

    /// Loads parameter `param` of all cells.
    #[inline(always)]
    fn load<S: Simd>(&mut self, s: S, blocks: &Blocks<'_>, param: usize, to: usize) {
        let loaded = &mut self.params[to][..blocks.list.len()];
        for (block, out) in blocks.list.iter().zip(&mut *loaded) {
            s.store(s.load_f16(&block.params.as_chunks::<32>().0[param]), out);
        }
        let (cells, seen) = (loaded.as_flattened_mut(), &blocks.lanes);
        if seen.len() < cells.len() {
            cells[..seen.start].fill(0.0);
            cells[seen.end..].fill(0.0);
        }
    }

    /// Takes the weights of `R` queries from `query` on. `BYTES`: units have one byte, here and in [`pack`](Self::pack).
    #[inline(always)]
    pub fn weigh<S: Simd, const R: usize, const BYTES: bool>(
        &mut self,
        s: S,
        lines: &Lines<'_>,
        query: usize,
        n: usize,
    ) {
        for r in 0..R {
            let line = lines.of_blocks(query + r, n);
            if !self.bounded {
                self.weights[r][..n].copy_from_slice(line);
                self.bound[r] = 1.0;
                continue;
            }
            let (mut bound, mut total) = (s.splat(0.0), s.splat(0.0));
            for (line, c) in line.iter().zip(&self.cells) {
                let weight = s.load(line);
                bound = s.max(bound, s.mul(weight, s.load(c)));
                total = s.add(total, weight);
            }
            // NaN survives a sum; `max` may drop it.
            let bound = if s.sum(total).is_finite() { s.largest(bound) } else { f32::NAN };
            let inverse = s.splat(if bound > 1e-30 { largest_units(BYTES) / bound } else { 0.0 });
            for (line, out) in line.iter().zip(&mut self.weights[r]) {
                s.store(s.mul_nonzero(inverse, s.load(line)), out);
            }
            self.bound[r] = bound;
        }
    }

    /// Where the parameters of a group are.
    #[inline(always)]
    fn first_param(&self, group: usize) -> usize {
        if self.has_all { group * self.step } else { 0 }
    }

    /// Packs the weights of `R` queries times the scales of group `group`.
    #[inline(always)]
    pub fn pack<S: Simd, const R: usize, const BYTES: bool>(
        &mut self,
        s: S,
        blocks: &Blocks<'_>,
        group: usize,
    ) {
        let n = blocks.list.len();
        if !self.has_all {
            for param in 0..self.step {
                self.load(s, blocks, group * self.step + param, param);
            }
        }
        let scales = self.first_param(group);
        if !self.bounded {
            return self.pack_by_largest::<S, R, BYTES>(s, scales, n);
        }
        let (inverse, mut totals) = (s.splat(self.inverse[group]), [Total::new(s); R]);
        for b in 0..n {
            let scales = s.mul(s.load(&self.params[scales][b]), inverse);
            for r in 0..R {
                let weights = s.load(&self.weights[r][b]);
                self.put::<S, BYTES>(s, r, b, s.mul(weights, scales), &mut totals[r]);
            }
        }
        for r in 0..R {
            let unit = self.bound[r] * (self.largest[group] / largest_units(BYTES));
            self.close::<S, BYTES>(s, r, unit, &totals[r]);
        }
    }

    /// The same by the largest product, row by row. Cells that a query does not see may have scales that are no numbers: only those
    /// that it sees count.
    #[inline(always)]
    fn pack_by_largest<S: Simd, const R: usize, const BYTES: bool>(&mut self, s: S, scales: usize, n: usize) {
        for r in 0..R {
            let (mut largest, mut total) = (s.splat(0.0), s.splat(0.0));
            for b in 0..n {
                let weight = s.mul_nonzero(s.load(&self.weights[r][b]), s.load(&self.params[scales][b]));
                largest = s.max(largest, weight);
                total = s.add(total, weight);
            }
            let broken = !s.sum(total).is_finite();
            let largest = if broken { f32::NAN } else { s.largest(largest) };
            let split = Split::new(largest, largest_units(BYTES));
            let (inverse, mut total) = (s.splat(split.inverse), Total::new(s));
            for b in 0..n {
                let weight = s.mul_nonzero(s.load(&self.weights[r][b]), s.load(&self.params[scales][b]));
                let units = if broken { s.splat(0.0) } else { s.mul(weight, inverse) };
                self.put::<S, BYTES>(s, r, b, units, &mut total);
            }
            self.close::<S, BYTES>(s, r, self.bound[r] * split.unit, &total);
        }
    }

    /// Rounds and stores the weights of sixteen cells, in units.
    #[inline(always)]
    fn put<S: Simd, const BYTES: bool>(
        &mut self,
        s: S,
        row: usize,
        block: usize,
        weights: S::F,
        total: &mut Total<S>,
    ) {
        let parts = self.parts.each_mut().map(|rows| &mut rows[row].as_chunks_mut().0[block]);
        if !BYTES {
            let units = s.to_i32(weights);
            total.units = s.add_i(total.units, units);
            return s.store_units(units, parts);
        }
        // A cell without weight gets nothing: half a unit is rounded to the even 0.
        let [rest, next] = total.rest;
        let wanted = s.add(weights, rest);
        let units = s.to_i32(wanted);
        total.rest = [next, s.sub(wanted, s.to_f32(units))];
        let [bytes, _] = parts;
        s.store_low_bytes(units, bytes);
    }

    #[inline(always)]
    fn close<S: Simd, const BYTES: bool>(&mut self, s: S, row: usize, unit: f32, total: &Total<S>) {
        self.unit[row] = unit;
        if BYTES {
            s.store(s.add(total.rest[0], total.rest[1]), &mut self.rest[row]);
        } else {
            self.units[row] = s.sum(s.to_f32(total.units)) as i32; // below 2²⁴: exact
        }
    }

    /// For queries of affine codes: the sum of `weight × minimum` over the cells of `group`, which was packed last, and what the units
    /// of one byte lack times `middle`, the code that most are near. The minimum is a group's second parameter.
    #[inline(always)]
    pub fn minima<S: Simd>(
        &self,
        s: S,
        lines: &Lines<'_>,
        (query, row): (usize, usize),
        (group, middle): (usize, f32),
        n: usize,
    ) -> f32 {
        let minima = &self.params[self.first_param(group) + 1];
        let mut sums = s.mul(s.load(&self.rest[row]), s.splat(middle * self.unit[row]));
        for (weights, minima) in lines.of_blocks(query + row, n).iter().zip(minima) {
            let (weights, minima) = (s.load(weights), s.load(minima));
            // A product of 0 and a number is 0.
            sums = match self.may_have_nan {
                false => s.fma(weights, minima, sums),
                true => s.add(sums, s.mul_nonzero(weights, minima)),
            };
        }
        s.sum(sums)
    }

    /// Part `part` of the units of block `block` of row `row`, four cells together. Units of one byte are part 0.
    #[inline(always)]
    pub fn of_block(&self, part: usize, row: usize, block: usize) -> &[[u8; 4]; QUADS] {
        let units: &[u8; LANES] = &self.parts[part][row].as_chunks().0[block];
        units.as_chunks().0.first_chunk().expect("four quads")
    }
}

/// The units of a row, and what rounding has left of the last 32 cells, the older sixteen first: so that a block need not wait for the
/// one before.
#[derive(Clone, Copy)]
struct Total<S: Simd> {
    units: S::I,
    rest: [S::F; 2],
}

impl<S: Simd> Total<S> {
    #[inline(always)]
    fn new(s: S) -> Self {
        Total { units: s.splat_i(0), rest: [s.load(&FRACTIONS[0]), s.load(&FRACTIONS[1])] }
    }
}
