//! The parts of the reads' items that a tile sees.
use super::{ENTRY, NONE};
use kvist_cache::{Mask, ReadItem, Reads};

/// Consecutive cells of one item; the words are those of the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Entry(pub [u32; ENTRY]);

/// Neighbouring query slots, and what they see.
#[derive(Clone, Debug, Default)]
pub struct Tile {
    pub first_slot: u32,
    pub n_slots: u32,
    /// The lowest sequence position that any slot may read from a recent row.
    pub low: u32,
    /// In order of the sequence.
    pub parts: Vec<Part>,
}

/// Cells that a tile sees in one split. The number of cells is in the entry's first word, until units are made.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    pub split: u32,
    pub entry: Entry,
}

impl AsMut<Tile> for Tile {
    fn as_mut(&mut self) -> &mut Tile {
        self
    }
}

impl Part {
    pub fn cells(&self) -> u32 {
        self.entry.0[0]
    }
}

impl Tile {
    pub fn end_slot(&self) -> u32 {
        self.first_slot + self.n_slots
    }

    /// The parts in a split.
    pub fn of_split(&self, split: u32) -> &[Part] {
        let first = self.parts.partition_point(|part| part.split < split);
        let end = self.parts.partition_point(|part| part.split <= split);
        &self.parts[first..end]
    }
}

impl Entry {
    /// The same entry over `len` cells that begin `skip` cells later.
    fn part(&self, skip: u32, len: u32) -> Entry {
        let mut words = self.0;
        words[0] = len;
        words[1] += skip;
        words[2] += skip;
        Entry(words)
    }

    pub fn without_recents(mut self) -> Entry {
        self.0[8] = NONE;
        self
    }

    /// Adds this entry, whose cells begin at the position in its last word, to `out`. Cells from position `low` on are in an
    /// entry of their own with a list of their recent rows, if any of them has one.
    pub fn push_with_recents(
        &self,
        low: u32,
        lists: &mut Vec<u32>,
        out: &mut Vec<Entry>,
        row_of: impl Fn(u32) -> [u32; 2],
    ) {
        let (len, first_cell, index) = (self.0[0], self.0[1], self.0[8]);
        let plain = low.saturating_sub(index).min(len);
        let entry = self.without_recents();
        let list = lists.len();
        lists.extend((plain..len).flat_map(|cell| row_of(first_cell + cell)));
        let without = lists[list..].chunks_exact(2).all(|pair| pair[0] == NONE);
        if without {
            lists.truncate(list);
            return out.push(entry);
        }
        if plain > 0 {
            out.push(entry.part(0, plain));
        }
        let mut near = entry.part(plain, len - plain);
        near.0[8] = list as u32;
        out.push(near);
    }
}

/// Collects the masks that are bits; `firsts` has the first bit of every item.
pub fn push_bits(reads: &Reads, bits: &mut Vec<u32>, firsts: &mut Vec<u32>) {
    bits.clear();
    firsts.clear();
    for item in &reads.items {
        let first_bit = (bits.len() * 32) as u32;
        firsts.push(first_bit);
        if let Mask::Bits { .. } = item.mask {
            let n = item.n_queries as usize * item.run.len as usize;
            bits.resize(bits.len() + n.div_ceil(32), 0);
            for query in 0..item.n_queries {
                for cell in (0..item.run.len).filter(|cell| reads.sees(item, query, *cell)) {
                    let bit = first_bit + query * item.run.len + cell;
                    bits[bit as usize / 32] |= 1 << (bit % 32);
                }
            }
        }
    }
}

/// The words of an item's mask: its kind, a and b.
fn mask_words(item: &ReadItem, first_bit: u32) -> [u32; 3] {
    match item.mask {
        Mask::All => [0, 0, 0],
        Mask::Band { first, end } => {
            // Cells and queries are far fewer than 2^30, so a clamped edge is as good as an open one.
            let edge = |edge: Option<i64>, open: i64| edge.unwrap_or(open).clamp(-(1 << 30), 1 << 30) as i32;
            [1, edge(first, -(1 << 30)) as u32, edge(end, 1 << 30) as u32]
        }
        Mask::Bits { .. } => [2, first_bit, 0],
    }
}

/// Gives every tile the parts that its slots see, by splits of so many positions. Tiles are in order of their slots.
pub fn distribute(reads: &Reads, first_bits: &[u32], positions: u32, tiles: &mut [impl AsMut<Tile>]) {
    tiles.iter_mut().for_each(|tile| tile.as_mut().parts.clear());
    for (item, first_bit) in reads.items.iter().zip(first_bits) {
        let [kind, a, b] = mask_words(item, *first_bit);
        let end_query = item.first_query + item.n_queries;
        let from = partition(tiles, |tile| tile.end_slot() <= item.first_query);
        for tile in tiles[from..].iter_mut().map(AsMut::as_mut) {
            if tile.first_slot >= end_query {
                break;
            }
            let first = tile.first_slot.max(item.first_query) - item.first_query;
            let last = tile.end_slot().min(end_query) - 1 - item.first_query;
            // Bands move with the query, so their union begins where the first begins and ends where the last ends.
            let mut at = reads.span_of(item, first).start;
            let end = reads.span_of(item, last).end;
            while at < end {
                let index = item.first_index + at;
                let split = index / positions;
                let len = (end - at).min((split + 1) * positions - index);
                let slots = item.n_queries | kind << 24;
                let words =
                    [len, item.run.start + at, at, item.run.len, item.first_query, slots, a, b, index];
                tile.parts.push(Part { split, entry: Entry(words) });
                at += len;
            }
        }
    }
    // Stable: within a split in order of the sequence.
    tiles.iter_mut().for_each(|tile| tile.as_mut().parts.sort_by_key(|part| part.split));
}

/// The first tile that does not satisfy `before`.
fn partition(tiles: &mut [impl AsMut<Tile>], before: impl Fn(&Tile) -> bool) -> usize {
    let (mut low, mut high) = (0, tiles.len());
    while low < high {
        let middle = usize::midpoint(low, high);
        if before(tiles[middle].as_mut()) { low = middle + 1 } else { high = middle }
    }
    low
}
