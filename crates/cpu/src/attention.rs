//! Attention over packed rows.
//!
//! ```text
//! for each unit (a KV head × up to 256 query rows × a split of 1,024 sequence positions):     threads take units
//!   for each item (queries × a run of cells) inside the split, tile by tile:
//!     for each block of rows that see any of the tile:       (all query heads of the KV head together)
//!       s = q·k                              q holds scale and log₂ e already
//!       M' = max(M, round(max s));  w = 2^(s − M');  l = l·2^(M − M') + w;  o = o·2^(M − M') + Σ w·v
//! out = Σ o·2^(M − M*) / Σ l·2^(M − M*) over the splits, in their order
//! ```
//!
//! (online softmax: Milakov and Gimelshein, 2018; tiling: Dao et al., 2022; splits: Dao et al., 2023, flash-decoding.)
//!
//! The running maximum is an integer, so that every rescaling is by a power of two and therefore exact: where tiles
//! end, which queries share a tile and when a new maximum appears do not show in the result. Splits are cut at fixed
//! positions of the sequence. So a row's output depends on its query and on what it sees, in order, and on nothing
//! else: not on the batch, the chunk, the sharing, or the threads. (Packed values are the exception: their weights
//! become integers tile by tile, unless [`exact`](Layer::exact) asks otherwise.)
//!
//! Bytes: each stored row of an item once from memory, per 256 query rows. Operations: 2 × head_dim multiply-adds
//! per query head and visible cell, and some ten for the weight.
mod scratch;
mod softmax;

use crate::Compute;
use crate::arch::LANES;
use crate::pages::Pages;
use crate::pool::{self, Lines, QUERY_ROWS, Queries, Side, Sums};
use crate::rotation::rotate;
use kvist_backend::DType;
use kvist_cache::{Mask, ReadItem, Reads, Run};
pub use scratch::Scratch;
use scratch::{EXTRA, PAD, ThreadScratch};
use softmax::{NOTHING, Softmax};

/// Sequence positions of a split.
pub const SPLIT: u32 = 1024;
/// Query rows of a unit.
const UNIT_ROWS: usize = 256;
/// Query rows whose scores are held at once.
const BLOCK_ROWS: usize = 32;
/// Cells of a tile: few rows take long tiles, so that what happens once per tile happens rarely.
const TILE: usize = 64;
const LONG_TILE: usize = 256;
const LONG_TILE_ROWS: usize = 8;

/// One layer's attention.
pub struct Layer<'l> {
    pub keys: &'l Side,
    pub values: &'l Side,
    pub slabs: &'l [Pages],
    pub reads: &'l Reads,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Weigh packed values one by one.
    pub exact: bool,
}

/// A KV head and some of its query slots.
#[derive(Clone, Copy)]
struct Rows {
    head: usize,
    first_slot: usize,
    n_slots: usize,
}

impl Layer<'_> {
    fn per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }
    /// Floats of one row's state: sums, norms by lane, maximum.
    fn state(&self) -> usize {
        self.head_dim + EXTRA
    }
    fn unit_slots(&self) -> usize {
        (UNIT_ROWS / self.per_kv()).max(1)
    }

    /// Attend with the queries that `query(token, head)` gives, and hand every output row to `put`.
    pub fn run<'q>(
        &self,
        compute: &Compute,
        scratch: &mut Scratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
        put: &mut dyn FnMut(usize, usize, &[f32]),
    ) {
        let slots = self.reads.order.len();
        let (per_kv, state) = (self.per_kv(), self.state());
        let unit_slots = self.unit_slots().min(slots);
        let units = self.kv_heads * slots.div_ceil(unit_slots);
        let rows = |unit: usize| {
            let (head, part) = (unit / slots.div_ceil(unit_slots), unit % slots.div_ceil(unit_slots));
            let first_slot = part * unit_slots;
            Rows { head, first_slot, n_slots: unit_slots.min(slots - first_slot) }
        };
        let index = |item: &ReadItem| item.first_index..item.first_index.saturating_add(item.run.len);
        let first = self.reads.items.iter().map(|item| index(item).start / SPLIT).min().unwrap_or(0);
        let end = self.reads.items.iter().map(|item| index(item).end.div_ceil(SPLIT)).max().unwrap_or(0);
        let n_splits = (end - first) as usize;
        // A state per unit, or one per unit and split where there are few units and room for the states.
        let unit_state = unit_slots * per_kv * state;
        let room = scratch.states.len() / unit_state;
        let per_unit =
            if units < 4 * compute.threads.n() && units * n_splits <= room { n_splits.max(1) } else { 1 };
        let states = &mut scratch.states[..units * per_unit * unit_state];
        compute.threads.parts(states, unit_state, &mut scratch.threads, |i, states, scratch| {
            let rows = rows(i / per_unit);
            let split = (i % per_unit) as u32;
            let splits = if per_unit > 1 { first + split..first + split + 1 } else { first..end };
            self.unit(compute, rows, splits, states, scratch, query);
        });
        for unit in 0..units {
            let rows = rows(unit);
            let all = &mut states[unit * per_unit * unit_state..(unit + 1) * per_unit * unit_state];
            let (total, others) = all.split_at_mut(unit_state);
            for other in others.chunks_exact(unit_state) {
                self.merge(total, other, rows.n_slots * per_kv);
            }
            for (i, row) in total.chunks_exact_mut(state).take(rows.n_slots * per_kv).enumerate() {
                let (sums, norms) = row.split_at_mut(self.head_dim);
                let inverse = 1.0 / softmax::sum(&norms[..LANES]);
                sums.iter_mut().for_each(|x| *x *= inverse);
                if self.values.shape.storage.rotate {
                    rotate(sums);
                }
                let token = self.reads.order[rows.first_slot + i / per_kv] as usize;
                put(token, rows.head * per_kv + i % per_kv, sums);
            }
        }
    }

    /// Splits one after the other, merged in their order into `total`.
    fn unit<'q>(
        &self,
        compute: &Compute,
        rows: Rows,
        splits: std::ops::Range<u32>,
        total: &mut [f32],
        scratch: &mut ThreadScratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
    ) {
        let n_rows = rows.n_slots * self.per_kv();
        self.prepare(rows, scratch, query);
        self.reset(total, n_rows);
        let mut partial = std::mem::take(&mut scratch.partial);
        for (i, split) in splits.enumerate() {
            if i == 0 {
                self.split(compute, rows, split, total, scratch);
            } else {
                self.reset(&mut partial, n_rows);
                self.split(compute, rows, split, &mut partial, scratch);
                self.merge(total, &partial, n_rows);
            }
        }
        scratch.partial = partial;
    }

    /// The queries as the kernels want them: turned if K is stored turned, scaled, split into bytes.
    fn prepare<'q>(
        &self,
        rows: Rows,
        scratch: &mut ThreadScratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
    ) {
        let (per_kv, keys) = (self.per_kv(), &self.keys.shape);
        let scale = match self.softcap {
            Some(cap) => self.scale / cap,
            None => self.scale * std::f32::consts::LOG2_E,
        };
        let n = rows.n_slots * per_kv;
        let head_dim = self.head_dim;
        for i in 0..n {
            let row = &mut scratch.row[..head_dim];
            let token = self.reads.order[rows.first_slot + i / per_kv] as usize;
            row.copy_from_slice(query(token, rows.head * per_kv + i % per_kv));
            if keys.storage.rotate {
                rotate(row);
            }
            row.iter_mut().for_each(|x| *x *= scale);
            let group = keys.storage.group as usize;
            match keys.storage.dtype {
                DType::Q8 => scratch.packed[i].pack_bytes(row, group),
                DType::Q4 => scratch.packed[i].pack_nibbles(row, group),
                DType::F32 | DType::F16 | DType::BF16 => {
                    let side_by_side = &mut scratch.queries[i / QUERY_ROWS * QUERY_ROWS * head_dim..];
                    let column = side_by_side.iter_mut().skip(i % QUERY_ROWS).step_by(QUERY_ROWS);
                    column.zip(row).for_each(|(q, x)| *q = *x);
                }
            }
        }
    }

    fn reset(&self, states: &mut [f32], n_rows: usize) {
        for row in states.chunks_exact_mut(self.state()).take(n_rows) {
            row.fill(0.0);
            row[self.head_dim + LANES] = NOTHING;
        }
    }

    /// `total ⊕ other`, row by row: exact rescaling, then one addition each.
    fn merge(&self, total: &mut [f32], other: &[f32], n_rows: usize) {
        let at = self.head_dim + LANES;
        let states = total.chunks_exact_mut(self.state()).zip(other.chunks_exact(self.state()));
        for (total, other) in states.take(n_rows) {
            if other[at] == NOTHING {
                continue;
            }
            let max = if total[at] > other[at] { total[at] } else { other[at] };
            let (a, b) = (softmax::power(total[at] - max), softmax::power(other[at] - max));
            total[at] = max;
            total[..at].iter_mut().zip(other).for_each(|(x, y)| *x = *x * a + y * b);
        }
    }

    /// What of the items lies in one split.
    fn split(
        &self,
        compute: &Compute,
        rows: Rows,
        split: u32,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let (from, until) = (split * SPLIT, split.saturating_add(1).saturating_mul(SPLIT));
        let slots = rows.first_slot as u32..(rows.first_slot + rows.n_slots) as u32;
        let few = rows.n_slots * self.per_kv() <= LONG_TILE_ROWS;
        let tile = if few { LONG_TILE } else { TILE } as u32;
        for item in &self.reads.items {
            let queries =
                item.first_query.max(slots.start)..(item.first_query + item.n_queries).min(slots.end);
            let first = item.first_index.max(from);
            let end = item.first_index.saturating_add(item.run.len).min(until);
            if queries.is_empty() {
                continue;
            }
            let mut index = first;
            while index < end {
                let next = end.min((index / tile + 1).saturating_mul(tile));
                let cells = index - item.first_index..next - item.first_index;
                self.tile(compute, rows, item, queries.clone(), cells, tile, states, scratch);
                index = next;
            }
        }
    }

    /// The cells `cells` (offsets into the item) of one tile, for the slots `queries` of the item.
    #[allow(clippy::too_many_arguments)]
    fn tile(
        &self,
        compute: &Compute,
        rows: Rows,
        item: &ReadItem,
        queries: std::ops::Range<u32>,
        cells: std::ops::Range<u32>,
        tile: u32,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let at_once = ((BLOCK_ROWS / self.per_kv()).max(1)) as u32;
        let mut slot = queries.start;
        while slot < queries.end {
            let n = at_once.min(queries.end - slot);
            let first = slot - item.first_query;
            // What any query of the block sees of the tile: bands move with the query, so the ends bound it.
            let (a, b) = (self.reads.span_of(item, first), self.reads.span_of(item, first + n - 1));
            let seen = a.start.min(b.start).max(cells.start)..a.end.max(b.end).min(cells.end);
            if !seen.is_empty() {
                self.block(compute, rows, item, slot..slot + n, seen, tile, states, scratch);
            }
            slot += n;
        }
    }

    /// Some slots of the item over some of its cells, all inside one tile.
    #[allow(clippy::too_many_arguments)]
    fn block(
        &self,
        compute: &Compute,
        rows: Rows,
        item: &ReadItem,
        slots: std::ops::Range<u32>,
        seen: std::ops::Range<u32>,
        tile: u32,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let (isa, per_kv, head_dim) = (compute.isa, self.per_kv(), self.head_dim);
        let n_rows = slots.len() * per_kv;
        let row0 = (slots.start as usize - rows.first_slot) * per_kv;
        // A line holds a tile between two pads of a vector each, since blocks of cells stick out of what is seen.
        let stride = tile as usize + 2 * PAD;
        let lines = &mut scratch.lines[..n_rows * stride];
        let in_line = |offset: u32| PAD + ((item.first_index + offset) % tile) as usize;
        let run = Run { start: item.run.start + seen.start, len: seen.end - seen.start };
        let at = in_line(seen.start); // the run stays inside the tile, so the rest follows it
        self.keys.blocks(self.slabs, rows.head, run, |blocks, cell| {
            let at = (at + cell as usize) - run.start as usize;
            let queries = Queries {
                n: n_rows,
                rows: &scratch.queries,
                first: row0,
                packed: &scratch.packed
                    [if self.keys.shape.storage.dtype.is_quantised() { row0..row0 + n_rows } else { 0..0 }],
            };
            let lines = Lines { data: lines, stride, at };
            pool::scores(isa, self.keys.shape.storage.dtype, queries, blocks, lines);
        });

        // −∞ where a row does not see a cell.
        for (r, line) in lines.chunks_exact_mut(stride).enumerate() {
            let slot = slots.start - item.first_query + (r / per_kv) as u32;
            let span = self.reads.span_of(item, slot);
            let span = span.start.max(seen.start)..span.end.min(seen.end);
            let (start, end) = match span.is_empty() {
                true => (at, at),
                false => (at + (span.start - seen.start) as usize, at + (span.end - seen.start) as usize),
            };
            let (from, until) = (at / LANES * LANES, (at + run.len as usize).next_multiple_of(LANES));
            line[from..start].fill(f32::NEG_INFINITY);
            line[end..until].fill(f32::NEG_INFINITY);
            if matches!(item.mask, Mask::Bits { .. }) {
                for cell in seen.clone().filter(|cell| !self.reads.sees(item, slot, *cell)) {
                    line[at + (cell - seen.start) as usize] = f32::NEG_INFINITY;
                }
            }
        }

        let state = self.state();
        let states = &mut states[row0 * state..(row0 + n_rows) * state];
        let vectors = at / LANES..(at + run.len as usize).div_ceil(LANES);
        isa.run(Softmax { lines, stride, vectors, softcap: self.softcap, states, head_dim });

        self.values.blocks(self.slabs, rows.head, run, |blocks, cell| {
            let at = (at + cell as usize) - run.start as usize;
            let lines = Lines { data: lines, stride, at };
            let sums = Sums { n: n_rows, data: states, first: 0, stride: state };
            let blocks = pool::Blocks { exact: self.exact, ..blocks };
            pool::accumulate(isa, self.values.shape.storage.dtype, lines, blocks, sums, &mut scratch.quads);
        });
    }
}
