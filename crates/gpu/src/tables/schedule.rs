//! Tiles, the units of every split, and which work item goes through which units.
//!
//! A wide tile covers slots of several spans whose reads have cells in common. In each split either the wide tile is a unit
//! and reads these cells once, or the tiles of its spans are units of their own: whichever visits fewer cells, counted
//! once per workgroup. Every slot meets the same cells in the same order either way, and sums of splits are added up in
//! order, so its result has the same bits.
use super::entries::{Entry, Part, Tile};
use super::{DIRECT, PARTIAL_SLOTS, TILE};
use kvist_cache::{PlannedSpan, Reads};
use std::ops::Range;

/// With as many tiles as this, a work item goes through all units of a tile.
const MANY_TILES: usize = 64;

/// A tile of several spans, or of one; its spans' own tiles are `own` of all tiles.
#[derive(Clone, Debug, Default)]
pub struct Wide {
    tile: Tile,
    own: Range<usize>,
    /// The splits that any slot sees, and whether the wide tile is the unit there.
    splits: Vec<(u32, bool)>,
}

impl AsMut<Tile> for Wide {
    fn as_mut(&mut self) -> &mut Tile {
        &mut self.tile
    }
}

/// The sections that say which work item computes what.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    pub work: Vec<[u32; 4]>,
    pub merges: Vec<[u32; 4]>,
    pub lists: Vec<u32>,
    pub units: Vec<[u32; 4]>,
    pub entries: Vec<Entry>,
    /// (slot, partial), in the order of splits.
    partials: Vec<(u32, u32)>,
    n_partials: u32,
}

/// Cuts the slots into tiles of up to [`TILE`] slots of one span, and into wide tiles, which may continue from one span to
/// the next if both read some item.
pub fn cut(
    reads: &Reads,
    spans: &[PlannedSpan],
    linked: &mut Vec<bool>,
    tiles: &mut Vec<Tile>,
    wide: &mut Vec<Wide>,
) {
    linked.clear();
    linked.resize(reads.order.len(), false);
    for item in reads.items.iter().filter(|item| item.n_queries > 1) {
        let (first, last) = (item.first_query as usize, (item.first_query + item.n_queries - 1) as usize);
        linked[first..last].fill(true); // slot i and slot i + 1
    }
    let span_of = |token: u32| spans.partition_point(|span| span.first_token + span.n_tokens <= token);
    let (mut n_tiles, mut n_wide, mut last) = (0, 0, usize::MAX);
    for (slot, token) in (0u32..).zip(&reads.order) {
        let span = span_of(*token);
        let continues = slot > 0 && (span == last || linked[slot as usize - 1]);
        if !continues || wide[n_wide - 1].tile.n_slots == TILE {
            reuse(wide, n_wide);
            begin(&mut wide[n_wide].tile, slot);
            wide[n_wide].own = n_tiles..n_tiles;
            n_wide += 1;
        } else {
            wide[n_wide - 1].tile.n_slots += 1;
        }
        let new = wide[n_wide - 1].own.is_empty();
        if new || span != last {
            reuse(tiles, n_tiles);
            begin(&mut tiles[n_tiles], slot);
            n_tiles += 1;
            wide[n_wide - 1].own.end = n_tiles;
        } else {
            tiles[n_tiles - 1].n_slots += 1;
        }
        last = span;
    }
    tiles.truncate(n_tiles);
    wide.truncate(n_wide);
}

/// Makes room for element `n`, and keeps the memory of those that there are.
fn reuse<T: Default>(all: &mut Vec<T>, n: usize) {
    if n == all.len() {
        all.push(T::default());
    }
}

fn begin(tile: &mut Tile, slot: u32) {
    (tile.first_slot, tile.n_slots, tile.low) = (slot, 1, 0);
    tile.parts.clear();
}

/// Cells that the workgroups of a unit visit, with so many query heads per KV head and query rows per workgroup.
fn visits(parts: &[Part], n_slots: u32, (per_kv, rows): (u32, u32)) -> u64 {
    let cells: u64 = parts.iter().map(|part| u64::from(part.cells())).sum();
    cells * u64::from((n_slots * per_kv).div_ceil(rows))
}

impl Wide {
    /// How many query slots it has.
    pub fn slots(&self) -> u32 {
        self.tile.n_slots
    }

    /// Chooses the units of every split.
    fn choose(&mut self, tiles: &[Tile], per_workgroup: (u32, u32)) {
        let Wide { tile, own, splits } = self;
        let own = &tiles[own.clone()];
        splits.clear();
        splits.extend(tile.parts.chunk_by(|a, b| a.split == b.split).map(|parts| {
            let split = parts[0].split;
            let apart: u64 =
                own.iter().map(|own| visits(own.of_split(split), own.n_slots, per_workgroup)).sum();
            (split, own.len() > 1 && visits(parts, tile.n_slots, per_workgroup) <= apart)
        }));
    }

    /// The units of a split: tiles with cells in it.
    fn units<'t>(
        &'t self,
        tiles: &'t [Tile],
        (split, shared): (u32, bool),
    ) -> impl Iterator<Item = &'t Tile> {
        let wide = shared.then_some(&self.tile);
        let own = if shared { &[] } else { &tiles[self.own.clone()] };
        wide.into_iter().chain(own).filter(move |tile| !tile.of_split(split).is_empty())
    }

    /// Partial states if every unit has a work item of its own, except that the first `folded` splits are one.
    fn partials(&self, tiles: &[Tile], folded: usize) -> u32 {
        let first = if folded > 0 { self.tile.n_slots } else { 0 };
        let units = self.splits[folded..].iter().flat_map(|split| self.units(tiles, *split));
        units.fold(first, |sum, tile| sum.saturating_add(tile.n_slots))
    }

    /// Leading splits whose unit is the wide tile.
    fn leading(&self) -> usize {
        self.splits.iter().take_while(|(_, shared)| *shared).count()
    }

    /// Whether each tile has the same slots in every split.
    fn is_even(&self) -> bool {
        self.splits.windows(2).all(|two| two[0].1 == two[1].1)
    }
}

impl Schedule {
    /// Fills the sections, for query heads per KV head and query rows per workgroup. `push` adds an entry with the lists of its recent rows, for a tile's lowest recent position.
    pub fn make(
        &mut self,
        tiles: &[Tile],
        wide: &mut [Wide],
        per_workgroup: (u32, u32),
        mut push: impl FnMut(&Entry, u32, &mut Vec<Entry>),
    ) {
        self.work.clear();
        self.merges.clear();
        self.lists.clear();
        self.units.clear();
        self.entries.clear();
        self.partials.clear();
        self.n_partials = 0;
        wide.iter_mut().for_each(|wide| wide.choose(tiles, per_workgroup));
        let total = |folded: fn(&Wide) -> usize| {
            wide.iter().fold(0u32, |sum, wide| sum.saturating_add(wide.partials(tiles, folded(wide))))
        };
        let several = tiles.iter().any(|tile| tile.parts.windows(2).any(|two| two[0].split != two[1].split));
        let apart = several && tiles.len() < MANY_TILES && total(|_| 0) <= PARTIAL_SLOTS;
        for wide in wide.iter_mut() {
            if apart {
                self.split_by_split(wide, tiles, 0, &mut push);
                continue;
            }
            let folded = wide.leading();
            if !wide.is_even() && self.n_partials.saturating_add(wide.partials(tiles, folded)) > PARTIAL_SLOTS
            {
                wide.splits.iter_mut().for_each(|split| split.1 = false);
            }
            match wide.is_even() {
                true => self.direct(wide, tiles, &mut push),
                false => self.split_by_split(wide, tiles, folded, &mut push),
            }
        }
        self.merge();
    }

    /// A work item for every unit; one for the first `folded` splits together, whose unit is the wide tile.
    fn split_by_split(
        &mut self,
        wide: &Wide,
        tiles: &[Tile],
        folded: usize,
        push: &mut impl FnMut(&Entry, u32, &mut Vec<Entry>),
    ) {
        let first = self.units.len() as u32;
        for split in &wide.splits[..folded] {
            self.unit(&wide.tile, split.0, push);
        }
        if folded > 0 {
            self.partial_work(first, &wide.tile);
        }
        for split in &wide.splits[folded..] {
            for tile in wide.units(tiles, *split) {
                let first = self.units.len() as u32;
                self.unit(tile, split.0, push);
                self.partial_work(first, tile);
            }
        }
    }

    fn partial_work(&mut self, first_unit: u32, tile: &Tile) {
        self.work.push([first_unit, self.units.len() as u32, self.n_partials, 0]);
        self.partials.extend((0..tile.n_slots).map(|i| (tile.first_slot + i, self.n_partials + i)));
        self.n_partials += tile.n_slots;
    }

    /// One work item per tile that goes through all of its units.
    fn direct(&mut self, wide: &Wide, tiles: &[Tile], push: &mut impl FnMut(&Entry, u32, &mut Vec<Entry>)) {
        let shared = wide.splits.first().is_some_and(|split| split.1);
        let own = if shared { std::slice::from_ref(&wide.tile) } else { &tiles[wide.own.clone()] };
        for tile in own {
            let first = self.units.len() as u32;
            for parts in tile.parts.chunk_by(|a, b| a.split == b.split) {
                self.unit(tile, parts[0].split, push);
            }
            if self.units.len() as u32 > first {
                self.work.push([first, self.units.len() as u32, DIRECT, 0]);
            }
        }
    }

    fn unit(&mut self, tile: &Tile, split: u32, push: &mut impl FnMut(&Entry, u32, &mut Vec<Entry>)) {
        let first = self.entries.len();
        for part in tile.of_split(split) {
            push(&part.entry, tile.low, &mut self.entries);
        }
        // The first word becomes the number of cells before the entry.
        let mut cells = 0;
        for entry in &mut self.entries[first..] {
            cells += std::mem::replace(&mut entry.0[0], cells);
        }
        self.units.push([tile.first_slot, tile.n_slots, first as u32, self.entries.len() as u32]);
        let mut end = Entry::default();
        end.0[0] = cells;
        self.entries.push(end);
    }

    /// Lists the partial states of every slot.
    fn merge(&mut self) {
        let Schedule { partials, merges, lists, .. } = self;
        partials.sort_by_key(|(slot, _)| *slot); // stable: a slot's splits stay in order
        for of_slot in partials.chunk_by(|a, b| a.0 == b.0) {
            merges.push([of_slot[0].0, lists.len() as u32, of_slot.len() as u32, 0]);
            lists.extend(of_slot.iter().map(|(_, partial)| *partial));
        }
    }
}
