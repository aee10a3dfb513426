//! A float cache gives bit-identical outputs for any sharing, batching and chunking, on every instruction set and any
//! number of threads. q8 and q4 do so with `--deterministic`.
use crate::decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;
use kvist_testing::SplitMix64;

const TRUNK: u32 = 300;
const TURNS: u32 = 12;

/// Every way of computing, with the dtypes that are deterministic there.
fn each(mut check: impl FnMut(Cpu, Model, String)) {
    let best = Isa::best();
    for isa in crate::with_own_attention() {
        for (threads, window) in [(1, None), (2, Some(70)), (3, None)] {
            // Threads share the work in the same way on all of them.
            if threads != 2 && (crate::is_slow(isa) || threads == 1 && isa != best) {
                continue;
            }
            for storage in ["f32", "f16", "bf16", "f16-rot", "q8-64", "q4-64"] {
                let exact = storage.starts_with('q');
                let cpu = Cpu::new(Compute::new(isa, threads).deterministic(exact).tile_attention(true));
                let storage: Storage = storage.parse().unwrap();
                let visibility = Visibility { window, sinks: 0 };
                let model = Model { k: storage, v: storage, head_dim: 64, visibility, ..Model::default() };
                check(cpu, model, format!("{isa}, {threads} threads, {storage}, window {window:?}"));
            }
        }
    }
}

/// Tokens `from..from + n` of text `text`.
fn tokens(text: u64, from: u32, n: u32) -> Vec<u64> {
    (from..from + n).map(|position| text << 32 | u64::from(position)).collect()
}

/// Runs one text in a sequence and a cache of its own, in chunks of `chunk` tokens and then token by token. Returns the
/// outputs of the turns, per layer.
fn alone(cpu: &Cpu, model: &Model, texts: (u64, u64), trunk: u32, chunk: u32) -> Vec<Vec<Vec<f32>>> {
    let mut session = model.session(cpu, "contiguous", 1_000);
    let mut at = 0;
    while at < trunk {
        let n = chunk.min(trunk - at);
        model.step_of(&mut session, &[Span::chain(A, at, n)], &tokens(texts.0, at, n), 1);
        at += n;
    }
    let turn = |at: u32| model.step_of(&mut session, &[Span::chain(A, at, 1)], &tokens(texts.1, at, 1), 1);
    (trunk..trunk + TURNS).map(turn).collect()
}

fn same(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn branches_of_a_shared_trunk_are_as_if_each_had_its_own() {
    each(|cpu, model, what| {
        let mut session = model.session(&cpu, "cells", 1_000);
        new(&mut session, &[A]);
        for at in (0..TRUNK).step_by(60) {
            model.step_of(&mut session, &[Span::chain(A, at, 60)], &tokens(0, at, 60), 1);
        }
        let branches = [SeqId(1), SeqId(2), SeqId(3)];
        for branch in branches {
            session.cache.sequences().unwrap().fork(A, branch).unwrap();
        }
        let row = (model.heads.0 * model.head_dim) as usize;
        let expected: Vec<_> =
            (1..4).map(|i| alone(&cpu, &model, (0, i), TRUNK, 37 + 50 * i as u32)).collect();
        for turn in 0..TURNS {
            let spans = branches.map(|branch| Span::chain(branch, TRUNK + turn, 1));
            let all: Vec<u64> = (1..4).flat_map(|i| tokens(i, TRUNK + turn, 1)).collect();
            let out = model.step_of(&mut session, &spans, &all, 1);
            for (i, expected) in expected.iter().enumerate() {
                for (layer, out) in out.iter().enumerate() {
                    let found = &out[i * row..(i + 1) * row];
                    assert!(same(found, &expected[turn as usize][layer]), "{what}: branch {i}, turn {turn}");
                }
            }
        }
    });
}

#[test]
fn a_sequence_is_the_same_alone_and_inside_a_batch() {
    each(|cpu, model, what| {
        let mut session = model.session(&cpu, "cells", 2_000);
        // Lengths that end inside a block, at its end, and past a split of 1,024 positions.
        let lengths = [17, 128, 301, 512];
        let seqs: Vec<SeqId> = (0..lengths.len() as u32).map(SeqId).collect();
        new(&mut session, &seqs);
        for (i, (seq, length)) in seqs.iter().zip(lengths).enumerate() {
            let mut at = 0;
            while at < length {
                let n = 90.min(length - at);
                let span = Span::chain(*seq, at, n);
                model.step_of(&mut session, &[span], &tokens(10 + i as u64, at, n), 1);
                at += n;
            }
        }
        let row = (model.heads.0 * model.head_dim) as usize;
        let expected: Vec<_> =
            (0..).zip(lengths).map(|(i, n)| alone(&cpu, &model, (10 + i, 20 + i), n, 64)).collect();
        for turn in 0..TURNS {
            let spans: Vec<Span<'_>> =
                seqs.iter().zip(lengths).map(|(seq, n)| Span::chain(*seq, n + turn, 1)).collect();
            let all: Vec<u64> = (0..).zip(lengths).flat_map(|(i, n)| tokens(20 + i, n + turn, 1)).collect();
            let out = model.step_of(&mut session, &spans, &all, 1);
            for (i, expected) in expected.iter().enumerate() {
                for (layer, out) in out.iter().enumerate() {
                    let found = &out[i * row..(i + 1) * row];
                    assert!(
                        same(found, &expected[turn as usize][layer]),
                        "{what}: sequence {i}, turn {turn}"
                    );
                }
            }
        }
    });
}

/// A random tree over a trunk, verified in two steps.
struct TreeCase {
    start: u32,
    parents: Vec<Option<NodeId>>,
    /// Number of nodes in the first step; 0 if all are in the second.
    first: usize,
}

impl TreeCase {
    fn random(random: &mut SplitMix64) -> Self {
        let start = random.pick(&[1, 15, 16, 17, 63, 64, 70, 255, 1008, 1020, 1023, 1024, 1030]);
        let (n_nodes, reach) = (2 + random.below(30), 1 + random.below(6));
        let parents = (0..n_nodes).map(|i| match random.below(8) {
            0 => random.below(i + 1).checked_sub(1).map(NodeId),
            _ => i.checked_sub(1 + random.below(reach).min(i)).map(NodeId),
        });
        let parents: Vec<Option<NodeId>> = parents.collect();
        TreeCase { start, first: random.index(parents.len()), parents }
    }

    /// The path from the root to `node`.
    fn path(&self, node: u32) -> Vec<u32> {
        let up = |node: &u32| self.parents[*node as usize].map(|parent| parent.0);
        let mut path: Vec<u32> = std::iter::successors(Some(node), up).collect();
        path.reverse();
        path
    }

    fn leaves(&self) -> impl Iterator<Item = u32> {
        let is_parent = |node: u32| self.parents.contains(&Some(NodeId(node)));
        (0..self.parents.len() as u32).filter(move |&node| !is_parent(node))
    }
}

/// The token of a node.
fn node(number: u32) -> u64 {
    7 << 32 | u64::from(number)
}

fn prefill(model: &Model, session: &mut Session, seq: SeqId, n_tokens: u32) {
    for at in (0..n_tokens).step_by(150) {
        let n = 150.min(n_tokens - at);
        model.step_of(session, &[Span::chain(seq, at, n)], &tokens(u64::from(seq.0), at, n), 1);
    }
}

/// Every node of a draft tree is computed, to the bit, as if its path were a chain: beside other sequences, with
/// windows shorter than the tree is deep, and over splits and tiles.
#[test]
fn a_node_is_as_if_its_path_were_a_chain() {
    let mut random = SplitMix64(11);
    for isa in crate::with_own_attention() {
        for name in ["f32", "f16", "bf16", "f16-rot", "q8", "q8-64", "q4-64"] {
            for round in 0..if crate::is_slow(isa) { 1 } else { 4 } {
                let exact = name.starts_with('q');
                let cpu =
                    Cpu::new(Compute::new(isa, 1 + round % 3).deterministic(exact).tile_attention(true));
                let storage: Storage = name.parse().unwrap();
                let mut draft = TreeCase::random(&mut random);
                if crate::is_slow(isa) {
                    draft.start %= 70;
                }
                let start = draft.start;
                let visibility = match random.below(4) {
                    0 | 1 => Visibility::FULL,
                    2 => Visibility { window: Some(1 + random.below(8)), sinks: random.below(5) },
                    _ => Visibility { window: Some(1 + random.below(70)), sinks: start + random.below(3) },
                };
                let heads = random.pick(&[(4, 2), (6, 1), (2, 2)]);
                let model =
                    Model { k: storage, v: storage, heads, head_dim: 64, visibility, ..Model::default() };
                let what = format!("{isa}, {name}, {visibility:?}, {heads:?} heads, start {start}");

                let mut session = model.session(&cpu, "tree", 2_000);
                new(&mut session, &[A, B]);
                prefill(&model, &mut session, A, start);
                prefill(&model, &mut session, B, 33);
                let row = (heads.0 * model.head_dim) as usize;
                let mut found: Vec<Vec<Vec<f32>>> = Vec::new(); // [nodes][layers]
                for nodes in [0..draft.first, draft.first..draft.parents.len()] {
                    if nodes.is_empty() {
                        continue;
                    }
                    let spans = [
                        Span::chain(B, session.cache.next_position(B).unwrap(), 2),
                        Span { seq: A, start, new: New::Tree(&draft.parents[nodes.clone()]) },
                    ];
                    let batch = [1 << 40, 2 << 40].into_iter().chain(nodes.clone().map(|n| node(n as u32)));
                    let out = model.step_of(&mut session, &spans, &batch.collect::<Vec<u64>>(), 1);
                    found.extend((2..2 + nodes.len()).map(|token| {
                        out.iter().map(|layer| layer[token * row..(token + 1) * row].to_vec()).collect()
                    }));
                }

                let mut chains = model.session(&cpu, "cells", 4_000);
                new(&mut chains, &[A]);
                prefill(&model, &mut chains, A, start);
                for leaf in draft.leaves() {
                    let (path, seq) = (draft.path(leaf), SeqId(100 + leaf));
                    chains.cache.sequences().unwrap().fork(A, seq).unwrap();
                    let batch: Vec<u64> = path.iter().map(|&n| node(n)).collect();
                    let span = Span::chain(seq, start, path.len() as u32);
                    let out = model.step_of(&mut chains, &[span], &batch, 1);
                    for (i, &n) in path.iter().enumerate() {
                        for (layer, out) in out.iter().enumerate() {
                            let expected = &out[i * row..(i + 1) * row];
                            let found = &found[n as usize][layer];
                            assert!(
                                same(found, expected),
                                "{what}: node {n}, layer {layer}, {:?}",
                                draft.parents
                            );
                        }
                    }
                }
            }
        }
    }
}

/// In a paged cache the K and V of an accepted path move, packed rows and recent ones too: whatever was rejected, later
/// tokens see what they would see after a chain. A fork and an export keep what they had.
#[test]
fn accepted_paths_of_paged_trees_are_as_if_they_were_chains() {
    let mut random = SplitMix64(12);
    for isa in Isa::available() {
        for (round, name) in (0..).zip(["f32", "f16", "bf16", "q8", "q8-64-rot", "q4-64", "t4"]) {
            let exact = name.starts_with(['q', 't']);
            let cpu = Cpu::new(Compute::new(isa, 1 + round % 2).deterministic(exact).tile_attention(true));
            let storage: Storage = name.parse().unwrap();
            let window = [None, Some(20)][round % 2];
            let visibility = Visibility { window, sinks: 0 };
            let model = Model { k: storage, v: storage, head_dim: 64, visibility, ..Model::default() };
            let row = (model.heads.0 * model.head_dim) as usize;
            let mut session = model.session(&cpu, "paged", 2_000);
            let mut chain = model.session(&cpu, "contiguous", 2_000);
            new(&mut session, &[A]);
            let mut end = 1 + random.below(60);
            prefill(&model, &mut session, A, end);
            prefill(&model, &mut chain, A, end);
            session.cache.sequences().unwrap().fork(A, B).unwrap();
            let mut n_drafted = 0;
            for turn in 0..12 {
                let TreeCase { parents, .. } = TreeCase::random(&mut random);
                let first = n_drafted;
                n_drafted += parents.len() as u32;
                let mut path = Vec::new();
                let mut at = random.below(parents.len() as u32 + 1).checked_sub(1).map(NodeId);
                while let Some(node) = at {
                    path.insert(0, node);
                    at = parents[node.0 as usize];
                }
                // The fork writes to the block that it shares with the trunk.
                let start_of_b = session.cache.next_position(B).unwrap();
                let spans =
                    [Span { seq: A, start: end, new: New::Tree(&parents) }, Span::chain(B, start_of_b, 1)];
                let mut batch: Vec<u64> = (first..n_drafted).map(node).collect();
                batch.push(9 << 32 | u64::from(turn));
                let kept = [Kept::Path(&path), Kept::First(turn % 2)];
                let out = model.step_kept(&mut session, &spans, &batch, 1, Some(&kept));
                for (i, accepted) in path.iter().enumerate() {
                    let span = Span::chain(A, end + i as u32, 1);
                    let expected = model.step_of(&mut chain, &[span], &[node(first + accepted.0)], 1);
                    let at = accepted.0 as usize * row;
                    for (layer, out) in out.iter().enumerate() {
                        let found = &out[at..at + row];
                        assert!(same(found, &expected[layer]), "{isa}, {name}: turn {turn}, node {accepted}");
                    }
                }
                end += path.len() as u32;
                assert_eq!(session.cache.next_position(A), Some(end));
            }
        }
    }
}
