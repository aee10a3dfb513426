//! The blocks of one paged cell space: the ref_count of each block, and which blocks the prefix index caches.
//!
//! A block is *in use* (by at least one sequence or transfer), *evictable* (cached, but not in use), or *free*.
use crate::kinds::free_set::FreeSet;
use crate::plan::{GroupPlan, grown};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

pub(crate) use crate::block_kind::NONE;

#[derive(Clone, Copy)]
struct Block {
    ref_count: u32,
    /// Node in the prefix index; [`NONE`] while the block is not cached.
    node: u32,
}

/// What a transfer does with a block. Each pin and each import is one reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// This many exports read it.
    Pinned(u32),
    /// An import writes it.
    Loading,
}

/// 8 bytes per block and a little over one bit, for blocks up to the highest one ever used.
pub(super) struct Blocks {
    capacity: u32,
    list: Vec<Block>, // the first blocks; all later ones are free
    free: FreeSet,    // of the first blocks
    n_used: u32,
    n_evictable: u32,
    high_water: u32,
    /// Cached blocks that lost their last reference since the index last asked.
    newly_evictable: Vec<u32>,
    /// The blocks in transfer, usually few.
    transfers: BTreeMap<u32, Transfer>,
}

/// The state of a block after a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Released {
    InUse,
    Evictable,
    Freed,
}

impl Blocks {
    pub fn new(capacity: u32) -> Self {
        Blocks {
            capacity,
            list: Vec::new(),
            free: FreeSet::default(),
            n_used: 0,
            n_evictable: 0,
            high_water: 0,
            newly_evictable: Vec::new(),
            transfers: BTreeMap::new(),
        }
    }
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
    pub fn n_free(&self) -> u32 {
        self.capacity - self.n_used
    }
    pub fn n_evictable(&self) -> u32 {
        self.n_evictable
    }
    /// One past the highest block in use.
    pub fn high_water(&self) -> u32 {
        self.high_water
    }
    pub fn ref_count(&self, block: u32) -> u32 {
        self.list.get(block as usize).map_or(0, |b| b.ref_count)
    }
    /// Number of sequences that use `block`: its references without those of transfers.
    pub fn n_sequences(&self, block: u32) -> u32 {
        self.ref_count(block)
            - match self.transfers.get(&block) {
                None => 0,
                Some(Transfer::Pinned(n)) => *n,
                Some(Transfer::Loading) => 1,
            }
    }
    pub fn is_loading(&self, block: u32) -> bool {
        self.transfers.get(&block) == Some(&Transfer::Loading)
    }
    pub fn node(&self, block: u32) -> u32 {
        self.list.get(block as usize).map_or(NONE, |b| b.node)
    }
    /// True if even its only user may not write to the block: another sequence reads it, or it is cached and a hit
    /// may show it to one.
    pub fn is_shared(&self, block: u32) -> bool {
        let b = self.list[block as usize];
        b.ref_count > 1 || b.node != NONE
    }

    pub fn is_used(&self, block: u32) -> bool {
        self.ref_count(block) > 0 || self.node(block) != NONE
    }

    fn is_open(&self, block: u32, plan: &GroupPlan) -> bool {
        let free = match self.list.get(block as usize) {
            Some(b) => b.ref_count == 0 && b.node == NONE,
            None => block < self.capacity,
        };
        free && !plan.claimed(block)
    }

    /// Finds a free block that `plan` has not claimed: the one after `tail` if possible, so that sequences lie in
    /// long runs, or else the lowest. The search for the lowest continues at `from`. The caller has checked that a
    /// free block exists.
    pub fn find(&self, tail: Option<u32>, from: &mut u32, plan: &GroupPlan) -> u32 {
        if let Some(next) = tail.and_then(|tail| tail.checked_add(1))
            && self.is_open(next, plan)
        {
            return next;
        }
        loop {
            let behind = (*from).max(self.list.len() as u32);
            let block = self.free.at_or_after(*from).unwrap_or(behind);
            assert!(
                block < self.capacity,
                "a plan was admitted with {} blocks free of {}, and one of its tokens found none",
                self.n_free(),
                self.capacity
            );
            *from = block + 1;
            if !plan.claimed(block) {
                return block;
            }
        }
    }

    /// Gives a free block its first reference.
    pub fn take(&mut self, block: u32) {
        if block as usize >= self.list.len() {
            let before = self.list.len() as u32;
            self.list.resize(grown(block + 1, self.capacity) as usize, Block { ref_count: 0, node: NONE });
            self.free.extend(before..self.list.len() as u32);
        }
        let b = &mut self.list[block as usize];
        assert!(
            b.ref_count == 0 && b.node == NONE,
            "block {block} is taken and has {} references",
            b.ref_count
        );
        b.ref_count = 1;
        self.free.remove(block);
        self.n_used += 1;
        self.high_water = self.high_water.max(block + 1);
    }

    /// Adds a reference to a block that is not free. Returns whether the block was evictable before.
    pub fn add_ref(&mut self, block: u32) -> bool {
        let b = &mut self.list[block as usize];
        b.ref_count += 1;
        let was_evictable = b.ref_count == 1;
        assert!(!was_evictable || b.node != NONE, "block {block} is free and cannot be referenced");
        self.n_evictable -= u32::from(was_evictable);
        was_evictable
    }

    /// Removes a reference.
    pub fn release(&mut self, block: u32) -> Released {
        let b = &mut self.list[block as usize];
        assert!(b.ref_count > 0, "block {block} is released more often than it was referenced");
        b.ref_count -= 1;
        if b.ref_count > 0 {
            return Released::InUse;
        }
        if b.node != NONE {
            self.n_evictable += 1;
            self.newly_evictable.push(block);
            return Released::Evictable;
        }
        self.vacate(block);
        Released::Freed
    }

    /// Pins a used block that is not loading. Returns whether it was evictable before.
    pub fn pin(&mut self, block: u32) -> bool {
        match self.transfers.entry(block).or_insert(Transfer::Pinned(0)) {
            Transfer::Pinned(n) => *n += 1,
            Transfer::Loading => panic!("block {block} is loading and cannot be pinned"),
        }
        self.add_ref(block)
    }

    /// Removes a pin.
    pub fn unpin(&mut self, block: u32) -> Released {
        match self.transfers.entry(block) {
            Entry::Occupied(mut pinned) => match pinned.get_mut() {
                Transfer::Pinned(n) if *n > 1 => *n -= 1,
                Transfer::Pinned(_) => drop(pinned.remove()),
                Transfer::Loading => panic!("block {block} is loading and not pinned"),
            },
            Entry::Vacant(_) => panic!("block {block} is unpinned more often than it was pinned"),
        }
        self.release(block)
    }

    /// Gives a free block to an import.
    pub fn load(&mut self, block: u32) {
        self.take(block);
        self.transfers.insert(block, Transfer::Loading);
    }

    /// Ends an import of `block`. Its reference is the caller's now.
    pub fn loaded(&mut self, block: u32) {
        assert_eq!(self.transfers.remove(&block), Some(Transfer::Loading), "block {block} is not loading");
    }

    /// Marks a block in use as cached, under `node`.
    pub fn index(&mut self, block: u32, node: u32) {
        let b = &mut self.list[block as usize];
        assert!(b.ref_count > 0 && b.node == NONE, "block {block} is indexed twice, or free");
        b.node = node;
    }

    /// Drops `block` from the index. Returns whether it is free now.
    pub fn unindex(&mut self, block: u32) -> bool {
        let b = &mut self.list[block as usize];
        assert!(b.node != NONE, "block {block} is not indexed");
        b.node = NONE;
        let evictable = b.ref_count == 0;
        if evictable {
            self.n_evictable -= 1;
            self.vacate(block);
        }
        evictable
    }

    /// Blocks that became evictable and that the index has not seen yet. Some may be in use again by now.
    pub fn newly_evictable(&mut self) -> &mut Vec<u32> {
        &mut self.newly_evictable
    }

    pub fn has_newly_evictable(&self) -> bool {
        !self.newly_evictable.is_empty()
    }

    /// The first block from `block` on that is in transfer.
    pub fn in_transfer_from(&self, block: u32) -> Option<u32> {
        self.transfers.range(block..).next().map(|(block, _)| *block)
    }

    /// The moves that leave nothing from block `capacity` on: used blocks go to the lowest free ones. The caller has checked that
    /// there is room, and that none of them is in transfer.
    pub fn moves_below(&self, capacity: u32) -> Vec<(u32, u32)> {
        let mut moves = Vec::new();
        let mut next_free = 0;
        for from in (capacity..self.high_water).filter(|&block| self.is_used(block)) {
            let to = self.free.at_or_after(next_free).expect("there is room below the capacity");
            moves.push((from, to));
            next_free = to + 1;
        }
        moves
    }

    /// Makes the moves and sets the capacity, from which on every block is free then.
    pub fn resize(&mut self, capacity: u32, moves: &[(u32, u32)]) {
        for &(from, to) in moves {
            self.list[to as usize] =
                std::mem::replace(&mut self.list[from as usize], Block { ref_count: 0, node: NONE });
            self.free.remove(to);
            self.free.insert(from);
        }
        let moved: BTreeMap<u32, u32> = moves.iter().copied().collect();
        for block in &mut self.newly_evictable {
            *block = moved.get(block).copied().unwrap_or(*block);
        }
        self.capacity = capacity;
        self.list.truncate(capacity as usize);
        self.free.truncate(capacity);
        // Every used block lies below its old place or the new capacity, and moves may have filled gaps alone.
        self.high_water = self.high_water.min(capacity);
        while self.high_water > 0 && self.free.contains(self.high_water - 1) {
            self.high_water -= 1;
        }
    }

    fn vacate(&mut self, block: u32) {
        self.free.insert(block);
        self.n_used -= 1;
        while self.high_water > 0 && self.free.contains(self.high_water - 1) {
            self.high_water -= 1;
        }
    }

    /// Frees every block that is not in transfer, and drops all of them from the index.
    pub fn clear(&mut self) {
        self.list.fill(Block { ref_count: 0, node: NONE });
        self.free.extend(0..self.list.len() as u32);
        (self.n_evictable, self.high_water) = (0, 0);
        self.newly_evictable.clear();
        for (&block, transfer) in &self.transfers {
            let ref_count = if let Transfer::Pinned(n) = transfer { *n } else { 1 };
            self.list[block as usize].ref_count = ref_count;
            self.free.remove(block);
            self.high_water = block + 1;
        }
        self.n_used = self.transfers.len() as u32;
    }
}
