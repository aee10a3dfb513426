//! A GPU is opened.
use super::CudaDriver;
use super::ahead::Copies;
use super::copies::Staging;
use crate::compiler::Compiler;
use crate::devices::{driver, summary};
use crate::ffi::{Code, Context};
use crate::{Installation, Options, failed, kernels};
use kvist_device::DeviceError;
use kvist_gpu::{Compiled, Driver, Failure, Limits};
use std::sync::Mutex;

/// Kernels count words in 32 bits, and 4 GiB are enough for one part.
const MAX_PART_BYTES: u64 = (1 << 32) - 16;

impl CudaDriver {
    /// Opens GPU `index`, or the first one that can run models.
    ///
    /// # Errors
    /// There is no driver, no NVRTC, no such GPU, or it lacks something.
    pub fn open(
        installation: &Installation,
        index: Option<usize>,
        options: Options,
    ) -> Result<Self, DeviceError> {
        let cuda = driver(installation)?;
        let error = |code: Code| failed(cuda.text(code));
        let n = cuda.n_devices().map_err(error)?;
        let found = match index {
            Some(index) if index >= n => {
                return Err(failed(format!(
                    "there is no GPU {index}, the machine has {n} (`kvist devices` lists them)"
                )));
            }
            Some(index) => summary(&cuda, index).map_err(error)?,
            None => {
                let all: Vec<_> =
                    (0..n).map(|index| summary(&cuda, index)).collect::<Result<_, _>>().map_err(error)?;
                let usable = all.iter().position(|found| found.missing.is_none()).unwrap_or(0);
                let none = || failed("the driver finds no GPU: look at `nvidia-smi`, or use `--backend cpu`");
                all.into_iter().nth(usable).ok_or_else(none)?
            }
        };
        if let Some(what) = &found.missing {
            return Err(failed(format!("GPU {}, {}, cannot run models: {what}", found.index, found.name)));
        }
        let version = cuda.version().map_err(error)?;
        let compiler = Compiler::new(installation, found.compute_capability, version)
            .map_err(|what| failed(what.to_string()))?;
        let warpgroups = options.warpgroups && compiler.has_warpgroups();
        let device = cuda.device(found.index).map_err(error)?;
        let context = Context::new(&cuda, device).map_err(error)?;
        Ok(CudaDriver {
            kernels: Compiled::default(),
            staging: Mutex::new(Staging::new(&context).map_err(error)?),
            stream: context.stream().map_err(error)?,
            copies: Copies::new(context.stream().map_err(error)?),
            compiler,
            limits: Limits {
                max_binding_bytes: MAX_PART_BYTES,
                max_part_bytes: MAX_PART_BYTES.min(options.max_part_bytes),
                max_workgroup_bytes: found.max_shared_bytes,
                max_attend_rows: kernels::ROWS,
                batch_invariant: options.deterministic,
                unified_memory: found.integrated,
                adapter: found.name,
            },
            multiprocessors: u32::try_from(found.multiprocessors).unwrap_or(1).max(1),
            graphs: options.graphs && context.has_graphs(),
            overlap: options.overlap && context.has_overlap() && found.compute_capability.0 >= 9,
            warpgroups,
            context,
            failure: Failure::new(Self::NAME),
            meter: Mutex::default(),
            counted: Default::default(),
            clock: Mutex::default(),
        })
    }
}
