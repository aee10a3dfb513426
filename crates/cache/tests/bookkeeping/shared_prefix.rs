//! Cells that several sequences share are read as one item.
use crate::stepping::*;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;
use kvist_testing::reference::SplitMix64;

/// Decodes one token of every sequence.
fn decode(it: &mut Stepping, n_sequences: u32) {
    let next = |seq| it.cache.next_position(SeqId(seq)).unwrap();
    let spans: Vec<Span<'_>> = (0..n_sequences).map(|seq| Span::chain(SeqId(seq), next(seq), 1)).collect();
    it.step(&spans).unwrap();
}

fn shared(it: &Stepping, n_queries: u32) -> Vec<(CellRun, u32)> {
    let items = it.reads().items.iter().filter(|item| item.n_queries == n_queries);
    items.map(|item| (item.run, item.first_index)).collect()
}

#[test]
fn sixty_four_branches_read_their_trunk_once() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 4_096);
        it.sequences().seq_new(A).unwrap();
        it.grow(A, 1_000);
        (1..64).for_each(|seq| it.sequences().fork(A, SeqId(seq)).unwrap());
        assert_eq!(it.report().used_cells, 1_000, "{kind}: a fork takes no cell");
        for turn in 1..40 {
            decode(&mut it, 64);
            assert_eq!(shared(&it, 64), [(CellRun { start: 0, len: 1_000 }, 0)], "{kind}");
            assert_eq!(it.reads().cells_read(), 1_000 + 64 * turn, "{kind}");
        }
    }
}

#[test]
fn nested_shared_prefixes_are_read_once() {
    let mut it = full("cells", 1_024);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 100); // shared by all
    it.sequences().fork(A, B).unwrap();
    it.grow(A, 50); // shared by A and C
    it.sequences().fork(A, C).unwrap();
    it.grow(B, 30); // shared by B and D
    it.sequences().fork(B, SeqId(3)).unwrap();
    decode(&mut it, 4);
    assert_eq!(shared(&it, 4), [(CellRun { start: 0, len: 100 }, 0)]);
    let twos = shared(&it, 2);
    assert_eq!(twos.iter().map(|(run, _)| run.len).sum::<u32>(), 50 + 30, "{twos:?}");
    assert!(twos.iter().all(|&(_, first_index)| first_index >= 100), "{twos:?}");
    assert_eq!(it.reads().cells_read(), 100 + 50 + 30 + 4);
}

/// Forks of forks, with arbitrary ids: sequences with a common prefix need not be adjacent in the step.
#[test]
fn what_branches_share_is_read_once_whatever_their_names() {
    for seed in 0..300 {
        let mut random = SplitMix64(seed);
        let mut it = full("cells", 4_096);
        let mut names: Vec<u32> = (0..10).collect();
        for i in 0..names.len() {
            names.swap(i, random.below(10) as usize);
        }
        it.sequences().seq_new(SeqId(names[0])).unwrap();
        for n in 0..names.len() {
            if n > 0 {
                let from = names[random.below(n as u32) as usize];
                it.sequences().fork(SeqId(from), SeqId(names[n])).unwrap();
            }
            for _ in 0..3 {
                let grown = names[random.below(n as u32 + 1) as usize];
                it.grow(SeqId(grown), 1 + random.below(30));
            }
        }
        for _ in 0..3 {
            decode(&mut it, 10);
            let used = u64::from(it.report().used_cells);
            assert_eq!(it.reads().cells_read(), used, "seed {seed}: {:?}", it.reads().items);
        }
    }
}

/// The sequence that sees least of the shared prefix may come first or last.
#[test]
fn a_trunk_is_shared_under_a_window() {
    for longest_first in [false, true] {
        let visibility = Visibility { window: Some(64), sinks: 4 };
        let mut it = with("cells", GroupSpec { capacity_tokens: 1_024, visibility, max_step_tokens: 64 });
        it.sequences().seq_new(A).unwrap();
        it.grow(A, 200);
        (1..8).for_each(|seq| it.sequences().fork(A, SeqId(seq)).unwrap());
        for seq in 0..8 {
            it.grow(SeqId(seq), 1 + if longest_first { 7 - seq } else { seq }); // different lengths
        }
        decode(&mut it, 8);
        // First visible positions: 201 + 1 − 64 = 138 to 145. All start sharing at stripe boundary 144 or 160.
        let eights = shared(&it, 8);
        assert_eq!(eights, [(CellRun { start: 0, len: 4 }, 0), (CellRun { start: 160, len: 40 }, 160)]);
        let in_stripe = it.reads().cells_read() - (4 + 40) - (1..=8).sum::<u64>() - 8;
        assert!(in_stripe <= 8 * 16, "{in_stripe} cells are read by one branch each");
    }
}

#[test]
fn what_follows_a_removed_prefix_is_still_shared() {
    let mut it = full("cells", 256);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 100);
    it.sequences().fork(A, B).unwrap();
    it.sequences().seq_rm(B, 0, 30).unwrap();
    decode(&mut it, 2);
    assert_eq!(shared(&it, 2), [(CellRun { start: 30, len: 70 }, 30)]);
    assert_eq!(it.reads().cells_read(), 100 + 2);
}

/// For the same result in any batch, tiles must be cut at the same places of a sequence, however its cells are
/// shared.
#[test]
fn every_query_meets_its_cells_in_sequence_order() {
    let mut it = full("tree", 512);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 33);
    (1..5).for_each(|seq| it.sequences().fork(A, SeqId(seq)).unwrap());
    (0..20).for_each(|_| decode(&mut it, 5));
    it.speculate(B, &[None, Some(0), Some(0)]).unwrap();
    it.speculate(B, &[Some(1), Some(2), Some(2)]).unwrap();
    let ordered = it.reads().items.is_sorted_by_key(|item| item.first_index);
    assert!(ordered, "{:?}", it.reads().items);
}

/// Only a window needs bit masks. In a tree the queries of every subtree have neighbouring slots, and cells have the
/// indices of a chain.
#[test]
fn bits_are_used_only_where_needed() {
    let mut it = full("tree", 512);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 40);
    let window = it.speculate(A, &[None, Some(0), Some(1)]).unwrap();
    assert_eq!(
        window,
        Some(Window { run: CellRun { start: 0, len: 43 }, causal: true }),
        "a tree that is a chain"
    );
    it.speculate(A, &[Some(2)]).unwrap();
    assert!(it.reads().items.iter().all(|item| item.mask == Mask::All), "{:?}", it.reads().items);
    // Node 4 follows node 0, 5 follows 3, and 6 and 7 follow 4: in depth-first order 5 comes last.
    it.speculate(A, &[Some(0), Some(3), Some(4), Some(6)]).unwrap();
    assert_eq!(it.reads().order, [1, 0, 2, 3]);
    let item = |first_query, n_queries, start, len, first_index, mask| ReadItem {
        first_query,
        n_queries,
        run: CellRun { start, len },
        first_index,
        mask,
    };
    let causal = Mask::Band { first: None, end: Some(1) };
    let expected = [
        item(0, 4, 0, 40, 0, Mask::All),
        item(0, 4, 40, 1, 40, Mask::All), // node 0
        item(0, 1, 41, 3, 41, Mask::All),
        item(1, 3, 44, 1, 41, Mask::All),
        item(2, 2, 46, 2, 42, causal),
        item(0, 1, 45, 1, 44, Mask::All),
    ];
    assert_eq!(it.reads().items, expected);
}
