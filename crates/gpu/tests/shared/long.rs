//! Contexts of several splits, compared with the truth: scalar attention in f64 over the rows as they are stored. The conformance
//! suite has contexts of up to a few hundred tokens, where a query has one split.
//!
//! `KVIST_LONG=1` adds longer contexts, which take minutes in the CUDA emulation.
use crate::common::device;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::*;
use kvist_testing::SplitMix64;
use std::collections::HashMap;

const LAYER: LayerId = LayerId(0);
const TRUNK: SeqId = SeqId(0);
const MAX_STEP: u32 = 512;
/// A cell of 5,000 that is left out or read twice changes a result by some 2e-4.
const TOLERANCE: f64 = 1e-5;

#[derive(Clone, Copy)]
struct Case {
    storage: &'static str,
    kind: &'static str,
    /// Query heads, KV heads.
    heads: (u32, u32),
    dim: u32,
    visibility: Visibility,
    trunk: u32,
    /// Sequences that go on from the whole trunk, the trunk's own included.
    branches: u32,
    /// Attention sinks of the model: one more score for each query head.
    sinks: bool,
}

/// What a query sees is always at least two splits of 1,024 positions.
const CASES: [Case; 4] = [
    // Odd numbers of heads; 41 branches fold their trunk's splits to one state per query.
    Case {
        storage: "f16",
        kind: "cells",
        heads: (3, 3),
        dim: 16,
        visibility: Visibility::FULL,
        trunk: 2100,
        branches: 41,
        sinks: false,
    },
    // The window begins inside of a split, the first positions stay visible.
    Case {
        storage: "q8",
        kind: "paged",
        heads: (5, 1),
        dim: 32,
        visibility: Visibility { window: Some(1500), sinks: 5 },
        trunk: 2200,
        branches: 3,
        sinks: true,
    },
    Case {
        storage: "q4",
        kind: "tree",
        heads: (5, 1),
        dim: 32,
        visibility: Visibility::FULL,
        trunk: 2100,
        branches: 9,
        sinks: true,
    },
    Case {
        storage: "f32",
        kind: "contiguous",
        heads: (3, 1),
        dim: 20,
        visibility: Visibility { window: Some(2049), sinks: 1 },
        trunk: 2150,
        branches: 1,
        sinks: false,
    },
];

const LONGER: [Case; 2] = [
    Case { trunk: 5000, branches: 48, ..CASES[0] },
    Case { trunk: 5000, kind: "paged", visibility: Visibility::FULL, ..CASES[1] },
];

/// Rows of any seed: `[heads * dim]`.
fn row(what: u64, seq: SeqId, position: u32, elements: u32) -> Vec<f32> {
    let mut random = SplitMix64(what << 56 ^ u64::from(seq.0) << 32 ^ u64::from(position));
    random.next();
    // Some scores stand out, so that the running maximum changes in later splits.
    (0..elements).map(|_| (random.unit() * 4.0 - 2.0) as f32).collect()
}

/// A session, and its rows as they were read back.
struct Long {
    case: Case,
    session: Session,
    sinks: Option<Vec<f32>>,
    rows: HashMap<(SeqId, u32), [Vec<f32>; 2]>,
}

impl Long {
    fn new(backend: &dyn Backend, case: Case) -> Self {
        let capacity_tokens = case.trunk + 16 * case.branches + MAX_STEP;
        let group = GroupSpec { capacity_tokens, visibility: case.visibility, max_step_tokens: MAX_STEP };
        let cache = Cache::new(vec![kinds::build(case.kind, &group).unwrap()]);
        let storage: Storage = case.storage.parse().unwrap();
        let layer = LayerSpec::new(GroupId(0), LAYER, case.heads.1, case.dim);
        let spec = PoolSpec {
            layout: Layout { n_heads: case.heads.0, layers: vec![layer] },
            k: storage,
            v: storage,
            capacity_cells: cache.capacity_cells(),
            max_step_tokens: MAX_STEP,
            budget: MemoryBudget::unlimited(),
            channels: None,
            recent: Recent::default(),
        };
        let sinks = case.sinks.then(|| (0..case.heads.0).map(|head| 3.0 + head as f32).collect());
        let session = Session::new(cache, backend.pools(&spec).unwrap(), &spec);
        Long { case, session, sinks, rows: HashMap::new() }
    }

    /// A step of chains (sequence, start, tokens): its outputs, `[tokens, heads * dim]`. Reads the new rows back.
    fn step(&mut self, chains: &[(SeqId, u32, u32)]) -> Vec<f32> {
        let Case { heads, dim, .. } = self.case;
        let spans: Vec<Span<'_>> =
            chains.iter().map(|(seq, start, n)| Span::chain(*seq, *start, *n)).collect();
        let tokens: Vec<(SeqId, u32)> =
            chains.iter().flat_map(|(seq, start, n)| (*start..start + n).map(|at| (*seq, at))).collect();
        let rows = |what, heads: u32| -> Vec<f32> {
            tokens.iter().flat_map(|(seq, at)| row(what, *seq, *at, heads * dim)).collect()
        };
        let (q, k, v) = (rows(0, heads.0), rows(1, heads.1), rows(2, heads.1));
        let mut out = vec![f32::NAN; q.len()];
        let dense = |rows, heads: u32| Tensor::dense(rows, heads as usize, dim as usize);
        let mut step = self.session.step(&StepRequest { spans: &spans }).unwrap();
        step.attend(Attend {
            layer: LAYER,
            q: dense(&q, heads.0),
            kv: Some((dense(&k, heads.1), dense(&v, heads.1))),
            out: TensorMut::dense(&mut out, heads.0 as usize, dim as usize),
            scale: 1.0 / (dim as f32).sqrt(),
            softcap: None,
            sinks: self.sinks.as_deref(),
        })
        .unwrap();
        let cells: Vec<u32> =
            step.plan().group(GroupId(0)).writes.iter().flat_map(|run| run.cells()).collect();
        assert_eq!(cells.len(), tokens.len());
        for (token, cell) in tokens.into_iter().zip(cells) {
            let stored = [Side::K, Side::V].map(|side| {
                let mut row = vec![0.0; (heads.1 * dim) as usize];
                for (head, row) in row.chunks_exact_mut(dim as usize).enumerate() {
                    step.pools().inspect(LAYER, side, head as u32, cell, row).unwrap();
                }
                row
            });
            self.rows.insert(token, stored);
        }
        step.commit().unwrap();
        out
    }

    /// What a query sees: its own sequence's rows, and before them those of the trunk.
    fn stored(&self, seq: SeqId, position: u32) -> &[Vec<f32>; 2] {
        &self.rows[&(if position < self.case.trunk { TRUNK } else { seq }, position)]
    }

    /// The truth for one token: `[heads * dim]`.
    fn truth(&self, seq: SeqId, position: u32) -> Vec<f64> {
        let Case { heads, dim, visibility, .. } = self.case;
        let (d, group) = (dim as usize, (heads.0 / heads.1) as usize);
        let sees = |at: &u32| {
            *at < visibility.sinks || visibility.window.is_none_or(|window| position - at < window)
        };
        let seen: Vec<&[Vec<f32>; 2]> = (0..=position).filter(sees).map(|at| self.stored(seq, at)).collect();
        let q = row(0, seq, position, heads.0 * dim);
        let head = |(head, q): (usize, &[f32])| {
            let elements = head / group * d..(head / group + 1) * d;
            let score = |rows: &&[Vec<f32>; 2]| {
                let k = &rows[0][elements.clone()];
                let dot: f64 = q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                dot * f64::from(1.0 / (dim as f32).sqrt())
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
            let max = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
            let norm: f64 = scores.iter().copied().chain(sink).map(|x| (x - max).exp()).sum();
            let mut out = vec![0.0; d];
            for (score, rows) in scores.iter().zip(&seen) {
                let weight = (score - max).exp() / norm;
                out.iter_mut()
                    .zip(&rows[1][elements.clone()])
                    .for_each(|(out, v)| *out += weight * f64::from(*v));
            }
            out
        };
        q.chunks_exact(d).enumerate().flat_map(head).collect()
    }

    /// A step whose every output is the truth.
    fn check(&mut self, chains: &[(SeqId, u32, u32)]) {
        let Case { storage, kind, heads, dim, trunk, .. } = self.case;
        let found = self.step(chains);
        let tokens = chains.iter().flat_map(|(seq, start, n)| (*start..start + n).map(move |at| (*seq, at)));
        let width = (heads.0 * dim) as usize;
        let mut n_tokens = 0;
        for ((seq, position), found) in tokens.zip(found.chunks_exact(width)) {
            n_tokens += 1;
            for (i, (found, truth)) in found.iter().zip(self.truth(seq, position)).enumerate() {
                let error = (f64::from(*found) - truth).abs();
                assert!(
                    error <= TOLERANCE, // false for NaN
                    "{storage} {kind} {heads:?} trunk {trunk}, position {position} of {seq}, element {i}: {found}, not {truth}"
                );
            }
        }
        assert_eq!(n_tokens * width, found.len());
    }

    fn run(&mut self) {
        let Case { trunk, branches, .. } = self.case;
        if let Some(mut sequences) = self.session.cache.sequences() {
            sequences.seq_new(TRUNK).unwrap();
        }
        // All of the trunk but 40 tokens: a chunk of a prefill over several splits, and one token.
        let mut at = 0;
        while at < trunk - 40 {
            let n = MAX_STEP.min(trunk - 40 - at);
            self.step(&[(TRUNK, at, n)]);
            at += n;
        }
        self.check(&[(TRUNK, at, 39)]);
        self.check(&[(TRUNK, at + 39, 1)]);
        let all: Vec<SeqId> = (0..branches).map(SeqId).collect();
        for seq in &all[1..] {
            self.session.cache.sequences().unwrap().seq_cp(TRUNK, *seq, 0, trunk).unwrap();
        }
        // Alone, all together, and with spans of different lengths.
        self.check(&[(all[0], trunk, 1)]);
        let together: Vec<_> = all.iter().map(|seq| (*seq, trunk + u32::from(seq.0 == 0), 1)).collect();
        self.check(&together);
        let lengths: Vec<_> =
            all.iter().map(|seq| (*seq, trunk + 1 + u32::from(seq.0 == 0), 1 + seq.0 % 3)).collect();
        self.check(&lengths);
    }
}

#[test]
fn contexts_of_several_splits_give_the_truth() {
    let Some(device) = device() else { return };
    let longer = if std::env::var_os("KVIST_LONG").is_some() { &LONGER[..] } else { &[] };
    for case in CASES.iter().chain(longer) {
        let began = std::time::Instant::now();
        Long::new(&device, *case).run();
        let Case { storage, kind, heads, trunk, branches, .. } = case;
        println!("{storage} {kind} {heads:?}, {trunk} tokens, {branches} branches: {:?}", began.elapsed());
    }
}
