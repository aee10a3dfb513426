//! Block tables of steps, story by story. `paged/` and `properties.rs` compare them with the reference models.

use crate::stepping::*;
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::DeviceTable;

const GROUP: GroupId = GroupId(0);

fn paged(capacity_tokens: u32, window: Option<u32>) -> Stepping {
    let visibility = Visibility { window, sinks: 0 };
    let groups = vec![GroupSpec { capacity_tokens, visibility, max_step_tokens: capacity_tokens }];
    let spec = PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix: None };
    Stepping { cache: Cache::paged(&spec).unwrap(), plan: StepPlan::default() }
}

impl Stepping {
    /// Appends a chain to every one of `sequences`, commits it if `commit`, and returns its tables.
    fn tables(&mut self, sequences: &[SeqId], n_tokens: u32, commit: bool) -> BlockTables {
        let next = |&seq: &SeqId| Span::chain(seq, self.cache.next_position(seq).unwrap(), n_tokens);
        let spans: Vec<Span<'_>> = sequences.iter().map(next).collect();
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut self.plan).unwrap();
        let mut tables = BlockTables::default();
        step.with_tables().group(GROUP).tables(4, &mut tables).unwrap();
        if commit {
            step.commit();
        }
        tables
    }
    fn edits_since(&self, epoch: u64) -> (bool, Vec<TableEdit>) {
        let mut edits = Vec::new();
        (self.plan.group(GROUP).edits_since(epoch, &mut edits), edits)
    }
}

/// Tables are ragged arrays: slots of the new tokens, blocks per span, and lengths that include the new tokens.
#[test]
fn a_batch_of_two_in_arrays() {
    let mut it = paged(64, None);
    it.sequences().seq_new(A).unwrap();
    it.sequences().seq_new(B).unwrap();
    it.tables(&[A], 6, true);
    let tables = it.tables(&[A, B], 3, true);
    assert_eq!(tables.slots, [6, 7, 8, 12, 13, 14]);
    assert_eq!((&*tables.query_start, &*tables.kv_len), (&[0, 3, 6][..], &[9, 3][..]));
    assert_eq!((&*tables.table_start, &*tables.blocks), (&[0, 3, 4][..], &[0, 1, 2, 3][..]));
    assert_eq!((&*tables.mask_start, tables.mask_bits.len()), (&[0, 0, 0][..], 0));
}

/// A decode step changes one entry per sequence and block, however long the context is.
#[test]
fn decoding_costs_an_edit_per_new_block() {
    let mut it = paged(1_024, None);
    for seq in [A, B] {
        it.sequences().seq_new(seq).unwrap();
        it.tables(&[seq], 200, true);
    }
    let (mut device, mut tables, mut n_edits) = (DeviceTable::default(), it.tables(&[A, B], 4, true), 0);
    device.update(it.plan.group(GROUP), &tables);
    for _ in 0..80 {
        tables = it.tables(&[A, B], 1, true);
        n_edits += device.update(it.plan.group(GROUP), &tables);
    }
    assert_eq!(n_edits, 2 * 80 / 4);
    assert_eq!((device.n_whole, device.n_edited), (1, 80));
}

/// A device that missed a plan gets the whole table, and so does one that followed another plan.
#[test]
fn a_device_that_missed_a_step_takes_the_whole_table() {
    let mut it = paged(64, None);
    it.sequences().seq_new(A).unwrap();
    it.tables(&[A], 8, true);
    let first = it.plan.group(GROUP).table_epoch().unwrap();
    it.tables(&[A], 1, true);
    let second = it.plan.group(GROUP).table_epoch().unwrap();
    assert_eq!(it.edits_since(first), (true, vec![TableEdit { row: 0, column: 2, block: 2 }]));
    it.tables(&[A], 4, true);
    let whole = |n: u32| (0..n).map(|i| TableEdit { row: 0, column: i, block: i }).collect::<Vec<_>>();
    assert_eq!(it.edits_since(second), (true, vec![TableEdit { row: 0, column: 3, block: 3 }]));
    assert_eq!(it.edits_since(first), (false, whole(4)));
    it.plan = StepPlan::default();
    it.tables(&[A], 1, true);
    assert_eq!(it.edits_since(second), (false, whole(4)));
}

/// A step that copies a shared block on write is dropped. The device's table already names the copy, so the next step,
/// which writes into the block itself, must name it again.
#[test]
fn a_dropped_copy_on_write_is_undone_by_the_next_step() {
    let mut it = paged(64, None);
    it.sequences().seq_new(A).unwrap();
    it.tables(&[A], 6, true);
    it.sequences().fork(A, B).unwrap();
    let before = it.tables(&[A], 1, false);
    assert_eq!(before.blocks, [0, 2], "a copy of block 1, because B reads it");
    let epoch = it.plan.group(GROUP).table_epoch().unwrap();
    it.sequences().seq_rm(B, 0, u32::MAX).unwrap();
    assert_eq!(it.tables(&[A], 1, true).blocks, [0, 1]);
    assert_eq!(it.edits_since(epoch), (true, vec![TableEdit { row: 0, column: 1, block: 1 }]));
}

/// Blocks that have left the window are free again, and the table has no block there.
#[test]
fn blocks_behind_the_window_are_no_blocks() {
    let mut it = paged(64, Some(5));
    it.sequences().seq_new(A).unwrap();
    it.tables(&[A], 15, true);
    let epoch = it.plan.group(GROUP).table_epoch().unwrap();
    let tables = it.tables(&[A], 1, true);
    assert_eq!(tables.blocks, [NO_BLOCK, NO_BLOCK, 2, 3]);
    let gone = |column| TableEdit { row: 0, column, block: NO_BLOCK };
    assert_eq!(it.edits_since(epoch), (true, vec![gone(0), gone(1)]));
}

/// Blocks of 4 serve kernels with blocks of 4, 2 and 1, and no others.
#[test]
fn a_block_is_several_smaller_ones() {
    let mut it = paged(64, None);
    it.sequences().seq_new(A).unwrap();
    it.tables(&[A], 6, true);
    let (mut tables, group) = (BlockTables::default(), it.plan.group(GROUP));
    group.tables(2, &mut tables).unwrap();
    assert_eq!(tables.blocks, [0, 1, 2]);
    assert_eq!(group.tables(3, &mut tables), Err(NotBlocks::BlockSize { cache: 4, asked: 3 }));
}

/// Other kinds have tables when their cells happen to be whole blocks, and say why not otherwise.
#[test]
fn cells_are_blocks_or_the_refusal_says_why_not() {
    let mut it = full("cells", 64);
    it.sequences().seq_new(A).unwrap();
    it.sequences().seq_new(B).unwrap();
    it.grow(A, 20);
    let tables = |it: &mut Stepping, seq, block| {
        let start = it.cache.next_position(seq).unwrap();
        let spans = [Span::chain(seq, start, 1)];
        let mut step = Step::begin(&mut it.cache, &StepRequest { spans: &spans }, &mut it.plan).unwrap();
        let mut tables = BlockTables::default();
        step.with_tables().group(GROUP).tables(block, &mut tables).map(|()| tables.blocks)
    };
    assert_eq!(tables(&mut it, A, 16), Ok(vec![0, 1]));
    assert_eq!(tables(&mut it, A, 32), Ok(vec![0]));
    it.grow(B, 17);
    assert_eq!(tables(&mut it, B, 16), Ok(vec![2, 3]));
    assert_eq!(tables(&mut it, B, 64), Err(NotBlocks::Unaligned { seq: B, index: 0, cell: 32 }));
    it.sequences().seq_rm(A, 4, 9).unwrap();
    assert_eq!(tables(&mut it, A, 16), Err(NotBlocks::Removed { seq: A, index: 4 }));
    assert_eq!(it.plan.group(GROUP).table_epoch(), None);
}

/// The mask of a draft tree: ancestors and the node itself. A tree that is a chain needs none.
#[test]
fn a_draft_tree_has_a_mask() {
    let mut it = full("tree", 64);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 3);
    let tables = |it: &mut Stepping, parents: &[Option<NodeId>]| {
        let spans = [Span { seq: A, start: 3, new: New::Tree(parents) }];
        let mut step = Step::begin(&mut it.cache, &StepRequest { spans: &spans }, &mut it.plan).unwrap();
        let mut tables = BlockTables::default();
        step.with_tables().group(GROUP).tables(16, &mut tables).unwrap();
        step.commit();
        tables
    };
    let chain = tables(&mut it, &[None, Some(NodeId(0))]);
    assert_eq!((chain.n_masked(0), &*chain.kv_len), (0, &[5][..]));
    let tree = tables(&mut it, &[None, Some(NodeId(1))]);
    let row = |query| (0..4).map(|node| tree.mask(0, query, node)).collect::<Vec<_>>();
    assert_eq!((tree.n_masked(0), &*tree.kv_len), (4, &[7][..]));
    assert_eq!([row(0), row(1)], [[false, false, true, false], [true, true, false, true]]);
}

/// Without `with_tables` a plan has no tables, and says so.
#[test]
fn a_plan_without_tables_says_so() {
    let mut it = full("contiguous", 8);
    it.step(&[Span::chain(SeqId::ONLY, 0, 2)]).unwrap();
    let group = it.plan.group(GROUP);
    assert_eq!(group.tables(2, &mut BlockTables::default()), Err(NotBlocks::NotFilled));
    assert_eq!((group.table_epoch(), group.table_rows()), (None, &[][..]));
    let ring = GroupSpec {
        capacity_tokens: 0,
        visibility: Visibility { window: Some(5), sinks: 0 },
        max_step_tokens: 4,
    };
    let mut it =
        Stepping { cache: Cache::new(vec![kinds::build("ring", &ring).unwrap()]), plan: StepPlan::default() };
    let blocks: Vec<_> = (0..4).map(|_| it.tables(&[SeqId::ONLY], 4, true).blocks).collect();
    assert_eq!(blocks, [vec![0], vec![0, 1], vec![NO_BLOCK, 1, 0], vec![NO_BLOCK, NO_BLOCK, 0, 1]]);
}

/// Rejected drafts leave entries after the end of their row, which the next step overwrites.
#[test]
fn rejected_tokens_leave_nothing_that_a_later_step_reads() {
    let mut it = paged(64, None);
    it.sequences().seq_new(A).unwrap();
    it.sequences().seq_new(B).unwrap();
    let mut device = DeviceTable::default();
    for round in 0..6 {
        let next = |seq| it.cache.next_position(seq).unwrap();
        let spans = [Span::chain(A, next(A), 7), Span::chain(B, next(B), 1 + round % 3)];
        let mut step = Step::begin(&mut it.cache, &StepRequest { spans: &spans }, &mut it.plan).unwrap();
        let (group, mut tables) = (step.with_tables().group(GROUP), BlockTables::default());
        group.tables(4, &mut tables).unwrap();
        device.update(group, &tables);
        step.commit_kept(&[Kept::First(1 + round % 2), Kept::All]).unwrap();
    }
    assert_eq!((device.n_whole, device.n_edited), (1, 5));
}
