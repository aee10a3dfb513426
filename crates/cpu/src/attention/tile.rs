//! Attention of some queries over a tile of neighbouring sequence positions: scores, weights, sums.
//!
//! The visible cells may lie in many places. Every chain of items is gathered into stretches of blocks, as long as
//! possible, for the kernels. Whole blocks extend past the visible cells on both sides; the scores of other cells in
//! those places are saved and restored.
use super::recent::{RecentScores, RecentSums, TileReads};
use super::scratch::{PAD, SPARE, ThreadScratch};
use super::softmax::{Form, Softmax};
use super::{LONG_TILE, Layer, Rows, TILE};
use crate::Compute;
use crate::arch::{Isa, LANES};
use crate::pool::pairs::{self, Asked, MAX_PLACES, Precision, Products, RoundWeights, STEP, SplitQueries};
use crate::pool::{self, Blocks, Gather, Lines, Quads, Queries, RowStore, Sums};
use crate::recent::RecentReads;
use kvist_cache::{CellRun, Mask, ReadItem};
use kvist_device::DType;
use std::ops::Range;

// Steps of places begin where tiles do, and the places of a tile fit into a product.
const _: () = assert!(TILE.is_multiple_of(STEP) && LONG_TILE.is_multiple_of(STEP) && LONG_TILE <= MAX_PLACES);

impl<'l> Layer<'l> {
    /// Computes one tile for some slots: scores of all cells they see, weights, and weighted sums.
    pub(super) fn block(
        &self,
        compute: &Compute,
        rows: Rows,
        slots: Range<u32>,
        tile: &Tile,
        states: &mut [f32],
        scratch: &mut ThreadScratch,
    ) {
        let (isa, per_kv, state) = (compute.isa, self.per_kv(), self.state());
        let part = self.part(rows, &slots, tile);
        let (stride, first_row, n_rows) = (part.stride, part.first_row, slots.len() * per_kv);
        let states = &mut states[first_row * state..(first_row + n_rows) * state];
        let recent_reads = self.recent_reads(rows, &slots, tile);
        let recent_values =
            self.recent.is_some_and(|recent| recent.has_values()) && recent_reads.clone().next().is_some();
        let products = self.pairs(compute, self.values, rows);
        let rounded = products.is_some_and(|products| products.precision() == Precision::Rounded);
        let form = match products.map(Products::precision) {
            None | Some(Precision::Exact) => Form::Floats,
            Some(Precision::Words) => Form::FloatsForWords,
            // Weights of rows that are not read from the pool stay f32.
            Some(Precision::Rounded) if recent_values => Form::FloatsForPairs,
            Some(Precision::Rounded) => Form::Pairs,
        };
        let weights = self.weights(compute, part, form, (&mut *states, self.head_dim), scratch);
        let Some(vectors) = weights else { return };

        let lines = &mut scratch.lines[..n_rows * stride];
        scratch.weights.clear();
        if recent_values {
            for (i, reads) in recent_reads.clone() {
                let lines = &mut lines[i * per_kv * stride..(i + 1) * per_kv * stride];
                reads.take_weights(lines, stride, &mut scratch.weights);
            }
            if rounded {
                isa.run(RoundWeights { lines, stride, vectors: vectors.clone() });
            }
        }
        match products {
            Some(products) => self.sums_of_pairs(products, part, vectors, scratch, states),
            None => self.sums(isa, part, &mut Gather::new(), scratch, states),
        }
        let mut weights = &scratch.weights[..];
        for (i, reads) in recent_reads.filter(|_| !weights.is_empty()) {
            let states = &mut states[i * per_kv * state..(i + 1) * per_kv * state];
            let (row_weights, rest) = weights.split_at(reads.len() * per_kv);
            weights = rest;
            isa.run(RecentSums { reads, weights: row_weights, states, state, head_dim: self.head_dim });
        }
    }

    /// The rows of some of the slots of `rows` in a tile.
    pub(super) fn part<'t>(&self, rows: Rows, slots: &'t Range<u32>, tile: &'t Tile) -> TileRows<'t> {
        let first_row = (slots.start as usize - rows.first_slot) * self.per_kv();
        TileRows { rows, slots, tile, stride: tile.stride(), first_row }
    }

    /// Turns one tile of some slots into weights, in the lines of `scratch`: scores of all cells they see, 0 for other
    /// cells, relative to the maxima in `states`, which have that many sums. Returns which vectors of a line have
    /// weights, in whole [`STEP`]s of places; `None` if no slot sees anything.
    pub(super) fn weights(
        &self,
        compute: &Compute,
        part: TileRows<'_>,
        form: Form,
        (states, head_dim): (&mut [f32], usize),
        scratch: &mut ThreadScratch,
    ) -> Option<Range<usize>> {
        let TileRows { rows, slots, tile, stride, first_row } = part;
        let (isa, per_kv) = (compute.isa, self.per_kv());
        let n_rows = slots.len() * per_kv;

        // The places that any slot sees. If the pieces follow each other without gaps, each for all slots, then the kernels write
        // a score to every one of these places in every line.
        let mut cells: Option<Range<usize>> = None;
        let mut all_written = true;
        for i in scratch.tile_items.chains().flatten() {
            let Some(piece) = self.piece(&self.reads.items[i], slots, tile) else { continue };
            let of_piece = piece.cells();
            all_written &= piece.slots == *slots;
            match &mut cells {
                None => cells = Some(of_piece),
                Some(cells) => {
                    all_written &= cells.end == of_piece.start;
                    *cells = cells.start.min(of_piece.start)..cells.end.max(of_piece.end);
                }
            }
        }
        let cells = cells?;
        let round_down = |place: usize| PAD + (place - PAD) / STEP * STEP;
        let places = round_down(cells.start)..round_down(cells.end + STEP - 1);
        let written = if all_written { cells } else { places.start..places.start };
        for line in scratch.lines[..n_rows * stride].chunks_exact_mut(stride) {
            if cfg!(debug_assertions) {
                line.fill(f32::NAN); // old scores and pairs, which nothing may read
            }
            line[places.start..written.start].fill(f32::NEG_INFINITY);
            line[written.end..places.end].fill(f32::NEG_INFINITY);
        }
        let vectors = places.start / LANES..places.end / LANES;

        self.scores(compute, part, &mut Gather::new(), scratch);
        let lines = &mut scratch.lines[..n_rows * stride];
        if self.recent.is_some_and(|recent| recent.has_keys()) {
            let width = self.head_dim.next_multiple_of(LANES);
            for (i, reads) in self.recent_reads(rows, slots, tile) {
                let lines = &mut lines[i * per_kv * stride..(i + 1) * per_kv * stride];
                let row = first_row + i * per_kv;
                let queries = &scratch.plain[row * width..(row + per_kv) * width];
                isa.run(RecentScores { reads, queries, lines, stride });
            }
        }

        let softcap = self.softcap;
        isa.run(Softmax { lines, stride, vectors: vectors.clone(), softcap, form, states, head_dim });
        Some(vectors)
    }

    /// Writes the scores of all cells that the rows see to the lines of `scratch`, −∞ for cells that a row does not see.
    fn scores(
        &self,
        compute: &Compute,
        part: TileRows<'_>,
        gather: &mut Gather<'l>,
        scratch: &mut ThreadScratch,
    ) {
        let TileRows { rows, slots, tile, stride, first_row } = part;
        let ThreadScratch { tile_items, lines, queries, packed, split_queries, packed_tiles, .. } = scratch;
        let unit_rows = self.unit_rows(rows);
        let products = self.pairs(compute, self.keys, rows);
        let items = |i: usize| &self.reads.items[i];
        let mut chains = tile_items.chains().peekable();
        while let Some(chain) = chains.next() {
            let item_rows = self.rows_of(chain.clone().next().map(items), slots);
            let first = first_row + item_rows.start;
            let mut lines =
                Lines { data: &mut lines[item_rows.start * stride..item_rows.end * stride], stride, at: 0 };
            let soon = Some(self.values);
            let read = Read { head: rows.head, chain: chain.clone().map(items), slots, tile, soon };
            let (side, next) = match chains.peek().cloned() {
                Some(next) => (self.keys, Some(next)),
                None => (self.values, tile_items.chains().next()),
            };
            let next = next.into_iter().flatten().map(items);
            let next = self.codes(side, rows.head, next, slots, tile);
            self.stretches(gather, self.keys, read, next, |gather| {
                let n = item_rows.len();
                let queries = match products {
                    Some(products) => {
                        let queries = SplitQueries { split: split_queries, rows: unit_rows, first, n };
                        Prepared::Pairs(products, Asked { queries, packed: packed_tiles })
                    }
                    None => {
                        let packed = if packed.is_empty() { &[][..] } else { &packed[first..first + n] };
                        Prepared::Vectors(compute.isa, Queries { n, rows: queries, first, packed })
                    }
                };
                self.score(gather, queries, lines.reborrow(gather.at()));
            });
            for item in chain.map(items) {
                self.mask_out(item, slots, tile, lines.reborrow(0));
            }
        }
    }

    /// Adds the values of all cells, weighted by the lines of `scratch`, to `states`, which begin at the first row.
    fn sums(
        &self,
        isa: Isa,
        part: TileRows<'_>,
        gather: &mut Gather<'l>,
        scratch: &mut ThreadScratch,
        states: &mut [f32],
    ) {
        let TileRows { rows, slots, tile, stride, .. } = part;
        let ThreadScratch { tile_items, lines, quads, .. } = scratch;
        let (state, items) = (self.state(), |i: usize| &self.reads.items[i]);
        let mut chains = tile_items.chains().peekable();
        while let Some(chain) = chains.next() {
            let item_rows = self.rows_of(chain.clone().next().map(items), slots);
            let mut lines =
                Lines { data: &mut lines[item_rows.start * stride..item_rows.end * stride], stride, at: 0 };
            let states = &mut states[item_rows.start * state..item_rows.end * state];
            let read = Read { head: rows.head, chain: chain.map(items), slots, tile, soon: None };
            let next = chains.peek().cloned().into_iter().flatten().map(items);
            let next = self.codes(self.values, rows.head, next, slots, tile);
            let behind = tile_items
                .behind(&self.reads.items, tile.indices.end)
                .flat_map(|(item, offset)| (item.run.start + offset..item.run.end()).step_by(LANES));
            let next = next.chain(behind.map(|cell| self.keys.codes(self.slabs, rows.head, cell)));
            self.stretches(gather, self.values, read, next, |gather| {
                let sums = Sums { n: item_rows.len(), data: &mut *states, first: 0, stride: state };
                self.weigh(isa, gather, lines.reborrow(gather.at()), sums, quads);
            });
        }
    }

    /// The recent rows that each of `slots` reads in `tile`, with the slot's index in `slots`.
    fn recent_reads(
        &self,
        rows: Rows,
        slots: &Range<u32>,
        tile: &Tile,
    ) -> impl Iterator<Item = (usize, TileReads<'l>)> + Clone {
        let Range { start, end } = *slots;
        let (reads, indices, first) = (self.reads, tile.indices.clone(), tile.place(tile.indices.start));
        let group = move |recent: RecentReads<'l>| {
            let indices = indices.clone();
            (start..end).enumerate().filter_map(move |(i, slot)| {
                let token = reads.order[slot as usize] as usize;
                let reads = TileReads::new(recent, token, rows.head, &indices, first);
                (reads.len() > 0).then_some((i, reads))
            })
        };
        let reached = tile.indices.end;
        self.recent.filter(|recent| recent.lowest() < reached).into_iter().flat_map(group)
    }

    /// The rows of a block of `slots` that an item applies to.
    fn rows_of(&self, item: Option<&ReadItem>, slots: &Range<u32>) -> Range<usize> {
        let (first, end) = item.map_or((0, 0), |item| (item.first_query, item.first_query + item.n_queries));
        let row = |slot: u32| (slot.clamp(slots.start, slots.end) - slots.start) as usize * self.per_kv();
        row(first)..row(end)
    }

    /// The part of `item` in `tile` that any of `slots` sees.
    pub(super) fn piece(&self, item: &ReadItem, slots: &Range<u32>, tile: &Tile) -> Option<Piece> {
        let first = item.first_query.max(slots.start);
        let end = (item.first_query + item.n_queries).min(slots.end);
        if first >= end {
            return None;
        }
        let offset = |index: u32| index.saturating_sub(item.first_index).min(item.run.len);
        let cells = offset(tile.indices.start)..offset(tile.indices.end);
        // Bands move with the query, so the first and the last query bound what any of them sees.
        let a = self.reads.span_of(item, first - item.first_query);
        let b = self.reads.span_of(item, end - 1 - item.first_query);
        let seen = a.start.min(b.start).max(cells.start)..a.end.max(b.end).min(cells.end);
        if seen.is_empty() {
            return None;
        }
        Some(Piece { slots: first..end, at: tile.place(item.first_index + seen.start), seen })
    }

    /// The codes of `side`, block by block, for the cells of `chain` that `slots` see.
    fn codes<'i>(
        &'i self,
        side: &'i RowStore,
        head: usize,
        chain: impl Iterator<Item = &'i ReadItem>,
        slots: &'i Range<u32>,
        tile: &'i Tile,
    ) -> impl Iterator<Item = &'l [u8]> {
        let runs = chain.filter_map(|item| Some(self.piece(item, slots, tile)?.run(item)));
        let cells = runs.flat_map(|run| (run.start..run.end()).step_by(LANES));
        cells.map(move |cell| side.codes(self.slabs, head, cell))
    }

    /// Calls `each` with the visible blocks of `side`, in stretches as long as possible. `next` yields the codes that
    /// are read afterwards, to prefetch them.
    fn stretches<'i>(
        &self,
        gather: &mut Gather<'l>,
        side: &RowStore,
        read: Read<'_, impl Iterator<Item = &'i ReadItem>>,
        next: impl Iterator<Item = &'l [u8]>,
        mut each: impl FnMut(&Gather<'_>),
    ) {
        let (slots, tile, mut continues) = (read.slots, read.tile, false);
        for item in read.chain {
            if let Some(piece) = self.piece(item, slots, tile) {
                gather.add((side, read.soon), self.slabs, read.head, piece.run(item), piece.at, &mut each);
                continues = piece.seen.end < item.run.len;
            }
        }
        // If the run continues past the tile, the kernel has prefetched what follows in memory.
        match continues {
            true => gather.finish(std::iter::empty(), each),
            false => gather.finish(next, each),
        }
    }

    /// Computes scores of the gathered cells. Keeps the scores in front of them in the lines, and writes −∞ after them.
    fn score(&self, gather: &Gather<'_>, queries: Prepared<'_>, mut lines: Lines<'_>) {
        let (blocks, [before, behind]) = (gather.blocks(self.keys, false), gather.margins());
        let (stride, dtype) = (lines.stride, self.keys.shape.storage.dtype);
        if before.is_empty() && behind.is_empty() {
            return queries.scores(dtype, blocks, lines);
        }
        for line in lines.data.chunks_exact_mut(stride) {
            line.copy_within(before.clone(), stride - SPARE);
        }
        queries.scores(dtype, blocks, lines.reborrow(gather.at()));
        for line in lines.data.chunks_exact_mut(stride) {
            line.copy_within(stride - SPARE..stride - SPARE + before.len(), before.start);
            line[behind.clone()].fill(f32::NEG_INFINITY);
        }
    }

    /// Writes −∞ where a row does not see a cell of the item.
    fn mask_out(&self, item: &ReadItem, slots: &Range<u32>, tile: &Tile, lines: Lines<'_>) {
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

    /// `sums += Σ weight · value` over the gathered cells.
    fn weigh(&self, isa: Isa, gather: &Gather<'_>, mut lines: Lines<'_>, sums: Sums<'_>, quads: &mut Quads) {
        let (mut blocks, [before, behind]) = (gather.blocks(self.values, self.exact), gather.margins());
        // A cell of another sequence changes neither the kernel nor its bits.
        blocks.may_have_nan = blocks.may_have_nan && !blocks.are_finite(&self.values.shape);
        let (stride, dtype) = (lines.stride, self.values.shape.storage.dtype);
        if before.is_empty() && behind.is_empty() {
            return pool::accumulate(isa, dtype, lines, blocks, sums, quads);
        }
        // Packed values are weighted in whole blocks, and the places next to the stretch may contain weights of other
        // cells.
        let saved_at = stride - SPARE;
        for line in lines.data.chunks_exact_mut(stride) {
            for (range, at) in [(&before, saved_at), (&behind, saved_at + PAD)] {
                line.copy_within(range.clone(), at);
                line[range.clone()].fill(0.0);
            }
        }
        pool::accumulate(isa, dtype, lines.reborrow(gather.at()), blocks, sums, quads);
        for line in lines.data.chunks_exact_mut(stride) {
            for (range, at) in [(&before, saved_at), (&behind, saved_at + PAD)] {
                line.copy_within(at..at + range.len(), range.start);
            }
        }
    }
}

/// Queries, prepared for the kernel that computes their scores.
enum Prepared<'q> {
    Vectors(Isa, Queries<'q>),
    Pairs(Products, Asked<'q>),
}

impl Prepared<'_> {
    fn scores(self, dtype: DType, blocks: Blocks<'_>, lines: Lines<'_>) {
        match self {
            Prepared::Vectors(isa, queries) => pool::scores(isa, dtype, queries, blocks, lines),
            Prepared::Pairs(products, asked) => pairs::scores(products, dtype, asked, &blocks, lines),
        }
    }
}

/// The rows of some slots in one tile.
#[derive(Clone, Copy)]
pub(super) struct TileRows<'t> {
    pub rows: Rows,
    pub slots: &'t Range<u32>,
    pub tile: &'t Tile,
    /// Floats of a line.
    pub stride: usize,
    /// The row of the first slot.
    first_row: usize,
}

/// Consecutive items of a chain, read by some slots in one tile.
struct Read<'r, C> {
    head: usize,
    chain: C,
    slots: &'r Range<u32>,
    tile: &'r Tile,
    /// The rows of the same cells that are read afterwards.
    soon: Option<&'r RowStore>,
}

/// The part of an item in a tile that some slots see.
pub(super) struct Piece {
    pub slots: Range<u32>,
    /// Offsets into the item.
    pub seen: Range<u32>,
    /// Place of the first of them in a line.
    pub at: usize,
}

impl Piece {
    /// Their places in a line.
    pub fn cells(&self) -> Range<usize> {
        self.at..self.at + self.seen.len()
    }
    pub fn run(&self, item: &ReadItem) -> CellRun {
        CellRun { start: item.run.start + self.seen.start, len: self.seen.end - self.seen.start }
    }
}

/// Neighbouring sequence positions. A line contains the scores of a row: a pad, one place per position, a pad, and
/// [`SPARE`]. The pads exist because blocks of cells extend past the visible range.
pub(super) struct Tile {
    pub indices: Range<u32>,
    pub len: usize,
}

impl Tile {
    pub fn stride(&self) -> usize {
        self.len + 2 * PAD + SPARE
    }
    pub fn place(&self, index: u32) -> usize {
        PAD + (index - self.indices.start) as usize
    }
}
