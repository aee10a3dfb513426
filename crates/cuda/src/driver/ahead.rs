//! Copies from the host on a stream of their own: blocks arrive while the GPU computes.
use super::{Buf, CudaDriver};
use crate::ffi::{Event, Stream};
use kvist_device::DeviceError;
use kvist_gpu::lock;
use std::sync::Mutex;

/// A copy to a buffer that nothing uses any more that was submitted before.
#[derive(Debug)]
pub struct Ahead {
    pub from: Buf,
    pub from_byte: u64,
    pub to: Buf,
    pub to_byte: u64,
    pub bytes: u64,
    pub marks: bool,
}

/// The stream of these copies.
#[derive(Debug)]
pub struct Copies {
    pub stream: Stream,
    /// Whether buffers were zeroed on the driver's stream since this one last waited for it.
    zeroes: Mutex<bool>,
}

impl Copies {
    pub fn new(stream: Stream) -> Self {
        Copies { stream, zeroes: Mutex::default() }
    }
    /// A buffer is zeroed on the driver's stream: a copy to it comes behind that.
    pub fn zeroed(&self) {
        *lock(&self.zeroes) = true;
    }
}

impl CudaDriver {
    /// Gives a copy to the stream of copies, and what is given to the driver's stream from now on waits for it.
    pub(super) fn run_ahead(&self, copy: &Ahead, marks: &mut Vec<Event>) -> Result<(), DeviceError> {
        self.try_run_ahead(copy, marks).inspect_err(|_| {
            // The end of the submission may not be behind the copy, so waiting for it would not do.
            let _ = self.copies.stream.synchronise();
        })
    }

    fn try_run_ahead(&self, copy: &Ahead, marks: &mut Vec<Event>) -> Result<(), DeviceError> {
        let Copies { stream, zeroes } = &self.copies;
        // Locked until the wait is on the stream: another thread's copy may need it too.
        let mut zeroes = lock(zeroes);
        if *zeroes {
            let zeroed = self.kept("copy ahead", self.stream.event(false))?;
            self.kept("copy ahead", stream.wait(&zeroed))?;
            *zeroes = false;
        }
        drop(zeroes);
        let event = || self.kept("copy ahead", stream.event(copy.marks));
        let start = copy.marks.then(event).transpose()?;
        self.copy_on(stream, (&copy.from, copy.from_byte), (&copy.to, copy.to_byte), copy.bytes)?;
        let end = event()?;
        self.kept("copy ahead", self.stream.wait(&end))?;
        marks.extend(start.map(|start| [start, end]).into_iter().flatten());
        Ok(())
    }
}
