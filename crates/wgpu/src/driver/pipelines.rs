//! Kernels, compiled at their first use.
use super::Wgpu;
use crate::adapters::IMMEDIATES;
use crate::ffi;
use kvist_gpu::Kernel;
use std::sync::Arc;

/// A compiled kernel.
#[derive(Debug)]
pub struct Pipeline {
    pub raw: wgpu::ComputePipeline,
    pub bindings: wgpu::BindGroupLayout,
    pub id: u64,
}

impl Wgpu {
    /// The compiled kernel; compiles it at its first use.
    pub(super) fn pipeline(&self, kernel: &Kernel) -> Arc<Pipeline> {
        self.pipelines.get(kernel, || Arc::new(self.compile(kernel)))
    }

    fn compile(&self, kernel: &Kernel) -> Pipeline {
        let module = ffi::module(&self.device, kernel.name(), self.target.source(kernel));
        let entry = |(binding, writes): (usize, &bool)| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: !writes },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        };
        let entries: Vec<_> = kernel.writes().iter().enumerate().map(entry).collect();
        let bindings = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(kernel.name()),
            entries: &entries,
        });
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(kernel.name()),
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: IMMEDIATES,
        });
        let raw = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(kernel.name()),
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Kernels write shared memory before they read it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        Pipeline { raw, bindings, id: self.id() }
    }
}
