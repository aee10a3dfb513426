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
mod near;
mod scratch;
mod softmax;

use crate::Compute;
use crate::arch::{Isa, LANES};
use crate::pages::Pages;
use crate::pool::{self, Gather, Lines, QUERY_ROWS, Quads, Queries, Side, Sums};
use crate::rotation::rotate;
use kvist_backend::DType;
use kvist_cache::{Mask, ReadItem, Reads, Run};
pub use scratch::Scratch;
use scratch::{EXTRA, PAD, SPARE, ThreadScratch};
use softmax::{NOTHING, Softmax};
use std::ops::Range;

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

impl Rows {
    fn slots(&self) -> Range<u32> {
        self.first_slot as u32..(self.first_slot + self.n_slots) as u32
    }
}

impl<'l> Layer<'l> {
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
        splits: Range<u32>,
        total: &mut [f32],
        scratch: &mut ThreadScratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
    ) {
        let n_rows = rows.n_slots * self.per_kv();
        scratch.near.begin();
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

    /// What of the items lies in one split; splits come in their order.
    fn split(
        &self,
        compute: &Compute,
        rows: Rows,
        split: u32,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let (from, until) = (split * SPLIT, split.saturating_add(1).saturating_mul(SPLIT));
        let slots = rows.slots();
        let few = rows.n_slots * self.per_kv() <= LONG_TILE_ROWS;
        let len = if few { LONG_TILE } else { TILE };
        let at_once = (BLOCK_ROWS / self.per_kv()).max(1) as u32;
        for start in (from..until).step_by(len) {
            let tile = Tile { indices: start..start.saturating_add(len as u32).min(until), len };
            if !scratch.near.reach(&self.reads.items, &slots, &tile.indices) {
                continue;
            }
            let mut first = slots.start;
            while first < slots.end {
                let end = slots.end.min(first + at_once);
                self.block(compute, rows, first..end, &tile, states, scratch);
                first = end;
            }
        }
    }

    /// Some slots over one tile: scores of everything they see, weights, and sums.
    fn block(
        &self,
        compute: &Compute,
        rows: Rows,
        slots: Range<u32>,
        tile: &Tile,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let (isa, per_kv, state) = (compute.isa, self.per_kv(), self.state());
        let ThreadScratch { near, lines, queries, packed, quads, .. } = scratch;
        let row0 = (slots.start as usize - rows.first_slot) * per_kv;
        let stride = tile.stride();
        let lines = &mut lines[..slots.len() * per_kv * stride];
        let items = |i: usize| &self.reads.items[i];

        // Where somebody sees something.
        let pieces = near.chains().flatten().filter_map(|i| self.piece(items(i), &slots, tile));
        let cells = pieces.map(|piece| piece.cells()).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Some(cells) = cells else { return };
        let vectors = cells.start / LANES..cells.end.div_ceil(LANES);
        for line in lines.chunks_exact_mut(stride) {
            line[vectors.start * LANES..vectors.end * LANES].fill(f32::NEG_INFINITY);
        }

        let mut gather = Gather::new();
        let mut chains = near.chains().peekable();
        while let Some(chain) = chains.next() {
            let theirs = self.rows_of(chain.clone().next().map(items), &slots);
            let first = row0 + theirs.start;
            let mut lines =
                Lines { data: &mut lines[theirs.start * stride..theirs.end * stride], stride, at: 0 };
            let read = Read { head: rows.head, chain: chain.clone().map(items), slots: &slots, tile };
            let (side, next) = match chains.peek().cloned() {
                Some(next) => (self.keys, Some(next)),
                None => (self.values, near.chains().next()),
            };
            let next = next.into_iter().flatten().map(items);
            self.stretches(
                &mut gather,
                self.keys,
                read,
                self.codes(side, rows.head, next, &slots, tile),
                |gather| {
                    let packed =
                        if packed.is_empty() { &[][..] } else { &packed[first..first + theirs.len()] };
                    let queries = Queries { n: theirs.len(), rows: queries, first, packed };
                    self.score(isa, gather, queries, lines.reborrow(gather.at()));
                },
            );
            for item in chain.map(items) {
                self.hide(item, &slots, tile, lines.reborrow(0));
            }
        }

        let states = &mut states[row0 * state..(row0 + slots.len() * per_kv) * state];
        isa.run(Softmax {
            lines: &mut *lines,
            stride,
            vectors,
            softcap: self.softcap,
            states: &mut *states,
            head_dim: self.head_dim,
        });

        let mut chains = near.chains().peekable();
        while let Some(chain) = chains.next() {
            let theirs = self.rows_of(chain.clone().next().map(items), &slots);
            let mut lines =
                Lines { data: &mut lines[theirs.start * stride..theirs.end * stride], stride, at: 0 };
            let states = &mut states[theirs.start * state..theirs.end * state];
            let read = Read { head: rows.head, chain: chain.map(items), slots: &slots, tile };
            let next = chains.peek().cloned().into_iter().flatten().map(items);
            let next = self.codes(self.values, rows.head, next, &slots, tile);
            let behind = near
                .behind(&self.reads.items, tile.indices.end)
                .flat_map(|(item, offset)| (item.run.start + offset..item.run.end()).step_by(LANES));
            let next = next.chain(behind.map(|cell| self.keys.codes(self.slabs, rows.head, cell)));
            self.stretches(&mut gather, self.values, read, next, |gather| {
                let sums = Sums { n: theirs.len(), data: &mut *states, first: 0, stride: state };
                self.weigh(isa, gather, lines.reborrow(gather.at()), sums, quads);
            });
        }
    }

    /// Which rows of a block of `slots` an item is for.
    fn rows_of(&self, item: Option<&ReadItem>, slots: &Range<u32>) -> Range<usize> {
        let (first, end) = item.map_or((0, 0), |item| (item.first_query, item.first_query + item.n_queries));
        let row = |slot: u32| (slot.clamp(slots.start, slots.end) - slots.start) as usize * self.per_kv();
        row(first)..row(end)
    }

    /// What `slots` see of `item` in `tile`.
    fn piece(&self, item: &ReadItem, slots: &Range<u32>, tile: &Tile) -> Option<Piece> {
        let first = item.first_query.max(slots.start);
        let end = (item.first_query + item.n_queries).min(slots.end);
        if first >= end {
            return None;
        }
        let offset = |index: u32| index.saturating_sub(item.first_index).min(item.run.len);
        let cells = offset(tile.indices.start)..offset(tile.indices.end);
        // Bands move with the query, so those of the first and the last one bound what any of them sees.
        let a = self.reads.span_of(item, first - item.first_query);
        let b = self.reads.span_of(item, end - 1 - item.first_query);
        let seen = a.start.min(b.start).max(cells.start)..a.end.max(b.end).min(cells.end);
        if seen.is_empty() {
            return None;
        }
        Some(Piece { slots: first..end, at: tile.place(item.first_index + seen.start), seen })
    }

    /// Codes of `side`, block by block, of what `slots` see of `chain`.
    fn codes<'i>(
        &'i self,
        side: &'i Side,
        head: usize,
        chain: impl Iterator<Item = &'i ReadItem>,
        slots: &'i Range<u32>,
        tile: &'i Tile,
    ) -> impl Iterator<Item = &'l [u8]> {
        let runs = chain.filter_map(|item| Some(self.piece(item, slots, tile)?.run(item)));
        let cells = runs.flat_map(|run| (run.start..run.end()).step_by(LANES));
        cells.map(move |cell| side.codes(self.slabs, head, cell))
    }

    /// The blocks of `side` that are read, as many at a time as follow each other. `next` are the codes that are worked
    /// on then.
    fn stretches<'i>(
        &self,
        gather: &mut Gather<'l>,
        side: &Side,
        read: Read<'_, impl Iterator<Item = &'i ReadItem>>,
        next: impl Iterator<Item = &'l [u8]>,
        mut each: impl FnMut(&Gather<'_>),
    ) {
        let (slots, tile, mut goes_on) = (read.slots, read.tile, false);
        for item in read.chain {
            if let Some(piece) = self.piece(item, slots, tile) {
                gather.add(side, self.slabs, read.head, piece.run(item), piece.at, &mut each);
                goes_on = piece.seen.end < item.run.len;
            }
        }
        // What goes on in memory was fetched on its way.
        match goes_on {
            true => gather.finish(std::iter::empty(), each),
            false => gather.finish(next, each),
        }
    }

    /// Scores of what was gathered; what stands beside it in the lines is as it was, and −∞ behind it.
    fn score(&self, isa: Isa, gather: &Gather<'_>, queries: Queries<'_>, mut lines: Lines<'_>) {
        let (blocks, [before, behind]) = (gather.blocks(self.keys, false), gather.beside());
        let (stride, dtype) = (lines.stride, self.keys.shape.storage.dtype);
        if before.is_empty() && behind.is_empty() {
            return pool::scores(isa, dtype, queries, blocks, lines);
        }
        for line in lines.data.chunks_exact_mut(stride) {
            line.copy_within(before.clone(), stride - SPARE);
        }
        pool::scores(isa, dtype, queries, blocks, lines.reborrow(gather.at()));
        for line in lines.data.chunks_exact_mut(stride) {
            line.copy_within(stride - SPARE..stride - SPARE + before.len(), before.start);
            line[behind.clone()].fill(f32::NEG_INFINITY);
        }
    }

    /// −∞ where a row does not see a cell of the item.
    fn hide(&self, item: &ReadItem, slots: &Range<u32>, tile: &Tile, lines: Lines<'_>) {
        let (Some(piece), false) = (self.piece(item, slots, tile), item.mask == Mask::All) else { return };
        for (r, line) in lines.data.chunks_exact_mut(lines.stride).enumerate() {
            let slot = piece.slots.start - item.first_query + (r / self.per_kv()) as u32;
            let span = self.reads.span_of(item, slot);
            let line = &mut line[piece.cells()];
            let offset =
                |cell: u32| (cell.clamp(piece.seen.start, piece.seen.end) - piece.seen.start) as usize;
            line[..offset(span.start)].fill(f32::NEG_INFINITY);
            line[offset(span.end).max(offset(span.start))..].fill(f32::NEG_INFINITY);
            if matches!(item.mask, Mask::Bits { .. }) {
                for cell in piece.seen.clone().filter(|cell| !self.reads.sees(item, slot, *cell)) {
                    line[offset(cell)] = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// `sums += Σ weight · value` of what was gathered.
    fn weigh(&self, isa: Isa, gather: &Gather<'_>, mut lines: Lines<'_>, sums: Sums<'_>, quads: &mut Quads) {
        let (blocks, [before, behind]) = (gather.blocks(self.values, self.exact), gather.beside());
        let (stride, dtype) = (lines.stride, self.values.shape.storage.dtype);
        if before.is_empty() && behind.is_empty() {
            return pool::accumulate(isa, dtype, lines, blocks, sums, quads);
        }
        // Packed values are weighed by whole blocks, and what stands beside may be weights of other cells.
        let spare = stride - SPARE;
        for line in lines.data.chunks_exact_mut(stride) {
            for (range, at) in [(&before, spare), (&behind, spare + PAD)] {
                line.copy_within(range.clone(), at);
                line[range.clone()].fill(0.0);
            }
        }
        pool::accumulate(isa, dtype, lines.reborrow(gather.at()), blocks, sums, quads);
        for line in lines.data.chunks_exact_mut(stride) {
            for (range, at) in [(&before, spare), (&behind, spare + PAD)] {
                line.copy_within(at..at + range.len(), range.start);
            }
        }
    }
}

/// Items that follow each other, read by some slots in one tile.
struct Read<'r, C> {
    head: usize,
    chain: C,
    slots: &'r Range<u32>,
    tile: &'r Tile,
}

/// What some slots see of an item in a tile.
struct Piece {
    slots: Range<u32>,
    /// Offsets into the item.
    seen: Range<u32>,
    /// Where the first of them stands in a line.
    at: usize,
}

impl Piece {
    /// Where they stand in a line.
    fn cells(&self) -> Range<usize> {
        self.at..self.at + self.seen.len()
    }
    fn run(&self, item: &ReadItem) -> Run {
        Run { start: item.run.start + self.seen.start, len: self.seen.end - self.seen.start }
    }
}

/// Neighbouring positions of the sequence. A line holds the scores of a row: a pad, a place for each position, a pad, since
/// blocks of cells stick out of what is seen; and [`SPARE`].
struct Tile {
    indices: Range<u32>,
    len: usize,
}

impl Tile {
    fn stride(&self) -> usize {
        self.len + 2 * PAD + SPARE
    }
    fn place(&self, index: u32) -> usize {
        PAD + (index - self.indices.start) as usize
    }
}
