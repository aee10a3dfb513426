//! `Compute::fast_prefill`: prompts within the error of bf16, and everything else as without it.
use crate::decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::*;

/// A prompt in two chunks and some turns: outputs of every step and layer.
fn outputs(cpu: &Cpu, model: &Model, kind: &str) -> Vec<Vec<Vec<f32>>> {
    let mut session = model.session(cpu, kind, 600);
    new(&mut session, &[A]);
    let steps = [(0, 190), (190, 150), (340, 1), (341, 1), (342, 3)];
    steps.into_iter().map(|(at, n)| model.step(&mut session, &[Span::chain(A, at, n)], 1)).collect()
}

#[test]
fn prompts_are_close_and_tokens_the_same() {
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        for (i, storage) in ["f32", "f16", "bf16", "f16-rot", "q8", "q4-64", "t4"].into_iter().enumerate() {
            let window = (i % 2 == 1).then_some(130);
            let storage: Storage = storage.parse().unwrap();
            let model = Model {
                k: storage,
                v: storage,
                head_dim: 64,
                visibility: Visibility { window, sinks: 0 },
                ..Model::default()
            };
            for kind in ["contiguous", "cells"] {
                let exact = outputs(&Cpu::new(Compute::new(isa, 2)), &model, kind);
                let fast = outputs(&Cpu::new(Compute::new(isa, 2).fast_prefill(true)), &model, kind);
                for (step, (exact, fast)) in exact.iter().zip(&fast).enumerate() {
                    let pairs = || exact.iter().flatten().zip(fast.iter().flatten());
                    let worst = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    let what = format!("{isa} {storage} {kind} step {step}: {worst}");
                    // Values lie between −1 and 1.
                    assert!(worst < 0.01, "{what}");
                    let same = pairs().all(|(a, b)| a.to_bits() == b.to_bits());
                    assert_eq!(same, step >= 2, "{what}");
                }
                let both = Compute::new(isa, 2).fast_prefill(true).deterministic(true);
                let deterministic = Compute::new(isa, 2).deterministic(true);
                let same =
                    outputs(&Cpu::new(both), &model, kind) == outputs(&Cpu::new(deterministic), &model, kind);
                assert!(same, "{isa} {storage} {kind}: --deterministic comes first");
            }
        }
    }
}

/// Heads of other sizes, more positions than a split has, blocks that lie anywhere, and two sequences in a step that share their
/// beginning: the tiles at its end have cells of both, and each sees its own.
#[test]
fn prompts_of_two_branches_are_close() {
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        let shapes = [
            (40, "q8", "paged"),
            (24, "f16", "paged"),
            (80, "bf16", "cells"),
            (128, "q4", "tree"),
            (64, "t4", "paged"),
        ];
        let is_slow = crate::is_slow(isa);
        for (head_dim, storage, kind) in shapes.into_iter().take(if is_slow { 1 } else { 5 }) {
            let storage: Storage = storage.parse().unwrap();
            let (window, n_layers) = ((kind == "cells").then_some(700), 1);
            let visibility = Visibility { window, sinks: 0 };
            let model = Model { k: storage, v: storage, head_dim, n_layers, visibility, ..Model::default() };
            let outputs = |fast: bool| {
                let cpu = Cpu::new(Compute::new(isa, 2).fast_prefill(fast));
                let mut session = model.session(&cpu, kind, 2000);
                new(&mut session, &[A, SeqId(7)]);
                let mut all = Vec::new();
                for at in (0..1100).step_by(100) {
                    // Blocks of another sequence lie between.
                    model.step(&mut session, &[Span::chain(SeqId(7), at / 5, 20)], 1);
                    all.push(model.step(&mut session, &[Span::chain(A, at, 100)], 1));
                }
                session.cache.sequences().unwrap().fork(A, B).unwrap();
                for (at, n) in [(1100, 77), (1177, 80), (1257, 1)] {
                    all.push(model.step(&mut session, &[Span::chain(A, at, n), Span::chain(B, at, n)], 1));
                }
                all
            };
            let (exact, fast) = (outputs(false), outputs(true));
            for (step, (exact, fast)) in exact.iter().zip(&fast).enumerate() {
                let pairs = || exact.iter().flatten().zip(fast.iter().flatten());
                let worst = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(
                    pairs().all(|(a, b)| (a - b).abs() < 0.01),
                    "{isa} {storage} {kind} step {step}: {worst}"
                );
            }
            let same = |step: usize| exact[step] == fast[step];
            assert!(
                !same(3) && !same(exact.len() - 2) && same(exact.len() - 1),
                "{isa} {storage} {kind}: prompts only"
            );
        }
    }
}

/// Sequences that share nothing are decoded as without the flag, however many there are: K and V that are read for few rows
/// do not become pairs.
#[test]
fn a_batch_of_sequences_is_decoded_as_without() {
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        for storage in ["f16", "q8"] {
            let storage: Storage = storage.parse().unwrap();
            let model = Model { k: storage, v: storage, head_dim: 64, ..Model::default() };
            let step = |fast: bool| {
                let cpu = Cpu::new(Compute::new(isa, 2).fast_prefill(fast));
                let mut session = model.session(&cpu, "paged", 2000);
                let all: Vec<SeqId> = (0..48).map(SeqId).collect();
                new(&mut session, &all);
                for (i, seq) in (0..).zip(&all) {
                    model.step(&mut session, &[Span::chain(*seq, 0, 3 + i % 5)], 1);
                }
                let spans: Vec<_> = (0..).zip(&all).map(|(i, seq)| Span::chain(*seq, 3 + i % 5, 1)).collect();
                model.step(&mut session, &spans, 1)
            };
            assert!(step(false) == step(true), "{isa} {storage}");
        }
    }
}

/// A prompt whose keys have these elements, each the same 64 times, and whose values `v` has by token and element.
fn prompt(cpu: &Cpu, storage: &str, k: &[f32], v: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let storage: Storage = storage.parse().unwrap();
    let model =
        Model { k: storage, v: storage, heads: (1, 1), head_dim: 64, n_layers: 1, ..Model::default() };
    let mut session = model.session(cpu, "cells", 600);
    new(&mut session, &[A]);
    let (n, d) = (k.len(), 64);
    let k: Vec<f32> = k.iter().flat_map(|x| vec![*x; d]).collect();
    let v: Vec<f32> = (0..n * d).map(|i| v(i / d, i % d)).collect();
    let q = vec![0.5; n * d];
    let spans = [Span::chain(A, 0, n as u32)];
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    let out = model.attend(&mut step, 0, [&q, &k, &v]);
    step.commit().unwrap();
    out
}

/// A large value is nothing to the queries before it, and a thousand times as large a value leaves those behind it the others'.
#[test]
fn a_large_value_changes_nothing_before_it() {
    let n = 200;
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        for (storage, large) in [("f16", 6e4), ("bf16", 1e30), ("f32", 1e37), ("q8", 6e4)] {
            let cpu = Cpu::new(Compute::new(isa, 2).fast_prefill(true));
            let v = |token: usize, i: usize| if token == 150 && i == 3 { large } else { 0.5 };
            let out = prompt(&cpu, storage, &vec![0.5; n], v);
            for (at, x) in out.iter().enumerate() {
                let (token, i) = (at / 64, at % 64);
                if token < 150 {
                    assert!((x - 0.5).abs() < 2e-3, "{isa} {storage}: token {token}, element {i}: {x}");
                }
                assert!(x.is_finite(), "{isa} {storage}: token {token}, element {i}");
            }
        }
        for large in [500.0, 515.0, 650.0, 970.0, 1050.0] {
            let cpu = Cpu::new(Compute::new(isa, 2).fast_prefill(true));
            let v = |token: usize, i: usize| if token == 150 && i == 3 { large } else { 0.5 };
            let out = prompt(&cpu, "f16", &vec![0.5; n], v);
            for (at, x) in out.iter().enumerate().filter(|(at, _)| at % 64 != 3) {
                assert!((x - 0.5).abs() < 2e-3, "{isa}, {large}: token {}: {x}", at / 64);
            }
        }
    }
}

/// A sink takes nearly all weight, and has a small value: the others, each with a small weight, make up most of the output.
#[test]
fn an_attention_sink_leaves_the_others_their_precision() {
    let n = 200;
    let mut k = vec![0.5; n];
    k[0] = 2.5; // e^8 times the weight of the others
    for isa in Isa::tested().into_iter().filter(|isa| crate::has_fast_attention(*isa)) {
        // bf16 rounds the score of the sink, 14, by up to 0.03.
        let most = if isa.multiplies_word_pairs() { 2e-3 } else { 3e-2 };
        for storage in ["f32", "f16", "q8"] {
            let v = |token: usize, i: usize| {
                if token == 0 { 1e-3 } else { ((token * 31 + i * 17) % 64) as f32 / 64.0 }
            };
            let outputs =
                |fast: bool| prompt(&Cpu::new(Compute::new(isa, 2).fast_prefill(fast)), storage, &k, v);
            let (exact, fast) = (outputs(false), outputs(true));
            for (at, (exact, fast)) in exact.iter().zip(&fast).enumerate().skip(150 * 64) {
                let error = (exact - fast).abs() / exact.abs();
                assert!(error < most, "{isa} {storage}: element {at}: {fast} instead of {exact}");
            }
        }
    }
}
