//! Growth, fragmentation and refusals, story by story.
use super::simulation::Simulation;
use super::*;

/// The example of the source: 512 tokens fill 32 blocks of 16, and the token with index 512 goes to the block after
/// the 32nd, not to the second.
#[test]
fn the_513th_token_grows_the_handle_or_is_refused() {
    for (name, _) in ALLOCATORS {
        let mut it = Simulation::new(name, 64, 16);
        let handle = it.allocate(A, 512, OutOfMemory::Reject).unwrap().handle;
        assert_eq!((handle.len, it.arena.is_full(A)), (32, Some(false)), "{name}");
        it.append(A, 512, CapacityExceeded::Error, true).unwrap();
        assert_eq!((it.arena.used_tokens(A), it.arena.is_full(A)), (Some(512), Some(true)));
        assert_eq!((it.arena.room_tokens(A), it.arena.token_offset_in_block(A)), (Some(0), Some(0)));

        let append = it.arena.append(A, 1, CapacityExceeded::Error).unwrap().unwrap();
        let cells: Vec<BlockCells> = append.writes().collect();
        assert_eq!(cells, [BlockCells { block: handle.start + 32, offset: 0, len: 1 }], "{name}");
        assert_eq!(append.copy(), None, "{name}: it grows in place");
        drop(append);
        assert_eq!((it.arena.used_tokens(A), it.arena.handle(A)), (Some(512), Some(handle)), "{name}");

        it.allocate(B, 32 * 16, OutOfMemory::Reject).unwrap();
        let refused = it.append(A, 1, CapacityExceeded::Error, true).unwrap_err();
        assert_eq!(refused, ArenaRefused::NoRoom { needed_blocks: 33, free_blocks: 0, largest_free_run: 0 });
        assert!(refused.to_string().contains("33 neighbouring blocks needed, 0 free"), "{refused}");
        assert!(!it.append(A, 1, CapacityExceeded::Halt, true).unwrap(), "{name}: a halt is an answer");
        assert!(it.arena.is_exhausted());
        it.append(A, 1, CapacityExceeded::EvictLeastRecentlyUsed, true).unwrap();
        assert_eq!(it.arena.sequences().collect::<Vec<_>>(), [A], "{name}: B had to go");
        it.check();
    }
}

/// The source claimed "zero fragmentation". Every second of eight sequences is freed: half of the blocks are free,
/// but no request for more than one sequence's blocks fits. The refusal says so.
#[test]
fn fragmentation_is_measured() {
    let mut it = Simulation::new("first_fit", 64, 16);
    for seq in 0..8 {
        it.allocate(SeqId(seq), 8 * 16, OutOfMemory::Reject).unwrap();
        it.append(SeqId(seq), 6 * 16, CapacityExceeded::Error, true).unwrap();
    }
    (0..8).step_by(2).for_each(|seq| _ = it.arena.free_for(SeqId(seq)));
    let report = it.arena.report();
    assert_eq!((report.free_blocks, report.largest_free_run), (32, 8));
    assert_eq!(report.external_fragmentation(), 0.75);
    assert_eq!(report.internal_fragmentation(), 0.25, "6 of 8 blocks are in use");
    let refused = it.arena.allocate_for(SeqId(9), 9 * 16, OutOfMemory::Reject).unwrap_err();
    assert!(refused.to_string().contains("9 neighbouring blocks needed, 32 free, in pieces of at most 8"));
    let shrunk = it.arena.allocate_for(SeqId(9), 9 * 16, OutOfMemory::Shrink).unwrap();
    assert_eq!((shrunk.tokens, shrunk.handle.len), (128, 8));
}

/// Blocks that the buddy allocator adds by rounding up are reported as waste, and allow growth without a move.
#[test]
fn buddies_reserve_powers_of_two() {
    let mut it = Simulation::new("buddy", 64, 1);
    let handle = it.allocate(A, 5, OutOfMemory::Reject).unwrap().handle;
    assert_eq!((handle.len, handle.reserved), (5, 8));
    it.append(A, 5, CapacityExceeded::Error, true).unwrap();
    assert_eq!(it.arena.report().internal_fragmentation(), 0.375);
    let append = it.arena.append(A, 3, CapacityExceeded::Error).unwrap().unwrap();
    assert_eq!((append.copy(), append.handle().reserved), (None, 8));
    append.commit();
    assert_eq!(it.arena.report().internal_fragmentation(), 0.0);
}

/// A handle that cannot grow in place takes its used blocks along. Until the commit the old blocks stay intact.
#[test]
fn growth_by_a_move_is_a_plan() {
    let mut it = Simulation::new("first_fit", 16, 4);
    it.allocate(A, 8, OutOfMemory::Reject).unwrap();
    it.append(A, 7, CapacityExceeded::Error, true).unwrap();
    it.allocate(B, 4, OutOfMemory::Reject).unwrap();
    let append = it.arena.append(A, 5, CapacityExceeded::Error).unwrap().unwrap();
    assert_eq!(append.copy(), Some(BlockCopy { from: 0, to: 3, len: 2 }));
    let cells: Vec<BlockCells> = append.writes().collect();
    assert_eq!(
        cells,
        [BlockCells { block: 4, offset: 3, len: 1 }, BlockCells { block: 5, offset: 0, len: 4 }]
    );
    drop(append);
    it.check();
    assert_eq!(it.arena.handle(A).unwrap().start, 0);
    it.append(A, 5, CapacityExceeded::Error, true).unwrap();
    it.check();
    assert_eq!(it.arena.handle(A).unwrap().start, 3);
    assert_eq!(it.arena.report().counters.blocks_copied, 2);
}

#[test]
fn resize_remaps_what_does_not_fit_where_it_lies() {
    let mut it = Simulation::new("first_fit", 16, 2);
    for seq in [A, B, C] {
        it.allocate(seq, 8, OutOfMemory::Reject).unwrap();
        it.append(seq, 8, CapacityExceeded::Error, true).unwrap();
    }
    it.arena.free_for(A).unwrap();
    it.lost(A);
    let starts = |it: &Simulation| [B, C].map(|seq| it.arena.handle(seq).unwrap().start);
    it.resize(10, true).unwrap();
    assert_eq!(starts(&it), [4, 0], "C lay at 8..12 and goes where A was");
    it.resize(32, true).unwrap();
    assert_eq!(starts(&it), [4, 0]);
    it.check();
    let refused = it.resize(7, true).unwrap_err();
    assert_eq!(refused, ArenaRefused::NoRoom { needed_blocks: 8, free_blocks: 7, largest_free_run: 7 });
    it.resize(8, true).unwrap();
    assert!(it.arena.is_exhausted());
    it.check();
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut it = Simulation::new("first_fit", 4, 4);
    assert_eq!(Arena::new(0, build("buddy", 4)).err(), Some(ArenaRefused::Empty));
    assert_eq!(Arena::new(4, build("buddy", 0)).err(), Some(ArenaRefused::Empty));
    assert_eq!(it.allocate(A, 0, OutOfMemory::Evict), Err(ArenaRefused::Empty));
    it.allocate(A, 1, OutOfMemory::Reject).unwrap();
    assert_eq!(it.allocate(A, 1, OutOfMemory::Evict), Err(ArenaRefused::SequenceExists(A)));
    let too_much = it.allocate(B, u32::MAX, OutOfMemory::Evict);
    assert!(matches!(too_much, Err(ArenaRefused::NoRoom { needed_blocks: 0x4000_0000, .. })), "{too_much:?}");
    assert!(it.arena.used_tokens(A).is_some(), "no sequence is evicted in vain");
    it.append(A, 1, CapacityExceeded::Error, true).unwrap();
    let too_long = it.append(A, u32::MAX, CapacityExceeded::Error, true);
    assert_eq!(too_long, Err(ArenaRefused::TooLong { seq: A, tokens: 1 << 32 }));
    assert_eq!(it.append(A, 0, CapacityExceeded::Halt, true), Err(ArenaRefused::Empty));
    assert_eq!(it.append(B, 1, CapacityExceeded::Halt, true), Err(ArenaRefused::UnknownSequence(B)));
    assert_eq!(it.arena.used_tokens(B), None);
    assert_eq!(it.resize(0, true), Err(ArenaRefused::Empty));
}
