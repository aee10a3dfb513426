//! Every operation of the device against the scalar reference.
use crate::common;
use kvist_device::weights::Encoding;
use kvist_testing::operations;

fn encodings() -> Vec<Encoding> {
    common::some(0, operations::encodings()).collect()
}

#[test]
fn operations_agree_with_the_reference() {
    if let Some(device) = common::device() {
        operations::all(&device, &encodings());
    }
}

/// Matrices in several buffers, with a few rows in each.
#[test]
fn linear_layers_in_parts() {
    if let Some(device) = common::device_in_parts(10_400) {
        operations::linear_layers(&device, &encodings(), 251);
    }
}

/// The same with the fast kernels, whose sums have another order: every operation but the one that compares bits.
#[test]
fn fast_operations_agree_with_the_reference() {
    let Some(device) = common::fast_device() else { return };
    operations::linear_layers(&device, &encodings(), 13);
    operations::experts_of_every_token(&device);
    operations::logits_of_the_wanted_rows(&device);
    operations::ties_and_nan_among_logits(&device);
}

#[test]
fn fast_linear_layers_in_parts() {
    if let Some(device) = common::fast_device_in_parts(10_400) {
        operations::linear_layers(&device, &encodings(), 251);
    }
}

#[test]
fn fast_linear_layers_together() {
    if let Some(device) = common::fast_device() {
        operations::linear_layers_together(&device);
    }
}
