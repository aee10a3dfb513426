//! Draft trees: the nodes of the sequences that speculate, and which nodes each of them sees.
use super::Visibility;
use crate::ids::*;
use crate::plan::PlannedSpan;
use crate::reads::{Mask, ReadItem, Reads};
use crate::request::Refused;
use crate::run::CellRun;

/// A draft token that is neither accepted nor discarded yet. Its number is its index in the sequence's list of nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub cell: u32,
    pub parent: Option<NodeId>,
    /// Distance from the committed end in positions; 0 for a node that directly continues it.
    pub depth: u32,
}

/// The draft trees of a step: for every tree span all nodes of its sequence, those of the span last.
#[derive(Debug, Default)]
pub(crate) struct DraftTrees {
    nodes: Vec<Node>,
    /// For each tree span, in batch order: its `first_parent`, and where its nodes end in `nodes`.
    ends: Vec<(u32, u32)>,
}

impl DraftTrees {
    pub fn clear(&mut self) {
        self.nodes.clear();
        self.ends.clear();
    }

    /// Adds the tree of `span`, whose sequence has the nodes `earlier`. The new nodes get no cells yet. Refused if a
    /// parent is neither the committed end nor an earlier node.
    pub fn add(
        &mut self,
        span: &PlannedSpan,
        earlier: &[Node],
        parents: &[Option<NodeId>],
    ) -> Result<(), Refused> {
        let first = self.nodes.len();
        self.nodes.extend_from_slice(earlier);
        for &parent in parents {
            let nodes = &self.nodes[first..];
            let depth = match parent.map(|parent| nodes.get(parent.0 as usize)) {
                None => 0,
                Some(Some(parent)) => parent.depth + 1,
                Some(None) => {
                    return Err(Refused::BadParent { seq: span.seq, node: NodeId(nodes.len() as u32) });
                }
            };
            self.nodes.push(Node { cell: 0, parent, depth });
        }
        let first_parent = span.parents().map_or(0, |range| range.start as u32);
        self.ends.push((first_parent, self.nodes.len() as u32));
        Ok(())
    }

    /// Gives the new nodes of `spans` the cells that the step writes.
    pub fn place(&mut self, spans: &[PlannedSpan], writes: &[CellRun]) {
        if self.ends.is_empty() {
            return;
        }
        let (mut cells, mut ends) = (writes.iter().flat_map(|run| run.cells()), self.ends.iter());
        for span in spans {
            let n_tokens = span.n_tokens as usize;
            match span.parents().and_then(|_| ends.next()) {
                Some(&(_, end)) => {
                    let new = &mut self.nodes[end as usize - n_tokens..end as usize];
                    new.iter_mut().zip(&mut cells).for_each(|(node, cell)| node.cell = cell);
                }
                None => cells.by_ref().take(n_tokens).for_each(drop),
            }
        }
    }

    /// All nodes of the sequence of `span`, those of the span last; `None` for a chain.
    pub fn of(&self, span: &PlannedSpan) -> Option<&[Node]> {
        let first_parent = span.parents()?.start as u32;
        let tree = self.ends.partition_point(|(first, _)| *first < first_parent);
        let first = tree.checked_sub(1).map_or(0, |before| self.ends[before].1);
        Some(&self.nodes[first as usize..self.ends[tree].1 as usize])
    }

    /// Like [`of`](Self::of); `None` also if every node continues the one before it. Such a tree sees what a chain
    /// sees, and is read like one.
    pub fn branching(&self, span: &PlannedSpan) -> Option<&[Node]> {
        let before = |i: usize| i.checked_sub(1).map(|before| NodeId(before as u32));
        let is_chain = |nodes: &[Node]| {
            nodes.len() == span.n_tokens as usize
                && nodes.iter().enumerate().all(|(i, node)| node.parent == before(i))
        };
        self.of(span).filter(|nodes| !is_chain(nodes))
    }

    /// Distances of the span's tokens from the committed end, in positions, in batch order.
    pub fn depths(&self, span: &PlannedSpan) -> impl Iterator<Item = u32> {
        let new = self.of(span).map(|nodes| &nodes[nodes.len() - span.n_tokens as usize..]);
        (0..span.n_tokens).map(move |i| new.map_or(i, |new| new[i as usize].depth))
    }
}

/// Checks that `accepted` is a chain of `nodes` from the committed end on.
pub(crate) fn check_path(seq: SeqId, nodes: &[Node], accepted: &[NodeId]) -> Result<(), Refused> {
    let mut parent = None;
    for &node in accepted {
        if nodes.get(node.0 as usize).map(|node| node.parent) != Some(parent) {
            return Err(Refused::BadParent { seq, node });
        }
        parent = Some(node);
    }
    Ok(())
}

/// The query slots of one span's nodes, in depth-first order: the queries of every subtree have consecutive slots.
/// Reused.
#[derive(Debug, Default)]
pub(super) struct TreeSlots {
    /// `[nodes]`
    subtrees: Vec<Subtree>,
    /// `[queries]`: the node in each slot.
    nodes: Vec<u32>,
}

/// The queries among a node and its descendants.
#[derive(Clone, Copy, Debug)]
struct Subtree {
    /// First slot, relative to the span's first.
    first: u32,
    n_queries: u32,
    /// Depths of its queries.
    shallowest: u32,
    deepest: u32,
    /// First slot of the next child.
    next: u32,
}

impl TreeSlots {
    /// Lays out the last `n_queries` of `nodes`. O(nodes): parents come before their children.
    fn lay_out(&mut self, nodes: &[Node], n_queries: usize) {
        let first_new = nodes.len() - n_queries;
        self.subtrees.clear();
        self.subtrees.extend(nodes.iter().enumerate().map(|(i, node)| {
            let (n_queries, shallowest, deepest) =
                if i < first_new { (0, u32::MAX, 0) } else { (1, node.depth, node.depth) };
            Subtree { first: 0, n_queries, shallowest, deepest, next: 0 }
        }));
        for (i, node) in nodes.iter().enumerate().rev() {
            let Some(parent) = node.parent else { continue };
            let below = self.subtrees[i];
            let parent = &mut self.subtrees[parent.0 as usize];
            parent.n_queries += below.n_queries;
            parent.shallowest = parent.shallowest.min(below.shallowest);
            parent.deepest = parent.deepest.max(below.deepest);
        }
        self.nodes.clear();
        self.nodes.resize(n_queries, 0);
        let mut next_root = 0;
        for (i, node) in nodes.iter().enumerate() {
            let n_queries = self.subtrees[i].n_queries;
            let next = match node.parent {
                None => &mut next_root,
                Some(parent) => &mut self.subtrees[parent.0 as usize].next,
            };
            let first = std::mem::replace(next, *next + n_queries);
            let is_query = i >= first_new;
            (self.subtrees[i].first, self.subtrees[i].next) = (first, first + u32::from(is_query));
            if is_query {
                self.nodes[first as usize] = i as u32;
            }
        }
    }
}

/// Which cells of a part of the history the queries of a subtree see.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SeenBy {
    None,
    Some,
    All,
}

/// Adds the reads of one branching tree span.
pub(super) struct TreeReads<'t> {
    /// All nodes of the sequence, those of the span last.
    nodes: &'t [Node],
    slots: &'t TreeSlots,
    first_query: u32,
    span: &'t PlannedSpan,
    visibility: Visibility,
}

impl<'t> TreeReads<'t> {
    /// Lays out the queries of `span`, whose slots begin at `first_query`.
    pub fn new(
        nodes: &'t [Node],
        slots: &'t mut TreeSlots,
        first_query: u32,
        span: &'t PlannedSpan,
        visibility: Visibility,
        reads: &mut Reads,
    ) -> Self {
        slots.lay_out(nodes, span.n_tokens as usize);
        let first_new = nodes.len() as u32 - span.n_tokens;
        let order = &mut reads.order[first_query as usize..];
        for (order, node) in order.iter_mut().zip(&slots.nodes) {
            *order = span.first_token + (node - first_new);
        }
        TreeReads { nodes, slots, first_query, span, visibility }
    }

    fn position(&self, node: u32) -> u32 {
        self.span.start + self.nodes[node as usize].depth
    }
    fn is_new(&self, node: usize) -> bool {
        node >= self.nodes.len() - self.span.n_tokens as usize
    }

    /// Adds the item for the committed cells `run`, from position `first_position`, that the queries see only in part.
    /// The window's edge follows each node's depth, which a band mask cannot express.
    pub fn edge_item(&self, reads: &mut Reads, run: CellRun, first_position: u32) {
        let at = reads.next_bit();
        for &node in &self.slots.nodes {
            for position in first_position..first_position + run.len {
                reads.push_bit(self.visibility.sees(self.position(node), position));
            }
        }
        let (first_query, n_queries) = (self.first_query, self.span.n_tokens);
        let mask = Mask::Bits { at };
        reads.items.push(ReadItem { first_query, n_queries, run, first_index: first_position, mask });
    }

    /// Whether the queries in the subtree of `node` see the node.
    fn seen(&self, node: usize) -> SeenBy {
        let (subtree, start) = (&self.slots.subtrees[node], self.span.start);
        let sees = |depth: u32| self.visibility.sees(start + depth, self.position(node as u32));
        match subtree.n_queries {
            0 => SeenBy::None,
            _ if sees(subtree.deepest) => SeenBy::All,
            _ if sees(subtree.shallowest) => SeenBy::Some,
            _ => SeenBy::None,
        }
    }

    /// Whether `node` extends the item of the node before it: it is the only child that queries descend from, and lies
    /// in the next cell.
    fn continues(&self, node: usize) -> bool {
        let (before, own) = (self.slots.subtrees[node - 1], self.slots.subtrees[node]);
        let is_query = self.is_new(node - 1);
        self.nodes[node].parent == Some(NodeId(node as u32 - 1))
            && self.nodes[node].cell == self.nodes[node - 1].cell + 1
            && is_query == self.is_new(node)
            && own.n_queries + u32::from(is_query) == before.n_queries
            && self.seen(node) == self.seen(node - 1)
    }

    /// Adds the items for the cells of the nodes. Every query reads what it would read if its path were a chain: cells
    /// at their positions.
    ///
    /// ```text
    /// for each path of nodes without branches, in contiguous cells:
    ///     its own queries see a triangle of it; the queries below it, which follow them in slot order, see all of it
    ///     where the window or the sinks hide it from some of them: bits
    /// ```
    pub fn node_items(&self, reads: &mut Reads) {
        let mut first = 0;
        while first < self.nodes.len() {
            let mut end = first + 1;
            while end < self.nodes.len() && self.continues(end) {
                end += 1;
            }
            let (subtree, len) = (self.slots.subtrees[first], (end - first) as u32);
            let mask = match self.seen(first) {
                SeenBy::None => None,
                // Query `i` of the band sees `i + 1` cells: those below the path see all of them.
                SeenBy::All if len > 1 && self.is_new(first) => {
                    Some(Mask::Band { first: None, end: Some(1) })
                }
                SeenBy::All => Some(Mask::All),
                SeenBy::Some => Some(self.bits(reads, first, len)),
            };
            if let Some(mask) = mask {
                reads.items.push(ReadItem {
                    first_query: self.first_query + subtree.first,
                    n_queries: subtree.n_queries,
                    run: CellRun { start: self.nodes[first].cell, len },
                    first_index: self.position(first as u32),
                    mask,
                });
            }
            first = end;
        }
    }

    /// The bits of the path of `len` nodes from `first` on, for the queries of its subtree.
    fn bits(&self, reads: &mut Reads, first: usize, len: u32) -> Mask {
        let (at, is_new) = (reads.next_bit(), self.is_new(first));
        let subtree = self.slots.subtrees[first];
        let queries = &self.slots.nodes[subtree.first as usize..][..subtree.n_queries as usize];
        for (query, &node) in (0..).zip(queries) {
            for cell in 0..len {
                let is_ancestor = !is_new || query >= cell;
                let sees = self.visibility.sees(self.position(node), self.position(first as u32) + cell);
                reads.push_bit(is_ancestor && sees);
            }
        }
        Mask::Bits { at }
    }
}
