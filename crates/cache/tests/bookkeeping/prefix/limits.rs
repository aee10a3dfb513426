//! Names, sizes, refusals, and sequences that the index does not cache.
use super::*;

/// Routers and cache tiers compare prefix hashes with their own. The hashes are the same in every run, every version
/// and on every machine, and depend on each bit of a token.
#[test]
fn names_of_prefixes_are_pinned() {
    let rig = Rig::new(&spec(3, 30));
    let hash = |salt, tokens: &[u32]| rig.cache.prefix_hash(salt, tokens);
    assert_eq!(hash("", &[]), 0xe220_a839_7b1d_cdaf);
    let pinned = [
        ("", vec![0, 0, 0], 0x4e08_f9af_d2fd_2e59),
        ("", vec![1, 2, 3], 0x8aa2_8fe5_a372_35ef),
        ("", vec![1, 2, 3, 4, 5, 6], 0xec7e_e9d7_1f51_b888),
        ("tenant", vec![1, 2, 3], 0x11e0_72d6_c928_4145),
        ("tenant", vec![u32::MAX, u32::MAX, u32::MAX], 0x9508_6af8_a764_05a9),
    ];
    for (salt, tokens, expected) in pinned {
        assert_eq!(hash(salt, &tokens), expected, "{salt} {tokens:?}: {:#x}", hash(salt, &tokens));
    }
    let mut seen = std::collections::BTreeSet::new();
    let names = (0..3).flat_map(|at| (0..32).map(move |bit| (at, bit)));
    for (at, bit) in names {
        let mut tokens = [7; 3];
        tokens[at] ^= 1 << bit;
        assert!(seen.insert(hash("", &tokens)), "bit {bit} of token {at} does not count");
    }
    assert_eq!(hash("", &[1, 2, 3, 9]), hash("", &[1, 2, 3]), "whole blocks only");
    assert_ne!(hash("a", &[1, 2, 3]), hash("b", &[1, 2, 3]));
}

/// A step that does not fit says how to make it fit, and doing so works.
#[test]
fn no_space_says_what_to_try() {
    let mut rig = Rig::new(&spec(16, 64));
    rig.serve("", &Content::Tokens(&count(32)));
    let seq = SeqId(7);
    rig.prefixes().open(seq, "", &Content::Unknown { n_tokens: 80 }, AT).expect("it is new");
    let (spans, long) = ([Span::chain(seq, 0, 48)], [Span::chain(seq, 0, 80)]);
    let (request, long) = (StepRequest { spans: &spans }, StepRequest { spans: &long });
    let refused = rig.cache.can_run(&request, &mut rig.plan).expect_err("32 cells are evictable");
    let of = |needed, reclaimable| Refused::NoSpace { group: GroupId(0), needed, free: 32, reclaimable };
    assert_eq!(refused, of(48, 32));
    assert_eq!(
        refused.to_string(),
        "the step needs 48 cells of layer group 0, and 32 are free; 32 more are evictable: evict until 48 are free, and try again"
    );
    let refused = rig.cache.can_run(&long, &mut rig.plan).expect_err("it never fits");
    assert_eq!(refused, of(80, 32));
    assert!(refused.to_string().contains("which is not enough: remove or shorten sequences"), "{refused}");
    let exact = of(64, 32).to_string();
    assert!(exact.ends_with("evict until 64 are free, and try again"), "{exact}");
    let none = of(48, 0).to_string();
    assert!(
        none.ends_with("32 are free: remove or shorten sequences, or add fewer tokens at once"),
        "{none}"
    );
    assert_eq!(rig.prefixes().evict_until_free(48, AT), 1);
    assert_eq!(rig.cache.can_run(&request, &mut rig.plan), Ok(()));
}

/// Regression test: a capacity below one block made a cache without cells, in which nothing ever fits.
#[test]
fn a_group_holds_at_least_one_block() {
    let error = Cache::paged(&spec(16, 15)).err().expect("no block fits").to_string();
    assert!(error.contains("less than one block") && error.contains("smaller blocks"), "{error}");
    let cache = Cache::paged(&spec(16, 16)).expect("one block fits");
    assert_eq!(cache.capacity_cells(), [16]);
}

#[test]
fn drafts_are_counted_and_a_sequence_of_drafts_stays() {
    let mut rig = Rig::new(&spec(4, 400));
    let seq = SeqId(0);
    rig.prefixes().open(seq, "salt", &Content::Tokens(&[1]), AT).expect("it is new");
    rig.grow(seq, 3);
    let accept = |rig: &mut Rig, drafted, accepted| {
        rig.cache.sequences().expect("many").accept(seq, drafted, accepted)
    };
    assert_eq!(accept(&mut rig, 2, 3), Err(Refused::AcceptsMore { seq, drafted: 2, accepted: 3 }));
    assert_eq!(accept(&mut rig, 4, 1), Err(Refused::DraftsMore { seq, len: 3, drafted: 4 }));
    assert_eq!(accept(&mut rig, 2, 1), Ok(()));
    assert_eq!(rig.cache.next_position(seq), Some(2));
    assert_eq!(accept(&mut rig, 2, 0), Ok(()));
    assert_eq!(rig.cache.next_position(seq), Some(0));
    // The sequence still has its salt.
    rig.grow(seq, 5);
    rig.prefixes().store(seq, &Content::Tokens(&count(5)), AT).expect("it is open");
    assert_eq!(rig.cache.lookup("salt", &Content::Tokens(&count(5))).hit_tokens, 4);
}

/// A capacity limit also works where it is the largest that blocks of this size can count, and the very last position
/// works like any other.
#[test]
fn the_largest_sizes_are_sizes() {
    let block_tokens = 1 << 20;
    let mut rig = Rig::new(&spec(block_tokens, u32::MAX / block_tokens * block_tokens));
    assert_eq!(rig.prefixes().report().policy, Some("lru"));
    let mut rig = Rig::new(&spec(block_tokens, u32::MAX));
    assert_eq!(rig.prefixes().report().policy, None, "without a bound nothing is evicted");

    let mut spec = spec(u32::MAX / 2, u32::MAX);
    spec.groups[0].visibility.window = Some(5);
    spec.prefix = None;
    let mut rig = Rig::new(&spec);
    rig.cache.sequences().expect("many").seq_new(SeqId(0)).expect("it is new");
    rig.grow(SeqId(0), u32::MAX - 1);
    let spans = [Span::chain(SeqId(0), u32::MAX - 1, 1)];
    let request = StepRequest { spans: &spans };
    let done = Step::begin(&mut rig.cache, &request, &mut rig.plan).map(Step::commit);
    assert!(matches!(done, Ok(()) | Err(Refused::NoSpace { .. })), "{done:?}");
}

#[test]
fn watchers_hear_that_all_is_forgotten() {
    let mut rig = Rig::new(&spec(4, 100));
    rig.cache.watch_blocks(true);
    rig.cache.watch_prefixes(true);
    rig.prefixes().open(SeqId(0), "", &Content::Tokens(&[1]), AT).expect("it is new");
    rig.grow(SeqId(0), 9);
    rig.cache.clear();
    let (mut blocks, mut prefixes) = (Vec::new(), Vec::new());
    rig.cache.drain_block_events(&mut blocks);
    rig.cache.drain_prefix_events(&mut prefixes);
    assert_eq!(blocks.iter().filter(|event| event.change == Change::Free).count(), 3);
    assert_eq!(prefixes, [PrefixEvent::Cleared]);
}

/// A fork keeps its own copies of blocks for which its sibling switched to those of the index, and shares with it the
/// later blocks, which the index learned from the sibling. So evictable blocks may all be inner nodes, with no
/// evictable leaf. Then the lowest of them are evicted, least recently used first, and the index drops the blocks below
/// them that are in use.
#[test]
fn evictable_blocks_above_one_in_use_can_be_evicted() {
    let mut rig = Rig::new(&spec(4, 64));
    let chains = ["a", "b", "c"];
    let tokens = count(12);
    let (sibling, fork) = (|i: u32| SeqId(100 + i), |i: u32| SeqId(200 + i));
    let mut tables = Vec::new();
    for (i, salt) in (0..).zip(chains) {
        rig.prefixes().open(sibling(i), salt, &Content::Tokens(&tokens), AT).expect("it is new");
        rig.grow(sibling(i), 12);
        rig.cache.sequences().expect("many").fork(sibling(i), fork(i)).expect("it is open");
        rig.serve(salt, &Content::Tokens(&tokens[..8]));
        rig.prefixes().store(sibling(i), &Content::Tokens(&tokens), AT).expect("it is open");
        let table = rig.cache.block_table(GroupId(0), sibling(i)).expect("it is open");
        assert_ne!(table[..2], rig.cache.block_table(GroupId(0), fork(i)).expect("it is open")[..2]);
        tables.push(table);
    }
    for i in [2, 0, 1] {
        rig.cache.sequences().expect("many").seq_rm(sibling(i), 0, u32::MAX).expect("it is open");
    }
    rig.cache.watch_blocks(true);
    rig.cache.watch_prefixes(true);
    let (mut blocks, mut stored, mut removed) = (Vec::new(), Vec::new(), Vec::new());
    // The log of prefixes begins with what is there: three chains of three blocks.
    rig.cache.drain_prefix_events(&mut stored);
    let stored = stored.iter().filter(|event| matches!(event, PrefixEvent::Stored { .. }));
    assert_eq!(stored.count(), 9);
    assert_eq!(rig.prefixes().evict_until_free(7 * 4, AT), 6);
    rig.cache.drain_block_events(&mut blocks);
    rig.cache.drain_prefix_events(&mut removed);
    let gone: Vec<u32> = blocks.iter().filter(|e| e.change == Change::Evict).map(|e| e.block).collect();
    let block = |i: usize, n: usize| tables[i][n].expect("nothing has left a window");
    assert_eq!(gone, [block(2, 1), block(2, 0), block(0, 1), block(0, 0), block(1, 1), block(1, 0)]);
    assert_eq!(removed.len(), 9, "and three that are held");
    assert!(chains.iter().all(|salt| rig.cache.lookup(salt, &Content::Tokens(&tokens)).hit_tokens == 0));
    assert_eq!(rig.cache.report()[0].blocks.expect("paged").free, 7);
}

/// Token counts of a paged sequence, the high-water mark, and ranges that end where the sequence does.
#[test]
fn a_paged_sequence_is_as_long_as_what_it_holds() {
    let mut rig = Rig::new(&spec(4, 64));
    let seq = SeqId(5);
    assert_eq!(rig.cache.seq_len(seq), None);
    rig.cache.sequences().unwrap().seq_new(seq).unwrap();
    rig.grow(seq, 5);
    assert_eq!((rig.cache.seq_len(seq), rig.plan.group(GroupId(0)).cells_end), (Some(5), 8));
    assert!(matches!(rig.cache.sequences().unwrap().seq_rm(seq, 1, 4), Err(Refused::Unsupported(_))));
    rig.cache.sequences().unwrap().seq_rm(seq, 3, 5).unwrap();
    assert_eq!(rig.cache.seq_len(seq), Some(3));

    // A window of 6: at position 14 a query sees positions from 9 on, and the two blocks before are gone.
    let mut windowed = spec(4, 64);
    windowed.groups[0].visibility.window = Some(6);
    let mut rig = Rig::new(&windowed);
    rig.cache.sequences().unwrap().seq_new(seq).unwrap();
    rig.grow(seq, 5);
    rig.grow(seq, 9);
    assert_eq!((rig.cache.next_position(seq), rig.cache.seq_len(seq)), (Some(14), Some(6)));
}
