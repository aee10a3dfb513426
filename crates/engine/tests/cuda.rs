//! Models on a GPU of NVIDIA if `KVIST_CUDA` numbers one, otherwise the CUDA kernels emulated on the host.
//!
//! Without a C++ compiler the tests print that nothing was tested; `KVIST_REQUIRE_CUDA=1` makes that a failure.
mod common;
#[path = "../../cuda/tests/common/mod.rs"]
mod emulated;
mod gpu;
use emulated::device;
use kvist_engine::devices::{CudaDevice as Gpu, Place};

const NAME: &str = "cuda";

fn place(device: &Gpu) -> Place {
    Place::Cuda(device.clone())
}

/// A device whose memory no other test uses.
fn device_of_its_own() -> Option<Gpu> {
    match emulated::index() {
        Some(_) => emulated::device_in_parts(u64::MAX),
        None => emulated::emulation(&[]).map(|own| kvist_cuda::open(&own, None, u64::MAX).unwrap()),
    }
}
