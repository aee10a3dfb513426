//! Runs the backend against the conformance suite: every kind of cache in every storage that it has.
use crate::common::{self, device};
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_testing::conformance::{self, Ends, Options};

/// On a GPU every case. Emulated, every case compiles kernels of its own for seconds: one in `KVIST_ONE_IN`, by default 9 where the
/// tests of CUDA are asked for (`just cuda`), and few where they run among all others.
fn options() -> Options {
    let wanted =
        std::env::var("KVIST_ONE_IN").ok().map(|text| text.parse().expect("KVIST_ONE_IN is a number"));
    let emulated = if std::env::var_os("KVIST_REQUIRE_CUDA").is_some() { 9 } else { 120 };
    let one_in = wanted.unwrap_or(if common::index().is_some() { 1 } else { emulated });
    Options { one_in, ..Options::from_env() }
}

/// A sample of that.
fn fewer(n: usize) -> Options {
    let all = options();
    Options { one_in: n * all.one_in, ..all }
}

#[test]
fn cuda_conforms() {
    let Some(device) = device() else { return };
    match conformance::run(&device, &options()) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}

/// Attention on tensor cores, which round weights to f16, and packed keys and values too.
#[test]
fn tensor_cores_conform() {
    let Some(device) = common::fast_device() else { return };
    let takes = |storage: Storage| {
        [DType::F16, DType::BF16, DType::Q8, DType::Q4].contains(&storage.dtype) && !storage.outliers
    };
    let options = Options { attention: 5e-4, packed: 8e-4, storages: takes, ..options() };
    match conformance::run(&device, &options) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
}

/// Pools in several buffers: one head of the largest cases just fits into a part, and K and V in different dtypes are
/// split differently.
#[test]
fn pools_in_parts_conform() {
    let Some(device) = common::device_in_parts(1_300_000) else { return };
    match conformance::run(&device, &fewer(5)) {
        Ok(report) => println!("{report}"),
        Err(table) => panic!("{table}"),
    }
    let ends = Ends { from: &device, to: &device, same_bits: true };
    conformance::transfers(ends, &fewer(9)).unwrap_or_else(|table| panic!("{table}"));
}

#[test]
fn cuda_refuses() {
    let Some(device) = device() else { return };
    for (k, v) in [(Storage::F32, Storage::F16), (Storage::BF16, Storage::F32), (Storage::Q8, Storage::F16)] {
        conformance::refusals_in(&device, k, v).unwrap_or_else(|table| panic!("{table}"));
    }
}

#[test]
fn cells_are_the_same_wherever_they_go() {
    let Some(device) = device() else { return };
    let ends = Ends { from: &device, to: &device, same_bits: true };
    conformance::transfers(ends, &options()).unwrap_or_else(|table| panic!("{table}"));
    // The reference stores f32 whatever is asked for.
    let exact = Options { storages: |storage| storage == Storage::F32, ..options() };
    for (from, to) in [(&Reference as &dyn Backend, &device as &dyn Backend), (&device, &Reference)] {
        let ends = Ends { from, to, same_bits: false };
        conformance::transfers(ends, &exact).unwrap_or_else(|table| panic!("{table}"));
    }
}
