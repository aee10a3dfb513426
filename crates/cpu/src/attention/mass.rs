//! How much attention each cell receives: the weights of a layer's queries, summed by cell.
//!
//! ```text
//! for each KV head × every eighth of the units of query rows:                              threads take these
//!   for each tile:  s = q·k;  M, l as in attention              first pass: the norm of every row
//!   for each tile:  s = q·k;  mass += 2^(s − M) / l             second pass, over the same tiles
//! mass = the sums over heads and eighths, in their order
//! ```
//!
//! So it computes the scores twice more, and no weighted values. The order of additions depends on the step's queries and
//! not on the threads.
use super::softmax::{self, Form, NO_SCORE};
use super::tile::Tile;
use super::{EXTRA, Layer, Rows, SPLIT, Scratch, ThreadScratch};
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd, Uses};
use kvist_device::GroupMass;
use std::ops::Range;

/// Sums per KV head that threads compute side by side.
const PARTS: usize = 8;

impl Layer<'_> {
    /// Adds the weights of the queries that count to `mass`, which has begun the step of these reads.
    pub fn mass<'q>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
        mass: &mut GroupMass,
    ) {
        let unit = self.unit_slots() as u32;
        let cut = |run: &Range<u32>| {
            let run = run.clone();
            run.clone().step_by(unit as usize).map(move |first| first..run.end.min(first + unit))
        };
        let units: Vec<Range<u32>> = mass.counted().iter().flat_map(cut).collect();
        let (parts, n) = (units.len().min(PARTS), mass.n_values());
        if n == 0 || parts == 0 {
            return;
        }
        let mut sums = std::mem::take(&mut scratch.mass);
        sums.clear();
        sums.resize(self.kv_heads * parts * n, 0.0);
        let counted = &*mass;
        compute.threads.parts(&mut sums, n, &mut scratch.threads, |i, sums, scratch| {
            for slots in units.iter().skip(i % parts).step_by(parts) {
                let (head, first_slot) = (i / parts, slots.start as usize);
                let rows = Rows { head, first_slot, n_slots: slots.len(), together: 0 };
                self.mass_of(compute, rows, scratch, query, counted, sums);
            }
        });
        for sums in sums.chunks_exact(n) {
            mass.values_mut().iter_mut().zip(sums).for_each(|(total, x)| *total += x);
        }
        scratch.mass = sums;
    }

    /// Adds the weights of some rows of one KV head to `sums`, which has the layout of `mass`.
    fn mass_of<'q>(
        &self,
        compute: &Compute,
        rows: Rows,
        scratch: &mut ThreadScratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
        mass: &GroupMass,
        sums: &mut [f32],
    ) {
        let per_kv = self.per_kv();
        let (n_rows, rows) = (self.unit_rows(rows), self.counted(compute, rows));
        self.prepare(compute, rows, scratch, query);
        let mut partial = std::mem::take(&mut scratch.partial);
        let (states, factors) = partial.split_at_mut(n_rows * EXTRA);
        for state in states.chunks_exact_mut(EXTRA) {
            state.fill(0.0);
            state[LANES] = NO_SCORE;
        }
        let mut add = false;
        for _ in 0..2 {
            scratch.tile_items.begin();
            for split in self.splits() {
                self.tiles_of(compute, rows, split, scratch, |slots, tile, scratch| {
                    let first = (slots.start as usize - rows.first_slot) * per_kv;
                    let of_block = first..first + slots.len() * per_kv;
                    let states = &mut states[of_block.start * EXTRA..of_block.end * EXTRA];
                    let part = self.part(rows, &slots, tile);
                    let weights = self.weights(compute, part, Form::Floats, (&mut *states, 0), scratch);
                    if weights.is_some() && add {
                        self.add_weights(
                            compute,
                            (slots, tile),
                            &factors[of_block],
                            scratch,
                            (mass, &mut *sums),
                        );
                    }
                });
            }
            if add {
                break;
            }
            for (i, (state, factor)) in states.chunks_exact(EXTRA).zip(&mut *factors).enumerate() {
                *factor = self.factor(rows.head * per_kv + i % per_kv, state);
            }
            add = true;
        }
        scratch.partial = partial;
    }

    /// The splits of all items.
    pub(super) fn splits(&self) -> Range<u32> {
        let items = &self.reads.items;
        let first = items.iter().map(|item| item.first_index / SPLIT).min().unwrap_or(0);
        let end =
            |item: &kvist_cache::ReadItem| item.first_index.saturating_add(item.run.len).div_ceil(SPLIT);
        first..items.iter().map(end).max().unwrap_or(0)
    }

    /// What normalises the sums of a row, given its norm by lane and its maximum.
    pub(super) fn factor(&self, head: usize, norms: &[f32]) -> f32 {
        let norm = softmax::sum(&norms[..LANES]);
        match self.sinks {
            None => 1.0 / norm,
            Some(sinks) => softmax::factor_with_sink(norm, norms[LANES], sinks[head]),
        }
    }

    /// Adds the lines of a block, which are weights now, to the sums of the cells.
    fn add_weights(
        &self,
        compute: &Compute,
        (slots, tile): (Range<u32>, &Tile),
        factors: &[f32],
        scratch: &ThreadScratch,
        (mass, sums): (&GroupMass, &mut [f32]),
    ) {
        let (per_kv, stride) = (self.per_kv(), tile.stride());
        for i in scratch.tile_items.chains().flatten() {
            let item = &self.reads.items[i];
            let Some(piece) = self.piece(item, &slots, tile) else { continue };
            let (cells, mut first) = (piece.cells(), piece.slots.start);
            while first < piece.slots.end {
                let others = (first + 1..piece.slots.end).take_while(|slot| mass.same_sequence(first, *slot));
                let end = first + 1 + others.count() as u32;
                let rows = (first - slots.start) as usize * per_kv..(end - slots.start) as usize * per_kv;
                let at = mass.at(i, item, first) + piece.seen.start as usize;
                compute.isa.run(AddRows {
                    sums: &mut sums[at..at + cells.len()],
                    lines: &scratch.lines[rows.start * stride..rows.end * stride],
                    stride,
                    at: cells.start,
                    factors: &factors[rows],
                });
                first = end;
            }
        }
    }
}

/// `sums += factor · line` for every line.
struct AddRows<'a> {
    sums: &'a mut [f32],
    lines: &'a [f32],
    stride: usize,
    /// The place in a line of the first sum.
    at: usize,
    factors: &'a [f32],
}

impl Kernel for AddRows<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (vectors, rest) = self.sums.as_chunks_mut::<LANES>();
        let n = LANES * vectors.len();
        for (line, factor) in self.lines.chunks_exact(self.stride).zip(self.factors) {
            let (weights, last) = line[self.at..self.at + n + rest.len()].as_chunks::<LANES>();
            let by = s.splat(*factor);
            for (sum, weight) in vectors.iter_mut().zip(weights) {
                s.store(s.fma(s.load(weight), by, s.load(sum)), sum);
            }
            rest.iter_mut().zip(last).for_each(|(sum, weight)| *sum += weight * factor);
        }
    }
}
