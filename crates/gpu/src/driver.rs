//! An API of GPUs, as far as a device needs it: buffers, kernels, submissions.
//!
//! The kernels of every driver compute the same: [`Kernel`] names them with their constants, and says what each one
//! binds. `crates/wgpu/src/kernels` begins every file with what the kernel computes.
use crate::form::Form;
use crate::kernels::{self, GemmTile, Kernel, Routed};
use kvist_device::{DeviceError, HostArena, HostBlock};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// Words of immediates that the largest kernel has.
pub const IMMEDIATE_WORDS: usize = 16;
/// Bytes per [`Driver::write`] when weights are uploaded: bounds the staging memory.
const UPLOAD_CHUNK: usize = 32 << 20;

/// An opened GPU.
///
/// Errors that no call returns (of [`write`](Self::write), of kernels, a lost device) are kept, and
/// [`check`](Self::check) returns them from then on: no result is read after a failure.
pub trait Driver: Debug + Send + Sync + Sized + 'static {
    /// The name of the device in errors, plans and logs.
    const NAME: &'static str;
    /// Whether it has [`arena`](Self::arena)s.
    const HAS_ARENAS: bool = false;
    /// Memory on the device, or memory of the host that results are copied to ([`staging`](Self::staging)). It is free once the buffer is
    /// dropped and no submission uses it.
    type Buffer: Debug + Send + Sync;
    type Recorder: Recorder;
    /// Names what was submitted.
    type Submission: Clone + Debug + Send + Sync;

    fn limits(&self) -> &Limits;

    /// Output rows and tokens that a workgroup of [`Kernel::Matmul`], [`Kernel::Several`] or [`Kernel::Gemm`] has.
    fn product_tile(&self, kernel: &Kernel) -> (u32, u32) {
        kernels::product_tile(kernel)
    }

    /// What a workgroup of [`Kernel::Gemm`] has, for so many tokens and outputs. Tiles with [`GemmTile::halves`] are for drivers with
    /// [`has_halves`](Self::has_halves).
    fn gemm_tile(&self, encoding: u32, routed: Routed, tokens: u32, outputs: u32) -> GemmTile {
        let _ = (encoding, routed, tokens, outputs);
        GemmTile::USUAL
    }

    /// Whether it has [`Kernel::Halves`]: steps then have memory for inputs of linear layers in f16.
    fn has_halves(&self) -> bool {
        false
    }

    /// Whether it has [`Kernel::Several`] for weights in this encoding and inputs in multiples of eight, with the bits of [`Kernel::Matmul`]
    /// for one token (after a norm only nearly those).
    fn has_several(&self, encoding: u32) -> bool {
        let _ = encoding;
        false
    }

    /// The most inputs of a norm that [`Kernel::Several`] computes before its layers; 0: none.
    fn max_normed_inputs(&self) -> u32 {
        0
    }

    /// Rows of so many elements that a workgroup of [`Kernel::Norm`] has.
    fn norm_rows(&self, width: u32) -> u32 {
        let _ = width;
        1
    }

    /// Whether it has [`Kernel::StoreBoth`].
    fn stores_both(&self) -> bool {
        false
    }

    /// Workgroups of [`Kernel::Scatter`] for rows of `n` cells, of which each cell has `words` words in the pool.
    fn scatter_groups(&self, words: u32, n: u32) -> [u32; 3] {
        [words.div_ceil(64), n, 1]
    }

    /// Workgroups of [`Kernel::Gather`] for so many words of a block.
    fn gather_groups(&self, words: u64) -> [u32; 3] {
        let groups = words.div_ceil(64);
        [groups.min(65_535) as u32, groups.div_ceil(65_535) as u32, 1]
    }

    /// Query rows of a workgroup of [`Kernel::Attend`] with these keys and values, for tiles of `wanted` rows: all of them, as far as the
    /// device's workgroup memory goes, so that the cells are read once for all.
    fn attend_rows(&self, wanted: u32, (k, _): (Form, Form), dim: u32, recent: bool) -> u32 {
        kernels::attend_rows(self.limits(), wanted, k, dim, recent)
    }

    /// Which of several kernels with other last bits were chosen when it was opened, as a part of
    /// [`Footprint::numerics`](kvist_device::Footprint::numerics).
    fn variant(&self) -> &'static str {
        ""
    }

    /// Elements that a workgroup of [`Kernel::Gated`] and [`Kernel::Add`] has.
    fn elements_at_once(&self) -> u32 {
        64
    }

    /// Workgroups of attention of so many query rows that the GPU runs at the same time, if results may depend on the batch. `None`: a
    /// row's result must not depend on anything else.
    fn attend_blocks(&self, _forms: (Form, Form), _dim: u32, _rows: u32, _recent: bool) -> Option<u32> {
        None
    }

    /// Bytes that are allocated on the device, by the API's own report; `None` if it has none.
    fn allocated_bytes(&self) -> Option<u64> {
        None
    }

    /// The first error since the device was opened. Everything computed after it is void.
    ///
    /// # Errors
    /// That error.
    fn check(&self) -> Result<(), DeviceError>;

    /// A zeroed buffer for kernels, of at least 16 bytes. Its bytes have been reserved by the caller.
    ///
    /// # Errors
    /// The device is out of memory, or kernels cannot bind so many bytes.
    fn buffer(&self, what: &'static str, bytes: u64) -> Result<Self::Buffer, DeviceError>;

    /// A buffer that the host reads.
    ///
    /// # Errors
    /// There is no memory for it.
    fn staging(&self, what: &'static str, bytes: u64) -> Result<Self::Buffer, DeviceError>;

    /// Copies bytes to a buffer, after what was submitted before and before what is submitted next. `at` and the number
    /// of bytes are multiples of four.
    fn write(&self, buffer: &Self::Buffer, at: u64, bytes: &[u8]);

    /// A buffer for kernels with these bytes, which are a multiple of four.
    ///
    /// # Errors
    /// As [`buffer`](Self::buffer), or the device has failed.
    fn filled(&self, what: &'static str, bytes: &[u8]) -> Result<Self::Buffer, DeviceError> {
        let buffer = self.buffer(what, bytes.len() as u64)?;
        for (i, chunk) in bytes.chunks(UPLOAD_CHUNK).enumerate() {
            self.write(&buffer, (i * UPLOAD_CHUNK) as u64, chunk);
            if bytes.len() > UPLOAD_CHUNK {
                self.wait_all()?;
            }
        }
        self.check()?;
        Ok(buffer)
    }

    /// Records a dispatch of `groups` workgroups. `None` stands for a buffer that the kernel does not use in this call.
    /// A dispatch sees what those before it wrote. Compiles the kernel at its first use. The device may begin before
    /// [`submit`](Self::submit): what is recorded and then discarded may have run.
    fn record(
        &self,
        recorder: &mut Self::Recorder,
        kernel: &Kernel,
        buffers: &[Option<&Self::Buffer>],
        args: Args,
        groups: [u32; 3],
    );

    /// Records a copy between buffers, in order with the dispatches.
    fn copy(&self, recorder: &mut Self::Recorder, copy: &BufferCopy<'_, Self>);

    /// The same for a copy from the host's memory to a buffer that nothing uses any more that was submitted before: it need not wait for
    /// that, and what is recorded next waits for the copy. With `marks` the device notes the time before and after it.
    fn copy_ahead(&self, recorder: &mut Self::Recorder, copy: &BufferCopy<'_, Self>, marks: bool) {
        let mark = |recorder: &mut Self::Recorder| {
            if marks {
                self.mark(recorder);
            }
        };
        mark(recorder);
        self.copy(recorder, copy);
        mark(recorder);
    }

    /// Submits what was recorded, then copies between buffers.
    fn submit(&self, recorder: &mut Self::Recorder, copies: &[BufferCopy<'_, Self>]) -> Self::Submission;

    /// Waits for a submission.
    ///
    /// # Errors
    /// The device has failed, or the submission runs for too long.
    fn wait(&self, submission: &Self::Submission) -> Result<(), DeviceError>;

    /// Waits for everything that was written and submitted.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    fn wait_all(&self) -> Result<(), DeviceError>;

    /// Whether a submission has ended. Does not wait.
    fn is_done(&self, submission: &Self::Submission) -> bool;

    /// Reads bytes of a staging buffer that no submission writes any more. Both ends are multiples of four.
    ///
    /// # Errors
    /// The device has failed.
    fn read(
        &self,
        staging: &Self::Buffer,
        range: Range<u64>,
        read: impl FnOnce(&[u8]),
    ) -> Result<(), DeviceError>;

    /// A buffer in the host's memory that the device reads: a source of copies, or one that kernels bind
    /// ([`HostMemory::Mapped`]).
    ///
    /// # Errors
    /// There is no memory for it, or the device has no such memory.
    fn host_buffer(
        &self,
        what: &'static str,
        bytes: u64,
        memory: HostMemory,
    ) -> Result<Self::Buffer, DeviceError>;

    /// Writes the first bytes of a host buffer that no submission reads any more. Their number is a multiple of four.
    ///
    /// # Errors
    /// The device has failed.
    fn fill(&self, buffer: &Self::Buffer, bytes: &[u8]) -> Result<(), DeviceError>;

    /// The same for `len` bytes that `write` writes, whatever they were before: to the buffer itself where the API allows that, else to
    /// `scratch` first.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    fn fill_with(
        &self,
        buffer: &Self::Buffer,
        len: usize,
        scratch: &mut Vec<u8>,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), DeviceError> {
        scratch.resize(len, 0);
        write(scratch);
        self.fill(buffer, scratch)
    }

    /// Memory of the host, locked in place, to lend blocks from. `None`: the API has no memory that the host may use at any time, while
    /// the device copies other parts of it.
    ///
    /// # Errors
    /// There is no memory for it.
    fn arena(&self, bytes: u64) -> Result<Option<Arena<Self>>, DeviceError> {
        let _ = bytes;
        Ok(None)
    }

    /// The byte of an [`Arena::buffer`] at which a block begins that the arena itself has lent, and that has this memory alone: the device
    /// may write there. `None` for any other block. Makes no reference to the block's bytes.
    fn lease(&self, arena: &Self::Buffer, block: &HostBlock) -> Option<u64> {
        let _ = (arena, block);
        None
    }

    /// The byte of an [`Arena::buffer`] at which `bytes` begin, for the device to read them; `None` if they lie elsewhere.
    fn place(&self, arena: &Self::Buffer, bytes: &[u8]) -> Option<u64> {
        let _ = (arena, bytes);
        None
    }

    /// Records that the device notes the time when it gets here. Does nothing on a device without a clock.
    fn mark(&self, recorder: &mut Self::Recorder) {
        let _ = recorder;
    }

    /// The times at the marks of a submission that has ended, in nanoseconds since any fixed time. Empty on a device
    /// without a clock.
    ///
    /// # Errors
    /// The device has failed.
    fn marks(&self, submission: &Self::Submission) -> Result<Vec<f64>, DeviceError> {
        let _ = submission;
        Ok(Vec::new())
    }

    /// Copies ranges (buffer, first byte, bytes) to the host, after everything that was submitted before. Waits.
    ///
    /// # Errors
    /// As [`staging`](Self::staging), or the device has failed.
    fn read_back(
        &self,
        ranges: &[(&Self::Buffer, u64, u64)],
        read: impl FnOnce(&[u8]),
    ) -> Result<(), DeviceError> {
        let total = ranges.iter().map(|(_, _, bytes)| bytes).sum();
        let staging = self.staging("bytes on their way to the host", total)?;
        let mut to_byte = 0;
        let copies = ranges.iter().map(|&(from, from_byte, bytes)| {
            let copy = BufferCopy { from, from_byte, to: &staging, to_byte, bytes };
            to_byte += bytes;
            copy
        });
        let copies: Vec<_> = copies.collect();
        let submission = self.submit(&mut Self::Recorder::default(), &copies);
        self.wait(&submission)?;
        self.read(&staging, 0..total, read)
    }
}

/// Operations that were recorded and not submitted yet. What a driver keeps for later ones keeps no buffer alive.
pub trait Recorder: Default + Debug + Send {
    /// Discards them.
    fn restart(&mut self);
}

/// How bytes of the host reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HostMemory {
    /// Ordinary memory: the API copies it to memory of its own first ([`Driver::write`]).
    Pageable,
    /// Memory that the device copies from by itself.
    Pinned,
    /// Memory that kernels read, without any copy.
    Mapped,
}

/// Pinned memory of blocks, as the two that use it know it.
pub struct Arena<D: Driver> {
    /// What copies from and to it name. Kernels do not bind it.
    pub buffer: D::Buffer,
    /// Lends the blocks.
    pub blocks: Arc<dyn HostArena>,
}

/// What a GPU can do.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of the largest buffer that a kernel can bind.
    pub max_binding_bytes: u64,
    /// Bytes of the largest part of weights or of a pool; at most [`max_binding_bytes`](Self::max_binding_bytes).
    pub max_part_bytes: u64,
    pub max_workgroup_bytes: u32,
    /// Query rows that a workgroup of attention can have at most: one of [`ATTEND_ROWS`](crate::ATTEND_ROWS).
    pub max_attend_rows: u32,
    /// Whether a row's result does not depend on the rest of its batch, on where chunks end, or on what sequences share.
    pub batch_invariant: bool,
    pub unified_memory: bool,
    /// The GPU's name.
    pub adapter: String,
}

/// A copy between buffers. All numbers are multiples of four.
#[derive(Debug)]
pub struct BufferCopy<'a, D: Driver> {
    pub from: &'a D::Buffer,
    pub from_byte: u64,
    pub to: &'a D::Buffer,
    pub to_byte: u64,
    pub bytes: u64,
}

/// Immediates of a call, built word by word.
#[derive(Clone, Copy, Debug, Default)]
pub struct Args {
    words: [u32; IMMEDIATE_WORDS],
    n: usize,
}

impl Args {
    pub fn new(words: &[u32]) -> Self {
        words.iter().fold(Args::default(), |args, word| args.u32(*word))
    }
    #[must_use]
    pub fn u32(mut self, word: u32) -> Self {
        self.words[self.n] = word;
        self.n += 1;
        self
    }
    #[must_use]
    pub fn f32(self, x: f32) -> Self {
        self.u32(x.to_bits())
    }
    /// All words; those that were not given are 0.
    pub fn words(&self) -> &[u32; IMMEDIATE_WORDS] {
        &self.words
    }
}
