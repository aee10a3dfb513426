//! A block arena: every sequence is stored in one contiguous range of blocks, its *handle*.
//!
//! For kernels and backends that need one address per sequence instead of a block table. The price is external
//! fragmentation, which [`ArenaReport`] measures.
//!
//! Handles never overlap, and a refused or dropped operation changes nothing. Growth is a plan ([`Append`],
//! [`Resize`]): the backend moves the bytes first, then `commit` applies it.
//! An arena stores no bytes, does not share blocks between sequences (paged caches do), and never evicts inside a
//! plan: evictions happen before the plan begins.
//! A library and simulator feature: no cache kind of the engine uses it.
mod allocator;
mod append;
mod buddy;
mod changes;
mod first_fit;
mod report;
mod resize;
mod views;

pub use allocator::{ALLOCATORS, Allocator, Handle, UnknownAllocator, build};
pub use append::{Append, BlockCells, BlockCopy};
use buddy::Buddy;
use first_fit::FirstFit;
pub use report::{ArenaCounters, ArenaReport, ArenaSequence};
pub use resize::Resize;
pub use views::{BufferLayout, BufferOrder, Keys, Values, View};

use crate::events::{Change, ChangeReason, Events};
use crate::ids::SeqId;
use std::collections::BTreeMap;

/// A block arena. See the [module](self).
pub struct Arena {
    block_tokens: u32,
    allocator: Box<dyn Allocator>,
    sequences: BTreeMap<SeqId, Sequence>,
    /// Sequences by the time of their last use.
    by_use: BTreeMap<u64, SeqId>,
    uses: u64,
    counters: ArenaCounters,
    events: Events,
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    handle: Handle,
    used_tokens: u32,
    last_use: u64,
}

/// What to do if a new sequence does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfMemory {
    /// Refuse the sequence.
    Reject,
    /// Give it the largest free run, if there is one.
    Shrink,
    /// Evict the least recently used sequences until it fits. If it would not fit even an empty arena, nothing is
    /// evicted.
    Evict,
}

/// What to do if a sequence has filled its handle and cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityExceeded {
    /// Stop the sequence. This is an expected result, not an error.
    Halt,
    /// Evict the least recently used other sequences until it can grow. If that would not suffice, nothing is
    /// evicted.
    EvictLeastRecentlyUsed,
    /// Return an error with the reason.
    Error,
}

/// The result of [`Arena::allocate_for`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The blocks.
    pub handle: Handle,
    /// Tokens that fit: as many as requested, or fewer after [`OutOfMemory::Shrink`].
    pub tokens: u32,
    /// Evicted sequences, in eviction order.
    pub evicted: Vec<SeqId>,
}

/// Why a request is refused. Nothing has changed except a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum ArenaRefused {
    /// There is no such sequence; `allocate_for` makes one.
    UnknownSequence(SeqId),
    /// `allocate_for` was called for a sequence that exists; `append` extends it.
    SequenceExists(SeqId),
    /// No run of free blocks is long enough. If `free_blocks` would suffice, free memory is fragmented.
    NoRoom { needed_blocks: u32, free_blocks: u32, largest_free_run: u32 },
    /// A request for no tokens, or an arena without blocks.
    Empty,
    /// The sequence would exceed 32-bit token counts.
    TooLong { seq: SeqId, tokens: u64 },
}

impl std::fmt::Display for ArenaRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ArenaRefused::UnknownSequence(seq) => {
                write!(f, "there is no sequence {seq}: call allocate_for first")
            }
            ArenaRefused::SequenceExists(seq) => {
                write!(f, "sequence {seq} has a handle already: append to it, or free it first")
            }
            ArenaRefused::NoRoom { needed_blocks, free_blocks, largest_free_run } => {
                write!(f, "{needed_blocks} neighbouring blocks needed, {free_blocks} free, ")?;
                if needed_blocks <= free_blocks {
                    write!(f, "in pieces of at most {largest_free_run}: free or evict a sequence, or resize")
                } else {
                    write!(
                        f,
                        "at most {largest_free_run} together: free or evict a sequence, or enlarge the arena"
                    )
                }
            }
            ArenaRefused::Empty => f.write_str("an empty request: ask for at least one token or block"),
            ArenaRefused::TooLong { seq, tokens } => {
                write!(f, "sequence {seq} would hold {tokens} tokens; at most {} are allowed", u32::MAX)
            }
        }
    }
}
impl std::error::Error for ArenaRefused {}

impl Arena {
    /// Makes an empty arena over the blocks of `allocator`. A block stores `block_tokens` tokens of every layer.
    pub fn new(block_tokens: u32, allocator: Box<dyn Allocator>) -> Result<Arena, ArenaRefused> {
        if block_tokens == 0 || allocator.n_blocks() == 0 {
            return Err(ArenaRefused::Empty);
        }
        Ok(Arena {
            block_tokens,
            allocator,
            sequences: BTreeMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            counters: ArenaCounters::default(),
            events: Events::default(),
        })
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    /// Number of blocks.
    pub fn n_blocks(&self) -> u32 {
        self.allocator.n_blocks()
    }
    /// Ids of the live sequences, ascending.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> {
        self.sequences.keys().copied()
    }
    /// The blocks of `seq`.
    pub fn handle(&self, seq: SeqId) -> Option<Handle> {
        self.sequences.get(&seq).map(|s| s.handle)
    }
    /// Tokens stored in `seq`.
    pub fn used_tokens(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.used_tokens)
    }
    /// Tokens that `seq` can append before its handle must grow.
    pub fn room_tokens(&self, seq: SeqId) -> Option<u64> {
        let sequence = self.sequences.get(&seq)?;
        Some(sequence.handle.tokens(self.block_tokens) - u64::from(sequence.used_tokens))
    }
    /// Offset of the next token of `seq` in its block. 0 means the start of a new block; [`is_full`](Self::is_full)
    /// says whether the handle has that block.
    pub fn token_offset_in_block(&self, seq: SeqId) -> Option<u32> {
        Some(self.used_tokens(seq)? % self.block_tokens)
    }
    /// Whether the handle of `seq` is full, so that the next append must grow it.
    pub fn is_full(&self, seq: SeqId) -> Option<bool> {
        Some(self.room_tokens(seq)? == 0)
    }
    /// Blocks that no handle reserves.
    pub fn n_free_blocks(&self) -> u32 {
        self.allocator.n_free()
    }
    /// See [`ArenaReport::external_fragmentation`]. Does not list the sequences: O(log blocks).
    pub fn external_fragmentation(&self) -> f64 {
        report::external_fragmentation(self.allocator.n_free(), self.allocator.largest_free_run())
    }
    /// Whether no block is free.
    pub fn is_exhausted(&self) -> bool {
        self.allocator.n_free() == 0
    }

    /// Makes the sequence `seq`, with space for `tokens` tokens. It has none yet; [`append`](Self::append) adds
    /// them together with their bytes. Counts as a use.
    pub fn allocate_for(
        &mut self,
        seq: SeqId,
        tokens: u32,
        policy: OutOfMemory,
    ) -> Result<Allocated, ArenaRefused> {
        if self.sequences.contains_key(&seq) {
            return Err(ArenaRefused::SequenceExists(seq));
        }
        if tokens == 0 {
            return Err(ArenaRefused::Empty);
        }
        let needed = tokens.div_ceil(self.block_tokens);
        let (mut tokens, mut evicted) = (tokens, Vec::new());
        let handle = match (self.allocator.find(needed), policy) {
            (Some(handle), _) => Some(handle),
            (None, OutOfMemory::Reject) => None,
            (None, OutOfMemory::Shrink) => {
                let largest = self.allocator.largest_free_run();
                let granted = u64::from(largest) * u64::from(self.block_tokens);
                tokens = u32::try_from(granted).map_or(tokens, |granted| granted.min(tokens));
                self.allocator.find(largest)
            }
            (None, OutOfMemory::Evict) => {
                evicted = self.evict_until_free(None, |allocator| allocator.find(needed).is_some());
                self.allocator.find(needed)
            }
        };
        let Some(handle) = handle else {
            self.counters.refused += 1;
            return Err(self.no_room(needed));
        };
        self.allocator.take(handle);
        self.counters.allocated += 1;
        self.uses += 1;
        self.by_use.insert(self.uses, seq);
        self.sequences.insert(seq, Sequence { handle, used_tokens: 0, last_use: self.uses });
        self.record(seq, handle.blocks(), Change::Alloc, ChangeReason::Open);
        Ok(Allocated { handle, tokens, evicted })
    }

    /// Removes `seq`. Its blocks are free at once, whatever they contain.
    pub fn free_for(&mut self, seq: SeqId) -> Result<Handle, ArenaRefused> {
        let handle = self.remove_sequence(seq)?;
        self.record(seq, handle.blocks(), Change::Free, ChangeReason::Remove);
        Ok(handle)
    }

    fn remove_sequence(&mut self, seq: SeqId) -> Result<Handle, ArenaRefused> {
        let sequence = self.sequences.remove(&seq).ok_or(ArenaRefused::UnknownSequence(seq))?;
        self.by_use.remove(&sequence.last_use);
        self.allocator.release(sequence.handle);
        self.counters.freed += 1;
        Ok(sequence.handle)
    }

    /// Marks `seq` as the most recently used sequence, because it was read.
    pub fn touch(&mut self, seq: SeqId) -> Result<(), ArenaRefused> {
        let sequence = self.sequences.get_mut(&seq).ok_or(ArenaRefused::UnknownSequence(seq))?;
        self.uses += 1;
        self.by_use.remove(&sequence.last_use);
        self.by_use.insert(self.uses, seq);
        sequence.last_use = self.uses;
        Ok(())
    }

    fn no_room(&self, needed_blocks: u32) -> ArenaRefused {
        ArenaRefused::NoRoom {
            needed_blocks,
            free_blocks: self.allocator.n_free(),
            largest_free_run: self.allocator.largest_free_run(),
        }
    }

    /// Evicts sequences other than `keep`, least recently used first, until `enough` returns true. If evicting all of
    /// them would not suffice, evicts none. O((evicted + 1) log n).
    fn evict_until_free(
        &mut self,
        keep: Option<SeqId>,
        enough: impl Fn(&dyn Allocator) -> bool,
    ) -> Vec<SeqId> {
        let mut victims = Vec::new();
        for &seq in self.by_use.values().filter(|&&seq| Some(seq) != keep) {
            if enough(&*self.allocator) {
                break;
            }
            victims.push(seq);
            self.allocator.release(self.sequences[&seq].handle);
        }
        let worth_it = enough(&*self.allocator);
        victims.iter().for_each(|seq| self.allocator.take(self.sequences[seq].handle));
        if !worth_it {
            return Vec::new();
        }
        for &seq in &victims {
            let handle = self.remove_sequence(seq).expect("a victim is a live sequence");
            self.record(seq, handle.blocks(), Change::Evict, ChangeReason::SpaceNeeded);
        }
        self.counters.evicted += victims.len() as u64;
        victims
    }
}
