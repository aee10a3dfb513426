//! The trait that a cache kind implements: the bookkeeping of one cell space, which serves one layer group.
use crate::block_kind::BlockKind;
use crate::ids::*;
use crate::kinds::Visibility;
use crate::plan::{CellCopy, GroupPlan, Spans};
use crate::report::{Occupancy, Report};
use crate::request::Refused;
use crate::run::CellRun;

/// One cell space. `prepare` chooses cells and is pure; `fill_reads` computes visibility on demand; `apply` is the
/// only function that changes state for a step, and it cannot fail.
///
/// Before it calls a kind, the cache has flattened the request into `spans` and has checked that no span is empty,
/// that no sequence has two spans, and that no span goes past the last position.
pub trait Kind: Send {
    /// Which positions a query sees.
    fn visibility(&self) -> Visibility;
    /// Total number of cells.
    fn capacity_cells(&self) -> u32;
    /// Tokens of `seq` that are still stored; `None` if there is no such sequence.
    fn seq_len(&self, seq: SeqId) -> Option<u32>;
    /// Position of the next token of `seq`. It differs from the length once a prefix has been removed.
    fn next_position(&self, seq: SeqId) -> Option<u32>;
    /// Speculative nodes of `seq` that are neither accepted nor discarded yet; `None` if there is no such sequence,
    /// or if nodes do not outlive their step.
    fn n_nodes(&self, _seq: SeqId) -> Option<u32> {
        None
    }

    /// Appends where the committed tokens of `seq` are stored to `out`, ascending: the first position of each stretch, and
    /// its cells. At least what a query at the end of `seq` sees; nothing if there is no such sequence.
    fn stored_cells(&self, seq: SeqId, out: &mut Vec<(u32, CellRun)>);

    /// Chooses cells for the new tokens: fills `writes`, `copies`, the nodes of draft trees and `cells_end` of `out`.
    /// O(tokens placed).
    fn prepare(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused>;
    /// Whether [`prepare`](Self::prepare) accepts [`New::Tree`](crate::New::Tree). If the kind has no
    /// [`trees`](Self::trees), nodes do not outlive their step: the commit gets the spans as chains of the tokens that
    /// they keep.
    fn verifies_trees(&self) -> bool {
        false
    }
    /// Fills `out.reads` of a prepared plan. O(extents in context).
    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan);
    /// Brings the rows of a prepared plan's resident block table up to date, if the kind keeps block tables. Returns
    /// `false` if it keeps none: then tables can only follow from the reads. O(spans + blocks that changed).
    fn fill_tables(&self, _spans: &Spans, _out: &mut GroupPlan) -> bool {
        false
    }
    /// Applies a prepared plan. Called once, after every layer has succeeded. The plan may have been cut to the tokens
    /// that are kept: its spans may be shorter than they were prepared, or missing.
    fn apply(&mut self, spans: &Spans, plan: &GroupPlan);

    /// Plans one round of compaction: disjoint copies from occupied to free cells. Empty when nothing is left to
    /// move.
    fn plan_moves(&self, _out: &mut Vec<CellCopy>) {}
    /// Applies a planned round, after the bytes have moved.
    fn apply_moves(&mut self, _moves: &[CellCopy]) {}

    /// Removes every sequence.
    fn clear(&mut self);
    /// The contents of the cell space, as data.
    fn report(&self) -> Report;
    /// How full the cell space is. O(1) in kinds with many sequences.
    fn occupancy(&self) -> Occupancy {
        let report = self.report();
        Occupancy {
            block_tokens: 1,
            capacity_cells: report.capacity_cells,
            free_cells: report.capacity_cells - report.used_cells,
            evictable_cells: 0,
            frees_out_of_window: false,
        }
    }

    /// `Some` if the kind's only sequence can be shortened.
    fn rewinds(&mut self) -> Option<&mut dyn RewindKind> {
        None
    }
    /// `Some` if the kind stores many sequences.
    fn sequences(&mut self) -> Option<&mut dyn SequenceKind> {
        None
    }
    /// `Some` if the kind hands out blocks, which a prefix index can cache and which can be exported.
    fn blocks(&self) -> Option<&dyn BlockKind> {
        None
    }
    /// Like [`blocks`](Self::blocks), mutable.
    fn blocks_mut(&mut self) -> Option<&mut dyn BlockKind> {
        None
    }
    /// `Some` if speculative nodes outlive the step that adds them.
    fn trees(&mut self) -> Option<&mut dyn TreeKind> {
        None
    }
}

/// A kind whose only sequence can be shortened.
pub trait RewindKind: Kind {
    /// See [`Rewind::rewind`](crate::Rewind::rewind).
    fn rewind(&mut self, len: u32) -> Result<(), Refused>;
}

/// A kind for many sequences. Every operation either succeeds or changes nothing.
pub trait SequenceKind: Kind {
    /// See [`Sequences::seq_new`](crate::Sequences::seq_new).
    fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused>;
    /// Returns `Ok` if `seq`, or a copy of it, can end at `position`. The cache checks this in every group before it
    /// changes any, because groups with different windows have dropped different tokens.
    fn can_end_at(&self, _seq: SeqId, _position: u32) -> Result<(), Refused> {
        Ok(())
    }
    /// See [`Sequences::seq_cp`](crate::Sequences::seq_cp).
    fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused>;
    /// Appends the ranges of positions that `seq` stores to `out`, ascending.
    fn stored(&self, seq: SeqId, out: &mut Vec<std::ops::Range<u32>>) -> Result<(), Refused>;
    /// See [`Sequences::seq_rm`](crate::Sequences::seq_rm).
    fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused>;
    /// See [`Sequences::seq_keep`](crate::Sequences::seq_keep).
    fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused>;
}

/// A kind whose speculative nodes outlive the step that adds them.
pub trait TreeKind: Kind {
    /// See [`Trees::commit_path`](crate::Trees::commit_path).
    fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused>;
}
