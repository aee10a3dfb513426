//! Shared code of this crate's integration tests.
#![allow(dead_code, unused_imports)] // each test binary uses its part
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::generate::{GenerateArgs, Limits, generate};
use kvist_engine::memory::CacheConfig;
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::Model;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Fixtures and models, as the tests of `kvist-model` have them.
pub use crate::models::*;

/// Results of another runtime.
pub struct Expected {
    pub tokens: Vec<u32>,
    pub logits: Vec<f32>, // [tokens, vocab]
    pub generated: Vec<u32>,
    /// Lead of the most likely token, for each generated token.
    pub gaps: Vec<f32>,
}

impl Expected {
    pub fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ids = |name: &str| {
            let data = file.tensor(name).unwrap().data().to_vec();
            data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
        };
        let floats = |name: &str| {
            let data = file.tensor(name).unwrap().data().to_vec();
            data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
        };
        Expected {
            tokens: ids("tokens"),
            logits: floats("logits"),
            generated: ids("generated"),
            gaps: floats("gaps"),
        }
    }
}

/// f32 everywhere, so that kinds can be compared exactly or almost exactly.
pub fn exact(kind: &str, context: u32, chunk: u32) -> CacheConfig {
    CacheConfig {
        kind: kind.into(),
        k: Storage::F32,
        v: Storage::F32,
        max_step_tokens: chunk,
        max_rows: chunk,
        // A ring needs a window; this one covers everything and changes nothing.
        window: (kind == "ring").then_some(context),
        ..CacheConfig::new(context)
    }
}

pub fn session(model: &Arc<Model>, config: &CacheConfig) -> ModelSession {
    // The threads that `load` put the model on.
    ModelSession::new(model, &devices::on(&compute()), config).unwrap()
}

/// Logits of every token, fed in chunks.
pub fn logits(session: &mut ModelSession, tokens: &[u32]) -> Vec<f32> {
    let chunk = session.config().max_step_tokens as usize;
    let mut all = Vec::new();
    for chunk in tokens.chunks(chunk) {
        session.forward(&[SequenceInput::chain(kvist_cache::SeqId::ONLY, chunk)], LogitRows::All).unwrap();
        all.extend_from_slice(session.logits());
    }
    all
}

/// Continues greedily.
pub fn greedy(session: &mut ModelSession, tokens: &[u32], n: usize, no_cache: bool) -> Vec<u32> {
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    let limits = Limits { max_tokens: n, stop: vec![], ignore_eos: true, no_cache };
    let what = GenerateArgs {
        session,
        seq: kvist_cache::SeqId::ONLY,
        before: &[],
        prompt: tokens,
        tokenizer: None,
        sampler: &mut sampler,
        limits: &limits,
        speculation: None,
    };
    generate(what, &mut ()).unwrap().tokens
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // NaN must not pass as "no difference".
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |max, d| if d > max || d.is_nan() { d } else { max })
}

/// Makes a file of a session or a prefix one that a later kvist wrote, with right hashes and nothing else changed.
pub fn as_a_newer_version(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
    let changed = metadata["kvist"].replace(r#""version":1,"#, r#""version":2,"#);
    assert_ne!(changed, metadata["kvist"]);
    // As JSON inside JSON has them.
    let edits = [
        (r#"\"version\":1,"#.to_owned(), r#"\"version\":2,"#.to_owned()),
        (metadata["blake3"].clone(), kvist_model::hash(&[changed.as_bytes()])),
    ];
    for (old, new) in edits {
        let at = bytes.windows(old.len()).position(|part| part == old.as_bytes()).unwrap();
        bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    }
    std::fs::write(path, bytes).unwrap();
}

/// The tensors of a file by name: type, shape and bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Changes the tensors of a session's file, and makes its hashes right.
pub fn with_other_tensors(path: &Path, change: impl FnOnce(&mut Tensors)) {
    with_other_content(path, |_, tensors| change(tensors));
}

/// The same for its header too.
pub fn with_other_content(path: &Path, change: impl FnOnce(&mut serde_json::Value, &mut Tensors)) {
    let bytes = std::fs::read(path).unwrap();
    let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
    let mut header: serde_json::Value = serde_json::from_str(&metadata["kvist"]).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter();
    let mut tensors: Tensors = tensors
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut header, &mut tensors);
    let hashes =
        tensors.iter().map(|(name, (_, _, bytes))| (name.clone(), kvist_model::hash(&[bytes]).into()));
    header["blake3"] = serde_json::Value::Object(hashes.collect());
    let header = header.to_string();
    let entries = [("blake3", kvist_model::hash(&[header.as_bytes()])), ("kvist", header)];
    let metadata = entries.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
}
