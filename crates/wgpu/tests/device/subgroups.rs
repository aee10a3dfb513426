//! Kernels with subgroups and without: the same bits. `LP_NATIVE_VECTOR_WIDTH=128`, `256` and `512` give lavapipe subgroups of
//! 4, 8 and 16 lanes.
use crate::common::{DETERMINISTIC, device, with};
use crate::decoding::{A, Model};
use kvist_cache::Span;
use kvist_device::{Backend, Storage};
use kvist_testing::operations;
use kvist_wgpu::{OpenOptions, WgpuDevice};

/// The same adapter with subgroups and without. Prints if it has none: both are alike then.
fn both() -> Option<[WgpuDevice; 2]> {
    let device = device()?;
    let mut adapters = kvist_wgpu::adapters().into_iter();
    if let Some(adapter) = adapters.find(|adapter| adapter.name == device.adapter()) {
        println!("{}: subgroups of {:?} lanes; {:?}", adapter.name, adapter.subgroup, adapter.features);
    }
    Some([true, false].map(|subgroups| with(OpenOptions { subgroups, ..DETERMINISTIC })))
}

/// Both options do what they say, whatever else an adapter is opened with.
#[test]
fn subgroups_are_used_where_they_are_wanted() {
    let Some([one, _]) = both() else { return };
    let all = kvist_wgpu::adapters();
    let has =
        all.iter().find(|adapter| adapter.name == one.adapter()).unwrap().features.contains(&"subgroups");
    for deterministic in [false, true] {
        for cooperative in [false, true] {
            for subgroups in [false, true] {
                let options = OpenOptions { subgroups, cooperative, deterministic, ..DETERMINISTIC };
                assert_eq!(with(options).driver().uses_subgroups(), has && subgroups, "{options:?}");
            }
        }
    }
}

#[test]
fn sums_have_the_same_bits() {
    let Some([with, without]) = both() else { return };
    let (found, expected) = (operations::bits_of_sums(&with), operations::bits_of_sums(&without));
    for (found, expected) in found.iter().zip(&expected) {
        assert!(found == expected, "{}", found.0);
    }
}

/// Both forms are right, not only alike.
#[test]
fn operations_agree_with_the_reference_without_subgroups() {
    if let Some([_, without]) = both() {
        operations::all(&without, &operations::encodings());
    }
}

/// A prompt, then some steps of a few tokens.
fn outputs(backend: &dyn Backend, model: &Model) -> Vec<u32> {
    let mut session = model.session(backend, "contiguous", 160);
    let mut found = Vec::new();
    for (start, n) in [(0, 70), (70, 1), (71, 3), (74, 1)] {
        let rows = model.step(&mut session, &[Span::chain(A, start, n)], 1);
        found.extend(rows.iter().flatten().map(|x| x.to_bits()));
    }
    found
}

#[test]
fn attention_has_the_same_bits() {
    let Some([with, without]) = both() else { return };
    let cases = [("f32", (4, 2), 33), ("f16", (16, 1), 64), ("q8", (32, 1), 64), ("t4-o", (7, 1), 128)];
    for (storage, heads, head_dim) in cases {
        let storage: Storage = storage.parse().unwrap();
        let model = Model { k: storage, v: storage, heads, head_dim, n_layers: 1, ..Model::default() };
        let found = outputs(&with, &model);
        assert!(found == outputs(&without, &model), "{storage} {heads:?} {head_dim}");
        assert!(found.iter().all(|x| f32::from_bits(*x).is_finite()));
    }
}
