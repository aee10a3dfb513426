//! The device that the tests run on.
pub use crate::adapter::{index, one_in};
use kvist_wgpu::{OpenOptions, Wgpu, WgpuDevice};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// The API that tests run on.
pub type Api = Wgpu;

/// Tests compare bits unless they say otherwise.
pub const DETERMINISTIC: OpenOptions = OpenOptions {
    max_part_bytes: u64::MAX,
    subgroups: true,
    cooperative: true,
    deterministic: true,
    patience: Duration::from_secs(600),
};

/// What is fast where a test does not ask for the same bits in every batch.
pub const FAST: OpenOptions = OpenOptions { deterministic: false, ..DETERMINISTIC };

/// The adapter that is tested; `None` if none is ([`kvist_testing::wgpu_adapter`]).
pub fn device() -> Option<WgpuDevice> {
    static DEVICE: LazyLock<Option<WgpuDevice>> = LazyLock::new(|| {
        let index = kvist_testing::wgpu_adapter()?;
        let device = kvist_wgpu::open(index, &DETERMINISTIC).unwrap_or_else(|error| panic!("{error}"));
        println!("on {}", device.adapter());
        Some(device)
    });
    DEVICE.clone()
}

/// The API under [`device`], opened for itself.
pub fn driver() -> Option<Arc<Wgpu>> {
    device()?;
    Some(Arc::new(Wgpu::open(index(), &DETERMINISTIC).unwrap()))
}

/// [`device`], opened anew.
pub fn with(options: OpenOptions) -> WgpuDevice {
    kvist_wgpu::open(index(), &options).unwrap()
}

/// [`device`] with weights and pools in parts of at most so many bytes.
pub fn device_in_parts(max_part_bytes: u64) -> Option<WgpuDevice> {
    device().map(|_| with(OpenOptions { max_part_bytes, ..DETERMINISTIC }))
}

/// A device with the fast kernels.
pub fn fast_device() -> Option<WgpuDevice> {
    fast_device_in_parts(u64::MAX)
}

/// The same with weights and pools in parts of at most so many bytes.
pub fn fast_device_in_parts(max_part_bytes: u64) -> Option<WgpuDevice> {
    device().map(|_| with(OpenOptions { max_part_bytes, ..FAST }))
}

/// All forms of a kernel, or one in four, from `first` on, where only every `KVIST_ONE_IN`-th case of the conformance suite is run: lavapipe
/// compiles each for seconds.
pub fn some<T>(first: usize, forms: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let (skip, step) = if one_in() > 1 { (first, 4) } else { (0, 1) };
    forms.into_iter().skip(skip).step_by(step)
}

/// Inputs as small as this keep their digits. Products with smaller ones are subnormal numbers, which drivers may make 0 (NVIDIA's does).
pub const TINY: f32 = 1e-30;
