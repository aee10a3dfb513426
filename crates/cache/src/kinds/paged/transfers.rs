//! Blocks in transfer. See [`Cache::pin`](crate::Cache::pin) and [`Cache::load`](crate::Cache::load).
use super::{NONE, Paged};
use crate::events::{Change, Reason};
use crate::ids::{GroupId, SeqId};
use crate::plan::GroupPlan;
use crate::request::Refused;

impl Paged {
    /// Whether `block` exists, is not free, and holds bytes.
    pub(crate) fn is_readable(&self, block: u32) -> bool {
        self.blocks.is_used(block) && !self.blocks.is_loading(block)
    }
    /// Pins a readable block. Returns whether it was evictable until now.
    pub(crate) fn pin(&mut self, block: u32) -> bool {
        self.blocks.pin(block)
    }
    pub(crate) fn unpin(&mut self, block: u32) {
        let released = self.blocks.unpin(block);
        self.log_release(block, None, released, Reason::Unpin);
    }

    /// Changes when the sequence is recreated or shortened; 0 if there is none.
    pub(crate) fn lineage(&self, seq: SeqId) -> u64 {
        self.sequences.get(&seq).map_or(0, |table| table.lineage)
    }

    /// The blocks that `seq` lacks to end at `until`, by index, and whether a query at `until` sees them.
    fn to_load(&self, seq: SeqId, until: u32) -> impl Iterator<Item = bool> {
        let n_blocks = self.sequences.get(&seq).map_or(0, |table| table.blocks.len() as u32);
        let (sinks, first_seen) = (self.sink_blocks(), self.first_seen(until));
        (n_blocks..self.covering_blocks(until)).map(move |i| i < sinks || i >= first_seen)
    }

    /// Whether [`load`](Self::load) finds what it needs.
    pub(crate) fn can_load(&self, seq: SeqId, until: u32, group: GroupId) -> Result<(), Refused> {
        let table = self.table(seq)?;
        if self.offset(table.next_position) > 0 {
            return Err(Refused::NotHere(
                "an import begins where a block begins, and the sequence ends within one",
            ));
        }
        let needed = self.to_load(seq, until).filter(|&is_seen| is_seen).count() as u32;
        if needed > self.blocks.n_free() {
            return Err(self.no_space(group, needed));
        }
        Ok(())
    }

    /// Takes the blocks that `seq` lacks to end at `until`: [`NONE`] where no query sees them.
    pub(crate) fn load(&mut self, seq: SeqId, until: u32) -> Vec<u32> {
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
            self.events.push(block, Some(seq), Change::Alloc, Reason::Load);
            blocks.push(block);
            tail = Some(block);
        }
        blocks
    }

    /// Gives the loaded blocks to `seq`, which ends at `until` now, and releases what has left its window.
    pub(crate) fn append_loaded(&mut self, seq: SeqId, until: u32, blocks: &[u32]) {
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

    /// Frees the blocks of an import that failed or came too late.
    pub(crate) fn abandon_load(&mut self, seq: SeqId, blocks: &[u32]) {
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.loaded(block);
            self.release(block, seq, Reason::Load);
        }
    }
}
