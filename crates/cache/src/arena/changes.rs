//! Block events of an arena, in the format of the [event log](crate::BlockEvent).
//!
//! All blocks that a handle reserves belong to its sequence, used or not. A handle that grows in place allocates the
//! new blocks. A handle that grows elsewhere, or is moved by a resize, first frees its old blocks, then moves the
//! blocks that store tokens and allocates the rest. An event's group is 0, and its step is the number of appends and
//! resizes committed before.
use super::{Arena, Handle};
use crate::events::{BlockEvent, Change, ChangeReason};
use crate::ids::{GroupId, SeqId};
use std::ops::Range;

impl Handle {
    /// All blocks that the handle reserves.
    pub(super) fn blocks(self) -> Range<u32> {
        self.start..self.start + self.reserved
    }
}

impl Arena {
    /// Turns recording of block events on or off. Events that were not drained are dropped.
    pub fn watch(&mut self, on: bool) {
        self.events.watch(on.then_some(GroupId(0)));
    }

    /// Moves the events recorded since the last call to the end of `out`.
    pub fn drain_events(&mut self, out: &mut Vec<BlockEvent>) {
        self.events.drain(out);
    }

    pub(super) fn record(&mut self, seq: SeqId, blocks: Range<u32>, change: Change, reason: ChangeReason) {
        if self.events.is_watching() {
            blocks.for_each(|block| self.events.push(block, Some(seq), change, reason));
        }
    }

    /// Records the growth of handles. Each entry: sequence, handle before, handle after, number of blocks that store
    /// tokens.
    pub(super) fn tell_growth(&mut self, grown: &[(SeqId, Handle, Handle, u32)], reason: ChangeReason) {
        let elsewhere = |before: Handle, after: Handle| before.start != after.start;
        for &(seq, before, _, _) in grown.iter().filter(|(_, before, after, _)| elsewhere(*before, *after)) {
            self.record(seq, before.blocks(), Change::Free, reason);
        }
        for &(seq, before, after, n_used) in grown {
            let mut new = after.blocks();
            if elsewhere(before, after) {
                for from in before.start..before.start + n_used {
                    self.record(seq, new.start..new.start + 1, Change::Move { from }, reason);
                    new.start += 1;
                }
            } else {
                new.start += before.reserved;
            }
            self.record(seq, new, Change::Alloc, reason);
        }
        self.events.step += 1;
    }
}
