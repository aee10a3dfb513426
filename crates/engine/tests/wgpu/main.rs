//! Models on a GPU through wgpu, or on lavapipe. Tests run where they are asked for: [`kvist_testing::wgpu_adapter`].
#[path = "../../../wgpu/tests/adapter/mod.rs"]
mod adapter;
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
    open_wgpu(adapter::index(), &WgpuOptions { deterministic: true, ..Default::default() })
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

/// Whether not all cases are run: on lavapipe.
fn slow() -> bool {
    adapter::one_in() > 1
}

fn place(device: &Gpu) -> Place {
    Place::Wgpu(device.clone())
}

/// A device whose memory no other test uses.
fn device_of_its_own() -> Option<Gpu> {
    device().map(|_| open().unwrap())
}
