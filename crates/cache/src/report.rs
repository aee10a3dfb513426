//! What a cache holds, as data.
use crate::events::BlockCounters;
use crate::ids::SeqId;

mod text;
pub use text::ArenaText;

/// The state of one cell space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Cells it can hold.
    pub capacity_cells: u32,
    /// Cells that are not free: those that a token or a node holds. In kinds that hand out blocks, all cells of the
    /// blocks that are held or idle, filled or not ([`BlockReport::unused_cells`]).
    pub used_cells: u32,
    /// One past the highest occupied cell. Shrinks when the top cells are freed.
    pub high_water: u32,
    /// Ascending by id.
    pub sequences: Vec<SequenceReport>,
    /// Of kinds that hand out blocks.
    pub blocks: Option<BlockReport>,
}

/// The blocks of one cell space. `total` = held + `idle` + `free`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockReport {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks.
    pub total: u32,
    /// Blocks that nobody holds and no index knows.
    pub free: u32,
    /// Blocks that an index knows and nobody holds: room can be made of them.
    pub idle: u32,
    /// Cells of held blocks that nobody has filled: behind the ends of sequences, in their last blocks.
    pub unused_cells: u32,
    /// What happened so far.
    pub counters: BlockCounters,
}

impl BlockReport {
    /// The share of the free blocks that the largest request cannot have. 0, always: a block table takes blocks wherever
    /// they lie, so that all free ones serve any request. A number here so that kinds can be compared; an arena's is not 0
    /// ([`ArenaReport`](crate::arena::ArenaReport::external_fragmentation)).
    pub fn external_fragmentation(&self) -> f64 {
        0.0
    }

    /// The share of the cells of held blocks that nobody has filled. 0 if nothing is held.
    pub fn internal_fragmentation(&self) -> f64 {
        let held = self.total - self.free - self.idle;
        match u64::from(held) * u64::from(self.block_tokens) {
            0 => 0.0,
            cells => f64::from(self.unused_cells) / cells as f64,
        }
    }
}

/// Who uses one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// Nobody.
    Free,
    /// The index knows it; room can be made of it.
    Idle,
    /// So many sequences.
    Held(u32),
}

/// The state of one sequence in one cell space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceReport {
    /// Its id.
    pub seq: SeqId,
    /// Tokens held.
    pub len: u32,
    /// Position of its next token.
    pub next_position: u32,
    /// Nodes that wait for a verdict.
    pub n_nodes: u32,
    /// Runs of cells its committed tokens lie in.
    pub n_extents: u32,
}

/// How full one cell space is: what admission asks, in O(1), where a [`Report`] walks all sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Cells are handed out in blocks of this many.
    pub block_tokens: u32,
    /// Cells it can hold.
    pub capacity_cells: u32,
    /// Cells that nobody holds and no index knows.
    pub free_cells: u32,
    /// Cells that an index knows and nobody holds.
    pub idle_cells: u32,
    /// Do its sequences let go of what leaves a window?
    pub lets_go: bool,
}
