//! All bytes are planned, recorded and released.
use crate::decoding::*;
use kvist_cache::kinds::Visibility;
use kvist_cache::*;
use kvist_cpu::Cpu;
use kvist_device::reference::Reference;
use kvist_device::weights::{Encoding, WeightFormat};
use kvist_device::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn backends() -> [Box<dyn Backend>; 3] {
    [Box::new(Cpu::default()), Box::new(Cpu::default().concatenating()), Box::new(Reference)]
}

/// Sizes that can be computed by hand, from the notes kvist grew out of.
#[test]
fn known_shapes_have_known_sizes() {
    let f16 = Model { k: Storage::F16, v: Storage::F16, ..Model::default() };
    // 12 layers × 2,048 tokens × 12 heads × 64 values × 2 bytes, twice.
    let small = Model { heads: (12, 12), head_dim: 64, n_layers: 12, ..f16.clone() };
    // Llama 7B.
    let llama = Model { heads: (32, 32), head_dim: 128, n_layers: 32, ..f16.clone() };
    // Llama 3 8B: 8 KV heads for 32 query heads. The hidden size of 4,096 does not count.
    let grouped = Model { heads: (32, 8), head_dim: 128, n_layers: 32, ..f16 };
    let cases = [
        ("12 × 12 × 64", small, 36 * KIB, 72 * MIB),
        ("Llama 7B", llama, 512 * KIB, GIB),
        ("Llama 3 8B", grouped, 128 * KIB, 256 * MIB),
    ];
    for (what, model, per_token, all) in cases {
        let spec = model.spec(vec![2_048]);
        assert_eq!(spec.bytes_per_token(), per_token, "{what}, a token");
        let usage = Cpu::default().usage(&spec, &[2_048]).unwrap();
        assert_eq!(usage.of(Purpose::KvCache), all, "{what}, 2,048 tokens");
        assert_eq!(Cpu::default().kv_bound(&spec), Some(all), "{what}, the bound");
    }
}

#[test]
fn borrowers_store_nothing() {
    let model = Model { n_layers: 4, ..Model::default() };
    let mut spec = model.spec(vec![512]);
    let all = Cpu::default().kv_bound(&spec).unwrap();
    (spec.layout.layers[1].owner, spec.layout.layers[3].owner) = (LayerId(0), LayerId(2));
    assert_eq!(Cpu::default().kv_bound(&spec), Some(all / 2));
    let pools = Cpu::default().pools(&spec).unwrap();
    assert_eq!(pools.bytes(), 0);
}

/// Planned equals recorded, byte for byte, at every occupancy.
#[test]
fn the_budget_records_what_was_foreseen() {
    let window = Visibility { window: Some(100), sinks: 4 };
    for backend in backends() {
        // Every storage for K and for V, not always the same.
        for (k, v) in storages().into_iter().zip(storages().into_iter().rev()) {
            for kind in ["contiguous", "ring", "cells", "tree"] {
                let visibility = if kind == "ring" { window } else { Visibility::FULL };
                let budget = MemoryBudget::unlimited();
                let model =
                    Model { k, v, heads: (1, 1), head_dim: 80, visibility, budget, ..Model::default() };
                let mut session = model.session(&*backend, kind, 300);
                let spec = model.spec(session.cache.capacity_cells());
                new(&mut session, &[A]);
                let what = format!("{} {kind} k {k} v {v}", backend.id());
                assert_eq!(Some(model.budget.usage()), backend.usage(&spec, &[0]), "{what}, empty");
                let mut start = 0;
                for n in [1, 99, 156, 1, 43] {
                    model.step(&mut session, &[Span::chain(A, start, n)], 1);
                    start += n;
                    let cells = start.min(spec.capacity_cells[0]);
                    let used = model.budget.usage();
                    assert_eq!(Some(used), backend.usage(&spec, &[cells]), "{what}, {start} tokens");
                    assert_eq!(session.pools().bytes(), used.of(Purpose::KvCache), "{what}");
                }
                assert_eq!(start, 300);
                if kind != "ring" {
                    assert_eq!(Some(model.budget.usage()), backend.bound(&spec), "{what}, full");
                }
                drop(session);
                assert_eq!(model.budget.usage(), Usage::default(), "{what}, after the end");
            }
        }
    }
}

/// One growth is at least as large as was asked for, and the budget knows.
#[test]
fn pools_grow_by_the_chunk_that_was_asked_for() {
    for (chunk, reserved) in [
        (0, [256u32, 512, 1_024, 1_296]),
        (512, [512, 512, 1_024, 1_296]),
        (700, [1_024, 1_024, 1_024, 1_296]),
    ] {
        let backend = Cpu::default().growing_by(chunk);
        let model = Model { max_step_tokens: 700, budget: MemoryBudget::unlimited(), ..Model::default() };
        let mut session = model.session(&backend, "contiguous", 1_296);
        new(&mut session, &[A]);
        let spec = model.spec(vec![1_296]);
        let mut start = 0;
        for (n, reserved) in [1, 299, 300, 696].into_iter().zip(reserved) {
            model.step(&mut session, &[Span::chain(A, start, n)], 1);
            start += n;
            let used = model.budget.usage();
            assert_eq!(Some(used), backend.usage(&spec, &[start]), "{start} tokens by {chunk}");
            let bytes = u64::from(reserved) * spec.bytes_per_token();
            assert_eq!(used.of(Purpose::KvCache), bytes, "{start} tokens by {chunk}");
        }
    }
}

/// Allocate, use, free: usage returns to its start, along with everything else in the budget.
#[test]
fn a_cache_gives_back_all_it_took() {
    let model = Model { budget: MemoryBudget::new(GIB), ..Model::default() };
    let weights = model.budget.reserve(Purpose::Weights, 12_345).unwrap();
    let start = model.budget.usage();
    for backend in backends() {
        for kind in ["contiguous", "cells", "tree"] {
            let mut first = model.session(&*backend, kind, 1_000);
            let mut second = model.session(&*backend, kind, 1_000);
            for session in [&mut first, &mut second] {
                new(session, &[A]);
                model.step(session, &[Span::chain(A, 0, 200)], 1);
                model.step(session, &[Span::chain(A, 200, 100)], 1);
            }
            assert!(model.budget.usage().of(Purpose::KvCache) > 0);
            drop(first);
            model.step(&mut second, &[Span::chain(A, 300, 1)], 1);
            second.cache.clear();
            drop(second);
            assert_eq!(model.budget.usage(), start, "{} {kind}", backend.id());
        }
    }
    drop(weights);
    assert_eq!(model.budget.usage(), Usage::default());
}

/// K and V are separate regions, and cells that no step has written are zero, in every head and segment.
#[test]
fn fresh_cells_are_zero_and_sides_apart() {
    for backend in backends() {
        for storage in storages() {
            let model = Model { k: storage, v: storage, ..Model::default() };
            let mut session = model.session(&*backend, "cells", 600);
            new(&mut session, &[A, B]);
            // Stripes of 16: A's 3 tokens are in cells 0..3 and B's 250 after them, so the cells between stay
            // unwritten.
            model.step(&mut session, &[Span::chain(A, 0, 3), Span::chain(B, 0, 197)], 1);
            model.step(&mut session, &[Span::chain(B, 197, 100)], 1);
            let mut row = [f32::NAN; 32];
            let mut n_fresh = 0;
            for layer in 0..model.n_layers {
                for head in 0..model.heads.1 {
                    for cell in 0..session.cache.report()[0].high_water {
                        let mut all = Vec::new();
                        for side in [Side::K, Side::V] {
                            session.pools().inspect(LayerId(layer), side, head, cell, &mut row).unwrap();
                            all.push(row);
                        }
                        let zero = all.iter().flatten().all(|x| *x == 0.0);
                        n_fresh += u32::from(zero);
                        let fresh = (3..16).contains(&cell);
                        let what =
                            format!("{} {storage} layer {layer} head {head} cell {cell}", backend.id());
                        assert_eq!(zero, fresh, "{what}: {all:?}");
                        assert!(fresh || all[0] != all[1], "{what}: K and V are one");
                    }
                }
            }
            assert_eq!(n_fresh, 13 * u32::from(model.n_layers) * model.heads.1);
        }
    }
}

#[test]
fn a_layer_that_does_not_exist_is_an_error() {
    let model = Model::default();
    let mut session = model.session(&Cpu::default(), "contiguous", 10);
    model.step(&mut session, &[Span::chain(A, 0, 1)], 1);
    let refused = session.pools().inspect(LayerId(2), Side::K, 0, 0, &mut [0.0; 32]);
    assert!(
        matches!(refused, Err(DeviceError::UnknownLayer { layer: LayerId(2), n_layers: 2 })),
        "{refused:?}"
    );
    assert_eq!(refused.unwrap_err().to_string(), "layer 2 does not exist: the model has 2");
}

/// Sizes beyond 64 bits give `None`, not a small number.
#[test]
fn sizes_that_overflow_have_no_usage() {
    let model = Model { heads: (u32::MAX, u32::MAX), head_dim: u32::MAX, ..Model::default() };
    for backend in backends() {
        assert_eq!(backend.bound(&model.spec(vec![u32::MAX])), None, "{}", backend.id());
    }
}

/// A smaller capacity returns memory to the system and to the budget that set it aside; a larger one takes it from there, or
/// is refused.
#[test]
fn another_capacity_takes_and_returns_what_it_needs() {
    for (k, v) in storages().into_iter().zip(storages().into_iter().rev()).step_by(3) {
        for backend in [&Cpu::default(), &Cpu::default().concatenating()] {
            let budget = MemoryBudget::new(64 * MIB);
            let mut model = Model { k, v, heads: (2, 1), max_step_tokens: 1024, ..Model::default() };
            let bound =
                |model: &Model, tokens: u32| backend.bound(&model.spec(vec![tokens])).unwrap().total();
            model.budget = budget.promise(&backend.bound(&model.spec(vec![4096])).unwrap()).unwrap();
            let free = |tokens: u32| 64 * MIB - bound(&model, tokens);
            let what = format!("{} k {k} v {v}", backend.id());
            let (mut session, mut twin) = (model.session(backend, "paged", 4096), {
                let model = Model { budget: MemoryBudget::unlimited(), ..model.clone() };
                model.session(backend, "paged", 4096)
            });
            for session in [&mut session, &mut twin] {
                new(session, &[A]);
                for start in [0, 1000, 2000] {
                    model.step(session, &[Span::chain(A, start, 1000)], 1);
                }
                session.cache.sequences().unwrap().seq_rm(A, 900, u32::MAX).unwrap();
            }
            let row = model.spec(vec![16]).bytes_per_token();
            for tokens in [2048, 2000, 912] {
                session.resize(&[tokens]).unwrap();
                assert_eq!(session.pools().bytes(), u64::from(tokens) * row, "{what}, {tokens} tokens");
                assert_eq!(budget.free(), free(tokens), "{what}, {tokens} tokens");
            }
            let refused = session.resize(&[896]).unwrap_err();
            assert!(refused.to_string().contains("uses 912 cells and cannot shrink to 896"), "{refused}");
            let refused = session.resize(&[1 << 30]).unwrap_err();
            assert!(matches!(refused, StepError::Device(DeviceError::OutOfBudget(_))), "{refused}");
            assert_eq!((budget.free(), session.cache.capacity_cells()), (free(912), vec![912]), "{what}");
            // Smaller and larger again took two scratches at a time, which the plan has no room for.
            let exact = Model { budget: MemoryBudget::new(bound(&model, 4096)), ..model.clone() };
            let mut tight = exact.session(backend, "paged", 4096);
            for tokens in [16, 4096, 2048, 4096] {
                tight.resize(&[tokens]).unwrap();
            }
            drop(tight);
            session.resize(&[8192]).unwrap();
            assert_eq!(budget.free(), free(8192), "{what}");
            let step = |session: &mut Session, start, n| model.step(session, &[Span::chain(A, start, n)], 1);
            for (start, n) in [(900, 1), (901, 40), (941, 1000)] {
                assert_eq!(
                    step(&mut session, start, n),
                    step(&mut twin, start, n),
                    "{what}, {n} tokens at {start}"
                );
            }
            drop(session);
            assert_eq!(model.budget.usage(), Usage::default(), "{what}");
        }
    }
}

#[test]
fn weights_without_kernels_take_another_encoding() {
    let bytes = |encoding, row| Cpu::default().weight_bytes(&[16, row], encoding, WeightFormat::AsStored);
    // bf16 is stored in pairs of inputs, so an odd row becomes f32.
    assert_eq!((bytes(Encoding::BF16, 32), bytes(Encoding::BF16, 33)), (Some(32 * 32), Some(33 * 64)));
    assert_eq!(bytes(Encoding::F64, 32), bytes(Encoding::F32, 32));
    assert_eq!(bytes(Encoding::Q4K, 32), None, "not whole blocks");
}
