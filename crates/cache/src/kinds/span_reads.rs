//! The reads of a step, in kinds that store many sequences as extents.
use super::draft_tree::{DraftTrees, TreeReads};
use super::extents::{Extent, Extents};
use super::shared_prefix::{self, Horizon};
use super::written::Written;
use super::{ReadScratch, Visibility, in_sequence_order, window_edge, written_items};
use crate::plan::PlannedSpan;
use crate::reads::{Mask, ReadItem, Reads};
use crate::run::CellRun;

/// What a step's queries see, as far as it does not lie in `extents`.
pub(super) struct StepReads<'s> {
    pub spans: &'s [PlannedSpan],
    pub visibility: Visibility,
    pub writes: &'s [CellRun],
    pub trees: &'s DraftTrees,
}

impl StepReads<'_> {
    /// Fills `reads`. `extents` returns the committed cells of a span's sequence by the span's index, as they are after
    /// the step's copies.
    pub fn fill<'e>(
        &self,
        extents: impl Fn(usize) -> &'e Extents,
        scratch: &mut ReadScratch,
        reads: &mut Reads,
    ) {
        let &StepReads { spans, visibility, writes, trees } = self;
        let horizon = |span: &PlannedSpan| Horizon::of(visibility, span, trees);
        let alone = spans.len() == 1;
        shared_prefix::share(scratch, reads, spans, &extents, horizon);
        let mut written = Written::new(writes);
        for (i, span) in spans.iter().enumerate() {
            let (first_query, see) = (scratch.first_query[i], horizon(span));
            let item = |extent: Extent, mask| {
                let (run, first_index) = (extent.run(), extent.position);
                ReadItem { first_query, n_queries: span.n_tokens, run, first_index, mask }
            };
            for extent in extents(i).within(see.all, see.shared_from(alone)) {
                reads.items.push(item(extent, Mask::All));
            }
            let edge = extents(i).within(see.some, see.all);
            match trees.branching(span) {
                None => {
                    reads.items.extend(
                        edge.map(|extent| item(extent, window_edge(visibility, span.start, extent.position))),
                    );
                    written_items(reads, first_query, span, visibility, &mut written);
                }
                Some(nodes) => {
                    let slots = &mut scratch.tree_slots;
                    let tree = TreeReads::new(nodes, slots, first_query, span, visibility, reads);
                    edge.for_each(|extent| tree.edge_item(reads, extent.run(), extent.position));
                    tree.node_items(reads);
                    written.each(span.n_tokens, |_| {});
                }
            }
        }
        in_sequence_order(reads);
    }
}
