//! A device over wgpu: models and their KV caches on GPUs, through Vulkan, Metal or DirectX 12.
//!
//! `kvist-gpu` drives models, pools and attention. This crate has what it asks of an API: buffers and submissions
//! (`driver.rs`), adapters (`adapters.rs`), how much memory they have (`ffi.rs`), and the kernels in WGSL (`kernels/`).
//!
//! Everything is behind the feature `wgpu`.
#![deny(unsafe_code)]
#![cfg(feature = "wgpu")]

mod adapters;
mod driver;
mod ffi;
mod kernels;

pub use adapters::{AdapterMemory, AdapterSummary, adapters};
pub use driver::{OpenOptions, Wgpu};
use kvist_device::DeviceError;
use kvist_gpu::GpuDevice;

/// An adapter: a device for models, and the backend `wgpu` for attention. Clones share it.
pub type WgpuDevice = GpuDevice<Wgpu>;

/// Opens adapter `index` of [`adapters`], or the best one: discrete GPUs come before integrated ones, and those before
/// implementations on the CPU.
///
/// # Errors
/// There is no adapter, there are not so many, or it lacks what kvist needs. The text says what to install or to try.
pub fn open(index: Option<usize>, options: &OpenOptions) -> Result<WgpuDevice, DeviceError> {
    Ok(GpuDevice::new(Wgpu::open(index, options)?))
}
