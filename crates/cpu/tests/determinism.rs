//! A float cache gives bit-identical outputs for any sharing, batching and chunking, on every instruction set and any
//! number of threads. q8 and q4 do so with `--deterministic`.
mod decoding;
use decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;

const TRUNK: u32 = 300;
const TURNS: u32 = 12;

/// Every way of computing, with the dtypes that are deterministic there.
fn each(mut check: impl FnMut(Cpu, Model, String)) {
    for isa in Isa::available() {
        for (threads, window) in [(1, None), (2, Some(70)), (3, None)] {
            for storage in ["f32", "f16", "bf16", "f16-rot", "q8-64", "q4-64"] {
                let exact = storage.starts_with('q');
                let cpu = Cpu::new(Compute::new(isa, threads).deterministic(exact));
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
