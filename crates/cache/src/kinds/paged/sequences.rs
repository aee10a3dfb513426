//! Operations on whole sequences: fork, shorten, remove.
use super::{NONE, Paged, Table};
use crate::block_kind::CachedBlocks;
use crate::events::{Change, Reason};
use crate::ids::SeqId;
use crate::kind::{Kind, SequenceKind};
use crate::request::Refused;

impl Paged {
    /// Shortens `seq` to `position`. The caller has checked that this is possible.
    fn truncate(&mut self, seq: SeqId, position: u32, reason: Reason) {
        let (keep, lineage) = (self.covering_blocks(position) as usize, self.new_version());
        let table = self.sequences.get_mut(&seq).expect("it is live");
        if position < table.next_position {
            table.lineage = lineage;
        }
        table.next_position = position; // the version stays: the blocks that are left are those it means
        table.window_start = table.window_start.min(keep as u32);
        let mut blocks = std::mem::take(&mut table.blocks);
        for &block in blocks.iter().skip(keep).rev().filter(|&&block| block != NONE) {
            self.release(block, seq, reason);
        }
        blocks.truncate(keep);
        self.sequences.get_mut(&seq).expect("it is live").blocks = blocks;
    }
}

const TAILS_ONLY: &str = "a paged cache copies from the beginning and removes from the end: use cells";

impl SequenceKind for Paged {
    fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        if self.sequences.contains_key(&seq) {
            return Err(Refused::SequenceExists(seq));
        }
        let lineage = self.new_version();
        self.sequences.insert(seq, Table { lineage, ..Table::default() });
        Ok(())
    }

    fn can_end_at(&self, seq: SeqId, position: u32) -> Result<(), Refused> {
        let table = self.table(seq)?;
        if position >= table.next_position || self.visibility.window.is_none() || position == 0 {
            return Ok(());
        }
        // What the next query sees must still be stored. Sink blocks always are.
        let first = self.first_seen(position).max(self.sink_blocks());
        if first < table.window_start && first < self.covering_blocks(position) {
            return Err(Refused::WindowGone { seq, position });
        }
        Ok(())
    }

    fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let source = self.table(src)?;
        let until = until.min(source.next_position);
        if let Some(next) = self.next_position(dst).filter(|&next| next > from) {
            return Err(Refused::Occupied { seq: dst, position: next - 1 });
        }
        if from >= until {
            let lineage = self.new_version();
            self.sequences.entry(dst).or_insert_with(|| Table { lineage, ..Table::default() });
            return Ok(());
        }
        if from > 0 {
            return Err(Refused::NotHere(TAILS_ONLY));
        }
        let n_blocks = self.covering_blocks(until) as usize;
        let copy = Table {
            blocks: source.blocks[..n_blocks].to_vec(),
            next_position: until,
            window_start: source.window_start.min(n_blocks as u32),
            version: self.n_versions + 1,
            lineage: self.n_versions + 1,
        };
        self.n_versions += 1;
        for &block in copy.blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.add_ref(block);
            self.events.push(block, Some(dst), Change::Share, Reason::Fork);
        }
        self.sequences.insert(dst, copy);
        Ok(())
    }

    fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let next = self.table(seq)?.next_position;
        if from >= until || from > next {
            return Ok(());
        }
        if until < next {
            return Err(Refused::NotHere(TAILS_ONLY));
        }
        let reason = if from == 0 { Reason::Remove } else { Reason::Rollback };
        self.truncate(seq, from, reason);
        if from == 0 {
            self.sequences.remove(&seq);
        }
        Ok(())
    }

    fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.table(seq)?;
        if from > 0 && from < until {
            return Err(Refused::NotHere(TAILS_ONLY));
        }
        while let Some(other) = self.sequences.keys().copied().find(|&other| other != seq) {
            self.seq_rm(other, 0, u32::MAX)?;
        }
        self.seq_rm(seq, if from < until { until } else { 0 }, u32::MAX)
    }
}
