//! Layers that run without attention store what layers with attention store.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_testing::SplitMix64;

const A: SeqId = SeqId::ONLY;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const LAYERS: u16 = 2;

fn session(backend: &str, kv: Storage) -> Session {
    let group = GroupSpec {
        capacity_tokens: 64,
        visibility: Visibility { window: None, sinks: 0 },
        max_step_tokens: 8,
    };
    let layer = |i| LayerSpec::new(GroupId(0), LayerId(i), KV_HEADS as u32, DIM as u32);
    let spec = PoolSpec {
        layout: Layout { n_heads: HEADS as u32, layers: (0..LAYERS).map(layer).collect() },
        k: kv,
        v: kv,
        capacity_cells: vec![],
        max_step_tokens: 8,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let registry = Registry::of(Reference).with(Box::new(Cpu::default())).with(Box::new(Reference));
    let mut session = registry.session(backend, "cells", &[group], &spec).unwrap();
    session.cache.sequences().unwrap().seq_new(A).unwrap();
    session
}

fn rows(data: &[f32], heads: usize) -> Rows<'_> {
    Rows::F32(data, StridedShape::tokens_first(data.len() / heads / DIM, heads, DIM))
}

/// Runs a step of `n` random tokens, and returns what its layers' attention gave.
fn step(session: &mut Session, n: usize, seed: u64, attends: bool) -> Vec<f32> {
    let mut random = SplitMix64(seed);
    let mut draw = |heads: usize| -> Vec<f32> {
        (0..n * heads * DIM).map(|_| random.index(2001) as f32 / 1000.0 - 1.0).collect()
    };
    let spans = [Span::chain(A, session.cache.next_position(A).unwrap(), n as u32)];
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    let mut outs = Vec::new();
    for layer in (0..LAYERS).map(LayerId) {
        let (q, k, v) = (draw(HEADS), draw(KV_HEADS), draw(KV_HEADS));
        let (k, v) = (rows(&k, KV_HEADS), rows(&v, KV_HEADS));
        if !attends {
            step.store_rows(layer, k, v).unwrap();
            continue;
        }
        let mut out = vec![f32::NAN; q.len()];
        step.attend_rows(AttendRows {
            layer,
            q: rows(&q, HEADS),
            kv: Some((k, Some(v))),
            out: RowsMut::F32(&mut out, StridedShape::tokens_first(n, HEADS, DIM)),
            scale: 0.2,
            softcap: None,
            sinks: None,
        })
        .unwrap();
        outs.extend(out);
    }
    step.commit().unwrap();
    outs
}

/// Every stored row.
fn stored(session: &Session, n: u32) -> Vec<f32> {
    let mut all = Vec::new();
    for layer in (0..LAYERS).map(LayerId) {
        for (side, head, cell) in [Side::K, Side::V].into_iter().flat_map(|side| {
            (0..KV_HEADS as u32).flat_map(move |head| (0..n).map(move |cell| (side, head, cell)))
        }) {
            let mut row = [f32::NAN; DIM];
            session.pools().inspect(layer, side, head, cell, &mut row).unwrap();
            all.extend(row);
        }
    }
    all
}

#[test]
fn stored_rows_are_those_of_attention() {
    for backend in ["cpu", "reference"] {
        for kv in [Storage::F32, Storage::Q8] {
            if backend == "reference" && kv != Storage::F32 {
                continue; // stores f32 alone
            }
            let [mut attends, mut stores] = [(); 2].map(|()| session(backend, kv));
            for (n, seed) in [(5, 1), (1, 2), (3, 3)] {
                step(&mut attends, n, seed, true);
                assert!(step(&mut stores, n, seed, false).is_empty());
            }
            let rows = stored(&attends, 9);
            assert!(rows.iter().any(|value| *value != 0.0));
            assert_eq!(stored(&stores, 9), rows, "{backend}, {kv:?}");
            let outs = [&mut attends, &mut stores].map(|session| step(session, 2, 4, true));
            assert_eq!(outs[0], outs[1], "{backend}, {kv:?}: attention over them");
        }
    }
}

#[test]
fn layers_that_only_store_run_in_order_and_have_their_sizes() {
    let mut session = session("cpu", Storage::F32);
    let spans = [Span::chain(A, 0, 1)];
    let mut half = session.step(&StepRequest { spans: &spans }).unwrap();
    let row = vec![0f32; KV_HEADS * DIM];
    let (k, short) = (rows(&row, KV_HEADS), rows(&row[..DIM], 1));
    assert!(matches!(half.store_rows(LayerId(0), k, short), Err(DeviceError::Sizes { what: "v", .. })));
    half.store_rows(LayerId(0), k, k).unwrap();
    assert!(matches!(half.store_rows(LayerId(0), k, k), Err(DeviceError::LayerOrder(LayerId(0)))));
    assert!(matches!(
        half.store_rows(LayerId(9), k, k),
        Err(DeviceError::UnknownLayer { layer: LayerId(9), .. })
    ));
    assert!(matches!(half.commit(), Err(DeviceError::LayerOrder(LayerId(1)))));
}
