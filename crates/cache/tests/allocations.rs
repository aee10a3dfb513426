//! A step allocates no memory once its buffers have grown, so that decoding never waits for the allocator.
//!
//! A program of its own, because its allocator counts.
#[path = "bookkeeping/stepping.rs"]
#[allow(dead_code)] // this uses a part of it
mod stepping;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use stepping::*;

/// Counts allocations over `n_steps` steps in which every sequence decodes one token, or proposes and settles a draft
/// tree.
fn allocations(kind: &str, window: Option<u32>, n_sequences: u32, n_steps: u32, speculate: bool) -> u64 {
    let visibility = Visibility { window, sinks: 4 };
    let mut it = with(kind, GroupSpec { capacity_tokens: 1 << 14, visibility, max_step_tokens: 64 });
    let many = it.cache.sequences().is_some();
    if many {
        it.sequences().seq_new(A).unwrap();
    }
    it.grow(A, 60);
    (1..n_sequences).for_each(|seq| it.sequences().fork(A, SeqId(seq)).unwrap());
    let parents = [None, Some(NodeId(0)), Some(NodeId(0)), Some(NodeId(2))];
    let mut spans: Vec<Span<'_>> = (0..n_sequences).map(|seq| Span::chain(SeqId(seq), 60, 1)).collect();
    let mut turn = |it: &mut Stepping| {
        for span in &mut spans {
            span.start = it.cache.next_position(span.seq).unwrap();
            if speculate {
                span.new = New::Tree(&parents);
            }
        }
        it.step(&spans).unwrap();
        if speculate {
            let mut trees = it.cache.trees().unwrap();
            spans.iter().for_each(|span| trees.commit_path(span.seq, &[NodeId(0), NodeId(2)]).unwrap());
        }
    };
    // Bookkeeping doubles together with the pools: past 512 cells it suffices for 1,024.
    (0..460).for_each(|_| turn(&mut it));
    allocation_counter::measure(|| (0..n_steps).for_each(|_| turn(&mut it))).count_total
}

#[test]
fn a_step_allocates_nothing_after_warm_up() {
    for (kind, window) in
        [("contiguous", None), ("ring", Some(32)), ("cells", None), ("cells", Some(32)), ("tree", None)]
    {
        assert_eq!(allocations(kind, window, 1, 500, false), 0, "{kind}, window {window:?}, alone");
    }
    assert_eq!(allocations("tree", None, 1, 20, true), 0, "a tree in every step");
}

/// Sequences that decode in turn get a new extent with every stripe; their extent lists double occasionally.
#[test]
fn sequences_that_take_turns_hardly_allocate() {
    let n_steps = 400;
    for (kind, window) in [("cells", None), ("cells", Some(32)), ("tree", None)] {
        let n = allocations(kind, window, 8, n_steps, false);
        assert!(n <= 8 * 3 + 8, "{kind}: {n} allocations in {n_steps} steps of 8 sequences");
    }
}

/// Capacity costs nothing by itself: no bookkeeping is allocated for cells that were never used.
#[test]
fn an_enormous_capacity_costs_what_is_used_of_it() {
    for kind in ["contiguous", "cells", "tree"] {
        let taken = allocation_counter::measure(|| {
            let visibility = Visibility::FULL;
            let group = GroupSpec { capacity_tokens: u32::MAX, visibility, max_step_tokens: 64 };
            let mut it = with(kind, group);
            assert_eq!(it.cache.capacity_cells(), [u32::MAX]);
            if it.cache.sequences().is_some() {
                it.sequences().seq_new(A).unwrap();
            }
            it.grow(A, 1_000);
        });
        assert!(taken.bytes_max < 100_000, "{kind}: {} bytes for 1,000 tokens", taken.bytes_max);
    }
}

/// Cached blocks that leave a window are passed from the pool to the index at every step, in a buffer that is passed
/// back. Regression test: a pool that did not get its buffer back allocated a new one each time.
#[test]
fn indexed_blocks_leave_a_window_without_allocating() {
    let visibility = Visibility { window: Some(600), sinks: 0 };
    let group = GroupSpec { capacity_tokens: u32::MAX, visibility, max_step_tokens: 512 };
    let prefix = Some(PrefixSpec::default());
    let spec = PagedSpec { block_tokens: 1, groups: vec![group], rollback_tokens: 0, prefix };
    let mut it = Stepping { cache: Cache::paged(&spec).unwrap(), plan: StepPlan::default() };
    let tokens: Vec<u32> = (0..512).collect();
    let (prompt, at) = (Content::Tokens(&tokens), Moment::default());
    it.cache.prefixes().unwrap().open(A, "", &prompt, at).unwrap();
    it.grow(A, 512);
    it.cache.prefixes().unwrap().store(A, &prompt, at).unwrap();
    // The window drops its first block at 600 tokens; the lists have space for 1,024.
    (512..700).for_each(|_| _ = it.grow(A, 1));
    let evictable = |it: &Stepping| it.report().blocks.unwrap().counters.became_evictable;
    let before = evictable(&it);
    let n_allocations =
        allocation_counter::measure(|| (700..1_000).for_each(|_| _ = it.grow(A, 1))).count_total;
    assert_eq!((evictable(&it) - before, n_allocations), (300, 0));
}

/// A table that stays on a device is brought up to date without allocating, and so are the arrays of a step.
#[test]
fn block_tables_are_filled_without_allocating() {
    let group = GroupSpec { capacity_tokens: 1 << 14, visibility: Visibility::FULL, max_step_tokens: 64 };
    let spec = PagedSpec { block_tokens: 4, groups: vec![group], rollback_tokens: 0, prefix: None };
    let (mut cache, mut plan) = (Cache::paged(&spec).unwrap(), StepPlan::default());
    (0..4).for_each(|seq| cache.sequences().unwrap().seq_new(SeqId(seq)).unwrap());
    let (mut tables, mut edits, mut epoch) = (BlockTables::default(), Vec::new(), 0);
    let mut decode = |until: u32| {
        for start in cache.next_position(A).unwrap()..until {
            let spans = [0, 1, 2, 3].map(|seq| Span::chain(SeqId(seq), start, 1));
            let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
            let group = step.with_tables().group(GroupId(0));
            edits.clear();
            group.edits_since(epoch, &mut edits);
            epoch = group.table_epoch().unwrap();
            group.tables(4, &mut tables).unwrap();
            step.commit();
        }
    };
    // Lists double: past 129 blocks per sequence they suffice for 256.
    decode(540);
    assert_eq!(allocation_counter::measure(|| decode(1_000)).count_total, 0);
}
