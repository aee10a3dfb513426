//! Operations on whole sequences: fork, shorten, remove.
use super::{NONE, Paged, Table};
use crate::block_kind::CachedBlocks;
use crate::events::{Change, ChangeReason};
use crate::ids::SeqId;
use crate::kind::{Kind, SequenceKind};
use crate::request::Refused;

impl Paged {
    /// Shortens `seq` to `position`. The caller has checked that this is possible.
    fn truncate(&mut self, seq: SeqId, position: u32, reason: ChangeReason) {
        let (keep, lineage) = (self.covering_blocks(position) as usize, self.new_version());
        let table = self.sequences.get_mut(&seq).expect("it is live");
        if position < table.next_position {
            table.lineage = lineage;
        }
        table.next_position = position; // the version stays: the blocks that are left are those it means
        table.window_start = table.window_start.min(keep as u32);
        table.has_holes &= table.blocks.iter().take(keep).any(|&block| block == NONE);
        let mut blocks = std::mem::take(&mut table.blocks);
        for &block in blocks.iter().skip(keep).rev().filter(|&&block| block != NONE) {
            self.release(block, seq, reason);
        }
        blocks.truncate(keep);
        self.sequences.get_mut(&seq).expect("it is live").blocks = blocks;
    }

    /// Removes whole blocks from the middle of `seq`.
    fn remove_blocks(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        if self.offset(from) > 0 || self.offset(until) > 0 {
            return Err(Refused::Unsupported(TAILS_ONLY));
        }
        let version = self.new_version();
        let range = self.whole_blocks(from) as usize..self.whole_blocks(until) as usize;
        let table = self.sequences.get_mut(&seq).expect("it is live");
        (table.version, table.lineage, table.has_holes) = (version, version, true);
        let removed: Vec<u32> =
            table.blocks[range].iter_mut().map(|block| std::mem::replace(block, NONE)).collect();
        for block in removed.into_iter().filter(|&block| block != NONE) {
            self.release(block, seq, ChangeReason::Remove);
        }
        Ok(())
    }
}

const TAILS_ONLY: &str =
    "a paged cache copies from the beginning, and removes whole blocks or from the end: use cells";

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
        if position >= table.next_position || position == 0 {
            return Ok(());
        }
        let last = table.blocks[self.whole_blocks(position - 1) as usize];
        if table.has_holes && last == NONE && self.offset(position) > 0 {
            return Err(Refused::WindowGone { seq, position }); // the next token would be written to that block
        }
        if self.visibility.window.is_none() {
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
            return Err(Refused::Unsupported(TAILS_ONLY));
        }
        let n_blocks = self.covering_blocks(until) as usize;
        let copy = Table {
            blocks: source.blocks[..n_blocks].to_vec(),
            next_position: until,
            window_start: source.window_start.min(n_blocks as u32),
            has_holes: source.has_holes,
            version: self.n_versions + 1,
            lineage: self.n_versions + 1,
        };
        self.n_versions += 1;
        for &block in copy.blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.add_ref(block);
            self.events.push(block, Some(dst), Change::Share, ChangeReason::Fork);
        }
        self.sequences.insert(dst, copy);
        Ok(())
    }

    fn stored(&self, seq: SeqId, out: &mut Vec<std::ops::Range<u32>>) -> Result<(), Refused> {
        let table = self.table(seq)?;
        for (i, _) in (0..).zip(&table.blocks).filter(|(_, block)| **block != NONE) {
            let position = i * self.block_tokens;
            let end = (position + self.block_tokens).min(table.next_position);
            match out.last_mut() {
                Some(last) if last.end == position => last.end = end,
                _ => out.push(position..end),
            }
        }
        Ok(())
    }

    fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        let next = self.table(seq)?.next_position;
        if from >= until || from > next {
            return Ok(());
        }
        if until < next {
            return self.remove_blocks(seq, from, until);
        }
        let reason = if from == 0 { ChangeReason::Remove } else { ChangeReason::Rollback };
        self.truncate(seq, from, reason);
        if from == 0 {
            self.sequences.remove(&seq);
        }
        Ok(())
    }

    fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.table(seq)?;
        if from > 0 && from < until {
            return Err(Refused::Unsupported(TAILS_ONLY));
        }
        while let Some(other) = self.sequences.keys().copied().find(|&other| other != seq) {
            self.seq_rm(other, 0, u32::MAX)?;
        }
        self.seq_rm(seq, if from < until { until } else { 0 }, u32::MAX)
    }
}
