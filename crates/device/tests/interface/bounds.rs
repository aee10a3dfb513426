//! Invalid shapes are errors: tensors, layouts, names.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{GroupId, LayerId};
use kvist_device::reference::Reference;
use kvist_device::*;

#[test]
fn tensors_check_their_last_row() {
    let data = [0f32; 24];
    let max = usize::MAX;
    let cases = [
        // elements, (token stride, head stride), (tokens, heads, head_dim), fits
        (24, (8, 4), (3, 2, 4), true),
        (23, (8, 4), (3, 2, 4), false),
        (24, (8, 4), (4, 2, 4), false),
        (24, (8, 4), (3, 3, 4), false),
        (24, (4, 12), (3, 2, 4), true),  // head-major
        (24, (4, 13), (3, 2, 4), false), // one past the end
        (21, (9, 5), (2, 2, 4), true),
        (24, (0, 0), (1_000, 1_000, 24), true), // one row for all
        (24, (8, 4), (0, 2, 4), true),          // an empty shape fits
        (0, (8, 4), (3, 0, 4), true),
        (24, (max, 4), (2, 1, 4), false),
        (24, (max, 4), (3, 1, 4), false), // the product overflows
        (24, (max / 2, max / 2), (2, 2, 4), false),
        (24, (8, 4), (max, max, 4), false),
        (24, (max, max), (1, 1, 4), true), // the strides are multiplied by 0 only
        (24, (8, 4), (1, 1, max), false),
        (24, (8, 8), (2, 2, max), false), // the sum overflows
    ];
    for (elements, (token, head), (n_tokens, n_heads, head_dim), fits) in cases {
        let what =
            format!("{elements} elements, strides {token}, {head}, [{n_tokens}, {n_heads}, {head_dim}]");
        let tensor = Tensor::strided(&data[..elements], token, head);
        assert_eq!(tensor.check("q", n_tokens, n_heads, head_dim).is_ok(), fits, "{what}");
        let mut data = data;
        let tensor = TensorMut::strided(&mut data[..elements], token, head);
        match tensor.check("out", n_tokens, n_heads, head_dim) {
            Ok(()) => assert!(fits, "{what}"),
            Err(DeviceError::Shape { what: "out", expected, elements: found }) => {
                assert!(!fits, "{what}");
                assert_eq!((expected, found), (vec![n_tokens, n_heads, head_dim], elements), "{what}");
            }
            Err(other) => panic!("{what}: {other}"),
        }
    }
}

#[test]
fn rows_lie_where_the_strides_say() {
    let mut data: Vec<f32> = (0..24).map(|i| i as f32).collect();
    assert_eq!(Tensor::dense(&data, 2, 4).row(1, 1, 4), &[12.0, 13.0, 14.0, 15.0]);
    assert_eq!(Tensor::strided(&data, 4, 12).row(2, 1, 4), &[20.0, 21.0, 22.0, 23.0]);
    TensorMut::dense(&mut data, 2, 4).row(2, 0, 4).fill(-1.0);
    assert_eq!(&data[15..21], &[15.0, -1.0, -1.0, -1.0, -1.0, 20.0]);
    assert_eq!(TensorMut::dense(&mut data, 2, 4).row(0, 1, 4), &[4.0, 5.0, 6.0, 7.0]);
    assert_eq!(TensorMut::strided(&mut data, 3, 10).row(1, 1, 2), &[13.0, 14.0]);
}

fn layer(owner: u16) -> LayerSpec {
    LayerSpec::new(GroupId(0), LayerId(owner), 2, 64)
}

fn recurrent(layer: u16, bytes: u64) -> LayerSpec {
    LayerSpec::recurrent(GroupId(0), LayerId(layer), bytes)
}

#[test]
fn layouts_no_model_has_are_refused() {
    let cases: [(&str, u32, Vec<LayerSpec>, Option<usize>); 17] = [
        ("owners", 4, vec![layer(0), layer(1)], None),
        ("a borrower", 4, vec![layer(0), layer(1), layer(0)], None),
        ("no layers", 4, vec![], None),
        ("heads that do not divide", 3, vec![layer(0)], Some(0)),
        ("no query heads", 0, vec![layer(0)], Some(0)),
        ("no KV heads", 4, vec![layer(0), LayerSpec { n_kv_heads: 0, ..layer(1) }], Some(1)),
        ("no keys", 4, vec![LayerSpec { k_dim: 0, ..layer(0) }], Some(0)),
        ("no values", 4, vec![LayerSpec { v_dim: 0, ..layer(0) }], Some(0)),
        (
            "a prefix that is too long",
            4,
            vec![LayerSpec { v_dim: 65, values: Values::PrefixOfK, ..layer(0) }],
            Some(0),
        ),
        ("a loan from above", 4, vec![layer(1), layer(1)], Some(0)),
        ("a loan of a loan", 4, vec![layer(0), layer(0), layer(1)], Some(2)),
        ("a loan of another shape", 4, vec![layer(0), LayerSpec { k_dim: 32, ..layer(0) }], Some(1)),
        ("a loan across groups", 4, vec![layer(0), LayerSpec { group: GroupId(1), ..layer(0) }], Some(1)),
        ("a recurrent layer", 4, vec![layer(0), recurrent(1, 64), layer(0)], None),
        ("a recurrent layer without a state", 4, vec![recurrent(0, 0)], Some(0)),
        ("a recurrent layer with heads", 4, vec![LayerSpec { n_kv_heads: 2, ..recurrent(0, 64) }], Some(0)),
        ("a loan from a recurrent layer", 4, vec![recurrent(0, 64), layer(0)], Some(1)),
    ];
    for (what, n_heads, layers, bad) in cases {
        let found = Layout { n_heads, layers }.check();
        assert_eq!(found.as_ref().err().map(|error| error.layer), bad, "{what}: {found:?}");
    }
    let error = Layout { n_heads: 3, layers: vec![layer(0)] }.check().unwrap_err();
    assert_eq!(error.to_string(), "layer 0: 3 query heads do not divide into 2 KV heads");
}

#[test]
fn a_layout_knows_its_owners_and_groups() {
    let second = LayerSpec::new(GroupId(1), LayerId(1), 2, 128);
    let layout = Layout { n_heads: 4, layers: vec![layer(0), second, layer(0), recurrent(3, 64)] };
    assert_eq!(layout.owners().map(|(l, _)| l).collect::<Vec<_>>(), [0, 1]);
    assert_eq!((layout.owns(2), layout.n_groups(), layout.max_head_dim()), (false, 2, 128));
    assert!(!layout.owns(3), "a recurrent layer owns no K and V");
}

#[test]
fn an_unknown_pair_lists_the_known_ones() {
    let registry = Registry::of(Reference).with(Box::new(Reference));
    let group = GroupSpec { capacity_tokens: 8, visibility: Visibility::FULL, max_step_tokens: 8 };
    let known = "available are reference:contiguous, reference:ring, reference:cells, reference:tree, reference:paged";
    for (backend, kind) in [("reference", "heap"), ("gpu", "cells"), ("", "")] {
        let error = registry.plan(backend, kind, &[group]).err().expect("no such pair").to_string();
        assert_eq!(error, format!("there is no cache {backend}:{kind}; {known}"));
    }
    assert!(registry.backend("reference").is_some() && registry.backend("cpu").is_none());
    for (backend, kind) in registry.pairs() {
        let made = registry.plan(backend, kind, &[group]);
        match made {
            Ok((cache, found)) => assert_eq!((found.id(), cache.n_groups()), (backend, 1)),
            // A ring needs a window; the error says which option to give.
            Err(error) => {
                assert!(kind == "ring" && error.to_string().contains("--window"), "{backend}:{kind}: {error}")
            }
        }
    }
}
