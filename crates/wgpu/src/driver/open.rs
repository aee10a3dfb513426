//! Adapters are opened.
use super::clock::CLOCK;
use super::{Wgpu, failed};
use crate::adapters::{all, best, binding_bytes, has_cooperative, instance, missing};
use crate::ffi;
use crate::kernels::Target;
use kvist_device::DeviceError;
use kvist_gpu::{Compiled, Driver, Failure, Limits};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// What is used where an adapter has it: a clock, buffers in the host's memory that kernels bind, subgroups, and cooperative matrices.
const OPTIONAL: wgpu::Features =
    CLOCK.union(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS).union(wgpu::Features::SUBGROUP).union(COOPERATIVE);
/// What products of cooperative matrices need, beside subgroups.
const COOPERATIVE: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);

/// So many workgroups of attention fill a GPU. wgpu does not say how many multiprocessors one has.
fn attend_blocks(kind: wgpu::DeviceType) -> u32 {
    match kind {
        wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::VirtualGpu => 256,
        wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::Other => 64,
        wgpu::DeviceType::Cpu => 16,
    }
}

/// How an adapter is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// Most bytes of a part of weights or of a pool, even if the adapter could bind more. For tests: most adapters bind more
    /// than any test needs.
    pub max_part_bytes: u64,
    /// Whether kernels use subgroups, where the adapter has them. With [`deterministic`](Self::deterministic), results have the same
    /// bits without them.
    pub subgroups: bool,
    /// Whether kernels multiply by cooperative matrices, where the adapter has them.
    pub cooperative: bool,
    /// Kernels whose results depend on nothing but a row's own inputs; they are slower.
    pub deterministic: bool,
    /// How long a submission may run before it counts as hung.
    pub patience: Duration,
}

impl Default for OpenOptions {
    /// `KVIST_WGPU_SUBGROUPS=0` and `KVIST_WGPU_COOPERATIVE=0` in the environment turn these off.
    fn default() -> Self {
        let on = |name: &str| std::env::var_os(name).is_none_or(|value| value != "0");
        OpenOptions {
            max_part_bytes: u64::MAX,
            subgroups: on("KVIST_WGPU_SUBGROUPS"),
            cooperative: on("KVIST_WGPU_COOPERATIVE"),
            deterministic: false,
            patience: Duration::from_secs(600),
        }
    }
}

impl Wgpu {
    /// Opens adapter `index`, or the best one.
    ///
    /// # Errors
    /// There is no adapter, not so many, or it lacks something.
    pub fn open(index: Option<usize>, options: &OpenOptions) -> Result<Self, DeviceError> {
        let instance = instance();
        let mut adapters = all(&instance);
        if adapters.is_empty() {
            return Err(failed(
                "there is no adapter: install a driver with Vulkan (Debian and Ubuntu: mesa-vulkan-drivers, which also \
                 has lavapipe for machines without a GPU; NVIDIA: its own driver with libvulkan1), or use `--backend cpu`",
            ));
        }
        let n = adapters.len();
        let index = match index {
            Some(index) if index < n => index,
            Some(index) => {
                let what =
                    format!("there is no adapter {index}, the machine has {n} (`kvist devices` lists them)");
                return Err(failed(what));
            }
            None => best(&adapters),
        };
        let adapter = adapters.swap_remove(index);
        let name = adapter.get_info().name;
        if let Some(what) = missing(&adapter) {
            return Err(failed(format!("adapter {index}, {name}, cannot run models: {what}")));
        }
        let limits = adapter.limits();
        let cooperative = options.cooperative && !options.deterministic && has_cooperative(&adapter);
        let subgroups = options.subgroups && adapter.features().contains(wgpu::Features::SUBGROUP);
        let mut optional = adapter.features() & OPTIONAL;
        optional.set(COOPERATIVE, cooperative);
        // Kernels with cooperative matrices ask for the number of a subgroup, too.
        optional.set(wgpu::Features::SUBGROUP, subgroups || cooperative);
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kvist"),
            experimental_features: if cooperative {
                ffi::experimental()
            } else {
                wgpu::ExperimentalFeatures::disabled()
            },
            required_features: wgpu::Features::IMMEDIATES | optional,
            required_limits: limits.clone(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (device, queue) = opened.map_err(|error| failed(format!("adapter {index}, {name}: {error}")))?;
        let failure = Failure::new(Self::NAME);
        let kept = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            kept.keep(error.to_string());
        }));
        let kept = failure.clone();
        device.set_device_lost_callback(move |_, message| {
            kept.keep(format!("the device was lost: {message}"));
        });
        let unused = [false, true].map(|_| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("unused"),
                size: 16,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            })
        });
        let kind = adapter.get_info().device_type;
        let unified_memory = [wgpu::DeviceType::IntegratedGpu, wgpu::DeviceType::Cpu].contains(&kind);
        let target = Target {
            subgroups,
            fast: !options.deterministic,
            bindings: limits.max_storage_buffers_per_shader_stage,
            cooperative,
            max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
        };
        Ok(Wgpu {
            adapter,
            device,
            queue,
            limits: Limits {
                max_binding_bytes: binding_bytes(&limits),
                max_part_bytes: binding_bytes(&limits).min(options.max_part_bytes),
                max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
                max_attend_rows: 32,
                batch_invariant: options.deterministic,
                unified_memory,
                adapter: name,
            },
            target,
            attend_blocks: attend_blocks(kind),
            pipelines: Compiled::default(),
            bind_groups: Arc::default(),
            failure,
            patience: options.patience,
            next_id: AtomicU64::new(1),
            unused,
        })
    }
}
