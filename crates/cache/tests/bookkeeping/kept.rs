//! Steps that keep only some of their tokens, by example. The random tests are in `properties.rs` and `paged/`.
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;

fn cache(kind: &str, window: Option<u32>) -> Cache {
    let visibility = Visibility { window, sinks: 0 };
    let group = GroupSpec { capacity_tokens: 64, visibility, max_step_tokens: 8 };
    Cache::new(vec![kinds::build(kind, &group).unwrap()])
}

/// Appends `n_tokens` to `seq` and keeps `kept` of them.
fn append(cache: &mut Cache, seq: SeqId, n_tokens: u32, kept: Kept<'_>) -> Result<(), Refused> {
    let spans = [Span::chain(seq, cache.next_position(seq).unwrap(), n_tokens)];
    let mut plan = StepPlan::default();
    Step::begin(cache, &StepRequest { spans: &spans }, &mut plan)?.commit_kept(&[kept])
}

/// Every kind keeps the beginning of a chain, also a ring, which cannot rewind.
#[test]
fn every_kind_keeps_a_length() {
    for kind in kinds::KINDS.iter().map(|kind| kind.name) {
        let mut cache = cache(kind, Some(9));
        let seq = SeqId::ONLY;
        if let Some(mut sequences) = cache.sequences() {
            sequences.seq_new(seq).unwrap();
        }
        for (planned, kept, next) in [(8, 3, 3), (8, 0, 3), (8, 8, 11), (1, 0, 11), (8, 7, 18)] {
            append(&mut cache, seq, planned, Kept::First(kept)).unwrap();
            assert_eq!(cache.next_position(seq), Some(next), "{kind}");
        }
        let before = cache.report();
        let refused = append(&mut cache, seq, 4, Kept::First(5));
        assert_eq!(refused, Err(Refused::KeepsMore { seq, planned: 4, kept: 5 }), "{kind}");
        let refused = append(&mut cache, seq, 1, Kept::Path(&[NodeId(0)]));
        assert!(matches!(refused, Err(Refused::Unsupported(_))), "{kind}: {refused:?}");
        assert_eq!(cache.report(), before, "{kind}: a refusal changes nothing");
    }
}

/// Blocks of rejected tokens are free at once.
#[test]
fn rejected_tokens_occupy_no_blocks() {
    let mut cache = cache("paged", None);
    cache.sequences().unwrap().seq_new(SeqId(0)).unwrap();
    append(&mut cache, SeqId(0), 60, Kept::First(17)).unwrap();
    let blocks = cache.report()[0].blocks.unwrap();
    assert_eq!((blocks.total, blocks.free), (4, 2));
    append(&mut cache, SeqId(0), 40, Kept::All).unwrap();
}

/// One entry per span; the spans of a step may keep different lengths.
#[test]
fn every_span_says_what_it_keeps() {
    let mut cache = cache("cells", None);
    let mut spans = Vec::new();
    for seq in (0..3).map(SeqId) {
        cache.sequences().unwrap().seq_new(seq).unwrap();
        spans.push(Span::chain(seq, 0, 5));
    }
    let request = StepRequest { spans: &spans };
    let mut plan = StepPlan::default();
    let step = Step::begin(&mut cache, &request, &mut plan).unwrap();
    let refused = step.commit_kept(&[Kept::All, Kept::All]);
    assert_eq!(refused, Err(Refused::KeptSpans { planned: 3, got: 2 }));
    let step = Step::begin(&mut cache, &request, &mut plan).unwrap();
    step.commit_kept(&[Kept::First(2), Kept::First(0), Kept::All]).unwrap();
    assert_eq!((0..3).map(|seq| cache.next_position(SeqId(seq)).unwrap()).collect::<Vec<_>>(), [2, 0, 5]);
    assert_eq!(cache.report()[0].used_cells, 7);
    let kept: Vec<(SeqId, u32)> = plan.spans().iter().map(|span| (span.seq, span.n_tokens)).collect();
    assert_eq!((kept, plan.n_tokens()), (vec![(SeqId(0), 2), (SeqId(2), 5)], 7));
}

/// A path of the planned nodes becomes part of the sequence in the commit that adds them.
#[test]
fn a_tree_keeps_a_path() {
    let mut cache = cache("tree", None);
    let seq = SeqId(0);
    cache.sequences().unwrap().seq_new(seq).unwrap();
    append(&mut cache, seq, 3, Kept::All).unwrap();
    // 0 and 1 are roots; 2 and 3 follow 0; 4 follows 3.
    let parents = [None, None, Some(NodeId(0)), Some(NodeId(0)), Some(NodeId(3))];
    let spans = [Span { seq, start: 3, new: New::Tree(&parents) }];
    let request = StepRequest { spans: &spans };
    let mut plan = StepPlan::default();
    for wrong in [&[NodeId(2)][..], &[NodeId(0), NodeId(4)], &[NodeId(5)]] {
        let step = Step::begin(&mut cache, &request, &mut plan).unwrap();
        let refused = step.commit_kept(&[Kept::Path(wrong)]);
        assert_eq!(refused, Err(Refused::BadParent { seq, node: wrong[wrong.len() - 1] }));
    }
    let step = Step::begin(&mut cache, &request, &mut plan).unwrap();
    assert!(matches!(step.commit_kept(&[Kept::First(1)]), Err(Refused::Unsupported(_))));
    let step = Step::begin(&mut cache, &request, &mut plan).unwrap();
    step.commit_kept(&[Kept::Path(&[NodeId(0), NodeId(3), NodeId(4)])]).unwrap();
    assert_eq!((cache.next_position(seq), cache.n_nodes(seq)), (Some(6), Some(0)));
    assert_eq!(cache.report()[0].used_cells, 6);
}

/// A paged cache settles a tree with its step: the path takes the first cells of the span, and the blocks behind it are
/// free at once.
#[test]
fn a_paged_cache_keeps_a_path_and_moves_it() {
    let mut cache = cache("paged", None);
    assert!(cache.verifies_trees() && cache.trees().is_none());
    let (seq, node) = (SeqId(0), NodeId);
    cache.sequences().unwrap().seq_new(seq).unwrap();
    append(&mut cache, seq, 14, Kept::All).unwrap();
    // Node 0 is the root; 1, 2 and 3 follow it; 4 follows 2, 5 follows 4, and 6 to 19 are a chain below 5.
    let mut parents = vec![None, Some(node(0)), Some(node(0)), Some(node(0)), Some(node(2)), Some(node(4))];
    parents.extend((5..19).map(|i| Some(node(i))));
    let spans = [Span { seq, start: 14, new: New::Tree(&parents) }];
    let request = StepRequest { spans: &spans };
    let (mut plan, mut moves) = (StepPlan::default(), MovePlan::default());
    let before = cache.report();

    for wrong in [Kept::All, Kept::First(2), Kept::Path(&[NodeId(1)]), Kept::Path(&[NodeId(0), NodeId(4)])] {
        let mut step = Step::begin(&mut cache, &request, &mut plan).unwrap();
        let refused = step.kept_moves(&[wrong], &mut moves).unwrap_err();
        assert!(moves.groups().is_empty());
        assert_eq!(step.commit_kept(&[wrong]), Err(refused), "{wrong:?}");
        assert_eq!(cache.report(), before, "a refusal changes nothing");
    }
    Step::begin(&mut cache, &request, &mut plan).unwrap().commit();
    assert_eq!(cache.next_position(seq), Some(14), "no path was chosen");
    assert_eq!(cache.report()[0].used_cells, before[0].used_cells);

    let mut step = Step::begin(&mut cache, &request, &mut plan).unwrap();
    step.kept_moves(&[Kept::Path(&[node(0)])], &mut moves).unwrap();
    assert!(moves.groups().is_empty(), "it is in place");
    let path = [0, 2, 4, 5, 6].map(NodeId);
    step.kept_moves(&[Kept::Path(&path)], &mut moves).unwrap();
    // The span has cells 14 to 33. Copies run in order: cell 16 is read before it is written.
    let copy = |from, to, len| CellCopy { from, to, len };
    let expected = vec![copy(16, 15, 1), copy(18, 16, 2), copy(20, 18, 1)];
    assert_eq!(moves.groups(), [(GroupId(0), expected)]);
    step.commit_kept(&[Kept::Path(&path)]).unwrap();
    assert_eq!((cache.next_position(seq), cache.n_nodes(seq)), (Some(19), None));
    assert_eq!((cache.report()[0].used_cells, plan.spans()[0].kind), (32, SpanKind::Chain));
}

/// Rejected nodes push nothing out of the window.
#[test]
fn only_kept_nodes_move_the_window() {
    let mut cache = cache("paged", Some(16));
    let seq = SeqId(0);
    cache.sequences().unwrap().seq_new(seq).unwrap();
    append(&mut cache, seq, 20, Kept::All).unwrap();
    let parents: Vec<Option<NodeId>> = (0..20u32).map(|i| i.checked_sub(1).map(NodeId)).collect();
    let spans = [Span { seq, start: 20, new: New::Tree(&parents) }];
    let mut plan = StepPlan::default();
    let step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    step.commit_kept(&[Kept::Path(&[NodeId(0)])]).unwrap();
    assert_eq!((cache.next_position(seq), cache.seq_len(seq)), (Some(21), Some(21)));
}

/// `commit` keeps all, which a paged cache cannot: its nodes do not outlive their step.
#[test]
fn a_checked_cache_refuses_to_commit_a_tree_that_it_cannot_settle() {
    let mut checked = CheckedCache::new(cache("paged", None), LayerOrder::new([LayerId(0)]));
    checked.cache().unwrap().sequences().unwrap().seq_new(SeqId(0)).unwrap();
    let spans = [Span { seq: SeqId(0), start: 0, new: New::Tree(&[None, None]) }];
    checked.begin(&StepRequest { spans: &spans }).unwrap();
    assert!(matches!(checked.commit(), Err(Misuse::Refused(Refused::Unsupported(_)))));
    assert_eq!(checked.cache().err(), Some(Misuse::StepInFlight));
    checked.abort();
    assert_eq!(checked.cache().unwrap().next_position(SeqId(0)), Some(0));
}

/// A plan can be kept and used later, but not once the cache has changed.
#[test]
fn a_step_is_made_of_a_plan_while_the_cache_is_unchanged() {
    let mut cache = cache("contiguous", None);
    let mut plan = StepPlan::default();
    let spans = [Span::chain(SeqId::ONLY, 0, 4)];
    cache.can_run(&StepRequest { spans: &spans }, &mut plan).unwrap();
    drop(Step::of_plan(&mut cache, &mut plan).expect("nothing has changed"));
    Step::of_plan(&mut cache, &mut plan).expect("a dropped step changes nothing").commit();
    assert!(Step::of_plan(&mut cache, &mut plan).is_none());
    assert_eq!(cache.next_position(SeqId::ONLY), Some(4));
}
