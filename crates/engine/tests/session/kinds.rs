//! Every cache kind, dtype and chunk size produces the same text. Where two correct paths add in a different order, the
//! first differing token must have been a near-tie; otherwise it is a bug.
use crate::common::{f32_model as model, *};
use kvist_cache::{LayerId, SeqId};
use kvist_device::Storage;
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{ModelFile, top_two};

const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];
const CHUNKS: [u32; 4] = [1, 7, 64, 256];
const DTYPES: [(&str, &str); 10] = [
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8", "q8"),
    ("q4", "q4"),
    ("q8-rot", "q8-rot"),
    ("q4-64-rot", "q4-64-rot"),
    ("q8", "q4"),
    ("q4-rot", "f16"),
    ("t4-o", "t4"),
];

/// The crates' own documentation, frozen so that the tests do not change with it.
const DOCS: [&str; 3] = [
    "# The cache\n\nWHERE tokens live: the integer bookkeeping of a KV cache. A cache hands out cells (room for one \
     token's K and V in every layer of a group) to sequences, and says which cells each query may see. It never \
     touches a byte: a step is prepared, a backend executes its plan, and commit makes it true. It promises that \
     prepare is pure, that a refused or dropped step changes nothing, that a step writes only to free cells, and that \
     reads are a disjoint cover of exactly the visible pairs. It refuses to depend on anything but the standard \
     library, and to contain unsafe code.\n\n```rust\nfn main() {\n    let mut cache = Cache::new(groups);\n    let step = \
     cache.prepare(&request);\n    step.commit();\n",
    "# The backend\n\nKV bytes and attention on the CPU. Keys and values live in pools of their own, head-major, in the \
     dtype that was asked for; attention reads them packed, tile by tile, with an online softmax, and never makes a \
     decoded copy of a cache. K and V meet only in a tile of scores, so that any K dtype goes with any V dtype. It \
     promises results that do not depend on the number of threads, and a decode step that allocates nothing. Every \
     byte has a purpose. A budget refuses before anyone allocates, and guards give back on drop. Pools grow by \
     appended segments of doubling size, so that nothing is copied.\n\n## Errors\n\nThis function returns an error if",
    "# The engine\n\nConversations with branches: what is said, and which of it each branch's cache already holds. A turn \
     renders the whole conversation, keeps the cached tokens that it still begins with, rolls back the rest and feeds \
     only what is new. Forking shares cells, undoing changes only what is said: the next turn rolls back. Text out of \
     a session: prefill, then one token after the other until something ends it.\n\n/// Returns the number of",
];

/// The first `n` tokens of a document.
fn prompt(document: usize, n: usize) -> Vec<u32> {
    let mut tokens = model().tokenizer().unwrap().encode(DOCS[document], true).unwrap();
    assert!(tokens.len() >= n, "document {document} has {} tokens", tokens.len());
    tokens.truncate(n);
    tokens
}

fn config(kind: &str, k: &str, v: &str, context: u32, chunk: u32) -> CacheConfig {
    CacheConfig { k: k.parse().unwrap(), v: v.parse().unwrap(), ..exact(kind, context, chunk) }
}

/// Two most likely tokens this close (in logits, whose spread is about 20) may swap when K and V were computed in a
/// different order. In f32 only sums differ, by parts in 10⁶. A value on the other side of a rounding boundary moves by
/// a whole step of its dtype: a few of those among thousands shift logits by about the same share of a step.
fn near_tie(k: &str, v: &str) -> f32 {
    let of = |name: &str| -> f32 {
        match name.parse::<Storage>().unwrap().dtype.name() {
            "f32" => 1e-3,
            "f16" => 4e-3,
            "bf16" => 3e-2,
            "q8" => 3e-2,
            _ => 3e-1,
        }
    };
    of(k).max(of(v))
}

/// Greedy tokens, each with its lead over the second most likely.
type Trace = Vec<(u32, f32)>;

/// Continues after the last pass by `n` tokens. The session's last row belongs to `seq`.
fn decode(session: &mut ModelSession, seq: SeqId, n: usize) -> Trace {
    let mut trace = Vec::new();
    while trace.len() < n {
        let next = top_two(session.logits_row(session.n_rows() - 1)).unwrap();
        trace.push(next);
        session.forward(&[SequenceInput::chain(seq, &[next.0])], LogitRows::LastOfEach).unwrap();
    }
    trace
}

fn run(config: &CacheConfig, tokens: &[u32], n: usize) -> Trace {
    let mut session = session(model(), config);
    session.prefill(SeqId::ONLY, tokens, &mut |_| true).unwrap();
    decode(&mut session, SeqId::ONLY, n)
}

/// Describes where the two differ by more than a near-tie.
fn compare(what: &str, expected: &Trace, found: &Trace, near_tie: f32) -> Option<String> {
    assert_eq!(expected.len(), found.len(), "{what}");
    let at = expected.iter().zip(found).position(|(a, b)| a.0 != b.0)?;
    let (gap, other) = (expected[at].1, found[at].1);
    println!("{what}: token {at} differs; leads {gap} and {other}");
    (gap.max(other) > near_tie).then(|| {
        format!("{what}: token {at} is {} for {}, leads {other} and {gap}", found[at].0, expected[at].0)
    })
}

/// All kinds against one, at every dtype. The chunk sizes rotate, so that over the dtypes every kind runs with every
/// one.
fn check_kinds(policy: impl Fn(CacheConfig) -> CacheConfig, document: usize, n_prompt: usize, n: usize) {
    let tokens = prompt(document, n_prompt);
    let context = (n_prompt + n) as u32;
    let mut bad = Vec::new();
    for (row, (k, v)) in DTYPES.into_iter().enumerate() {
        let expected = run(&policy(config("contiguous", k, v, context, 100)), &tokens, n);
        for (column, kind) in KINDS.into_iter().enumerate() {
            let chunk = CHUNKS[(row + column) % CHUNKS.len()];
            let found = run(&policy(config(kind, k, v, context, chunk)), &tokens, n);
            let what = format!("K {k} V {v} {kind} chunk {chunk}");
            bad.extend(compare(&what, &expected, &found, near_tie(k, v)));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

#[test]
fn every_kind_and_chunk_gives_the_same_text() {
    check_kinds(|config| config, 0, 200, 12);
}

#[test]
fn and_with_a_window_and_sinks() {
    check_kinds(|config| CacheConfig { window: Some(48), sinks: 4, ..config }, 1, 100, 12);
}

#[test]
fn in_f32_the_text_is_that_of_no_cache() {
    for (document, n) in [(0, 200), (1, 150), (2, 90)] {
        let tokens = prompt(document, n);
        let context = tokens.len() as u32 + 16;
        let mut all = session(model(), &exact("contiguous", context, context));
        let mut history = tokens.clone();
        let mut expected = Vec::new();
        for _ in 0..16 {
            all.clear().unwrap();
            all.forward(&[SequenceInput::chain(SeqId::ONLY, &history)], LogitRows::LastOfEach).unwrap();
            let next = top_two(all.logits_row(0)).unwrap();
            expected.push(next);
            history.push(next.0);
        }
        let bad: Vec<String> = KINDS
            .iter()
            .filter_map(|kind| {
                let found = run(&exact(kind, context, 64), &tokens, 16);
                compare(&format!("document {document} {kind}"), &expected, &found, near_tie("f32", "f32"))
            })
            .collect();
        assert!(bad.is_empty(), "{}", bad.join("\n"));
    }
}

/// Tolerance for logits in f32 when sums are split at other places.
const F32_TOLERANCE: f32 = 1e-3;
const A: SeqId = SeqId::ONLY;
const B: SeqId = SeqId(1);
const C: SeqId = SeqId(2);

#[test]
fn sequences_in_one_step_equal_one_by_one() {
    let prompts = [prompt(0, 70), prompt(1, 41), prompt(2, 1)];
    for kind in ["cells", "tree"] {
        let config = CacheConfig { max_rows: 8, ..exact(kind, 256, 128) };
        let mut batch = session(model(), &config);
        batch.cache().sequences().unwrap().seq_new(B).unwrap();
        batch.cache().sequences().unwrap().seq_new(C).unwrap();
        let seqs = [A, B, C];
        let feeds: Vec<SequenceInput> =
            seqs.iter().zip(&prompts).map(|(seq, p)| SequenceInput::chain(*seq, p)).collect();
        batch.forward(&feeds, LogitRows::LastOfEach).unwrap();
        let mut last = Vec::new();
        let mut traces = vec![Trace::new(); 3];
        for _ in 0..8 {
            last.clear();
            for (row, trace) in traces.iter_mut().enumerate() {
                let next = top_two(batch.logits_row(row)).unwrap();
                trace.push(next);
                last.push([next.0]);
            }
            let feeds: Vec<SequenceInput> =
                seqs.iter().zip(&last).map(|(seq, t)| SequenceInput::chain(*seq, t)).collect();
            batch.forward(&feeds, LogitRows::LastOfEach).unwrap();
        }
        for (i, (tokens, found)) in prompts.iter().zip(&traces).enumerate() {
            let mut alone = session(model(), &exact("contiguous", 256, 128));
            alone.prefill(A, tokens, &mut |_| true).unwrap();
            let expected = decode(&mut alone, A, 8);
            let what = format!("{kind} sequence {i}");
            assert_eq!(compare(&what, &expected, found, near_tie("f32", "f32")), None);
            let difference = max_difference(alone.logits_row(0), batch.logits_row(i));
            assert!(difference <= F32_TOLERANCE, "{what}: logits differ by {difference}");
        }
    }
}

#[test]
fn a_fork_equals_a_sequence_of_its_own() {
    let (trunk, left, right) = (prompt(0, 60), prompt(1, 20), prompt(2, 13));
    for kind in ["cells", "tree"] {
        for dtype in ["f32", "q8"] {
            let mut forked = session(model(), &config(kind, dtype, dtype, 256, 64));
            forked.prefill(A, &trunk, &mut |_| true).unwrap();
            let written = forked.counters();
            forked.cache().sequences().unwrap().fork(A, B).unwrap();
            assert_eq!(forked.counters(), written, "a fork moves no byte");
            // Alternate, so that neither branch is contiguous.
            for (l, r) in left.chunks(5).zip(right.chunks(4)) {
                forked.forward(&[SequenceInput::chain(A, l)], LogitRows::LastOfEach).unwrap();
                forked.forward(&[SequenceInput::chain(B, r)], LogitRows::LastOfEach).unwrap();
            }
            for (seq, branch) in [(A, &left), (B, &right)] {
                let n = forked.cache().next_position(seq).unwrap() as usize;
                assert_eq!(n, trunk.len() + branch.len());
                let tokens = [&trunk[..], branch].concat();
                let mut alone = session(model(), &config("contiguous", dtype, dtype, 256, 64));
                // Recompute the last token of the branch and continue.
                forked.cache().sequences().unwrap().seq_rm(seq, n as u32 - 1, u32::MAX).unwrap();
                forked
                    .forward(&[SequenceInput::chain(seq, &tokens[n - 1..])], LogitRows::LastOfEach)
                    .unwrap();
                alone.prefill(A, &tokens, &mut |_| true).unwrap();
                let what = format!("{kind} {dtype} {seq}");
                let (expected, found) = (decode(&mut alone, A, 8), decode(&mut forked, seq, 8));
                assert_eq!(compare(&what, &expected, &found, near_tie(dtype, dtype)), None);
            }
        }
    }
}

/// Returns the logits after `tokens` on each of `seqs` and leaves the cache unchanged.
fn look(session: &mut ModelSession, seqs: &[SeqId], token: u32) -> Vec<Vec<f32>> {
    let look = |seq: &SeqId| {
        session.forward(&[SequenceInput::chain(*seq, &[token])], LogitRows::LastOfEach).unwrap();
        let end = session.cache().next_position(*seq).unwrap();
        session.cache().sequences().unwrap().seq_rm(*seq, end - 1, u32::MAX).unwrap();
        session.logits_row(0).to_vec()
    };
    seqs.iter().map(look).collect()
}

#[test]
fn reading_after_compact_equals_before() {
    let token = prompt(2, 1)[0];
    for kind in ["cells", "tree"] {
        for (k, v) in [("f32", "f32"), ("q4-rot", "f16")] {
            let mut s = session(model(), &config(kind, k, v, 256, 64));
            s.cache().sequences().unwrap().seq_new(B).unwrap();
            s.prefill(A, &prompt(0, 40), &mut |_| true).unwrap();
            s.cache().sequences().unwrap().fork(A, C).unwrap();
            for seq in [B, A, C, B, A] {
                s.prefill(seq, &prompt(1, 17), &mut |_| true).unwrap();
            }
            // Holes: one sequence loses the middle of the common prefix, another sequence is removed.
            s.cache().sequences().unwrap().seq_rm(A, 50, 60).unwrap();
            s.cache().sequences().unwrap().seq_rm(C, 45, u32::MAX).unwrap();
            s.cache().sequences().unwrap().seq_rm(B, 10, 20).unwrap();
            let before = look(&mut s, &[A, B, C], token);
            let report = |s: &mut ModelSession| s.cache().report()[0].clone();
            let old = report(&mut s);
            assert!(old.high_water > old.used_cells, "{old:?}: nothing to compact");
            s.compact().unwrap();
            let new = report(&mut s);
            assert_eq!((new.used_cells, new.high_water), (old.used_cells, old.used_cells), "{kind}");
            assert!(s.counters().bytes_moved > 0);
            for (i, (a, b)) in before.iter().zip(look(&mut s, &[A, B, C], token)).enumerate() {
                let difference = max_difference(a, &b);
                assert!(difference <= F32_TOLERANCE, "{kind} {k} sequence {i}: {difference}");
            }
        }
    }
}

#[test]
fn taps_are_the_residual_stream() {
    let m = model();
    let c = m.config();
    let last = LayerId(c.n_layers as u16 - 1);
    let tokens = prompt(0, 12);
    let mut s = session(m, &exact("contiguous", 64, 16));
    s.set_taps(&[last, LayerId(0), last]).unwrap();
    s.forward(&[SequenceInput::chain(A, &tokens)], LogitRows::All).unwrap();
    for tap in 0..3 {
        assert_eq!(s.tap(tap).len(), tokens.len() * c.hidden);
    }
    assert_eq!(s.tap(0), s.tap(2));
    assert!(max_difference(s.tap(0), s.tap(1)) > 0.1);
    let error = s.set_taps(&[LayerId(last.0 + 1)]).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
}

#[test]
fn the_last_tap_is_what_logits_are_made_of() {
    // A model with tied f32 embeddings, so that the output layer can be read from its file: logits =
    // norm(tap)·embeddingᵀ.
    let folder = fixtures("parity/llama-tied");
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let data = file.tensor(name).unwrap().data().chunks_exact(4);
        data.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let (norm, embedding) = (floats("model.norm.weight"), floats("model.embed_tokens.weight"));
    let m = load(ModelFile::Path(folder.clone())).unwrap();
    let c = m.config();
    let tokens = Expected::read(&folder).tokens;
    let mut s = session(&m, &exact("cells", 128, 64));
    s.set_taps(&[LayerId(c.n_layers as u16 - 1)]).unwrap();
    s.forward(&[SequenceInput::chain(A, &tokens)], LogitRows::All).unwrap();
    for (row, x) in s.tap(0).chunks(c.hidden).enumerate() {
        let mean_square = x.iter().map(|x| x * x).sum::<f32>() / c.hidden as f32;
        let scale = 1.0 / (mean_square + c.norm_eps).sqrt();
        let normed: Vec<f32> = x.iter().zip(&norm).map(|(x, w)| x * scale * w).collect();
        let dot = |w: &[f32]| w.iter().zip(&normed).map(|(a, b)| a * b).sum::<f32>();
        let expected: Vec<f32> = embedding.chunks(c.hidden).map(dot).collect();
        let difference = max_difference(&expected, s.logits_row(row));
        assert!(difference <= F32_TOLERANCE, "row {row}: {difference}");
    }
}
