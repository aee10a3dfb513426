//! Every defect of the seed documents that concerns bookkeeping. Each test begins with a description of its bug.
use crate::stepping::*;
use kvist_cache::kinds::{GroupSpec, Visibility, build};
use kvist_cache::*;

/// The seed read `[0, end)` whenever one sequence was in the step. A second, inactive sequence in lower cells was
/// then attended to as if it were the first one's past.
#[test]
fn an_idle_sequence_in_lower_cells_is_not_read() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 128);
        it.sequences().seq_new(A).unwrap();
        it.sequences().seq_new(B).unwrap();
        it.grow(A, 20); // cells 0..20
        let window = it.grow(B, 5).expect("alone in its cells");
        assert_eq!(window, Window { run: CellRun { start: 32, len: 5 }, causal: true }, "{kind}");
        let window = it.grow(B, 1).expect("alone in its cells");
        assert_eq!(window, Window { run: CellRun { start: 32, len: 6 }, causal: false }, "{kind}");
        assert_eq!(it.seen(), [(32..38).collect::<Vec<_>>()], "{kind}");

        // Decoding in turn interleaves the stripes: A continues after B, and is no longer one run.
        assert_eq!(it.grow(A, 30), None, "{kind}");
        let b_between = it.seen().iter().flatten().any(|cell| (32..48).contains(cell));
        assert!(!b_between, "{kind}: A reads the stripe of B: {:?}", it.reads().items);
    }
}

/// After a prefix is removed, the first cell of a sequence is not 0. The seed kept reading from 0, that is, freed
/// cells.
#[test]
fn a_removed_prefix_is_not_read() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 128);
        it.sequences().seq_new(A).unwrap();
        it.grow(A, 40);
        it.sequences().seq_rm(A, 0, 10).unwrap();
        let window = it.grow(A, 1).expect("what is left is one run");
        assert_eq!(window, Window { run: CellRun { start: 10, len: 31 }, causal: false }, "{kind}");

        // A hole in the middle: two runs, no fast path, and the hole is in neither.
        it.sequences().seq_rm(A, 20, 25).unwrap();
        assert_eq!(it.grow(A, 1), None, "{kind}");
        assert_eq!(it.seen()[0], (10..20).chain(25..42).collect::<Vec<_>>(), "{kind}");
    }
}

/// The seed used `seq_len` as the next position. After a removal the two differ, and the runner overwrote its past.
#[test]
fn the_count_is_not_the_next_position() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 128);
        it.sequences().seq_new(A).unwrap();
        it.grow(A, 40);
        it.sequences().seq_rm(A, 4, 14).unwrap();
        assert_eq!((it.cache.seq_len(A), it.cache.next_position(A)), (Some(30), Some(40)), "{kind}");
        let refused = it.step(&[Span::chain(A, 30, 1)]).unwrap_err();
        assert_eq!(refused, Refused::NotAtEnd { seq: A, expected: 40, got: 30 }, "{kind}");
    }
    let mut ring = ring(4, 2, 3);
    for _ in 0..10 {
        ring.grow(A, 3);
    }
    assert_eq!((ring.cache.seq_len(A), ring.cache.next_position(A)), (Some(2 + 3), Some(30)));
}

/// `high_water` never fell, so a pool that had been full once was read and reserved up to its top forever.
#[test]
fn the_high_water_falls_when_the_top_is_freed() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 200);
        for seq in [A, B, C] {
            it.sequences().seq_new(seq).unwrap();
            it.grow(seq, 20);
        }
        assert_eq!(it.report().high_water, 64 + 20, "{kind}");
        it.sequences().seq_rm(B, 0, u32::MAX).unwrap();
        assert_eq!(it.report().high_water, 64 + 20, "{kind}: C is still at the top");
        it.sequences().seq_rm(C, 5, u32::MAX).unwrap();
        assert_eq!(it.report().high_water, 64 + 5, "{kind}");
        it.sequences().seq_rm(C, 0, u32::MAX).unwrap();
        assert_eq!(it.report().high_water, 20, "{kind}: the gap that B left is below C, and falls with it");
    }
}

/// The contiguous plan accepted any position: a gap was read as garbage, and an overwrite left stale tokens after it.
#[test]
fn gaps_and_rewrites_are_refused() {
    for (kind, window) in [("contiguous", None), ("ring", Some(8)), ("cells", None), ("tree", None)] {
        let visibility = Visibility { window, sinks: 0 };
        let mut it = with(kind, GroupSpec { capacity_tokens: 64, visibility, max_step_tokens: 8 });
        if let Some(mut sequences) = it.cache.sequences() {
            sequences.seq_new(A).unwrap();
        }
        it.grow(A, 4);
        let before = it.cache.report();
        for start in [0, 3, 5, 60] {
            let refused = it.step(&[Span::chain(A, start, 2)]).unwrap_err();
            assert_eq!(refused, Refused::NotAtEnd { seq: A, expected: 4, got: start }, "{kind}");
        }
        assert_eq!(it.cache.report(), before, "{kind}");
    }
    let mut it = full("contiguous", 64);
    it.grow(A, 4);
    assert_eq!(it.cache.rewinds().unwrap().rewind(5), Err(Refused::CannotGrow { len: 4, asked: 5 }));
    it.cache.rewinds().unwrap().rewind(2).unwrap();
    assert_eq!(it.cache.next_position(A), Some(2));
}

/// The length advanced in the first layer, before the bytes were written. A step that failed in the second layer left
/// a cache that claimed tokens it did not have.
#[test]
fn a_failed_step_leaves_no_trace() {
    for (kind, window) in [("contiguous", None), ("ring", Some(8)), ("cells", None), ("tree", None)] {
        let visibility = Visibility { window, sinks: 2 };
        let mut it = with(kind, GroupSpec { capacity_tokens: 64, visibility, max_step_tokens: 8 });
        if let Some(mut sequences) = it.cache.sequences() {
            sequences.seq_new(A).unwrap();
        }
        (0..5).for_each(|_| _ = it.grow(A, 4));
        let before = it.cache.report();
        let spans = [Span::chain(A, 20, 3)];
        let mut planned = Vec::new();
        for _ in 0..3 {
            let mut step = Step::begin(&mut it.cache, &StepRequest { spans: &spans }, &mut it.plan).unwrap();
            planned.push(step.with_reads().group(GroupId(0)).writes.clone());
            drop(step);
            assert_eq!(it.cache.report(), before, "{kind}");
        }
        assert!(planned.iter().all(|writes| *writes == planned[0]), "{kind}: {planned:?}");
    }
}

/// Without `begin_step`, attention used the plan of the previous step. Here, a step without a plan does not compile;
/// where lifetimes are not available, it is an error.
#[test]
fn a_stale_plan_is_an_error() {
    let mut checked = CheckedCache::new(full("contiguous", 8).cache, LayerOrder::new([]));
    assert_eq!(checked.plan().err(), Some(Misuse::NoStep));
    checked.begin(&StepRequest { spans: &[Span::chain(A, 0, 2)] }).unwrap();
    assert_eq!(checked.cache().err(), Some(Misuse::StepInFlight));
    checked.commit().unwrap();
    assert_eq!(checked.commit().err(), Some(Misuse::NoStep));
    assert_eq!(checked.cache().unwrap().next_position(A), Some(2));
}

/// `can_extend` checked the committed length only, so the nodes of a draft tree overflowed the pool.
#[test]
fn speculation_is_counted_at_admission() {
    let mut it = full("tree", 16);
    for seq in [A, B] {
        it.sequences().seq_new(seq).unwrap();
    }
    it.grow(A, 6);
    it.speculate(A, &[None, Some(0), Some(0), None]).unwrap();
    it.speculate(A, &[Some(1), Some(2)]).unwrap();
    let (seq, start) = (B, 0);
    let refused = it.step(&[Span::chain(seq, start, 5)]).unwrap_err();
    assert_eq!(refused, Refused::NoSpace { group: GroupId(0), needed: 5, free: 4, reclaimable: 0 });
    it.grow(B, 4);
    assert_eq!(it.report().used_cells, 16);
    it.cache.trees().unwrap().discard(A).unwrap();
    assert_eq!(it.report().used_cells, 10);
}

/// Parents were not checked: a forward reference or a cycle made the walk to the root hang.
#[test]
fn bad_parents_are_refused() {
    let rows: &[(&[Option<u32>], u32)] = &[
        (&[Some(2)], 2),          // the node itself: two nodes exist already
        (&[Some(3), None], 2),    // a later node
        (&[None, Some(9)], 3),    // a node that does not exist
        (&[Some(1), Some(4)], 3), // a node that this span does not add
        (&[Some(u32::MAX)], 2),
    ];
    let mut it = full("tree", 64);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 3);
    it.speculate(A, &[None, Some(0)]).unwrap();
    let before = it.report();
    for (parents, node) in rows {
        let refused = it.speculate(A, parents).unwrap_err();
        assert_eq!(refused, Refused::BadParent { seq: A, node: NodeId(*node) }, "{parents:?}");
    }
    assert_eq!(it.report(), before);
    let refused = it.step(&[Span::chain(A, 3, 1)]).unwrap_err();
    assert_eq!(refused, Refused::Speculating(A), "a chain beside an unsettled tree");
}

/// `commit` appended whatever it was given: two siblings, or a node without its parent, became "the text".
#[test]
fn only_a_chain_from_the_root_can_be_committed() {
    let mut it = full("tree", 64);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 3);
    // 0 ─┬─ 1 ── 3      4 ── 5
    //    └─ 2
    it.speculate(A, &[None, Some(0), Some(0), Some(1), None, Some(4)]).unwrap();
    let before = it.report();
    for (path, culprit) in
        [(&[1][..], 1), (&[0, 3], 3), (&[1, 0], 1), (&[0, 1, 2], 2), (&[0, 5], 5), (&[0, 0], 0), (&[6], 6)]
    {
        let path: Vec<NodeId> = path.iter().copied().map(NodeId).collect();
        let refused = it.cache.trees().unwrap().commit_path(A, &path).unwrap_err();
        assert_eq!(refused, Refused::BadParent { seq: A, node: NodeId(culprit) }, "{path:?}");
        assert_eq!(it.report(), before, "{path:?}");
    }
    it.cache.trees().unwrap().commit_path(A, &[NodeId(0), NodeId(1), NodeId(3)]).unwrap();
    assert_eq!((it.cache.seq_len(A), it.cache.next_position(A)), (Some(6), Some(6)));
    assert_eq!((it.report().used_cells, it.cache.trees().unwrap().n_nodes(A)), (6, Some(0)));
    // No bytes moved: the chain stays in the cells where its nodes were written.
    it.grow(A, 1);
    assert_eq!(it.seen()[0], [0, 1, 2, 3, 4, 6, it.writes()[0].start]);
}

/// A breadth-first draft has no K and V for its last level, so draft and target could not "commit the same chain".
/// The draft commits what it has, and computes the rest again as a chain.
#[test]
fn a_draft_feeds_again_what_it_lacks() {
    let mut draft = full("tree", 64);
    draft.sequences().seq_new(A).unwrap();
    draft.grow(A, 3);
    draft.speculate(A, &[None, Some(0)]).unwrap(); // the third level was sampled, but never computed
    draft.cache.trees().unwrap().commit_path(A, &[NodeId(0), NodeId(1)]).unwrap();
    draft.grow(A, 1);
    assert_eq!(draft.cache.next_position(A), Some(6));
}

fn ring(window: u32, sinks: u32, max_step_tokens: u32) -> Stepping {
    let visibility = Visibility { window: Some(window), sinks };
    with("ring", GroupSpec { capacity_tokens: 0, visibility, max_step_tokens })
}

/// The ring of the seed documents wrote only the last token of a prefill chunk, and read "whatever is in the slot".
#[test]
fn a_ring_writes_every_token_and_reads_by_position() {
    let (window, sinks, max_step) = (5, 2, 4);
    let mut it = ring(window, sinks, max_step);
    let mut positions = vec![None; it.cache.capacity_cells()[0] as usize];
    for (start, n) in [(0, 4), (4, 4), (8, 1), (9, 4), (13, 3), (16, 4), (20, 1), (21, 1)] {
        it.grow(A, n);
        let cells: Vec<u32> = it.writes().iter().flat_map(|run| run.cells()).collect();
        assert_eq!(cells.len() as u32, n, "every token of the chunk has a cell");
        for (cell, position) in cells.into_iter().zip(start..) {
            positions[cell as usize] = Some(position);
        }
        for (query, cells) in (start..).zip(it.seen()) {
            let mut seen: Vec<u32> =
                cells.iter().map(|&cell| positions[cell as usize].expect("written")).collect();
            seen.sort_unstable();
            let must: Vec<u32> = (0..=query).filter(|&p| p < sinks || query - p < window).collect();
            assert_eq!(seen, must, "query {query}");
        }
    }
}

/// With only sinks + window cells, a chunk overwrote tokens that its own first queries still had to see. The extra
/// max_step − 1 cells make the ring exact: with one fewer, this test fails.
#[test]
fn a_ring_never_overwrites_what_its_own_chunk_must_see() {
    for (window, sinks, max_step) in [(1, 0, 1), (1, 3, 6), (7, 0, 5), (4, 4, 9), (16, 1, 1)] {
        let mut it = ring(window, sinks, max_step);
        assert_eq!(it.cache.capacity_cells(), [sinks + window + max_step - 1]);
        for _ in 0..20 {
            it.grow(A, max_step);
            let writes: Vec<u32> = it.writes().iter().flat_map(|run| run.cells()).collect();
            for (query, cells) in it.seen().into_iter().enumerate() {
                let old = cells.len() - cells.iter().filter(|cell| writes.contains(cell)).count();
                let position = it.cache.next_position(A).unwrap() - max_step + query as u32;
                let start = position - query as u32;
                let must = (0..start).filter(|&p| p < sinks || position - p < window).count();
                assert_eq!(old, must, "window {window}, sinks {sinks}, step {max_step}, position {position}");
            }
        }
        let start = it.cache.next_position(A).unwrap();
        let refused = it.step(&[Span::chain(A, start, max_step + 1)]).unwrap_err();
        assert_eq!(refused, Refused::StepTooLong { max_step_tokens: max_step, got: max_step + 1 });
    }
}

/// A ring without a window has no rule for what to drop.
#[test]
fn a_ring_needs_a_window() {
    let build = |group: &GroupSpec| build("ring", group);
    let group = GroupSpec { capacity_tokens: 64, visibility: Visibility::FULL, max_step_tokens: 8 };
    let error = build(&group).err().expect("it has no window").to_string();
    assert!(error.contains("--window"), "{error}");
    let visibility = Visibility { window: Some(u32::MAX), sinks: 4 };
    assert!(build(&GroupSpec { visibility, ..group }).is_err(), "more cells than 32 bits count");
}

/// With one pool for all layers, a windowed layer and a full-attention layer could not differ.
#[test]
fn layer_groups_see_by_their_own_windows() {
    let group = |window| GroupSpec {
        capacity_tokens: 64,
        visibility: Visibility { window, sinks: 0 },
        max_step_tokens: 64,
    };
    let spaces = [None, Some(4)].map(|window| build("cells", &group(window)).unwrap());
    let mut cache = Cache::new(spaces.into());
    let mut plan = StepPlan::default();
    cache.sequences().unwrap().seq_new(A).unwrap();
    for (start, n, read) in [(0, 20, [20, 20]), (20, 1, [21, 4])] {
        let spans = [Span::chain(A, start, n)];
        let mut step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
        let plan = step.with_reads();
        let got = [0, 1].map(|g| plan.group(GroupId(g)).reads.cells_read());
        assert_eq!(got, read, "cells read of {n} tokens from {start}");
        step.commit();
    }
}

/// Reads cost what is stored, not the capacity.
#[test]
fn reads_are_bounded_by_occupancy() {
    for kind in ["contiguous", "cells", "tree"] {
        for capacity in [64, 4_096, 1 << 20] {
            let mut it = full(kind, capacity);
            if let Some(mut sequences) = it.cache.sequences() {
                sequences.seq_new(A).unwrap();
            }
            it.grow(A, 10);
            it.grow(A, 1);
            assert_eq!(it.reads().cells_read(), 11, "{kind} of {capacity} cells");
            assert!(it.plan.group(GroupId(0)).cells_end <= 16, "{kind} of {capacity} cells");
        }
    }
}

/// A prepare that did not mark its claims gave one cell to two sequences when the pool was nearly full.
#[test]
fn two_spans_never_share_the_last_cells() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 35);
        for seq in [A, B, C] {
            it.sequences().seq_new(seq).unwrap();
        }
        it.grow(A, 5);
        it.sequences().fork(A, B).unwrap();
        it.sequences().fork(A, C).unwrap();
        it.step(&[Span::chain(A, 5, 10), Span::chain(B, 5, 10), Span::chain(C, 5, 10)]).unwrap();
        let mut cells: Vec<u32> = it.writes().iter().flat_map(|run| run.cells()).collect();
        cells.sort_unstable();
        assert_eq!(cells, (5..35).collect::<Vec<_>>(), "{kind}");
    }
}

/// A fork of an empty sequence onto an existing one returned `Ok` and did nothing, because the check came after an
/// early return. The caller continued as if the sequence were empty now.
#[test]
fn an_empty_source_does_not_make_an_occupied_place_free() {
    for kind in ["cells", "tree", "paged"] {
        let mut it = full(kind, 64);
        it.sequences().seq_new(A).unwrap();
        it.sequences().seq_new(B).unwrap();
        it.sequences().fork(A, B).unwrap(); // both are empty
        it.grow(B, 5);
        let occupied = Refused::Occupied { seq: B, position: 4 };
        assert_eq!(it.sequences().fork(A, B), Err(occupied.clone()), "{kind}");
        assert_eq!(it.sequences().seq_cp(A, B, 0, 3), Err(occupied), "{kind}");
        assert_eq!((it.cache.next_position(A), it.cache.next_position(B)), (Some(0), Some(5)), "{kind}");
        it.sequences().seq_cp(A, B, 5, 9).unwrap(); // it ends before the range, and A has nothing in the range
        it.sequences().fork(A, C).unwrap();
        assert_eq!((it.cache.next_position(B), it.cache.next_position(C)), (Some(5), Some(0)), "{kind}");
    }
}

/// The number of unsettled nodes could only be queried through a mutable borrow of the cache.
#[test]
fn counting_nodes_changes_nothing() {
    let mut it = full("tree", 64);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 4);
    it.speculate(A, &[None, Some(0), Some(0)]).unwrap();
    let cache: &Cache = &it.cache;
    assert_eq!((cache.n_nodes(A), cache.n_nodes(B)), (Some(3), None));
    assert_eq!(it.cache.trees().unwrap().n_nodes(A), Some(3));
    it.cache.trees().unwrap().discard(A).unwrap();
    assert_eq!(it.cache.n_nodes(A), Some(0));
    assert_eq!(full("cells", 8).cache.n_nodes(A), None, "it does not speculate");
}

/// Every caller searched the tables of kinds and allocators itself, with its own error text for an unknown name.
#[test]
fn kinds_and_allocators_are_built_by_name() {
    let group = GroupSpec { capacity_tokens: 64, visibility: Visibility::FULL, max_step_tokens: 8 };
    for name in kvist_cache::kinds::KINDS.iter().filter(|kind| !kind.traits.bounded).map(|kind| kind.name) {
        assert_eq!(build(name, &group).expect("it is listed").capacity_cells(), 64, "{name}");
    }
    let error = build("cell", &group).err().expect("no such kind").to_string();
    assert_eq!(error, "there is no kind of cache `cell`: use one of contiguous, ring, cells, tree, paged");
    let error = build("ring", &group).err().expect("it has no window").to_string();
    assert!(error.contains("sliding window"), "{error}");
    for (name, _) in kvist_cache::arena::ALLOCATORS {
        let allocator = kvist_cache::arena::build(name, 40).expect("it is listed");
        assert_eq!((allocator.name(), allocator.n_blocks()), (*name, 40));
    }
    let error = kvist_cache::arena::build("best_fit", 40).err().expect("no such allocator").to_string();
    assert_eq!(error, "there is no allocator `best_fit`: use one of first_fit, buddy");
}

/// No test covered keeping the beginning of one sequence of a paged cache.
#[test]
fn a_paged_cache_keeps_a_beginning_and_forgets_the_others() {
    let mut it = full("paged", 64);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 20);
    it.sequences().fork(A, B).unwrap();
    it.grow(B, 9);
    assert!(matches!(it.sequences().seq_keep(A, 3, 9), Err(Refused::Unsupported(_))), "from the end alone");
    it.sequences().seq_keep(B, 0, 17).unwrap();
    assert_eq!((it.cache.next_position(A), it.cache.next_position(B)), (None, Some(17)));
    assert_eq!(it.report().used_cells, 32, "whole blocks");
    it.sequences().seq_keep(B, 5, 5).unwrap();
    assert_eq!((it.cache.next_position(B), it.report().used_cells), (None, 0), "nothing is kept");
}

/// Where one sequence could not be cut, because files gave it no rows that windows had left behind, no sequence could, and copies made
/// through the cache were not known.
#[test]
fn the_shortest_cut_is_that_of_a_sequence_and_its_copies() {
    let (c, d) = (SeqId(2), SeqId(3));
    let mut it = full("cells", 128);
    for seq in [A, B] {
        it.sequences().seq_new(seq).unwrap();
        it.grow(seq, 20);
    }
    it.cache.set_shortest_cut(A, 15);
    it.sequences().fork(A, c).unwrap();
    it.sequences().seq_rm(B, 3, u32::MAX).unwrap();
    let gone = |seq, position| Err(Refused::WindowGone { seq, position });
    let before = it.report();
    for seq in [A, c] {
        assert_eq!(it.sequences().seq_rm(seq, 14, u32::MAX), gone(seq, 14));
        assert_eq!(it.sequences().seq_cp(seq, d, 0, 14), gone(seq, 14));
        assert_eq!(it.sequences().seq_keep(seq, 0, 14), gone(seq, 14));
        assert_eq!((it.cache.check_cut(seq, 14), it.cache.check_cut(seq, 15)), (gone(seq, 14), Ok(())));
    }
    assert_eq!(it.report(), before);
    it.sequences().seq_cp(c, d, 0, 17).unwrap();
    assert_eq!(it.sequences().seq_rm(d, 2, u32::MAX), gone(d, 2));
    it.sequences().seq_rm(d, 15, u32::MAX).unwrap();
    // A sequence that has no tokens of it any more is free.
    it.sequences().seq_rm(A, 0, u32::MAX).unwrap();
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 9);
    it.sequences().seq_rm(A, 1, u32::MAX).unwrap();
    assert_eq!(it.sequences().seq_rm(c, 1, u32::MAX), gone(c, 1));

    let mut it = full("contiguous", 32);
    it.grow(A, 20);
    it.cache.set_shortest_cut(A, 15);
    assert_eq!(it.cache.rewinds().unwrap().rewind(14), gone(A, 14));
    it.cache.rewinds().unwrap().rewind(15).unwrap();
    it.cache.rewinds().unwrap().rewind(0).unwrap();
    it.grow(A, 20);
    it.cache.rewinds().unwrap().rewind(14).unwrap();
}
