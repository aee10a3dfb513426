//! What cache tiers below the KV cache ask of the index: the blocks to copy there, before or when they are evicted.
use super::{Index, blocks, blocks_mut};
use crate::ids::{GroupId, SeqId};
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::Moment;
use crate::prefix::tree::Node;
use crate::transfers::{BlockId, CachedBlock};

impl Index {
    pub(super) fn cached_block(&self, node: Node) -> CachedBlock {
        let block =
            |(g, block): (usize, u32)| (block != NONE).then_some(BlockId { group: GroupId(g as u16), block });
        let of_groups = self.groups.iter().map(|group| group.block(node)).enumerate();
        CachedBlock { hash: self.tree.hash(node), blocks: of_groups.filter_map(block).collect() }
    }

    /// See [`Cache::hash_of`](crate::Cache::hash_of).
    pub fn hash_of(&self, groups: &[Box<dyn Kind>], id: BlockId) -> Option<u64> {
        let node = groups.get(usize::from(id.group.0))?.blocks()?.node(id.block);
        (node != NONE).then(|| self.tree.hash(node))
    }

    /// See [`Cache::cached_blocks`](crate::Cache::cached_blocks).
    pub fn cached_blocks(&self, groups: &[Box<dyn Kind>], seq: SeqId, from: u32) -> Vec<CachedBlock> {
        let Some(leaf) = self.leaves.get(&seq) else { return Vec::new() };
        let (mut node, mut found) = (leaf.node, Vec::new());
        for i in (from.div_ceil(self.block_tokens())..leaf.n_blocks).rev() {
            let mut cached = self.cached_block(node);
            // A group may cache the prefix in another block than the one this sequence uses: its window has moved.
            cached.blocks.retain(|id| {
                let table = blocks(&*groups[id.group.0 as usize]).block_table(seq).unwrap_or_default();
                table.get(i as usize) == Some(&id.block)
            });
            found.push(cached);
            node = self.tree.parent(node);
        }
        found.reverse();
        found
    }

    /// See [`Prefixes::demote_until_free`](crate::Prefixes::demote_until_free).
    pub fn demote_until_free(
        &mut self,
        groups: &mut [Box<dyn Kind>],
        n_tokens: u32,
        max_blocks: u32,
        at: Moment,
    ) -> Vec<CachedBlock> {
        self.moment = at;
        let mut demoted: Vec<CachedBlock> = Vec::new();
        for g in 0..groups.len() {
            if self.groups[g].windowed {
                continue;
            }
            while (demoted.len() as u32) < max_blocks {
                let soon = (demoted.len() as u32).saturating_mul(self.block_tokens());
                if blocks(&*groups[g]).free_cells().saturating_add(soon) >= n_tokens {
                    break;
                }
                let leaf = self.groups[g].evict.as_mut().and_then(|evict| evict.order.pop());
                let Some(block) = leaf else { break };
                let node = blocks(&*groups[g]).node(block);
                let cached = self.cached_block(node);
                for &BlockId { group, block } in &cached.blocks {
                    if blocks_mut(&mut groups[group.0 as usize]).pin(block) {
                        self.in_use(group, block);
                    }
                }
                self.n_evicted += cached.blocks.len() as u64; // they are pinned, so dropping them does not count them
                self.drop_below(groups, node);
                demoted.push(cached);
            }
        }
        demoted
    }
}
