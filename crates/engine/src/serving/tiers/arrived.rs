//! What has been read for loads, on its way to the cache's memory: in order, and a bounded part of it between two steps.
use super::{Pending, TierDriver, cells, find};
use kvist_cache::GroupId;
use kvist_device::{HostBlock, Transfers};
use kvist_scheduler::TransferId;
use kvist_store::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of loads that are copied to the cache's memory between two steps, and one object more: a few milliseconds. Others wait for the
/// next step.
pub(super) const STEP_BYTES: usize = 32 << 20;

/// What has been read for a load.
pub(super) enum Arrived {
    /// With its place in [`Found::wanted`].
    Object { id: TransferId, object: (usize, Bytes) },
    /// No more comes.
    All { id: TransferId, took: Duration },
}

impl TierDriver {
    /// Lets another [`STEP_BYTES`] be copied to the cache's memory. Call it after every step.
    pub fn begin_step(&mut self, transfers: &mut Transfers<'_>) {
        self.room_bytes = STEP_BYTES;
        self.import_some(transfers);
    }

    /// Begins to copy what has arrived to the cache's memory, in order, and as much as may be copied before the next step.
    pub(super) fn import_some(&mut self, transfers: &mut Transfers<'_>) {
        while self.room_bytes > 0
            && let Some(arrived) = self.arrived.pop_front()
        {
            match arrived {
                Arrived::Object { id, object } => {
                    if self.loads.contains_key(&id) {
                        self.room_bytes = self.room_bytes.saturating_sub(object.1.len());
                    }
                    self.import(id, object, transfers);
                }
                // It may have been abandoned.
                Arrived::All { id, took } => {
                    if let Some(load) = self.loads.remove(&id) {
                        self.end_load(id, load, took);
                    }
                }
            }
        }
        let blocks = self.loads.values_mut().flat_map(|load| &mut load.blocks);
        blocks.for_each(|block| block.settle(transfers));
    }

    /// Begins to copy an object of a load to the cache's memory, while the rest is still read.
    fn import(&mut self, id: TransferId, (at, object): (usize, Bytes), transfers: &mut Transfers<'_>) {
        let Some(load) = self.loads.get_mut(&id) else { return };
        let Some((i, groups)) = load.places.get(at) else { return };
        let Some(block) = load.blocks.get_mut(*i) else { return };
        block.n_missing -= 1;
        let mut from = 0;
        for &group in groups {
            let len = self.block_parts.part(group).map_or(0, |part| part.bytes);
            let begun = find::block_of(&load.order, group, *i).and_then(|to| {
                let bytes = (from + len <= object.len()).then(|| object.slice(from..from + len))?;
                let cells = cells(to, self.block_parts.block_tokens);
                transfers.import(GroupId(group as u16), cells, HostBlock::shared(Arc::new(bytes))).ok()
            });
            from += len;
            match begun {
                Some(begun) => block.parts.push(Pending::Begun(begun)),
                None => block.failed = true,
            }
        }
    }
}
