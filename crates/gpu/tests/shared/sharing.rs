//! Sequences that share a trunk, in one step and one by one: the same bits, in every storage.
use crate::common::device;
use crate::decoding::{A, Model};
use kvist_cache::*;
use kvist_device::*;

const BRANCHES: u64 = 9;

/// A trunk of a few splits, forked into branches that go on by a few tokens each. Returns the outputs of the last steps:
/// one step for all branches, or one for each.
fn branches(backend: &dyn Backend, model: &Model, kind: &str, trunk: u32, together: bool) -> Vec<Vec<u32>> {
    let mut session = model.session(backend, kind, trunk + 2 * 16 * BRANCHES as u32);
    session.cache.sequences().unwrap().seq_new(A).unwrap();
    let mut at = 0;
    while at < trunk {
        let n = model.max_step_tokens.min(trunk - at);
        model.step(&mut session, &[Span::chain(A, at, n)], 1);
        at += n;
    }
    let all: Vec<SeqId> = (0..BRANCHES).map(|i| SeqId(i as u32)).collect();
    for seq in &all[1..] {
        session.cache.sequences().unwrap().seq_cp(A, *seq, 0, trunk).unwrap();
    }
    let mut out: Vec<Vec<u32>> = vec![Vec::new(); all.len()];
    for round in 0..3u32 {
        // Spans of different lengths: 1, 2, 3, 1, ...
        let spans: Vec<Span<'_>> = all
            .iter()
            .map(|seq| {
                let before: u32 = (0..round).map(|round| 1 + (seq.0 + round) % 3).sum();
                Span::chain(*seq, trunk + before, 1 + (seq.0 + round) % 3)
            })
            .collect();
        let mut add = |seqs: &[Span<'_>], rows: Vec<Vec<f32>>| {
            let mut first = 0;
            for span in seqs {
                let New::Chain(n) = span.new else { continue };
                let width = (model.heads.0 * model.head_dim) as usize;
                for rows in &rows {
                    let rows = &rows[first * width..(first + n as usize) * width];
                    out[span.seq.0 as usize].extend(rows.iter().map(|x| x.to_bits()));
                }
                first += n as usize;
            }
        };
        match together {
            true => {
                let rows = model.step(&mut session, &spans, 2);
                add(&spans, rows);
            }
            false => {
                for span in &spans {
                    let rows = model.step(&mut session, std::slice::from_ref(span), 2);
                    add(std::slice::from_ref(span), rows);
                }
            }
        }
    }
    out
}

#[test]
fn branches_of_a_trunk_give_the_same_bits_together_and_alone() {
    let Some(device) = device() else { return };
    // Trunks of more than a split, whose end is shared in part, and of less.
    let cases = [
        ("f32", (4, 2), "cells", 1040),
        ("q8", (3, 3), "paged", 1040),
        ("t4-o", (4, 2), "cells", 70),
        ("q4-64-rot", (8, 1), "paged", 70),
        ("bf16-rot", (4, 2), "tree", 70),
        // More query rows than a workgroup has.
        ("q8", (14, 1), "cells", 70),
    ];
    for (storage, heads, kind, trunk) in cases {
        let storage: Storage = storage.parse().unwrap();
        let model =
            Model { k: storage, v: storage, heads, n_layers: 1, max_step_tokens: 520, ..Model::default() };
        let together = branches(&device, &model, kind, trunk, true);
        let alone = branches(&device, &model, kind, trunk, false);
        assert!(together == alone, "{storage} {heads:?} {kind} {trunk}");
    }
}

/// Query heads of a KV head, from one to more than a workgroup has, in steps of one token and of several: as the reference
/// computes them.
#[test]
fn any_number_of_query_heads_shares_a_kv_head() {
    let Some(device) = device() else { return };
    for (heads, head_dim) in
        [((3, 3), 40), ((8, 2), 64), ((7, 1), 33), ((16, 1), 64), ((24, 2), 20), ((40, 1), 16)]
    {
        let model = Model { heads, head_dim, n_layers: 1, max_step_tokens: 70, ..Model::default() };
        let steps = |backend: &dyn Backend| -> Vec<f32> {
            let mut session = model.session(backend, "contiguous", 128);
            let steps = [(0, 70), (70, 1), (71, 3), (74, 9), (83, 1)];
            let mut step = |(start, n)| model.step(&mut session, &[Span::chain(A, start, n)], 1);
            steps.into_iter().flat_map(&mut step).flatten().collect()
        };
        let (found, expected) = (steps(&device), steps(&reference::Reference));
        assert_eq!(found.len(), expected.len());
        for (i, (x, y)) in found.iter().zip(&expected).enumerate() {
            assert!((x - y).abs() <= 1e-5, "{heads:?} of {head_dim}: element {i} is {x}, not {y}");
        }
    }
}
