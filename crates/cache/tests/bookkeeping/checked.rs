//! The step protocol without lifetimes: calls at the wrong time are errors that change nothing.
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;

const A: SeqId = SeqId::ONLY;

/// A cache of one sequence, for two layers that own K and V and one that borrows from the first.
fn checked(kind: &str) -> CheckedCache {
    let group = GroupSpec { capacity_tokens: 16, visibility: Visibility::FULL, max_step_tokens: 8 };
    let mut cache = Cache::new(vec![kinds::build(kind, &group).unwrap()]);
    if let Some(mut sequences) = cache.sequences() {
        sequences.seq_new(A).unwrap();
    }
    CheckedCache::new(cache, LayerOrder::new([0, 1, 0].map(LayerId)))
}

fn run(cache: &mut CheckedCache, layer: u16, has_kv: bool) -> Result<(), Misuse> {
    cache.layer(LayerId(layer), has_kv, |plan| {
        assert!(plan.has_reads());
        Ok(())
    })
}

/// Runs every layer of the step in flight.
fn run_all(cache: &mut CheckedCache) {
    for (layer, has_kv) in [(0, true), (1, true), (2, false)] {
        run(cache, layer, has_kv).unwrap();
    }
}

const fn out_of_order(layer: u16) -> Misuse {
    Misuse::Layer(LayerError::OutOfOrder(LayerId(layer)))
}

#[test]
fn layers_run_once_and_borrowers_after_their_owner() {
    let mut cache = checked("cells");
    assert_eq!(run(&mut cache, 0, true), Err(Misuse::NoStep));
    cache.begin(&StepRequest { spans: &[Span::chain(A, 0, 1)] }).unwrap();
    let unknown = Misuse::Layer(LayerError::Unknown { layer: LayerId(3), n_layers: 3 });
    assert_eq!(run(&mut cache, 3, true), Err(unknown));
    assert_eq!(run(&mut cache, 0, false), Err(out_of_order(0)), "an owner without K and V");
    assert_eq!(run(&mut cache, 2, false), Err(out_of_order(2)), "before its owner");
    let failed = cache.layer(LayerId(1), true, |_| Err(Misuse::StepInFlight));
    assert_eq!(failed, Err(Misuse::StepInFlight), "the caller's own error");
    run(&mut cache, 1, true).unwrap(); // a layer that failed runs again; owners run in any order
    assert_eq!(cache.commit(), Err(out_of_order(0)));
    run(&mut cache, 0, true).unwrap();
    assert_eq!(run(&mut cache, 0, true), Err(out_of_order(0)), "twice");
    assert_eq!(run(&mut cache, 2, true), Err(out_of_order(2)), "a borrower with K and V");
    assert_eq!(cache.commit_kept(&[Kept::All]), Err(out_of_order(2)));
    run(&mut cache, 2, false).unwrap();
    cache.commit().unwrap();
    cache.begin(&StepRequest { spans: &[Span::chain(A, 1, 1)] }).unwrap();
    assert_eq!(cache.commit(), Err(out_of_order(0)), "the next step starts anew");
    cache.abort();
    assert_eq!(cache.cache().unwrap().next_position(A), Some(1));
}

#[test]
fn drafts_keep_a_beginning_or_a_path() {
    let mut chain = checked("contiguous");
    chain.begin(&StepRequest { spans: &[Span::chain(A, 0, 4)] }).unwrap();
    run_all(&mut chain);
    let more = Refused::KeepsMore { seq: A, planned: 4, kept: 5 };
    assert_eq!(chain.commit_kept(&[Kept::First(5)]), Err(Misuse::Refused(more)));
    chain.commit_kept(&[Kept::First(2)]).unwrap(); // still in flight after the refusal
    assert_eq!(chain.commit_kept(&[Kept::All]), Err(Misuse::NoStep));
    assert_eq!(chain.cache().unwrap().next_position(A), Some(2));

    let mut tree = checked("tree");
    let parents = [None, Some(NodeId(0)), Some(NodeId(0))];
    tree.begin(&StepRequest { spans: &[Span { seq: A, start: 0, new: New::Tree(&parents) }] }).unwrap();
    run_all(&mut tree);
    tree.commit_kept(&[Kept::Path(&[NodeId(0), NodeId(2)])]).unwrap();
    assert_eq!(tree.cache().unwrap().next_position(A), Some(2));
    assert_eq!(tree.cache().unwrap().report()[0].used_cells, 2);
}

/// Callers without lifetimes get block tables, and the copies that a kept path needs.
#[test]
fn tables_and_moves_of_a_step_in_flight() {
    let mut cache = checked("paged");
    assert_eq!(cache.with_tables().err(), Some(Misuse::NoStep));
    let parents = [None, None, Some(NodeId(1))];
    cache.begin(&StepRequest { spans: &[Span { seq: A, start: 0, new: New::Tree(&parents) }] }).unwrap();
    let mut tables = BlockTables::default();
    let group = cache.with_tables().unwrap().group(GroupId(0));
    group.tables(16, &mut tables).unwrap();
    assert_eq!((&tables.kv_len[..], tables.slots.len(), tables.blocks.len()), (&[3][..], 3, 1));
    let mut moves = MovePlan::default();
    let kept = [Kept::Path(&[NodeId(1), NodeId(2)])];
    assert_eq!(cache.kept_moves(&kept, &mut moves), Err(out_of_order(0)), "no layer has run");
    run_all(&mut cache);
    cache.kept_moves(&kept, &mut moves).unwrap();
    let (from, to) = (tables.slots[1], tables.slots[0]);
    assert_eq!(
        moves.groups(),
        [(GroupId(0), vec![CellCopy { from, to, len: 1 }, CellCopy { from: from + 1, to: to + 1, len: 1 }])]
    );
    cache.commit_kept(&kept).unwrap();
    assert_eq!(cache.cache().unwrap().next_position(A), Some(2));
}
