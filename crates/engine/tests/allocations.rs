//! A decoded token allocates nothing after warm-up, sampling included, so no token waits for the allocator. Producing
//! text does allocate, because the tokenizer returns strings; so these tests run without a tokenizer.
//!
//! A program of its own, because its allocator counts.
mod common;
#[path = "../../model/tests/common/mod.rs"]
mod models;
use common::*;
use kvist_cache::SeqId;
use kvist_cpu::arch::Isa;
use kvist_cpu::{Compute, Cpu};
use kvist_device::{MemoryBudget, Storage};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{LoadOptions, Model, ModelFile};
use std::sync::Arc;

/// One step, one draw, and the penalty's bookkeeping.
fn turn(session: &mut ModelSession, sampler: &mut Sampler, token: u32) -> u32 {
    session.forward(&[SequenceInput::chain(SeqId::ONLY, &[token])], LogitRows::LastOfEach).unwrap();
    let token = sampler.sample(session.logits_row(0)).unwrap();
    sampler.observe(&[token]);
    token
}

#[test]
fn a_decoded_token_allocates_nothing_after_warm_up() {
    // The counter covers only this thread, so this thread does all the work.
    let options = LoadOptions::default();
    let device = Cpu::new(Compute::new(Isa::best(), 1));
    let model =
        Model::load(&ModelFile::Embedded, device, &options, &MemoryBudget::unlimited(), &mut |_, _| {});
    let model = Arc::new(model.unwrap());
    let prompt = model.tokenizer().unwrap().encode("A trait is a set of methods", true).unwrap();
    let usual = SamplerConfig {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.05,
        repetition_penalty: 1.1,
        repetition_window: 32,
        seed: 1,
        ..SamplerConfig::greedy()
    };
    let samplers = [
        ("greedy", SamplerConfig::greedy()),
        ("usual", usual),
        ("everything", SamplerConfig { top_k: 0, top_p: 1.0, min_p: 0.0, temperature: 1.5, ..usual }),
        ("nucleus", SamplerConfig { top_k: 0, min_p: 0.0, ..usual }),
    ];
    let mut bad = Vec::new();
    for kind in ["contiguous", "cells", "tree", "ring"] {
        for storage in ["f16", "q8", "q4-64", "t4-o"] {
            for (name, config) in samplers {
                let storage: Storage = storage.parse().unwrap();
                let window = (kind == "ring").then_some(100);
                let kind = kind.to_string();
                let cache = CacheConfig {
                    kind,
                    k: storage,
                    v: storage.for_values(),
                    window,
                    ..CacheConfig::new(500)
                };
                let mut session = session(&model, &cache);
                let mut sampler = Sampler::new(config).unwrap();
                session.prefill(SeqId::ONLY, &prompt, &mut |_| true).unwrap();
                sampler.observe(&prompt);
                // The candidate buffer grows with the number of candidates: this draw needs all tokens.
                sampler.sample(&vec![0.0; session.logits_row(0).len()]).unwrap();
                let mut token = prompt[0];
                let bytes = (0..200).fold(0, |_, _| {
                    token = turn(&mut session, &mut sampler, token);
                    session.kv_bytes()
                });
                let counted = allocation_counter::measure(|| {
                    (0..40).for_each(|_| token = turn(&mut session, &mut sampler, token));
                });
                assert_eq!(session.kv_bytes(), bytes, "no segment grew");
                if counted.count_total > 0 {
                    bad.push(format!("{} {storage}, {name}: {}", cache.kind, counted.count_total));
                }
            }
        }
    }
    assert!(bad.is_empty(), "allocations in 40 tokens after warm-up:\n{}", bad.join("\n"));
}

/// Regression: a penalty over the whole text kept a second copy of every prompt, and a table as well.
#[test]
fn a_penalty_without_a_window_takes_a_bit_of_each_token() {
    const VOCAB: u32 = 50_000;
    let config =
        SamplerConfig { repetition_penalty: 1.1, repetition_window: usize::MAX, ..SamplerConfig::greedy() };
    let mut sampler = Sampler::new(config).unwrap();
    let prompt: Vec<u32> = (0..500_000).map(|i| i * 7919 % VOCAB).collect();
    let counted = allocation_counter::measure(|| {
        sampler.observe(&[VOCAB - 1]);
        sampler.observe(&prompt);
    });
    assert!(counted.bytes_total <= u64::from(VOCAB / 8) + 64, "{counted:?}");
}
