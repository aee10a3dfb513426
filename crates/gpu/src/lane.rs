//! Bytes on their way between the host and cells of pools, beside the steps that compute.
//!
//! An upload packs rows into memory of the host that the device reads, copies them to the device in one piece, and a
//! kernel scatters them to their cells. A download is the reverse. Rows that lie in pinned memory already, or are to, are copied
//! by the device alone ([`Pinned`]). A lane has a few slots, so that the host packs one while the device copies another;
//! nothing waits until a slot or a result is needed. A slot is free when its transfer has ended, so the copy of an upload need not wait
//! for what the device does otherwise ([`Driver::copy_ahead`]); the kernels that scatter do.
use crate::driver::{Args, BufferCopy, Driver, HostMemory, Recorder};
use crate::kernels::Kernel;
use kvist_device::DeviceError;
use std::collections::VecDeque;
use std::sync::Arc;

/// Most cells of a transfer: kernels have a dimension of workgroups for them.
const MAX_CELLS: usize = 65_535;

/// Rows of a block, and the part of a pool that they belong to.
#[derive(Debug)]
pub struct Section<'a, D: Driver> {
    /// Byte of the block where the rows begin: a multiple of four.
    pub first_byte: u32,
    /// Bytes of a row, as it is stored.
    pub row_bytes: u32,
    /// Heads of the block.
    pub block_heads: u32,
    /// The first head of the block that belongs to this part of the pool.
    pub first_head: u32,
    /// Heads of this part.
    pub heads: u32,
    /// Words of a row of the pool.
    pub words: u32,
    /// Cells of the pool.
    pub cells: u32,
    pub pool: &'a D::Buffer,
}

impl<D: Driver> Section<'_, D> {
    /// For rows of `n` cells.
    fn args(&self, n: u32) -> Args {
        let Section { row_bytes, block_heads, first_head, heads, words, cells, .. } = *self;
        Args::new(&[self.first_byte / 4, row_bytes, block_heads, first_head, heads, words, cells, n])
    }
}

/// Bytes of an arena's buffer ([`Driver::arena`]), which the device copies from or to by itself. The caller leaves them alone until the
/// transfer has ended, and for ever if the lane [hangs](Lane::hangs).
#[derive(Debug)]
pub struct Pinned<'a, D: Driver> {
    pub buffer: &'a D::Buffer,
    /// A multiple of four, as is the number of bytes.
    pub first_byte: u64,
    pub bytes: u64,
}

/// Where the rows of an upload are.
enum Source<'a, D: Driver> {
    Host(&'a [u8]),
    /// So many bytes, which the closure writes.
    Packed(usize, &'a mut dyn FnMut(&mut [u8])),
    Pinned(&'a Pinned<'a, D>),
}

impl<D: Driver> Source<'_, D> {
    fn bytes(&self) -> u64 {
        match self {
            Source::Host(block) => block.len() as u64,
            Source::Packed(len, _) => *len as u64,
            Source::Pinned(pinned) => pinned.bytes,
        }
    }

    /// Copies what the host has to memory that the device reads.
    fn fill(self, gpu: &D, host: &D::Buffer, scratch: &mut Vec<u8>) -> Result<(), DeviceError> {
        match self {
            Source::Host(block) => gpu.fill(host, block),
            Source::Packed(len, pack) => gpu.fill_with(host, len, scratch, pack),
            Source::Pinned(_) => Ok(()),
        }
    }

    /// The same by the API, to the device.
    fn write(self, gpu: &D, to: &D::Buffer, scratch: &mut Vec<u8>) {
        match self {
            Source::Host(block) => gpu.write(to, 0, block),
            Source::Packed(len, pack) => {
                scratch.resize(len, 0);
                pack(scratch);
                gpu.write(to, 0, scratch);
            }
            Source::Pinned(_) => {}
        }
    }
}

/// Names a transfer of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Job(u64);

/// The memory of a transfer.
#[derive(Debug)]
struct Slot<D: Driver> {
    /// Memory of the host that uploads are packed into; `None` if the API has its own.
    host: Option<D::Buffer>,
    /// Where the block lies on the device. Downloads need it in any case, so that a kernel never writes the host's memory.
    block: D::Buffer,
    /// Where the host reads downloads; allocated by the first one.
    download: Option<D::Buffer>,
}

#[derive(Debug)]
struct Running<D: Driver> {
    job: Job,
    slot: Slot<D>,
    submission: D::Submission,
    /// Bytes to read; 0 for an upload, and for a download to pinned memory.
    download: u64,
    /// Whether there are times to read.
    marks: bool,
}

/// Transfers of blocks of up to so many bytes and cells.
#[derive(Debug)]
pub struct Lane<D: Driver> {
    gpu: Arc<D>,
    memory: HostMemory,
    block_bytes: u64,
    max_cells: u32,
    free: Vec<Slot<D>>,
    running: VecDeque<Running<D>>,
    recorder: D::Recorder,
    /// The cell of each row of the transfer that was submitted last. Kernels of different transfers run one after the other, and writes
    /// are in order with them.
    table: D::Buffer,
    /// What is there: the parts of a block have the same cells, and each write costs the link as much time as a megabyte
    /// (18 µs on an H100).
    cells: Vec<u32>,
    /// Where [`upload_packed`](Lane::upload_packed) packs rows if the host cannot write to the memory that the device reads.
    packed: Vec<u8>,
    next: u64,
    hangs: bool,
}

/// Bytes of the host and of the device that a lane of so many slots allocates, downloads included. `None` on overflow.
pub fn lane_bytes(slots: u32, block_bytes: u64, max_cells: u32) -> Option<u64> {
    block_bytes.checked_mul(3)?.checked_mul(slots.into())?.checked_add(4 * u64::from(max_cells))
}

/// How many of [`lane_bytes`] lie in the host's memory: of a slot, where a block is uploaded from and where it is read back to.
pub fn lane_host_bytes(slots: u32, block_bytes: u64) -> Option<u64> {
    block_bytes.checked_mul(2)?.checked_mul(slots.into())
}

impl<D: Driver> Lane<D> {
    /// A lane of `slots` transfers at once. The caller has reserved [`lane_bytes`].
    ///
    /// # Errors
    /// There is no memory, or the device has no host memory of this kind.
    pub fn new(
        gpu: &Arc<D>,
        memory: HostMemory,
        slots: u32,
        block_bytes: u64,
        max_cells: u32,
    ) -> Result<Self, DeviceError> {
        let block_bytes = block_bytes.next_multiple_of(4).max(16);
        let slot = |_| {
            let host = match memory {
                HostMemory::Pageable => None,
                _ => Some(gpu.host_buffer("blocks on their way to the device", block_bytes, memory)?),
            };
            let block = gpu.buffer("blocks in transfer", block_bytes)?;
            Ok(Slot { host, block, download: None })
        };
        Ok(Lane {
            free: (0..slots.max(1)).map(slot).collect::<Result<_, DeviceError>>()?,
            running: VecDeque::new(),
            recorder: D::Recorder::default(),
            table: gpu.buffer("cells of a transfer", 4 * u64::from(max_cells))?,
            cells: Vec::new(),
            packed: Vec::new(),
            next: 0,
            hangs: false,
            gpu: gpu.clone(),
            memory,
            block_bytes,
            max_cells,
        })
    }

    fn check(&self, bytes: u64, cells: &[u32]) -> Result<(), DeviceError> {
        if bytes > self.block_bytes {
            return Err(DeviceError::BlockSize { expected: self.block_bytes as usize, got: bytes as usize });
        }
        if cells.len() > (self.max_cells as usize).min(MAX_CELLS) {
            let (index, len) = (cells.len(), (self.max_cells as usize).min(MAX_CELLS));
            return Err(DeviceError::OutOfRange { what: "cells of a transfer", index, len });
        }
        self.gpu.check()
    }

    /// Whether every slot has a download that was not read: the next transfer is refused.
    pub fn is_full(&mut self) -> bool {
        self.collect();
        self.free.is_empty() && self.running.iter().all(|running| running.download > 0)
    }

    /// Whether a submission did not end though it was waited for. It may run for ever, so what it reads and writes is never used again.
    pub fn hangs(&self) -> bool {
        self.hangs
    }

    /// Waits for a submission. Once one hangs, the others are not waited for.
    fn end(&mut self, submission: &D::Submission) -> Result<(), DeviceError> {
        if self.hangs {
            self.gpu.check()?;
        }
        let ended = self.gpu.wait(submission);
        self.hangs |= ended.is_err() && !self.gpu.is_done(submission);
        ended
    }

    /// A slot that no transfer uses: waits for the oldest one that nothing is read of if there is none.
    fn slot(&mut self) -> Result<Slot<D>, DeviceError> {
        self.collect();
        if self.free.is_empty() {
            let oldest = self.running.iter().position(|running| running.download == 0);
            let oldest = oldest.and_then(|at| self.running.get(at)).ok_or_else(|| {
                DeviceError::Unsupported(
                    "every slot has a download that was not read: read one before the next transfer".into(),
                )
            })?;
            self.wait(oldest.job)?;
        }
        self.free.pop().ok_or(DeviceError::UnknownTransfer)
    }

    /// Takes back the slots of transfers that have ended, of which nothing is read: uploads without marks, and downloads to pinned memory.
    fn collect(&mut self) {
        let mut at = 0;
        while let Some(running) = self.running.get(at) {
            if running.download > 0 || running.marks || !self.gpu.is_done(&running.submission) {
                at += 1;
            } else if let Some(running) = self.running.remove(at) {
                let _ = self.gpu.wait(&running.submission); // the device keeps its error, which `wait` of the job returns
                self.free.push(running.slot);
            }
        }
    }

    /// Starts to copy rows to cells: `block` has them as the sections say, `cells` names the cell of each row of a head.
    /// With `marks` the device notes the time before the copy, after it, and after the kernels.
    ///
    /// # Errors
    /// The block is larger than the lane's, or the device has failed. Nothing has changed then.
    pub fn upload(
        &mut self,
        block: &[u8],
        cells: &[u32],
        sections: &[Section<'_, D>],
        marks: bool,
    ) -> Result<Job, DeviceError> {
        self.upload_from(Source::Host(block), cells, sections, marks)
    }

    /// The same for a block of `len` bytes that `pack` writes, all of them: where the API allows it to the memory that the device reads. It is
    /// called at most once.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn upload_packed(
        &mut self,
        len: usize,
        pack: &mut dyn FnMut(&mut [u8]),
        cells: &[u32],
        sections: &[Section<'_, D>],
        marks: bool,
    ) -> Result<Job, DeviceError> {
        self.upload_from(Source::Packed(len, pack), cells, sections, marks)
    }

    /// The same for rows in pinned memory, of which the host copies nothing.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn upload_pinned(
        &mut self,
        rows: &Pinned<'_, D>,
        cells: &[u32],
        sections: &[Section<'_, D>],
        marks: bool,
    ) -> Result<Job, DeviceError> {
        self.upload_from(Source::Pinned(rows), cells, sections, marks)
    }

    fn upload_from(
        &mut self,
        rows: Source<'_, D>,
        cells: &[u32],
        sections: &[Section<'_, D>],
        marks: bool,
    ) -> Result<Job, DeviceError> {
        self.check(rows.bytes(), cells)?;
        let slot = self.slot()?;
        let started = self.start_upload(&slot, rows, cells, sections, marks);
        self.run_or_free(slot, started, 0, marks)
    }

    /// Brings the cells of the next transfer to the device, unless it has them.
    fn write_table(&mut self, cells: &[u32]) {
        if self.cells != cells {
            let table: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
            self.gpu.write(&self.table, 0, &table);
            self.cells.clear();
            self.cells.extend_from_slice(cells);
        }
    }

    fn start_upload(
        &mut self,
        slot: &Slot<D>,
        rows: Source<'_, D>,
        cells: &[u32],
        sections: &[Section<'_, D>],
        marks: bool,
    ) -> Result<D::Submission, DeviceError> {
        self.write_table(cells);
        let (gpu, recorder, packed) = (&*self.gpu, &mut self.recorder, &mut self.packed);
        let mark = |recorder: &mut D::Recorder| {
            if marks {
                gpu.mark(recorder);
            }
        };
        // The slot's last transfer has ended, so nothing reads or writes its block: the copy need not wait.
        let copy = |recorder: &mut D::Recorder, from, from_byte, bytes| {
            let copy = BufferCopy { from, from_byte, to: &slot.block, to_byte: 0, bytes };
            gpu.copy_ahead(recorder, &copy, marks);
        };
        let from = match (rows, self.memory, &slot.host) {
            (Source::Pinned(Pinned { buffer, first_byte, bytes }), ..) => {
                copy(recorder, buffer, *first_byte, *bytes);
                &slot.block
            }
            (rows, HostMemory::Mapped, Some(host)) => {
                mark(recorder);
                rows.fill(gpu, host, packed)?;
                mark(recorder);
                host
            }
            (rows, HostMemory::Pinned, Some(host)) => {
                let bytes = rows.bytes().next_multiple_of(4);
                rows.fill(gpu, host, packed)?;
                copy(recorder, host, 0, bytes);
                &slot.block
            }
            (rows, ..) => {
                mark(recorder);
                rows.write(gpu, &slot.block, packed);
                mark(recorder);
                &slot.block
            }
        };
        for section in sections {
            let n = cells.len() as u32;
            let groups = gpu.scatter_groups(section.heads * section.words, n);
            let buffers = [Some(from), Some(&self.table), Some(section.pool)];
            gpu.record(recorder, &Kernel::Scatter, &buffers, section.args(n), groups);
        }
        mark(recorder);
        Ok(gpu.submit(recorder, &[]))
    }

    /// Starts to copy rows of cells to the host.
    ///
    /// # Errors
    /// As [`upload`](Self::upload), or every slot has a download that was not [read](Self::read).
    pub fn download(
        &mut self,
        bytes: u64,
        cells: &[u32],
        sections: &[Section<'_, D>],
    ) -> Result<Job, DeviceError> {
        self.check(bytes, cells)?;
        let mut slot = self.slot()?;
        let staging = slot.download.take();
        let staging =
            staging.map_or_else(|| self.gpu.staging("blocks on their way to the host", self.block_bytes), Ok);
        let started = staging.map(|staging| {
            let to = slot.download.insert(staging);
            self.start_download(&slot.block, (to, 0), bytes, cells, sections)
        });
        self.run_or_free(slot, started, bytes.max(1), false)
    }

    /// Starts to copy rows of cells to pinned memory. [`wait`](Self::wait) for it, as for an upload: there is nothing to read.
    ///
    /// # Errors
    /// As [`download`](Self::download).
    pub fn download_pinned(
        &mut self,
        rows: &Pinned<'_, D>,
        cells: &[u32],
        sections: &[Section<'_, D>],
    ) -> Result<Job, DeviceError> {
        self.check(rows.bytes, cells)?;
        let slot = self.slot()?;
        let to = (rows.buffer, rows.first_byte);
        let started = self.start_download(&slot.block, to, rows.bytes, cells, sections);
        self.run_or_free(slot, Ok(started), 0, false)
    }

    fn start_download(
        &mut self,
        block: &D::Buffer,
        (to, to_byte): (&D::Buffer, u64),
        bytes: u64,
        cells: &[u32],
        sections: &[Section<'_, D>],
    ) -> D::Submission {
        self.write_table(cells);
        let gpu = &*self.gpu;
        for section in sections {
            let rows = cells.len() as u64 * u64::from(section.block_heads);
            let words = (rows * u64::from(section.row_bytes)).div_ceil(4);
            let groups = gpu.gather_groups(words);
            let buffers = [Some(section.pool), Some(&self.table), Some(block)];
            let args = section.args(cells.len() as u32);
            gpu.record(&mut self.recorder, &Kernel::Gather, &buffers, args, groups);
        }
        let bytes = bytes.next_multiple_of(4);
        let copy = BufferCopy { from: block, from_byte: 0, to, to_byte, bytes };
        gpu.submit(&mut self.recorder, &[copy])
    }

    fn run_or_free(
        &mut self,
        slot: Slot<D>,
        started: Result<D::Submission, DeviceError>,
        download: u64,
        marks: bool,
    ) -> Result<Job, DeviceError> {
        match (started, self.gpu.check()) {
            (Ok(submission), Ok(())) => Ok(self.run(slot, submission, download, marks)),
            (Ok(submission), Err(error)) => {
                // Some of it may have been submitted. It ends before the caller uses the memory of the rows for anything else.
                let _ = self.end(&submission);
                self.run(slot, submission, 0, false);
                Err(error)
            }
            (Err(error), _) => {
                self.recorder.restart();
                self.free.push(slot);
                Err(error)
            }
        }
    }

    fn run(&mut self, slot: Slot<D>, submission: D::Submission, download: u64, marks: bool) -> Job {
        let job = Job(self.next);
        self.next += 1;
        self.running.push_back(Running { job, slot, submission, download, marks });
        job
    }

    /// Whether a transfer has ended. Does not wait.
    pub fn is_done(&self, job: Job) -> bool {
        let running = self.running.iter().find(|running| running.job == job);
        running.is_none_or(|running| self.gpu.is_done(&running.submission))
    }

    /// Waits for an upload, or a download to pinned memory, and returns the times of its marks in nanoseconds; none if it was collected
    /// before.
    ///
    /// # Errors
    /// The device has failed. If the lane [hangs](Self::hangs) now, the transfer may still run.
    pub fn wait(&mut self, job: Job) -> Result<Vec<f64>, DeviceError> {
        let Some(at) = self.running.iter().position(|running| running.job == job) else {
            return self.gpu.check().map(|()| Vec::new());
        };
        let submission = self.running[at].submission.clone();
        self.end(&submission)?;
        let marks = self.gpu.marks(&submission)?;
        if let Some(running) = self.running.remove(at) {
            self.free.push(running.slot);
        }
        Ok(marks)
    }

    /// Waits for a download and reads its bytes.
    ///
    /// # Errors
    /// The device has failed, or there is no such download.
    pub fn read(&mut self, job: Job, read: impl FnOnce(&[u8])) -> Result<(), DeviceError> {
        let at = self.running.iter().position(|running| running.job == job && running.download > 0);
        let running = at.and_then(|at| self.running.remove(at)).ok_or(DeviceError::UnknownTransfer)?;
        let Some(staging) = &running.slot.download else { return Err(DeviceError::UnknownTransfer) };
        let bytes = running.download.next_multiple_of(4);
        let done = self.end(&running.submission).and_then(|()| self.gpu.read(staging, 0..bytes, read));
        self.free.push(running.slot);
        done
    }

    /// Waits for every transfer; downloads can still be read.
    ///
    /// # Errors
    /// The device has failed.
    pub fn wait_all(&mut self) -> Result<(), DeviceError> {
        let submissions: Vec<_> = self.running.iter().map(|running| running.submission.clone()).collect();
        submissions.iter().try_for_each(|submission| self.end(submission))?;
        self.collect();
        Ok(())
    }
}
