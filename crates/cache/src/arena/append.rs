//! Growth of a sequence: where its new tokens go, and which blocks must be copied first.
use super::{Arena, ArenaRefused, CapacityExceeded, Handle};
use crate::events::ChangeReason;
use crate::ids::SeqId;

/// `len` blocks to copy, in every layer, both K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// First block to read.
    pub from: u32,
    /// First block to write.
    pub to: u32,
    /// Number of blocks.
    pub len: u32,
}

/// Contiguous cells of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCells {
    /// The block.
    pub block: u32,
    /// First cell within the block.
    pub offset: u32,
    /// Number of cells.
    pub len: u32,
}

/// A planned append of tokens to a sequence. The backend makes the copy, if there is one, writes the cells, then
/// commits. Dropping or leaking the plan leaves the arena as it was: the copy went to free blocks, and the cells lie
/// after the sequence's used ones.
///
/// ```compile_fail,E0499
/// use kvist_cache::{SeqId, arena::*};
/// fn f(arena: &mut Arena) {
///     let append = arena.append(SeqId(0), 1, CapacityExceeded::Error).unwrap().unwrap();
///     arena.free_for(SeqId(0)).unwrap(); // the plan still borrows the arena
///     append.commit();
/// }
/// ```
#[must_use = "an append that is dropped is abandoned"]
pub struct Append<'a> {
    arena: &'a mut Arena,
    seq: SeqId,
    handle: Handle,
    used_after: u32,
    evicted: Vec<SeqId>,
}

impl Arena {
    /// Plans to append `n_tokens` tokens to `seq`: in its handle if they fit, otherwise by growing the handle in
    /// place, otherwise in a larger handle elsewhere, to which the used blocks are copied. During the copy both
    /// handles are reserved, so a move needs as many free blocks as the larger handle has.
    ///
    /// `None` means that the policy was to halt. Evictions by [`CapacityExceeded::EvictLeastRecentlyUsed`] are
    /// permanent, even if the plan is dropped.
    pub fn append(
        &mut self,
        seq: SeqId,
        n_tokens: u32,
        policy: CapacityExceeded,
    ) -> Result<Option<Append<'_>>, ArenaRefused> {
        let sequence = *self.sequences.get(&seq).ok_or(ArenaRefused::UnknownSequence(seq))?;
        if n_tokens == 0 {
            return Err(ArenaRefused::Empty);
        }
        let tokens = u64::from(sequence.used_tokens) + u64::from(n_tokens);
        let used_after = u32::try_from(tokens).map_err(|_| ArenaRefused::TooLong { seq, tokens })?;
        let now = sequence.handle;
        let needed = used_after.div_ceil(self.block_tokens);
        let mut evicted = Vec::new();
        let handle = if needed <= now.len {
            now
        } else {
            let grown = |allocator: &dyn super::Allocator| {
                allocator.extended(now, needed).or_else(|| allocator.find(needed))
            };
            let mut place = grown(&*self.allocator);
            if place.is_none() && policy == CapacityExceeded::EvictLeastRecentlyUsed {
                evicted = self.evict_until_free(Some(seq), |allocator| grown(allocator).is_some());
                place = grown(&*self.allocator);
            }
            match (place, policy) {
                (Some(place), _) => place,
                (None, CapacityExceeded::Halt) => {
                    self.counters.halted += 1;
                    return Ok(None);
                }
                (None, _) => {
                    self.counters.refused += 1;
                    return Err(self.no_room(needed));
                }
            }
        };
        Ok(Some(Append { arena: self, seq, handle, used_after, evicted }))
    }
}

impl Append<'_> {
    fn before(&self) -> super::Sequence {
        self.arena.sequences[&self.seq]
    }

    /// Blocks to copy before the first write. The target is free.
    pub fn copy(&self) -> Option<BlockCopy> {
        let before = self.before();
        let len = before.used_tokens.div_ceil(self.arena.block_tokens);
        let moves = before.handle.start != self.handle.start && len > 0;
        moves.then_some(BlockCopy { from: before.handle.start, to: self.handle.start, len })
    }

    /// The cells that the tokens are written to, in token order, after the copy.
    pub fn writes(&self) -> impl Iterator<Item = BlockCells> {
        let (block_tokens, end) = (self.arena.block_tokens, self.used_after);
        let mut token = self.before().used_tokens;
        std::iter::from_fn(move || {
            let offset = token % block_tokens;
            let len = (end - token).min(block_tokens - offset);
            let cells = BlockCells { block: self.handle.start + token / block_tokens, offset, len };
            token += len;
            (len > 0).then_some(cells)
        })
    }

    /// The handle after the commit.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Sequences that were evicted to make this plan possible.
    pub fn evicted(&self) -> &[SeqId] {
        &self.evicted
    }

    /// Applies the plan. Call it after the bytes are written. Counts as a use.
    pub fn commit(self) {
        let before = self.before();
        let n_copied = self.copy().map_or(0, |copy| copy.len);
        let arena = self.arena;
        if before.handle != self.handle {
            // A new range that overlaps the old one is the old one, grown in place: release first, then take.
            arena.allocator.release(before.handle);
            arena.allocator.take(self.handle);
            arena.counters.grown += 1;
            arena.counters.blocks_copied += u64::from(n_copied);
        }
        let sequence = arena.sequences.get_mut(&self.seq).expect("the plan knew this sequence");
        sequence.handle = self.handle;
        sequence.used_tokens = self.used_after;
        let n_used = before.used_tokens.div_ceil(arena.block_tokens);
        arena.tell_growth(&[(self.seq, before.handle, self.handle, n_used)], ChangeReason::Append);
        arena.touch(self.seq).expect("the plan knew this sequence");
    }
}
