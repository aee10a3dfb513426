//! A GPU that was opened: buffers, compiled kernels, one stream, and what went wrong.
//!
//! Operations are recorded as a list and launched by `submit`, so a write that comes in between reaches the device before
//! them. Everything is on one stream, in order, but for copies of blocks from the host (`copy_ahead`), which have a stream of their own. The
//! first error is kept, and `check` returns it from then on.
mod ahead;
mod buffer;
mod clock;
mod copies;
mod graphs;
mod launches;
mod open;
mod recording;

use crate::compiler::Compiler;
use crate::failed;
use crate::ffi::{Arena, Code, Context, Event, Stream};
use crate::kernels::{self, Target};
use ahead::{Ahead, Copies};
pub use buffer::Buf;
use buffer::Memory;
use clock::Clock;
use copies::Staging;
use kvist_device::{DeviceError, HostBlock};
use kvist_gpu::{
    Args, BufferCopy, Compiled, Driver, Failure, Form, GemmTile, HostMemory, Kernel, Limits, Routed, lock,
};
use launches::Meter;
pub use launches::{Counts, KernelTime};
pub use recording::Recording;
use recording::{Call, Loaded, Other};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long a submission may run before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(600);

/// What was submitted.
#[derive(Clone, Debug)]
pub struct Submission {
    /// A point behind it; `None` if there was no event for it, and what was submitted has ended.
    end: Option<Arc<Event>>,
    marks: Arc<Vec<Event>>,
}

/// A GPU that was opened.
#[derive(Debug)]
pub struct CudaDriver {
    // Fields are dropped in this order; each keeps the context alive.
    kernels: Compiled<Option<Arc<Loaded>>>,
    staging: Mutex<Staging>,
    stream: Stream,
    /// Copies that wait for nothing on `stream` but the zeroing of their buffer. What uses their bytes is on `stream`, behind them.
    copies: Copies,
    context: Arc<Context>,
    compiler: Compiler,
    limits: Limits,
    multiprocessors: u32,
    failure: Failure,
    meter: Mutex<Option<Meter>>,
    /// Whether steps that repeat are launched as graphs.
    graphs: bool,
    /// Whether the launches of a graph overlap.
    overlap: bool,
    /// Whether linear layers use the tensor cores of warpgroups.
    warpgroups: bool,
    counted: [AtomicU64; 4],
    clock: Mutex<Option<Clock>>,
}

impl CudaDriver {
    /// Free and total bytes of the GPU's memory, as the driver says now.
    ///
    /// # Errors
    /// The device has failed.
    pub fn memory(&self) -> Result<(u64, u64), DeviceError> {
        self.context.memory().map_err(|code| failed(self.context.text(code)))
    }

    /// Keeps the first error.
    fn fail(&self, what: String) -> DeviceError {
        self.failure.keep(what)
    }

    /// Keeps the error of a call, with what the call was for.
    fn kept<T>(&self, doing: &str, result: Result<T, Code>) -> Result<T, DeviceError> {
        result.map_err(|code| self.fail(format!("{doing}: {}", self.context.text(code))))
    }

    fn out_of_memory(&self, what: &'static str, bytes: u64, code: Code) -> DeviceError {
        match code {
            Code::OUT_OF_MEMORY => DeviceError::OutOfMemory { what, bytes },
            other => self.fail(format!("memory for the {what}: {}", self.context.text(other))),
        }
    }

    /// The compiled kernel; compiles it at its first use. `None` after a failure.
    fn kernel(&self, kernel: &Kernel) -> Option<Arc<Loaded>> {
        self.kernels.get(kernel, || self.load(kernel).map_err(|what| self.fail(what)).ok())
    }

    /// What kernels are compiled for.
    pub fn target(&self) -> Target {
        Target {
            max_shared_bytes: self.limits.max_workgroup_bytes,
            fast: !self.limits.batch_invariant,
            warpgroups: self.warpgroups,
        }
    }

    fn load(&self, kernel: &Kernel) -> Result<Arc<Loaded>, String> {
        let (name, target) = (kernels::function(kernel), self.target());
        let shared_bytes = target.shared_bytes(kernel).ok_or_else(|| {
            let max_bytes = target.max_shared_bytes;
            format!("the kernel {name} needs more shared memory than a block has ({max_bytes} bytes)")
        })?;
        let source = target.source(kernel);
        let load = |anew: bool| {
            let image = self.compiler.image(name, &source, anew).map_err(|what| what.to_string())?;
            let function = self.context.load(&image.bytes, name, shared_bytes);
            Ok::<_, String>((function, image.cached.is_some()))
        };
        let (mut function, cached) = load(false)?;
        if function.is_err() && cached {
            // The file may be damaged: once more without it.
            function = load(true)?.0;
        }
        let function = function
            .map_err(|code| format!("the kernel {name} cannot be loaded: {}", self.context.text(code)))?;
        Ok(Arc::new(Loaded { function, name, threads: target.threads(kernel), shared_bytes }))
    }

    /// Waits for an event. Decode steps are short, so the first wait spins.
    fn until_done(&self, event: &Event) -> Result<(), DeviceError> {
        let start = Instant::now();
        loop {
            match event.is_done() {
                Ok(true) => return self.check(),
                Ok(false) => {}
                Err(code) => {
                    let error = self.kept("a submission failed", Err(code));
                    let _ = self.stream.synchronise(); // nothing else tells when what still runs ends
                    let _ = self.copies.stream.synchronise();
                    return error;
                }
            }
            match start.elapsed() {
                short if short < Duration::from_millis(20) => std::thread::yield_now(),
                long if long < PATIENCE => std::thread::sleep(Duration::from_micros(50)),
                _ => {
                    return Err(
                        self.fail(format!("a submission did not end within {} s", PATIENCE.as_secs()))
                    );
                }
            }
        }
    }

    /// Now: behind everything that was given to the stream.
    fn submission(&self, marks: Vec<Event>) -> Submission {
        let end = self.kept("submission", self.stream.event(false)).ok().map(Arc::new);
        if end.is_none() {
            // Nothing could tell the caller when the copies end whose memory it keeps.
            let _ = self.kept("submission", self.stream.synchronise());
        }
        Submission { end, marks: Arc::new(marks) }
    }
}

impl Driver for CudaDriver {
    const NAME: &'static str = "cuda";
    const HAS_ARENAS: bool = true;
    type Buffer = Buf;
    type Recorder = Recording;
    type Submission = Submission;

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn gemm_tile(&self, encoding: u32, routed: Routed, tokens: u32, outputs: u32) -> GemmTile {
        self.target().gemm_tile(encoding, routed, tokens, outputs)
    }

    fn has_halves(&self) -> bool {
        self.target().fast
    }

    fn has_several(&self, encoding: u32) -> bool {
        self.target().has_several(encoding)
    }

    /// Every block reads the norm's weights, too: for 4,096 inputs that seems to take longer than a launch (on an H100 an 8B model decoded
    /// 291 tokens per second with it, and 302 without, on another day; a model of 2,048 inputs 1,117 and 1,096).
    fn max_normed_inputs(&self) -> u32 {
        2048
    }

    fn norm_rows(&self, width: u32) -> u32 {
        kernels::norm_rows(width)
    }

    fn stores_both(&self) -> bool {
        true
    }

    fn product_tile(&self, kernel: &Kernel) -> (u32, u32) {
        self.target().product_tile(kernel)
    }

    fn scatter_groups(&self, words: u32, n: u32) -> [u32; 3] {
        kernels::move_groups(u64::from(words) * u64::from(n))
    }

    fn gather_groups(&self, words: u64) -> [u32; 3] {
        kernels::move_groups(words)
    }

    fn attend_rows(&self, wanted: u32, forms: (Form, Form), dim: u32, recent: bool) -> u32 {
        self.target().attend_rows(wanted, forms, dim, recent)
    }

    fn variant(&self) -> &'static str {
        let Target { fast, warpgroups, .. } = self.target();
        if fast && warpgroups { ", warpgroups" } else { "" }
    }

    fn elements_at_once(&self) -> u32 {
        kernels::ELEMENTS
    }

    fn attend_blocks(&self, forms: (Form, Form), dim: u32, rows: u32, recent: bool) -> Option<u32> {
        let target = self.target();
        target.fast.then(|| self.multiprocessors * target.attend_blocks(forms, dim, rows, recent))
    }

    /// What the GPU's memory has in use, by other processes too.
    fn allocated_bytes(&self) -> Option<u64> {
        self.context.memory().ok().map(|(free, total)| total - free)
    }

    fn check(&self) -> Result<(), DeviceError> {
        self.failure.check()
    }

    fn buffer(&self, what: &'static str, bytes: u64) -> Result<Buf, DeviceError> {
        if bytes > self.limits.max_binding_bytes {
            let most = self.limits.max_binding_bytes;
            return Err(DeviceError::Unsupported(format!(
                "the {what} takes {bytes} bytes in one piece, and kernels address at most {most}: use shorter steps or \
                 less context"
            )));
        }
        let size = bytes.next_multiple_of(4).max(16);
        let memory = self.context.allocate(size).map_err(|code| self.out_of_memory(what, bytes, code))?;
        self.kept("zeroing of a buffer", self.stream.zero(&memory))?;
        self.copies.zeroed();
        Ok(Buf(Arc::new(Memory::Device(memory))))
    }

    fn staging(&self, what: &'static str, bytes: u64) -> Result<Buf, DeviceError> {
        let memory = self.context.pin(bytes.max(16)).map_err(|code| self.out_of_memory(what, bytes, code))?;
        Ok(Buf(Arc::new(Memory::Results(memory))))
    }

    fn write(&self, buffer: &Buf, at: u64, bytes: &[u8]) {
        match buffer.device() {
            // An error is kept, and `check` returns it.
            Some(memory) => drop(self.upload(memory, at, bytes)),
            None => drop(self.fail("a write to a buffer of the host".into())),
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
        match Call::new(buffers, &args, groups) {
            Some(call) => recorder.call(kernel, || self.kernel(kernel), buffers, call),
            None => drop(self.fail(format!("{} buffers for the kernel {}", buffers.len(), kernel.name()))),
        }
    }

    fn copy(&self, recorder: &mut Recording, copy: &BufferCopy<'_, Self>) {
        let BufferCopy { from, from_byte, to, to_byte, bytes } = *copy;
        recorder.other(Other::Copy { from: from.clone(), from_byte, to: to.clone(), to_byte, bytes });
    }

    fn copy_ahead(&self, recorder: &mut Recording, copy: &BufferCopy<'_, Self>, marks: bool) {
        let BufferCopy { from, from_byte, to, to_byte, bytes } = *copy;
        let (from, to) = (from.clone(), to.clone());
        recorder.other(Other::CopyAhead(Ahead { from, from_byte, to, to_byte, bytes, marks }));
    }

    fn mark(&self, recorder: &mut Recording) {
        recorder.other(Other::Mark);
    }

    fn marks(&self, submission: &Submission) -> Result<Vec<f64>, DeviceError> {
        self.times(submission)
    }

    fn submit(&self, recorder: &mut Recording, copies: &[BufferCopy<'_, Self>]) -> Submission {
        let mut marks = Vec::new();
        let mut run = || -> Result<(), DeviceError> {
            self.check()?;
            self.run(recorder, &mut marks)?;
            copies.iter().try_for_each(|copy| self.copy_now(copy))
        };
        // After a failure nothing more is launched: the caller's next `check` returns it. What was launched before is waited for as ever.
        let ran = run();
        let submission = self.submission(if ran.is_ok() { marks } else { Vec::new() });
        recorder.submitted();
        submission
    }

    fn wait(&self, submission: &Submission) -> Result<(), DeviceError> {
        match &submission.end {
            Some(event) => self.until_done(event),
            None => self.check(),
        }
    }

    fn wait_all(&self) -> Result<(), DeviceError> {
        self.check()?;
        self.wait(&self.submission(Vec::new()))
    }

    fn is_done(&self, submission: &Submission) -> bool {
        // An error shows in `wait`.
        submission.end.as_ref().is_none_or(|event| event.is_done() != Ok(false))
    }

    fn read(&self, staging: &Buf, range: Range<u64>, read: impl FnOnce(&[u8])) -> Result<(), DeviceError> {
        self.check()?;
        let bytes = match &*staging.0 {
            Memory::Results(memory) => memory.bytes().get(range.start as usize..range.end as usize),
            _ => None,
        };
        let bytes = bytes.ok_or_else(|| self.fail(format!("bytes {range:?} of a buffer cannot be read")))?;
        read(bytes);
        Ok(())
    }

    /// Pinned memory, which kernels can bind as well.
    fn host_buffer(&self, what: &'static str, bytes: u64, _: HostMemory) -> Result<Buf, DeviceError> {
        let memory = self.context.pin(bytes.max(16)).map_err(|code| self.out_of_memory(what, bytes, code))?;
        Ok(Buf(Arc::new(Memory::Source(Mutex::new(memory)))))
    }

    fn arena(&self, bytes: u64) -> Result<Option<kvist_gpu::Arena<Self>>, DeviceError> {
        self.check()?;
        // A refusal harms nothing that runs, so it is not kept.
        let arena = Arena::new(&self.context, bytes.max(16)).map_err(|code| match code {
            Code::OUT_OF_MEMORY => DeviceError::OutOfMemory { what: "pinned memory of blocks", bytes },
            other => failed(format!("pinned memory of blocks: {}", self.context.text(other))),
        })?;
        let buffer = Buf(Arc::new(Memory::Arena(arena.clone())));
        Ok(Some(kvist_gpu::Arena { buffer, blocks: Arc::new(arena) }))
    }

    fn lease(&self, arena: &Buf, block: &HostBlock) -> Option<u64> {
        match &*arena.0 {
            Memory::Arena(arena) => arena.lease(block),
            _ => None,
        }
    }

    fn place(&self, arena: &Buf, bytes: &[u8]) -> Option<u64> {
        match &*arena.0 {
            Memory::Arena(arena) => arena.place(bytes),
            _ => None,
        }
    }

    fn fill(&self, buffer: &Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.fill_with(buffer, bytes.len(), &mut Vec::new(), |to| to.copy_from_slice(bytes))
    }

    fn fill_with(
        &self,
        buffer: &Buf,
        len: usize,
        _: &mut Vec<u8>,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), DeviceError> {
        self.check()?;
        let filled = match &*buffer.0 {
            Memory::Source(memory) => lock(memory).bytes_mut().get_mut(..len).map(write),
            _ => None,
        };
        filled.ok_or_else(|| self.fail(format!("{len} bytes do not fit into a buffer of the host")))
    }
}
