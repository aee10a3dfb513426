//! The GPUs that the driver shows, and what it takes to run models on one.
use crate::ffi::{Code, Context, Cuda};
use crate::{Installation, failed};
use kvist_device::DeviceError;
use std::sync::Arc;

/// The lowest compute capability that the kernels are compiled for in tests.
const OLDEST: (i32, i32) = (8, 0);

/// A GPU as `kvist devices` lists it.
#[derive(Clone, Debug)]
pub struct DeviceSummary {
    /// Number for [`open`](crate::open).
    pub index: usize,
    pub name: String,
    pub compute_capability: (i32, i32),
    pub total_bytes: u64,
    /// `None` if the driver cannot say so now.
    pub free_bytes: Option<u64>,
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Of shared memory, for one block.
    pub max_shared_bytes: u32,
    /// Whether it computes in the host's memory.
    pub integrated: bool,
    /// What it lacks to run models; `None` if it can.
    pub missing: Option<String>,
}

/// Loads the driver.
pub(crate) fn driver(installation: &Installation) -> Result<Arc<Cuda>, DeviceError> {
    let advice = "install NVIDIA's driver (Debian and Ubuntu: nvidia-driver, which brings libcuda1), or use `--backend cpu`";
    match Cuda::open(installation.cuda.as_deref()) {
        Ok(Ok(cuda)) => Ok(cuda),
        Ok(Err((Code::NO_DEVICE, _))) => Err(failed(
            "the driver finds no GPU: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use `--backend cpu`",
        )),
        Ok(Err((_, text))) => {
            Err(failed(format!("the driver does not start ({text}): look at `nvidia-smi`")))
        }
        Err(error) => Err(failed(format!("there is no CUDA driver: {error}: {advice}"))),
    }
}

/// Every GPU that the driver shows, whether it can run models or not.
///
/// # Errors
/// There is no driver, or it fails.
pub fn devices(installation: &Installation) -> Result<Vec<DeviceSummary>, DeviceError> {
    let cuda = driver(installation)?;
    let error = |code: Code| failed(cuda.text(code));
    let n = cuda.n_devices().map_err(error)?;
    (0..n).map(|index| summary(&cuda, index).map_err(error)).collect()
}

pub(crate) fn summary(cuda: &Arc<Cuda>, index: usize) -> Result<DeviceSummary, Code> {
    // Numbers of CUdevice_attribute.
    const INTEGRATED: i32 = 18;
    const MULTIPROCESSORS: i32 = 16;
    const MAJOR: i32 = 75;
    const MINOR: i32 = 76;
    const MAX_SHARED_BYTES_OPT_IN: i32 = 97;
    let device = cuda.device(index)?;
    let attribute = |number| cuda.attribute(device, number);
    let compute_capability = (attribute(MAJOR)?, attribute(MINOR)?);
    let missing = (compute_capability < OLDEST).then(|| {
        let ((major, minor), (a, b)) = (compute_capability, OLDEST);
        format!("its compute capability is {major}.{minor}, kvist needs {a}.{b}")
    });
    Ok(DeviceSummary {
        index,
        name: cuda.name(device)?,
        compute_capability,
        total_bytes: cuda.total_bytes(device)?,
        free_bytes: Context::new(cuda, device)
            .and_then(|context| context.memory())
            .ok()
            .map(|memory| memory.0),
        multiprocessors: attribute(MULTIPROCESSORS)?,
        max_shared_bytes: u32::try_from(attribute(MAX_SHARED_BYTES_OPT_IN)?).unwrap_or(0),
        integrated: attribute(INTEGRATED)? != 0,
        missing,
    })
}
