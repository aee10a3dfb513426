//! A block arena: every sequence lies in one contiguous handle of blocks.
//!
//! For kernels and backends that want one address per sequence instead of a block table. The price is external
//! fragmentation, which is measured here and not denied: see [`ArenaReport`].
//!
//! It promises that handles never overlap, that a refused or dropped operation changes nothing, and that bytes come
//! first: growth is a plan ([`Append`], [`Resize`]) that a backend executes, and it becomes true with `commit`.
//! It refuses to hold bytes, to share blocks between sequences (paged caches do that), and to evict inside a plan:
//! who must go is decided and gone before a plan begins.
//! A library and simulator feature: no kind of the engine is built on it.
mod allocator;
mod append;
mod buddy;
mod changes;
mod first_fit;
mod report;
mod resize;
mod views;

pub use allocator::{ALLOCATORS, Allocator, BuildAllocator, Handle, UnknownAllocator, build};
pub use append::{Append, BlockCells, BlockCopy};
pub use buddy::Buddy;
pub use first_fit::FirstFit;
pub use report::{ArenaReport, ArenaSequence, Counters};
pub use resize::Resize;
pub use views::{BufferOrder, Keys, Layout, Values, View};

use crate::events::{Change, Events, Reason};
use crate::ids::SeqId;
use std::collections::BTreeMap;

/// See the module.
pub struct Arena {
    block_tokens: u32,
    allocator: Box<dyn Allocator>,
    sequences: BTreeMap<SeqId, Sequence>,
    /// Sequences by their last use.
    by_use: BTreeMap<u64, SeqId>,
    uses: u64,
    counters: Counters,
    events: Events,
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    handle: Handle,
    used_tokens: u32,
    last_use: u64,
}

/// What the caller wants if a new sequence does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutOfMemory {
    /// Refuse it.
    Reject,
    /// Take what the largest free run gives, if that is anything.
    Shrink,
    /// Evict the least recently used sequences until it fits. If it does not fit an empty arena, nobody is evicted.
    Evict,
}

/// What the caller wants if a sequence has filled its handle and cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacityExceeded {
    /// The sequence ends here: an answer, not an error.
    Halt,
    /// Evict the least recently used others until it can grow. If that cannot be, nobody is evicted.
    EvictLeastRecentlyUsed,
    /// Say why.
    Error,
}

/// What [`Arena::allocate_for`] gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The blocks.
    pub handle: Handle,
    /// Tokens there is room for: what was asked, or less after [`OutOfMemory::Shrink`].
    pub tokens: u32,
    /// Sequences that had to go, in this order.
    pub evicted: Vec<SeqId>,
}

/// Why not. Nothing has changed but a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields' names are what there is to say
pub enum ArenaRefused {
    /// No such sequence; `allocate_for` makes one.
    UnknownSequence(SeqId),
    /// `allocate_for` of a live one; `append` makes it longer.
    SequenceExists(SeqId),
    /// No run of blocks is long enough. If `free_blocks` are many, they lie in pieces.
    NoRoom { needed_blocks: u32, free_blocks: u32, largest_free_run: u32 },
    /// A request for no tokens, or for an arena without blocks.
    Empty,
    /// A sequence counts its tokens in 32 bits.
    TooLong { seq: SeqId, tokens: u64 },
}

impl std::fmt::Display for ArenaRefused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ArenaRefused::UnknownSequence(seq) => {
                write!(f, "there is no sequence {seq}: allocate for it first")
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
            ArenaRefused::Empty => f.write_str("a request for nothing: ask for at least one token or block"),
            ArenaRefused::TooLong { seq, tokens } => {
                write!(f, "sequence {seq} would hold {tokens} tokens; at most {} are counted", u32::MAX)
            }
        }
    }
}
impl std::error::Error for ArenaRefused {}

impl Arena {
    /// An empty one over the blocks of `allocator`. A block holds `block_tokens` tokens of every layer.
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
            counters: Counters::default(),
            events: Events::default(),
        })
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    /// Blocks in it.
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
    /// Tokens that `seq` holds.
    pub fn used_tokens(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.used_tokens)
    }
    /// Tokens that `seq` can still append before its handle must grow.
    pub fn room_tokens(&self, seq: SeqId) -> Option<u64> {
        let sequence = self.sequences.get(&seq)?;
        Some(sequence.handle.tokens(self.block_tokens) - u64::from(sequence.used_tokens))
    }
    /// Where in its block the next token of `seq` goes. 0 opens a block: [`is_full`](Self::is_full) says whether
    /// the handle has that block.
    pub fn token_offset_in_block(&self, seq: SeqId) -> Option<u32> {
        Some(self.used_tokens(seq)? % self.block_tokens)
    }
    /// Is every token of the handle of `seq` used, so that the next append must grow it?
    pub fn is_full(&self, seq: SeqId) -> Option<bool> {
        Some(self.room_tokens(seq)? == 0)
    }
    /// Blocks that no handle reserves.
    pub fn n_free_blocks(&self) -> u32 {
        self.allocator.n_free()
    }
    /// See [`ArenaReport::external_fragmentation`], without its list of sequences: O(log blocks).
    pub fn external_fragmentation(&self) -> f64 {
        report::external_fragmentation(self.allocator.n_free(), self.allocator.largest_free_run())
    }
    /// Is no block free?
    pub fn is_exhausted(&self) -> bool {
        self.allocator.n_free() == 0
    }

    /// Make `seq`, with room for `tokens` tokens and none of them used: they come with [`append`](Self::append),
    /// when their bytes do. Counts as a use.
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
                evicted = self.make_room(None, |allocator| allocator.find(needed).is_some());
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
        self.tell(seq, handle.blocks(), Change::Alloc, Reason::Open);
        Ok(Allocated { handle, tokens, evicted })
    }

    /// Forget `seq`. Its blocks are free at once, whatever they contain.
    pub fn free_for(&mut self, seq: SeqId) -> Result<Handle, ArenaRefused> {
        let handle = self.forget(seq)?;
        self.tell(seq, handle.blocks(), Change::Free, Reason::Remove);
        Ok(handle)
    }

    fn forget(&mut self, seq: SeqId) -> Result<Handle, ArenaRefused> {
        let sequence = self.sequences.remove(&seq).ok_or(ArenaRefused::UnknownSequence(seq))?;
        self.by_use.remove(&sequence.last_use);
        self.allocator.release(sequence.handle);
        self.counters.freed += 1;
        Ok(sequence.handle)
    }

    /// `seq` was read: it is the most recently used one now.
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

    /// Evict in order of use, `keep` excepted, until `enough`. If even all of them are not, nobody goes.
    /// O((evicted + 1) log n).
    fn make_room(&mut self, keep: Option<SeqId>, enough: impl Fn(&dyn Allocator) -> bool) -> Vec<SeqId> {
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
            let handle = self.forget(seq).expect("a victim is a live sequence");
            self.tell(seq, handle.blocks(), Change::Evict, Reason::MakeRoom);
        }
        self.counters.evicted += victims.len() as u64;
        victims
    }
}
