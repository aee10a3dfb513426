//! An adapter that was opened: buffers, pipelines, submissions, and what went wrong.
//!
//! wgpu reports most errors through a callback. The first one is kept, and `check` returns it from then on.
mod bind_groups;
mod clock;
mod options;
mod recording;
#[cfg(test)]
mod tests;

use crate::adapters::{
    AdapterMemory, IMMEDIATES, all, best, binding_bytes, has_cooperative, instance, missing,
};
use crate::ffi;
use crate::kernels::Target;
use bind_groups::BindGroups;
use clock::{CLOCK, Clock, MAX_MARKS};
use kvist_device::DeviceError;
use kvist_gpu::{
    Args, BufferCopy, Compiled, Driver, Failure, Form, GemmTile, HostMemory, Kernel, Limits, Routed,
};
pub use options::OpenOptions;
pub use recording::Recording;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// What is used where an adapter has it: a clock, buffers in the host's memory that kernels bind, subgroups, and cooperative matrices.
const OPTIONAL: wgpu::Features =
    CLOCK.union(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS).union(wgpu::Features::SUBGROUP).union(COOPERATIVE);
/// What products of cooperative matrices need, beside subgroups.
const COOPERATIVE: wgpu::Features =
    wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(wgpu::Features::SHADER_F16);

/// Dispatches of a step that the device gets at once: first a few, so that it begins soon, then more, because every submission costs some
/// 50 us of the host's time.
const FIRST_DISPATCHES: u32 = 16;
const DISPATCHES: u32 = 64;

/// So many workgroups of attention fill a GPU. wgpu does not say how many multiprocessors one has.
fn attend_blocks(kind: wgpu::DeviceType) -> u32 {
    match kind {
        wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::VirtualGpu => 256,
        wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::Other => 64,
        wgpu::DeviceType::Cpu => 16,
    }
}

fn failed(what: impl Into<String>) -> DeviceError {
    DeviceError::Failed { device: Wgpu::NAME, what: what.into() }
}

/// A buffer on the device. Its id never names another buffer.
#[derive(Debug)]
pub struct Buf {
    raw: wgpu::Buffer,
    id: u64,
    bind_groups: Arc<BindGroups>,
    /// Whether there may be bind groups with it.
    is_bound: AtomicBool,
}

impl Drop for Buf {
    fn drop(&mut self) {
        if *self.is_bound.get_mut() {
            self.bind_groups.drop_those_of(self.id);
        }
    }
}

/// A compiled kernel.
#[derive(Debug)]
struct Pipeline {
    raw: wgpu::ComputePipeline,
    bindings: wgpu::BindGroupLayout,
    id: u64,
}

/// What was submitted, and whether it has ended.
#[derive(Clone, Debug)]
pub struct Submission {
    index: wgpu::SubmissionIndex,
    done: Arc<AtomicBool>,
    /// Where its marks are, and how many.
    marks: Option<(Clock, u32)>,
}

/// An adapter that was opened.
#[derive(Debug)]
pub struct Wgpu {
    adapter: wgpu::Adapter,
    device: wgpu::Device,
    queue: wgpu::Queue,
    limits: Limits,
    target: Target,
    /// Workgroups of attention that are to be there at the same time.
    attend_blocks: u32,
    pipelines: Compiled<Arc<Pipeline>>,
    bind_groups: Arc<BindGroups>,
    failure: Failure,
    patience: Duration,
    next_id: AtomicU64,
    /// Bound where a kernel has an argument that a call does not use.
    unused: [wgpu::Buffer; 2],
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

    /// The adapter's memory now. `None` if its driver does not say so to kvist.
    pub fn memory(&self) -> Option<AdapterMemory> {
        ffi::memory(&self.adapter)
    }

    /// Whether lanes exchange values within subgroups.
    pub fn uses_subgroups(&self) -> bool {
        self.target.subgroups
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn buffer_for(
        &self,
        what: &'static str,
        bytes: u64,
        usage: wgpu::BufferUsages,
    ) -> Result<Buf, DeviceError> {
        let storage = usage.contains(wgpu::BufferUsages::STORAGE);
        if storage && bytes > self.limits.max_binding_bytes {
            let most = self.limits.max_binding_bytes;
            return Err(DeviceError::Unsupported(format!(
                "the {what} takes {bytes} bytes in one piece, and this adapter binds at most {most}: use shorter \
                 steps or less context"
            )));
        }
        let usage = match usage {
            wgpu::BufferUsages::STORAGE => {
                usage | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST
            }
            wgpu::BufferUsages::MAP_READ => usage | wgpu::BufferUsages::COPY_DST,
            host => host,
        };
        // Kernels read some buffers in vectors of 16 bytes.
        let size = bytes.next_multiple_of(16).max(16);
        let out_of_memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(what),
            size,
            usage,
            mapped_at_creation: false,
        });
        match pollster::block_on(out_of_memory.pop()) {
            None => {
                let bind_groups = self.bind_groups.clone();
                Ok(Buf { raw, id: self.id(), bind_groups, is_bound: AtomicBool::new(false) })
            }
            Some(_) => Err(DeviceError::OutOfMemory { what, bytes }),
        }
    }

    /// The recorder's encoder, outside of any pass.
    fn between_passes<'a>(&self, recorder: &'a mut Recording) -> &'a mut wgpu::CommandEncoder {
        recorder.pass = None;
        recorder.encoder.get_or_insert_with(|| self.device.create_command_encoder(&Default::default()))
    }

    /// Submits what was recorded so far, so that the device begins while the host records the rest of the step.
    fn submit_early(&self, recorder: &mut Recording) {
        recorder.pass = None;
        self.queue.submit(recorder.encoder.take().map(wgpu::CommandEncoder::finish));
        recorder.n_dispatches = 0;
        recorder.n_early += 1;
    }

    /// Maps bytes of a buffer that no submission uses any more.
    fn map(&self, buffer: &wgpu::Buffer, mode: wgpu::MapMode, range: Range<u64>) -> Result<(), DeviceError> {
        let (mapped, result) = mpsc::channel();
        buffer.slice(range).map_async(mode, move |done| {
            let _ = mapped.send(done); // the receiver is gone if this call has failed
        });
        // The buffer is free, so this does not wait for steps that are in flight.
        let _ = self.device.poll(wgpu::PollType::Poll);
        if let Ok(Ok(())) = result.try_recv() {
            return self.check();
        }
        self.poll(None)?;
        // The poll of another thread may have taken the mapping, and not have called back yet.
        match result.recv_timeout(self.patience) {
            Ok(Ok(())) => Ok(()),
            other => Err(self.failure.keep(format!("a buffer could not be mapped: {other:?}"))),
        }
    }

    /// Waits for a submission, or for all.
    fn poll(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), DeviceError> {
        self.check()?;
        let poll = wgpu::PollType::Wait { submission_index: submission, timeout: Some(self.patience) };
        match self.device.poll(poll) {
            Ok(_) => self.check(),
            Err(error) => {
                let seconds = self.patience.as_secs_f64();
                Err(self.failure.keep(format!("a submission did not end within {seconds} s: {error}")))
            }
        }
    }

    /// The compiled kernel; compiles it at its first use.
    fn pipeline(&self, kernel: &Kernel) -> Arc<Pipeline> {
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

impl Driver for Wgpu {
    const NAME: &'static str = "wgpu";
    type Buffer = Buf;
    type Recorder = Recording;
    type Submission = Submission;

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn variant(&self) -> &'static str {
        match self.target {
            Target { fast: false, .. } => "", // the same bits in any case
            Target { cooperative: true, subgroups: true, .. } => ", cooperative, subgroups",
            Target { cooperative: true, .. } => ", cooperative",
            Target { subgroups: true, .. } => ", subgroups",
            _ => "",
        }
    }

    fn has_several(&self, _encoding: u32) -> bool {
        self.target.has_several()
    }

    fn gemm_tile(&self, encoding: u32, routed: Routed, tokens: u32, outputs: u32) -> GemmTile {
        self.target.gemm_tile(encoding, routed, tokens, outputs)
    }

    fn has_halves(&self) -> bool {
        self.target.has_halves()
    }

    fn max_normed_inputs(&self) -> u32 {
        8192
    }

    fn stores_both(&self) -> bool {
        true
    }

    fn attend_rows(&self, wanted: u32, forms: (Form, Form), dim: u32, recent: bool) -> u32 {
        self.target.attend_rows(&self.limits, wanted, forms, dim, recent)
    }

    fn attend_blocks(&self, _: (Form, Form), _: u32, _: u32, _: bool) -> Option<u32> {
        self.target.fast.then_some(self.attend_blocks)
    }

    fn allocated_bytes(&self) -> Option<u64> {
        // A dropped buffer is freed once the writes to it have been submitted and have ended.
        let _ = self.wait_all(); // an error shows in `check`
        Some(self.device.generate_allocator_report()?.total_allocated_bytes)
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.failure.check()
    }

    fn buffer(&self, what: &'static str, bytes: u64) -> Result<Buf, DeviceError> {
        self.buffer_for(what, bytes, wgpu::BufferUsages::STORAGE)
    }

    fn staging(&self, what: &'static str, bytes: u64) -> Result<Buf, DeviceError> {
        self.buffer_for(what, bytes, wgpu::BufferUsages::MAP_READ)
    }

    fn write(&self, buffer: &Buf, at: u64, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.queue.write_buffer(&buffer.raw, at, bytes);
        }
    }

    fn record(
        &self,
        recorder: &mut Recording,
        kernel: &Kernel,
        buffers: &[Option<&Buf>],
        args: Args,
        groups: [u32; 3],
    ) {
        if groups.contains(&0) {
            return;
        }
        let pipeline = self.pipeline(kernel);
        let key = (pipeline.id, buffers.iter().map(|buffer| buffer.map_or(0, |buffer| buffer.id)).collect());
        let group = self.bind_groups.get(key, || {
            buffers.iter().flatten().for_each(|buffer| buffer.is_bound.store(true, Ordering::Relaxed));
            let raw = buffers.iter().zip(kernel.writes()).map(|(buffer, writes)| match buffer {
                Some(buffer) => &buffer.raw,
                None => &self.unused[usize::from(*writes)],
            });
            let entries: Vec<_> = (0u32..)
                .zip(raw)
                .map(|(binding, raw)| wgpu::BindGroupEntry { binding, resource: raw.as_entire_binding() })
                .collect();
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &pipeline.bindings,
                entries: &entries,
            })
        });
        let encoder =
            recorder.encoder.get_or_insert_with(|| self.device.create_command_encoder(&Default::default()));
        let pass = recorder
            .pass
            .get_or_insert_with(|| encoder.begin_compute_pass(&Default::default()).forget_lifetime());
        pass.set_pipeline(&pipeline.raw);
        pass.set_bind_group(0, &group, &[]);
        let bytes: Vec<u8> = args.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        pass.set_immediates(0, &bytes);
        pass.dispatch_workgroups(groups[0], groups[1], groups[2]);
        recorder.n_dispatches += 1;
        let full = if recorder.n_early == 0 { FIRST_DISPATCHES } else { DISPATCHES };
        if recorder.n_dispatches == full {
            self.submit_early(recorder);
        }
    }

    fn copy(&self, recorder: &mut Recording, copy: &BufferCopy<'_, Self>) {
        let (from, to) = (&copy.from.raw, &copy.to.raw);
        let encoder = self.between_passes(recorder);
        encoder.copy_buffer_to_buffer(from, copy.from_byte, to, copy.to_byte, copy.bytes);
    }

    fn mark(&self, recorder: &mut Recording) {
        if !self.device.features().contains(CLOCK) || recorder.n_marks == MAX_MARKS {
            return;
        }
        let n = recorder.n_marks;
        let clock = recorder.clock.get_or_insert_with(|| Clock::new(&self.device)).queries.clone();
        self.between_passes(recorder).write_timestamp(&clock, n);
        recorder.n_marks += 1;
    }

    fn marks(&self, submission: &Submission) -> Result<Vec<f64>, DeviceError> {
        let Some((clock, n)) = &submission.marks else { return Ok(Vec::new()) };
        let mut times = Vec::new();
        let tick = f64::from(self.queue.get_timestamp_period());
        self.read(&clock.staging, 0..8 * u64::from(*n), |bytes| {
            times.extend(
                bytes.as_chunks::<8>().0.iter().map(|ticks| u64::from_le_bytes(*ticks) as f64 * tick),
            );
        })?;
        Ok(times)
    }

    fn submit(&self, recorder: &mut Recording, copies: &[BufferCopy<'_, Self>]) -> Submission {
        recorder.pass = None;
        let encoder = recorder.encoder.take();
        let mut encoder = encoder.unwrap_or_else(|| self.device.create_command_encoder(&Default::default()));
        for copy in copies {
            let (from, to) = (&copy.from.raw, &copy.to.raw);
            encoder.copy_buffer_to_buffer(from, copy.from_byte, to, copy.to_byte, copy.bytes);
        }
        (recorder.n_dispatches, recorder.n_early) = (0, 0);
        let n_marks = std::mem::take(&mut recorder.n_marks);
        let marks = recorder.clock.as_ref().filter(|_| n_marks > 0).map(|clock| {
            let bytes = 8 * u64::from(n_marks);
            encoder.resolve_query_set(&clock.queries, 0..n_marks, &clock.resolved, 0);
            encoder.copy_buffer_to_buffer(&clock.resolved, 0, &clock.staging.raw, 0, bytes);
            (clock.clone(), n_marks)
        });
        let index = self.queue.submit([encoder.finish()]);
        let done = Arc::new(AtomicBool::new(false));
        let flag = done.clone();
        self.queue.on_submitted_work_done(move || flag.store(true, Ordering::Release));
        Submission { index, done, marks }
    }

    fn wait(&self, submission: &Submission) -> Result<(), DeviceError> {
        self.poll(Some(submission.index.clone()))
    }

    fn wait_all(&self) -> Result<(), DeviceError> {
        let index = self.queue.submit([]); // pending writes
        self.poll(Some(index))
    }

    fn is_done(&self, submission: &Submission) -> bool {
        let _ = self.device.poll(wgpu::PollType::Poll); // an error shows in `wait`
        submission.done.load(Ordering::Acquire)
    }

    fn read(&self, staging: &Buf, range: Range<u64>, read: impl FnOnce(&[u8])) -> Result<(), DeviceError> {
        if range.is_empty() {
            read(&[]);
            return Ok(());
        }
        // A mapping begins at a multiple of eight.
        let first = range.start / wgpu::MAP_ALIGNMENT * wgpu::MAP_ALIGNMENT;
        self.map(&staging.raw, wgpu::MapMode::Read, first..range.end)?;
        let slice = staging.raw.slice(first..range.end);
        let view = slice.get_mapped_range().map_err(|error| self.failure.keep(error.to_string()))?;
        read(&view[(range.start - first) as usize..]);
        drop(view);
        staging.raw.unmap();
        Ok(())
    }

    fn host_buffer(&self, what: &'static str, bytes: u64, memory: HostMemory) -> Result<Buf, DeviceError> {
        let both = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
        match memory {
            HostMemory::Mapped
                if self.device.features().contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS) =>
            {
                self.buffer_for(what, bytes, both | wgpu::BufferUsages::STORAGE)
            }
            HostMemory::Mapped => {
                let adapter = &self.limits.adapter;
                Err(DeviceError::Unsupported(format!("kernels of {adapter} cannot read the host's memory")))
            }
            HostMemory::Pinned | HostMemory::Pageable => self.buffer_for(what, bytes, both),
        }
    }

    fn fill(&self, buffer: &Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let range = 0..bytes.len().next_multiple_of(wgpu::MAP_ALIGNMENT as usize) as u64;
        self.map(&buffer.raw, wgpu::MapMode::Write, range.clone())?;
        let view = buffer.raw.slice(range).get_mapped_range_mut();
        let mut view = view.map_err(|error| self.failure.keep(error.to_string()))?;
        view.slice(..bytes.len()).copy_from_slice(bytes);
        drop(view);
        buffer.raw.unmap();
        Ok(())
    }
}
