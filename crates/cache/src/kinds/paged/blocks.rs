//! The blocks of one paged cell space: the ref_count of each block, and which blocks the prefix index caches.
//!
//! A block is *held* (used by at least one sequence), *idle* (cached, used by no sequence, evictable), or *free*.
use crate::kinds::free_set::FreeSet;
use crate::plan::{GroupPlan, grown};

/// Stands for "no block" and "no index node".
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    holders: u32,
    /// Node in the prefix index; [`NONE`] while the block is not cached.
    node: u32,
}

/// 8 bytes per block and a little over one bit, for blocks up to the highest one ever used.
pub(super) struct Blocks {
    capacity: u32,
    list: Vec<Block>, // the first blocks; all later ones are free
    free: FreeSet,    // of the first blocks
    n_used: u32,
    n_idle: u32,
    high_water: u32,
    /// Cached blocks that lost their last holder since the index last asked.
    fell_idle: Vec<u32>,
}

/// The state of a block after a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetGo {
    Held,
    Idle,
    Freed,
}

impl Blocks {
    pub fn new(capacity: u32) -> Self {
        Blocks {
            capacity,
            list: Vec::new(),
            free: FreeSet::default(),
            n_used: 0,
            n_idle: 0,
            high_water: 0,
            fell_idle: Vec::new(),
        }
    }
    pub fn capacity(&self) -> u32 {
        self.capacity
    }
    pub fn n_free(&self) -> u32 {
        self.capacity - self.n_used
    }
    pub fn n_idle(&self) -> u32 {
        self.n_idle
    }
    /// One past the highest block in use.
    pub fn high_water(&self) -> u32 {
        self.high_water
    }
    pub fn holders(&self, block: u32) -> u32 {
        self.list.get(block as usize).map_or(0, |b| b.holders)
    }
    pub fn node(&self, block: u32) -> u32 {
        self.list.get(block as usize).map_or(NONE, |b| b.node)
    }
    /// True if even its only holder may not write to the block: another sequence reads it, or it is cached and a hit
    /// may show it to one.
    pub fn is_shared(&self, block: u32) -> bool {
        let b = self.list[block as usize];
        b.holders > 1 || b.node != NONE
    }

    pub fn is_used(&self, block: u32) -> bool {
        self.holders(block) > 0 || self.node(block) != NONE
    }

    fn is_open(&self, block: u32, plan: &GroupPlan) -> bool {
        let free = match self.list.get(block as usize) {
            Some(b) => b.holders == 0 && b.node == NONE,
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

    /// Gives a free block its first holder.
    pub fn take(&mut self, block: u32) {
        if block as usize >= self.list.len() {
            let before = self.list.len() as u32;
            self.list.resize(grown(block + 1, self.capacity) as usize, Block { holders: 0, node: NONE });
            self.free.extend(before..self.list.len() as u32);
        }
        let b = &mut self.list[block as usize];
        assert!(b.holders == 0 && b.node == NONE, "block {block} is taken and has {} holders", b.holders);
        b.holders = 1;
        self.free.remove(block);
        self.n_used += 1;
        self.high_water = self.high_water.max(block + 1);
    }

    /// Adds a holder to a block in use. Returns whether the block was idle before.
    pub fn hold(&mut self, block: u32) -> bool {
        let b = &mut self.list[block as usize];
        b.holders += 1;
        let was_idle = b.holders == 1;
        assert!(!was_idle || b.node != NONE, "block {block} is free and cannot be held");
        self.n_idle -= u32::from(was_idle);
        was_idle
    }

    /// Removes a holder.
    pub fn release(&mut self, block: u32) -> LetGo {
        let b = &mut self.list[block as usize];
        assert!(b.holders > 0, "block {block} is released more often than it was held");
        b.holders -= 1;
        if b.holders > 0 {
            return LetGo::Held;
        }
        if b.node != NONE {
            self.n_idle += 1;
            self.fell_idle.push(block);
            return LetGo::Idle;
        }
        self.vacate(block);
        LetGo::Freed
    }

    /// Marks a held block as cached, under `node`.
    pub fn index(&mut self, block: u32, node: u32) {
        let b = &mut self.list[block as usize];
        assert!(b.holders > 0 && b.node == NONE, "block {block} is indexed twice, or free");
        b.node = node;
    }

    /// Drops `block` from the index. Returns whether it is free now.
    pub fn unindex(&mut self, block: u32) -> bool {
        let b = &mut self.list[block as usize];
        assert!(b.node != NONE, "block {block} is not indexed");
        b.node = NONE;
        let idle = b.holders == 0;
        if idle {
            self.n_idle -= 1;
            self.vacate(block);
        }
        idle
    }

    /// Blocks that became idle and that the index has not seen yet. Some may be held again by now.
    pub fn fell_idle(&mut self) -> &mut Vec<u32> {
        &mut self.fell_idle
    }

    pub fn has_settled(&self) -> bool {
        self.fell_idle.is_empty()
    }

    fn vacate(&mut self, block: u32) {
        self.free.insert(block);
        self.n_used -= 1;
        while self.high_water > 0 && self.free.contains(self.high_water - 1) {
            self.high_water -= 1;
        }
    }

    /// Frees every block.
    pub fn clear(&mut self) {
        self.list.fill(Block { holders: 0, node: NONE });
        self.free.extend(0..self.list.len() as u32);
        (self.n_used, self.n_idle, self.high_water) = (0, 0, 0);
        self.fell_idle.clear();
    }
}
