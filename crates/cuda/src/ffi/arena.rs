//! Pinned memory that is lent in pieces.
use super::{Code, Context, LockedMemory};
use crate::ranges::Ranges;
use kvist_device::{ArenaUsage, HostArena, HostBlock, LentMemory};
use kvist_gpu::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Blocks begin at multiples of this: a cache line, and what copies do best with.
const ALIGN: usize = 64;

/// Pinned memory for blocks. Clones share it; it is freed with the last of them and of its blocks.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// No reference to all of it exists: at any time blocks have parts of it, and the device writes others.
    memory: LockedMemory,
    lent: Mutex<Lent>,
}

#[derive(Debug)]
struct Lent {
    ranges: Ranges,
    refused_blocks: u64,
}

/// A piece that one block has for itself. Only [`Arena::block`] makes one, and it cannot be cloned.
#[derive(Debug)]
struct Lease {
    arena: Arc<Shared>,
    /// Taken from the arena's ranges; at least `len`.
    range: Range<usize>,
    len: usize,
}

impl Arena {
    /// Locks `bytes` of the host's memory, and writes to all of it.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Code> {
        let memory = context.lock(bytes)?;
        let ranges = Ranges::new(memory.bytes / ALIGN * ALIGN);
        Ok(Arena(Arc::new(Shared { memory, lent: Mutex::new(Lent { ranges, refused_blocks: 0 }) })))
    }

    /// What the stream copies from and to.
    pub fn memory(&self) -> &LockedMemory {
        &self.0.memory
    }

    /// The byte at which a block begins that has a piece of this memory for itself.
    pub fn lease(&self, block: &HostBlock) -> Option<u64> {
        let lease = block.lent_memory()?.downcast_ref::<Lease>()?;
        Arc::ptr_eq(&lease.arena, &self.0).then_some(lease.range.start as u64)
    }

    /// The byte of this memory at which `bytes` begin; `None` if not all of them lie in it.
    pub fn place(&self, bytes: &[u8]) -> Option<u64> {
        let (start, at) = (self.0.memory.raw as usize, bytes.as_ptr() as usize);
        let first = at.checked_sub(start)?;
        (first.checked_add(bytes.len())? <= self.0.memory.bytes).then_some(first as u64)
    }
}

impl HostArena for Arena {
    fn block(&self, len: usize) -> Option<HostBlock> {
        let mut lent = lock(&self.0.lent);
        // An empty block needs no memory.
        let size = len.checked_next_multiple_of(ALIGN).filter(|size| *size > 0)?;
        let Some(first) = lent.ranges.take(size) else {
            lent.refused_blocks += 1;
            return None;
        };
        Some(HostBlock::lent(Box::new(Lease { arena: self.0.clone(), range: first..first + size, len })))
    }

    fn usage(&self) -> ArenaUsage {
        let lent = lock(&self.0.lent);
        ArenaUsage {
            bytes: self.0.memory.bytes as u64,
            lent_bytes: lent.ranges.taken() as u64,
            refused_blocks: lent.refused_blocks,
        }
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the range lies in the memory, which is initialised and lives as long as this value. No other lease has a part of it, and
        // nothing refers to all of the memory, so the host writes here through `as_mut` of this value alone. The device writes here only
        // for pools that own the block (`Arena::lease`): they call neither method before their copies have ended, and give the block away,
        // or drop it, after that; if a copy does not end, they forget the block.
        unsafe { std::slice::from_raw_parts(self.arena.memory.raw.add(self.range.start), self.len) }
    }
}

impl AsMut<[u8]> for Lease {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.arena.memory.raw.add(self.range.start), self.len) }
    }
}

impl LentMemory for Lease {
    fn n_bytes(&self) -> usize {
        self.len
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.arena.lent).ranges.give_back(self.range.clone());
    }
}
