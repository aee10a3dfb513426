//! Eviction: ranks of evictable blocks, evicting them, and cleaning up the index.
use super::{Index, blocks, blocks_mut};
use crate::block_kind::BlockKind;
use crate::events::{Change, ChangeReason};
use crate::evict::Rank;
use crate::ids::GroupId;
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::ghosts::Ghosts;
use crate::prefix::tree::Node;
use crate::prefix::{Moment, PrefixEvent};
use crate::transfers::CachedBlock;
use std::collections::BTreeSet;

impl Index {
    /// Ranks the blocks that became evictable since the last call, and offers them to eviction: all of them in window
    /// groups, the leaves in full-attention groups.
    pub fn rank_newly_evictable(&mut self, groups: &mut [Box<dyn Kind>]) {
        for (g, kind) in groups.iter_mut().enumerate() {
            let kind_blocks = blocks_mut(kind);
            if !kind_blocks.has_newly_evictable() {
                continue;
            }
            let mut newly_evictable = kind_blocks.take_newly_evictable();
            let group = &mut self.groups[g];
            if let Some(evict) = &mut group.evict {
                let by_recency = evict.policy.by_recency();
                for &block in &newly_evictable {
                    let Some(node) = kind_blocks.evictable_node(block) else { continue };
                    if by_recency {
                        self.tick += 1;
                        evict.set(block, Rank::by_recency(self.tick));
                    }
                    if group.windowed || self.tree.is_leaf(node) {
                        evict.offer(block);
                    }
                }
            }
            newly_evictable.clear();
            kind_blocks.return_buffer(newly_evictable);
        }
    }

    /// `block` of `group` was evictable, and is in use now.
    pub fn in_use(&mut self, group: GroupId, block: u32) {
        if let Some(evict) = &mut self.groups[group.0 as usize].evict {
            evict.order.remove(block);
        }
    }

    /// Evicts until `n_free(g)` cells are free in every group `g` or nothing is left to evict. Returns the number of
    /// evicted blocks.
    pub fn evict_until_free(
        &mut self,
        groups: &mut [Box<dyn Kind>],
        n_free: impl Fn(usize) -> u32,
        at: Moment,
    ) -> u32 {
        self.moment = at;
        let before = self.n_evicted;
        for g in 0..groups.len() {
            let (n_free, mut lowest_evictable) = (n_free(g), Vec::new());
            while blocks(&*groups[g]).free_cells() < n_free {
                let Some(evict) = self.groups[g].evict.as_mut() else { break };
                let leaf = evict.order.pop();
                if leaf.is_none() && lowest_evictable.is_empty() {
                    lowest_evictable = self.lowest_evictable(groups, g);
                }
                let Some(block) = leaf.or_else(|| lowest_evictable.pop()) else { break };
                let node = blocks(&*groups[g]).node(block);
                if self.groups[g].windowed {
                    self.drop_block(groups, g, node);
                    self.prune(groups, node);
                } else {
                    self.drop_below(groups, node);
                }
            }
        }
        (self.n_evicted - before) as u32
    }

    /// For a full-attention group in which no evictable block is a leaf: the evictable blocks without an evictable block
    /// below them, in reverse eviction order, so that the last one is evicted first. All blocks below them are in use: by
    /// an export, or by a sequence that does not use the blocks above. (A sequence was forked before its sibling stored
    /// what both had computed, and the index already cached the first blocks from elsewhere.)
    ///
    /// Walks the index in O(nodes) and returns all candidates at once. One call of `evict_until_free` therefore walks
    /// once per level of such blocks, not once per block. Without forks and exports it never runs.
    fn lowest_evictable(&self, groups: &[Box<dyn Kind>], g: usize) -> Vec<u32> {
        let (kind_blocks, group) = (blocks(&*groups[g]), &self.groups[g]);
        let (Some(evict), true) = (&group.evict, kind_blocks.n_evictable() > 0) else { return Vec::new() };
        let evictable =
            || group.blocks.iter().filter_map(|&block| Some((block, kind_blocks.evictable_node(block)?)));
        let mut above_evictable = vec![false; self.tree.n_nodes()];
        for (_, node) in evictable() {
            let mut above = self.tree.parent(node);
            while above != NONE && !std::mem::replace(&mut above_evictable[above as usize], true) {
                above = self.tree.parent(above);
            }
        }
        let lowest = evictable().filter(|&(_, node)| !above_evictable[node as usize]).map(|(block, _)| block);
        let mut lowest: Vec<u32> = lowest.collect();
        lowest.sort_unstable_by_key(|&block| std::cmp::Reverse((evict.ranks[block as usize], block)));
        lowest
    }

    /// See [`Prefixes::forget`](crate::Prefixes::forget).
    pub fn forget(&mut self, groups: &mut [Box<dyn Kind>], salt: &str, at: Moment) -> Vec<CachedBlock> {
        self.moment = at;
        let Some(&root) = self.salts.get(salt) else { return Vec::new() };
        let mut below = vec![root];
        let mut next = 0;
        while let Some(&node) = below.get(next) {
            below.extend(self.tree.children(node));
            next += 1;
        }
        let (mut forgotten, mut kept) = (Vec::new(), BTreeSet::new());
        // What is removed on purpose was not evicted, and leaves no trace.
        let ghosts = std::mem::replace(&mut self.ghosts, Ghosts::new(0));
        // Children before their parents.
        for &node in below[1..].iter().rev() {
            let is_used = groups.iter().zip(&self.groups).any(|(kind, group)| {
                let block = group.block(node);
                block != NONE && blocks(&**kind).evictable_node(block).is_none()
            });
            if kept.contains(&node) || is_used {
                kept.insert(self.tree.parent(node));
                continue;
            }
            let cached = self.cached_block(node);
            // A node without blocks is one that a sequence is at, and goes with it.
            if !cached.blocks.is_empty() {
                for g in 0..groups.len() {
                    self.drop_block(groups, g, node);
                }
                self.prune(groups, node);
                forgotten.push(cached);
            }
        }
        self.ghosts = ghosts;
        forgotten
    }

    /// Drops `node` and all nodes below it from every group: nothing below a node can be hit without it. Blocks that
    /// a sequence uses stay with the sequence, uncached.
    pub(super) fn drop_below(&mut self, groups: &mut [Box<dyn Kind>], node: Node) {
        if self.tree.is_leaf(node) {
            for g in 0..groups.len() {
                self.drop_block(groups, g, node);
            }
            return self.prune(groups, node);
        }
        let mut below = vec![node];
        let mut next = 0;
        while let Some(&node) = below.get(next) {
            below.extend(self.tree.children(node));
            next += 1;
        }
        for &node in below.iter().rev() {
            for g in 0..groups.len() {
                self.drop_block(groups, g, node);
            }
            self.prune(groups, node);
        }
    }

    /// What `from` of a group stored, `to` stores now.
    pub fn moved(&mut self, kind_blocks: &dyn BlockKind, group: GroupId, from: u32, to: u32) {
        let node = kind_blocks.node(to);
        if node == NONE {
            return;
        }
        let of = &mut self.groups[group.0 as usize];
        of.set_block(node, to);
        if let Some(evict) = &mut of.evict {
            let rank = evict.ranks.get(from as usize).copied().unwrap_or_default();
            evict.set(to, rank);
            if evict.order.remove(from).is_some() {
                evict.order.insert(to, rank);
            }
            evict.policy.moved(from, to);
        }
        self.version += 1;
        if let Some(events) = &mut self.events {
            events.push(PrefixEvent::Moved { group, from, to, hash: self.tree.hash(node) });
        }
    }

    /// Drops the block of `node` from one group.
    fn drop_block(&mut self, groups: &mut [Box<dyn Kind>], g: usize, node: Node) {
        let group = &mut self.groups[g];
        let block = group.block(node);
        if block == NONE {
            return;
        }
        self.version += 1;
        group.set_block(node, NONE);
        if let Some(evict) = &mut group.evict {
            evict.order.remove(block);
            evict.policy.removed(block);
        }
        let kind_blocks = blocks_mut(&mut groups[g]);
        if kind_blocks.unindex(block) {
            kind_blocks.events().push(block, None, Change::Evict, ChangeReason::SpaceNeeded);
            self.n_evicted += 1;
        }
        if let Some(events) = &mut self.events {
            let (group, hash) = (GroupId(g as u16), self.tree.hash(node));
            events.push(PrefixEvent::Removed { group, block, hash });
        }
    }

    /// Removes `node` if no group has a block for it, then its ancestors likewise. The first ancestor that keeps a
    /// block and is now a leaf becomes evictable.
    pub(super) fn prune(&mut self, groups: &[Box<dyn Kind>], mut node: Node) {
        while self.tree.is_leaf(node) {
            let is_empty = self.groups.iter().all(|group| group.block(node) == NONE);
            let parent = self.tree.parent(node);
            if parent == NONE {
                return self.drop_root(node);
            }
            if !is_empty {
                for (kind, group) in groups.iter().zip(&mut self.groups).filter(|(_, group)| !group.windowed)
                {
                    let block = group.block(node);
                    if let Some(evict) = &mut group.evict
                        && block != NONE
                        && blocks(&**kind).evictable_node(block).is_some()
                    {
                        evict.offer(block);
                    }
                }
                return;
            }
            // If all groups have windows, a sequence can be at a node that has no blocks left. `set_leaf` prunes it
            // later.
            if self.ends.any(node) {
                return;
            }
            self.ghosts.remember(self.tree.hash(node));
            if self.tree.parent(parent) == NONE {
                self.first_blocks.remove(self.tree.key(node));
            }
            self.tree.remove(node);
            node = parent;
        }
    }

    /// Removes a salt that no sequence and no block needs. Users choose salts, so keeping them all would fill the
    /// memory.
    pub(super) fn drop_root(&mut self, root: Node) {
        if self.tree.is_leaf(root) && self.roots.get(&root).is_some_and(|(_, n)| *n == 0) {
            let (salt, _) = self.roots.remove(&root).expect("it was there");
            self.salts.remove(&salt);
            self.tree.remove(root);
        }
    }
}
