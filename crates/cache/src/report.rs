//! What a cache holds, as data.
use crate::ids::SeqId;

/// The state of one cell space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub capacity_cells: u32,
    pub used_cells: u32,
    /// One past the highest occupied cell. Shrinks when the top cells are freed.
    pub high_water: u32,
    /// Ascending by id.
    pub sequences: Vec<SequenceReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceReport {
    pub seq: SeqId,
    /// Tokens held.
    pub len: u32,
    pub next_position: u32,
    /// Nodes that wait for a verdict.
    pub n_nodes: u32,
    /// Runs of cells its committed tokens lie in.
    pub n_extents: u32,
}
