//! Compaction: rounds of copies that the backend executes. Afterwards the fast path applies again.
use crate::stepping::*;
use kvist_cache::*;

fn n_cells(rounds: &[Vec<CellCopy>]) -> u32 {
    rounds.iter().flatten().map(|copy| copy.len).sum()
}

/// Sequences that decode in turn are interleaved stripe by stripe. After compaction each is one run, in order.
#[test]
fn the_fast_path_comes_back() {
    for kind in ["cells", "tree"] {
        let mut it = full(kind, 1_024);
        for seq in [A, B, C] {
            it.sequences().seq_new(seq).unwrap();
        }
        for turn in 0..100 {
            let spans = [A, B, C].map(|seq| Span::chain(seq, turn, 1));
            it.step(&spans).unwrap();
        }
        assert_eq!(it.grow(B, 1), None, "{kind}: shredded");
        it.sequences().seq_rm(C, 0, u32::MAX).unwrap();
        let rounds = it.compact();
        assert!(!rounds.is_empty());
        let report = it.report();
        assert!(report.sequences.iter().all(|s| s.n_extents == 1), "{kind}: {report:?}");
        assert_eq!((report.used_cells, report.high_water), (201, 201), "{kind}");
        assert_eq!(
            it.grow(B, 1),
            Some(Window { run: CellRun { start: 100, len: 102 }, causal: false }),
            "{kind}"
        );
        assert_eq!(it.grow(A, 1), None, "{kind}: B stands where A would go on");
        assert_eq!(it.compact().last().map(|last| last.is_empty()), Some(false), "{kind}");
        assert_eq!(it.compact(), Vec::<Vec<CellCopy>>::new(), "{kind}: nothing is left to do");
    }
}

/// Copies are merged: a long run moves as one copy.
#[test]
fn moves_are_long_runs() {
    let mut it = full("cells", 4_096);
    it.sequences().seq_new(A).unwrap();
    it.sequences().seq_new(B).unwrap();
    it.grow(A, 1_000);
    it.grow(B, 900);
    it.sequences().seq_rm(A, 0, u32::MAX).unwrap();
    assert_eq!(it.compact(), [[CellCopy { from: 1_008, to: 0, len: 900 }]]);
}

/// A shared prefix is placed once, with its first owner; the branches follow.
#[test]
fn a_shared_trunk_is_laid_once() {
    let mut it = full("cells", 512);
    it.sequences().seq_new(C).unwrap();
    it.grow(C, 40);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 50);
    it.sequences().fork(A, B).unwrap();
    it.grow(A, 20);
    it.grow(B, 20);
    it.compact();
    let report = it.report();
    let n_extents: Vec<u32> = report.sequences.iter().map(|s| s.n_extents).collect();
    assert_eq!(n_extents, [1, 2, 1], "A whole, B its branch apart, C whole");
    assert_eq!((report.used_cells, report.high_water), (130, 130));
}

/// Two sequences in each other's target cells form a cycle. Any free cell breaks it; without one, nothing moves.
#[test]
fn cycles_are_broken_through_free_cells() {
    for (capacity, n_free) in [(65, 1), (64, 0), (96, 32)] {
        let mut it = full("cells", capacity);
        it.sequences().seq_new(B).unwrap();
        it.grow(B, 32);
        it.sequences().seq_new(A).unwrap();
        it.grow(A, 32); // A is first in the order of ids but last in memory
        let rounds = it.compact();
        let extents: Vec<u32> = it.report().sequences.iter().map(|s| s.n_extents).collect();
        assert_eq!(extents, [1, 1], "{n_free} free");
        if n_free == 0 {
            assert!(rounds.is_empty());
            continue;
        }
        assert!(n_cells(&rounds) <= 2 * 64, "{n_free} free: {} cells moved", n_cells(&rounds));
        it.grow(A, 1);
        assert_eq!(it.seen()[0][..32], (0..32).collect::<Vec<_>>(), "{n_free} free");
    }
}

/// Compaction terminates from any state. Every state here results from decoding in turn, forks and removals, with
/// anywhere from no to many free cells.
#[test]
fn it_terminates() {
    let mut worst = 0.0_f64;
    for capacity in [16, 17, 33, 64, 100, 257] {
        for salt in 0..40 {
            let mut it = full("tree", capacity);
            let mut random = kvist_testing::SplitMix64(u64::from(capacity) << 20 | salt);
            let mut below = |n: u32| random.below(n);
            for _ in 0..400 {
                let (seq, other) = (SeqId(below(5)), SeqId(below(5)));
                match below(10) {
                    0 => _ = it.sequences().seq_new(seq),
                    1 => _ = it.sequences().fork(seq, other),
                    2 => {
                        let (from, len) = (below(capacity), below(20));
                        _ = it.sequences().seq_rm(seq, from, from + len);
                    }
                    3 => _ = it.speculate(seq, &[None, Some(0), Some(0)]),
                    4 => _ = it.cache.trees().unwrap().discard(seq),
                    _ => {
                        let start = it.cache.next_position(seq).unwrap_or(0);
                        _ = it.step(&[Span::chain(seq, start, 1 + below(3))]);
                    }
                }
            }
            let used = it.report().used_cells;
            let rounds = it.compact(); // must terminate
            let report = it.report();
            assert!(rounds.len() as u32 <= 2 * used, "{} rounds for {used} cells", rounds.len());
            assert!(n_cells(&rounds) <= 2 * used, "{} copies for {used} cells", n_cells(&rounds));
            assert!(
                used == capacity || report.high_water == used,
                "{capacity} cells, salt {salt}: {report:?}"
            );
            worst = worst.max(f64::from(n_cells(&rounds)) / f64::from(used.max(1)));
        }
    }
    println!("at worst {worst:.2} copies per cell in use");
}

/// A round that is dropped, or whose copies were only partly made, changes nothing: its targets were free.
#[test]
fn a_dropped_round_changes_nothing() {
    let mut it = full("cells", 128);
    it.sequences().seq_new(B).unwrap();
    it.grow(B, 20);
    it.sequences().seq_new(A).unwrap();
    it.grow(A, 20);
    let before = it.report();
    let mut moves = MovePlan::default();
    let occupied = |cell: u32| (0..20).contains(&cell) || (32..52).contains(&cell);
    let round = Relocation::begin(&mut it.cache, &mut moves).unwrap();
    for copy in &round.moves().groups()[0].1 {
        assert!((copy.from..copy.from + copy.len).all(occupied), "{copy:?}");
        assert!(!(copy.to..copy.to + copy.len).any(occupied), "{copy:?}");
    }
    drop(round);
    assert_eq!(it.report(), before);
}
