//! Block tables: the form of a step's reads that paged attention kernels take (`block_table`, `slot_mapping`,
//! `cu_seqlens` and `seq_lens` of vLLM).
//!
//! A [`GroupPlan`] has them in two forms: [`GroupPlan::tables`] gives whole tables, and [`GroupPlan::edits_since`] gives the
//! changes of a table that stays on a device. Both follow from [`Step::with_tables`](crate::Step::with_tables).
mod lower;
mod resident;

use crate::ids::SeqId;
use crate::kinds::Visibility;
use crate::plan::{GroupPlan, PlannedSpan, Spans};
pub(crate) use resident::{Resident, unique};

/// Stands for the block of positions that no query of the step sees, because they have left the sliding window.
pub const NO_BLOCK: u32 = u32::MAX;

/// The block tables of one layer group in one step. Buffers are reused from step to step.
///
/// Index `c` of span `i`, for `c < kv_len[i]`, lies in cell `blocks[table_start[i] + c / block] * block + c % block`.
/// An index is a position, or for a speculative node the committed end plus the node's number. A query at position `p`
/// (see [`StepPlan::positions`](crate::StepPlan::positions)) sees index `c` if the [`Visibility`] rule of the group
/// shows it position `c`. In spans with mask bits this is true of committed tokens only; the bits decide about nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTables {
    /// `[tokens]`: the cell of each new token of the batch.
    pub slots: Vec<u32>,
    /// `[spans + 1]`: the first token of each span, then the number of tokens.
    pub query_start: Vec<u32>,
    /// `[spans + 1]`: where the blocks of each span start in `blocks`, then their number.
    pub table_start: Vec<u32>,
    /// The blocks of each span, in position order; [`NO_BLOCK`] where no query of the span reads any.
    pub blocks: Vec<u32>,
    /// `[spans]`: one past the last index of the sequence, the new tokens included.
    pub kv_len: Vec<u32>,
    /// `[spans + 1]`: where the mask of each span starts in `mask_bits`, in bits. Chains have no mask.
    pub mask_start: Vec<u32>,
    /// For each draft tree that is not a chain, row-major bits `[queries][nodes]`, in words of 32 bits from the lowest
    /// bit on. The nodes are all speculative nodes of the sequence; the last ones are the queries themselves.
    pub mask_bits: Vec<u32>,
    /// Scratch, `[spans]`: the next committed index that the walk over the reads must meet.
    next_index: Vec<u32>,
}

/// One entry of a table that stays on a device: `block` stores the positions `column * block_tokens..` of the sequence
/// in `row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // documented above
pub struct TableEdit {
    pub row: u32,
    pub column: u32,
    pub block: u32,
}

/// Why the reads of a step cannot be given as block tables. The runs of [`Reads`](crate::Reads) can always describe
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum NotBlocks {
    /// [`Step::with_tables`](crate::Step::with_tables) has not been called for this plan.
    NotFilled,
    /// The blocks of the cache are not a multiple of the blocks asked for.
    BlockSize { cache: u32, asked: u32 },
    /// The token's cell has another offset in its block than the token has in the sequence.
    Unaligned { seq: SeqId, index: u32, cell: u32 },
    /// The tokens from `index` on do not lie in the block in which their predecessors lie.
    Scattered { seq: SeqId, index: u32 },
    /// A query would see `index`, which was removed from the middle of the sequence.
    Removed { seq: SeqId, index: u32 },
}

impl std::fmt::Display for NotBlocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotBlocks::NotFilled => f.write_str("the plan has no block tables: call `with_tables` first"),
            NotBlocks::BlockSize { cache, asked } => write!(
                f,
                "the cache has blocks of {cache} tokens, and blocks of {asked} were asked for: use a divisor of {cache}"
            ),
            NotBlocks::Unaligned { seq, index, cell } => write!(
                f,
                "token {index} of sequence {seq} lies in cell {cell}, at another offset of its block: use a paged cache"
            ),
            NotBlocks::Scattered { seq, index } => {
                write!(f, "the block with token {index} of sequence {seq} is scattered: use a paged cache")
            }
            NotBlocks::Removed { seq, index } => {
                write!(f, "token {index} of sequence {seq} was removed, which a block table cannot express")
            }
        }
    }
}
impl std::error::Error for NotBlocks {}

/// The source of a plan's tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Source {
    #[default]
    NotFilled,
    /// The kind has block tables of its own: the rows of [`Resident`].
    Rows,
    /// The reads, whose runs may happen to be whole blocks.
    Reads,
}

/// What a plan remembers for its block tables.
#[derive(Debug, Default)]
pub(crate) struct PlanTables {
    source: Source,
    visibility: Visibility,
    spans: Vec<PlannedSpan>,
    /// The rows of a device that has applied all edits.
    pub resident: Resident,
}

impl PlanTables {
    /// Drops the tables of the previous step. The resident rows stay.
    pub fn restart(&mut self) {
        self.source = Source::NotFilled;
    }
    pub fn fill(&mut self, spans: &Spans, visibility: Visibility, has_rows: bool) {
        self.source = if has_rows { Source::Rows } else { Source::Reads };
        self.visibility = visibility;
        self.spans.clear();
        self.spans.extend_from_slice(&spans.list);
        if !has_rows {
            self.resident = Resident::default();
        }
    }
}

impl GroupPlan {
    /// Writes the step's block tables for blocks of `block` cells to `out`. Works if the cache hands out such blocks or
    /// multiples of them (`paged`), and otherwise if the cells of every sequence happen to be whole blocks. On an
    /// error, `out` has no meaning. O(blocks in context).
    pub fn tables(&self, block: u32, out: &mut BlockTables) -> Result<(), NotBlocks> {
        assert!(block > 0, "a block holds at least one token");
        self.lengths(out)?;
        match self.tables.source {
            Source::NotFilled => Err(NotBlocks::NotFilled),
            Source::Rows => self.tables.resident.lower(block, out),
            Source::Reads => self.lower_reads(block, out),
        }
    }

    /// The part of [`tables`](Self::tables) that a device with a resident table needs in every step: all but
    /// `table_start` and `blocks`, which are left empty. O(tokens of the batch).
    pub fn lengths(&self, out: &mut BlockTables) -> Result<(), NotBlocks> {
        if self.tables.source == Source::NotFilled {
            return Err(NotBlocks::NotFilled);
        }
        out.clear();
        out.slots.extend(self.writes.iter().flat_map(|run| run.cells()));
        for span in &self.tables.spans {
            out.query_start.push(span.first_token);
            out.kv_len.push(span.start + span.n_tokens);
        }
        out.query_start.push(out.slots.len() as u32);
        self.lower_masks(out);
        Ok(())
    }

    /// The number of this plan's table among all tables of the process. A device that has taken the table remembers
    /// it, and asks for the edits since then next time. `None` if the kind has no block tables of its own; then there
    /// are no edits either, only [`tables`](Self::tables).
    pub fn table_epoch(&self) -> Option<u64> {
        (self.tables.source == Source::Rows).then(|| self.tables.resident.epoch())
    }

    /// `[spans]`: the row of each span in the resident table. A sequence keeps its row while steps of this plan contain
    /// it. Empty if the kind has no block tables of its own.
    pub fn table_rows(&self) -> &[u32] {
        if self.tables.source == Source::Rows { self.tables.resident.span_rows() } else { &[] }
    }

    /// Appends the edits that turn the table of `epoch` into this plan's, and returns `true`. If only the table of an
    /// older step is known, or that of another plan, it appends every entry of the whole table and returns `false`.
    /// Entries beyond the end of a sequence have no meaning, before and after. Blocks have the size of the cache's own.
    ///
    /// Edits stay right if the step is dropped: the next step writes what it needs again. O(edits).
    pub fn edits_since(&self, epoch: u64, out: &mut Vec<TableEdit>) -> bool {
        self.tables.source == Source::Rows && self.tables.resident.edits_since(epoch, out)
    }
}

impl BlockTables {
    /// The blocks of span `i`, in position order.
    pub fn blocks_of(&self, i: usize) -> &[u32] {
        &self.blocks[self.table_start[i] as usize..self.table_start[i + 1] as usize]
    }
    /// Number of speculative nodes that the mask of span `i` covers; 0 if the span has no mask.
    pub fn n_masked(&self, i: usize) -> u32 {
        let n_queries = self.query_start[i + 1] - self.query_start[i];
        (self.mask_start[i + 1] - self.mask_start[i]) / n_queries.max(1)
    }
    /// Whether query `query` of span `i` sees node `node`, by the mask of the span.
    pub fn mask(&self, i: usize, query: u32, node: u32) -> bool {
        let bit = self.mask_start[i] + query * self.n_masked(i) + node;
        self.mask_bits[(bit / 32) as usize] >> (bit % 32) & 1 == 1
    }

    fn clear(&mut self) {
        let BlockTables {
            slots,
            query_start,
            table_start,
            blocks,
            kv_len,
            mask_start,
            mask_bits,
            next_index,
        } = self;
        for list in [slots, query_start, table_start, blocks, kv_len, mask_start, mask_bits, next_index] {
            list.clear();
        }
    }
    /// Lays out the tables of all spans from `kv_len`, for blocks of `block` cells, without any block yet.
    fn lay_out(&mut self, block: u32) {
        let mut end = 0;
        self.table_start.push(0);
        for kv_len in &self.kv_len {
            end += kv_len.div_ceil(block);
            self.table_start.push(end);
        }
        self.blocks.resize(end as usize, NO_BLOCK);
    }
}
