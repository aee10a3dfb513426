//! Runs the backend against the conformance suite: every kind of cache in every storage that it has.
use crate::common::{self, FAST, device, one_in, with};
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_testing::conformance::{self, Ends, Options};
use kvist_wgpu::OpenOptions;

fn options() -> Options {
    Options::from_env()
}

#[test]
fn wgpu_conforms() {
    let Some(device) = device() else { return };
    match conformance::run(&device, &Options { one_in: one_in(), ..options() }) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}

/// Attention in splits of any length, in sums of any order.
#[test]
fn fast_attention_conforms() {
    if device().is_none() {
        return;
    }
    for (subgroups, fewer) in [(true, 2), (false, 20)] {
        let device = with(OpenOptions { subgroups, ..FAST });
        match conformance::run(&device, &Options { one_in: fewer * one_in(), ..options() }) {
            Ok(report) => println!("{report}"),
            Err(table) => panic!("{table}"),
        }
    }
}

/// Pools in several buffers: one head of the largest cases just fits into a part, and K and V in different dtypes are
/// split differently.
#[test]
fn pools_in_parts_conform() {
    let Some(device) = common::device_in_parts(1_300_000) else { return };
    match conformance::run(&device, &Options { one_in: 9 * one_in(), ..options() }) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
    let ends = Ends { from: &device, to: &device, same_bits: true };
    conformance::transfers(ends, &Options { one_in: 25 * one_in(), ..options() })
        .unwrap_or_else(|table| panic!("{table}"));
}

#[test]
fn wgpu_refuses() {
    let Some(device) = device() else { return };
    for (k, v) in [(Storage::F32, Storage::F16), (Storage::BF16, Storage::F32), (Storage::Q8, Storage::F16)] {
        conformance::refusals_in(&device, k, v).unwrap_or_else(|table| panic!("{table}"));
    }
}

#[test]
fn cells_are_the_same_wherever_they_go() {
    let Some(device) = device() else { return };
    let cpu = kvist_cpu::Cpu::default();
    let ends: [(&dyn Backend, &dyn Backend, bool); 3] =
        [(&device, &device, true), (&device, &cpu, false), (&cpu, &device, false)];
    for (i, (from, to, same_bits)) in ends.into_iter().enumerate() {
        let ends = Ends { from, to, same_bits };
        // Every pair of storages takes kernels of its own, which lavapipe compiles for a second.
        // Attention over q4 on the CPU has queries and weights of one byte.
        let options = Options { one_in: one_in() * (4 + i), q4: Some(8e-3), ..options() };
        conformance::transfers(ends, &options).unwrap_or_else(|table| panic!("{table}"));
    }
    // The reference stores f32 whatever is asked for.
    let exact = Options { storages: |storage| storage == Storage::F32, one_in: 2, ..options() };
    let ends = Ends { from: &Reference, to: &device, same_bits: false };
    conformance::transfers(ends, &exact).unwrap_or_else(|table| panic!("{table}"));
}

/// What has no kernel is refused by name, never replaced.
#[test]
fn what_has_no_kernel_is_refused_by_name() {
    let Some(device) = device() else { return };
    let sixteen = Storage { group: 16, ..Storage::Q8 };
    let outliers = Storage { outliers: true, ..Storage::Q4 };
    let cases = [
        (sixteen, Storage::F16, "groups of 16 elements in q8-16"),
        (Storage::F16, sixteen, "groups of 16 elements in q8-16"),
        (outliers, Storage::F16, "outliers in q4-o"),
        (Storage::F16, Storage::T4_O, "V in t4-o"),
    ];
    for (k, v, text) in cases {
        let spec = PoolSpec {
            layout: Layout {
                n_heads: 2,
                layers: vec![LayerSpec::new(kvist_cache::GroupId(0), kvist_cache::LayerId(0), 2, 32)],
            },
            k,
            v,
            capacity_cells: vec![64],
            max_step_tokens: 8,
            budget: MemoryBudget::unlimited(),
            channels: None,
            recent: Recent::default(),
        };
        let error = device.pools(&spec).map(drop).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
        assert_eq!(spec.budget.usage(), Usage::default(), "{text}");
    }
}
