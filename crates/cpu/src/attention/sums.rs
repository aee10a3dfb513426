//! Weighted sums of values as products of pairs.
//!
//! A product of pairs adds 32 places of a sequence at once, so each group of 32 places is gathered from wherever its
//! cells lie. Queries whose sequences have the same cells there share a product. Sequences that part ways inside a
//! group have a product each, which repeats the cells they share: the result of a query must not depend on which others share
//! them. (With words it does, a little: the unit of its weights is that of all places of a call.)
use super::scratch::ThreadScratch;
use super::tile::{Tile, TileRows};
use super::tile_items::TileItems;
use super::{Layer, UNIT_ROWS};
use crate::arch::LANES;
use crate::pool::Sums;
use crate::pool::pairs::{self, MAX_PLACES, Places, Products, Room, STEP, Shape, Weights};
use kvist_cache::{CellRun, Mask};
use std::ops::Range;

/// Groups of places of a tile.
const GROUPS: usize = MAX_PLACES / STEP;

/// A bit for each slot at which the cells of a group change: the slots between two of them see the same cells.
type Borders = [u64; UNIT_ROWS / 64 + 1];

/// The slots between neighbouring borders, from slot `first` on.
fn between(borders: &Borders, first: u32) -> impl Iterator<Item = Range<u32>> + '_ {
    let is_border = |bit: &u32| borders[(bit / 64) as usize] >> (bit % 64) & 1 == 1;
    let mut bits = (0..64 * borders.len() as u32).filter(is_border).map(move |bit| first + bit);
    let mut start = bits.next();
    std::iter::from_fn(move || {
        let end = bits.next()?;
        Some(start.replace(end)?..end)
    })
}

impl<'l> Layer<'l> {
    /// Adds the values of all cells of a tile, weighted by the lines of `scratch`, to `states`, which begin at the first
    /// row. `valid` are the vectors of a line that contain weights, as pairs if they are rounded.
    pub(super) fn sums_of_pairs(
        &self,
        products: Products,
        part: TileRows<'_>,
        valid: Range<usize>,
        scratch: &mut ThreadScratch,
        states: &mut [f32],
    ) {
        let TileRows { slots, tile, stride, .. } = part;
        let ThreadScratch { tile_items, lines, packed_tiles, weight_tiles, .. } = scratch;
        let borders = self.borders(tile_items, slots, tile);
        let first_place = tile.place(tile.indices.start);
        let group_of = |vector: usize| (vector * LANES - first_place) / STEP;
        let mut places = Places::new();
        let mut sum = |slots: Range<u32>, groups: &Range<usize>, places: &Places<'l>| {
            let first = (slots.start - part.slots.start) as usize * self.per_kv();
            let n = slots.len() * self.per_kv();
            let at = first_place + groups.start * STEP;
            let weights = Weights { data: &lines[first * stride..], stride, at };
            let state = self.state();
            let sums = Sums { n, data: &mut *states, first: first * state, stride: state };
            let group = self.values.shape.group;
            let shape = Shape { head_dim: self.head_dim, row: self.values.row_codes(), group };
            let room = Room { packed: packed_tiles, split: weight_tiles };
            pairs::accumulate(
                products,
                self.values.shape.storage.dtype,
                (places, shape),
                self.values.may_have_nan().then_some(&self.values.shape),
                weights,
                sums,
                room,
            );
        };
        let (mut start, end) = (group_of(valid.start), group_of(valid.end));
        while start < end {
            let same = borders[start..end].iter().take_while(|b| **b == borders[start]).count();
            let groups = start..start + same;
            start = groups.end;
            for slots in between(&borders[groups.start], slots.start) {
                if self.gather(tile_items, part, &slots, &groups, &mut places) {
                    if !places.is_empty() {
                        sum(slots, &groups, &places);
                    }
                    continue;
                }
                for slot in slots {
                    self.gather(tile_items, part, &(slot..slot + 1), &groups, &mut places);
                    sum(slot..slot + 1, &groups, &places);
                }
            }
        }
    }

    /// For every group of the tile, the slots at which its cells change.
    fn borders(&self, tile_items: &TileItems, slots: &Range<u32>, tile: &Tile) -> [Borders; GROUPS] {
        let mut all = [Borders::default(); GROUPS];
        for item in tile_items.chains().flatten().map(|i| &self.reads.items[i]) {
            let offset = |index: u32| index.clamp(tile.indices.start, tile.indices.end) - tile.indices.start;
            let cells = offset(item.first_index)..offset(item.first_index.saturating_add(item.run.len));
            let groups = cells.start as usize / STEP..(cells.end as usize).div_ceil(STEP);
            let slot = |slot: u32| slot.clamp(slots.start, slots.end) - slots.start;
            let (first, end) = (slot(item.first_query), slot(item.first_query + item.n_queries));
            if first < end {
                for group in &mut all[groups] {
                    for bit in [first, end] {
                        group[(bit / 64) as usize] |= 1 << (bit % 64);
                    }
                }
            }
        }
        all
    }

    /// Collects the values that `slots` see in some groups of the tile. Returns `false` if they do not see the same: a
    /// place has two cells, or a value is not finite and some of the slots may not see it. A single slot always
    /// succeeds.
    fn gather(
        &self,
        tile_items: &TileItems,
        part: TileRows<'_>,
        slots: &Range<u32>,
        groups: &Range<usize>,
        places: &mut Places<'l>,
    ) -> bool {
        let first = part.tile.indices.start + (groups.start * STEP) as u32;
        let end = (part.tile.indices.start + (groups.end * STEP) as u32).min(part.tile.indices.end);
        let range = Tile { indices: first..end, len: part.tile.len };
        let alone = slots.len() == 1;
        places.clear((end - first) as usize);
        for item in tile_items.chains().flatten().map(|i| &self.reads.items[i]) {
            let Some(piece) = self.piece(item, slots, &range) else { continue };
            let place = piece.at - range.place(first);
            if alone && matches!(item.mask, Mask::Bits { .. }) {
                for cell in piece.seen.clone() {
                    if self.reads.sees(item, slots.start - item.first_query, cell) {
                        let run = CellRun { start: item.run.start + cell, len: 1 };
                        self.add(part.rows.head, run, place + (cell - piece.seen.start) as usize, places);
                    }
                }
                continue;
            }
            let finite = alone || self.are_finite(part.rows.head, piece.run(item));
            if !(self.add(part.rows.head, piece.run(item), place, places) && finite) {
                return alone;
            }
        }
        true
    }

    /// Adds the values of a run of cells. Returns `false` if a place is taken.
    fn add(&self, head: usize, run: CellRun, first: usize, places: &mut Places<'l>) -> bool {
        self.values
            .blocks_of(self.slabs, head, run)
            .all(|(block, lanes, offset)| places.add(block, lanes, first + offset))
    }

    fn are_finite(&self, head: usize, run: CellRun) -> bool {
        !self.values.may_have_nan()
            || self
                .values
                .blocks_of(self.slabs, head, run)
                .all(|(block, lanes, _)| self.values.shape.lanes_are_finite(&block, lanes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_between_borders() {
        let mut borders = Borders::default();
        for bit in [0, 3, 64, 256] {
            borders[bit / 64] |= 1 << (bit % 64);
        }
        assert_eq!(between(&borders, 10).collect::<Vec<_>>(), [10..13, 13..74, 74..266]);
        assert_eq!(between(&Borders::default(), 10).count(), 0);
    }
}
