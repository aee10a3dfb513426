//! What the author of a kind writes: the bookkeeping of one cell space, that is, of one layer group.
use crate::ids::*;
use crate::kinds::Paged;
use crate::plan::{CellCopy, GroupPlan, Spans};
use crate::report::{Report, Room};
use crate::request::Refused;

/// One cell space. `prepare` decides placement and is pure; `fill_reads` derives visibility on demand; `apply`
/// is the only mutation and cannot fail.
///
/// The cache has already checked, before it asks a kind, that spans are not empty, that no sequence has two,
/// that none passes the last position, and it has flattened the request into `spans`.
pub trait Kind: Send {
    /// Cells this space can hold.
    fn capacity_cells(&self) -> u32;
    /// Tokens `seq` still holds; `None` if there is no such sequence.
    fn seq_len(&self, seq: SeqId) -> Option<u32>;
    /// Position of the next token of `seq`. Not its length: after the removal of a prefix they differ.
    fn next_position(&self, seq: SeqId) -> Option<u32>;
    /// Speculative nodes of `seq` that wait for a verdict; `None` if there is no such sequence, and in kinds that do
    /// not speculate.
    fn n_nodes(&self, _seq: SeqId) -> Option<u32> {
        None
    }

    /// Choose cells for the new tokens: `writes`, `copies`, `depths`, `cells_end` of `out`. O(tokens placed).
    fn prepare(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused>;
    /// Fill `out.reads` of a prepared plan. O(extents in context).
    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan);
    /// Make a prepared plan true. Called once, after every layer succeeded.
    fn apply(&mut self, spans: &Spans, plan: &GroupPlan);

    /// One round of compaction: disjoint copies from occupied to free cells. Empty when nothing is left to do.
    fn plan_moves(&self, _out: &mut Vec<CellCopy>) {}
    /// Make a planned round true, after the bytes have moved.
    fn apply_moves(&mut self, _moves: &[CellCopy]) {}

    /// Forget every sequence.
    fn clear(&mut self);
    /// What it holds, as data.
    fn report(&self) -> Report;
    /// How full it is. O(1) in kinds that hold many sequences.
    fn room(&self) -> Room {
        let report = self.report();
        Room {
            block_tokens: 1,
            capacity_cells: report.capacity_cells,
            free_cells: report.capacity_cells - report.used_cells,
            idle_cells: 0,
            lets_go: false,
        }
    }

    /// `Some` if the kind's only sequence can be shortened.
    fn rewinds(&mut self) -> Option<&mut dyn RewindKind> {
        None
    }
    /// `Some` if the kind holds many sequences.
    fn sequences(&mut self) -> Option<&mut dyn SequenceKind> {
        None
    }
    /// `Some` if the kind hands out blocks, which a prefix index can know.
    fn paged(&self) -> Option<&Paged> {
        None
    }
    /// The same.
    fn paged_mut(&mut self) -> Option<&mut Paged> {
        None
    }
    /// `Some` if the kind speculates.
    fn trees(&mut self) -> Option<&mut dyn TreeKind> {
        None
    }
}

/// A kind whose only sequence can be shortened.
pub trait RewindKind: Kind {
    /// See [`Rewind::rewind`](crate::Rewind::rewind).
    fn rewind(&mut self, len: u32) -> Result<(), Refused>;
}

/// A kind that holds many sequences. Every verb either acts or changes nothing.
pub trait SequenceKind: Kind {
    /// See [`Sequences::seq_new`](crate::Sequences::seq_new).
    fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused>;
    /// Could `seq`, or a copy of it, end at `position`? Asked of every group before a verb acts on any, because groups
    /// whose windows differ have let go of different tokens.
    fn can_end_at(&self, _seq: SeqId, _position: u32) -> Result<(), Refused> {
        Ok(())
    }
    /// See [`Sequences::seq_cp`](crate::Sequences::seq_cp).
    fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused>;
    /// See [`Sequences::seq_rm`](crate::Sequences::seq_rm).
    fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused>;
    /// See [`Sequences::seq_keep`](crate::Sequences::seq_keep).
    fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused>;
}

/// A kind that accepts [`New::Frontier`](crate::New::Frontier).
pub trait TreeKind: Kind {
    /// See [`Trees::commit_path`](crate::Trees::commit_path).
    fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused>;
}
