//! The contents of a cache, as data.
use crate::events::BlockCounters;
use crate::ids::SeqId;

mod text;
pub use text::ArenaText;

/// The state of one cell space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Total number of cells.
    pub capacity_cells: u32,
    /// Cells that are not free, that is, that store a token or a node. In kinds that hand out blocks: all cells of the
    /// blocks that are in use or cached, filled or not ([`BlockReport::unused_cells`]).
    pub used_cells: u32,
    /// One past the highest occupied cell. Shrinks when the top cells are freed.
    pub high_water: u32,
    /// Ascending by id.
    pub sequences: Vec<SequenceReport>,
    /// Block counts, for kinds that hand out blocks.
    pub blocks: Option<BlockReport>,
}

/// The blocks of one cell space. Every block is in use (by a sequence or a transfer), `evictable` (cached only) or
/// `free`; `total` is their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockReport {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of blocks.
    pub total: u32,
    /// Blocks that no sequence and no transfer uses and the prefix index does not cache.
    pub free: u32,
    /// Cached blocks that no sequence and no transfer uses. They can be evicted.
    pub evictable: u32,
    /// Unfilled cells of blocks in use: those after the ends of sequences, in their last blocks.
    pub unused_cells: u32,
    /// Event counts so far.
    pub counters: BlockCounters,
}

impl BlockReport {
    /// The share of free blocks that the largest request cannot use. Always 0: a block table takes blocks from
    /// anywhere, so every free block serves any request. The method exists so that kinds can be compared; for an
    /// arena it is not 0 ([`ArenaReport`](crate::arena::ArenaReport::external_fragmentation)).
    pub fn external_fragmentation(&self) -> f64 {
        0.0
    }

    /// The share of unfilled cells in blocks that sequences use. 0 if no block is in use.
    pub fn internal_fragmentation(&self) -> f64 {
        let in_use = self.total - self.free - self.evictable;
        match u64::from(in_use) * u64::from(self.block_tokens) {
            0 => 0.0,
            cells => f64::from(self.unused_cells) / cells as f64,
        }
    }
}

/// The state of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// No sequence uses it, and it is not cached.
    Free,
    /// Cached by the prefix index and used by no sequence; it can be evicted.
    Evictable,
    /// Used by this many sequences (its ref_count).
    InUse(u32),
    /// Used by no sequence, but an export reads it or an import writes it.
    InTransfer,
}

/// The state of one sequence in one cell space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceReport {
    /// The sequence's id.
    pub seq: SeqId,
    /// Tokens stored.
    pub len: u32,
    /// Position of the next token.
    pub next_position: u32,
    /// Speculative nodes that are neither accepted nor discarded yet.
    pub n_nodes: u32,
    /// Number of runs of cells that store the committed tokens.
    pub n_extents: u32,
}

/// How full one cell space is. Admission reads this in O(1); a [`Report`] walks all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Cells per block.
    pub block_tokens: u32,
    /// Total number of cells.
    pub capacity_cells: u32,
    /// Cells that no sequence uses and the prefix index does not cache.
    pub free_cells: u32,
    /// Cached cells that no sequence uses.
    pub evictable_cells: u32,
    /// True if sequences free the tokens that leave their sliding window.
    pub frees_out_of_window: bool,
}
