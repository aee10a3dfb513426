//! Reports as text: the figures of a known state.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::*;

/// A fork shares blocks. After both sequences have grown, each ends in its own partly filled block.
#[test]
fn blocks_are_counted_once() {
    let group = GroupSpec { capacity_tokens: 256, visibility: Visibility::FULL, max_step_tokens: 64 };
    let spec = PagedSpec { block_tokens: 16, groups: vec![group], rollback_tokens: 0, prefix: None };
    let mut cache = Cache::paged(&spec).unwrap();
    let (a, b) = (SeqId(1), SeqId(2));
    cache.sequences().unwrap().seq_new(a).unwrap();
    let grow = |cache: &mut Cache, seq, n| {
        let mut plan = StepPlan::default();
        let spans = [Span::chain(seq, cache.next_position(seq).unwrap(), n)];
        Step::begin(cache, &StepRequest { spans: &spans }, &mut plan).unwrap().commit();
    };
    grow(&mut cache, a, 32);
    cache.sequences().unwrap().fork(a, b).unwrap();
    grow(&mut cache, a, 4);
    grow(&mut cache, b, 12);
    let text = cache.report()[0].to_string();
    let lines = "blocks of 16 tokens: 4 of 16 in use, 0 evictable, 12 free\n\
                 fragmentation: external 0.00 (any free block serves any request), internal 0.25 (16 cells of blocks in use unused)\n\
                 so far: 4 allocated, 0 freed, 0 evicted, 0 hit, 0 stored, 2 shared, 0 copied on write, 0 became evictable\n";
    assert!(text.contains(lines), "{text}");
    assert!(text.contains("sequences: 2\n  1: 36 tokens, next position 36"), "{text}");

    // A third sequence that shares a partly filled block does not change its unused cells; its copy does, once it
    // writes.
    let c = SeqId(3);
    cache.sequences().unwrap().fork(b, c).unwrap();
    assert_eq!(cache.report()[0].blocks.unwrap().unused_cells, 16);
    grow(&mut cache, c, 1);
    let blocks = cache.report()[0].blocks.unwrap();
    assert_eq!((blocks.unused_cells, blocks.counters.copied_on_write), (16 + 3, 1));
    assert_eq!(blocks.internal_fragmentation(), 19.0 / 80.0);
}
