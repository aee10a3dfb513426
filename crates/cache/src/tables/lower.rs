//! Block tables from reads, for kinds without block tables of their own, and the masks of draft trees.
use super::{BlockTables, NO_BLOCK, NotBlocks};
use crate::kinds::Horizon;
use crate::plan::{GroupPlan, PlannedSpan};
use crate::reads::{Mask, ReadItem};

impl GroupPlan {
    /// Calls `each` with every span whose queries see the item, and with the index of its first query in the item. An
    /// item is seen by whole spans.
    fn spans_of(&self, item: &ReadItem, mut each: impl FnMut(usize, &PlannedSpan, u32)) {
        let spans = &self.tables.spans;
        let mut first_query = 0;
        while first_query < item.n_queries {
            let token = self.reads.order[(item.first_query + first_query) as usize];
            let i = spans.partition_point(|span| span.first_token <= token) - 1;
            each(i, &spans[i], first_query);
            first_query += spans[i].n_tokens;
        }
    }

    /// Depths of the nodes of `span` below the committed end; `None` for a chain.
    fn depths_of(&self, span: &PlannedSpan) -> Option<&[u32]> {
        Some(&self.depths[span.parents()?])
    }

    /// Whether the causal rule says which nodes of `span` see each other: each node continues the one before it, and
    /// there are no earlier ones. `kv_len` is one past its last index.
    fn is_chain(&self, span: &PlannedSpan, kv_len: u32) -> bool {
        let Some(depths) = self.depths_of(span) else { return true };
        kv_len == span.start + span.n_tokens && (0..).zip(depths).all(|(i, &depth)| depth == i)
    }

    /// Fills `mask_start` and `mask_bits`, and corrects `kv_len` of draft trees by their earlier nodes.
    pub(super) fn lower_masks(&self, out: &mut BlockTables) {
        if self.tables.spans.iter().all(|span| span.parents().is_none()) {
            return out.mask_start.resize(out.kv_len.len() + 1, 0);
        }
        for item in &self.reads.items {
            self.spans_of(item, |i, _, _| {
                out.kv_len[i] = out.kv_len[i].max(item.first_index + item.run.len);
            });
        }
        let mut n_bits = 0;
        for (span, &kv_len) in self.tables.spans.iter().zip(&out.kv_len) {
            out.mask_start.push(n_bits);
            n_bits += if self.is_chain(span, kv_len) { 0 } else { span.n_tokens * (kv_len - span.start) };
        }
        out.mask_start.push(n_bits);
        out.mask_bits.resize(n_bits.div_ceil(32) as usize, 0);
        let BlockTables { mask_start, mask_bits, kv_len, .. } = out;
        for item in &self.reads.items {
            self.spans_of(item, |i, span, first_query| {
                if mask_start[i] == mask_start[i + 1] {
                    return;
                }
                let n_nodes = kv_len[i] - span.start;
                let first_node = span.start.saturating_sub(item.first_index).min(item.run.len);
                for (query, cell) in
                    (0..span.n_tokens).flat_map(|q| (first_node..item.run.len).map(move |c| (q, c)))
                {
                    if item.mask == Mask::All || self.reads.sees(item, first_query + query, cell) {
                        let node = item.first_index + cell - span.start;
                        let bit = mask_start[i] + query * n_nodes + node;
                        mask_bits[(bit / 32) as usize] |= 1 << (bit % 32);
                    }
                }
            });
        }
    }

    /// The committed indices that any query of `span` sees: `0..sinks_end` and `some..start`.
    fn horizon(&self, span: &PlannedSpan) -> Horizon {
        let shallowest = self.depths_of(span).map_or(0, |depths| depths.iter().copied().min().unwrap_or(0));
        Horizon::new(self.tables.visibility, span.start, shallowest, shallowest)
    }

    /// Fills `table_start` and `blocks` from the reads, whose items come in index order.
    pub(super) fn lower_reads(&self, block: u32, out: &mut BlockTables) -> Result<(), NotBlocks> {
        out.lay_out(block);
        let skip_hidden = |span: &PlannedSpan, index: u32| {
            let see = self.horizon(span);
            if index >= see.sinks_end { index.max(see.some) } else { index }
        };
        out.next_index.extend(self.tables.spans.iter().map(|span| skip_hidden(span, 0)));
        let mut result = Ok(());
        for item in &self.reads.items {
            self.spans_of(item, |i, span, _| {
                let next = &mut out.next_index[i];
                if item.first_index < span.start {
                    if item.first_index != *next && result.is_ok() {
                        result = Err(NotBlocks::Removed { seq: span.seq, index: *next });
                    }
                    *next = skip_hidden(span, item.first_index + item.run.len);
                }
                let table = &mut out.blocks[out.table_start[i] as usize..out.table_start[i + 1] as usize];
                if let (Ok(()), Err(why)) = (result, place(table, span, item, block)) {
                    result = Err(why);
                }
            });
        }
        let ends = self.tables.spans.iter().zip(&out.next_index);
        if let Some((span, &index)) = ends.into_iter().find(|(span, next)| **next < span.start) {
            return result.and(Err(NotBlocks::Removed { seq: span.seq, index }));
        }
        result
    }
}

/// Enters the blocks of an item's run into the table of a span that reads it.
fn place(table: &mut [u32], span: &PlannedSpan, item: &ReadItem, block: u32) -> Result<(), NotBlocks> {
    let (first, end, cell) = (item.first_index, item.first_index + item.run.len, item.run.start);
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
