//! The adapter that the tests run on.
use kvist_wgpu::{OpenOptions, Wgpu, WgpuDevice};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// The API that tests run on.
pub type Api = Wgpu;

/// The number that `KVIST_WGPU` names.
pub fn index() -> Option<usize> {
    kvist_testing::wgpu_adapter().flatten()
}

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

/// All forms of a kernel, or one in four where only every `KVIST_ONE_IN`-th case of the conformance suite is run: lavapipe compiles each for
/// seconds.
pub fn some<T>(forms: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    forms.into_iter().step_by(if one_in() > 1 { 4 } else { 1 })
}

/// Every how many-th case is run: `KVIST_ONE_IN`; without it all on a GPU, and one in 20 on lavapipe.
pub fn one_in() -> usize {
    static ONE_IN: LazyLock<usize> = LazyLock::new(|| {
        let wanted =
            std::env::var("KVIST_ONE_IN").ok().map(|text| text.parse().expect("KVIST_ONE_IN is a number"));
        let on_cpu = || {
            let all = kvist_wgpu::adapters();
            let of_number = |number: usize| index().is_none_or(|index| number == index);
            let mut tested =
                all.iter().filter(|adapter| adapter.missing.is_none() && of_number(adapter.index));
            tested.all(|adapter| adapter.kind == "cpu")
        };
        wanted.unwrap_or_else(|| if on_cpu() { 20 } else { 1 })
    });
    *ONE_IN
}

/// Inputs as small as this keep their digits. Products with smaller ones are subnormal numbers, which drivers may make 0 (NVIDIA's does).
pub const TINY: f32 = 1e-30;
