//! Blocks in transfer. See [`Cache::pin`](crate::Cache::pin) and [`Cache::load`](crate::Cache::load).
use super::Paged;
use crate::block_kind::{CachedBlocks, NONE, TransferBlocks};
use crate::events::{Change, ChangeReason};
use crate::ids::{GroupId, SeqId};
use crate::plan::GroupPlan;
use crate::request::Refused;

impl Paged {
    /// The blocks that `seq` lacks to end at `until`, by index, and whether a query at `until` sees them.
    fn to_load(&self, seq: SeqId, until: u32) -> impl Iterator<Item = bool> {
        let n_blocks = self.sequences.get(&seq).map_or(0, |table| table.blocks.len() as u32);
        let (sinks, first_seen) = (self.sink_blocks(), self.first_seen(until));
        (n_blocks..self.covering_blocks(until)).map(move |i| i < sinks || i >= first_seen)
    }
}

impl TransferBlocks for Paged {
    fn is_readable(&self, block: u32) -> bool {
        self.blocks.is_used(block) && !self.blocks.is_loading(block)
    }
    fn pin(&mut self, block: u32) -> bool {
        self.blocks.pin(block)
    }
    fn unpin(&mut self, block: u32) {
        let released = self.blocks.unpin(block);
        self.log_release(block, None, released, ChangeReason::Unpin);
    }

    fn lineage(&self, seq: SeqId) -> u64 {
        self.sequences.get(&seq).map_or(0, |table| table.lineage)
    }

    fn can_load(&self, seq: SeqId, until: u32, group: GroupId) -> Result<(), Refused> {
        let table = self.table(seq)?;
        if self.offset(table.next_position) > 0 {
            return Err(Refused::Unsupported(
                "an import begins where a block begins, and the sequence ends within one",
            ));
        }
        let needed = self.to_load(seq, until).filter(|&is_seen| is_seen).count() as u32;
        if needed > self.blocks.n_free() {
            return Err(self.no_space(group, needed));
        }
        Ok(())
    }

    fn load(&mut self, seq: SeqId, until: u32) -> Vec<u32> {
        let wanted: Vec<bool> = self.to_load(seq, until).collect();
        let mut tail = self.sequences.get(&seq).and_then(|table| table.blocks.last().copied());
        let (mut from, no_claims) = (0, GroupPlan::default());
        let mut blocks = Vec::with_capacity(wanted.len());
        for is_seen in wanted {
            if !is_seen {
                blocks.push(NONE);
                continue;
            }
            let block = self.blocks.find(tail.filter(|&block| block != NONE), &mut from, &no_claims);
            self.blocks.load(block);
            self.events.push(block, Some(seq), Change::Alloc, ChangeReason::Load);
            blocks.push(block);
            tail = Some(block);
        }
        blocks
    }

    fn append_loaded(&mut self, seq: SeqId, until: u32, blocks: &[u32]) {
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.loaded(block);
        }
        let version = self.new_version();
        let first_seen = self.first_seen(until).min(self.covering_blocks(until));
        let table = self.sequences.get_mut(&seq).expect("it is live");
        table.blocks.extend_from_slice(blocks);
        (table.next_position, table.version) = (until, version);
        self.leave_window(seq, first_seen);
    }

    fn part_of_load(&self, seq: SeqId, until: u32, blocks: &[u32]) -> Option<usize> {
        let wanted: Vec<bool> = self.to_load(seq, until).collect();
        let has_seen = |(&is_seen, &block): (&bool, &u32)| !is_seen || block != NONE;
        let is_whole = self.offset(until) == 0 && wanted.len() <= blocks.len();
        (is_whole && wanted.iter().zip(blocks).all(has_seen)).then_some(wanted.len())
    }

    fn abandon_load(&mut self, seq: SeqId, blocks: &[u32]) {
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.loaded(block);
            self.release(block, seq, ChangeReason::Load);
        }
    }
}
