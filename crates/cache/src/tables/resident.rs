//! The host's copy of a block table that stays on a device: a row per sequence, and the edits since the previous step.
use super::{BlockTables, NO_BLOCK, NotBlocks, TableEdit};
use crate::ids::SeqId;
use crate::plan::PlannedSpan;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Entries that are compared at once: most of a row has not changed since the last step.
const CHUNK: usize = 64;

/// Stands for "no row yet".
const NO_ROW: u32 = u32::MAX;

/// A number that no other call in this process returns; never 0.
pub(crate) fn unique() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// A row for every sequence of this plan's steps. A sequence that is not in the step keeps its row until a new sequence
/// needs it. 4 bytes per block.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    /// The cell space that the rows belong to; 0 for none.
    space: u64,
    block_tokens: u32,
    rows: Vec<Row>,
    row_of: BTreeMap<SeqId, u32>,
    /// `[spans]`
    span_rows: Vec<u32>,
    edits: Vec<TableEdit>,
    /// The table that the edits start from; 0 for none.
    base: u64,
    epoch: u64,
}

#[derive(Debug)]
struct Row {
    seq: SeqId,
    /// The version of the sequence's block table in the row; `None` if the row still has another sequence's table.
    version: Option<u64>,
    /// The last epoch whose batch contained the sequence.
    last_used: u64,
    blocks: Vec<u32>,
}

impl Resident {
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
    pub fn span_rows(&self) -> &[u32] {
        &self.span_rows
    }

    /// Begins a new table for a batch of `spans`: gives every span a row. `space` is the unique number of the cell
    /// space, whose blocks have `block_tokens` cells.
    pub fn begin(&mut self, space: u64, block_tokens: u32, spans: &[PlannedSpan]) {
        if (self.space, self.block_tokens) != (space, block_tokens) {
            *self = Resident { space, block_tokens, ..Resident::default() };
        }
        (self.base, self.epoch) = (self.epoch, unique());
        self.edits.clear();
        self.span_rows.clear();
        for span in spans {
            let row = self.row_of.get(&span.seq).copied();
            if let Some(row) = row {
                self.rows[row as usize].last_used = self.epoch;
            }
            self.span_rows.push(row.unwrap_or(NO_ROW));
        }
        let mut next = 0;
        for (span, row) in spans.iter().zip(&mut self.span_rows).filter(|(_, row)| **row == NO_ROW) {
            while self.rows.get(next).is_some_and(|row| row.last_used == self.epoch) {
                next += 1;
            }
            *row = next as u32;
            match self.rows.get_mut(next) {
                Some(taken) => {
                    self.row_of.remove(&taken.seq);
                    (taken.seq, taken.version, taken.last_used) = (span.seq, None, self.epoch);
                }
                None => {
                    let (last_used, blocks) = (self.epoch, Vec::new());
                    self.rows.push(Row { seq: span.seq, version: None, last_used, blocks });
                }
            }
            self.row_of.insert(span.seq, *row);
        }
    }

    /// Brings the row of span `i` up to the committed block table `blocks`. O(1) if it has this version already.
    pub fn refresh(&mut self, i: usize, version: u64, blocks: &[u32]) {
        let at = self.span_rows[i];
        let row = &mut self.rows[at as usize];
        row.blocks.truncate(blocks.len());
        if row.version == Some(version) {
            return;
        }
        row.version = Some(version);
        let n_known = row.blocks.len();
        let mut edit = |column: usize| {
            self.edits.push(TableEdit { row: at, column: column as u32, block: blocks[column] });
        };
        for (n, (old, new)) in row.blocks.chunks(CHUNK).zip(blocks[..n_known].chunks(CHUNK)).enumerate() {
            if old != new {
                let changed = (0..new.len()).filter(|&c| old[c] != new[c]);
                changed.for_each(|c| edit(n * CHUNK + c));
            }
        }
        (n_known..blocks.len()).for_each(edit);
        row.blocks.clear();
        row.blocks.extend_from_slice(blocks);
    }

    /// Sets the block that span `i` writes to in `column`: an entry of its row, or the one after the last.
    pub fn write(&mut self, i: usize, column: u32, block: u32) {
        let at = self.span_rows[i];
        let row = &mut self.rows[at as usize];
        match row.blocks.get_mut(column as usize) {
            Some(known) if *known == block => return,
            Some(known) => {
                *known = block;
                // If the step is dropped, the sequence keeps its version, and this row no longer has it.
                row.version = None;
            }
            None => row.blocks.push(block),
        }
        self.edits.push(TableEdit { row: at, column, block });
    }

    /// See [`GroupPlan::edits_since`](crate::GroupPlan::edits_since).
    pub fn edits_since(&self, epoch: u64, out: &mut Vec<TableEdit>) -> bool {
        if epoch == self.epoch {
            return true;
        }
        if epoch == self.base && self.base != 0 {
            out.extend_from_slice(&self.edits);
            return true;
        }
        for (row, entries) in (0..).zip(&self.rows) {
            out.extend((0..).zip(&entries.blocks).map(|(column, &block)| TableEdit { row, column, block }));
        }
        false
    }

    /// Writes the rows of the batch to `out`, whose `kv_len` is filled in, for blocks of `block` cells.
    pub fn lower(&self, block: u32, out: &mut BlockTables) -> Result<(), NotBlocks> {
        if !self.block_tokens.is_multiple_of(block) {
            return Err(NotBlocks::BlockSize { cache: self.block_tokens, asked: block });
        }
        let parts = self.block_tokens / block;
        out.lay_out(block);
        for (i, &row) in self.span_rows.iter().enumerate() {
            let (from, until) = (out.table_start[i] as usize, out.table_start[i + 1] as usize);
            let of = &self.rows[row as usize].blocks;
            if parts == 1 {
                out.blocks[from..until].copy_from_slice(of);
                continue;
            }
            for (column, entry) in (0..).zip(&mut out.blocks[from..until]) {
                *entry = match of[(column / parts) as usize] {
                    NO_BLOCK => NO_BLOCK,
                    whole => whole * parts + column % parts,
                };
            }
        }
        Ok(())
    }
}
