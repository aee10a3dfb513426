//! Many sequences over one pool of blocks of `block_tokens` cells, addressed through block tables (paged attention:
//! Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023).
mod blocks;
mod cached;
mod resize;
mod sequences;
mod transfers;

pub(crate) use blocks::NONE;

use super::extents::{Extent, Extents};
use super::span_reads::StepReads;
use super::written::Written;
use super::{GroupSpec, Unbuildable, Visibility, expect_end};
use crate::block_kind::{BlockKind, CachedBlocks};
use crate::events::{Change, ChangeReason, Events};
use crate::ids::*;
use crate::kind::{Kind, SequenceKind};
use crate::plan::*;
use crate::report::*;
use crate::request::Refused;
use crate::run::{CellRun, push_run};
use blocks::{Blocks, Released};
use std::collections::BTreeMap;

/// The kind for serving many users. Sequences share whole blocks with each other and with the prefix index. Before a
/// sequence appends to a block that others also use, it gets a copy of the part that it uses (copy on write): the only
/// bytes that a fork ever costs. If all sequences that share the block append in the same step, one of them keeps it.
///
/// Guarantees:
/// - A block is free exactly when no sequence and no transfer uses it and the index does not cache it.
/// - A step writes only to free blocks, and to cells of uncached blocks after the ends of all sequences that use
///   them; the latter only if the writing sequence is the block's only user once the whole step is committed.
/// - Blocks that no query can see again are released at `commit`, `rollback_tokens` later than the window alone would
///   require.
///
/// The nodes of a draft tree take the cells that a chain of as many tokens would take. They do not outlive their step:
/// the commit keeps one path, whose K and V move to the first of these cells ([`Step::kept_moves`](crate::Step::kept_moves)),
/// and the other nodes leave nothing behind. A removal from the middle takes whole blocks.
pub struct Paged {
    visibility: Visibility,
    block_tokens: u32,
    /// log2 of `block_tokens` if it is a power of two, so that a shift can replace the division.
    shift: Option<u32>,
    rollback_tokens: u32,
    /// True if no capacity limit was given.
    unlimited: bool,
    blocks: Blocks,
    sequences: BTreeMap<SeqId, Table>,
    pub(crate) events: Events,
    /// Unique in the process. A plan compares it to detect another cell space.
    id: u64,
    /// Number of changes of block tables so far.
    n_versions: u64,
}

/// Block table of one sequence: 4 bytes per block.
#[derive(Default)]
struct Table {
    /// Entry `i` is the block of positions `i * block_tokens..`, or [`NONE`] if it has left the window.
    blocks: Vec<u32>,
    next_position: u32,
    /// Blocks before this index have left the window, except those of the sinks.
    window_start: u32,
    /// Changes whenever an entry of `blocks` is set. Two tables with the same version have the same entries, up to the
    /// end of the shorter one. 0 before the first entry.
    version: u64,
    /// Whether blocks were removed from the middle. Their entries are [`NONE`], too.
    has_holes: bool,
    /// Changes when the sequence is recreated or shortened.
    lineage: u64,
}

impl Paged {
    /// Makes `group.capacity_tokens / block_tokens` blocks, rounded down, at least one. Ignores `max_step_tokens`.
    pub fn new(group: &GroupSpec, block_tokens: u32, rollback_tokens: u32) -> Result<Self, Unbuildable> {
        if block_tokens == 0 {
            return Err(Unbuildable("a block holds at least one token"));
        }
        if group.capacity_tokens < block_tokens {
            return Err(Unbuildable(
                "the capacity of a layer group is less than one block: give it more tokens, or use smaller blocks",
            ));
        }
        if group.visibility.window == Some(0) {
            return Err(Unbuildable("a window must have at least one token"));
        }
        Ok(Paged {
            visibility: group.visibility,
            block_tokens,
            shift: block_tokens.is_power_of_two().then_some(block_tokens.trailing_zeros()),
            rollback_tokens,
            unlimited: group.capacity_tokens == u32::MAX,
            blocks: Blocks::new(group.capacity_tokens / block_tokens),
            sequences: BTreeMap::new(),
            events: Events::default(),
            id: crate::tables::unique(),
            n_versions: 0,
        })
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    #[inline]
    fn whole_blocks(&self, tokens: u32) -> u32 {
        match self.shift {
            Some(shift) => tokens >> shift,
            None => tokens / self.block_tokens,
        }
    }
    #[inline]
    fn covering_blocks(&self, tokens: u32) -> u32 {
        let whole = self.whole_blocks(tokens);
        whole + u32::from(whole * self.block_tokens < tokens)
    }
    /// Tokens in the last block of a sequence that ends at `position`; 0 if that block is full.
    #[inline]
    fn offset(&self, position: u32) -> u32 {
        position - self.whole_blocks(position) * self.block_tokens
    }
    fn table(&self, seq: SeqId) -> Result<&Table, Refused> {
        self.sequences.get(&seq).ok_or(Refused::UnknownSequence(seq))
    }

    /// New blocks that `n_tokens` more tokens need, not counting a copy of the last block.
    fn blocks_needed(&self, table: &Table, n_tokens: u32) -> u32 {
        self.covering_blocks(table.next_position + n_tokens) - table.blocks.len() as u32
    }
    /// The partly filled last block, if others may read it.
    fn shared_tail(&self, table: &Table) -> Option<u32> {
        let tail = *table.blocks.last()?;
        (self.offset(table.next_position) > 0 && self.blocks.is_shared(tail)).then_some(tail)
    }
    /// Decides which sequences copy their shared, partly filled last block. All of them do, with one exception: if
    /// all users of an uncached block append in the same step, the one that has filled most of it keeps it. That
    /// one writes after everything the others read, so dropping the step half-way does no damage. Returns the number
    /// of copies. O(1) if `tails` is empty.
    fn divide_tails(&self, tails: &mut [SharedTail]) -> u32 {
        tails.sort_unstable_by_key(|tail| (tail.block, tail.offset, tail.span));
        let mut n_copies = tails.len() as u32;
        for together in tails.chunk_by_mut(|a, b| a.block == b.block) {
            let block = together[0].block;
            if self.blocks.node(block) == NONE
                && self.blocks.ref_count(block) as usize == together.len()
                && let Some(keeper) = together.last_mut()
            {
                keeper.copies = false;
                n_copies -= 1;
            }
        }
        tails.sort_unstable_by_key(|tail| tail.span);
        n_copies
    }

    fn new_version(&mut self) -> u64 {
        self.n_versions += 1;
        self.n_versions
    }

    fn release(&mut self, block: u32, seq: SeqId, reason: ChangeReason) {
        let released = self.blocks.release(block);
        self.log_release(block, Some(seq), released, reason);
    }
    fn log_release(&mut self, block: u32, seq: Option<SeqId>, released: Released, reason: ChangeReason) {
        let change = match released {
            Released::InUse => Change::Release,
            Released::Evictable => Change::Evictable,
            Released::Freed => Change::Free,
        };
        self.events.push(block, seq, change, reason);
    }

    fn no_space(&self, group: GroupId, needed: u32) -> Refused {
        let cells = |blocks: u32| blocks.saturating_mul(self.block_tokens);
        Refused::NoSpace {
            group,
            needed: cells(needed),
            free: cells(self.blocks.n_free()),
            reclaimable: cells(self.blocks.n_evictable()),
        }
    }

    /// Releases the blocks before `until`, which no query can see again, except those of the sinks.
    fn leave_window(&mut self, seq: SeqId, until: u32) {
        if self.visibility.window.is_none() {
            return;
        }
        let table = &self.sequences[&seq];
        let from = table.window_start.max(self.sink_blocks());
        let version = if from < until { self.new_version() } else { table.version };
        for i in from..until.max(from) {
            let table = self.sequences.get_mut(&seq).expect("it is live");
            (table.window_start, table.version) = (i + 1, version);
            let block = std::mem::replace(&mut table.blocks[i as usize], NONE);
            if block != NONE {
                self.release(block, seq, ChangeReason::Window);
            }
        }
    }

    fn extents(&self, table: &Table, out: &mut Extents) {
        out.clear();
        let mut position = 0;
        for &block in &table.blocks {
            let len = self.block_tokens.min(table.next_position - position);
            if block != NONE {
                out.push(Extent { position, cell: block * self.block_tokens, len });
            }
            position += len;
        }
    }
}

impl Kind for Paged {
    fn visibility(&self) -> Visibility {
        self.visibility
    }
    fn capacity_cells(&self) -> u32 {
        self.blocks.capacity() * self.block_tokens
    }
    /// Tokens whose blocks the sequence still uses.
    fn seq_len(&self, seq: SeqId) -> Option<u32> {
        let table = self.sequences.get(&seq)?;
        if table.has_holes {
            let gone = table.blocks.iter().filter(|block| **block == NONE).count() as u32;
            return Some(table.next_position - gone * self.block_tokens);
        }
        let gone = table.window_start.saturating_sub(self.sink_blocks()) * self.block_tokens;
        Some(table.next_position - gone)
    }
    fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|table| table.next_position)
    }

    fn stored_cells(&self, seq: SeqId, out: &mut Vec<(u32, CellRun)>) {
        let mut extents = Extents::default();
        if let Some(table) = self.sequences.get(&seq) {
            self.extents(table, &mut extents);
        }
        out.extend(extents.list().iter().map(|extent| (extent.position, extent.run())));
    }

    fn verifies_trees(&self) -> bool {
        true
    }
    fn prepare(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused> {
        let mut needed = 0u32;
        for (i, span) in spans.list.iter().enumerate() {
            let table = self.table(span.seq)?;
            expect_end(span, table.next_position)?;
            if let Some(range) = span.parents() {
                out.trees.add(span, &[], &spans.parents[range])?;
            }
            needed = needed.saturating_add(self.blocks_needed(table, span.n_tokens));
            if let Some(block) = self.shared_tail(table) {
                let offset = self.offset(table.next_position);
                out.shared_tails.push(SharedTail { span: i as u32, block, offset, copies: true });
            }
        }
        needed = needed.saturating_add(self.divide_tails(&mut out.shared_tails));
        if needed > self.blocks.n_free() {
            return Err(self.no_space(group, needed));
        }
        let (mut from, mut written_end) = (0, 0);
        let mut next_tail = 0; // index into `shared_tails`
        for (i, span) in spans.list.iter().enumerate() {
            let table = &self.sequences[&span.seq];
            let (mut tail, mut n_tokens) =
                (table.blocks.last().copied().filter(|&b| b != NONE), span.n_tokens);
            let offset = self.offset(table.next_position);
            if let (Some(last), true) = (tail, offset > 0) {
                let mut block = last;
                let shared = out.shared_tails.get(next_tail).copied().filter(|tail| tail.span == i as u32);
                next_tail += usize::from(shared.is_some());
                if shared.is_some_and(|tail| tail.copies) {
                    block = self.blocks.find(None, &mut from, out);
                    out.claim_block(block, self.blocks.capacity());
                    let (from, to) = (last * self.block_tokens, block * self.block_tokens);
                    out.copies.push(CellCopy { from, to, len: offset });
                }
                let len = n_tokens.min(self.block_tokens - offset);
                push_run(&mut out.writes, CellRun { start: block * self.block_tokens + offset, len });
                n_tokens -= len;
                written_end = written_end.max(block + 1);
                tail = Some(block);
            }
            while n_tokens > 0 {
                let block = self.blocks.find(tail, &mut from, out);
                out.claim_block(block, self.blocks.capacity());
                let len = n_tokens.min(self.block_tokens);
                push_run(&mut out.writes, CellRun { start: block * self.block_tokens, len });
                n_tokens -= len;
                written_end = written_end.max(block + 1);
                tail = Some(block);
            }
        }
        out.trees.place(&spans.list, &out.writes);
        out.cells_end = self.blocks.high_water().max(written_end) * self.block_tokens;
        Ok(())
    }

    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan) {
        let GroupPlan { writes, copies, trees, reads, shared_tails, .. } = out;
        let mut scratch = std::mem::take(&mut reads.scratch);
        let mut extents = std::mem::take(&mut scratch.extents);
        extents.resize_with(spans.list.len().max(extents.len()), Extents::default);
        for (span, extents) in spans.list.iter().zip(&mut extents) {
            self.extents(&self.sequences[&span.seq], extents);
        }
        for (tail, copy) in shared_tails.iter().filter(|tail| tail.copies).zip(copies.iter()) {
            let (start, extents) = (spans.list[tail.span as usize].start, &mut extents[tail.span as usize]);
            extents.remove(start - copy.len, start, |_| {});
            extents.push(Extent { position: start - copy.len, cell: copy.to, len: copy.len });
        }
        let step = StepReads { spans: &spans.list, visibility: self.visibility, writes, trees };
        step.fill(|i| &extents[i], &mut scratch, reads);
        scratch.extents = extents;
        reads.scratch = scratch;
    }

    fn fill_tables(&self, spans: &Spans, out: &mut GroupPlan) -> bool {
        if spans.list.iter().any(|span| self.sequences[&span.seq].has_holes) {
            return false; // a table cannot say that a position inside the window is not seen
        }
        let GroupPlan { writes, tables, .. } = out;
        let (mut written, resident) = (Written::new(writes), &mut tables.resident);
        resident.begin(self.id, self.block_tokens, &spans.list);
        for (i, span) in spans.list.iter().enumerate() {
            let table = &self.sequences[&span.seq];
            resident.refresh(i, table.version, &table.blocks);
            let (mut position, end) = (span.start, span.start + span.n_tokens);
            while position < end {
                let rest_of_block = self.block_tokens - self.offset(position);
                let run = written.take(rest_of_block.min(end - position));
                resident.write(i, self.whole_blocks(position), self.whole_blocks(run.start));
                position += run.len;
            }
        }
        true
    }

    fn apply(&mut self, spans: &Spans, plan: &GroupPlan) {
        let mut written = Written::new(&plan.writes);
        for span in &spans.list {
            let seq = span.seq;
            let table = self.sequences.get_mut(&seq).expect("prepare knew this sequence");
            let (start, mut n_tokens, mut changes) = (table.next_position, span.n_tokens, false);
            table.next_position += n_tokens;
            let mut blocks = std::mem::take(&mut table.blocks);
            let offset = self.offset(start);
            if offset > 0 {
                let run = written.take(n_tokens.min(self.block_tokens - offset));
                n_tokens -= run.len;
                let block = self.whole_blocks(run.start);
                let tail = blocks.last_mut().expect("a started block is in the table");
                let from = std::mem::replace(tail, block);
                if from != block {
                    changes = true;
                    self.blocks.take(block);
                    self.events.push(block, Some(seq), Change::CopyOnWrite { from }, ChangeReason::Append);
                    self.release(from, seq, ChangeReason::Append);
                }
            }
            while n_tokens > 0 {
                let run = written.take(n_tokens.min(self.block_tokens));
                n_tokens -= run.len;
                let block = self.whole_blocks(run.start);
                self.blocks.take(block);
                self.events.push(block, Some(seq), Change::Alloc, ChangeReason::Append);
                blocks.push(block);
                changes = true;
            }
            self.n_versions += u64::from(changes);
            let table = self.sequences.get_mut(&seq).expect("it is live");
            table.blocks = blocks;
            table.version = if changes { self.n_versions } else { table.version };
            // A rollback of `rollback_tokens` must find what it needs.
            let until = self.first_seen((start + span.n_tokens).saturating_sub(self.rollback_tokens));
            self.leave_window(seq, until);
        }
        self.events.step += 1;
    }

    fn clear(&mut self) {
        self.sequences.clear();
        for block in (0..self.blocks.high_water()).filter(|&block| self.blocks.is_used(block)) {
            if self.blocks.n_sequences(block) == self.blocks.ref_count(block) {
                self.events.push(block, None, Change::Free, ChangeReason::Clear);
            }
        }
        self.blocks.clear();
    }

    fn occupancy(&self) -> Occupancy {
        Occupancy {
            block_tokens: self.block_tokens,
            capacity_cells: self.capacity_cells(),
            free_cells: self.free_cells(),
            evictable_cells: self.blocks.n_evictable() * self.block_tokens,
            frees_out_of_window: self.visibility.window.is_some(),
        }
    }
    fn report(&self) -> Report {
        let mut extents = Extents::default();
        // For every partly filled last block: how many sequences end in it, and the highest offset at which one of
        // them ends.
        let mut started: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
        let sequences = self.sequences.iter().map(|(&seq, table)| {
            self.extents(table, &mut extents);
            let offset = self.offset(table.next_position);
            if let (Some(&tail), true) = (table.blocks.last(), offset > 0) {
                let (n_ends, filled) = started.entry(tail).or_default();
                (*n_ends, *filled) = (*n_ends + 1, offset.max(*filled));
            }
            SequenceReport {
                seq,
                len: extents.n_tokens(),
                next_position: table.next_position,
                n_nodes: 0,
                n_extents: extents.list().len() as u32,
            }
        });
        let sequences = sequences.collect();
        // A sequence that uses the block but does not end in it has filled it. A cached block is full, too.
        let is_started =
            |block, n_ends| self.blocks.n_sequences(block) == n_ends && self.blocks.node(block) == NONE;
        let unused = started.iter().filter(|(block, (n_ends, _))| is_started(**block, *n_ends));
        let unused_cells = unused.map(|(_, (_, filled))| self.block_tokens - filled).sum();
        let used_blocks = self.blocks.capacity() - self.blocks.n_free();
        Report {
            capacity_cells: self.capacity_cells(),
            used_cells: used_blocks * self.block_tokens,
            high_water: self.blocks.high_water() * self.block_tokens,
            sequences,
            blocks: Some(BlockReport {
                block_tokens: self.block_tokens,
                total: self.blocks.capacity(),
                free: self.blocks.n_free(),
                evictable: self.blocks.n_evictable(),
                unused_cells,
                counters: self.events.counters,
            }),
        }
    }

    fn sequences(&mut self) -> Option<&mut dyn SequenceKind> {
        Some(self)
    }
    fn blocks(&self) -> Option<&dyn BlockKind> {
        Some(self)
    }
    fn blocks_mut(&mut self) -> Option<&mut dyn BlockKind> {
        Some(self)
    }
}
