//! Attention over packed rows.
//!
//! ```text
//! for each unit (a KV head × up to 256 query rows × a split of 1,024 sequence positions):     threads take units
//!   for each tile of positions inside the split, and each block of rows:       (all query heads of the KV head together)
//!     s = q·k           for each chain of items (queries × a run of cells) in the tile; q includes scale and log₂ e
//!     M' = max(M, round(max s));  w = 2^(s − M');  l = l·2^(M − M') + w;  o = o·2^(M − M')
//!     o += Σ w·v        for each chain
//! out = Σ o·2^(M − M*) / Σ l·2^(M − M*) over the splits, in their order
//! ```
//!
//! (online softmax: Milakov and Gimelshein, 2018; tiling: Dao et al., 2022; splits: Dao et al., 2023, flash-decoding.)
//!
//! The running maximum is an integer, so every rescaling is by a power of two and therefore exact. The result does not
//! depend on where tiles end, which queries share a tile or when a new maximum appears. Splits are cut at fixed
//! positions of the sequence. So a row's output depends only on its query and on the cells it sees, in order: not on
//! the batch, the chunk, the sharing or the threads. (Packed values are the exception: their weights become integers
//! tile by tile, unless [`exact`](Layer::exact) is set. And the products of pairs that `fast_prefill` allows: they are used where many
//! rows read the same cells. Weights then follow the maximum with an error of 8e-5, and words have a unit per tile and row.)
//!
//! Blocks of a paged cache may lie anywhere in memory. Items that follow each other in the sequence form one chain and
//! go through the kernels in one call, with a list of their blocks. The kernels prefetch the next block of the list.
//!
//! Bytes: each stored row of an item is read from memory once per 256 query rows. Operations: 2 × head_dim
//! multiply-adds per query head and visible cell, and about ten for the weight.
mod mass;
mod recent;
mod scratch;
mod softmax;
mod sums;
mod tile;
mod tile_items;

use crate::Compute;
use crate::arch::LANES;
use crate::pages::Pages;
use crate::pool::pairs::{Products, SplitRow};
use crate::pool::{QUERY_ROWS, RowStore};
use crate::recent::RecentReads;
use kvist_cache::Reads;
use kvist_device::DType;
pub use scratch::Scratch;
use scratch::{EXTRA, ThreadScratch};
use softmax::NO_SCORE;
use std::ops::Range;
use tile::Tile;

/// Sequence positions per split.
pub const SPLIT: u32 = 1024;
/// Query rows per unit.
const UNIT_ROWS: usize = 256;
/// Query rows whose scores are kept at once.
const BLOCK_ROWS: usize = 32;
/// Cells per tile. Up to `LONG_TILE_ROWS` query rows use the longer tile, so that per-tile work is done less often. So do products
/// of pairs, which want many rows and cells: all rows of a unit are then one block.
const TILE: usize = 64;
const LONG_TILE: usize = 256;
const LONG_TILE_ROWS: usize = 8;
/// Floats of states that one thread merges in less time than it takes to wake others.
const MERGED_ALONE: usize = 1 << 14;
/// Fewest rows that read the same cells for products of pairs that are not exact.
const FAST_ROWS: usize = 64;

/// Attention of one layer.
pub struct Layer<'l> {
    pub keys: &'l RowStore,
    pub values: &'l RowStore,
    pub slabs: &'l [Pages],
    pub reads: &'l Reads,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Attention sinks: one extra score per query head, which has no value.
    pub sinks: Option<&'l [f32]>,
    /// Weight packed values cell by cell instead of tile by tile.
    pub exact: bool,
    /// Rows that are read in f16 instead of from the pool.
    pub recent: Option<RecentReads<'l>>,
}

/// A KV head and a range of its query slots.
#[derive(Clone, Copy)]
struct Rows {
    head: usize,
    first_slot: usize,
    n_slots: usize,
    /// Most of the rows that read the same cells; 0 if it was not asked for.
    together: usize,
}

impl Rows {
    fn slots(&self) -> Range<u32> {
        self.first_slot as u32..(self.first_slot + self.n_slots) as u32
    }
}

impl<'l> Layer<'l> {
    fn per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }
    /// Floats in one row's state: weighted sums, norm by lane, maximum.
    fn state(&self) -> usize {
        self.head_dim + EXTRA
    }
    /// What multiplies rows with `side`, if these are products of pairs. With [`Compute::tile_attention`] they are for all
    /// queries, because the bits of the result differ from those of other products.
    fn pairs(&self, compute: &Compute, side: &RowStore, rows: Rows) -> Option<Products> {
        let least = |products: &Products| match (products, side.shape.storage.dtype) {
            // Without pairs there is one product of bytes per four codes, and nothing to unpack.
            (Products::Words(_), DType::Q4) => 2 * FAST_ROWS,
            _ => FAST_ROWS,
        };
        let fast = || compute.fast_pairs().filter(|products| rows.together >= least(products));
        let suits = |products: &Products| products.multiply(side.shape.storage.dtype);
        compute.exact_pairs().filter(suits).or_else(fast)
    }
    /// Counts the rows that read the same cells, where [`pairs`](Self::pairs) needs to know. A unit may contain tokens of many
    /// sequences, and K and V that become pairs for few rows each would cost more than they save.
    fn counted(&self, compute: &Compute, rows: Rows) -> Rows {
        let slots = rows.slots();
        let overlap = |item: &kvist_cache::ReadItem| {
            let end = slots.end.min(item.first_query + item.n_queries);
            end.saturating_sub(slots.start.max(item.first_query)) as usize
        };
        let most = match compute.fast_pairs() {
            Some(_) => self.reads.items.iter().map(overlap).max().unwrap_or(0),
            None => 0,
        };
        Rows { together: most * self.per_kv(), ..rows }
    }
    /// The rows of a unit.
    fn unit_rows(&self, rows: Rows) -> usize {
        rows.n_slots * self.per_kv()
    }
    fn unit_slots(&self) -> usize {
        (UNIT_ROWS / self.per_kv()).max(1)
    }

    /// Computes attention for the queries that `query(token, head)` returns and passes every output row to `put`.
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
            Rows { head, first_slot, n_slots: unit_slots.min(slots - first_slot), together: 0 }
        };
        let Range { start: first, end } = self.splits();
        let n_splits = (end - first) as usize;
        // One state per unit. If there are few units and enough room: one state per unit and split.
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
            if per_unit == 1 {
                self.finish(rows, states);
            }
        });
        let of_unit = per_unit * unit_state;
        if per_unit > 1 {
            let merge = |unit: usize, all: &mut [f32]| {
                let (total, others) = all.split_at_mut(unit_state);
                for other in others.chunks_exact(unit_state) {
                    self.merge(total, other, self.unit_rows(rows(unit)));
                }
                self.finish(rows(unit), total);
            };
            match states.len() >= MERGED_ALONE {
                true => {
                    let mut no_scratch = vec![(); compute.threads.n()]; // takes no memory
                    compute.threads.parts(states, of_unit, &mut no_scratch, |unit, all, ()| merge(unit, all));
                }
                false => {
                    states.chunks_exact_mut(of_unit).enumerate().for_each(|(unit, all)| merge(unit, all));
                }
            }
        }
        for (unit, all) in states.chunks_exact(of_unit).enumerate() {
            let rows = rows(unit);
            for (i, row) in all.chunks_exact(state).take(self.unit_rows(rows)).enumerate() {
                let token = self.reads.order[rows.first_slot + i / per_kv] as usize;
                put(token, rows.head * per_kv + i % per_kv, &row[..self.head_dim]);
            }
        }
    }

    /// Turns the sums of a unit into outputs: divides by the norms, and restores the order of the channels.
    fn finish(&self, rows: Rows, states: &mut [f32]) {
        let per_kv = self.per_kv();
        for (i, row) in states.chunks_exact_mut(self.state()).take(self.unit_rows(rows)).enumerate() {
            let (sums, norms) = row.split_at_mut(self.head_dim);
            let factor = self.factor(rows.head * per_kv + i % per_kv, norms);
            sums.iter_mut().for_each(|x| *x *= factor);
            self.values.restore(rows.head, sums);
        }
    }

    /// Processes the splits one after the other and merges them in order into `total`.
    fn unit<'q>(
        &self,
        compute: &Compute,
        rows: Rows,
        splits: Range<u32>,
        total: &mut [f32],
        scratch: &mut ThreadScratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
    ) {
        let (n_rows, rows) = (self.unit_rows(rows), self.counted(compute, rows));
        scratch.tile_items.begin();
        self.prepare(compute, rows, scratch, query);
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

    /// Converts the queries for the kernels: transformed if K is stored transformed, scaled, in units for packed keys.
    fn prepare<'q>(
        &self,
        compute: &Compute,
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
        let products = self.pairs(compute, self.keys, rows);
        let words = compute.isa.multiplies_words();
        for i in 0..n {
            let row = &mut scratch.row[..head_dim];
            let token = self.reads.order[rows.first_slot + i / per_kv] as usize;
            if self.recent.is_some_and(|recent| recent.has_keys()) {
                let width = head_dim.next_multiple_of(LANES);
                let (plain, behind) = scratch.plain[i * width..(i + 1) * width].split_at_mut(head_dim);
                let query = query(token, rows.head * per_kv + i % per_kv);
                plain.iter_mut().zip(query).for_each(|(out, x)| *out = x * scale);
                behind.fill(0.0);
            }
            self.keys.transform(rows.head, query(token, rows.head * per_kv + i % per_kv), row);
            row.iter_mut().for_each(|x| *x *= scale);
            if let Some(products) = products {
                let (precision, split) = (products.precision(), &mut scratch.split_queries[..]);
                compute.isa.run(SplitRow { precision, row, at: i, rows: n, split });
                continue;
            }
            match keys.storage.dtype {
                DType::Q8 => scratch.packed[i].pack_bytes(words, row, keys.group),
                DType::Q4 => scratch.packed[i].pack_nibbles(row, keys.group),
                DType::T4 => scratch.packed[i].pack_outliers(words, row, keys.group),
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
            row[self.head_dim + LANES] = NO_SCORE;
        }
    }

    /// `total ⊕ other`, row by row: exact rescaling, then one addition each.
    fn merge(&self, total: &mut [f32], other: &[f32], n_rows: usize) {
        let at = self.head_dim + LANES;
        let states = total.chunks_exact_mut(self.state()).zip(other.chunks_exact(self.state()));
        for (total, other) in states.take(n_rows) {
            if other[at] == NO_SCORE {
                continue;
            }
            let max = if total[at] > other[at] { total[at] } else { other[at] };
            let (a, b) = (softmax::power(total[at] - max), softmax::power(other[at] - max));
            total[at] = max;
            total[..at].iter_mut().zip(other).for_each(|(x, y)| *x = *x * a + y * b);
        }
    }

    /// Processes the parts of the items that lie in one split. Splits must come in order.
    fn split(
        &self,
        compute: &Compute,
        rows: Rows,
        split: u32,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        self.tiles_of(compute, rows, split, scratch, |slots, tile, scratch| {
            self.block(compute, rows, slots, tile, states, scratch);
        });
    }

    /// Calls `each` with the tiles of one split in order, and for each of them with all blocks of slots.
    fn tiles_of(
        &self,
        compute: &Compute,
        rows: Rows,
        split: u32,
        scratch: &mut ThreadScratch,
        mut each: impl FnMut(Range<u32>, &Tile, &mut ThreadScratch),
    ) {
        let (from, until) = (split * SPLIT, split.saturating_add(1).saturating_mul(SPLIT));
        let slots = rows.slots();
        let n_rows = rows.n_slots * self.per_kv();
        let pairs = [self.keys, self.values].iter().any(|side| self.pairs(compute, side, rows).is_some());
        let (len, block_rows) = match pairs {
            true => (LONG_TILE, n_rows),
            false if n_rows <= LONG_TILE_ROWS => (LONG_TILE, BLOCK_ROWS),
            false => (TILE, BLOCK_ROWS),
        };
        let at_once = (block_rows / self.per_kv()).max(1) as u32;
        for start in (from..until).step_by(len) {
            let tile = Tile { indices: start..start.saturating_add(len as u32).min(until), len };
            if !scratch.tile_items.reach(&self.reads.items, &slots, &tile.indices) {
                continue;
            }
            let mut first = slots.start;
            while first < slots.end {
                let end = slots.end.min(first + at_once);
                each(first..end, &tile, scratch);
                first = end;
            }
        }
    }
}
