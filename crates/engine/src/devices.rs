//! The devices and backends compiled into this engine. Programs choose a device only here.
pub use kvist_cpu::{Compute, Cpu};
#[cfg(feature = "cuda-experimental")]
pub use kvist_cuda::{
    CudaDevice, DeviceSummary as CudaSummary, Installation as CudaInstallation, devices as cuda_devices,
    open as open_cuda,
};
use kvist_device::{DeviceError, MemoryBudget, Registry};
pub use kvist_gpu::{HostMemory, MeasureTransfers, MeasuredSteps, StepSpans, TransferCase};
use kvist_model::{Error, LoadOptions, Model, Opened};
#[cfg(feature = "wgpu")]
pub use kvist_wgpu::{AdapterSummary, WgpuDevice, adapters, open as open_wgpu};
use std::sync::Arc;

/// A device that runs models and stores their K and V.
#[derive(Clone, Debug)]
pub enum Place {
    /// The CPU, with these threads and this instruction set.
    Cpu(Compute),
    /// An adapter of the machine's GPUs.
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuDevice),
    /// A GPU of NVIDIA. Experimental.
    #[cfg(feature = "cuda-experimental")]
    Cuda(CudaDevice),
}

impl Place {
    /// The device that a backend runs on, and the backend's id: `wgpu` and `wgpu:1` are adapters of GPUs, `cuda` and `cuda:1`
    /// GPUs of NVIDIA, every other backend runs with models on the CPU. Opens the adapter.
    ///
    /// # Errors
    /// The program was built without GPUs, there is no such adapter, or it cannot run models.
    pub fn of_backend(backend: &str, compute: &Compute) -> Result<(Place, String), DeviceError> {
        let (name, number) = match backend.split_once(':') {
            Some((name, number)) => (name, Some(number)),
            None => (backend, None),
        };
        let open = match name {
            "wgpu" => Self::wgpu,
            "cuda" => Self::cuda,
            _ => return Ok((Place::Cpu(compute.clone()), backend.into())),
        };
        let index = number.map(|number| {
            let what = format!(
                "`{backend}` names no adapter: write {name}, {name}:0, {name}:1 (`kvist devices` lists them)"
            );
            number.parse::<usize>().map_err(|_| DeviceError::Unsupported(what))
        });
        open(index.transpose()?).map(|place| (place, name.into()))
    }

    /// Bytes of the device's memory that are free now. `None` on the CPU, and where drivers do not say so.
    ///
    /// # Errors
    /// The device has failed.
    pub fn free_bytes(&self) -> Result<Option<u64>, DeviceError> {
        match self {
            #[cfg(feature = "cuda-experimental")]
            Place::Cuda(device) => device.driver().memory().map(|(free, _)| Some(free)),
            _ => Ok(None),
        }
    }

    #[cfg(feature = "cuda-experimental")]
    fn cuda(index: Option<usize>) -> Result<Place, DeviceError> {
        open_cuda(&CudaInstallation::of_system(), index, u64::MAX).map(Place::Cuda)
    }
    #[cfg(not(feature = "cuda-experimental"))]
    fn cuda(_: Option<usize>) -> Result<Place, DeviceError> {
        let what = "this kvist was built without CUDA: build it with `--features cuda-experimental`, or use `--backend wgpu` \
                    or `--backend cpu`";
        Err(DeviceError::Unsupported(what.into()))
    }

    #[cfg(feature = "wgpu")]
    fn wgpu(index: Option<usize>) -> Result<Place, DeviceError> {
        open_wgpu(index).map(Place::Wgpu)
    }
    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: Option<usize>) -> Result<Place, DeviceError> {
        let what =
            "this kvist was built without GPUs: build it with `--features wgpu`, or use `--backend cpu`";
        Err(DeviceError::Unsupported(what.into()))
    }

    /// Loads a model on this device. See [`Opened::load`].
    pub fn load(
        &self,
        opened: Opened,
        options: &LoadOptions,
        budget: &Arc<MemoryBudget>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Model, Error> {
        match self {
            Place::Cpu(compute) => opened.load(Cpu::new(compute.clone()), options, budget, progress),
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => opened.load(device.clone(), options, budget, progress),
            #[cfg(feature = "cuda-experimental")]
            Place::Cuda(device) => opened.load(device.clone(), options, budget, progress),
        }
    }

    /// Measures how K and V come from the host's memory to this device. The CPU computes in the host's memory.
    ///
    /// # Errors
    /// This is the CPU, or there is no memory on the device.
    pub fn measure_transfers(&self) -> Result<Box<dyn MeasureTransfers>, DeviceError> {
        match self {
            Place::Cpu(_) => Err(DeviceError::Unsupported(
                "the CPU computes in the host's memory, so nothing is transferred: use --backend wgpu".into(),
            )),
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => Ok(Box::new(device.measurement()?)),
            #[cfg(feature = "cuda-experimental")]
            Place::Cuda(device) => Ok(Box::new(device.measurement()?)),
        }
    }

    /// This device with the backends that work with it.
    pub fn registry(&self) -> Registry {
        match self {
            Place::Cpu(compute) => growing_by(compute, 0),
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => Registry::of(device.clone()).with(Box::new(device.clone())),
            #[cfg(feature = "cuda-experimental")]
            Place::Cuda(device) => Registry::of(device.clone()).with(Box::new(device.clone())),
        }
    }
}

/// Loads a model on the CPU, with these threads and this instruction set. See [`Opened::load`].
pub fn load(
    opened: Opened,
    compute: &Compute,
    options: &LoadOptions,
    budget: &Arc<MemoryBudget>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Model, Error> {
    Place::Cpu(compute.clone()).load(opened, options, budget, progress)
}

/// All backends of the CPU, and through them every `backend:kind` pair, on this process's own threads.
pub fn all() -> Registry {
    on(&Compute::default())
}

/// All backends of the CPU, on the given threads and instruction set.
pub fn on(compute: &Compute) -> Registry {
    growing_by(compute, 0)
}

/// [`on`], with pools that grow by at least `min_cells`. See [`Cpu::growing_by`].
pub fn growing_by(compute: &Compute, min_cells: u32) -> Registry {
    Registry::of(Cpu::new(compute.clone()))
        .with(Box::new(Cpu::new(compute.clone()).growing_by(min_cells)))
        .with(Box::new(kvist_device::reference::Reference))
}
