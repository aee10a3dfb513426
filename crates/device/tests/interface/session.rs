//! A session's steps: no step takes effect before its commit, and none commits before every layer has run.
use kvist_cache::kinds::{GroupSpec, KINDS, Visibility};
use kvist_cache::*;
use kvist_device::reference::Reference;
use kvist_device::*;

const A: SeqId = SeqId::ONLY;

/// Two owners and a borrowing layer, with one head of two elements each.
fn session(kind: &str) -> Session {
    let group = GroupSpec {
        capacity_tokens: 64,
        visibility: Visibility { window: Some(8), sinks: 0 },
        max_step_tokens: 8,
    };
    let layer = |owner| LayerSpec::new(GroupId(0), LayerId(owner), 1, 2);
    let layout = Layout { n_heads: 1, layers: vec![layer(0), layer(1), layer(0)] };
    let spec = PoolSpec {
        layout,
        k: Storage::F32,
        v: Storage::F32,
        capacity_cells: vec![],
        max_step_tokens: 8,
        budget: MemoryBudget::unlimited(),
        channels: None,
        recent: Recent::default(),
    };
    let registry = Registry::of(Reference).with(Box::new(Reference));
    let mut session = registry.session("reference", kind, &[group], &spec).unwrap();
    if let Some(mut sequences) = session.cache.sequences() {
        sequences.seq_new(A).unwrap();
    }
    session
}

/// Runs one layer of a step of one token whose value is `v`. Returns the attention output.
fn attend(step: &mut SessionStep<'_>, layer: u16, v: f32) -> Result<f32, DeviceError> {
    let (ones, v, mut out) = ([1f32; 2], [v; 2], [f32::NAN; 2]);
    let kv = (layer < 2).then(|| (Tensor::dense(&ones, 1, 2), Tensor::dense(&v, 1, 2)));
    let out_rows = TensorMut::dense(&mut out, 1, 2);
    let q = Tensor::dense(&ones, 1, 2);
    step.attend(Attend {
        layer: LayerId(layer),
        q,
        kv,
        out: out_rows,
        scale: 1.0,
        softcap: None,
        sinks: None,
    })?;
    Ok(out[0])
}

/// Runs a whole step of one token.
fn step(session: &mut Session, v: f32) -> f32 {
    let spans = [Span::chain(A, session.cache.next_position(A).unwrap(), 1)];
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    let out = attend(&mut step, 0, v).unwrap();
    attend(&mut step, 1, v).unwrap();
    assert_eq!(attend(&mut step, 2, v).unwrap(), out, "the borrower reads what the owner stored");
    step.commit().unwrap();
    out
}

#[test]
fn every_kind_steps() {
    for kind in KINDS.iter().map(|kind| kind.name) {
        let mut session = session(kind);
        assert_eq!([1.0, 2.0, 6.0].map(|v| step(&mut session, v)), [1.0, 1.5, 3.0], "{kind}");
    }
}

#[test]
fn a_dropped_step_changes_nothing() {
    for kind in KINDS.iter().map(|kind| kind.name) {
        let mut session = session(kind);
        step(&mut session, 1.0);
        let before = session.cache.report();
        let spans = [Span::chain(A, 1, 1)];
        for n_layers in 0..3 {
            let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
            (0..n_layers).for_each(|layer| assert!(attend(&mut step, layer, f32::NAN).unwrap().is_nan()));
            drop(step);
            assert_eq!(session.cache.report(), before, "{kind}, dropped after {n_layers} layers");
        }
        assert_eq!(step(&mut session, 3.0), 2.0, "{kind}: the step after sees nothing of the dropped ones");
    }
}

#[test]
fn a_step_commits_only_when_every_layer_has_run() {
    for layers in [&[][..], &[0], &[1], &[0, 1], &[0, 2]] {
        let mut session = session("cells");
        step(&mut session, 1.0);
        let before = session.cache.report();
        let spans = [Span::chain(A, 1, 1)];
        let mut half = session.step(&StepRequest { spans: &spans }).unwrap();
        layers.iter().for_each(|layer| assert!(attend(&mut half, *layer, 9.0).is_ok()));
        let missing = (0..3).find(|layer| !layers.contains(layer)).unwrap();
        match half.commit() {
            Err(DeviceError::LayerOrder(layer)) => assert_eq!(layer, LayerId(missing), "{layers:?}"),
            other => panic!("{layers:?}: {other:?}"),
        }
        assert_eq!(session.cache.report(), before, "{layers:?}");
        assert_eq!(step(&mut session, 3.0), 2.0, "{layers:?}");
    }
}

#[test]
fn layers_run_once_and_borrowers_after_their_owner() {
    let mut session = session("tree");
    let spans = [Span::chain(A, 0, 1)];
    let mut step = session.step(&StepRequest { spans: &spans }).unwrap();
    assert!(matches!(attend(&mut step, 2, 1.0), Err(DeviceError::LayerOrder(LayerId(2)))));
    assert!(matches!(attend(&mut step, 3, 1.0), Err(DeviceError::UnknownLayer { n_layers: 3, .. })));
    attend(&mut step, 1, 1.0).unwrap(); // owners may run in any order
    attend(&mut step, 0, 1.0).unwrap();
    assert!(matches!(attend(&mut step, 0, 1.0), Err(DeviceError::LayerOrder(LayerId(0)))), "twice");
    attend(&mut step, 2, 1.0).unwrap();
    assert!(matches!(attend(&mut step, 2, 1.0), Err(DeviceError::LayerOrder(LayerId(2)))), "twice");
    step.commit().unwrap();
}

#[test]
fn a_refused_request_begins_no_step() {
    let mut session = session("contiguous");
    step(&mut session, 1.0);
    let before = session.cache.report();
    let (gap, long) = ([Span::chain(A, 7, 1)], [Span::chain(A, 1, 64)]);
    for (spans, words) in [
        (&gap[..], "continues at position 1"),
        (&long, "64 cells of layer group 0, and 63 are free"),
        (&[], "empty"),
    ] {
        let request = StepRequest { spans };
        assert!(session.can_run(&request).is_err());
        match session.step(&request).err() {
            Some(StepError::Refused(refused)) => {
                assert!(refused.to_string().contains(words), "{refused}")
            }
            other => panic!("{other:?}"),
        };
    }
    assert_eq!(session.cache.report(), before);
    assert!(session.can_run(&StepRequest { spans: &[Span::chain(A, 1, 1)] }).is_ok());
    assert_eq!(step(&mut session, 3.0), 2.0);
}

/// A step that is kept across calls without a borrow, as C and Python do it.
#[test]
fn a_dropped_step_is_continued() {
    let mut session = session("cells");
    assert!(session.resume().is_none());
    step(&mut session, 1.0);
    assert!(session.resume().is_none(), "committed");
    let spans = [Span::chain(A, 1, 1)];
    let request = StepRequest { spans: &spans };

    drop(session.step(&request).unwrap());
    attend(&mut session.resume().unwrap(), 0, 3.0).unwrap();
    let twice = attend(&mut session.resume().unwrap(), 0, 3.0);
    assert!(matches!(twice, Err(DeviceError::LayerOrder(LayerId(0)))), "{twice:?}");
    attend(&mut session.resume().unwrap(), 1, 3.0).unwrap();
    assert!(session.resume().unwrap().commit().is_err());
    assert_eq!(attend(&mut session.resume().unwrap(), 2, 3.0).unwrap(), 2.0);
    session.resume().unwrap().commit().unwrap();
    assert!(session.resume().is_none(), "committed");
    assert_eq!(session.cache.next_position(A), Some(2));

    let request = StepRequest { spans: &[Span::chain(A, 2, 1)] };
    type Abandon = fn(&mut Session);
    let abandons: [(&str, Abandon); 3] = [
        ("the cache has changed", |session| session.cache.sequences().unwrap().seq_new(SeqId(7)).unwrap()),
        ("a dry run", |session| {
            let spans = [Span::chain(A, 2, 1)];
            session.can_run(&StepRequest { spans: &spans }).unwrap();
        }),
        ("a refused step", |session| assert!(session.step(&StepRequest { spans: &[] }).is_err())),
    ];
    for (why, abandon) in abandons {
        let mut whole = session.step(&request).unwrap();
        (0..3).for_each(|layer| _ = attend(&mut whole, layer, 9.0).unwrap());
        drop(whole);
        assert!(session.resume().is_some());
        abandon(&mut session);
        assert!(session.resume().is_none(), "{why}");
    }
    assert_eq!(step(&mut session, 5.0), 3.0, "the abandoned steps left nothing");
}

/// Drafts: a step keeps the beginning of a chain, or a path of a tree, and later steps read no other token.
#[test]
fn a_step_keeps_a_part_of_its_drafts() {
    fn drafts(
        session: &mut Session,
        new: New<'_>,
        values: &[f32],
        kept: &[Kept<'_>],
    ) -> Result<(), StepError> {
        let start = session.cache.next_position(A).unwrap();
        let mut step = session.step(&StepRequest { spans: &[Span { seq: A, start, new }] }).unwrap();
        let v: Vec<f32> = values.iter().flat_map(|v| [*v; 2]).collect();
        let (ones, mut out) = (vec![1.0; v.len()], vec![f32::NAN; v.len()]);
        for layer in 0..3 {
            let shape = StridedShape::tokens_first(values.len(), 1, 2);
            let rows = |data| Rows::F32(data, shape);
            step.attend_rows(AttendRows {
                layer: LayerId(layer),
                q: rows(&ones),
                kv: (layer < 2).then(|| (rows(&ones), Some(rows(&v)))),
                out: RowsMut::F32(&mut out, shape),
                scale: 1.0,
                softcap: None,
                sinks: None,
            })
            .unwrap();
        }
        step.commit_kept(kept)
    }
    let mut chain = session("contiguous");
    let more = drafts(&mut chain, New::Chain(3), &[1.0, 2.0, 50.0], &[Kept::First(4)]).unwrap_err();
    assert!(matches!(more, StepError::Refused(Refused::KeepsMore { kept: 4, .. })), "{more}");
    assert_eq!(chain.cache.next_position(A), Some(0));
    chain.resume().unwrap().commit_kept(&[Kept::First(2)]).unwrap(); // the refusal abandons nothing
    assert_eq!(chain.cache.next_position(A), Some(2));
    assert_eq!(step(&mut chain, 6.0), 3.0);

    let mut tree = session("tree");
    let parents = [None, Some(NodeId(0)), Some(NodeId(0))];
    let path = [NodeId(0), NodeId(2)];
    drafts(&mut tree, New::Tree(&parents), &[1.0, 50.0, 2.0], &[Kept::Path(&path)]).unwrap();
    assert_eq!(tree.cache.next_position(A), Some(2));
    assert_eq!(step(&mut tree, 6.0), 3.0);

    let mut half = session("contiguous");
    let mut step = half.step(&StepRequest { spans: &[Span::chain(A, 0, 1)] }).unwrap();
    attend(&mut step, 0, 1.0).unwrap();
    let missing = step.commit_kept(&[Kept::First(0)]).unwrap_err();
    assert!(matches!(missing, StepError::Device(DeviceError::LayerOrder(LayerId(1)))), "{missing}");
}
