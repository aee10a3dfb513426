//! Changing the number of blocks.
use super::{Allocator, Arena, ArenaRefused, BlockCopy, Handle};
use crate::events::ChangeReason;
use crate::ids::SeqId;

/// A planned change of the arena's size. The number of blocks is part of the strides
/// ([`BufferLayout`](super::BufferLayout)), so the bytes go into new buffers: the backend allocates them, makes each
/// copy of [`remap`](Self::remap) from the old buffers to the new ones, commits, and frees the old ones. Dropping the
/// plan before that leaves the arena as it was.
#[must_use = "a resize that is dropped is abandoned"]
pub struct Resize<'a> {
    arena: &'a mut Arena,
    placed: Placed,
}

/// The new ranges of all sequences.
struct Placed {
    allocator: Box<dyn Allocator>,
    handles: Vec<(SeqId, Handle)>,
}

impl Arena {
    /// Plans a resize to `n_blocks` blocks. Handles that still fit where they are stay there; the others go to free
    /// ranges. If that fails for lack of a long run, all handles are placed again, largest first. Refused if they do
    /// not fit at all. O(sequences · log).
    pub fn resize(&mut self, n_blocks: u32) -> Result<Resize<'_>, ArenaRefused> {
        if n_blocks == 0 {
            return Err(ArenaRefused::Empty);
        }
        let mut sizes: Vec<(SeqId, Handle)> =
            self.sequences.iter().map(|(&seq, s)| (seq, s.handle)).collect();
        sizes.sort_by_key(|(seq, handle)| (std::cmp::Reverse(handle.reserved), *seq));
        let stays =
            |handle: Handle| u64::from(handle.start) + u64::from(handle.reserved) <= u64::from(n_blocks);
        let placed = place(&*self.allocator, n_blocks, &sizes, stays)
            .or_else(|| place(&*self.allocator, n_blocks, &sizes, |_| false));
        let Some(mut placed) = placed else {
            let reserved = sizes.iter().map(|(_, handle)| u64::from(handle.reserved)).sum::<u64>();
            let needed_blocks = u32::try_from(reserved).unwrap_or(u32::MAX);
            let largest_free_run = self.allocator.new_empty(n_blocks).largest_free_run();
            return Err(ArenaRefused::NoRoom { needed_blocks, free_blocks: n_blocks, largest_free_run });
        };
        placed.handles.sort_by_key(|(seq, _)| *seq);
        Ok(Resize { arena: self, placed })
    }
}

/// Places every handle in an empty allocator of `n_blocks` blocks, beginning with those that stay.
fn place(
    like: &dyn Allocator,
    n_blocks: u32,
    sizes: &[(SeqId, Handle)],
    stays: impl Fn(Handle) -> bool,
) -> Option<Placed> {
    let mut allocator = like.new_empty(n_blocks);
    let mut handles = Vec::with_capacity(sizes.len());
    for &(seq, handle) in sizes.iter().filter(|(_, handle)| stays(*handle)) {
        allocator.take(handle);
        handles.push((seq, handle));
    }
    for &(seq, handle) in sizes.iter().filter(|(_, handle)| !stays(*handle)) {
        let place = allocator.find(handle.len)?;
        allocator.take(place);
        handles.push((seq, place));
    }
    Some(Placed { allocator, handles })
}

impl Resize<'_> {
    /// Number of blocks after the resize.
    pub fn n_blocks(&self) -> u32 {
        self.placed.allocator.n_blocks()
    }

    /// Copies from the old buffers to the new ones: the used blocks of every sequence, by id, including those whose
    /// block numbers do not change.
    pub fn remap(&self) -> impl Iterator<Item = (SeqId, BlockCopy)> {
        self.placed.handles.iter().filter_map(|&(seq, handle)| {
            let before = &self.arena.sequences[&seq];
            let len = before.used_tokens.div_ceil(self.arena.block_tokens);
            (len > 0).then_some((seq, BlockCopy { from: before.handle.start, to: handle.start, len }))
        })
    }

    /// Applies the resize. Call it after the bytes are in the new buffers.
    pub fn commit(self) {
        let arena = self.arena;
        arena.allocator = self.placed.allocator;
        let mut grown = Vec::new();
        for (seq, handle) in self.placed.handles {
            let sequence = arena.sequences.get_mut(&seq).expect("the plan knew this sequence");
            let before = std::mem::replace(&mut sequence.handle, handle);
            grown.push((seq, before, handle, sequence.used_tokens.div_ceil(arena.block_tokens)));
        }
        arena.tell_growth(&grown, ChangeReason::Resize);
        arena.counters.resized += 1;
    }
}
