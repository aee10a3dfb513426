//! The prefix index over the layer groups of one paged cache: which block of each group stores the tokens of a tree
//! node, which blocks can be evicted, and the deepest node of every open sequence.
mod counts;
mod evict;
mod explain;
mod lower;
mod store;
mod watch;

use super::content::{Content, Keying};
use super::ghosts::Ghosts;
use super::hits::Hits;
use super::tree::{Node, Tree, chain, salt_hash};
use super::{Lookup, Moment, PrefixEvent, PrefixReport, PrefixSpec, RecomputeCost};
use crate::block_kind::BlockKind;
use crate::evict::{EvictionPolicy, Order, Rank, Use};
use crate::ids::*;
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::request::Refused;
use counts::{FirstBlocks, SequenceEnds};
use std::collections::BTreeMap;

const PAGED: &str = "an index covers paged groups only";

pub(crate) struct Index {
    tree: Tree,
    /// For each root: its salt, and the number of sequences opened under it.
    roots: BTreeMap<Node, (Box<str>, u32)>,
    salts: BTreeMap<Box<str>, Node>,
    leaves: BTreeMap<SeqId, Leaf>,
    groups: Vec<GroupIndex>,
    only_windows: bool,
    ends: SequenceEnds,
    first_blocks: FirstBlocks,
    ghosts: Ghosts,
    cost: RecomputeCost,
    moment: Moment,
    tick: u64,
    n_stored: u64,
    n_evicted: u64,
    hits: Hits,
    /// Changes with every block that the index adds or drops.
    pub version: u64,
    path: Vec<Node>,
    buffer: Vec<u32>,
    pub events: Option<Vec<PrefixEvent>>,
}

/// The deepest node of a sequence. All its blocks up to that node are indexed.
#[derive(Clone, Copy)]
struct Leaf {
    root: Node,
    node: Node,
    n_blocks: u32,
}

struct GroupIndex {
    windowed: bool,
    blocks: Vec<u32>, // indexed by node; NONE if the group has no block for it
    block_bytes: u64,
    /// `None` in a group with unlimited capacity.
    evict: Option<Evict>,
}

/// Eviction state of a group. Its entries are block numbers.
struct Evict {
    policy: Box<dyn EvictionPolicy>,
    order: Order,
    ranks: Vec<Rank>,
}

impl Evict {
    /// Makes `block` evictable.
    fn offer(&mut self, block: u32) {
        let rank = self.ranks[block as usize];
        if !self.order.update(block, rank) {
            self.order.insert(block, rank);
        }
    }
    fn set(&mut self, block: u32, rank: Rank) {
        if self.ranks.len() <= block as usize {
            self.ranks.resize(block as usize + 1, Rank::default());
        }
        self.ranks[block as usize] = rank;
    }
}

impl GroupIndex {
    fn block(&self, node: Node) -> u32 {
        self.blocks.get(node as usize).copied().unwrap_or(NONE)
    }
    fn set_block(&mut self, node: Node, block: u32) {
        if self.blocks.len() <= node as usize {
            self.blocks.resize(node as usize + 1, NONE);
        }
        self.blocks[node as usize] = block;
    }
}

/// The result of walking the tree along a prompt.
struct Walk {
    /// Number of blocks that have a node.
    n_matched: u32,
    /// Number of blocks of the longest hit. Less than `n_matched` if a window group has dropped blocks that the next
    /// query would see.
    n_hit: u32,
    /// The last node that matched.
    node: Node,
    /// The last node of the hit.
    hit_node: Node,
}

fn blocks(group: &dyn Kind) -> &dyn BlockKind {
    group.blocks().expect(PAGED)
}
fn blocks_mut(group: &mut Box<dyn Kind>) -> &mut dyn BlockKind {
    group.blocks_mut().expect(PAGED)
}

impl Index {
    /// Makes an index over `groups`, with one policy per group.
    pub fn new(
        keying: Keying,
        spec: &PrefixSpec,
        groups: &[Box<dyn Kind>],
        policies: Vec<Box<dyn EvictionPolicy>>,
    ) -> Self {
        let groups = groups.iter().zip(policies).enumerate().map(|(g, (group, policy))| {
            let kind_blocks = blocks(&**group);
            GroupIndex {
                windowed: kind_blocks.window().is_some(),
                blocks: Vec::new(),
                block_bytes: spec.block_bytes.get(g).copied().unwrap_or(1),
                evict: (!kind_blocks.is_unlimited()).then(|| Evict {
                    policy,
                    order: Order::default(),
                    ranks: Vec::new(),
                }),
            }
        });
        let groups: Vec<GroupIndex> = groups.collect();
        Index {
            only_windows: groups.iter().all(|group| group.windowed),
            ends: SequenceEnds::default(),
            first_blocks: FirstBlocks::default(),
            tree: Tree::new(keying),
            roots: BTreeMap::new(),
            salts: BTreeMap::new(),
            leaves: BTreeMap::new(),
            groups,
            ghosts: Ghosts::new(spec.n_ghosts as usize),
            cost: spec.cost,
            moment: Moment::default(),
            tick: 0,
            n_stored: 0,
            n_evicted: 0,
            hits: Hits::default(),
            version: 0,
            path: Vec::new(),
            buffer: Vec::new(),
            events: None,
        }
    }

    fn block_tokens(&self) -> u32 {
        self.tree.keying().block_tokens
    }
    /// Blocks that a prompt may take from the index: whole blocks, never the one with its last token.
    fn n_usable(&self, content: &Content<'_>) -> u32 {
        let without_last = content.n_tokens().saturating_sub(1) / self.block_tokens();
        self.tree.keying().n_blocks(content).min(without_last)
    }
    /// A use of a block of group `g` at the current time. `tick` is the last tick that was used; the caller fills in
    /// the cost.
    fn use_now(&self, g: usize) -> Use {
        let bytes = self.groups[g].block_bytes;
        Use { now_ns: self.moment.now_ns, tick: self.tick, cost: 0.0, bytes, next_use: None }
    }

    fn walk(
        &self,
        groups: &[Box<dyn Kind>],
        root: Node,
        content: &Content<'_>,
        buffer: &mut Vec<u32>,
        mut visit: impl FnMut(Node),
    ) -> Walk {
        let keying = self.tree.keying();
        let n_usable = self.n_usable(content);
        // For each window group: its paged space, its group index, the number of consecutive blocks present up to
        // here, and the number present from the beginning on.
        let mut windows: Vec<(&dyn BlockKind, &GroupIndex, u32, u32)> = Vec::new();
        for (kind, group) in groups.iter().zip(&self.groups).filter(|(_, group)| group.windowed) {
            windows.push((blocks(&**kind), group, 0, 0));
        }
        let (mut node, mut n_matched, mut n_hit, mut hit_node) = (root, 0, 0, root);
        while n_matched < n_usable {
            let key = keying.key(content, n_matched, buffer);
            let Some(child) = self.tree.child(node, key) else { break };
            (node, n_matched) = (child, n_matched + 1);
            visit(node);
            let mut whole = true;
            // Groups with a window of 1 need no blocks. But a hit needs a block in at least one group.
            let mut has_block = !self.only_windows;
            for (kind_blocks, group, consecutive, from_start) in &mut windows {
                let here = group.block(node) != NONE;
                has_block |= here;
                if here && *from_start + 1 == n_matched {
                    *from_start = n_matched;
                }
                *consecutive = if here { *consecutive + 1 } else { 0 };
                let first =
                    kind_blocks.first_seen(n_matched * keying.block_tokens).max(kind_blocks.sink_blocks());
                whole &= *from_start >= kind_blocks.sink_blocks().min(n_matched)
                    && *consecutive >= n_matched.saturating_sub(first);
            }
            if whole && has_block {
                (n_hit, hit_node) = (n_matched, node);
            }
        }
        Walk { n_matched, n_hit, node, hit_node }
    }

    pub fn accepts(&self, content: &Content<'_>) -> bool {
        self.tree.keying().accepts(content)
    }

    pub fn lookup(&self, groups: &[Box<dyn Kind>], salt: &str, content: &Content<'_>) -> Lookup {
        let Some(&root) = self.salts.get(salt) else { return Lookup::default() };
        let walk = self.walk(groups, root, content, &mut Vec::new(), |_| ());
        // Walk from the hit node back to the root.
        let n_evictable = groups.iter().zip(&self.groups).map(|(kind, group)| {
            let kind_blocks = blocks(&**kind);
            let (mut node, mut n_evictable) = (walk.hit_node, 0);
            for i in (0..walk.n_hit).rev() {
                let is_evictable = kind_blocks.evictable_node(group.block(node)).is_some();
                n_evictable += u32::from(is_evictable && kind_blocks.is_seen(i, walk.n_hit));
                node = self.tree.parent(node);
            }
            n_evictable
        });
        let n_evictable = n_evictable.max().unwrap_or(0);
        Lookup {
            hit_tokens: walk.n_hit * self.block_tokens(),
            evictable_tokens: n_evictable * self.block_tokens(),
        }
    }

    pub fn lookup_blocks(
        &self,
        groups: &[Box<dyn Kind>],
        group: GroupId,
        salt: &str,
        content: &Content<'_>,
    ) -> Vec<Option<u32>> {
        let at = group.0 as usize;
        let (Some(kind), Some(of), Some(&root)) = (groups.get(at), self.groups.get(at), self.salts.get(salt))
        else {
            return Vec::new();
        };
        let mut nodes = Vec::new();
        let walk = self.walk(groups, root, content, &mut Vec::new(), |node| nodes.push(node));
        nodes.truncate(walk.n_hit as usize);
        let kind_blocks = blocks(&**kind);
        let block = |(i, node): (u32, Node)| {
            let block = of.block(node);
            (block != NONE && kind_blocks.is_seen(i, walk.n_hit)).then_some(block)
        };
        (0..).zip(nodes).map(block).collect()
    }

    pub fn hash(&self, salt: &str, content: &Content<'_>) -> u64 {
        let (keying, mut buffer) = (self.tree.keying(), Vec::new());
        let blocks = 0..keying.n_blocks(content);
        blocks.fold(salt_hash(salt), |hash, i| chain(hash, keying.key(content, i, &mut buffer)))
    }

    /// The hash of every whole block of `content`, in order.
    pub fn hashes(&self, salt: &str, content: &Content<'_>) -> Vec<u64> {
        let (keying, mut buffer, mut hash) = (self.tree.keying(), Vec::new(), salt_hash(salt));
        let blocks = 0..keying.n_blocks(content);
        let next = |i| {
            hash = chain(hash, keying.key(content, i, &mut buffer));
            hash
        };
        blocks.map(next).collect()
    }

    fn root(&mut self, salt: &str) -> Node {
        if let Some(&root) = self.salts.get(salt) {
            return root;
        }
        let root = self.tree.new_root(salt_hash(salt));
        self.salts.insert(salt.into(), root);
        self.roots.insert(root, (salt.into(), 0));
        root
    }

    fn set_leaf(&mut self, groups: &[Box<dyn Kind>], seq: SeqId, leaf: Option<Leaf>) {
        if let Some(leaf) = leaf {
            self.roots.get_mut(&leaf.root).expect("leaves stand under roots").1 += 1;
            self.ends.add(leaf.node);
        }
        let before = match leaf {
            Some(leaf) => self.leaves.insert(seq, leaf),
            None => self.leaves.remove(&seq),
        };
        if let Some(Leaf { root, node, .. }) = before {
            self.roots.get_mut(&root).expect("leaves stand under roots").1 -= 1;
            self.ends.remove(node);
            // This node may have been kept only because the sequence was at it: all window groups may have dropped
            // its blocks.
            if self.only_windows && node != root {
                self.prune(groups, node);
            }
            self.drop_root(root);
        }
    }

    /// Registers the new, empty sequence `seq`.
    pub fn opened_empty(&mut self, groups: &[Box<dyn Kind>], seq: SeqId, salt: &str) {
        let root = self.root(salt);
        self.set_leaf(groups, seq, Some(Leaf { root, node: root, n_blocks: 0 }));
    }

    /// The salt that `seq` was opened under.
    pub fn salt_of(&self, seq: SeqId) -> Option<&str> {
        let leaf = self.leaves.get(&seq)?;
        self.roots.get(&leaf.root).map(|(salt, _)| &**salt)
    }

    /// `is_first`: the prompt was not opened before, so the hit statistics count it.
    pub fn open(
        &mut self,
        groups: &mut [Box<dyn Kind>],
        seq: SeqId,
        salt: &str,
        content: &Content<'_>,
        at: Moment,
        is_first: bool,
    ) -> Result<Lookup, Refused> {
        if groups[0].next_position(seq).is_some() {
            return Err(Refused::SequenceExists(seq));
        }
        if !self.tree.keying().accepts(content) {
            return Err(Refused::Unsupported("this prefix index was made for content of another kind"));
        }
        self.moment = at;
        let root = self.root(salt);
        let (mut path, mut buffer) = (std::mem::take(&mut self.path), std::mem::take(&mut self.buffer));
        path.clear();
        let walk = self.walk(groups, root, content, &mut buffer, |node| path.push(node));
        self.buffer = buffer;
        path.truncate(walk.n_hit as usize);
        let mut n_evictable = 0;
        for (g, kind) in groups.iter_mut().enumerate() {
            let kind_blocks = blocks_mut(kind);
            let table = path.iter().map(|&node| self.groups[g].block(node)).collect();
            n_evictable = n_evictable.max(kind_blocks.open(seq, table));
            self.hit(g, kind_blocks.block_table(seq).unwrap_or_default());
        }
        let node = path.last().copied().unwrap_or(root);
        self.path = path;
        self.set_leaf(groups, seq, Some(Leaf { root, node, n_blocks: walk.n_hit }));
        let block_tokens = self.block_tokens();
        if is_first && content.n_tokens() > 0 && !matches!(content, Content::Unknown { .. }) {
            self.hits.count(content.n_tokens(), walk.n_hit * block_tokens);
        }
        Ok(Lookup { hit_tokens: walk.n_hit * block_tokens, evictable_tokens: n_evictable * block_tokens })
    }

    /// Records that a new sequence uses `blocks` of group `g`.
    fn hit(&mut self, g: usize, blocks: &[u32]) {
        let (windowed, mut used) = (self.groups[g].windowed, self.use_now(g));
        let Some(evict) = &mut self.groups[g].evict else { return };
        // In a full-attention group the eviction order contains leaves only, and only the last block can be a leaf.
        let first_offered = if windowed { 0 } else { blocks.len().saturating_sub(1) };
        for &block in blocks[first_offered..].iter().filter(|&&block| block != NONE) {
            evict.order.remove(block);
        }
        if !evict.policy.by_recency() {
            for (depth, &block) in blocks.iter().enumerate().filter(|(_, block)| **block != NONE) {
                used.tick += 1;
                used.cost = self.cost.of_block(depth as u32, self.tree.keying().block_tokens);
                let rank = evict.policy.used(block, &used);
                evict.set(block, rank);
            }
        }
        self.tick = used.tick;
    }

    /// Registers the fork `dst` of `src`, up to where `dst` ends.
    pub fn forked(&mut self, groups: &[Box<dyn Kind>], src: SeqId, dst: SeqId) {
        let is_empty = groups[0].next_position(dst) == Some(0);
        if is_empty && self.leaves.contains_key(&dst) {
            return; // nothing was copied, and the sequence has a salt already
        }
        if let Some(leaf) = self.leaves.get(&src).copied() {
            self.set_leaf(groups, dst, Some(leaf));
            self.shortened(groups, dst);
        }
    }

    /// Updates the leaf of `seq`, which may be shorter than before, or gone.
    pub fn shortened(&mut self, groups: &[Box<dyn Kind>], seq: SeqId) {
        let Some(mut leaf) = self.leaves.get(&seq).copied() else { return };
        let Some(next) = groups[0].next_position(seq) else { return self.set_leaf(groups, seq, None) };
        while leaf.n_blocks > next / self.block_tokens() {
            leaf.node = self.tree.parent(leaf.node);
            leaf.n_blocks -= 1;
        }
        self.set_leaf(groups, seq, Some(leaf));
    }

    /// Updates all leaves: any sequence may be shorter than before, or gone.
    pub fn all_shortened(&mut self, groups: &[Box<dyn Kind>]) {
        let open: Vec<SeqId> = self.leaves.keys().copied().collect();
        open.into_iter().for_each(|seq| self.shortened(groups, seq));
    }

    pub fn report(&self) -> PrefixReport {
        PrefixReport {
            n_stored: self.n_stored,
            n_evicted: self.n_evicted,
            n_salts: self.salts.len() as u32,
            policy: self.groups.iter().find_map(|g| Some(g.evict.as_ref()?.policy.name())),
            opened: self.hits.all,
            recent: self.hits.recent,
        }
    }

    pub fn clear(&mut self) {
        self.version += 1;
        self.tree.clear();
        self.roots.clear();
        self.salts.clear();
        self.leaves.clear();
        self.ends = SequenceEnds::default();
        self.first_blocks = FirstBlocks::default();
        self.ghosts.clear();
        for group in &mut self.groups {
            if let Some(evict) = &mut group.evict {
                for &block in group.blocks.iter().filter(|&&block| block != NONE) {
                    evict.order.remove(block);
                    evict.policy.removed(block);
                }
            }
            group.blocks.clear();
        }
        if let Some(events) = &mut self.events {
            events.push(PrefixEvent::Cleared);
        }
    }
}
