//! The embedded model, and engines that run it.
#![allow(dead_code)] // not every test uses all of it
use kvist_cache::{PrefixSpec, SeqId};
use kvist_cpu::{Compute, Cpu};
use kvist_device::{MemoryBudget, Registry, Storage};
use kvist_engine::devices;
use kvist_engine::executor::PagedConfig;
use kvist_engine::frozen::{EnginePrefix, FrozenPrefix, FrozenText, SharedPrefix, freeze, share};
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::Origin;
use kvist_engine::serving::*;
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::*;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile, Opened};
use kvist_scheduler::{Admission, Config};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// F32 weights, and an F32 cache below, so that generated text depends only on the prompt.
#[allow(unused_imports)]
pub use crate::models::{f32_model as model, fixtures, load_f32};

/// The weights as stored in the file, with sums in an order that does not depend on the rest of the batch.
pub fn deterministic() -> &'static (Arc<Model>, Registry) {
    static MODEL: OnceLock<(Arc<Model>, Registry)> = OnceLock::new();
    MODEL.get_or_init(|| (load_deterministic(), devices::on(&Compute::default().deterministic(true))))
}

/// The model of [`deterministic`], loaded anew.
pub fn load_deterministic() -> Arc<Model> {
    let device = Cpu::new(Compute::default().deterministic(true));
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    Arc::new(Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {}).unwrap())
}

pub fn tokens(text: &str) -> Vec<u32> {
    model().tokenizer().unwrap().encode(text, true).unwrap()
}

pub fn config(context_tokens: u32) -> EngineConfig {
    let cache = CacheConfig { k: Storage::F32, v: Storage::F32, ..CacheConfig::new(context_tokens) };
    let mut config = EngineConfig {
        paged: PagedConfig { cache, block_tokens: 16, prefix: Some(PrefixSpec::default()) },
        scheduler: Config {
            max_batch: 8,
            max_batch_tokens: 64,
            admission: Admission::Optimistic { headroom_tokens: 0 },
            ..Config::default()
        },
        max_queue: 64,
        tenants: Vec::new(),
        record: false,
        watchers: Vec::new(),
        max_draft_tokens: 0,
        speculator: None,
        tiers: None,
        prefix: None,
        keep: None,
    };
    config.fit();
    config
}

/// Limits of small trees.
pub const SMALL: Bounds = Bounds { tokens: 7, depth: 4, width: 3 };

/// `config`, with trees of this drafter.
pub fn speculating(mut config: EngineConfig, bounds: Bounds, drafter: Box<dyn Drafter>) -> EngineConfig {
    config.speculator = Some(Speculator::new(vec![drafter], SpeculationConfig { bounds, adaptive: false }));
    config.max_draft_tokens = bounds.tokens * config.scheduler.max_batch;
    config.fit();
    config
}

pub fn engine(config: EngineConfig) -> Engine {
    Engine::start(model().clone(), &devices::all(), config).unwrap()
}

pub fn greedy(prompt: &[u32], max_new: u32) -> Job {
    Job { ignore_eos: true, explain: true, ..Job::new(prompt, max_new) }
}

/// Submits all jobs before the engine takes its next step, however slow this thread is.
pub async fn submit_together(engine: &Engine, jobs: impl IntoIterator<Item = Job>) -> Vec<GenerationHandle> {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let submit = async {
        let all = jobs.into_iter().map(|job| engine.submit(job).unwrap()).collect();
        drop(go);
        all
    };
    tokio::join!(biased; engine.inspect(move |_| wait.recv()), submit).1
}

/// All events of a generation.
#[derive(Debug, Default)]
pub struct Received {
    /// Log-probabilities of the prompt.
    pub prompt_scores: Vec<LogProb>,
    pub tokens: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<LogProb>,
    pub admitted: Option<(u32, Option<kvist_cache::MissReason>)>,
    pub not_loaded: Option<kvist_scheduler::NotLoaded>,
    pub done: Option<Done>,
    pub failure: Option<Failure>,
}

pub async fn receive(generation: &mut GenerationHandle) -> Received {
    let mut received = Received::default();
    while let Some(event) = generation.next().await {
        match event {
            Event::Admitted { cached_tokens, miss, not_loaded, .. } => {
                received.not_loaded = not_loaded;
                assert!(received.tokens.is_empty(), "a token before its admission");
                assert!(received.admitted.replace((cached_tokens, miss)).is_none(), "admitted twice");
            }
            Event::Prompt(scores) => received.prompt_scores.extend(scores),
            Event::Token(token) => {
                received.tokens.push(token.id);
                received.text += &token.text;
                received.logprobs.extend(token.logprob);
            }
            Event::Done(done) => {
                received.text += &done.text;
                assert!(received.done.replace(done).is_none(), "done twice");
            }
            Event::Failed(failure) => received.failure = Some(failure),
        }
    }
    received
}

/// A prefix of `tokens`, frozen for the engine's cache.
pub fn frozen(tokens: &[u32], engine: &EngineConfig) -> EnginePrefix {
    frozen_with(tokens, engine, |_| ())
}

/// The same, without a file.
pub fn shared(tokens: &[u32], engine: &EngineConfig) -> EnginePrefix {
    computed(tokens, engine, |session, text, origin| share(session, SeqId::ONLY, text, origin).unwrap())
}

/// The same, as if another machine had computed it.
pub fn frozen_elsewhere(tokens: &[u32], engine: &EngineConfig) -> EnginePrefix {
    frozen_with(tokens, engine, |path| {
        let whole = std::fs::read(path).unwrap();
        let (start, end) = (8, 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize);
        let mut json: serde_json::Value = serde_json::from_slice(&whole[start..end]).unwrap();
        let header = json["__metadata__"]["kvist"].as_str().unwrap();
        let mut header: serde_json::Value = serde_json::from_str(header).unwrap();
        header["maker"] = "elsewhere".into();
        let header = header.to_string();
        json["__metadata__"]["blake3"] = kvist_model::hash(&[header.as_bytes()]).into();
        json["__metadata__"]["kvist"] = header.into();
        let mut json = json.to_string().into_bytes();
        assert!(json.len() <= end - start, "a shorter maker");
        json.resize(end - start, b' ');
        std::fs::write(path, [&whole[..8], &json, &whole[end..]].concat()).unwrap();
    })
}

fn frozen_with(tokens: &[u32], engine: &EngineConfig, change: impl FnOnce(&Path)) -> EnginePrefix {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.kvp");
    computed(tokens, engine, |session, text, origin| {
        freeze(session, SeqId::ONLY, text, origin, &path).unwrap();
        change(&path);
        Arc::new(FrozenPrefix::open(&path).unwrap())
    })
}

fn computed(
    tokens: &[u32],
    engine: &EngineConfig,
    frozen: impl FnOnce(&mut ModelSession, FrozenText<'_>, &Origin) -> SharedPrefix,
) -> EnginePrefix {
    let aligned = engine.paged.block_aligned();
    let fingerprint = Opened::open(&ModelFile::Embedded, true).unwrap().fingerprint().unwrap();
    let origin = Origin::new(fingerprint, WeightFormat::AsStored, &aligned, model().config());
    let config = CacheConfig { kind: "cells".into(), max_step_tokens: 32, max_rows: 1, ..aligned };
    let mut session = ModelSession::new(model(), &devices::all(), &config).unwrap();
    session.prefill(SeqId::ONLY, tokens, &mut |_| true).unwrap();
    let prefix = frozen(&mut session, FrozenText { tokens, system: None }, &origin);
    EnginePrefix { prefix, salt: "".into(), origin }
}
