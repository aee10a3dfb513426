//! What the prefix index asks of a cell space: which blocks it caches, and the sequences that it makes from them.
use super::{Paged, Table};
use crate::block_kind::{BlockKind, CachedBlocks, NONE};
use crate::events::{Change, ChangeReason, Events};
use crate::ids::SeqId;
use crate::report::BlockUse;

impl CachedBlocks for Paged {
    fn free_cells(&self) -> u32 {
        self.blocks.n_free() * self.block_tokens
    }
    fn n_evictable(&self) -> u32 {
        self.blocks.n_evictable()
    }
    fn node(&self, block: u32) -> u32 {
        self.blocks.node(block)
    }
    fn evictable_node(&self, block: u32) -> Option<u32> {
        let node = self.blocks.node(block);
        (node != NONE && self.blocks.ref_count(block) == 0).then_some(node)
    }
    fn has_newly_evictable(&self) -> bool {
        self.blocks.has_newly_evictable()
    }
    fn index(&mut self, block: u32, node: u32) {
        self.blocks.index(block, node);
    }
    fn unindex(&mut self, block: u32) -> bool {
        self.blocks.unindex(block)
    }
    fn take_newly_evictable(&mut self) -> Vec<u32> {
        std::mem::take(self.blocks.newly_evictable())
    }
    fn return_buffer(&mut self, buffer: Vec<u32>) {
        *self.blocks.newly_evictable() = buffer;
    }

    fn sink_blocks(&self) -> u32 {
        self.visibility.window.map_or(0, |_| self.covering_blocks(self.visibility.sinks))
    }
    fn first_seen(&self, position: u32) -> u32 {
        let Some(window) = self.visibility.window else { return 0 };
        // Saturating: at the very last position, an error of one position does no harm.
        let seen = self.whole_blocks(position.saturating_add(1).saturating_sub(window));
        if seen <= self.sink_blocks() { 0 } else { seen }
    }
    fn is_seen(&self, i: u32, n_blocks: u32) -> bool {
        i < self.sink_blocks() || i >= self.first_seen(n_blocks * self.block_tokens)
    }

    fn open(&mut self, seq: SeqId, mut blocks: Vec<u32>) -> u32 {
        let n_blocks = blocks.len() as u32;
        let next_position = n_blocks * self.block_tokens;
        let first_seen = self.first_seen(next_position).min(n_blocks);
        let sinks = self.sink_blocks().min(first_seen);
        blocks[sinks as usize..first_seen as usize].fill(NONE);
        let mut n_evictable = 0;
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            n_evictable += u32::from(self.blocks.add_ref(block));
            self.events.push(block, Some(seq), Change::Hit, ChangeReason::Open);
        }
        let version = self.new_version();
        self.sequences.insert(
            seq,
            Table {
                blocks,
                next_position,
                window_start: first_seen,
                has_holes: false,
                version,
                lineage: version,
            },
        );
        n_evictable
    }

    fn replace(&mut self, seq: SeqId, i: u32, block: u32) {
        self.blocks.add_ref(block);
        self.events.push(block, Some(seq), Change::Share, ChangeReason::Duplicate);
        let version = self.new_version();
        let table = self.sequences.get_mut(&seq).expect("it is live");
        table.version = version;
        let own = std::mem::replace(&mut table.blocks[i as usize], block);
        self.release(own, seq, ChangeReason::Duplicate);
    }
}

impl BlockKind for Paged {
    fn events(&mut self) -> &mut Events {
        &mut self.events
    }
    fn block_uses(&self) -> Box<dyn Iterator<Item = BlockUse> + '_> {
        Box::new((0..self.blocks.high_water()).map(|block| {
            match (self.blocks.ref_count(block), self.blocks.node(block)) {
                (0, NONE) => BlockUse::Free,
                (0, _) => BlockUse::Evictable,
                _ => match self.blocks.n_sequences(block) {
                    0 => BlockUse::InTransfer,
                    n => BlockUse::InUse(n),
                },
            }
        }))
    }
    fn block_table(&self, seq: SeqId) -> Option<&[u32]> {
        Some(&self.sequences.get(&seq)?.blocks)
    }
    fn window(&self) -> Option<u32> {
        self.visibility.window
    }
    fn is_unlimited(&self) -> bool {
        self.unlimited
    }
}
