//! The adapters of this machine, and which of them can run models.
use crate::ffi;
use kvist_gpu::IMMEDIATE_WORDS;

/// Storage buffers that the largest kernel binds.
const STORAGE_BUFFERS: u32 = 9;
/// Bytes of immediates that the largest kernel has.
pub const IMMEDIATES: u32 = 4 * IMMEDIATE_WORDS as u32;

/// Memory of an adapter: its own, or the part of the host's that it can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterMemory {
    pub total_bytes: u64,
    /// What this process can still allocate, by the driver's own estimate. `None` if the driver has no estimate.
    pub free_bytes: Option<u64>,
}

/// An adapter as `kvist devices` lists it.
#[derive(Clone, Debug)]
pub struct AdapterSummary {
    /// Number for [`open`](crate::open).
    pub index: usize,
    pub name: String,
    /// `vulkan`, `metal` or `dx12`.
    pub api: &'static str,
    /// `discrete`, `integrated`, `virtual`, `cpu` or `other`.
    pub kind: &'static str,
    pub driver: String,
    /// `None` if the driver does not say so to kvist.
    pub memory: Option<AdapterMemory>,
    /// Largest buffer that a kernel can read: weights and pools are split to fit.
    pub max_binding_bytes: u64,
    pub max_workgroup_bytes: u32,
    /// Fewest and most invocations of a subgroup.
    pub subgroup: (u32, u32),
    pub features: Vec<&'static str>,
    /// What the adapter lacks to run models; `None` if it can.
    pub missing: Option<String>,
}

pub fn instance() -> wgpu::Instance {
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    desc.flags = wgpu::InstanceFlags::empty();
    wgpu::Instance::new(desc)
}

pub fn all(instance: &wgpu::Instance) -> Vec<wgpu::Adapter> {
    pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()))
}

/// Every adapter of this machine, whether it can run models or not.
pub fn adapters() -> Vec<AdapterSummary> {
    all(&instance()).iter().enumerate().map(|(index, adapter)| summary(index, adapter)).collect()
}

fn summary(index: usize, adapter: &wgpu::Adapter) -> AdapterSummary {
    let (info, limits, features) = (adapter.get_info(), adapter.limits(), adapter.features());
    let known = [
        (wgpu::Features::SHADER_F16, "f16"),
        (wgpu::Features::SUBGROUP, "subgroups"),
        (wgpu::Features::TIMESTAMP_QUERY, "timestamps"),
        (wgpu::Features::IMMEDIATES, "immediates"),
    ];
    AdapterSummary {
        index,
        name: info.name,
        api: match info.backend {
            wgpu::Backend::Vulkan => "vulkan",
            wgpu::Backend::Metal => "metal",
            wgpu::Backend::Dx12 => "dx12",
            _ => "other",
        },
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::VirtualGpu => "virtual",
            wgpu::DeviceType::Cpu => "cpu",
            wgpu::DeviceType::Other => "other",
        },
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
        memory: ffi::memory(adapter),
        max_binding_bytes: binding_bytes(&limits),
        max_workgroup_bytes: limits.max_compute_workgroup_storage_size,
        subgroup: (info.subgroup_min_size, info.subgroup_max_size),
        features: known
            .iter()
            .filter(|(feature, _)| features.contains(*feature))
            .map(|(_, name)| *name)
            .chain(has_cooperative(adapter).then_some("cooperative matrices"))
            .collect(),
        missing: missing(adapter),
    }
}

pub fn binding_bytes(limits: &wgpu::Limits) -> u64 {
    // Kernels count words in 32 bits, and 4 GiB are enough for one part. Buffers are multiples of 16 bytes.
    limits.max_storage_buffer_binding_size.min(limits.max_buffer_size).min((1 << 32) - 16) / 16 * 16
}

/// What an adapter lacks, with the limit that it has.
pub fn missing(adapter: &wgpu::Adapter) -> Option<String> {
    let limits = adapter.limits();
    if !adapter.features().contains(wgpu::Features::IMMEDIATES) {
        return Some("it has no immediates (push constants)".into());
    }
    let needs = [
        ("storage buffers per shader", limits.max_storage_buffers_per_shader_stage, STORAGE_BUFFERS),
        ("bytes of immediates", limits.max_immediate_size, IMMEDIATES),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16 << 10),
        ("invocations per workgroup", limits.max_compute_invocations_per_workgroup, 256),
        ("invocations per workgroup in x", limits.max_compute_workgroup_size_x, 256),
        ("workgroups per dimension", limits.max_compute_workgroups_per_dimension, 65_535),
    ];
    let short = needs.iter().find(|(_, has, needed)| has < needed);
    short.map(|(what, has, needed)| format!("it has {has} {what}, kvist needs {needed}"))
}

/// Whether subgroups of 32 lanes, and of no other size, multiply matrices of 16 x 16 in f16 and add up in f32.
pub fn has_cooperative(adapter: &wgpu::Adapter) -> bool {
    let info = adapter.get_info();
    let products = adapter.cooperative_matrix_properties();
    let needed = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX
        | wgpu::Features::SHADER_F16
        | wgpu::Features::SUBGROUP;
    adapter.features().contains(needed)
        && (info.subgroup_min_size, info.subgroup_max_size) == (32, 32)
        && products.iter().any(|product| {
            (product.m_size, product.n_size, product.k_size) == (16, 16, 16)
                && product.ab_type == wgpu::CooperativeScalarType::F16
                && product.cr_type == wgpu::CooperativeScalarType::F32
        })
}

/// A discrete GPU before an integrated one before the rest; the first of equals.
pub fn best(adapters: &[wgpu::Adapter]) -> usize {
    let rank = |adapter: &wgpu::Adapter| match adapter.get_info().device_type {
        _ if missing(adapter).is_some() => 5,
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    };
    (0..adapters.len()).min_by_key(|i| rank(&adapters[*i])).unwrap_or(0)
}
