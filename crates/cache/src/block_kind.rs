//! What kinds that hand out blocks offer to the prefix index and to transfers. Any kind that implements [`BlockKind`] can
//! share prefixes and be exported.
use crate::events::Events;
use crate::ids::{GroupId, SeqId};
use crate::report::BlockUse;
use crate::request::Refused;

/// Stands for "no block" and "no index node".
pub const NONE: u32 = u32::MAX;

/// A kind that hands out blocks.
pub trait BlockKind: CachedBlocks + TransferBlocks + ResizeBlocks {
    /// The events of its blocks.
    fn events(&mut self) -> &mut Events;
    /// The state of every block, up to the highest block in use.
    fn block_uses(&self) -> Box<dyn Iterator<Item = BlockUse> + '_>;
    /// Block table of `seq` in position order, with [`NONE`] where blocks have left the window. `None` if there is no
    /// such sequence.
    fn block_table(&self, seq: SeqId) -> Option<&[u32]>;
    /// Sliding window in positions; `None` if a query sees all.
    fn window(&self) -> Option<u32>;
    /// Whether the capacity is unlimited.
    fn is_unlimited(&self) -> bool;
}

/// The blocks that a prefix index caches, and the sequences that it makes from them.
pub trait CachedBlocks {
    fn free_cells(&self) -> u32;
    fn n_evictable(&self) -> u32;
    /// The index node of `block`, or [`NONE`].
    fn node(&self, block: u32) -> u32;
    /// The index node of `block`, if it is cached and no sequence uses it.
    fn evictable_node(&self, block: u32) -> Option<u32>;
    /// Whether a block has become evictable since the index last asked.
    fn has_newly_evictable(&self) -> bool;
    fn take_newly_evictable(&mut self) -> Vec<u32>;
    /// Returns the buffer of [`take_newly_evictable`](Self::take_newly_evictable), for its memory.
    fn return_buffer(&mut self, buffer: Vec<u32>);
    /// Records that the index caches `block` as `node`.
    fn index(&mut self, block: u32, node: u32);
    /// Records that the index no longer caches `block`. Returns whether the block is free now.
    fn unindex(&mut self, block: u32) -> bool;
    /// Number of blocks that contain the sinks of a windowed group.
    fn sink_blocks(&self) -> u32;
    /// Index of the first block after the sinks that a query at `position` sees.
    fn first_seen(&self, position: u32) -> u32;
    /// Whether a query after the first `n_blocks` of a sequence sees block `i` of them.
    fn is_seen(&self, i: u32, n_blocks: u32) -> bool;
    /// Makes the sequence `seq` from the cached `blocks`, keeping only those that a query after them sees. Returns
    /// how many of them were not in use by any sequence before.
    fn open(&mut self, seq: SeqId, blocks: Vec<u32>) -> u32;
    /// Replaces block `i` of `seq` by `block`, which stores the same tokens.
    fn replace(&mut self, seq: SeqId, i: u32, block: u32);
}

/// Blocks in transfer. See [`Cache::pin`](crate::Cache::pin) and [`Cache::load`](crate::Cache::load).
pub trait TransferBlocks {
    /// Whether `block` exists, is not free, and has its bytes.
    fn is_readable(&self, block: u32) -> bool;
    /// Pins a readable block. Returns whether it was evictable until now.
    fn pin(&mut self, block: u32) -> bool;
    fn unpin(&mut self, block: u32);
    /// Changes when the sequence is recreated or shortened; 0 if there is none.
    fn lineage(&self, seq: SeqId) -> u64;
    /// Whether [`load`](Self::load) finds what it needs.
    fn can_load(&self, seq: SeqId, until: u32, group: GroupId) -> Result<(), Refused>;
    /// Takes the blocks that `seq` lacks to end at `until`: [`NONE`] where no query sees them.
    fn load(&mut self, seq: SeqId, until: u32) -> Vec<u32>;
    /// Gives the loaded blocks to `seq`, which ends at `until` now, and releases what has left its window.
    fn append_loaded(&mut self, seq: SeqId, until: u32, blocks: &[u32]);
    /// How many of an import's blocks `seq` takes to end at `until`, a part of the import. `None` if it would lack one that is seen
    /// there, or end within a block.
    fn part_of_load(&self, seq: SeqId, until: u32, blocks: &[u32]) -> Option<usize>;
    /// Frees the blocks of an import that failed or came too late.
    fn abandon_load(&mut self, seq: SeqId, blocks: &[u32]);
}

/// A capacity that changes. See [`Cache::plan_resize`](crate::Cache::plan_resize).
pub trait ResizeBlocks {
    /// The moves `(from, to)` of used blocks that a capacity of `capacity_tokens` needs.
    fn plan_resize(&self, group: GroupId, capacity_tokens: u32) -> Result<Vec<(u32, u32)>, Refused>;
    /// Makes the moves and changes the capacity.
    fn resize(&mut self, capacity_tokens: u32, moves: &[(u32, u32)]);
}
