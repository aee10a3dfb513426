//! Block tables from reads, for kinds without block tables of their own, and the masks of draft trees.
use super::{BlockTables, NO_BLOCK, NotBlocks};
use crate::ids::NodeId;
use crate::kinds::Horizon;
use crate::plan::{GroupPlan, PlannedSpan};
use crate::reads::ReadItem;
use crate::run::CellRun;

impl GroupPlan {
    /// Calls `each` with every span whose queries see the item. Committed cells are seen by whole spans; nodes of a draft
    /// tree belong to one span.
    fn spans_of(&self, item: &ReadItem, mut each: impl FnMut(usize, &PlannedSpan)) {
        let spans = &self.tables.spans;
        let mut first_query = 0;
        while first_query < item.n_queries {
            let token = self.reads.order[(item.first_query + first_query) as usize];
            let i = spans.partition_point(|span| span.first_token <= token) - 1;
            each(i, &spans[i]);
            first_query += spans[i].n_tokens;
        }
    }

    /// Fills `mask_start` and `mask_bits`, and corrects `kv_len` of draft trees by their earlier nodes.
    pub(super) fn lower_masks(&self, out: &mut BlockTables) {
        let BlockTables { mask_start, mask_bits, kv_len, .. } = out;
        let trees = || self.tables.spans.iter().map(|span| (span, self.trees.branching(span)));
        let mut n_bits = 0;
        for ((span, nodes), kv_len) in trees().zip(kv_len) {
            mask_start.push(n_bits);
            if let Some(nodes) = nodes {
                *kv_len = span.start + nodes.len() as u32;
                n_bits += span.n_tokens * nodes.len() as u32;
            }
        }
        mask_start.push(n_bits);
        mask_bits.resize(n_bits.div_ceil(32) as usize, 0);
        for ((span, nodes), at) in trees().zip(mask_start) {
            let Some(nodes) = nodes else { continue };
            let (n_nodes, start) = (nodes.len() as u32, span.start);
            for (query, number) in (0..).zip(n_nodes - span.n_tokens..n_nodes) {
                let position = start + nodes[number as usize].depth;
                let mut ancestor = Some(NodeId(number));
                while let Some(NodeId(number)) = ancestor {
                    let node = &nodes[number as usize];
                    if self.tables.visibility.sees(position, start + node.depth) {
                        let bit = *at + query * n_nodes + number;
                        mask_bits[(bit / 32) as usize] |= 1 << (bit % 32);
                    }
                    ancestor = node.parent;
                }
            }
        }
    }

    /// Fills `table_start` and `blocks` from the reads, whose items come in index order.
    pub(super) fn lower_reads(&self, block: u32, out: &mut BlockTables) -> Result<(), NotBlocks> {
        out.lay_out(block);
        let skip_hidden = |span: &PlannedSpan, index: u32| {
            let see = Horizon::of(self.tables.visibility, span, &self.trees);
            if index >= see.sinks_end { index.max(see.some) } else { index }
        };
        out.next_index.extend(self.tables.spans.iter().map(|span| skip_hidden(span, 0)));
        let mut result = Ok(());
        for item in &self.reads.items {
            self.spans_of(item, |i, span| {
                if item.first_index >= span.start && self.trees.branching(span).is_some() {
                    return; // the indices of nodes are their numbers
                }
                let next = &mut out.next_index[i];
                if item.first_index < span.start {
                    if item.first_index != *next && result.is_ok() {
                        result = Err(NotBlocks::Removed { seq: span.seq, index: *next });
                    }
                    *next = skip_hidden(span, item.first_index + item.run.len);
                }
                let table = &mut out.blocks[out.table_start[i] as usize..out.table_start[i + 1] as usize];
                let placed = place(table, span, item.first_index, item.run, block);
                result = result.and(placed);
            });
        }
        for (i, span) in self.tables.spans.iter().enumerate() {
            for (number, node) in (0..).zip(self.trees.branching(span).unwrap_or_default()) {
                if (0..span.n_tokens).any(|query| out.mask(i, query, number)) {
                    let table = &mut out.blocks[out.table_start[i] as usize..out.table_start[i + 1] as usize];
                    let run = CellRun { start: node.cell, len: 1 };
                    result = result.and(place(table, span, span.start + number, run, block));
                }
            }
        }
        let ends = self.tables.spans.iter().zip(&out.next_index);
        if let Some((span, &index)) = ends.into_iter().find(|(span, next)| **next < span.start) {
            return result.and(Err(NotBlocks::Removed { seq: span.seq, index }));
        }
        result
    }
}

/// Enters the blocks of `run`, from index `first` on, into the table of a span that reads it.
fn place(
    table: &mut [u32],
    span: &PlannedSpan,
    first: u32,
    run: CellRun,
    block: u32,
) -> Result<(), NotBlocks> {
    let (end, cell) = (first + run.len, run.start);
    if first % block != cell % block {
        return Err(NotBlocks::Unaligned { seq: span.seq, index: first, cell });
    }
    for (n, column) in (0..).zip(first / block..end.div_ceil(block)) {
        let here = cell / block + n;
        let entry = &mut table[column as usize];
        if *entry != NO_BLOCK && *entry != here {
            return Err(NotBlocks::Scattered { seq: span.seq, index: first.max(column * block) });
        }
        *entry = here;
    }
    Ok(())
}
