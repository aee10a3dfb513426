//! Storing the full blocks of a sequence.
use super::{Index, Leaf, blocks, blocks_mut};
use crate::block_kind::BlockKind;
use crate::events::{Change, ChangeReason};
use crate::evict::Use;
use crate::ids::*;
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::content::Content;
use crate::prefix::tree::Node;
use crate::prefix::{Moment, Stored};
use crate::request::Refused;

impl Index {
    /// The first of the blocks `from..until` that is stored for this leaf with other content. O(stored blocks after
    /// `from`).
    fn contradicted(&mut self, leaf: Leaf, content: &Content<'_>, from: u32, until: u32) -> Option<u32> {
        let (keying, mut buffer) = (self.tree.keying(), std::mem::take(&mut self.buffer));
        let (mut node, mut first) = (leaf.node, None);
        for i in (from..leaf.n_blocks).rev() {
            if i < until && self.tree.key(node) != keying.key(content, i, &mut buffer) {
                first = Some(i);
            }
            node = self.tree.parent(node);
        }
        self.buffer = buffer;
        first
    }

    /// Blocks of `content` before position `from` are not compared if they are stored already.
    pub fn store(
        &mut self,
        groups: &mut [Box<dyn Kind>],
        seq: SeqId,
        from: u32,
        content: &Content<'_>,
        at: Moment,
    ) -> Result<Stored, Refused> {
        let mut leaf = *self.leaves.get(&seq).ok_or(Refused::UnknownSequence(seq))?;
        if !self.tree.keying().accepts(content) {
            return Err(Refused::Unsupported("this prefix index was made for content of another kind"));
        }
        let committed = groups[0].next_position(seq).unwrap_or(0) / self.block_tokens();
        let n_blocks = self.tree.keying().n_blocks(content).min(committed);
        let from = (from / self.block_tokens()).min(n_blocks);
        if let Some(i) = self.contradicted(leaf, content, from, n_blocks) {
            return Err(Refused::OtherContent { seq, position: i * self.block_tokens() });
        }
        if n_blocks <= leaf.n_blocks {
            return Ok(Stored { n_new: 0, n_known: n_blocks - from });
        }
        let (first, mut n_stored) = (leaf.n_blocks, 0);
        let tables = groups.iter().map(|kind| {
            blocks(&**kind).block_table(seq).unwrap_or_default()[first as usize..n_blocks as usize].to_vec()
        });
        let tables: Vec<Vec<u32>> = tables.collect();
        // A block that is indexed already must lie on this path. Otherwise `content` differs from what the block
        // stores.
        let keying = self.tree.keying();
        let (mut known, mut buffer) = (Some(leaf.node), std::mem::take(&mut self.buffer));
        for i in first..n_blocks {
            let key = keying.key(content, i, &mut buffer);
            known = known.and_then(|node| self.tree.child(node, key));
            for (kind, table) in groups.iter().zip(&tables) {
                let block = table[(i - first) as usize];
                let indexed = if block == NONE { NONE } else { blocks(&**kind).node(block) };
                if indexed != NONE && Some(indexed) != known {
                    self.buffer = buffer;
                    return Err(Refused::OtherContent { seq, position: i * keying.block_tokens });
                }
            }
        }
        self.buffer = buffer;
        self.moment = at;
        for i in first..n_blocks {
            let (node, is_new) = self.tree.child_or_new(leaf.node, content, i);
            if is_new && i == 0 {
                self.first_blocks.add(self.tree.key(node));
            }
            for (g, kind) in groups.iter_mut().enumerate() {
                let kind_blocks = blocks_mut(kind);
                let (own, known) = (tables[g][(i - first) as usize], self.groups[g].block(node));
                if own == NONE || own == known {
                    continue;
                }
                if known == NONE {
                    self.insert(kind_blocks, g, node, own, seq, i);
                } else {
                    // Two sequences computed the same block at the same time. The content is the same, so one copy is
                    // enough.
                    kind_blocks.replace(seq, i, known);
                    if let Some(evict) = &mut self.groups[g].evict {
                        evict.order.remove(known);
                    }
                }
            }
            n_stored += u32::from(is_new);
            leaf = Leaf { node, n_blocks: i + 1, ..leaf };
        }
        self.n_stored += u64::from(n_stored);
        self.set_leaf(groups, seq, Some(leaf));
        self.rank_newly_evictable(groups);
        Ok(Stored { n_new: n_stored, n_known: n_blocks - from.min(first) - n_stored })
    }

    /// Records that `block` of `group` stores the tokens of `node`.
    fn insert(
        &mut self,
        kind_blocks: &mut dyn BlockKind,
        group: usize,
        node: Node,
        block: u32,
        seq: SeqId,
        depth: u32,
    ) {
        self.version += 1;
        kind_blocks.index(block, node);
        kind_blocks.events().push(block, Some(seq), Change::Store, ChangeReason::Store);
        self.groups[group].set_block(node, block);
        if self.groups[group].evict.is_some() {
            self.tick += 1;
        }
        let cost = self.cost.of_block(depth, self.block_tokens());
        let stored = Use { cost, ..self.use_now(group) };
        if let Some(evict) = &mut self.groups[group].evict {
            let rank = evict.policy.stored(block, &stored);
            evict.set(block, rank);
        }
        // The key is copied only if the log is on.
        let stored = self.events.is_some().then(|| self.stored_event(group, block, node));
        if let Some((events, stored)) = self.events.as_mut().zip(stored) {
            events.push(stored);
        }
    }
}
