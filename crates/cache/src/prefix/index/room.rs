//! What goes, and when: ranks of idle blocks, eviction, and what an eviction leaves behind.
use super::{Index, paged, paged_mut};
use crate::events::{Change, Reason};
use crate::evict::Rank;
use crate::ids::GroupId;
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::tree::Node;
use crate::prefix::{Moment, PrefixEvent};

impl Index {
    /// Sequences have let go of blocks since the last time: rank them, and offer the evictable ones.
    pub fn settle(&mut self, groups: &mut [Box<dyn Kind>]) {
        for (g, kind) in groups.iter_mut().enumerate() {
            let paged = paged_mut(kind);
            if paged.has_settled() {
                continue;
            }
            let mut fell_idle = paged.take_fell_idle();
            let group = &mut self.groups[g];
            if let Some(evict) = &mut group.evict {
                let by_recency = evict.policy.by_recency();
                for &block in &fell_idle {
                    let Some(node) = paged.idle_node(block) else { continue };
                    if by_recency {
                        self.tick += 1;
                        evict.set(block, Rank::by_recency(self.tick));
                    }
                    if group.windowed || self.tree.is_leaf(node) {
                        evict.offer(block);
                    }
                }
            }
            fell_idle.clear();
            paged.give_back(fell_idle);
        }
    }

    /// Evict until `n_tokens` cells are free in every group, or nothing idle is left; how many blocks went.
    pub fn make_room(&mut self, groups: &mut [Box<dyn Kind>], n_tokens: u32, at: Moment) -> u32 {
        self.moment = at;
        let before = self.n_evicted;
        for g in 0..groups.len() {
            let mut orphans = Vec::new();
            while paged(&*groups[g]).free_cells() < n_tokens {
                let Some(evict) = self.groups[g].evict.as_mut() else { break };
                let leaf = evict.order.pop();
                if leaf.is_none() && orphans.is_empty() {
                    orphans = self.orphans(groups, g);
                }
                let Some(block) = leaf.or_else(|| orphans.pop()) else { break };
                let node = paged(&*groups[g]).node(block);
                if self.groups[g].windowed {
                    self.forget(groups, g, node);
                    self.prune(groups, node);
                } else {
                    self.forget_below(groups, node);
                }
            }
        }
        (self.n_evicted - before) as u32
    }

    /// Idle blocks of a full group when none of them is a leaf: those with nothing idle below them, in the order in
    /// which they go, the first one last. Everything below them is held, by a sequence that has copies of its own of
    /// them: it was forked before its like stored what both had computed, and the index knew the first blocks already
    /// from elsewhere.
    ///
    /// It walks the index, O(nodes), and gives all that can go, so that a call of `make_room` walks as often as there
    /// are such blocks above each other, and not once for each. Nobody who never forks pays.
    fn orphans(&self, groups: &[Box<dyn Kind>], g: usize) -> Vec<u32> {
        let (paged, group) = (paged(&*groups[g]), &self.groups[g]);
        let (Some(evict), true) = (&group.evict, paged.n_idle() > 0) else { return Vec::new() };
        let idle = || group.blocks.iter().filter_map(|&block| Some((block, paged.idle_node(block)?)));
        let mut above_idle = vec![false; self.tree.n_nodes()];
        for (_, node) in idle() {
            let mut above = self.tree.parent(node);
            while above != NONE && !std::mem::replace(&mut above_idle[above as usize], true) {
                above = self.tree.parent(above);
            }
        }
        let lowest = idle().filter(|&(_, node)| !above_idle[node as usize]).map(|(block, _)| block);
        let mut lowest: Vec<u32> = lowest.collect();
        lowest.sort_unstable_by_key(|&block| std::cmp::Reverse((evict.ranks[block as usize], block)));
        lowest
    }

    /// `node` and all below it go from every group: nothing below a node can be hit without it. Blocks that a sequence
    /// holds are its own from now on.
    fn forget_below(&mut self, groups: &mut [Box<dyn Kind>], node: Node) {
        if self.tree.is_leaf(node) {
            (0..groups.len()).for_each(|g| self.forget(groups, g, node));
            return self.prune(groups, node);
        }
        let mut below = vec![node];
        let mut next = 0;
        while let Some(&node) = below.get(next) {
            below.extend(self.tree.children(node));
            next += 1;
        }
        for &node in below.iter().rev() {
            (0..groups.len()).for_each(|g| self.forget(groups, g, node));
            self.prune(groups, node);
        }
    }

    /// One group loses its block of `node`.
    fn forget(&mut self, groups: &mut [Box<dyn Kind>], g: usize, node: Node) {
        let group = &mut self.groups[g];
        let block = group.block(node);
        if block == NONE {
            return;
        }
        self.version += 1;
        group.set_block(node, NONE);
        if let Some(evict) = &mut group.evict {
            evict.order.remove(block);
            evict.policy.forgotten(block);
        }
        let paged = paged_mut(&mut groups[g]);
        if paged.unindex(block) {
            paged.events.push(block, None, Change::Evict, Reason::MakeRoom);
            self.n_evicted += 1;
        }
        if let Some(events) = &mut self.events {
            let (group, hash) = (GroupId(g as u16), self.tree.hash(node));
            events.push(PrefixEvent::Removed { group, block, hash });
        }
    }

    /// Remove `node` if nothing is left of it, and then its parents likewise; offer the parent that has become a leaf.
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
                        && paged(&**kind).idle_node(block).is_some()
                    {
                        evict.offer(block);
                    }
                }
                return;
            }
            // Where all groups have windows, a sequence may stand where nothing is left; `set_leaf` comes back.
            if self.standing.any(node) {
                return;
            }
            self.ghosts.remember(self.tree.hash(node));
            if self.tree.parent(parent) == NONE {
                self.beginnings.remove(self.tree.key(node));
            }
            self.tree.remove(node);
            node = parent;
        }
    }

    /// Salts are the users' words: one that no sequence and no block needs goes, or they would fill the memory.
    pub(super) fn drop_root(&mut self, root: Node) {
        if self.tree.is_leaf(root) && self.roots.get(&root).is_some_and(|(_, n)| *n == 0) {
            let (salt, _) = self.roots.remove(&root).expect("it was there");
            self.salts.remove(&salt);
            self.tree.remove(root);
        }
    }
}
