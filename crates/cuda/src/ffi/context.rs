//! What belongs to a GPU: memory, events, kernels, a stream. Each frees itself when it is dropped, and keeps its context alive.
use super::graph::{EdgeCalls, GraphCalls};
use super::{Code, Cuda, Handle, check};
use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

/// A device's primary context. Released when dropped.
pub struct Context {
    cuda: Arc<Cuda>,
    /// `None` if the driver lacks one of them.
    pub(super) graphs: Option<GraphCalls>,
    pub(super) edges: Option<EdgeCalls>,
    device: c_int,
    raw: Handle,
}

// SAFETY: contexts, and what belongs to them, may be used by any thread (CUDA driver API, "Multi-threading"): every method
// makes the context current on its thread first.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.device)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and nothing that belongs to it is left: everything keeps it alive.
        unsafe { (self.cuda.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

impl Context {
    pub fn new(cuda: &Arc<Cuda>, device: c_int) -> Result<Arc<Self>, Code> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver checks the device, and writes one handle.
        check(unsafe { (cuda.cuDevicePrimaryCtxRetain)(&mut raw, device) })?;
        let (graphs, edges) = (GraphCalls::find(&cuda._library), EdgeCalls::find(&cuda._library));
        Ok(Arc::new(Context { cuda: cuda.clone(), graphs, edges, device, raw }))
    }

    /// Makes it current on this thread.
    pub(super) fn enter(&self) -> Result<&Cuda, Code> {
        // SAFETY: the context is retained.
        check(unsafe { (self.cuda.cuCtxSetCurrent)(self.raw) })?;
        Ok(&self.cuda)
    }

    /// Free and total bytes of the device's memory.
    pub fn memory(&self) -> Result<(u64, u64), Code> {
        let (mut free, mut total) = (0usize, 0usize);
        let cuda = self.enter()?;
        // SAFETY: the driver writes two numbers.
        check(unsafe { (cuda.cuMemGetInfo_v2)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub fn text(&self, code: Code) -> String {
        self.cuda.text(code)
    }
}

/// Memory of the device. Freed when dropped, after the device has finished what was submitted.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    pub address: u64,
    pub bytes: u64,
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(cuda) = self.context.enter() {
            // SAFETY: nothing that runs uses the memory once the context is idle, and nothing else refers to it.
            unsafe {
                (cuda.cuCtxSynchronize)();
                (cuda.cuMemFree_v2)(self.address);
            }
        }
    }
}

/// Memory of the host, locked in place, that the device copies to and from by itself. It is an address and a length: code that makes a
/// reference to bytes of it has to show that nothing else writes to them. Freed when dropped.
#[derive(Debug)]
pub struct LockedMemory {
    context: Arc<Context>,
    pub(super) raw: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: memory of the host, which is freed once, on any thread; no method reads or writes it.
unsafe impl Send for LockedMemory {}
// SAFETY: as above.
unsafe impl Sync for LockedMemory {}

impl Drop for LockedMemory {
    fn drop(&mut self) {
        if let Ok(cuda) = self.context.enter() {
            // SAFETY: no copy runs once the context is idle.
            unsafe {
                (cuda.cuCtxSynchronize)();
                (cuda.cuMemFreeHost)(self.raw.cast());
            }
        }
    }
}

impl LockedMemory {
    /// Where kernels find it.
    pub fn address(&self) -> u64 {
        self.raw as u64
    }
}

/// Locked memory with one use at a time: the host fills it and the device copies from it, or the other way round.
#[derive(Debug)]
pub struct PinnedMemory(LockedMemory);

impl PinnedMemory {
    /// What the stream copies from and to.
    pub fn memory(&self) -> &LockedMemory {
        &self.0
    }
    /// The bytes, of which no copy that still runs writes any.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with so many bytes, and written at the start. The stream's methods that write it are called
        // with what the caller waits for before reading.
        unsafe { std::slice::from_raw_parts(self.0.raw, self.0.bytes) }
    }
    /// The bytes, of which no copy that still runs reads any.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nothing else refers to them.
        unsafe { std::slice::from_raw_parts_mut(self.0.raw, self.0.bytes) }
    }
}

/// A point in the order of a stream. Destroyed when dropped.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: Handle,
}

// SAFETY: as `Context`.
unsafe impl Send for Event {}
// SAFETY: as `Context`.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(cuda) = self.context.enter() {
            // SAFETY: the handle is this value's alone.
            unsafe { (cuda.cuEventDestroy_v2)(self.raw) };
        }
    }
}

impl Event {
    /// Whether everything before it has ended.
    pub fn is_done(&self) -> Result<bool, Code> {
        let cuda = self.context.enter()?;
        // SAFETY: the event exists.
        match check(unsafe { (cuda.cuEventQuery)(self.raw) }) {
            Ok(()) => Ok(true),
            Err(Code::NOT_READY) => Ok(false),
            Err(code) => Err(code),
        }
    }

    /// Milliseconds from another event to this one. Both have ended, and were made with a clock.
    pub fn since(&self, start: &Event) -> Result<f32, Code> {
        let cuda = self.context.enter()?;
        let mut elapsed = 0.0;
        // SAFETY: both events exist, and the driver writes one number.
        check(unsafe { (cuda.cuEventElapsedTime)(&mut elapsed, start.raw, self.raw) })?;
        Ok(elapsed)
    }
}

/// A kernel, with its module. Unloaded when dropped.
#[derive(Debug)]
pub struct Function {
    context: Arc<Context>,
    module: Handle,
    pub(super) raw: Handle,
}

// SAFETY: as `Context`.
unsafe impl Send for Function {}
// SAFETY: as `Context`.
unsafe impl Sync for Function {}

impl Drop for Function {
    fn drop(&mut self) {
        if let Ok(cuda) = self.context.enter() {
            // SAFETY: no launch of it runs once the context is idle, and the function goes with its module.
            unsafe {
                (cuda.cuCtxSynchronize)();
                (cuda.cuModuleUnload)(self.module);
            }
        }
    }
}

/// Most buffers that a kernel has.
pub const MAX_BUFFERS: usize = 11;

/// A launch of a kernel of this crate.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub function: &'a Function,
    pub groups: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// The kernel's arguments: addresses of at most [`MAX_BUFFERS`] buffers, then one struct of words. The buffers outlive the launch:
    /// [`DeviceMemory`] is freed only when the context is idle.
    pub addresses: &'a [u64],
    pub words: &'a [u32; 16],
}

impl Launch<'_> {
    /// Pointers to the arguments, which the driver copies from.
    pub(super) fn arguments(&self) -> Result<[*mut c_void; MAX_BUFFERS + 1], Code> {
        let mut pointers = [std::ptr::null_mut(); MAX_BUFFERS + 1];
        *pointers.get_mut(self.addresses.len()).ok_or(Code(1))? = self.words.as_ptr().cast_mut().cast();
        for (pointer, address) in pointers.iter_mut().zip(self.addresses) {
            *pointer = std::ptr::from_ref(address).cast_mut().cast();
        }
        Ok(pointers)
    }
}

/// Operations that run one after the other. Destroyed when dropped.
#[derive(Debug)]
pub struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) raw: Handle,
}

// SAFETY: as `Context`.
unsafe impl Send for Stream {}
// SAFETY: as `Context`.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(cuda) = self.context.enter() {
            // SAFETY: the handle is this value's alone.
            unsafe {
                (cuda.cuStreamSynchronize)(self.raw);
                (cuda.cuStreamDestroy_v2)(self.raw);
            }
        }
    }
}

impl Context {
    /// Uninitialised memory of the device.
    pub fn allocate(self: &Arc<Self>, bytes: u64) -> Result<DeviceMemory, Code> {
        let cuda = self.enter()?;
        let size = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let mut address = 0;
        // SAFETY: the driver writes one address.
        check(unsafe { (cuda.cuMemAlloc_v2)(&mut address, size) })?;
        Ok(DeviceMemory { context: self.clone(), address, bytes })
    }

    /// Zeroed memory of the host, which kernels address as the host does (unified addressing, on every 64-bit system).
    pub fn pin(self: &Arc<Self>, bytes: u64) -> Result<PinnedMemory, Code> {
        Ok(PinnedMemory(self.lock(bytes)?))
    }

    /// The same, to be lent in pieces.
    pub fn lock(self: &Arc<Self>, bytes: u64) -> Result<LockedMemory, Code> {
        let cuda = self.enter()?;
        let bytes = usize::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one pointer; no flags.
        check(unsafe { (cuda.cuMemHostAlloc)(&mut raw, bytes, 0) })?;
        let memory = LockedMemory { context: self.clone(), raw: raw.cast(), bytes };
        // SAFETY: allocated with so many bytes.
        unsafe { memory.raw.write_bytes(0, bytes) };
        Ok(memory)
    }

    pub fn stream(self: &Arc<Self>) -> Result<Stream, Code> {
        const NON_BLOCKING: c_uint = 1;
        let cuda = self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { (cuda.cuStreamCreate)(&mut raw, NON_BLOCKING) })?;
        Ok(Stream { context: self.clone(), raw })
    }

    /// The function `name` of a compiled image, with room for so many bytes of dynamic shared memory.
    pub fn load(self: &Arc<Self>, image: &[u8], name: &str, shared_bytes: u32) -> Result<Function, Code> {
        const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
        let cuda = self.enter()?;
        let name = CString::new(name).map_err(|_| Code(1))?;
        let mut image = image.to_vec();
        image.push(0); // PTX ends with 0; behind a cubin it does no harm
        let mut module = std::ptr::null_mut();
        let none = std::ptr::null_mut();
        // SAFETY: the image ends with 0, as PTX must, or its header says how long it is; no options.
        check(unsafe {
            (cuda.cuModuleLoadDataEx)(&mut module, image.as_ptr().cast(), 0, none, none.cast())
        })?;
        let mut function = Function { context: self.clone(), module, raw: std::ptr::null_mut() };
        // SAFETY: the module exists, the name ends with 0, and the driver writes one handle.
        check(unsafe { (cuda.cuModuleGetFunction)(&mut function.raw, module, name.as_ptr()) })?;
        if shared_bytes > 0 {
            let bytes = c_int::try_from(shared_bytes).map_err(|_| Code(1))?;
            // SAFETY: the function exists, and the driver checks the number.
            check(unsafe { (cuda.cuFuncSetAttribute)(function.raw, MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes) })?;
        }
        Ok(function)
    }
}

impl Stream {
    /// An event behind everything that was given to the stream; with `clock` the device notes the time.
    pub fn event(&self, clock: bool) -> Result<Event, Code> {
        const DISABLE_TIMING: c_uint = 2;
        let cuda = self.context.enter()?;
        let mut event = Event { context: self.context.clone(), raw: std::ptr::null_mut() };
        // SAFETY: the driver writes one handle.
        check(unsafe { (cuda.cuEventCreate)(&mut event.raw, if clock { 0 } else { DISABLE_TIMING }) })?;
        // SAFETY: event and stream exist.
        check(unsafe { (cuda.cuEventRecord)(event.raw, self.raw) })?;
        Ok(event)
    }

    /// Waits for everything that was given to the stream.
    pub fn synchronise(&self) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        // SAFETY: the stream exists.
        check(unsafe { (cuda.cuStreamSynchronize)(self.raw) })
    }

    /// What is given to the stream from now on waits for an event, which may be of another stream.
    pub fn wait(&self, event: &Event) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        // SAFETY: stream and event exist, and the event may be destroyed while it is waited for; no flags.
        check(unsafe { (cuda.cuStreamWaitEvent)(self.raw, event.raw, 0) })
    }

    pub fn zero(&self, memory: &DeviceMemory) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        // SAFETY: the memory has so many bytes.
        check(unsafe { (cuda.cuMemsetD8Async)(memory.address, 0, memory.bytes as usize, self.raw) })
    }

    /// Copies `len` bytes of pinned memory to the device. The caller leaves them alone until the copy has ended.
    pub fn upload(
        &self,
        from: &LockedMemory,
        first: usize,
        to: &DeviceMemory,
        at: u64,
        len: usize,
    ) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        if first.checked_add(len).is_none_or(|end| end > from.bytes) {
            return Err(Code(1));
        }
        inside(to, at, len as u64)?;
        // SAFETY: both ranges have been checked; pinned memory is freed only when the context is idle. There is no reference to all of it,
        // because others may write to other parts.
        check(unsafe {
            (cuda.cuMemcpyHtoDAsync_v2)(to.address + at, from.raw.add(first).cast(), len, self.raw)
        })
    }

    /// Copies `len` bytes of the device to pinned memory. The caller reads them after the copy has ended.
    pub fn download(
        &self,
        from: &DeviceMemory,
        at: u64,
        to: &LockedMemory,
        first: u64,
        len: u64,
    ) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        inside(from, at, len)?;
        if first.checked_add(len).is_none_or(|end| end > to.bytes as u64) {
            return Err(Code(1));
        }
        // SAFETY: both ranges have been checked; pinned memory is freed only when the context is idle.
        check(unsafe {
            let to = to.raw.add(first as usize).cast();
            (cuda.cuMemcpyDtoHAsync_v2)(to, from.address + at, len as usize, self.raw)
        })
    }

    pub fn copy(
        &self,
        from: &DeviceMemory,
        at: u64,
        to: &DeviceMemory,
        first: u64,
        len: u64,
    ) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        inside(from, at, len)?;
        inside(to, first, len)?;
        // SAFETY: both ranges have been checked.
        check(unsafe {
            (cuda.cuMemcpyDtoDAsync_v2)(to.address + first, from.address + at, len as usize, self.raw)
        })
    }

    pub fn launch(&self, launch: &Launch<'_>) -> Result<(), Code> {
        let cuda = self.context.enter()?;
        let mut arguments = launch.arguments()?;
        let [x, y, z] = launch.groups;
        // SAFETY: the driver copies as many arguments as the kernel has, which are those of `Kernel::writes` and a struct of
        // at most 16 words (a test compares them with the sources); it does so before the call returns.
        check(unsafe {
            (cuda.cuLaunchKernel)(
                launch.function.raw,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.raw,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}

fn inside(memory: &DeviceMemory, first: u64, len: u64) -> Result<(), Code> {
    match first.checked_add(len) {
        Some(end) if end <= memory.bytes => Ok(()),
        _ => Err(Code(1)),
    }
}
