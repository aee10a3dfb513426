//! The cell space that the kinds `cells` and `tree` share: reference-counted cells, and sequences as lists of
//! extents.
//!
//! A cell is free exactly when no sequence and no speculative node uses it. A refused operation changes nothing.
//! Tokens outside the sliding window stay stored, because a rollback may need them; the window is only a mask over
//! the reads.
use super::draft_tree::{self, Node};
use super::extents::{Extent, Extents};
use super::shared_prefix::{self, Horizon};
use super::stripes::{Cursor, Stripes};
use super::written::Written;
use super::{GroupSpec, Visibility, compaction, in_sequence_order, window_edge, written_items};
use crate::ids::*;
use crate::plan::*;
use crate::reads::{Mask, ReadItem};
use crate::report::*;
use crate::request::Refused;
use crate::run::CellRun;
use std::collections::BTreeMap;

pub(super) struct CellSpace {
    visibility: Visibility,
    stripes: Stripes,
    sequences: BTreeMap<SeqId, Sequence>,
}

#[derive(Default)]
pub(super) struct Sequence {
    pub committed: Extents,
    pub next_position: u32,
    /// Speculative nodes after the committed end. Always empty in `cells`.
    pub nodes: Vec<Node>,
}

impl Sequence {
    /// The preferred cell for the next token: the one after the last cell of the sequence.
    fn tail(&self) -> Option<u32> {
        match self.nodes.last() {
            Some(node) => Some(node.cell + 1),
            None => self.committed.list().last().map(|extent| extent.run().end()),
        }
    }
}

impl CellSpace {
    pub fn new(group: &GroupSpec) -> Self {
        CellSpace {
            visibility: group.visibility,
            stripes: Stripes::new(group.capacity_tokens),
            sequences: BTreeMap::new(),
        }
    }
    pub fn visibility(&self) -> Visibility {
        self.visibility
    }
    pub fn capacity(&self) -> u32 {
        self.stripes.capacity()
    }
    pub fn sequence(&self, seq: SeqId) -> Result<&Sequence, Refused> {
        self.sequences.get(&seq).ok_or(Refused::UnknownSequence(seq))
    }
    pub fn seq_len(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.committed.n_tokens())
    }
    pub fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.next_position)
    }

    /// Chooses cells for all spans. The kind calls it after all its other checks have passed.
    pub fn place(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused> {
        let needed: u32 = spans.list.iter().map(|span| span.n_tokens).sum();
        let free = self.stripes.free();
        if needed > free {
            return Err(Refused::NoSpace { group, needed, free, reclaimable: 0 });
        }
        let mut cursor = Cursor::default();
        for span in &spans.list {
            let tail = self.sequence(span.seq)?.tail();
            self.stripes.place(&mut cursor, tail, span.n_tokens, out);
        }
        let written_end = out.writes.iter().map(|run| run.end()).max().unwrap_or(0);
        out.cells_end = written_end.max(self.stripes.high_water());
        Ok(())
    }

    pub fn apply(&mut self, spans: &Spans, plan: &GroupPlan) {
        let mut written = Written::new(&plan.writes);
        for span in &spans.list {
            let sequence = self.sequences.get_mut(&span.seq).expect("prepare knew this sequence");
            let parents = draft_tree::parents_of(spans, span);
            let depths = span.parents().map_or(&[][..], |range| &plan.depths[range]);
            let mut done = 0;
            while done < span.n_tokens {
                let run = written.take(span.n_tokens - done);
                self.stripes.add_ref(run);
                match parents {
                    Some(parents) => {
                        sequence.nodes.extend(run.cells().zip(done as usize..).map(|(cell, i)| Node {
                            cell,
                            parent: parents[i],
                            depth: depths[i],
                        }))
                    }
                    None => {
                        let position = sequence.next_position;
                        sequence.committed.push(Extent { position, cell: run.start, len: run.len });
                        sequence.next_position += run.len;
                    }
                }
                done += run.len;
            }
        }
    }

    pub fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan) {
        let GroupPlan { writes, depths, reads, .. } = out;
        let mut scratch = std::mem::take(&mut reads.scratch);
        let sequence = |span: &PlannedSpan| &self.sequences[&span.seq];
        let horizon = |span: &PlannedSpan| {
            let (shallowest, deepest) = match span.parents() {
                None => (0, span.n_tokens - 1),
                Some(nodes) => {
                    depths[nodes].iter().fold((u32::MAX, 0), |(low, high), &d| (low.min(d), high.max(d)))
                }
            };
            Horizon::new(self.visibility, span.start, shallowest, deepest)
        };

        let alone = spans.list.len() == 1;
        let committed = |i: usize| &sequence(&spans.list[i]).committed;
        shared_prefix::share(&mut scratch, reads, &spans.list, committed, horizon);

        let mut written = Written::new(writes);
        for (i, span) in spans.list.iter().enumerate() {
            let first_query = scratch.first_query[i];
            let (sequence, see) = (sequence(span), horizon(span));
            let item = |extent: Extent, mask| ReadItem {
                first_query,
                n_queries: span.n_tokens,
                run: extent.run(),
                first_index: extent.position,
                mask,
            };
            for extent in sequence.committed.within(see.all, see.shared_from(alone)) {
                reads.items.push(item(extent, Mask::All));
            }
            let parents =
                draft_tree::parents_of(spans, span).filter(|p| !draft_tree::is_chain(&sequence.nodes, p));
            for extent in sequence.committed.within(see.some, see.all) {
                match (parents, span.parents()) {
                    (Some(_), Some(range)) => {
                        let (run, position) = (extent.run(), extent.position);
                        let depths = &depths[range];
                        draft_tree::edge_item(
                            reads,
                            first_query,
                            span.start,
                            depths,
                            self.visibility,
                            run,
                            position,
                        );
                    }
                    _ => {
                        let edge = window_edge(self.visibility, span.start, extent.position);
                        reads.items.push(item(extent, edge));
                    }
                }
            }
            match (parents, span.parents()) {
                (Some(parents), Some(range)) => {
                    scratch.nodes.clear();
                    scratch.nodes.extend_from_slice(&sequence.nodes);
                    for (&parent, &depth) in parents.iter().zip(&depths[range]) {
                        scratch.nodes.push(Node { cell: written.take(1).start, parent, depth });
                    }
                    draft_tree::node_items(reads, &mut scratch, first_query, span, self.visibility);
                }
                _ => written_items(reads, first_query, span, self.visibility, &mut written),
            }
        }
        in_sequence_order(reads);
        reads.scratch = scratch;
    }

    pub fn plan_moves(&self, out: &mut Vec<CellCopy>) {
        let wanted = self.sequences.values().flat_map(|sequence| {
            let nodes = sequence.nodes.iter().map(|node| CellRun { start: node.cell, len: 1 });
            sequence.committed.list().iter().map(|extent| extent.run()).chain(nodes)
        });
        compaction::next_round(wanted, self.capacity(), self.stripes.high_water(), out);
    }

    pub fn apply_moves(&mut self, moves: &[CellCopy]) {
        let mut now: Vec<u32> = (0..self.stripes.high_water()).collect();
        for copy in moves {
            (0..copy.len).for_each(|i| now[(copy.from + i) as usize] = copy.to + i);
        }
        self.stripes.relocate(moves);
        for sequence in self.sequences.values_mut() {
            sequence.committed.relocate(|cell| now[cell as usize]);
            sequence.nodes.iter_mut().for_each(|node| node.cell = now[node.cell as usize]);
        }
    }

    pub fn clear(&mut self) {
        self.stripes.clear();
        self.sequences.clear();
    }

    pub fn occupancy(&self) -> Occupancy {
        Occupancy {
            block_tokens: 1,
            capacity_cells: self.capacity(),
            free_cells: self.stripes.free(),
            evictable_cells: 0,
            frees_out_of_window: false,
        }
    }

    pub fn report(&self) -> Report {
        let sequences = self.sequences.iter().map(|(&seq, sequence)| SequenceReport {
            seq,
            len: sequence.committed.n_tokens(),
            next_position: sequence.next_position,
            n_nodes: sequence.nodes.len() as u32,
            n_extents: sequence.committed.list().len() as u32,
        });
        Report {
            capacity_cells: self.capacity(),
            used_cells: self.stripes.used(),
            high_water: self.stripes.high_water(),
            sequences: sequences.collect(),
            blocks: None,
        }
    }

    pub fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        if self.sequences.contains_key(&seq) {
            return Err(Refused::SequenceExists(seq));
        }
        self.sequences.insert(seq, Sequence::default());
        Ok(())
    }

    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let source = self.sequence(src)?;
        let until = until.min(source.next_position);
        if let Some(there) = self.sequences.get(&dst) {
            if there.next_position > from {
                return Err(Refused::Occupied { seq: dst, position: there.next_position - 1 });
            }
            if !there.nodes.is_empty() {
                return Err(Refused::Speculating(dst));
            }
        }
        if from >= until {
            self.sequences.entry(dst).or_default();
            return Ok(());
        }
        // `dst` is taken out of the map while `src` is read, so that it need not be cloned.
        let mut copy = self.sequences.remove(&dst).unwrap_or_default();
        for extent in self.sequences[&src].committed.within(from, until) {
            self.stripes.add_ref(extent.run());
            copy.committed.push(extent);
        }
        copy.next_position = until;
        self.sequences.insert(dst, copy);
        Ok(())
    }

    pub fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let sequence = self.sequences.get_mut(&seq).ok_or(Refused::UnknownSequence(seq))?;
        if from >= until {
            return Ok(());
        }
        sequence.committed.remove(from, until, |run| self.stripes.release(run));
        if from <= sequence.next_position && sequence.next_position <= until {
            sequence.next_position = from;
            for node in sequence.nodes.drain(..) {
                self.stripes.release(CellRun { start: node.cell, len: 1 });
            }
            if from == 0 {
                self.sequences.remove(&seq);
            }
        }
        Ok(())
    }

    pub fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.sequence(seq)?;
        while let Some(other) = self.sequences.keys().copied().find(|&other| other != seq) {
            self.seq_rm(other, 0, u32::MAX)?;
        }
        self.seq_rm(seq, until, u32::MAX)?;
        if self.sequences.contains_key(&seq) {
            self.seq_rm(seq, 0, from)?;
        }
        Ok(())
    }

    /// Makes a root-to-node chain part of `seq`, after checking it, and frees the other nodes.
    pub fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused> {
        draft_tree::check_path(seq, &self.sequence(seq)?.nodes, &[], accepted)?;
        let sequence = self.sequences.get_mut(&seq).expect("its path was checked");
        for node in accepted {
            let cell = sequence.nodes[node.0 as usize].cell;
            sequence.committed.push(Extent { position: sequence.next_position, cell, len: 1 });
            sequence.next_position += 1;
        }
        // The nodes of a chain from the root are always in ascending order.
        let mut accepted = accepted.iter().peekable();
        for (number, node) in sequence.nodes.drain(..).enumerate() {
            if accepted.next_if(|a| a.0 as usize == number).is_none() {
                self.stripes.release(CellRun { start: node.cell, len: 1 });
            }
        }
        Ok(())
    }
}
