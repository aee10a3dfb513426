//! What the prefix index asks of a cell space: which blocks it caches, and the sequences that it makes from them.
use super::{NONE, Paged, Table};
use crate::events::{Change, Reason};
use crate::ids::SeqId;

impl Paged {
    pub(crate) fn free_cells(&self) -> u32 {
        self.blocks.n_free() * self.block_tokens
    }
    pub(crate) fn n_evictable(&self) -> u32 {
        self.blocks.n_evictable()
    }
    pub(crate) fn node(&self, block: u32) -> u32 {
        self.blocks.node(block)
    }
    /// The index node of `block`, if it is cached and no sequence uses it.
    pub(crate) fn evictable_node(&self, block: u32) -> Option<u32> {
        let node = self.blocks.node(block);
        (node != NONE && self.blocks.ref_count(block) == 0).then_some(node)
    }
    /// Block table of `seq`, with [`NONE`] where blocks have left the window.
    pub(crate) fn table_of(&self, seq: SeqId) -> &[u32] {
        self.sequences.get(&seq).map_or(&[], |table| &table.blocks)
    }
    /// Whether a block has become evictable since the index last asked.
    pub(crate) fn has_newly_evictable(&self) -> bool {
        self.blocks.has_newly_evictable()
    }
    pub(crate) fn index(&mut self, block: u32, node: u32) {
        self.blocks.index(block, node);
    }
    pub(crate) fn unindex(&mut self, block: u32) -> bool {
        self.blocks.unindex(block)
    }
    pub(crate) fn take_newly_evictable(&mut self) -> Vec<u32> {
        std::mem::take(self.blocks.newly_evictable())
    }
    pub(crate) fn return_buffer(&mut self, buffer: Vec<u32>) {
        *self.blocks.newly_evictable() = buffer;
    }

    /// Whether a query after the first `n_blocks` of a sequence sees block `i` of them.
    pub(crate) fn is_seen(&self, i: u32, n_blocks: u32) -> bool {
        i < self.sink_blocks() || i >= self.first_seen(n_blocks * self.block_tokens)
    }

    /// Makes the sequence `seq` from the cached `blocks`, keeping only those that a query after them sees. Returns
    /// how many of them were not in use by any sequence before.
    pub(crate) fn seq_from_hit(&mut self, seq: SeqId, mut blocks: Vec<u32>) -> u32 {
        let n_blocks = blocks.len() as u32;
        let next_position = n_blocks * self.block_tokens;
        let first_seen = self.first_seen(next_position).min(n_blocks);
        let sinks = self.sink_blocks().min(first_seen);
        blocks[sinks as usize..first_seen as usize].fill(NONE);
        let mut n_evictable = 0;
        for &block in blocks.iter().filter(|&&block| block != NONE) {
            n_evictable += u32::from(self.blocks.add_ref(block));
            self.events.push(block, Some(seq), Change::Hit, Reason::Open);
        }
        let version = self.new_version();
        self.sequences.insert(
            seq,
            Table { blocks, next_position, window_start: first_seen, version, lineage: version },
        );
        n_evictable
    }

    /// Replaces block `i` of `seq` by `block`, which holds the same tokens.
    pub(crate) fn replace(&mut self, seq: SeqId, i: u32, block: u32) {
        self.blocks.add_ref(block);
        self.events.push(block, Some(seq), Change::Share, Reason::Duplicate);
        let version = self.new_version();
        let table = self.sequences.get_mut(&seq).expect("it is live");
        table.version = version;
        let own = std::mem::replace(&mut table.blocks[i as usize], block);
        self.release(own, seq, Reason::Duplicate);
    }
}
