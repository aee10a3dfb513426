//! The devices and backends compiled into this engine. Programs choose a device only here.
pub use kvist_cpu::{Compute, Cpu};
#[cfg(feature = "cuda")]
pub use kvist_cuda::{
    CudaDevice, DeviceSummary as CudaSummary, Installation as CudaInstallation, Options as CudaOptions,
    devices as cuda_devices, open as open_cuda,
};
use kvist_device::{DeviceError, MemoryBudget, Registry};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use kvist_gpu::Driver as _;
use kvist_gpu::Limits;
pub use kvist_gpu::{
    HostMemory, MeasureTransfers, MeasuredSteps, PartSpans, RowsFrom, StepSpans, TransferCase,
};
use kvist_model::{Error, LoadOptions, Model, Opened};
#[cfg(feature = "wgpu")]
pub use kvist_wgpu::{AdapterSummary, OpenOptions as WgpuOptions, WgpuDevice, adapters, open as open_wgpu};
use std::sync::Arc;

/// A device that runs models and stores their K and V.
#[derive(Clone, Debug)]
pub enum Place {
    /// The CPU, with these threads and this instruction set.
    Cpu(Compute),
    /// An adapter of the machine's GPUs.
    #[cfg(feature = "wgpu")]
    Wgpu(WgpuDevice),
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

impl Place {
    /// The device that a backend runs on, and the backend's id: `wgpu` and `wgpu:1` are adapters of GPUs, `cuda` and `cuda:1`
    /// NVIDIA GPUs, every other backend runs with models on the CPU. Opens the adapter.
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
        open(index.transpose()?, compute).map(|place| (place, name.into()))
    }

    /// The memory to plan with where the user has given none, if `host` bytes are free on the host (`None`: unknown): what is
    /// free on the device, and not more than `host` if the device computes in the host's memory. `None` is unlimited.
    ///
    /// # Errors
    /// The device has failed, or it has memory of its own and its driver does not say how much: the host's says nothing
    /// about it.
    pub fn default_memory(&self, host: Option<u64>) -> Result<Option<u64>, DeviceError> {
        match self {
            Place::Cpu(_) => Ok(host),
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => {
                let (limits, found) = (device.driver().limits(), device.driver().memory());
                // What a driver calls the size of memory that it shares with the host may be any number: lavapipe's was 2 GiB.
                let total = found.filter(|_| !limits.unified_memory).map(|memory| memory.total_bytes);
                default_memory(limits, found.and_then(|memory| memory.free_bytes).or(total), host)
            }
            #[cfg(feature = "cuda")]
            Place::Cuda(device) => {
                let (free, _) = device.driver().memory()?;
                default_memory(device.driver().limits(), Some(free), host)
            }
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(index: Option<usize>, compute: &Compute) -> Result<Place, DeviceError> {
        let options = CudaOptions { deterministic: compute.deterministic, ..Default::default() };
        open_cuda(&CudaInstallation::of_system(), index, options).map(Place::Cuda)
    }
    #[cfg(not(feature = "cuda"))]
    fn cuda(_: Option<usize>, _: &Compute) -> Result<Place, DeviceError> {
        let what = "this kvist was built without CUDA: build it with `--features cuda`, or use `--backend wgpu` \
                    or `--backend cpu`";
        Err(DeviceError::Unsupported(what.into()))
    }

    #[cfg(feature = "wgpu")]
    fn wgpu(index: Option<usize>, compute: &Compute) -> Result<Place, DeviceError> {
        let options = WgpuOptions { deterministic: compute.deterministic, ..Default::default() };
        open_wgpu(index, &options).map(Place::Wgpu)
    }
    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: Option<usize>, _: &Compute) -> Result<Place, DeviceError> {
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
            #[cfg(feature = "cuda")]
            Place::Cuda(device) => opened.load(device.clone(), options, budget, progress),
        }
    }

    /// Measures how K and V come from the host's memory to this device. The CPU computes in the host's memory.
    ///
    /// # Errors
    /// This is the CPU, or there is no memory on the device.
    pub fn measure_transfers(&self) -> Result<Box<dyn MeasureTransfers>, DeviceError> {
        match self {
            Place::Cpu(_) => {
                let what = "the CPU computes in the host's memory, so nothing is transferred: use --backend cuda \
                            or --backend wgpu";
                Err(DeviceError::Unsupported(what.into()))
            }
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => Ok(Box::new(device.measurement()?)),
            #[cfg(feature = "cuda")]
            Place::Cuda(device) => Ok(Box::new(device.measurement()?)),
        }
    }

    /// Checks that there are caches of a backend, as [`of_backend`](Self::of_backend) calls it, before a model is loaded for them.
    ///
    /// # Errors
    /// There is no such backend.
    pub fn check_backend(&self, backend: &str) -> Result<(), String> {
        let registry = self.registry();
        if registry.pairs().any(|(id, _)| id == backend) {
            return Ok(());
        }
        Err(format!(
            "there is no backend `{backend}`: use cpu, or a GPU in builds that have them: wgpu, wgpu:1, cuda, cuda:1"
        ))
    }

    /// This device with the backends that work with it.
    pub fn registry(&self) -> Registry {
        match self {
            Place::Cpu(compute) => growing_by(compute, 0),
            #[cfg(feature = "wgpu")]
            Place::Wgpu(device) => Registry::of(device.clone()).with(Box::new(device.clone())),
            #[cfg(feature = "cuda")]
            Place::Cuda(device) => Registry::of(device.clone()).with(Box::new(device.clone())),
        }
    }
}

/// [`Place::default_memory`] of a GPU with these limits, on which `free` bytes are free.
#[cfg_attr(not(any(test, feature = "wgpu", feature = "cuda")), expect(dead_code))]
fn default_memory(limits: &Limits, free: Option<u64>, host: Option<u64>) -> Result<Option<u64>, DeviceError> {
    match (free, limits.unified_memory) {
        (Some(free), false) => Ok(Some(free)),
        (free, true) => Ok([free, host].into_iter().flatten().min()),
        (None, false) => Err(DeviceError::Unsupported(format!(
            "{} has memory of its own, and its driver does not say how much is free: give --memory, for instance \
             --memory 6GB for a GPU with 8",
            limits.adapter
        ))),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// `--backend wgpu` on a GPU with 8 GB in a machine with 64 planned with the 64, and the driver refused later.
    #[test]
    fn the_hosts_memory_is_no_limit_for_a_gpu_with_its_own() {
        let limits = |unified_memory| Limits {
            max_binding_bytes: 1 << 30,
            max_part_bytes: 1 << 30,
            max_workgroup_bytes: 32 << 10,
            max_attend_rows: 32,
            batch_invariant: true,
            unified_memory,
            adapter: "a test's GPU".into(),
        };
        let (own, shared) = (limits(false), limits(true));
        let (gpu, host) = (8 << 30, 64 << 30);
        assert_eq!(default_memory(&own, Some(gpu), Some(host)).unwrap(), Some(gpu));
        assert_eq!(
            default_memory(&own, Some(host), Some(gpu)).unwrap(),
            Some(host),
            "the host may have less"
        );
        assert_eq!(default_memory(&own, Some(gpu), None).unwrap(), Some(gpu));
        for host in [Some(host), None] {
            let refused = default_memory(&own, None, host).unwrap_err().to_string();
            assert!(refused.contains("a test's GPU") && refused.contains("--memory"), "{refused}");
        }
        assert_eq!(default_memory(&shared, Some(gpu), Some(host)).unwrap(), Some(gpu), "half of it, say");
        assert_eq!(default_memory(&shared, Some(host), Some(gpu)).unwrap(), Some(gpu), "a container's limit");
        assert_eq!(default_memory(&shared, None, Some(host)).unwrap(), Some(host));
        assert_eq!(default_memory(&shared, None, None).unwrap(), None);
        let compute = Compute::default();
        assert_eq!(Place::Cpu(compute).default_memory(Some(host)).unwrap(), Some(host));
    }
}
