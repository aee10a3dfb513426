//! The reference model: what a cache must do, implemented as simply as possible.
//!
//! A [`ReferenceCache`] stores `(sequence, position) → value` in maps, plus the speculative nodes with their parents,
//! and evaluates the visibility rule token by token. A value is the number of the write that made it, so no two tokens of
//! a run have the same value. The model has no cells: a cache's reads are compared with it, never computed by it.
//!
//! Any code that drives a cache can drive a reference model next to it: ask [`ReferenceCache::visible`] what every
//! token of a batch must see, execute the step, then call [`ReferenceCache::apply`]. [`Drive`] does this with random
//! operations.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use std::collections::{BTreeMap, BTreeSet};

mod checks;
mod choices;
mod drive;
mod operation;
mod tables;

pub use choices::{Choices, SplitMix64};
pub use drive::{Drive, replay};
pub use operation::{Operation, OwnedKept, OwnedSpan, OwnedTokens, StepEnd};
pub use tables::{DeviceTable, visible_pairs};

/// The semantics of a cache kind, by the names of [`KINDS`](kvist_cache::kinds::KINDS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// One sequence; `rewind`.
    Contiguous,
    /// One sequence; drops what no later query can see.
    Ring,
    /// Many sequences.
    Cells,
    /// Many sequences; draft trees, whose nodes may outlive their step.
    Tree,
    /// Many sequences; draft trees, of which the commit keeps a path. It refuses more than this model says: bookkeeping/paged
    /// has its own. Scripts that use this one copy prefixes and remove tails only.
    Paged,
}

impl Model {
    /// The semantics of the kind `name`; `None` if the reference model does not know it.
    pub fn of(name: &str) -> Option<Model> {
        match name {
            "contiguous" => Some(Model::Contiguous),
            "ring" => Some(Model::Ring),
            "cells" => Some(Model::Cells),
            "tree" => Some(Model::Tree),
            "paged" => Some(Model::Paged),
            _ => None,
        }
    }
    fn has_many_sequences(self) -> bool {
        matches!(self, Model::Cells | Model::Tree | Model::Paged)
    }
}

/// What a query sees: a value, and its position in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seen {
    /// The number of the write that made it.
    pub value: u64,
    /// As in [`ReadItem::first_index`](kvist_cache::ReadItem).
    pub index: u32,
}

#[derive(Clone, Debug)]
struct ModelNode {
    parent: Option<NodeId>,
    position: u32,
    value: u64,
}

#[derive(Clone, Debug, Default)]
struct ModelSequence {
    tokens: BTreeMap<u32, u64>,
    next_position: u32,
    nodes: Vec<ModelNode>,
}

/// The reference model of a cache. See the [module](self).
#[derive(Clone, Debug)]
pub struct ReferenceCache {
    model: Model,
    /// One per layer group.
    groups: Vec<GroupSpec>,
    sequences: BTreeMap<SeqId, ModelSequence>,
    n_writes: u64,
}

impl ReferenceCache {
    /// Makes the reference model of a cache with these layer groups, which all store the same tokens.
    pub fn new(model: Model, groups: &[GroupSpec]) -> Self {
        assert!(!groups.is_empty(), "a cache needs at least one layer group");
        let mut reference =
            ReferenceCache { model, groups: groups.to_vec(), sequences: BTreeMap::new(), n_writes: 0 };
        reference.clear();
        reference
    }

    /// Removes every sequence. Values are not reused.
    pub fn clear(&mut self) {
        self.sequences.clear();
        if !self.model.has_many_sequences() {
            self.sequences.insert(SeqId::ONLY, ModelSequence::default());
        }
    }

    /// Ids of the live sequences, ascending.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> {
        self.sequences.keys().copied()
    }
    /// See [`Cache::next_position`](kvist_cache::Cache::next_position).
    pub fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.next_position)
    }
    /// See [`Cache::seq_len`](kvist_cache::Cache::seq_len).
    pub fn seq_len(&self, seq: SeqId) -> Option<u32> {
        self.stored(seq, self.groups[0].visibility).map(|stored| stored.len() as u32)
    }
    /// Speculative nodes of `seq`.
    pub fn n_nodes(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|s| s.nodes.len() as u32)
    }
    /// Parent of every speculative node of `seq`, by number.
    pub fn parents(&self, seq: SeqId) -> Vec<Option<NodeId>> {
        self.sequences.get(&seq).map_or(Vec::new(), |s| s.nodes.iter().map(|node| node.parent).collect())
    }

    /// `(position, value)` of every committed token that a group with this visibility must still store, ascending.
    pub fn stored(&self, seq: SeqId, visibility: Visibility) -> Option<Vec<(u32, u64)>> {
        let sequence = self.sequences.get(&seq)?;
        let next = sequence.next_position;
        let tokens = sequence.tokens.iter().map(|(&position, &value)| (position, value));
        Some(tokens.filter(|(p, _)| self.model != Model::Ring || visibility.sees(next, *p)).collect())
    }

    /// Every value that a group with this visibility must still store, speculative nodes included.
    pub fn live(&self, visibility: Visibility) -> BTreeSet<u64> {
        let mut live = BTreeSet::new();
        for (&seq, sequence) in &self.sequences {
            live.extend(self.stored(seq, visibility).into_iter().flatten().map(|(_, value)| value));
            live.extend(sequence.nodes.iter().map(|node| node.value));
        }
        live
    }

    /// Values of `seq`'s speculative nodes, by number.
    pub fn node_values(&self, seq: SeqId) -> Vec<u64> {
        self.sequences.get(&seq).map_or(Vec::new(), |s| s.nodes.iter().map(|node| node.value).collect())
    }

    /// The values that the tokens of the next applied batch will get, in batch order.
    pub fn new_values(&self, request: &StepRequest<'_>) -> std::ops::Range<u64> {
        let n_tokens: u64 = request.spans.iter().map(|span| u64::from(n_tokens(span))).sum();
        self.n_writes..self.n_writes + n_tokens
    }

    /// The values that each token of the batch must see, in batch order, under the visibility of one layer group. The
    /// request must be one that is [not refused](ReferenceCache::refusal).
    pub fn visible(&self, request: &StepRequest<'_>, visibility: Visibility) -> Vec<BTreeSet<u64>> {
        let seen = self.seen(request, visibility);
        seen.into_iter().map(|token| token.into_iter().map(|seen| seen.value).collect()).collect()
    }

    /// Like [`visible`](ReferenceCache::visible), with the index of each value, ascending by value.
    pub fn seen(&self, request: &StepRequest<'_>, visibility: Visibility) -> Vec<Vec<Seen>> {
        self.executed(request).seen_by_last(request, visibility)
    }

    /// Position of every token of the batch, in batch order.
    pub fn positions(&self, request: &StepRequest<'_>) -> Vec<u32> {
        self.executed(request).positions_of_last(request)
    }

    /// [`ReferenceCache::positions`], for a request that has just been executed.
    fn positions_of_last(&self, request: &StepRequest<'_>) -> Vec<u32> {
        let mut positions = Vec::new();
        for span in request.spans {
            let nodes = &self.sequences[&span.seq].nodes;
            match span.new {
                New::Chain(n) => positions.extend(span.start..span.start + n),
                New::Tree(parents) => {
                    positions.extend(nodes[nodes.len() - parents.len()..].iter().map(|node| node.position));
                }
            }
        }
        positions
    }

    /// [`ReferenceCache::seen`], for a request that has just been executed.
    fn seen_by_last(&self, request: &StepRequest<'_>, visibility: Visibility) -> Vec<Vec<Seen>> {
        let mut answer = Vec::new();
        for span in request.spans {
            let (sequence, n_tokens) = (&self.sequences[&span.seq], n_tokens(span));
            let see = |position: u32, c: u32| visibility.sees(position, c);
            for i in 0..n_tokens {
                let mut seen = Vec::new();
                let position = match span.new {
                    New::Chain(_) => span.start + i,
                    New::Tree(_) => {
                        let number = sequence.nodes.len() as u32 - n_tokens + i;
                        let position = sequence.nodes[number as usize].position;
                        let mut node = Some(NodeId(number));
                        while let Some(NodeId(n)) = node {
                            let ancestor = &sequence.nodes[n as usize];
                            if see(position, ancestor.position) {
                                seen.push(Seen { value: ancestor.value, index: ancestor.position });
                            }
                            node = ancestor.parent;
                        }
                        position
                    }
                };
                for (&index, &value) in sequence.tokens.range(..=position).filter(|(c, _)| see(position, **c))
                {
                    seen.push(Seen { value, index });
                }
                seen.sort_unstable();
                answer.push(seen);
            }
        }
        answer
    }

    /// The reason why a cache must refuse this step; `None` if it must accept it.
    pub fn refusal(&self, request: &StepRequest<'_>) -> Option<Refused> {
        if request.spans.is_empty() {
            return Some(Refused::Empty);
        }
        for (i, span) in request.spans.iter().enumerate() {
            if request.spans[..i].iter().any(|other| other.seq == span.seq) {
                return Some(Refused::TwoSpansOfOneSequence(span.seq));
            }
            if n_tokens(span) == 0 {
                return Some(Refused::Empty);
            }
            if span.start.checked_add(n_tokens(span)).is_none() {
                return Some(Refused::PositionOverflow { seq: span.seq });
            }
        }
        if !self.model.has_many_sequences() && request.spans.len() > 1 {
            return Some(Refused::Unsupported("one sequence"));
        }
        for span in request.spans {
            let Some(sequence) = self.sequences.get(&span.seq) else {
                return Some(Refused::UnknownSequence(span.seq));
            };
            let at_end = span.start == sequence.next_position;
            let not_at_end =
                Refused::NotAtEnd { seq: span.seq, expected: sequence.next_position, got: span.start };
            match (self.model, span.new) {
                (Model::Contiguous | Model::Ring, New::Tree(_)) => {
                    return Some(Refused::Unsupported("no trees"));
                }
                _ if !at_end => return Some(not_at_end),
                (Model::Cells, New::Tree(_)) => return Some(Refused::Unsupported("no trees")),
                (_, New::Chain(_)) if !sequence.nodes.is_empty() => {
                    return Some(Refused::Speculating(span.seq));
                }
                (_, New::Chain(_)) => {}
                (_, New::Tree(parents)) => {
                    for (i, parent) in parents.iter().enumerate() {
                        let number = (sequence.nodes.len() + i) as u32;
                        if parent.is_some_and(|parent| parent.0 >= number) {
                            return Some(Refused::BadParent { seq: span.seq, node: NodeId(number) });
                        }
                    }
                }
            }
        }
        let needed: u32 = request.spans.iter().map(n_tokens).sum();
        for (g, group) in self.groups.iter().enumerate() {
            if self.model == Model::Ring {
                if needed > group.max_step_tokens {
                    let max_step_tokens = group.max_step_tokens;
                    return Some(Refused::StepTooLong { max_step_tokens, got: needed });
                }
                continue;
            }
            let free = group.capacity_tokens - self.live(group.visibility).len() as u32;
            if needed > free {
                return Some(Refused::NoSpace { group: GroupId(g as u16), needed, free, reclaimable: 0 });
            }
        }
        None
    }

    /// Applies the step. It must be one that is [not refused](ReferenceCache::refusal). In `paged` it keeps no node.
    pub fn apply(&mut self, request: &StepRequest<'_>) {
        self.execute(request);
        if self.model == Model::Paged {
            self.sequences.values_mut().for_each(|sequence| sequence.nodes.clear());
        }
    }

    /// The model with the step's tokens and nodes, before its commit.
    fn executed(&self, request: &StepRequest<'_>) -> Self {
        let mut after = self.clone();
        after.execute(request);
        after
    }

    fn execute(&mut self, request: &StepRequest<'_>) {
        for span in request.spans {
            let sequence = self.sequences.get_mut(&span.seq).expect("the step was not refused");
            match span.new {
                New::Chain(n) => {
                    for _ in 0..n {
                        sequence.tokens.insert(sequence.next_position, self.n_writes);
                        sequence.next_position += 1;
                        self.n_writes += 1;
                    }
                }
                New::Tree(parents) => {
                    for &parent in parents {
                        let position = match parent {
                            None => sequence.next_position,
                            Some(parent) => sequence.nodes[parent.0 as usize].position + 1,
                        };
                        sequence.nodes.push(ModelNode { parent, position, value: self.n_writes });
                        self.n_writes += 1;
                    }
                }
            }
        }
    }

    /// Applies the step like [`apply`](ReferenceCache::apply), except that every span keeps only what `kept` says. See
    /// [`Step::commit_kept`](kvist_cache::Step::commit_kept).
    pub fn apply_kept(&mut self, request: &StepRequest<'_>, kept: &[Kept<'_>]) -> Result<(), Refused> {
        let planned = request.spans.len();
        if kept.len() != planned {
            return Err(Refused::KeptSpans { planned, got: kept.len() });
        }
        let mut after = self.executed(request);
        for (span, kept) in request.spans.iter().zip(kept) {
            let seq = span.seq;
            let sequence = after.sequences.get_mut(&seq).expect("the step was not refused");
            match (kept, span.new) {
                (Kept::All, New::Tree(_)) if self.model == Model::Paged => {
                    return Err(Refused::Unsupported("a tree is kept by a path"));
                }
                (Kept::All, _) => {}
                (Kept::First(kept), New::Chain(planned)) if *kept > planned => {
                    return Err(Refused::KeepsMore { seq, planned, kept: *kept });
                }
                (Kept::First(kept), New::Chain(_)) => {
                    sequence.next_position = span.start + kept;
                    let next_position = sequence.next_position;
                    sequence.tokens.retain(|&position, _| position < next_position);
                }
                (Kept::Path(path), New::Tree(_)) => after.commit_path(seq, path)?,
                _ => return Err(Refused::Unsupported("a chain is kept by a length, a draft tree by a path")),
            }
        }
        *self = after;
        Ok(())
    }

    /// See [`Rewind::rewind`](kvist_cache::Rewind::rewind).
    pub fn rewind(&mut self, len: u32) -> Result<(), Refused> {
        let sequence =
            self.sequences.get_mut(&SeqId::ONLY).expect("such a kind always has its only sequence");
        if len > sequence.next_position {
            return Err(Refused::CannotGrow { len: sequence.next_position, asked: len });
        }
        sequence.tokens.retain(|&position, _| position < len);
        sequence.next_position = len;
        Ok(())
    }

    /// See [`Sequences::seq_new`](kvist_cache::Sequences::seq_new).
    pub fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        if self.sequences.contains_key(&seq) {
            return Err(Refused::SequenceExists(seq));
        }
        self.sequences.insert(seq, ModelSequence::default());
        Ok(())
    }

    /// See [`Sequences::seq_cp`](kvist_cache::Sequences::seq_cp).
    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let source = self.sequences.get(&src).ok_or(Refused::UnknownSequence(src))?.clone();
        let until = until.min(source.next_position);
        let mut copy = self.sequences.get(&dst).cloned().unwrap_or_default();
        if copy.next_position > from {
            return Err(Refused::Occupied { seq: dst, position: copy.next_position - 1 });
        }
        if !copy.nodes.is_empty() {
            return Err(Refused::Speculating(dst));
        }
        if from < until {
            copy.tokens.extend(source.tokens.range(from..until));
            copy.next_position = until;
        }
        self.sequences.insert(dst, copy);
        Ok(())
    }

    /// See [`Sequences::fork`](kvist_cache::Sequences::fork).
    pub fn fork(&mut self, src: SeqId, dst: SeqId) -> Result<(), Refused> {
        self.seq_cp(src, dst, 0, u32::MAX)
    }

    /// See [`Sequences::seq_rm`](kvist_cache::Sequences::seq_rm).
    pub fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let sequence = self.sequences.get_mut(&seq).ok_or(Refused::UnknownSequence(seq))?;
        if from >= until {
            return Ok(());
        }
        sequence.tokens.retain(|position, _| !(from..until).contains(position));
        if from <= sequence.next_position && until >= sequence.next_position {
            sequence.next_position = from;
            sequence.nodes.clear();
            if from == 0 {
                self.sequences.remove(&seq);
            }
        }
        Ok(())
    }

    /// See [`Sequences::seq_keep`](kvist_cache::Sequences::seq_keep).
    pub fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        if !self.sequences.contains_key(&seq) {
            return Err(Refused::UnknownSequence(seq));
        }
        self.sequences.retain(|&other, _| other == seq);
        self.seq_rm(seq, until, u32::MAX)?;
        if self.sequences.contains_key(&seq) {
            self.seq_rm(seq, 0, from)?;
        }
        Ok(())
    }

    /// See [`Trees::commit_path`](kvist_cache::Trees::commit_path).
    pub fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused> {
        let sequence = self.sequences.get_mut(&seq).ok_or(Refused::UnknownSequence(seq))?;
        let mut parent = None;
        for &node in accepted {
            match sequence.nodes.get(node.0 as usize) {
                Some(n) if n.parent == parent => parent = Some(node),
                _ => return Err(Refused::BadParent { seq, node }),
            }
        }
        for node in accepted {
            let node = &sequence.nodes[node.0 as usize];
            sequence.tokens.insert(node.position, node.value);
            sequence.next_position = node.position + 1;
        }
        sequence.nodes.clear();
        Ok(())
    }

    /// See [`Trees::discard`](kvist_cache::Trees::discard).
    pub fn discard(&mut self, seq: SeqId) -> Result<(), Refused> {
        self.commit_path(seq, &[])
    }
}

/// Number of tokens of one span.
fn n_tokens(span: &Span<'_>) -> u32 {
    match span.new {
        New::Chain(n) => n,
        New::Tree(parents) => parents.len() as u32,
    }
}
