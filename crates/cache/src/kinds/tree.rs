//! The cell space of `cells`, plus speculative nodes after the committed end of every sequence.
use super::space::CellSpace;
use super::{GroupSpec, Visibility, draft_tree, expect_end};
use crate::ids::*;
use crate::kind::{Kind, SequenceKind, TreeKind};
use crate::plan::*;
use crate::report::{Occupancy, Report};
use crate::request::Refused;

/// The kind for speculative decoding. Each sequence may propose a draft tree, in one span or in several spans over
/// successive steps, alongside chains of other sequences. A node sees the committed prefix, its ancestors and itself,
/// as far as window and sinks allow. Nodes occupy cells, so admission counts them. Without a draft tree it behaves
/// exactly like [`Cells`](super::Cells).
///
/// A chain is refused while its sequence has speculative nodes; a fork copies the committed part only; a rollback
/// discards the nodes.
pub struct Tree {
    space: CellSpace,
}

impl Tree {
    /// Makes `capacity_tokens` cells, for committed tokens and nodes together. Ignores `max_step_tokens`.
    pub fn new(group: &GroupSpec) -> Self {
        Tree { space: CellSpace::new(group) }
    }
}

impl Kind for Tree {
    fn visibility(&self) -> Visibility {
        self.space.visibility()
    }
    fn capacity_cells(&self) -> u32 {
        self.space.capacity()
    }
    fn seq_len(&self, seq: SeqId) -> Option<u32> {
        self.space.seq_len(seq)
    }
    fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.space.next_position(seq)
    }
    fn n_nodes(&self, seq: SeqId) -> Option<u32> {
        self.space.sequence(seq).ok().map(|sequence| sequence.nodes.len() as u32)
    }

    fn prepare(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused> {
        for span in &spans.list {
            let sequence = self.space.sequence(span.seq)?;
            expect_end(span, sequence.next_position)?;
            match draft_tree::parents_of(spans, span) {
                None if sequence.nodes.is_empty() => {}
                None => return Err(Refused::Speculating(span.seq)),
                Some(parents) => {
                    let n_nodes = sequence.nodes.len() as u64 + u64::from(span.n_tokens);
                    if u64::from(span.start) + n_nodes > u64::from(u32::MAX) {
                        return Err(Refused::PositionOverflow { seq: span.seq });
                    }
                    draft_tree::check_parents(&sequence.nodes, span, parents, &mut out.depths)?;
                }
            }
        }
        self.space.place(spans, group, out)
    }
    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan) {
        self.space.fill_reads(spans, out);
    }
    fn apply(&mut self, spans: &Spans, plan: &GroupPlan) {
        self.space.apply(spans, plan);
    }
    fn plan_moves(&self, out: &mut Vec<CellCopy>) {
        self.space.plan_moves(out);
    }
    fn apply_moves(&mut self, moves: &[CellCopy]) {
        self.space.apply_moves(moves);
    }
    fn clear(&mut self) {
        self.space.clear();
    }
    fn report(&self) -> Report {
        self.space.report()
    }
    fn occupancy(&self) -> Occupancy {
        self.space.occupancy()
    }
    fn sequences(&mut self) -> Option<&mut dyn SequenceKind> {
        Some(self)
    }
    fn trees(&mut self) -> Option<&mut dyn TreeKind> {
        Some(self)
    }
}

impl SequenceKind for Tree {
    fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        self.space.seq_new(seq)
    }
    fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.space.seq_cp(src, dst, from, until)
    }
    fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.space.seq_rm(seq, from, until)
    }
    fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.space.seq_keep(seq, from, until)
    }
}

impl TreeKind for Tree {
    fn check_path(&self, seq: SeqId, planned: &[Option<NodeId>], accepted: &[NodeId]) -> Result<(), Refused> {
        draft_tree::check_path(seq, &self.space.sequence(seq)?.nodes, planned, accepted)
    }
    fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused> {
        self.space.commit_path(seq, accepted)
    }
}
