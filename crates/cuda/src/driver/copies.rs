//! Copies between buffers, and from the host.
use super::buffer::Memory;
use super::{Buf, CudaDriver};
use crate::ffi::{Code, Context, DeviceMemory, PinnedMemory, Stream};
use kvist_device::DeviceError;
use kvist_gpu::{BufferCopy, lock};
use std::sync::Arc;

/// Pinned memory that writes pass through.
const STAGING_BYTES: usize = 4 << 20;

/// Pinned memory in which writes wait for their copies.
#[derive(Debug)]
pub struct Staging {
    memory: PinnedMemory,
    used: usize,
}

impl Staging {
    pub fn new(context: &Arc<Context>) -> Result<Self, Code> {
        Ok(Staging { memory: context.pin(STAGING_BYTES as u64)?, used: 0 })
    }
}

impl CudaDriver {
    pub(super) fn copy_now(&self, copy: &BufferCopy<'_, Self>) -> Result<(), DeviceError> {
        self.copy_on(&self.stream, (copy.from, copy.from_byte), (copy.to, copy.to_byte), copy.bytes)
    }

    pub(super) fn copy_on(
        &self,
        stream: &Stream,
        (from, from_byte): (&Buf, u64),
        (to, to_byte): (&Buf, u64),
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let copied = match (&*from.0, &*to.0) {
            (Memory::Device(from), Memory::Device(to)) => stream.copy(from, from_byte, to, to_byte, bytes),
            (Memory::Device(from), Memory::Results(to)) => {
                stream.download(from, from_byte, to.memory(), to_byte, bytes)
            }
            (Memory::Device(from), Memory::Arena(to)) => {
                stream.download(from, from_byte, to.memory(), to_byte, bytes)
            }
            (Memory::Arena(from), Memory::Device(to)) => {
                stream.upload(from.memory(), from_byte as usize, to, to_byte, bytes as usize)
            }
            (Memory::Source(from), Memory::Device(to)) => {
                let (first, len) = (from_byte as usize, bytes as usize);
                stream.upload(lock(from).memory(), first, to, to_byte, len)
            }
            _ => return Err(self.fail("a copy between buffers of the host".into())),
        };
        self.kept("copy", copied)
    }

    /// Copies bytes through pinned memory, which is used again once the copies before have ended.
    pub(super) fn upload(&self, to: &DeviceMemory, mut at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut staging = lock(&self.staging);
        for chunk in bytes.chunks(STAGING_BYTES) {
            if staging.used + chunk.len() > STAGING_BYTES {
                let event = self.kept("upload", self.stream.event(false))?;
                self.until_done(&event)?;
                staging.used = 0;
            }
            let first = staging.used;
            staging.memory.bytes_mut()[first..first + chunk.len()].copy_from_slice(chunk);
            staging.used += chunk.len();
            self.kept("upload", self.stream.upload(staging.memory.memory(), first, to, at, chunk.len()))?;
            at += chunk.len() as u64;
        }
        Ok(())
    }
}
