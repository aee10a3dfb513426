//! The reference backend, checked by hand: where rows are stored, what they cost, and what is counted. The
//! conformance suite checks its arithmetic.
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_device::reference::Reference;
use kvist_device::*;

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);

/// 2 query heads; one owner with 2 KV heads of 3 elements, one owner with 1 KV head of 4, and a layer that borrows
/// from the first.
fn spec() -> PoolSpec {
    let layer =
        |owner, n_kv_heads, head_dim| LayerSpec::new(GroupId(0), LayerId(owner), n_kv_heads, head_dim);
    PoolSpec {
        layout: Layout { n_heads: 2, layers: vec![layer(0, 2, 3), layer(1, 1, 4), layer(0, 2, 3)] },
        k: Storage::F32,
        v: Storage::Q8,
        capacity_cells: vec![32],
        max_step_tokens: 8,
        budget: MemoryBudget::new(10_000),
        channels: None,
        recent: Recent::default(),
    }
}

fn session(spec: &PoolSpec) -> Session {
    let group = GroupSpec { capacity_tokens: 32, visibility: Visibility::FULL, max_step_tokens: 8 };
    let mut cache = Cache::new(vec![kinds::build("cells", &group).unwrap()]);
    cache.sequences().unwrap().seq_new(A).unwrap();
    Session::new(cache, Reference.pools(spec).unwrap(), spec)
}

/// A distinct value for every stored element.
fn value(layer: usize, side: usize, position: u32, element: usize) -> f32 {
    (layer * 10_000 + side * 5_000) as f32 + position as f32 * 20.0 + element as f32
}

/// Runs and commits a step of chains, through all layers.
fn step(session: &mut Session, spec: &PoolSpec, spans: &[Span<'_>]) {
    let positions: Vec<u32> = spans.iter().flat_map(|span| (span.start..).take(n_tokens(span))).collect();
    let mut step = session.step(&StepRequest { spans }).unwrap();
    for (l, layer) in spec.layout.layers.iter().enumerate() {
        let (heads, d) = (layer.n_kv_heads as usize, layer.k_dim as usize);
        let rows = |side| -> Vec<f32> {
            positions.iter().flat_map(|&p| (0..heads * d).map(move |i| value(l, side, p, i))).collect()
        };
        let (k, v, q) = (rows(0), rows(1), vec![0.0; positions.len() * 2 * d]);
        let mut out = vec![f32::NAN; q.len()];
        let kv = spec.layout.owns(l).then(|| (Tensor::dense(&k, heads, d), Tensor::dense(&v, heads, d)));
        let (q, out_rows) = (Tensor::dense(&q, 2, d), TensorMut::dense(&mut out, 2, d));
        step.attend(Attend {
            layer: LayerId(l as u16),
            q,
            kv,
            out: out_rows,
            scale: 1.0,
            softcap: None,
            sinks: None,
        })
        .unwrap();
        // All scores are equal, so an output is the mean of what its token sees: itself and all tokens before it.
        for (t, &p) in positions.iter().enumerate() {
            for head in 0..2 {
                let owner = layer.owner.0 as usize;
                for i in 0..d {
                    let element = head / (2 / heads) * d + i;
                    let mean = (0..=p).map(|c| value(owner, 1, c, element)).sum::<f32>() / (p + 1) as f32;
                    let found = out[(t * 2 + head) * d + i];
                    assert!(
                        (found - mean).abs() <= 1e-2,
                        "layer {l}, position {p}, head {head}: {found}, {mean}"
                    );
                }
            }
        }
    }
    step.commit().unwrap();
}

fn n_tokens(span: &Span<'_>) -> usize {
    match span.new {
        New::Chain(n) => n as usize,
        New::Tree(nodes) => nodes.len(),
    }
}

fn row(
    session: &Session,
    layer: u16,
    side: Side,
    head: u32,
    cell: u32,
    d: usize,
) -> Result<Vec<f32>, DeviceError> {
    let mut row = vec![f32::NAN; d];
    session.pools().inspect(LayerId(layer), side, head, cell, &mut row).map(|()| row)
}

#[test]
fn rows_lie_where_they_should_and_are_counted() {
    let spec = spec();
    let mut session = session(&spec);
    step(&mut session, &spec, &[Span::chain(A, 0, 5)]);
    for (layer, owner, heads, d) in [(0, 0, 2, 3), (1, 1, 1, 4), (2, 0, 2, 3)] {
        for (side, s) in [(Side::K, 0), (Side::V, 1)] {
            for cell in 0..5 {
                for head in 0..heads {
                    let expected: Vec<f32> =
                        (0..d).map(|i| value(owner, s, cell, head as usize * d + i)).collect();
                    assert_eq!(
                        row(&session, layer, side, head, cell, d).unwrap(),
                        expected,
                        "layer {layer}, cell {cell}"
                    );
                }
            }
        }
    }
    // Errors name what does not exist.
    let refused =
        |layer, head, cell, d| row(&session, layer, Side::K, head, cell, d).unwrap_err().to_string();
    assert_eq!(refused(0, 2, 0, 3), "KV head 2 does not exist: there are 2");
    assert_eq!(refused(1, 1, 0, 4), "KV head 1 does not exist: there are 1");
    assert_eq!(refused(1, 0, 5, 4), "cell 5 does not exist: there are 5");
    assert!(refused(0, 0, 0, 4).starts_with("row: 4 elements cannot hold the shape [3]"));
    assert!(refused(3, 0, 0, 3).starts_with("layer 3 does not exist: the model has 3"));

    // 2 sides × 4 bytes: 48 bytes of the first layer and 32 of the second per token, and 48 read by the borrowing
    // layer.
    let counters = session.pools().counters();
    assert_eq!((counters.bytes_written, counters.bytes_moved), (5 * 80, 0));
    assert_eq!(counters.bytes_read, 5 * (48 + 32 + 48), "each cell once, however many tokens see it");
    assert_eq!((session.pools().bytes(), spec.budget.usage().of(Purpose::KvCache)), (400, 400));
    assert_eq!(Reference.usage(&spec, &[5]).map(|usage| usage.total()), Some(400));
    assert_eq!(Reference.usage(&spec, &[]), None, "a group without cells is no group");
    assert_eq!(
        (Reference.kv_bound(&spec), Reference.bound(&spec).map(|usage| usage.total())),
        (Some(32 * 80), Some(32 * 80))
    );
    assert_eq!(
        spec.bytes_per_token(),
        2 * (12 + 3 + 2) + (16 + 4 + 2),
        "as it is asked for: K in f32, V in q8"
    );

    // A step reads and writes only what it needs, and grows the pools only by what is missing.
    step(&mut session, &spec, &[Span::chain(A, 5, 1)]);
    let counters = session.pools().counters();
    assert_eq!((counters.bytes_written, counters.bytes_read), (6 * 80, (5 + 6) * (48 + 32 + 48)));
    assert_eq!(session.pools().bytes(), 6 * 80);
}

/// Regression test: compaction did nothing, and no test of this crate noticed. A sequence moves down to the cells of
/// a removed one.
#[test]
fn compaction_moves_rows_and_counts_them() {
    let spec = spec();
    let mut session = session(&spec);
    session.cache.sequences().unwrap().seq_new(B).unwrap();
    step(&mut session, &spec, &[Span::chain(A, 0, 3), Span::chain(B, 0, 4)]);
    session.cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
    let before = session.cache.report()[0].clone();
    assert!(before.high_water > 4, "{before:?}");
    session.compact().unwrap();
    let after = session.cache.report()[0].clone();
    assert_eq!((after.high_water, after.used_cells), (4, 4));
    for cell in 0..4 {
        let expected: Vec<f32> = (0..4).map(|i| value(1, 1, cell, i)).collect();
        assert_eq!(row(&session, 1, Side::V, 0, cell, 4).unwrap(), expected, "cell {cell}");
    }
    let moved = session.pools().counters().bytes_moved;
    assert!(moved > 0 && moved.is_multiple_of(80), "{moved} bytes are moved: both owners, whole rows");
    step(&mut session, &spec, &[Span::chain(B, 4, 1)]);
}

/// Forked sequences diverge: the one that continues gets a copy of its part of a block, in every layer that stores K
/// and V.
#[test]
fn a_copied_block_holds_what_the_shared_one_does() {
    let spec = spec();
    let group = GroupSpec { capacity_tokens: 32, visibility: Visibility::FULL, max_step_tokens: 8 };
    let paged = PagedSpec { block_tokens: 4, groups: vec![group], rollback_tokens: 0, prefix: None };
    let mut cache = Cache::paged(&paged).unwrap();
    cache.sequences().unwrap().seq_new(A).unwrap();
    let mut session = Session::new(cache, Reference.pools(&spec).unwrap(), &spec);
    step(&mut session, &spec, &[Span::chain(A, 0, 6)]);
    session.cache.sequences().unwrap().fork(A, B).unwrap();
    step(&mut session, &spec, &[Span::chain(B, 6, 1)]);
    assert_eq!(session.pools().counters().bytes_moved, 2 * 80, "two tokens of the last block");
    step(&mut session, &spec, &[Span::chain(A, 6, 2), Span::chain(B, 7, 1)]);
    assert_eq!(session.pools().counters().bytes_moved, 2 * 80);
}

/// Keys of 3 elements; values of 2 in rows of their own, or values that are the keys' first 2 elements.
#[test]
fn values_may_be_shorter_than_keys_and_a_prefix_of_them() {
    for values in [Values::Stored, Values::PrefixOfK] {
        let layer = LayerSpec { v_dim: 2, values, ..LayerSpec::new(GroupId(0), LayerId(0), 1, 3) };
        let spec = PoolSpec { layout: Layout { n_heads: 2, layers: vec![layer] }, ..spec() };
        let bytes = if values == Values::Stored { 4 * (3 + 2) } else { 4 * 3 };
        assert_eq!(layer.cell_bytes(Storage::F32, Storage::F32), bytes);
        assert_eq!(Reference.usage(&spec, &[5]).unwrap().of(Purpose::KvCache), 5 * bytes);

        let mut session = session(&spec);
        let k = [1.0, 0.0, 0.5, 0.0, 1.0, -0.5];
        let v = [10.0, 20.0, 30.0, 40.0];
        let q = [2.0, 0.0, 0.0, 0.0, 3.0, 1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 1.0];
        let mut out = [f32::NAN; 2 * 2 * 2];
        let mut step = session.step(&StepRequest { spans: &[Span::chain(A, 0, 2)] }).unwrap();
        let shape = StridedShape::tokens_first;
        let mut attend = |has_v: bool| {
            step.attend_rows(AttendRows {
                layer: LayerId(0),
                q: Rows::F32(&q, shape(2, 2, 3)),
                kv: Some((Rows::F32(&k, shape(2, 1, 3)), has_v.then_some(Rows::F32(&v, shape(2, 1, 2))))),
                out: RowsMut::F32(&mut out, shape(2, 2, 2)),
                scale: 1.0,
                softcap: None,
                sinks: None,
            })
        };
        let stores_v = values == Values::Stored;
        match attend(!stores_v) {
            Err(DeviceError::MissingValues(LayerId(0))) => assert!(stores_v),
            Err(DeviceError::UnexpectedValues(LayerId(0))) => assert!(!stores_v),
            other => panic!("{values:?}: {other:?}"),
        }
        attend(stores_v).unwrap();
        step.commit().unwrap();
        // The first token sees itself alone, the second both.
        let value = |token: usize, i: usize| match values {
            Values::Stored => v[token * 2 + i],
            Values::PrefixOfK => k[token * 3 + i],
        };
        for head in 0..2 {
            let dot = |key: usize| (0..3).map(|i| q[6 + head * 3 + i] * k[key * 3 + i]).sum::<f32>().exp();
            let (first, second) = (dot(0), dot(1));
            for i in 0..2 {
                assert_eq!(out[head * 2 + i], value(0, i), "{values:?}");
                let expected = (first * value(0, i) + second * value(1, i)) / (first + second);
                assert!((out[4 + head * 2 + i] - expected).abs() < 1e-5, "{values:?}: {out:?}");
            }
        }
        let mut row = [f32::NAN; 2];
        session.pools().inspect(LayerId(0), Side::V, 0, 1, &mut row).unwrap();
        assert_eq!(row, [value(1, 0), value(1, 1)]);
    }
}
