//! wgpu as a device: its kernels, its pools and their transfers give the right results, on the best adapter or on that of `KVIST_WGPU`.
#[path = "../adapter/mod.rs"]
mod adapter;
mod common;
#[path = "../../../cpu/tests/decoding/mod.rs"]
mod decoding;

mod conformance;
mod gemm;
mod operations;
mod subgroups;

// What CUDA passes too.
#[path = "../../../gpu/tests/shared/blocks.rs"]
mod blocks;
#[path = "../../../gpu/tests/shared/gemm_case.rs"]
mod gemm_case;
#[path = "../../../gpu/tests/shared/lanes.rs"]
mod lanes;
#[path = "../../../gpu/tests/shared/linear.rs"]
mod linear;
#[path = "../../../gpu/tests/shared/long.rs"]
mod long;
#[path = "../../../gpu/tests/shared/measure.rs"]
mod measure;
#[path = "../../../gpu/tests/shared/routed.rs"]
mod routed;
#[path = "../../../gpu/tests/shared/sharing.rs"]
mod sharing;
#[path = "../../../gpu/tests/shared/store.rs"]
mod store;
