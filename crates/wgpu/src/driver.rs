//! An adapter that was opened: buffers, pipelines, submissions, and what went wrong.
//!
//! wgpu reports most errors through a callback. The first one is kept, and `check` returns it from then on.
mod bind_groups;
mod buffers;
mod clock;
mod open;
mod pipelines;
mod recording;
#[cfg(test)]
mod tests;

use crate::adapters::AdapterMemory;
use crate::ffi;
use crate::kernels::Target;
use bind_groups::BindGroups;
pub use buffers::Buf;
use clock::{CLOCK, Clock, MAX_MARKS};
use kvist_device::DeviceError;
use kvist_gpu::{
    Args, BufferCopy, Compiled, Driver, Failure, Form, GemmTile, HostMemory, Kernel, Limits, Routed,
};
pub use open::OpenOptions;
use pipelines::Pipeline;
pub use recording::Recording;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Dispatches of a step that the device gets at once: first a few, so that it begins soon, then more, because every submission costs some
/// 50 us of the host's time.
const FIRST_DISPATCHES: u32 = 16;
const DISPATCHES: u32 = 64;

fn failed(what: impl Into<String>) -> DeviceError {
    DeviceError::Failed { device: Wgpu::NAME, what: what.into() }
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
