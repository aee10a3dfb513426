//! Operations as data, so that a failing test can print what it did.
use super::{Choices, Model, ReferenceCache};
use kvist_cache::*;

/// The tokens of an [`OwnedSpan`].
#[derive(Clone, Debug)]
pub enum OwnedTokens {
    /// See [`New::Chain`].
    Chain(u32),
    /// See [`New::Tree`].
    Tree(Vec<Option<NodeId>>),
}

/// A [`Span`] that owns its list of parents.
#[derive(Clone, Debug)]
pub struct OwnedSpan {
    /// The sequence that the span extends.
    pub seq: SeqId,
    /// Claimed end of the sequence; may be wrong on purpose.
    pub start: u32,
    /// The tokens to append.
    pub new: OwnedTokens,
}

impl OwnedSpan {
    /// The span, borrowed, for a request.
    pub fn as_span(&self) -> Span<'_> {
        let new = match &self.new {
            OwnedTokens::Chain(n) => New::Chain(*n),
            OwnedTokens::Tree(parents) => New::Tree(parents),
        };
        Span { seq: self.seq, start: self.start, new }
    }
}

/// A [`Kept`] that owns its path.
#[derive(Clone, Debug)]
pub enum OwnedKept {
    /// See [`Kept::All`].
    All,
    /// See [`Kept::First`].
    First(u32),
    /// See [`Kept::Path`].
    Path(Vec<NodeId>),
}

impl OwnedKept {
    /// The same, borrowed, for a commit.
    pub fn as_kept(&self) -> Kept<'_> {
        match self {
            OwnedKept::All => Kept::All,
            OwnedKept::First(n) => Kept::First(*n),
            OwnedKept::Path(path) => Kept::Path(path),
        }
    }
}

/// What happens to a step or a round of moves after it is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepEnd {
    /// Executed and committed.
    Commit,
    /// Planned and dropped.
    Drop,
    /// Bytes were written, then a layer failed, and the step was dropped.
    Fail,
}

/// One operation on a cache and its reference model.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // named after the methods that they call
pub enum Operation {
    /// `kept` has one entry per span, or none if all tokens are kept.
    Step {
        spans: Vec<OwnedSpan>,
        fate: StepEnd,
        kept: Vec<OwnedKept>,
    },
    Rewind {
        len: u32,
    },
    New {
        seq: SeqId,
    },
    Copy {
        src: SeqId,
        dst: SeqId,
        from: u32,
        until: u32,
    },
    Remove {
        seq: SeqId,
        from: u32,
        until: u32,
    },
    Keep {
        seq: SeqId,
        from: u32,
        until: u32,
    },
    CommitPath {
        seq: SeqId,
        accepted: Vec<NodeId>,
    },
    MoveRound {
        fate: StepEnd,
    },
    Compact,
    Clear,
}

impl Operation {
    /// Chooses the next operation: mostly one that makes sense in the model's state, sometimes an invalid one.
    pub fn choose(
        choices: &mut Choices<'_>,
        model: Model,
        n_ids: u32,
        n_free: u32,
        reference: &ReferenceCache,
    ) -> Operation {
        let any_seq = |choices: &mut Choices<'_>| {
            let n = reference.sequences.len() as u32;
            let live = reference.sequences().nth(choices.below(n) as usize);
            match live {
                Some(seq) if !choices.one_in(12) => seq,
                _ => SeqId(choices.below(n_ids)),
            }
        };
        let position = |choices: &mut Choices<'_>, seq: SeqId| {
            let next = reference.next_position(seq).unwrap_or(0);
            match choices.below(8) {
                0 => 0,
                1 | 2 => next,
                3 => u32::MAX,
                4 => next.saturating_sub(choices.below(4)),
                _ => choices.below(next + 3),
            }
        };
        if !model.has_many_sequences() {
            return match choices.below(16) {
                0 | 1 if model == Model::Contiguous => {
                    Operation::Rewind { len: position(choices, SeqId::ONLY) }
                }
                2 if choices.one_in(8) => Operation::Clear,
                _ => step(choices, model, 1, n_free, reference),
            };
        }
        match choices.below(32) {
            0 | 1 => Operation::New { seq: SeqId(choices.below(n_ids)) },
            2 | 3 => {
                let (src, dst) = (any_seq(choices), SeqId(choices.below(n_ids)));
                Operation::Copy { src, dst, from: 0, until: u32::MAX }
            }
            4 => {
                let (src, dst) = (any_seq(choices), SeqId(choices.below(n_ids)));
                let until = position(choices, src);
                let from = if choices.one_in(2) { position(choices, dst) } else { 0 };
                Operation::Copy { src, dst, from, until }
            }
            5 | 6 => {
                let seq = any_seq(choices);
                Operation::Remove { seq, from: position(choices, seq), until: u32::MAX }
            }
            7 => {
                let seq = any_seq(choices);
                Operation::Remove { seq, from: position(choices, seq), until: position(choices, seq) }
            }
            8 => Operation::Remove { seq: any_seq(choices), from: 0, until: u32::MAX },
            9 if choices.one_in(8) => {
                let seq = any_seq(choices);
                Operation::Keep { seq, from: position(choices, seq), until: position(choices, seq) }
            }
            10 if choices.one_in(4) => Operation::Compact,
            11 => Operation::MoveRound {
                fate: choices.of(&[StepEnd::Commit, StepEnd::Commit, StepEnd::Drop, StepEnd::Fail]),
            },
            12 if choices.one_in(32) => Operation::Clear,
            13..=16 if model == Model::Tree => {
                let seq = any_seq(choices);
                Operation::CommitPath { seq, accepted: path(choices, &reference.parents(seq)) }
            }
            _ => step(choices, model, n_ids, n_free, reference),
        }
    }
}

impl Operation {
    /// Lets a step that is to be committed keep, now and then, only some of its tokens; mostly what it can keep.
    pub(super) fn choose_kept(&mut self, choices: &mut Choices<'_>, reference: &ReferenceCache) {
        if let Operation::Step { spans, fate: StepEnd::Commit, kept } = self
            && choices.one_in(4)
        {
            kept.extend(spans.iter().map(|span| kept_of(choices, span, &reference.parents(span.seq))));
            if choices.one_in(48) {
                kept.pop();
            }
        }
    }
}

/// Mostly a chain from the root to a random node; sometimes an invalid path.
fn path(choices: &mut Choices<'_>, parents: &[Option<NodeId>]) -> Vec<NodeId> {
    if parents.is_empty() || choices.one_in(6) {
        return (0..choices.below(3)).map(|_| NodeId(choices.below(parents.len() as u32 + 1))).collect();
    }
    let mut path = Vec::new();
    let mut node = Some(NodeId(choices.below(parents.len() as u32)));
    while let Some(n) = node {
        path.push(n);
        node = parents[n.0 as usize];
    }
    path.reverse();
    path
}

fn step(
    choices: &mut Choices<'_>,
    model: Model,
    n_ids: u32,
    n_free: u32,
    reference: &ReferenceCache,
) -> Operation {
    let n_live = reference.sequences.len() as u32;
    let n_spans = match choices.below(8) {
        0..=2 => 1,
        3 | 4 => 2,
        5 => 3,
        6 => 1 + choices.below(n_live),
        _ => n_live,
    };
    let n_spans = if model.has_many_sequences() { n_spans.max(1) } else { 1 + u32::from(choices.one_in(64)) };
    let first = choices.below(n_live);
    let live: Vec<SeqId> = reference.sequences().collect();
    let mut left = n_free;
    let mut spans = Vec::new();
    for i in 0..n_spans {
        let seq = match live.get(((first + i) % n_live.max(1)) as usize) {
            Some(&seq) if !choices.one_in(48) => seq,
            _ => SeqId(choices.below(n_ids + 1)),
        };
        let next = reference.next_position(seq).unwrap_or(0);
        let start = if choices.one_in(48) { choices.below(next + 3) } else { next };
        let n = match choices.below(16) {
            0..=7 => 1,
            8..=12 => 1 + choices.below(8),
            13 => 1 + choices.below(left + 1),
            14 => left, // up to the last free cell
            _ => choices.below(40),
        };
        left = left.saturating_sub(n);
        let n_nodes = reference.n_nodes(seq).unwrap_or(0);
        let is_tree = match model {
            Model::Tree => n_nodes > 0 && !choices.one_in(8) || choices.one_in(3),
            _ => choices.one_in(64),
        };
        let new = if is_tree {
            let shape = choices.below(4);
            let parents = (0..n).map(|i| {
                let number = n_nodes + i;
                match shape {
                    _ if choices.one_in(96) => Some(NodeId(choices.below(number + 3))),
                    0 => number.checked_sub(1).map(NodeId),
                    1 => None,
                    2 => number.checked_sub(1 + choices.below(3)).map(NodeId),
                    _ => choices.below(number + 1).checked_sub(1).map(NodeId),
                }
            });
            OwnedTokens::Tree(parents.collect())
        } else {
            OwnedTokens::Chain(n)
        };
        spans.push(OwnedSpan { seq, start, new });
    }
    let fate = choices.of(&[
        StepEnd::Commit,
        StepEnd::Commit,
        StepEnd::Commit,
        StepEnd::Commit,
        StepEnd::Drop,
        StepEnd::Fail,
    ]);
    Operation::Step { spans, fate, kept: Vec::new() }
}

/// Mostly what a span can keep; `parents` are those of the nodes that its sequence has already.
fn kept_of(choices: &mut Choices<'_>, span: &OwnedSpan, parents: &[Option<NodeId>]) -> OwnedKept {
    let wrong = choices.one_in(48);
    match &span.new {
        _ if choices.one_in(4) => OwnedKept::All,
        OwnedTokens::Chain(n) if !wrong => OwnedKept::First(choices.below(n + 1)),
        OwnedTokens::Chain(n) if choices.one_in(2) => OwnedKept::First(n + 1),
        OwnedTokens::Chain(_) => OwnedKept::Path(vec![NodeId(0)]),
        OwnedTokens::Tree(_) if wrong => OwnedKept::First(1),
        OwnedTokens::Tree(new) => {
            let all: Vec<Option<NodeId>> = parents.iter().chain(new).copied().collect();
            let earlier =
                |(i, parent): (usize, &Option<NodeId>)| parent.is_none_or(|node| (node.0 as usize) < i);
            match all.iter().enumerate().all(earlier) {
                true => OwnedKept::Path(path(choices, &all)),
                false => OwnedKept::All, // the step will be refused
            }
        }
    }
}
