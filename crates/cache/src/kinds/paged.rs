//! Many sequences over one pool of blocks of `block_tokens` cells, addressed through block tables (paged attention:
//! Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023).
mod blocks;

pub(crate) use blocks::NONE;

use super::extents::{Extent, Extents};
use super::trunks::{self, Horizon};
use super::written::Written;
use super::{
    GroupSpec, NO_TREES, Unbuildable, Visibility, expect_end, in_sequence_order, window_edge, written_items,
};
use crate::events::{Change, Events, Reason};
use crate::ids::*;
use crate::kind::{Kind, SequenceKind};
use crate::plan::*;
use crate::reads::{Mask, ReadItem};
use crate::report::*;
use crate::request::Refused;
use crate::run::{Run, push_run};
use blocks::{Blocks, LetGo};
use std::collections::BTreeMap;

/// The kind for serving many users. Sequences share whole blocks with each other and with the prefix index. A
/// sequence that appends to a block which others read first gets a copy of its own part of it: the only bytes that a
/// fork ever costs. If all sequences that share the block append in one step, one of them continues in the block
/// itself.
///
/// Guarantees:
/// - A block is free exactly when no sequence uses it and the index does not cache it.
/// - A step writes only to free blocks, and to cells of uncached blocks behind the ends of all sequences that use
///   them; the latter only if the writing sequence is the block's only user once the whole step is committed.
/// - Blocks that no query can see again are released at `commit`, `rollback_tokens` later than the window alone would
///   require.
///
/// Draft trees are refused, and so is every removal except from the end.
pub struct Paged {
    visibility: Visibility,
    block_tokens: u32,
    /// log2 of `block_tokens` if it is a power of two, so that a shift can replace the division.
    shift: Option<u32>,
    rollback_tokens: u32,
    /// True if no capacity limit was given.
    endless: bool,
    blocks: Blocks,
    sequences: BTreeMap<SeqId, Table>,
    pub(crate) events: Events,
}

/// Block table of one sequence: 4 bytes per block.
#[derive(Default)]
struct Table {
    /// Entry `i` is the block of positions `i * block_tokens..`, or [`NONE`] if it has left the window.
    blocks: Vec<u32>,
    next_position: u32,
    /// Blocks before this index have left the window, except those of the sinks.
    window_start: u32,
}

impl Paged {
    /// Makes `group.capacity_tokens / block_tokens` blocks, rounded down, at least one. Ignores `max_step_tokens`.
    pub fn new(group: &GroupSpec, block_tokens: u32, rollback_tokens: u32) -> Result<Self, Unbuildable> {
        if block_tokens == 0 {
            return Err(Unbuildable("a block holds at least one token"));
        }
        if group.capacity_tokens < block_tokens {
            return Err(Unbuildable(
                "the capacity of a layer group is less than one block: give it more tokens, or take smaller blocks",
            ));
        }
        if group.visibility.window == Some(0) {
            return Err(Unbuildable("a window of no tokens shows nothing"));
        }
        Ok(Paged {
            visibility: group.visibility,
            block_tokens,
            shift: block_tokens.is_power_of_two().then_some(block_tokens.trailing_zeros()),
            rollback_tokens,
            endless: group.capacity_tokens == u32::MAX,
            blocks: Blocks::new(group.capacity_tokens / block_tokens),
            sequences: BTreeMap::new(),
            events: Events::default(),
        })
    }

    /// Tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    /// Block table of `seq` in position order; `None` entries have left the window.
    pub fn block_table(&self, seq: SeqId) -> Option<impl Iterator<Item = Option<u32>>> {
        let table = self.sequences.get(&seq)?;
        Some(table.blocks.iter().map(|&block| (block != NONE).then_some(block)))
    }

    /// See [`Cache::block_uses`](crate::Cache::block_uses).
    pub(crate) fn block_uses(&self) -> impl Iterator<Item = BlockUse> {
        (0..self.blocks.high_water()).map(|block| {
            match (self.blocks.holders(block), self.blocks.node(block)) {
                (0, NONE) => BlockUse::Free,
                (0, _) => BlockUse::Idle,
                (n, _) => BlockUse::Held(n),
            }
        })
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
    pub(crate) fn sink_blocks(&self) -> u32 {
        self.visibility.window.map_or(0, |_| self.covering_blocks(self.visibility.sinks))
    }
    /// Index of the first block after the sinks that a query at `position` sees.
    pub(crate) fn first_seen(&self, position: u32) -> u32 {
        let Some(window) = self.visibility.window else { return 0 };
        // Saturating: at the very last position, an error of one position does no harm.
        let seen = self.whole_blocks(position.saturating_add(1).saturating_sub(window));
        if seen <= self.sink_blocks() { 0 } else { seen }
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
    /// all holders of an uncached block append in the same step, the one that has filled most of it keeps it. That
    /// one writes behind everything the others read, so dropping the step half-way does no damage. Returns the number
    /// of copies. O(1) if `tails` is empty.
    fn divide_tails(&self, tails: &mut [SharedTail]) -> u32 {
        tails.sort_unstable_by_key(|tail| (tail.block, tail.offset, tail.span));
        let mut n_copies = tails.len() as u32;
        for together in tails.chunk_by_mut(|a, b| a.block == b.block) {
            let block = together[0].block;
            if self.blocks.node(block) == NONE
                && self.blocks.holders(block) as usize == together.len()
                && let Some(stays) = together.last_mut()
            {
                stays.copies = false;
                n_copies -= 1;
            }
        }
        tails.sort_unstable_by_key(|tail| tail.span);
        n_copies
    }

    /// Sliding window in positions; `None` if a query sees all.
    pub(crate) fn window(&self) -> Option<u32> {
        self.visibility.window
    }
    /// Whether the group has a window and therefore releases blocks.
    pub(crate) fn is_windowed(&self) -> bool {
        self.visibility.window.is_some()
    }
    /// Whether the capacity is unlimited.
    pub(crate) fn is_endless(&self) -> bool {
        self.endless
    }
    pub(crate) fn free_cells(&self) -> u32 {
        self.blocks.n_free() * self.block_tokens
    }
    pub(crate) fn n_idle(&self) -> u32 {
        self.blocks.n_idle()
    }
    pub(crate) fn node(&self, block: u32) -> u32 {
        self.blocks.node(block)
    }
    /// The index node of `block`, if it is cached and no sequence uses it.
    pub(crate) fn idle_node(&self, block: u32) -> Option<u32> {
        let node = self.blocks.node(block);
        (node != NONE && self.blocks.holders(block) == 0).then_some(node)
    }
    /// Block table of `seq`, with [`NONE`] where blocks have left the window.
    pub(crate) fn table_of(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq).map_or(&[], |table| &table.blocks)
    }
    /// Whether no block has become idle since the index last asked.
    pub(crate) fn has_settled(&self) -> bool {
        self.blocks.has_settled()
    }
    pub(crate) fn index(&mut self, block: u32, node: u32) {
        self.blocks.index(block, node);
    }
    pub(crate) fn unindex(&mut self, block: u32) -> bool {
        self.blocks.unindex(block)
    }
    pub(crate) fn take_fell_idle(&mut self) -> Vec<u32> {
        std::mem::take(self.blocks.fell_idle())
    }
    pub(crate) fn give_back(&mut self, buffer: Vec<u32>) {
        *self.blocks.fell_idle() = buffer;
    }

    /// Whether a query behind the first `n_blocks` of a sequence sees block `i` of them.
    pub(crate) fn is_seen(&self, i: u32, n_blocks: u32) -> bool {
        i < self.sink_blocks() || i >= self.first_seen(n_blocks * self.block_tokens)
    }

    /// Makes the sequence `seq` from the cached `blocks`, keeping only those that a query behind them sees. Returns
    /// how many of them were not in use by any sequence before.
    pub(crate) fn adopt(&mut self, seq: SeqId, mut blocks: Vec<u32>) -> u32 {
        let n_blocks = blocks.len() as u32;
        let next_position = n_blocks * self.block_tokens;
        let first_seen = self.first_seen(next_position).min(n_blocks);
        let sinks = self.sink_blocks().min(first_seen);
        blocks[sinks as usize..first_seen as usize].fill(NONE);
        let mut n_idle = 0;
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            n_idle += u32::from(self.blocks.hold(block));
            self.events.push(block, Some(seq), Change::Hit, Reason::Open);
        }
        self.sequences.insert(seq, Table { blocks, next_position, window_start: first_seen });
        n_idle
    }

    /// Replaces block `i` of `seq` by `block`, which holds the same tokens.
    pub(crate) fn replace(&mut self, seq: SeqId, i: u32, block: u32) {
        self.blocks.hold(block);
        self.events.push(block, Some(seq), Change::Share, Reason::Duplicate);
        let table = self.sequences.get_mut(&seq).expect("it is live");
        let own = std::mem::replace(&mut table.blocks[i as usize], block);
        self.let_go(own, seq, Reason::Duplicate);
    }

    fn let_go(&mut self, block: u32, seq: SeqId, reason: Reason) {
        match self.blocks.release(block) {
            LetGo::Held => self.events.push(block, Some(seq), Change::Release, reason),
            LetGo::Idle => self.events.push(block, Some(seq), Change::Idle, reason),
            LetGo::Freed => self.events.push(block, Some(seq), Change::Free, reason),
        }
    }

    /// Releases the blocks that no query can see again, even after a rollback of `rollback_tokens`.
    fn leave_window(&mut self, seq: SeqId) {
        if self.visibility.window.is_none() {
            return;
        }
        let table = &self.sequences[&seq];
        let from = table.window_start.max(self.sink_blocks());
        let until = self.first_seen(table.next_position.saturating_sub(self.rollback_tokens));
        for i in from..until.max(from) {
            let table = self.sequences.get_mut(&seq).expect("it is live");
            table.window_start = i + 1;
            let block = std::mem::replace(&mut table.blocks[i as usize], NONE);
            if block != NONE {
                self.let_go(block, seq, Reason::Window);
            }
        }
    }

    /// Shortens `seq` to `position`. The caller has checked that this is possible.
    fn truncate(&mut self, seq: SeqId, position: u32, reason: Reason) {
        let keep = self.covering_blocks(position) as usize;
        let table = self.sequences.get_mut(&seq).expect("it is live");
        table.next_position = position;
        table.window_start = table.window_start.min(keep as u32);
        let mut blocks = std::mem::take(&mut table.blocks);
        for &block in blocks.iter().skip(keep).rev().filter(|&&block| block != NONE) {
            self.let_go(block, seq, reason);
        }
        blocks.truncate(keep);
        self.sequences.get_mut(&seq).expect("it is live").blocks = blocks;
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
    fn capacity_cells(&self) -> u32 {
        self.blocks.capacity() * self.block_tokens
    }
    /// Tokens whose blocks the sequence still uses.
    fn seq_len(&self, seq: SeqId) -> Option<u32> {
        let table = self.sequences.get(&seq)?;
        let gone = table.window_start.saturating_sub(self.sink_blocks()) * self.block_tokens;
        Some(table.next_position - gone)
    }
    fn next_position(&self, seq: SeqId) -> Option<u32> {
        self.sequences.get(&seq).map(|table| table.next_position)
    }

    fn prepare(&self, spans: &Spans, group: GroupId, out: &mut GroupPlan) -> Result<(), Refused> {
        let mut needed = 0u32;
        for (i, span) in spans.list.iter().enumerate() {
            let table = self.table(span.seq)?;
            expect_end(span, table.next_position)?;
            if span.kind != SpanKind::Chain {
                return Err(Refused::NotHere(NO_TREES));
            }
            needed = needed.saturating_add(self.blocks_needed(table, span.n_tokens));
            if let Some(block) = self.shared_tail(table) {
                let offset = self.offset(table.next_position);
                out.shared_tails.push(SharedTail { span: i as u32, block, offset, copies: true });
            }
        }
        needed = needed.saturating_add(self.divide_tails(&mut out.shared_tails));
        if needed > self.blocks.n_free() {
            let cells = |blocks: u32| blocks.saturating_mul(self.block_tokens);
            return Err(Refused::NoSpace {
                group,
                needed: cells(needed),
                free: cells(self.blocks.n_free()),
                reclaimable: cells(self.blocks.n_idle()),
            });
        }
        let (mut from, mut written_end) = (0, 0);
        let mut n_met = 0; // index into `shared_tails`
        for (i, span) in spans.list.iter().enumerate() {
            let table = &self.sequences[&span.seq];
            let (mut tail, mut n_tokens) =
                (table.blocks.last().copied().filter(|&b| b != NONE), span.n_tokens);
            let offset = self.offset(table.next_position);
            if let (Some(last), true) = (tail, offset > 0) {
                let mut block = last;
                let shared = out.shared_tails.get(n_met).copied().filter(|tail| tail.span == i as u32);
                n_met += usize::from(shared.is_some());
                if shared.is_some_and(|tail| tail.copies) {
                    block = self.blocks.find(None, &mut from, out);
                    out.claim_block(block, self.blocks.capacity());
                    let (from, to) = (last * self.block_tokens, block * self.block_tokens);
                    out.copies.push(CellCopy { from, to, len: offset });
                }
                let len = n_tokens.min(self.block_tokens - offset);
                push_run(&mut out.writes, Run { start: block * self.block_tokens + offset, len });
                n_tokens -= len;
                written_end = written_end.max(block + 1);
                tail = Some(block);
            }
            while n_tokens > 0 {
                let block = self.blocks.find(tail, &mut from, out);
                out.claim_block(block, self.blocks.capacity());
                let len = n_tokens.min(self.block_tokens);
                push_run(&mut out.writes, Run { start: block * self.block_tokens, len });
                n_tokens -= len;
                written_end = written_end.max(block + 1);
                tail = Some(block);
            }
        }
        out.cells_end = self.blocks.high_water().max(written_end) * self.block_tokens;
        Ok(())
    }

    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan) {
        let GroupPlan { writes, copies, reads, shared_tails, .. } = out;
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
        let horizon = |span: &PlannedSpan| Horizon::new(self.visibility, span.start, 0, span.n_tokens - 1);
        let alone = spans.list.len() == 1;
        trunks::share(&mut scratch, reads, &spans.list, |i| &extents[i], horizon);

        let mut written = Written::new(writes);
        for (i, span) in spans.list.iter().enumerate() {
            let (first_query, see) = (scratch.first_query[i], horizon(span));
            let mut push = |extent: Extent, mask| {
                let (run, first_index) = (extent.run(), extent.position);
                reads.items.push(ReadItem { first_query, n_queries: span.n_tokens, run, first_index, mask });
            };
            for extent in extents[i].within(see.all, see.shared_from(alone)) {
                push(extent, Mask::All);
            }
            for extent in extents[i].within(see.some, see.all) {
                push(extent, window_edge(self.visibility, span.start, extent.position));
            }
            written_items(reads, first_query, span, self.visibility, &mut written);
        }
        in_sequence_order(reads);
        scratch.extents = extents;
        reads.scratch = scratch;
    }

    fn apply(&mut self, spans: &Spans, plan: &GroupPlan) {
        let mut written = Written::new(&plan.writes);
        for span in &spans.list {
            let seq = span.seq;
            let table = self.sequences.get_mut(&seq).expect("prepare knew this sequence");
            let (start, mut n_tokens) = (table.next_position, span.n_tokens);
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
                    self.blocks.take(block);
                    self.events.push(block, Some(seq), Change::CopyOnWrite { from }, Reason::Append);
                    self.let_go(from, seq, Reason::Append);
                }
            }
            while n_tokens > 0 {
                let run = written.take(n_tokens.min(self.block_tokens));
                n_tokens -= run.len;
                let block = self.whole_blocks(run.start);
                self.blocks.take(block);
                self.events.push(block, Some(seq), Change::Alloc, Reason::Append);
                blocks.push(block);
            }
            self.sequences.get_mut(&seq).expect("it is live").blocks = blocks;
            self.leave_window(seq);
        }
        self.events.step += 1;
    }

    fn clear(&mut self) {
        self.sequences.clear();
        for block in (0..self.blocks.high_water()).filter(|&block| self.blocks.is_used(block)) {
            self.events.push(block, None, Change::Free, Reason::Clear);
        }
        self.blocks.clear();
    }

    fn room(&self) -> Room {
        Room {
            block_tokens: self.block_tokens,
            capacity_cells: self.capacity_cells(),
            free_cells: self.free_cells(),
            idle_cells: self.blocks.n_idle() * self.block_tokens,
            frees_out_of_window: self.is_windowed(),
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
            |block, n_ends| self.blocks.holders(block) == n_ends && self.blocks.node(block) == NONE;
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
                idle: self.blocks.n_idle(),
                unused_cells,
                counters: self.events.counters,
            }),
        }
    }

    fn sequences(&mut self) -> Option<&mut dyn SequenceKind> {
        Some(self)
    }
    fn paged(&self) -> Option<&Paged> {
        Some(self)
    }
    fn paged_mut(&mut self) -> Option<&mut Paged> {
        Some(self)
    }
}

const TAILS_ONLY: &str = "a paged cache copies from the beginning and removes from the end: take cells";

impl SequenceKind for Paged {
    fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        if self.sequences.contains_key(&seq) {
            return Err(Refused::SequenceExists(seq));
        }
        self.sequences.insert(seq, Table::default());
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
            self.sequences.entry(dst).or_default();
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
        };
        for &block in copy.blocks.iter().filter(|&&block| block != NONE) {
            self.blocks.hold(block);
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
