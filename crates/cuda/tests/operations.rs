//! Every operation of the device against the scalar reference.
mod common;
use kvist_cuda::CudaDevice;
use kvist_testing::operations;

#[test]
fn operations_agree_with_the_reference() {
    if let Some(device) = common::device() {
        operations::all(&device);
    }
}

/// Kernels on tensor cores: what linear layers, experts and logits do around them.
#[test]
fn linear_layers_of_a_fast_device() {
    let Some(device) = common::fast_driver().map(CudaDevice::new) else { return };
    operations::linear_layers(&device, 13);
    operations::experts_of_every_token(&device);
    operations::logits_of_the_wanted_rows(&device);
}

/// Matrices in several buffers, with a few rows in each.
#[test]
fn linear_layers_in_parts() {
    if let Some(device) = common::device_in_parts(10_400) {
        operations::linear_layers(&device, 251);
    }
}
