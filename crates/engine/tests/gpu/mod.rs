//! Models on a GPU: the same logits and text as Hugging Face transformers and as the CPU. The programs `wgpu` and `cuda` say on which.
mod memory;
mod prefixes;
use crate::common::*;
use crate::{Gpu, NAME, device, place, slow};
use kvist_cache::{SeqId, Span, Step, StepPlan, StepRequest};
use kvist_device::*;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{Model, ModelFile, Opened};
use std::path::Path;
use std::sync::Arc;

const TOLERANCE: f32 = 1e-3;
/// Two tokens this close may swap when sums are ordered differently.
const NEAR_TIE: f32 = 2e-3;
pub const KINDS: [&str; 5] = ["contiguous", "ring", "cells", "tree", "paged"];

/// The configuration, on the device.
pub fn on(config: CacheConfig) -> CacheConfig {
    CacheConfig { backend: NAME.into(), ..config }
}

pub fn load_on(device: &Gpu, file: &ModelFile, budget: &Arc<MemoryBudget>) -> Arc<Model> {
    Arc::new(Model::load(file, device.clone(), &texts(), budget, &mut |_, _| {}).unwrap())
}

/// Describes every bad row of one model, in every kind. Where a device is slow (lavapipe, an emulation), every fifth model and those with
/// windows have all kinds, and the others two, in turn. The text is checked in one.
fn compare(device: &Gpu, number: usize, case: &Path, file: &ModelFile) -> Vec<String> {
    let name = case.file_name().unwrap().to_string_lossy().into_owned();
    let expected = Expected::read(case);
    let model = load_on(device, file, &MemoryBudget::unlimited());
    let registry = place(device).registry();
    let n = expected.tokens.len() as u32;
    let mut bad = Vec::new();
    let windows = model.config().layers.iter().any(|layer| layer.window.is_some());
    let all = !slow() || windows || number.is_multiple_of(KINDS.len());
    let turns = [number, number + 2].map(|turn| turn % KINDS.len());
    for (k, kind) in KINDS.into_iter().enumerate() {
        if !all && !turns.contains(&k) {
            continue;
        }
        let chunk = [1, 3, n][(number + k) % 3];
        let mut session = ModelSession::new(&model, &registry, &on(exact(kind, n + 64, chunk))).unwrap();
        let difference = max_difference(&logits(&mut session, &expected.tokens), &expected.logits);
        if difference.is_nan() || difference > TOLERANCE {
            bad.push(format!("{name} {kind} chunk {chunk}: logits differ by {difference}"));
        }
        if k == turns[0] {
            let mut session = ModelSession::new(&model, &registry, &on(exact(kind, n + 64, 16))).unwrap();
            let found = greedy(&mut session, &expected.tokens, 64, false);
            assert_eq!(found.len(), 64, "{name} {kind}");
            if let Some(at) = found.iter().zip(&expected.generated).position(|(a, b)| a != b)
                && expected.gaps[at] > NEAR_TIE
            {
                bad.push(format!("{name} {kind}: token {at} differs at a lead of {}", expected.gaps[at]));
            }
        }
    }
    bad
}

#[test]
fn every_family_agrees_with_transformers() {
    let Some(device) = device() else { return };
    let all = cases("parity");
    let each = all.iter().enumerate();
    let bad: Vec<String> =
        each.flat_map(|(i, case)| compare(&device, i, case, &ModelFile::Path(case.clone()))).collect();
    assert!(bad.is_empty(), "{} of {} cases:\n{}", bad.len(), all.len(), bad.join("\n"));
}

/// Every encoding of the fixtures is decoded exactly in the kernels, so packed weights agree as f32 ones do.
#[test]
fn gguf_files_agree_with_transformers_on_the_same_weights() {
    let Some(device) = device() else { return };
    let mut bad = Vec::new();
    for (i, case) in cases("gguf").into_iter().enumerate() {
        let file = ModelFile::Path(case.join("model.gguf"));
        bad.extend(compare(&device, i, &case, &file));
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// What the memory plan says is what the budget records, and everything is given back.
#[test]
fn memory_is_what_the_plan_says_and_comes_back() {
    let Some(device) = device() else { return };
    let file = ModelFile::Path(cases("parity").remove(0));
    let registry = place(&device).registry();
    let budget = MemoryBudget::new(1 << 30);
    let weights =
        Opened::open_without_texts(&file, true).unwrap().weight_bytes(&device, texts().format).unwrap();
    let model = load_on(&device, &file, &budget);
    let loaded = budget.usage();
    assert_eq!(loaded, Usage::default().with(Purpose::Weights, weights));
    for kind in KINDS {
        let config = on(exact(kind, 300, 8));
        let plan = MemoryPlan::of_session(model.config(), &registry, &config).unwrap();
        for _ in 0..3 {
            let mut session = ModelSession::new(&model, &registry, &config).unwrap();
            for chunk in 0..8 {
                let tokens = [chunk + 1; 8];
                session.forward(&[SequenceInput::chain(SeqId::ONLY, &tokens)], LogitRows::None).unwrap();
            }
            let (used, bound) = (budget.usage(), plan.usage.with(Purpose::Weights, weights));
            for purpose in Purpose::ALL {
                assert!(
                    used.of(purpose) <= bound.of(purpose),
                    "{kind} {purpose:?}: {used:?}, planned {bound:?}"
                );
            }
            drop(session);
            assert_eq!(budget.usage(), loaded, "{kind}");
        }
    }
    drop(model);
    assert_eq!(budget.usage(), Usage::default());
}

/// A row's logits are the same bits alone and among others: in any chunk, whatever kernel a number of rows takes.
#[test]
fn results_do_not_depend_on_the_batch() {
    let Some(device) = device() else { return };
    assert!(device.info().batch_invariant);
    for case in cases("parity").into_iter().step_by(4).chain(cases("gguf").into_iter().take(2)) {
        let gguf = case.join("model.gguf");
        let file = ModelFile::Path(if gguf.exists() { gguf } else { case.clone() });
        let model = load_on(&device, &file, &MemoryBudget::unlimited());
        let registry = place(&device).registry();
        let tokens: Vec<u32> = (0..29).map(|i| i * 7 % 50 + 3).collect();
        let run = |chunk: u32, kind: &str| -> Vec<u32> {
            let config = on(exact(kind, 64, chunk));
            let mut session = ModelSession::new(&model, &registry, &config).unwrap();
            logits(&mut session, &tokens).iter().map(|x| x.to_bits()).collect()
        };
        let alone = run(1, "contiguous");
        for (chunk, kind) in [(2, "contiguous"), (5, "paged"), (8, "cells"), (29, "contiguous"), (29, "tree")]
        {
            assert!(run(chunk, kind) == alone, "{case:?}: {kind} by {chunk}");
        }
    }
}

/// The same of packed K and V, with and without recent rows in f16: `--deterministic`, as the device here is.
#[test]
fn packed_caches_do_not_depend_on_the_batch_either() {
    let Some(device) = device() else { return };
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let model = load_on(&device, &file, &MemoryBudget::unlimited());
    let registry = place(&device).registry();
    let tokens: Vec<u32> = (0..29).map(|i| i * 7 % 40 + 3).collect();
    for (storage, recent) in [("q8", 16), ("q8", 0), ("q4", 16), ("q4-rot", 0)] {
        let storage: Storage = storage.parse().unwrap();
        let run = |chunk: u32, kind: &str| -> Vec<u32> {
            let recent = Recent { tokens: recent, sequences: 2 };
            let config = on(CacheConfig { k: storage, v: storage, recent, ..exact(kind, 64, chunk) });
            let mut session = ModelSession::new(&model, &registry, &config).unwrap();
            logits(&mut session, &tokens).iter().map(|x| x.to_bits()).collect()
        };
        let alone = run(1, "contiguous");
        for (chunk, kind) in [(5, "paged"), (29, "contiguous"), (13, "tree")] {
            assert!(run(chunk, kind) == alone, "{storage}, {recent} recent tokens: {kind} by {chunk}");
        }
    }
}

/// Every row gives what it asks for, as the host computes it from the logits of the same row.
#[test]
fn rows_give_what_they_ask_for() {
    let Some(device) = device() else { return };
    let file = ModelFile::Path(fixtures("parity/llama-shared-kv"));
    let budget = MemoryBudget::unlimited();
    let model = load_on(&device, &file, &budget);
    let config = on(exact("contiguous", 32, 8));
    let registry = place(&device).registry();
    let groups = config.groups(model.config());
    let (mut cache, backend) = registry.plan(NAME, "contiguous", &groups).unwrap();
    let spec =
        PoolSpec { capacity_cells: cache.capacity_cells(), ..config.pool_spec(model.layout(), &budget) };
    let mut network = model.open(backend, &spec, &config.step_limits()).unwrap();
    let sample = SampleParams { temperature: 0.8, top_k: 20, top_p: 0.9, min_p: 0.01, uniform: 0.6 };
    let outputs = [
        RowOutput::Argmax,
        RowOutput::TopK(3),
        RowOutput::Logits,
        RowOutput::Sample(sample),
        RowOutput::TopK(40),
        RowOutput::Logits,
    ];
    let rows: Vec<WantedRow> = (0u32..).zip(outputs).map(|(row, output)| WantedRow { row, output }).collect();
    let all: Vec<WantedRow> = (0..6).map(WantedRow::logits).collect();
    let tokens = [5, 6, 7, 8, 9, 10];
    let mut plan = StepPlan::default();
    let spans = [Span::chain(SeqId::ONLY, 0, 6)];
    let step = Step::begin(&mut cache, &StepRequest { spans: &spans }, &mut plan).unwrap();
    let inputs = StepInputs { tokens: &tokens, rows: &all, taps: &[], given: Given::Nothing, mass: None };
    InFlight::submit(step, &mut *network, &inputs).unwrap().finish().unwrap().commit();
    let logits = network.output().logits().to_vec();
    let mut host = StepOutput::default();
    host.want(&rows);
    host.all_logits(logits.len() / 6).copy_from_slice(&logits);
    host.answer_rows();
    let expected: Vec<String> = host.rows().map(|row| format!("{row:?}")).collect();
    network.recompute_rows(&rows).unwrap();
    let found: Vec<String> = network.output_mut().rows().map(|row| format!("{row:?}")).collect();
    assert_eq!(found, expected);
    assert_eq!(network.output().logits().len(), logits.len() / 3, "of the rows that asked for them");
}
