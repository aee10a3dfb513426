//! A device over CUDA, for NVIDIA GPUs. Its kernels were run on an H100, and are compiled and emulated by tests without a GPU.
//!
//! `kvist-gpu` drives models, pools and attention. This crate has what it asks of an API: buffers, launches and one
//! stream (`driver.rs`), devices (`devices.rs`), the kernels in CUDA C++ (`kernels/`), which NVRTC compiles at their first
//! use, and a cache of what it compiled (`compiler.rs`).
//!
//! NVIDIA's libraries are loaded when a device is opened (`ffi.rs`): building needs neither CUDA nor a GPU. Without
//! them, opening a device is an error that says what to install.
#![deny(unsafe_code)]

mod compiler;
mod devices;
mod driver;
#[allow(unsafe_code)]
mod ffi;
pub mod kernels;
mod ranges;
mod tiles;

pub use compiler::{CompileError, Compiler};
pub use devices::{DeviceSummary, devices};
pub use driver::{Counts, CudaDriver, KernelTime};
use kvist_device::DeviceError;
use kvist_gpu::{Driver, GpuDevice};
use std::path::PathBuf;

/// A GPU over CUDA: a device for models, and the backend `cuda` for attention. Clones share it.
pub type CudaDevice = GpuDevice<CudaDriver>;

/// Where NVIDIA's libraries are, and where compiled kernels are kept.
#[derive(Clone, Debug)]
pub struct Installation {
    /// The driver's file; `None`: where the system keeps it.
    pub cuda: Option<PathBuf>,
    /// NVRTC's file; `None`: where the system keeps it.
    pub nvrtc: Option<PathBuf>,
    /// The folder of compiled kernels; `None`: they are compiled anew by every process.
    pub cache: Option<PathBuf>,
}

impl Installation {
    /// The system's: the variables `KVIST_LIBCUDA` and `KVIST_NVRTC` name other files, and `KVIST_CUDA_CACHE` another folder.
    pub fn of_system() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Installation {
            cuda: variable("KVIST_LIBCUDA"),
            nvrtc: variable("KVIST_NVRTC"),
            cache: variable("KVIST_CUDA_CACHE").or_else(compiler::cache_folder),
        }
    }
}

/// How a GPU is used.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// A row's result depends on nothing but the row: the faster kernels, whose sums depend on the rest of a batch, are not used, and
    /// splits of attention end at fixed positions.
    pub deterministic: bool,
    /// Steps that repeat are launched as graphs.
    pub graphs: bool,
    /// Kernels of such a graph are brought to the multiprocessors before the one before has ended, where the GPU can do that.
    pub overlap: bool,
    /// Large linear layers use the tensor cores of warpgroups, where the GPU has them.
    pub warpgroups: bool,
    /// Weights and pools are split into parts of at most so many bytes; tests ask for less than a GPU can address.
    pub max_part_bytes: u64,
}

impl Default for Options {
    /// Without `KVIST_CUDA_GRAPHS=0` in the environment there are graphs, without `KVIST_CUDA_OVERLAP=0` their kernels overlap, and
    /// without `KVIST_CUDA_WARPGROUPS=0` there are warpgroups.
    fn default() -> Self {
        let is_on = |name| std::env::var_os(name).is_none_or(|value| value != "0");
        let (graphs, overlap) = (is_on("KVIST_CUDA_GRAPHS"), is_on("KVIST_CUDA_OVERLAP"));
        let warpgroups = is_on("KVIST_CUDA_WARPGROUPS");
        Options { deterministic: false, graphs, overlap, warpgroups, max_part_bytes: u64::MAX }
    }
}

/// Opens GPU `index` of [`devices`], or the first one that can run models.
///
/// # Errors
/// There is no driver, no NVRTC or no such GPU, or one of them is too old. The text says what to install or to try.
pub fn open(
    installation: &Installation,
    index: Option<usize>,
    options: Options,
) -> Result<CudaDevice, DeviceError> {
    Ok(GpuDevice::new(CudaDriver::open(installation, index, options)?))
}

fn failed(what: impl Into<String>) -> DeviceError {
    DeviceError::Failed { device: CudaDriver::NAME, what: what.into() }
}
