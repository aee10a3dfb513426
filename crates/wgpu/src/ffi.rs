//! What wgpu does not say and its driver does: how much memory a GPU has. Kernels without checks that cost much. The only unsafe code of
//! this crate.
#![allow(unsafe_code)]
use crate::adapters::AdapterMemory;

/// The memory of an adapter's largest heap on the device. `None` where the API does not say so to kvist: through Metal and
/// DirectX 12.
#[cfg(not(target_vendor = "apple"))]
pub fn memory(adapter: &wgpu::Adapter) -> Option<AdapterMemory> {
    use ash::vk;
    // SAFETY: nothing is destroyed; the guard lives until the end of this function.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let (gpu, instance) = (adapter.raw_physical_device(), adapter.shared_instance());
    let properties = adapter.physical_device_capabilities();
    let version = instance.instance_api_version().min(properties.properties().api_version);
    let known = version >= vk::API_VERSION_1_1 && properties.supports_extension(vk::EXT_MEMORY_BUDGET_NAME);
    let (mut budget, mut found) = (
        vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default(),
        vk::PhysicalDeviceMemoryProperties2::default(),
    );
    if known {
        found = found.push_next(&mut budget);
        // SAFETY: the physical device is of this instance, both have Vulkan 1.1, and what is chained is of an extension that
        // the device has.
        unsafe { instance.raw_instance().get_physical_device_memory_properties2(gpu, &mut found) };
    } else {
        // SAFETY: the physical device is of this instance.
        found.memory_properties =
            unsafe { instance.raw_instance().get_physical_device_memory_properties(gpu) };
    }
    let heaps = found.memory_properties;
    let on_device = |i: &usize| heaps.memory_heaps[*i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL);
    let n = (heaps.memory_heap_count as usize).min(heaps.memory_heaps.len());
    let heap = (0..n).filter(on_device).max_by_key(|i| heaps.memory_heaps[*i].size)?;
    let free_bytes = known.then(|| budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap]));
    Some(AdapterMemory { total_bytes: heaps.memory_heaps[heap].size, free_bytes })
}

#[cfg(target_vendor = "apple")]
pub fn memory(_: &wgpu::Adapter) -> Option<AdapterMemory> {
    None
}

/// The permission to ask for features that wgpu calls experimental.
pub fn experimental() -> wgpu::ExperimentalFeatures {
    // SAFETY: the caller takes responsibility for bugs of these features. The only one that is asked for are cooperative matrices, in
    // gemm_coop.wgsl.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// A kernel's module. wgpu would count the iterations of every loop, to end those that never end by themselves: on an H200 that made
/// attention 1.8 times and prompts 2.9 times as slow. Bounds stay checked.
pub fn module(device: &wgpu::Device, name: &'static str, source: String) -> wgpu::ShaderModule {
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(name), source: wgpu::ShaderSource::Wgsl(source.into()) };
    let checks =
        wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..wgpu::ShaderRuntimeChecks::checked() };
    // SAFETY: the only check that is left out asks that no loop is infinite. The kernels are this crate's own, and every loop of theirs
    // goes up to a bound that the loop does not change, halves a number or a range, or doubles a number until it passes a bound.
    unsafe { device.create_shader_module_trusted(descriptor, checks) }
}
