//! The plan shapes, written as scripts.
use super::rig::Rig;
use crate::reference::Operation;
use kvist_cache::{NodeId, SeqId};

/// A usage pattern of one cache kind.
pub struct Shape {
    pub name: &'static str,
    pub kind: &'static str,
    /// Whether the first layer group has a window and sinks. (The second one, if there is one, always has.)
    pub windowed: bool,
    /// Whether the pools are small, so that random operations fill them.
    pub crowded: bool,
    /// The script; it uses about `length` tokens of context.
    pub script: fn(&mut Rig<'_>, u32),
}

const fn shape(kind: &'static str, name: &'static str, script: fn(&mut Rig<'_>, u32)) -> Shape {
    Shape { name, kind, windowed: false, crowded: false, script }
}
const fn windowed(kind: &'static str, name: &'static str, script: fn(&mut Rig<'_>, u32)) -> Shape {
    Shape { windowed: true, ..shape(kind, name, script) }
}
const fn crowded(kind: &'static str, windowed: bool) -> Shape {
    Shape { windowed, crowded: true, ..shape(kind, "random operations", random) }
}

pub const SHAPES: [Shape; 28] = [
    shape("contiguous", "prefill", prefill),
    shape("contiguous", "single decode", decode),
    shape("contiguous", "chunked prefill and rewind", chunked),
    windowed("contiguous", "chunks under a window", chunked),
    windowed("ring", "chunks past the wrap", wrap),
    windowed("ring", "decode past the wrap", wrap_by_ones),
    shape("cells", "batch of sequences", batch),
    windowed("cells", "batch under windows", batch),
    shape("cells", "forks of a trunk", forks),
    windowed("cells", "forks under windows", forks),
    shape("cells", "holes", holes),
    shape("cells", "compacted", compacted),
    shape("tree", "draft trees", draft_trees),
    windowed("tree", "draft trees under windows", draft_trees),
    shape("tree", "trees beside chains", mixed),
    shape("tree", "trees on a shared trunk", trunk_trees),
    shape("paged", "batch of sequences", batch),
    windowed("paged", "batch under windows", batch),
    shape("paged", "forks of a trunk", forks),
    windowed("paged", "forks under windows", forks),
    shape("paged", "trees beside chains", paths),
    windowed("paged", "trees under windows", paths),
    shape("paged", "other capacities", resized),
    windowed("paged", "other capacities under windows", resized),
    crowded("contiguous", false),
    crowded("ring", true),
    crowded("cells", false),
    crowded("tree", true),
];

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const C: SeqId = SeqId(2);
const D: SeqId = SeqId(3);
const E: SeqId = SeqId(4);

fn prefill(rig: &mut Rig<'_>, length: u32) {
    rig.chains(&[(A, length)]);
    rig.chains(&[(A, 1)]);
}

fn decode(rig: &mut Rig<'_>, length: u32) {
    rig.chains(&[(A, length.saturating_sub(3).max(1))]);
    (0..4).for_each(|_| rig.chains(&[(A, 1)]));
}

fn chunked(rig: &mut Rig<'_>, length: u32) {
    rig.chunks(A, length, length / 3 + 1);
    rig.perform(&Operation::Rewind { len: length / 2 });
    rig.chains(&[(A, 3)]);
    rig.chains(&[(A, 1)]);
}

fn wrap(rig: &mut Rig<'_>, length: u32) {
    let max = rig.max_step_tokens();
    rig.chunks(A, length + length / 2 + 5, max);
    rig.chains(&[(A, max)]);
    rig.chains(&[(A, 1)]);
}

fn wrap_by_ones(rig: &mut Rig<'_>, length: u32) {
    rig.chunks(A, length.saturating_sub(6), rig.max_step_tokens());
    (0..length.min(20) + 8).for_each(|_| rig.chains(&[(A, 1)]));
}

fn batch(rig: &mut Rig<'_>, length: u32) {
    [A, B, C].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(B, length / 2 + 1), (A, 3), (C, length)]);
    rig.chains(&[(A, 1), (B, 1), (C, 1)]);
    rig.perform(&Operation::New { seq: D });
    rig.chains(&[(C, 1), (D, length / 3 + 2), (A, 2), (B, 1)]);
    rig.chains(&[(D, 1), (B, 1)]);
    rig.perform(&Operation::Keep { seq: B, from: 0, until: u32::MAX });
    rig.chains(&[(B, 2)]);
}

fn forks(rig: &mut Rig<'_>, length: u32) {
    rig.perform(&Operation::New { seq: A });
    rig.chains(&[(A, length)]);
    [B, C, D].into_iter().for_each(|dst| rig.fork(A, dst));
    rig.chains(&[(A, 1), (B, 1), (C, 1), (D, 1)]);
    rig.chains(&[(D, 5), (A, 1), (C, 2)]);
    rig.fork(D, E);
    rig.chains(&[(A, 1), (B, 1), (C, 1), (D, 1), (E, 1)]);
    rig.perform(&Operation::Remove { seq: A, from: 0, until: u32::MAX });
    rig.chains(&[(E, 3), (C, 1)]);
}

/// Blocks of two sequences lie in turn. When one of them ends, the cache shrinks to what the others need, then to that and
/// a little more, and grows.
fn resized(rig: &mut Rig<'_>, length: u32) {
    [A, B].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(A, length / 2 + 1), (B, length / 3 + 1)]);
    (0..4).for_each(|_| rig.chains(&[(B, 17), (A, 17)]));
    rig.fork(A, C);
    rig.chains(&[(A, 1), (C, 2)]);
    rig.perform(&Operation::Remove { seq: B, from: 0, until: u32::MAX });
    rig.resize(0);
    rig.resize(40);
    rig.chains(&[(A, 3), (C, 1)]);
    rig.resize(4 * length + 333);
    rig.perform(&Operation::New { seq: D });
    rig.chains(&[(D, length), (A, 1)]);
    rig.perform(&Operation::Remove { seq: A, from: 0, until: u32::MAX });
    rig.resize(32);
    rig.chains(&[(C, 1), (D, 1)]);
}

fn holes(rig: &mut Rig<'_>, length: u32) {
    let length = length.max(4);
    [A, B].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(A, length), (B, length / 2 + 1)]);
    rig.perform(&Operation::Remove { seq: A, from: length / 4, until: length / 2 }); // the middle
    rig.chains(&[(A, 1), (B, 1)]);
    rig.perform(&Operation::Remove { seq: B, from: 0, until: length / 4 }); // a prefix
    rig.perform(&Operation::Copy { src: A, dst: C, from: length / 3, until: length }); // from the middle on
    rig.chains(&[(C, 2), (A, length / 3 + 1), (B, 1)]);
    rig.perform(&Operation::Remove { seq: A, from: length.saturating_sub(2), until: u32::MAX }); // the end
    rig.chains(&[(A, 1), (B, 4), (C, 1)]);
}

fn compacted(rig: &mut Rig<'_>, length: u32) {
    let length = length.max(4);
    [A, B].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(A, length / 2 + 1), (B, length / 3 + 1)]);
    (0..4).for_each(|_| rig.chains(&[(B, 1), (A, 17)]));
    rig.perform(&Operation::Compact); // two sequences decoded in turn, with no free cells between them
    rig.chains(&[(A, 1), (B, 1)]);
    rig.fork(A, C);
    rig.perform(&Operation::Remove { seq: A, from: 1, until: length / 3 + 2 });
    rig.perform(&Operation::Remove { seq: B, from: 0, until: 3 });
    rig.chains(&[(C, 2), (A, 1)]);
    rig.perform(&Operation::Compact);
    rig.chains(&[(A, 3), (B, 1), (C, 1)]);
}

fn draft_trees(rig: &mut Rig<'_>, length: u32) {
    rig.perform(&Operation::New { seq: A });
    rig.chains(&[(A, length)]);
    rig.spans(&[(A, 0, 7)]);
    rig.spans(&[(A, 0, 4)]); // a second draft tree span after the first
    rig.accept_any(A);
    rig.chains(&[(A, 1)]);
    rig.spans(&[(A, 0, 18)]);
    rig.perform(&Operation::CommitPath { seq: A, accepted: Vec::<NodeId>::new() });
    rig.chains(&[(A, 2)]);
}

fn mixed(rig: &mut Rig<'_>, length: u32) {
    [A, B, C].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(A, length), (B, 2), (C, length / 2 + 1)]);
    rig.spans(&[(A, 0, 5), (B, 1, 0), (C, 0, 3)]);
    rig.spans(&[(B, 4, 0), (C, 0, 6)]);
    rig.accept_any(C);
    rig.spans(&[(C, 1, 0), (A, 0, 2), (B, 0, 1)]);
    rig.accept_any(A);
    rig.perform(&Operation::Compact);
    rig.spans(&[(C, 1, 0), (A, 1, 0), (B, 0, 3)]);
}

fn trunk_trees(rig: &mut Rig<'_>, length: u32) {
    let length = length.max(4);
    rig.perform(&Operation::New { seq: A });
    rig.chains(&[(A, length)]);
    [B, C, D].into_iter().for_each(|dst| rig.fork(A, dst));
    rig.spans(&[(A, 0, 4), (B, 0, 4), (C, 2, 0), (D, 0, 1)]);
    rig.accept_any(B);
    rig.perform(&Operation::Remove { seq: D, from: length / 2, until: u32::MAX });
    rig.spans(&[(D, 0, 3), (A, 0, 2), (B, 1, 0)]);
}

/// Every commit keeps a path of every tree; forks share the blocks that trees are written to.
fn paths(rig: &mut Rig<'_>, length: u32) {
    [A, B, C].into_iter().for_each(|seq| rig.perform(&Operation::New { seq }));
    rig.chains(&[(A, length), (B, 2), (C, length / 2 + 1)]);
    rig.spans(&[(A, 0, 9), (B, 1, 0), (C, 0, 18)]);
    rig.spans(&[(A, 0, 5)]);
    rig.fork(A, D);
    rig.fork(A, E);
    rig.spans(&[(D, 0, 7), (A, 0, 7), (B, 17, 0), (E, 1, 0)]);
    (0..3).for_each(|_| rig.spans(&[(D, 0, 4), (E, 0, 6), (C, 1, 0)]));
    rig.perform(&Operation::Remove { seq: A, from: 0, until: u32::MAX });
    rig.chains(&[(E, 3), (C, 1), (D, 1)]);
}

fn random(rig: &mut Rig<'_>, length: u32) {
    for _ in 0..12 + length.min(24) {
        rig.random_operation();
    }
}
