//! The memory of blocks that are copied out of the cache: pinned memory as far as there is some, so that the device copies there by itself
//! and the first tier, a store in RAM, keeps them there; ordinary memory otherwise.
use kvist_device::{ArenaUsage, Bytes as Size, DeviceError, HostArena, HostBlock, Pools};
use kvist_store::Bytes;
use std::sync::Arc;

/// The tier whose blocks are kept in pinned memory: the fastest one, in RAM ([`TierConfig::pinned_bytes`](super::TierConfig::pinned_bytes)).
pub const PINNED_TIER: usize = 0;

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
        if bytes == 0 || !pools.pins_host() {
            return BlockMemory::default();
        }
        // Said before, because it takes a while.
        tracing::info!(target: "kvist::engine", "locking {} of memory for blocks of the tier in RAM", Size(bytes));
        match pools.pin_host(bytes) {
            Ok(arena) => BlockMemory { arena, is_refused: false },
            Err(error) => {
                tracing::warn!(
                    target: "kvist::engine",
                    "cannot lock {} of memory for the tier in RAM ({error}): its blocks are in ordinary memory, from which the host copies \
                     them once more; give it less (--tier-ram)",
                    Size(bytes)
                );
                BlockMemory { arena: None, is_refused: true }
            }
        }
    }

    /// Memory for a block, whose bytes mean nothing yet. Ordinary memory if the block is not for the [tier](PINNED_TIER) in pinned memory:
    /// others would hold what that tier needs until they have written it.
    ///
    /// # Errors
    /// There is neither pinned nor ordinary memory.
    pub fn block(&self, len: usize, is_for_pinned_tier: bool) -> Result<HostBlock, DeviceError> {
        let arena = self.arena.as_ref().filter(|_| is_for_pinned_tier);
        let pinned = arena.and_then(|arena| arena.block(len));
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

    /// The parts of an object, one after the other, in [memory](Self::block) for it. Nothing is copied if there is one.
    ///
    /// # Errors
    /// There is no memory.
    pub fn joined(&self, mut parts: Vec<HostBlock>, is_for_pinned_tier: bool) -> Result<Bytes, DeviceError> {
        if parts.len() != 1 {
            let len = parts.iter().map(|part| part.bytes().len()).sum();
            let mut whole = self.block(len, is_for_pinned_tier)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_device::LentMemory;
    use std::sync::Mutex;

    /// Lends so many bytes at a time, of the heap.
    #[derive(Default)]
    struct Lender(Mutex<ArenaUsage>);

    struct Lent {
        bytes: Vec<u8>,
        lender: Arc<Lender>,
    }

    impl AsRef<[u8]> for Lent {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    impl AsMut<[u8]> for Lent {
        fn as_mut(&mut self) -> &mut [u8] {
            &mut self.bytes
        }
    }
    impl LentMemory for Lent {
        fn n_bytes(&self) -> usize {
            self.bytes.len()
        }
    }
    impl Drop for Lent {
        fn drop(&mut self) {
            self.lender.0.lock().unwrap().lent_bytes -= self.bytes.len() as u64;
        }
    }

    struct Arena(Arc<Lender>);

    impl HostArena for Arena {
        fn block(&self, len: usize) -> Option<HostBlock> {
            let mut usage = self.0.0.lock().unwrap();
            if usage.lent_bytes + len as u64 > usage.bytes {
                usage.refused_blocks += 1;
                return None;
            }
            usage.lent_bytes += len as u64;
            Some(HostBlock::lent(Box::new(Lent { bytes: vec![0xee; len], lender: self.0.clone() })))
        }
        fn usage(&self) -> ArenaUsage {
            *self.0.0.lock().unwrap()
        }
    }

    fn memory(bytes: u64) -> BlockMemory {
        let usage = ArenaUsage { bytes, ..ArenaUsage::default() };
        BlockMemory { arena: Some(Arc::new(Arena(Arc::new(Lender(Mutex::new(usage)))))), is_refused: false }
    }

    fn filled(memory: &BlockMemory, with: &[u8]) -> HostBlock {
        let mut block = memory.block(with.len(), true).unwrap();
        block.bytes_mut().copy_from_slice(with);
        block
    }

    #[test]
    fn an_object_has_the_bytes_of_its_parts_wherever_they_are() {
        // Room for nothing, for the first part, for both, for both and the object.
        for room in [0, 3, 5, 10] {
            let memory = memory(room);
            let parts = Vec::from([&b"abc"[..], b"de"].map(|part| filled(&memory, part)));
            let joined = memory.joined(parts, true).unwrap();
            assert_eq!(joined, b"abcde"[..], "{room}");
            // The parts have given theirs back.
            let expected = if room == 10 { 5 } else { 0 };
            assert_eq!(memory.usage().unwrap().lent_bytes, expected, "{room}");
        }
        let memory = memory(10);
        assert!(memory.joined(Vec::new(), true).unwrap().is_empty());
        // One part is the object, in the same place.
        let block = filled(&memory, b"abc");
        let at = block.bytes().as_ptr();
        let joined = memory.joined(vec![block], true).unwrap();
        assert_eq!((joined.as_ptr(), joined.len()), (at, 3));
        // What is for other tiers takes nothing of it.
        assert!(!memory.block(3, false).unwrap().is_lent());
        let other =
            memory.joined(vec![HostBlock::new(1).unwrap(), HostBlock::new(1).unwrap()], false).unwrap();
        assert_eq!((other.len(), memory.usage().unwrap().lent_bytes), (2, 3));
        let half = joined.slice(1..);
        drop(joined);
        assert_eq!(memory.usage().unwrap().lent_bytes, 3, "a slice keeps all of it");
        drop(half);
        assert_eq!(memory.usage().unwrap().lent_bytes, 0);
    }

    #[test]
    fn what_came_from_elsewhere_is_copied_if_there_is_room() {
        let memory = memory(5);
        let bytes = Bytes::from_static(b"abc");
        let pinned = memory.pinned(bytes.clone());
        assert!(pinned == bytes && pinned.as_ptr() != bytes.as_ptr());
        assert_eq!(memory.pinned(bytes.clone()).as_ptr(), bytes.as_ptr(), "no room");
        let usage = ArenaUsage { bytes: 5, lent_bytes: 3, refused_blocks: 1 };
        assert_eq!(memory.usage(), Some(usage));
        let none = BlockMemory::default();
        assert_eq!(none.pinned(bytes.clone()).as_ptr(), bytes.as_ptr());
        assert_eq!((none.usage(), none.block(4, true).unwrap().bytes()), (None, &[0; 4][..]));
    }
}
