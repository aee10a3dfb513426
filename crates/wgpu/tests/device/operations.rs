//! Every operation of the device against the scalar reference.
use crate::common::{self, device};
use kvist_testing::operations;

#[test]
fn operations_agree_with_the_reference() {
    if let Some(device) = device() {
        operations::all(&device, &operations::encodings());
    }
}

/// Matrices in several buffers, with a few rows in each.
#[test]
fn linear_layers_in_parts() {
    if let Some(device) = common::device_in_parts(10_400) {
        operations::linear_layers(&device, &operations::encodings(), 251);
    }
}

/// With the fast kernels, whose sums have another order.
#[test]
fn fast_experts_agree_with_the_reference() {
    if let Some(device) = common::fast_device() {
        operations::experts_of_every_token(&device);
    }
}
