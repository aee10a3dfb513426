//! Models on a GPU through wgpu, or on lavapipe. Tests run where they are asked for: [`kvist_testing::wgpu_adapter`].
#[path = "../common/mod.rs"]
mod common;
#[path = "../engines/mod.rs"]
mod engines;
#[path = "../gpu/mod.rs"]
mod gpu;
#[path = "../../../model/tests/common/mod.rs"]
mod models;

mod serving;

use kvist_device::DeviceError;
use kvist_engine::devices::{Place, WgpuDevice as Gpu, WgpuOptions, open_wgpu};
use std::sync::LazyLock;

const NAME: &str = "wgpu";

/// Tests compare bits unless they say otherwise.
fn open() -> Result<Gpu, DeviceError> {
    open_wgpu(
        kvist_testing::wgpu_adapter().flatten(),
        &WgpuOptions { deterministic: true, ..Default::default() },
    )
}

fn device() -> Option<Gpu> {
    static DEVICE: LazyLock<Option<Gpu>> = LazyLock::new(|| {
        kvist_testing::wgpu_adapter()?;
        let device = open().unwrap_or_else(|error| panic!("{error}"));
        println!("on {}", device.adapter());
        Some(device)
    });
    DEVICE.clone()
}

/// Whether the device is lavapipe, and not all of its cases are wanted (`KVIST_ONE_IN=1`).
fn slow() -> bool {
    let index = kvist_testing::wgpu_adapter().flatten();
    let mut tested = kvist_wgpu::adapters()
        .into_iter()
        .filter(|adapter| adapter.missing.is_none() && index.is_none_or(|index| index == adapter.index));
    tested.all(|adapter| adapter.kind == "cpu") && std::env::var("KVIST_ONE_IN").as_deref() != Ok("1")
}

fn place(device: &Gpu) -> Place {
    Place::Wgpu(device.clone())
}

/// A device whose memory no other test uses.
fn device_of_its_own() -> Option<Gpu> {
    device().map(|_| open().unwrap())
}
