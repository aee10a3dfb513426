//! The decoder on other devices than the CPU: the scalar reference, and one that records.
use crate::common::*;
use kvist_cache::{BlockId, Cache, CellRun, GroupId, SeqId, Span, Step, StepPlan, StepRequest};
use kvist_cpu::Cpu;
use kvist_device::reference::Reference;
use kvist_device::*;
use kvist_engine::executor::PagedConfig;
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

/// What a GPU needs of the decoder: a step is one upload and one submission, nothing is read back in between, a layer
/// is at most ten operations, and the memory plan is what is allocated, to the byte.
#[test]
fn a_step_is_one_upload_and_one_submission_of_few_operations() {
    for case in cases("parity") {
        let (device, file) = (Recording::default(), ModelFile::Path(case.clone()));
        let registry = Registry::of(device.clone()).with(Box::new(device.clone()));
        let opened = Opened::open_without_texts(&file, true).unwrap();
        let weights = opened.weight_bytes(&device, texts().format).unwrap();
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

/// A model on `device` over a paged cache with blocks of four tokens.
fn paged<D: Device + Backend + Clone>(device: &D) -> (Cache, Box<dyn Network>) {
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let budget = MemoryBudget::unlimited();
    let model = Model::load(&file, device.clone(), &texts(), &budget, &mut |_, _| {}).unwrap();
    assert_eq!(model.device().info(), device.info());
    let config = CacheConfig { max_rows: 8, ..exact("paged", 32, 8) };
    let config = PagedConfig { cache: config, block_tokens: 4, prefix: None };
    let mut cache = config.cache(model.config()).unwrap();
    cache.sequences().unwrap().seq_new(SeqId::ONLY).unwrap();
    let spec = PoolSpec {
        capacity_cells: cache.capacity_cells(),
        ..config.cache.pool_spec(model.layout(), &budget)
    };
    let network = model.open(device, &spec, &config.cache.step_limits()).unwrap();
    (cache, network)
}

/// Submits a step that appends to the only sequence.
fn submit<'c, 'n>(
    cache: &'c mut Cache,
    plan: &'c mut StepPlan,
    network: &'n mut dyn Network,
    tokens: &[u32],
    rows: &[WantedRow],
) -> Result<InFlight<'c, 'n>, StepError> {
    let start = cache.next_position(SeqId::ONLY).unwrap();
    let spans = [Span::chain(SeqId::ONLY, start, tokens.len() as u32)];
    let step = Step::begin(cache, &StepRequest { spans: &spans }, plan)?;
    InFlight::submit(
        step,
        network,
        &StepInputs { tokens, rows, taps: &[], given: Given::Nothing, mass: None },
    )
}

fn answers(network: &mut dyn Network) -> Vec<String> {
    network.output_mut().rows().map(|row| format!("{row:?}")).collect()
}

/// Every row gives what it asks for, as the host computes it from the logits of the same row.
fn rows_of<D: Device + Backend + Clone>(device: &D) {
    let (tokens, mut plan) = ([5, 6, 7, 8, 9, 10], StepPlan::default());
    let sample = SampleParams { temperature: 0.8, top_k: 20, top_p: 0.9, min_p: 0.01, uniform: 0.6 };
    let outputs = [
        RowOutput::Argmax,
        RowOutput::TopK(3),
        RowOutput::Logits,
        RowOutput::Sample(sample),
        RowOutput::Argmax,
        RowOutput::Logits,
    ];
    let wanted = |outputs: &[RowOutput]| -> Vec<WantedRow> {
        (0u32..).zip(outputs).map(|(row, output)| WantedRow { row, output: *output }).collect()
    };
    let (mut cache, mut network) = paged(device);
    let all = wanted(&[RowOutput::Logits; 6]);
    submit(&mut cache, &mut plan, &mut *network, &tokens, &all).unwrap().finish().unwrap().commit();
    let logits = network.output().logits().to_vec();
    let vocab = logits.len() / tokens.len();
    let mut host = StepOutput::default();
    host.want(&wanted(&outputs));
    host.all_logits(vocab).copy_from_slice(&logits);
    host.answer_rows();
    let expected: Vec<String> = host.rows().map(|row| format!("{row:?}")).collect();
    // Asked for later, of the same step.
    network.recompute_rows(&wanted(&outputs)).unwrap();
    assert_eq!(answers(&mut *network), expected);
    // Asked for at once, by another sequence with the same tokens.
    let (mut cache, mut network) = paged(device);
    submit(&mut cache, &mut plan, &mut *network, &tokens, &wanted(&outputs))
        .unwrap()
        .finish()
        .unwrap()
        .commit();
    assert_eq!(answers(&mut *network), expected);
    assert_eq!(network.output().logits().len(), 2 * vocab, "of the rows that asked for them");
    // No logits at all, and parameters that no device accepts.
    let greedy = [WantedRow { row: 0, output: RowOutput::Argmax }];
    submit(&mut cache, &mut plan, &mut *network, &[11], &greedy).unwrap().finish().unwrap().commit();
    assert!(network.output().logits().is_empty());
    let bad = SampleParams { temperature: f32::NAN, ..sample };
    let bad = [WantedRow { row: 0, output: RowOutput::Sample(bad) }];
    let error = submit(&mut cache, &mut plan, &mut *network, &[12], &bad).map(drop).unwrap_err();
    assert!(error.to_string().contains("temperature"), "{error}");
    assert_eq!(cache.next_position(SeqId::ONLY), Some(7), "the refused step changed nothing");
}

#[test]
fn rows_give_what_they_ask_for_on_every_device() {
    rows_of(&Cpu::new(compute()));
    rows_of(&Reference);
    rows_of(&Recording::default());
}

fn finish(transfers: &mut Transfers<'_>, transfer: Transfer) -> HostBlock {
    loop {
        if let Some(block) = transfers.finished(&transfer) {
            break block.unwrap();
        }
    }
}

/// A pinned block leaves while a step runs, and enters the pools again as it was. Transfers follow the last submission
/// before the step in flight.
fn transfers_of<D: Device + Backend + Clone>(device: &D) {
    const G: GroupId = GroupId(0);
    let (mut cache, mut network) = paged(device);
    let mut plan = StepPlan::default();
    assert_eq!(network.last_submission(), Ticket::START);
    submit(&mut cache, &mut plan, &mut *network, &[1, 2, 3, 4, 5, 6], &[])
        .unwrap()
        .finish()
        .unwrap()
        .commit();
    let first = network.last_submission();
    assert!(first > Ticket::START);
    let block = cache.block_table(G, SeqId::ONLY).unwrap()[0].unwrap();
    let pin = cache.pin(&[BlockId { group: G, block }]).unwrap();
    let cells = CellRun { start: block * 4, len: 4 };

    let mut transfers = network.transfers();
    let empty = HostBlock::new(transfers.block_bytes(G, 4).unwrap()).unwrap();
    let transfer = transfers.export(G, cells, empty.clone()).unwrap();
    let before = finish(&mut transfers, transfer);

    let mut in_flight = submit(&mut cache, &mut plan, &mut *network, &[7, 8], &[]).unwrap();
    let mut transfers = in_flight.transfers();
    let transfer = transfers.export(G, cells, empty).unwrap();
    let during = finish(&mut transfers, transfer);
    in_flight.finish().unwrap().commit();
    assert!(network.last_submission() > first, "tickets ascend");
    assert_eq!(before, during);
    cache.unpin(pin);

    // The other way: into a block that is loading, while a step of another sequence runs.
    let (other, n) = (SeqId(7), 4);
    cache.sequences().unwrap().seq_new(other).unwrap();
    let loading = cache.load(other, n).unwrap();
    let target = loading.blocks(G).next().flatten().unwrap();
    let cells = CellRun { start: target * 4, len: 4 };
    let mut in_flight = submit(&mut cache, &mut plan, &mut *network, &[9], &[]).unwrap();
    let mut transfers = in_flight.transfers();
    let transfer = transfers.import(G, cells, during.clone()).unwrap();
    let buffer = finish(&mut transfers, transfer);
    in_flight.finish().unwrap().commit();
    cache.arrived(loading, Ok::<(), ()>(())).unwrap();
    let mut transfers = network.transfers();
    let transfer = transfers.export(G, cells, buffer).unwrap();
    assert_eq!(finish(&mut transfers, transfer), during);
    assert_eq!(cache.next_position(other), Some(4));
}

#[test]
fn blocks_leave_and_enter_the_pools_while_a_step_is_in_flight() {
    transfers_of(&Cpu::new(compute()));
    transfers_of(&Reference);
    let device = Recording::default();
    transfers_of(&device);
    use Event::{Submit, Transfer, Wait};
    let mut events = device.take().events;
    events.retain(|event| matches!(event, Submit | Wait | Transfer(_)));
    let [one, two, three] = [1, 2, 3].map(Ticket);
    assert_eq!(
        events,
        [
            Submit,
            Wait,
            Transfer(one),
            // In flight: it follows the step before.
            Submit,
            Transfer(one),
            Wait,
            Submit,
            Transfer(two),
            Wait,
            Transfer(three),
        ]
    );
}

/// A model does not run in a session that was planned for another device.
#[test]
fn a_model_and_its_registry_have_the_same_device() {
    let (file, budget) = (ModelFile::Path(fixtures("parity/llama-shared-kv")), MemoryBudget::unlimited());
    let model = Arc::new(Model::load(&file, Reference, &texts(), &budget, &mut |_, _| {}).unwrap());
    let registry = Registry::of(Cpu::default()).with(Box::new(Cpu::default()));
    let before = budget.usage();
    let error =
        ModelSession::new(&model, &registry, &CacheConfig::new(64)).map(drop).unwrap_err().to_string();
    assert!(error.contains("`reference`") && error.contains("`cpu`"), "{error}");
    assert_eq!(budget.usage(), before);
    let registry = Registry::of(Reference).with(Box::new(Cpu::default()));
    ModelSession::new(&model, &registry, &CacheConfig::new(64)).unwrap();
}
