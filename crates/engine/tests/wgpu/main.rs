//! Models on a GPU through wgpu, or on lavapipe.
//!
//! Without an adapter the tests print that nothing was tested; `KVIST_REQUIRE_WGPU=1` makes that a failure.
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
    open_wgpu(None, &WgpuOptions { deterministic: true, ..Default::default() })
}

fn device() -> Option<Gpu> {
    static DEVICE: LazyLock<Option<Gpu>> = LazyLock::new(|| match open() {
        Ok(device) => {
            println!("on {}", device.adapter());
            Some(device)
        }
        Err(error) if std::env::var_os("KVIST_REQUIRE_WGPU").is_some() => panic!("{error}"),
        Err(error) => {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "SKIPPED, nothing on the GPU was tested: {error}");
            None
        }
    });
    DEVICE.clone()
}

fn place(device: &Gpu) -> Place {
    Place::Wgpu(device.clone())
}

/// A device whose memory no other test uses.
fn device_of_its_own() -> Option<Gpu> {
    device().map(|_| open().unwrap())
}
