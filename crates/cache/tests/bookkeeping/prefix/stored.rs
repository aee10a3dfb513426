//! What is stored, and when it goes.
use super::*;

#[test]
fn the_log_tells_the_life_of_a_block() {
    let mut rig = Rig::new(&spec(4, 16));
    rig.cache.watch_blocks(true);
    rig.cache.watch_prefixes(true);
    rig.serve("", &Content::Tokens(&count(5)));
    rig.serve("", &Content::Tokens(&count(6)));
    rig.prefixes().evict_until_free(16, AT);
    let (mut blocks, mut prefixes) = (Vec::new(), Vec::new());
    rig.cache.drain_block_events(&mut blocks);
    rig.cache.drain_prefix_events(&mut prefixes);
    let life: Vec<_> = blocks
        .iter()
        .map(|e| (e.step, e.block, e.seq.map(|s| s.0), e.change.name(), e.reason.name()))
        .collect();
    let first = |step, seq, change, reason| (step, 0, Some(seq), change, reason);
    assert_eq!(
        life,
        [
            first(0, 0, "alloc", "append"),
            (1, 1, Some(0), "alloc", "append"),
            first(2, 0, "store", "store"),
            (2, 1, Some(0), "free", "remove"),
            first(2, 0, "idle", "remove"),
            first(2, 1, "hit", "open"),
            (2, 1, Some(1), "alloc", "append"),
            (3, 1, Some(1), "free", "remove"),
            first(3, 1, "idle", "remove"),
            (3, 0, None, "evict", "make_room"),
        ]
    );
    assert!(
        matches!(prefixes[..], [PrefixEvent::Stored { .. }, PrefixEvent::Removed { .. }]),
        "{prefixes:?}"
    );
}

/// Users choose salts, so unused ones must be removed, even where all groups have windows that have moved on.
#[test]
fn salts_go_with_their_last_block_and_sequence() {
    let mut spec = spec(4, 1000);
    spec.groups[0].visibility.window = Some(4);
    let mut rig = Rig::new(&spec);
    for user in 0..50u32 {
        let tokens: Vec<u32> = (0..8).map(|i| user * 100 + i).collect();
        let (seq, salt) = (SeqId(user), format!("user {user}"));
        rig.prefixes().open(seq, &salt, &Content::Tokens(&tokens), AT).expect("it is new");
        rig.grow(seq, 8);
        rig.prefixes().store(seq, &Content::Tokens(&tokens), AT).expect("it is open");
        rig.grow(seq, 20);
        rig.prefixes().evict_until_free(u32::MAX, AT);
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
        rig.prefixes().evict_until_free(u32::MAX, AT);
    }
    assert_eq!(rig.cache.report()[0].used_cells, 0);
    assert_eq!(rig.prefixes().report().n_salts, 0);
}

/// A block cannot store two contents. A call that says so is refused before anything is stored.
#[test]
fn content_that_lies_is_refused() {
    let mut rig = Rig::new(&spec(4, 400));
    let (a, b) = ([1u32; 13], [2u32; 13]);
    rig.prefixes().open(SeqId(0), "", &Content::Tokens(&a), AT).expect("it is new");
    rig.grow(SeqId(0), 12);
    rig.cache.sequences().expect("many").fork(SeqId(0), SeqId(1)).expect("it is new");
    assert_eq!(rig.prefixes().store(SeqId(0), &Content::Tokens(&a), AT), Ok(Stored { n_new: 3, n_known: 0 }));
    let refused = Refused::OtherContent { seq: SeqId(1), position: 0 };
    assert_eq!(rig.prefixes().store(SeqId(1), &Content::Tokens(&b), AT), Err(refused));
    assert_eq!(rig.prefixes().store(SeqId(1), &Content::Tokens(&a), AT), Ok(Stored { n_new: 0, n_known: 3 }));
    for seq in [0, 1].map(SeqId) {
        rig.cache.sequences().expect("many").seq_rm(seq, 0, u32::MAX).expect("it is open");
    }
    rig.prefixes().evict_until_free(u32::MAX, AT);
    assert_eq!(rig.cache.report()[0].used_cells, 0);
    assert_eq!(rig.cache.lookup("", &Content::Tokens(&a)).hit_tokens, 0);
}

/// Regression test: `store` checked new blocks only. A caller that passed other tokens for blocks it had stored
/// before got `Ok`, and `OtherContent` never occurred.
#[test]
fn content_that_contradicts_what_was_stored_is_refused() {
    let (honest, seq) = (count(12), SeqId(0));
    let lie = |at: usize| {
        let mut tokens = honest.clone();
        tokens[at] += 100;
        tokens
    };
    let mut rig = Rig::new(&spec(4, 400));
    rig.prefixes().open(seq, "", &Content::Tokens(&honest), AT).expect("it is new");
    rig.grow(seq, 8);
    let stored = |n_new, n_known| Ok(Stored { n_new, n_known });
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&honest[..8]), AT), stored(2, 0));
    rig.grow(seq, 4);
    let before = (rig.cache.report(), rig.prefixes().report());
    for (at, block) in [(0, 0), (3, 0), (4, 4), (7, 4)] {
        let refused = Err(Refused::OtherContent { seq, position: block });
        assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&lie(at)), AT), refused, "a lie at {at}");
        let shorter = &lie(at)[..8];
        assert_eq!(rig.prefixes().store(seq, &Content::Tokens(shorter), AT), refused, "and nothing new");
        let tail = rig.prefixes().store_from(seq, block, &Content::Tokens(&lie(at)), AT);
        assert_eq!(tail, refused, "the block from which on it hands over");
    }
    assert_eq!((rig.cache.report(), rig.prefixes().report()), before, "a refusal changed something");
    // If several blocks differ, the error names the first.
    let all: Vec<u32> = honest.iter().map(|t| t + 100).collect();
    let refused = Err(Refused::OtherContent { seq, position: 0 });
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&all), AT), refused);
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&honest[..3]), AT), stored(0, 0), "no whole block");
    assert_eq!(
        rig.prefixes().store(seq, &Content::Tokens(&honest[..7]), AT),
        stored(0, 1),
        "a shorter truth"
    );

    // Stored blocks before `from` are not compared.
    assert_eq!(rig.prefixes().store_from(seq, 8, &Content::Tokens(&lie(5)), AT), stored(1, 0));
    assert_eq!(rig.prefixes().store_from(seq, 4, &Content::Tokens(&honest), AT), stored(0, 2));
    assert_eq!(rig.prefixes().store_from(seq, u32::MAX, &Content::Tokens(&honest), AT), stored(0, 0));
    assert_eq!(
        rig.cache.lookup("", &Content::Tokens(&count(13))).hit_tokens,
        12,
        "the truth is what is stored"
    );
    // After a rollback, other tokens are allowed.
    rig.cache.sequences().expect("many").seq_rm(seq, 4, u32::MAX).expect("it is open");
    rig.grow(seq, 8);
    assert_eq!(rig.prefixes().store(seq, &Content::Tokens(&lie(5)), AT), stored(2, 1));
}
