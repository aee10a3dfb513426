//! Blocks in transfer, story by story. `paged` compares them with a reference model under random operations.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const AT: Moment = Moment { now_ns: 0 };
const ARRIVED: Result<(), ()> = Ok(());

/// Blocks of 4 tokens, with a prefix index.
fn cache(n_blocks: u32) -> Cache {
    let capacity_tokens = n_blocks * 4;
    let groups = vec![GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: 64 }];
    let prefix = Some(PrefixSpec::default());
    Cache::paged(&PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix }).unwrap()
}

fn grow(cache: &mut Cache, seq: SeqId, n_tokens: u32) -> Result<(), Refused> {
    let spans = [Span::chain(seq, cache.next_position(seq).unwrap_or(0), n_tokens)];
    let mut plan = StepPlan::default();
    Step::begin(cache, &StepRequest { spans: &spans }, &mut plan)?.commit();
    Ok(())
}
fn block(block: u32) -> BlockId {
    BlockId { group: GroupId(0), block }
}
fn free(cache: &Cache) -> u32 {
    cache.report()[0].blocks.unwrap().free
}

/// An export reads the blocks of a sequence while the sequence continues: it appends to a copy of its last block, and
/// may even end. The blocks are free when the export has ended.
#[test]
fn a_pinned_block_is_neither_written_nor_free() {
    let mut cache = cache(8);
    cache.sequences().unwrap().seq_new(A).unwrap();
    grow(&mut cache, A, 6).unwrap();
    let pin = cache.pin(&[block(0), block(1)]).unwrap();
    grow(&mut cache, A, 1).unwrap();
    assert_eq!(cache.block_table(GroupId(0), A).unwrap(), [Some(0), Some(2)], "block 1 is left as it was");
    cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
    assert_eq!(free(&cache), 6);
    cache.clear();
    assert_eq!(free(&cache), 6, "even clearing the cache leaves the export alone");
    cache.unpin(pin);
    assert_eq!(free(&cache), 8);
}

/// A cached block that is being exported is no victim of eviction, and still a hit.
#[test]
fn a_pinned_block_is_not_evicted() {
    let mut cache = cache(4);
    let (tokens, text) = ([1, 2, 3, 4, 5], Content::Tokens(&[1, 2, 3, 4, 5]));
    cache.prefixes().unwrap().open(A, "", &text, AT).unwrap();
    grow(&mut cache, A, tokens.len() as u32).unwrap();
    cache.prefixes().unwrap().store(A, &text, AT).unwrap();
    cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
    let pin = cache.pin(&[block(0)]).unwrap();
    assert_eq!(cache.prefixes().unwrap().evict_until_free(16, AT), 0);
    assert_eq!(cache.lookup("", &text), Lookup { hit_tokens: 4, evictable_tokens: 0 });
    cache.unpin(pin);
    assert_eq!(cache.prefixes().unwrap().evict_until_free(16, AT), 1);
}

/// An import extends a sequence once its bytes are there. Until then nothing can read them.
#[test]
fn loading_blocks_are_neither_free_nor_readable() {
    let mut cache = cache(4);
    let text = Content::Tokens(&[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    cache.prefixes().unwrap().open(A, "", &text, AT).unwrap();
    let loading = cache.load(A, 8).unwrap();
    assert_eq!(loading.blocks(GroupId(0)).collect::<Vec<_>>(), [Some(0), Some(1)]);
    assert_eq!((free(&cache), cache.next_position(A)), (2, Some(0)));
    assert_eq!(cache.pin(&[block(0)]).unwrap_err(), Refused::NoSuchBlock(block(0)));
    assert!(matches!(cache.load(A, 12), Err(Refused::NoSpace { needed: 12, free: 8, .. })));
    cache.arrived(loading, ARRIVED).unwrap();
    assert_eq!((cache.next_position(A), free(&cache)), (Some(8), 2));
    cache.prefixes().unwrap().store(A, &text, AT).unwrap();
    assert_eq!(cache.lookup("", &text).hit_tokens, 8);
}

/// A failed import frees its blocks, and the sequence computes the tokens itself.
#[test]
fn a_failed_import_frees_its_blocks() {
    let mut cache = cache(4);
    cache.sequences().unwrap().seq_new(A).unwrap();
    let loading = cache.load(A, 5).unwrap();
    assert_eq!(cache.arrived(loading, Err("checksum")), Ok(()));
    assert_eq!((cache.next_position(A), free(&cache)), (Some(0), 4));
    grow(&mut cache, A, 16).unwrap();
}

/// An import for a sequence that was removed, created again or extended meanwhile is not appended: the new sequence has
/// another history, perhaps that of another tenant.
#[test]
fn an_import_for_another_history_is_refused() {
    let mut cache = cache(8);
    cache.sequences().unwrap().seq_new(A).unwrap();
    let loading = cache.load(A, 4).unwrap();
    cache.sequences().unwrap().seq_rm(A, 0, u32::MAX).unwrap();
    assert_eq!(cache.arrived(loading, ARRIVED), Err(Refused::UnknownSequence(A)));

    cache.sequences().unwrap().seq_new(B).unwrap();
    let loading = cache.load(B, 4).unwrap();
    cache.sequences().unwrap().seq_rm(B, 0, u32::MAX).unwrap();
    cache.sequences().unwrap().seq_new(B).unwrap();
    let refused = Refused::NotAtEnd { seq: B, expected: 0, got: 0 };
    assert_eq!(cache.arrived(loading, ARRIVED), Err(refused), "another sequence of the same name");

    let loading = cache.load(B, 4).unwrap();
    grow(&mut cache, B, 1).unwrap();
    let refused = Refused::NotAtEnd { seq: B, expected: 1, got: 0 };
    assert_eq!(cache.arrived(loading, ARRIVED), Err(refused));
    assert_eq!(free(&cache), 7);
    assert!(matches!(cache.load(B, 4), Err(Refused::Unsupported(_))), "B ends within a block");

    grow(&mut cache, B, 7).unwrap();
    let loading = cache.load(B, 4).unwrap();
    cache.sequences().unwrap().seq_rm(B, 5, u32::MAX).unwrap();
    grow(&mut cache, B, 3).unwrap();
    let refused = Refused::NotAtEnd { seq: B, expected: 8, got: 8 };
    assert_eq!(cache.arrived(loading, ARRIVED), Err(refused), "as long as before, with other tokens");
}

/// A window group imports only what later queries see.
#[test]
fn a_window_group_loads_what_its_window_shows() {
    let group = |window| GroupSpec {
        capacity_tokens: 64,
        visibility: Visibility { window, sinks: 2 },
        max_step_tokens: 64,
    };
    let groups = vec![group(None), group(Some(6))];
    let spec = PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix: None };
    let mut cache = Cache::paged(&spec).unwrap();
    cache.sequences().unwrap().seq_new(A).unwrap();
    let loading = cache.load(A, 18).unwrap();
    let blocks = |group| loading.blocks(GroupId(group)).map(|block| block.is_some()).collect::<Vec<_>>();
    assert_eq!((blocks(0), blocks(1)), (vec![true; 5], vec![true, false, false, true, true]));
    cache.arrived(loading, ARRIVED).unwrap();
    grow(&mut cache, A, 3).unwrap();
    assert_eq!(
        cache.sequences().unwrap().seq_rm(A, 9, u32::MAX),
        Err(Refused::WindowGone { seq: A, position: 9 })
    );
}

#[test]
#[should_panic(expected = "a transfer of another cache")]
fn a_pin_belongs_to_one_cache() {
    let mut one = cache(1);
    let pin = one.pin(&[]).unwrap();
    cache(1).unpin(pin);
}
