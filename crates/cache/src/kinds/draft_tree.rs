//! Speculative nodes of a draft tree: their parents, and which nodes each of them sees.
use super::{ReadScratch, Visibility};
use crate::ids::*;
use crate::plan::{PlannedSpan, Spans};
use crate::reads::{Mask, ReadItem, Reads};
use crate::request::Refused;
use crate::run::CellRun;

/// A draft token that is neither accepted nor discarded yet. Its number is its index in the sequence's list of nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub cell: u32,
    pub parent: Option<NodeId>,
    /// Distance from the committed end in positions; 0 for a node that directly continues it.
    pub depth: u32,
}

/// Appends the depths of `span`'s nodes to `depths`. Refused if a parent is neither the committed end nor an earlier
/// node.
pub(super) fn check_parents(
    nodes: &[Node],
    span: &PlannedSpan,
    parents: &[Option<NodeId>],
    depths: &mut Vec<u32>,
) -> Result<(), Refused> {
    let first = depths.len();
    for (i, parent) in parents.iter().enumerate() {
        let number = nodes.len() + i;
        let depth = match parent.map(|parent| parent.0 as usize) {
            None => 0,
            Some(parent) if parent < nodes.len() => nodes[parent].depth + 1,
            Some(parent) if parent < number => depths[first + parent - nodes.len()] + 1,
            Some(_) => return Err(Refused::BadParent { seq: span.seq, node: NodeId(number as u32) }),
        };
        depths.push(depth);
    }
    Ok(())
}

/// Checks that `accepted` is a chain from the committed end on, over `nodes` and then nodes with the parents `planned`.
pub(super) fn check_path(
    seq: SeqId,
    nodes: &[Node],
    planned: &[Option<NodeId>],
    accepted: &[NodeId],
) -> Result<(), Refused> {
    let parent_of = |node: NodeId| match nodes.get(node.0 as usize) {
        Some(node) => Some(node.parent),
        None => planned.get(node.0 as usize - nodes.len()).copied(),
    };
    let mut parent = None;
    for &node in accepted {
        if parent_of(node) != Some(parent) {
            return Err(Refused::BadParent { seq, node });
        }
        parent = Some(node);
    }
    Ok(())
}

/// True if every node continues the one before it. Such a draft tree sees what a chain sees, and is read like one.
pub(super) fn is_chain(nodes: &[Node], parents: &[Option<NodeId>]) -> bool {
    let before = |i: usize| i.checked_sub(1).map(|b| NodeId(b as u32));
    nodes.is_empty() && parents.iter().enumerate().all(|(i, parent)| *parent == before(i))
}

/// Adds the item for the committed cells `run`, from position `first_position`, that nodes at `depths` see only in
/// part. The window's edge follows each node's depth, which a band mask cannot express.
pub(super) fn edge_item(
    reads: &mut Reads,
    first_query: u32,
    start: u32,
    depths: &[u32],
    visibility: Visibility,
    run: CellRun,
    first_position: u32,
) {
    let at = reads.next_bit();
    for depth in depths {
        for position in first_position..first_position + run.len {
            reads.push_bit(visibility.sees(start + depth, position));
        }
    }
    let n_queries = depths.len() as u32;
    reads.items.push(ReadItem {
        first_query,
        n_queries,
        run,
        first_index: first_position,
        mask: Mask::Bits { at },
    });
}

/// Adds the items for the cells of the nodes. `scratch.nodes` holds all nodes of the sequence in number order, those
/// of `span` last.
///
/// ```text
/// for each query: walk to the root, mark the ancestors that the window or the sinks leave visible
/// for each run of contiguous node cells:
///     cut it where the visibility of the cells changes between no query, all queries and some queries
///     no query: no item; all queries: All; some: Bits
/// ```
pub(super) fn node_items(
    reads: &mut Reads,
    scratch: &mut ReadScratch,
    first_query: u32,
    span: &PlannedSpan,
    visibility: Visibility,
) {
    let nodes = &scratch.nodes;
    let (n_nodes, n_queries) = (nodes.len(), span.n_tokens as usize);
    let seen = &mut scratch.seen;
    seen.clear();
    seen.resize(n_nodes * n_queries, false);
    for query in 0..n_queries {
        let number = n_nodes - n_queries + query;
        let position = span.start + nodes[number].depth;
        let mut node = Some(NodeId(number as u32));
        while let Some(NodeId(n)) = node {
            let ancestor = nodes[n as usize];
            seen[query * n_nodes + n as usize] = visibility.sees(position, span.start + ancestor.depth);
            node = ancestor.parent;
        }
    }
    let seen_by = |node: usize| (0..n_queries).filter(|query| seen[query * n_nodes + node]).count();
    let class = |node: usize| match seen_by(node) {
        0 => 0,
        n if n == n_queries => 1,
        _ => 2,
    };
    let mut first = 0;
    while first < n_nodes {
        let kind = class(first);
        let mut end = first + 1;
        while end < n_nodes && nodes[end].cell == nodes[end - 1].cell + 1 && class(end) == kind {
            end += 1;
        }
        if kind != 0 {
            let mask = if kind == 1 { Mask::All } else { Mask::Bits { at: reads.next_bit() } };
            if kind == 2 {
                for query in 0..n_queries {
                    for node in first..end {
                        reads.push_bit(seen[query * n_nodes + node]);
                    }
                }
            }
            reads.items.push(ReadItem {
                first_query,
                n_queries: span.n_tokens,
                run: CellRun { start: nodes[first].cell, len: (end - first) as u32 },
                first_index: span.start + first as u32,
                mask,
            });
        }
        first = end;
    }
}

/// The parents that `span` proposes; `None` if it is a chain.
pub(super) fn parents_of<'s>(spans: &'s Spans, span: &PlannedSpan) -> Option<&'s [Option<NodeId>]> {
    span.parents().map(|range| &spans.parents[range])
}
