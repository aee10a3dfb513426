//! The decoder on other devices than the CPU: the scalar reference, and one that records.
mod common;
use common::*;
use kvist_cache::SeqId;
use kvist_device::reference::Reference;
use kvist_device::{MemoryBudget, Purpose, Registry};
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{Model, ModelFile, Opened};
use kvist_testing::recording::{Event, Recording};
use std::sync::Arc;

/// The same decoder text in plain loops over f32 weights, with sums in f64.
#[test]
fn the_scalar_reference_agrees_with_transformers() {
    for case in cases("parity") {
        let expected = Expected::read(&case);
        let n = expected.tokens.len() as u32;
        let budget = MemoryBudget::unlimited();
        let model = Model::load(&ModelFile::Path(case.clone()), Reference, &texts(), &budget, &mut |_, _| {});
        let registry = Registry::of(Reference).with(Box::new(Reference));
        let config = CacheConfig { backend: "reference".into(), ..exact("contiguous", n, n) };
        let mut session = ModelSession::new(&Arc::new(model.unwrap()), &registry, &config).unwrap();
        let difference = max_difference(&logits(&mut session, &expected.tokens), &expected.logits);
        assert!(difference <= 1e-3, "{case:?}: logits differ by {difference}");
    }
}

/// What a GPU needs of the decoder: a step is one upload and one submission, nothing is read back in between, a layer is
/// at most ten operations, and the memory plan is what is allocated, to the byte.
#[test]
fn a_step_is_one_upload_and_one_submission_of_few_operations() {
    for case in cases("parity") {
        let (device, file) = (Recording::default(), ModelFile::Path(case.clone()));
        let registry = Registry::of(device.clone()).with(Box::new(device.clone()));
        let opened = Opened::open_without_texts(&file, true).unwrap();
        let weights = opened.weight_bytes(&device, texts().form).unwrap();
        let budget = MemoryBudget::unlimited();
        let model = Arc::new(opened.load(device.clone(), &texts(), &budget, &mut |_, _| {}).unwrap());
        let config = CacheConfig {
            backend: "recording".into(),
            kind: "paged".into(),
            max_step_tokens: 8,
            max_rows: 3,
            ..CacheConfig::new(600)
        };
        let plan = MemoryPlan::of_session(model.config(), &registry, &config).unwrap();
        let mut session = ModelSession::new(&model, &registry, &config).unwrap();
        assert_eq!(
            device.take().allocated,
            plan.usage.with(Purpose::Weights, weights).with(Purpose::KvCache, 0)
        );

        let n_layers = model.config().n_layers;
        for tokens in [&[1, 2, 3, 4, 5][..], &[6]] {
            session.forward(&[SequenceInput::chain(SeqId::ONLY, tokens)], LogitRows::LastOfEach).unwrap();
            let events = device.take().events;
            let ops = events.iter().filter(|event| matches!(event, Event::Op(_))).count();
            let around = ["embed", "wanted_rows", "norm_in_place", "logits", "answer_rows"].len();
            assert!(
                ops <= around + 10 * n_layers,
                "{case:?}: {ops} operations for {n_layers} layers: {events:?}"
            );
            let of = |event| events.iter().filter(|e| **e == event).count();
            assert_eq!(
                (of(Event::Upload), of(Event::Submit), of(Event::Wait), of(Event::Read)),
                (1, 1, 1, 0)
            );
            assert_eq!(events[0], Event::Upload, "everything that depends on the step comes first");
            assert_eq!(events[events.len() - 2..], [Event::Submit, Event::Wait]);
        }

        // Full: exactly the plan.
        // Groups with a window release blocks, so they never fill up.
        let windowed = model.config().layers.iter().any(|layer| layer.window.is_some());
        for step in std::iter::repeat_n(&[7; 8][..], 80).chain(std::iter::repeat_n(&[7][..], 8)) {
            let _ = session.forward(&[SequenceInput::chain(SeqId::ONLY, step)], LogitRows::None);
        }
        let usage = plan.usage.with(Purpose::Weights, weights);
        let allocated = device.take().allocated;
        if windowed {
            assert!(allocated.total() <= usage.total(), "{case:?}");
            continue;
        }
        assert_eq!(allocated, usage, "{case:?}");
    }
}

#[test]
fn a_device_refuses_what_it_cannot_run_as_a_whole() {
    // A device without the host's memory cannot attend over pools in it.
    let case = cases("parity").remove(0);
    let device = Recording::default();
    let registry = Registry::of(device.clone()).with(Box::new(Reference));
    let budget = MemoryBudget::unlimited();
    let model = Model::load(&ModelFile::Path(case), device, &texts(), &budget, &mut |_, _| {}).unwrap();
    let config = CacheConfig { backend: "reference".into(), ..CacheConfig::new(64) };
    let error = ModelSession::new(&Arc::new(model), &registry, &config).map(drop).unwrap_err().to_string();
    assert!(error.contains("`recording`") && error.contains("`reference`"), "{error}");
}
