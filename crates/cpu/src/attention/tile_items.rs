//! Finds the items that reach into a tile, and links those that continue each other.
//!
//! The blocks of a sequence may lie anywhere, and each is then a separate item. Kernels want long stretches. So items
//! of a tile that belong to the same queries and follow each other are linked into a chain, and a chain is read in one
//! go. The cells of a chain are contiguous in the sequence. Reading chains in the order of their beginnings visits the
//! cells of every query in sequence order.
use kvist_cache::ReadItem;
use std::ops::Range;

const NONE: u32 = u32::MAX;

/// Walks the items tile by tile, for a range of query slots.
#[derive(Default)]
pub struct TileItems {
    /// Items before this one have been visited.
    cursor: usize,
    /// The items that reach into the tile, in order.
    items: Vec<Link>,
    /// First link of each chain, in the order of the items.
    chains: Vec<u32>,
    /// By slot: the last link of the newest chain whose queries begin at the slot.
    ends: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Link {
    item: u32,
    /// Index into the links of the same tile.
    next: u32,
}

fn end(item: &ReadItem) -> u32 {
    item.first_index.saturating_add(item.run.len)
}

impl TileItems {
    /// Reserves room for `slots` query slots with several items each.
    pub fn new(slots: usize) -> Self {
        let items = 4 * slots + 16;
        TileItems {
            cursor: 0,
            items: Vec::with_capacity(items),
            chains: Vec::with_capacity(items),
            ends: Vec::with_capacity(slots),
        }
    }

    /// Bytes that [`new`](Self::new) reserves.
    pub fn bytes(slots: usize) -> usize {
        (4 * slots + 16) * (size_of::<Link>() + 4) + 4 * slots
    }

    /// Starts over from the first item.
    pub fn begin(&mut self) {
        self.cursor = 0;
        self.items.clear();
    }

    /// Advances to `tile`, a range of sequence positions after that of the last call. Collects the `items` (sorted by
    /// first index) that concern `slots`. Returns `false` if there are none.
    pub fn reach(&mut self, items: &[ReadItem], slots: &Range<u32>, tile: &Range<u32>) -> bool {
        self.items.retain(|link| end(&items[link.item as usize]) > tile.start);
        while let Some(item) = items.get(self.cursor).filter(|item| item.first_index < tile.end) {
            let concerns_slots =
                item.first_query < slots.end && slots.start < item.first_query + item.n_queries;
            if concerns_slots && end(item) > tile.start {
                self.items.push(Link { item: self.cursor as u32, next: NONE });
            }
            self.cursor += 1;
        }
        self.chain(items, slots);
        !self.items.is_empty()
    }

    fn chain(&mut self, items: &[ReadItem], slots: &Range<u32>) {
        self.chains.clear();
        self.ends.clear();
        self.ends.resize(slots.len(), NONE);
        for i in 0..self.items.len() {
            let item = &items[self.items[i].item as usize];
            self.items[i].next = NONE;
            // Items that begin before `slots` are filed under its first slot. They share that slot, so they cannot both
            // begin a stretch there.
            let newest = &mut self.ends[(item.first_query.max(slots.start) - slots.start) as usize];
            let last = std::mem::replace(newest, i as u32);
            let continues = last != NONE && {
                let last = &items[self.items[last as usize].item as usize];
                (last.first_query, last.n_queries) == (item.first_query, item.n_queries)
                    && end(last) == item.first_index
            };
            match continues {
                true => self.items[last as usize].next = i as u32,
                false => self.chains.push(i as u32),
            }
        }
    }

    /// First the items that reach past `tile_end`, then those that begin after the tile; each with the offset of its
    /// first cell past the tile.
    pub fn behind<'n>(
        &'n self,
        items: &'n [ReadItem],
        tile_end: u32,
    ) -> impl Iterator<Item = (&'n ReadItem, u32)> {
        let on =
            self.items.iter().map(|link| &items[link.item as usize]).filter(move |item| end(item) > tile_end);
        on.map(move |item| (item, tile_end - item.first_index))
            .chain(items[self.cursor..].iter().map(|item| (item, 0)))
    }

    /// The item numbers of each chain; chains are ordered by their beginnings.
    pub fn chains(&self) -> impl Iterator<Item = impl Iterator<Item = usize> + Clone + '_> + '_ {
        let link = |i: u32| self.items.get(i as usize).copied();
        let chain = move |&first: &u32| {
            std::iter::successors(link(first), move |at| link(at.next)).map(|at| at.item as usize)
        };
        self.chains.iter().map(chain)
    }
}
