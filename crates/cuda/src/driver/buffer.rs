//! Memory that recorded operations and callers share.
use crate::ffi::{Arena, DeviceMemory, PinnedMemory};
use kvist_gpu::lock;
use std::sync::{Arc, Mutex};

/// Memory of the device, or pinned memory of the host. Recorded operations keep it alive.
#[derive(Clone, Debug)]
pub struct Buf(pub(super) Arc<Memory>);

#[derive(Debug)]
pub(super) enum Memory {
    Device(DeviceMemory),
    /// Results, for the host to read.
    Results(PinnedMemory),
    /// The host fills it, and the device copies from it.
    Source(Mutex<PinnedMemory>),
    /// Blocks of the host, which the device copies from and to.
    Arena(Arena),
}

impl Buf {
    pub(super) fn device(&self) -> Option<&DeviceMemory> {
        match &*self.0 {
            Memory::Device(memory) => Some(memory),
            Memory::Results(_) | Memory::Source(_) | Memory::Arena(_) => None,
        }
    }

    /// Where kernels find it.
    pub(super) fn address(&self) -> u64 {
        match &*self.0 {
            Memory::Device(memory) => memory.address,
            Memory::Results(memory) => memory.memory().address(),
            Memory::Source(memory) => lock(memory).memory().address(),
            Memory::Arena(arena) => arena.memory().address(),
        }
    }
}
