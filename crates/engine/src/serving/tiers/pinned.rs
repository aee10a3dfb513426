//! The memory of blocks that are copied out of the cache: pinned memory as far as there is some, so that the device copies there by itself
//! and the first tier, a store in RAM, keeps them there; ordinary memory otherwise.
use kvist_device::{ArenaUsage, Bytes as Size, DeviceError, HostArena, HostBlock, Pools};
use kvist_store::Bytes;
use std::sync::Arc;

/// Where blocks that leave the cache get their memory.
#[derive(Clone, Default)]
pub struct BlockMemory {
    arena: Option<Arc<dyn HostArena>>,
    /// There is no pinned memory though there should be.
    is_refused: bool,
}

impl BlockMemory {
    /// Locks `bytes` of the host's memory for blocks of these pools, if they copy from it. If the system refuses, a line of the log says
    /// so, and blocks are in ordinary memory.
    pub fn pin(pools: &mut dyn Pools, bytes: u64) -> BlockMemory {
        if bytes == 0 {
            return BlockMemory::default();
        }
        match pools.pin_host(bytes) {
            Ok(arena) => {
                if arena.is_some() {
                    tracing::info!(target: "kvist::engine", "locked {} of memory for blocks of the tier in RAM", Size(bytes));
                }
                BlockMemory { arena, is_refused: false }
            }
            Err(error) => {
                tracing::warn!(
                    target: "kvist::engine",
                    "cannot lock {} of memory for the tier in RAM ({error}): its blocks are in ordinary memory, from which the host copies \
                     them once more; give it less (--tier-ram), or allow this user more locked memory (ulimit -l)",
                    Size(bytes)
                );
                BlockMemory { arena: None, is_refused: true }
            }
        }
    }

    /// Memory for a block, whose bytes mean nothing yet.
    ///
    /// # Errors
    /// There is neither pinned nor ordinary memory.
    pub fn block(&self, len: usize) -> Result<HostBlock, DeviceError> {
        let pinned = self.arena.as_ref().and_then(|arena| arena.block(len));
        pinned.map_or_else(|| HostBlock::new(len), Ok)
    }

    /// A copy in pinned memory of bytes that came from elsewhere; the bytes themselves if there is no room.
    pub fn pinned(&self, bytes: Bytes) -> Bytes {
        let Some(mut block) = self.arena.as_ref().and_then(|arena| arena.block(bytes.len())) else {
            return bytes;
        };
        block.bytes_mut().copy_from_slice(&bytes);
        Bytes::from_owner(block)
    }

    /// The parts of an object, one after the other. Nothing is copied if there is one.
    ///
    /// # Errors
    /// There is no memory.
    pub fn joined(&self, mut parts: Vec<HostBlock>) -> Result<Bytes, DeviceError> {
        if parts.len() != 1 {
            let mut whole = self.block(parts.iter().map(|part| part.bytes().len()).sum())?;
            let mut to = whole.bytes_mut();
            for part in parts.drain(..) {
                let (here, rest) = to.split_at_mut(part.bytes().len());
                here.copy_from_slice(part.bytes());
                to = rest;
            }
            parts.push(whole);
        }
        Ok(parts.pop().map_or(Bytes::new(), Bytes::from_owner))
    }

    /// How much of the pinned memory is in use; `None` if none is wanted, or the device has no use for it.
    pub fn usage(&self) -> Option<ArenaUsage> {
        match &self.arena {
            Some(arena) => Some(arena.usage()),
            None => self.is_refused.then(ArenaUsage::default),
        }
    }
}
