//! Frozen prefixes on a GPU: their files have rows, which are copied to the device. What follows is the same to the bit as if the prefix had
//! been computed there.
use super::{TOLERANCE, load_on, on};
use crate::common::*;
use crate::{device, place};
use kvist_cache::SeqId;
use kvist_device::{MemoryBudget, Registry, Storage};
use kvist_engine::Error;
use kvist_engine::devices;
use kvist_engine::frozen::{EnginePrefix, FrozenPrefix, FrozenText, begin_with, freeze, share};
use kvist_engine::memory::CacheConfig;
use kvist_engine::saved::Origin;
use kvist_engine::serving::Engine;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{Model, ModelFile, Opened};
use std::path::Path;
use std::sync::Arc;

/// A model on a device, or on the CPU.
struct Side {
    model: Arc<Model>,
    registry: Registry,
    opened: Opened,
}

impl Side {
    fn origin(&self, config: &CacheConfig) -> Origin {
        Origin::new(self.opened.fingerprint().unwrap(), texts().format, config, self.model.config())
    }
    fn session(&self, config: &CacheConfig) -> ModelSession {
        ModelSession::new(&self.model, &self.registry, config).unwrap()
    }
    /// A session with these tokens, which are frozen to `path`.
    fn frozen(&self, config: &CacheConfig, tokens: &[u32], path: &Path) -> ModelSession {
        let mut session = self.session(config);
        session.prefill(SeqId::ONLY, tokens, &mut |_| true).unwrap();
        let text = FrozenText { tokens, system: None };
        freeze(&mut session, SeqId::ONLY, text, &self.origin(config), path).unwrap();
        session
    }
    /// A session that begins with the prefix, and the tokens that it has.
    fn begun(&self, config: &CacheConfig, prefix: &FrozenPrefix) -> Result<(ModelSession, usize), Error> {
        let mut session = self.session(config);
        let n = begin_with(&mut session, SeqId::ONLY, prefix, &self.origin(config), usize::MAX)?;
        Ok((session, n))
    }
}

fn sides(device: &crate::Gpu, file: &ModelFile) -> [Side; 2] {
    let opened = || Opened::open(file, true).unwrap();
    let on_cpu =
        Model::load(file, devices::Cpu::default(), &texts(), &MemoryBudget::unlimited(), &mut |_, _| {});
    [
        Side {
            model: load_on(device, file, &MemoryBudget::unlimited()),
            registry: place(device).registry(),
            opened: opened(),
        },
        Side { model: Arc::new(on_cpu.unwrap()), registry: devices::all(), opened: opened() },
    ]
}

/// The logits after each token, one by one.
fn go_on(session: &mut ModelSession, tokens: &[u32]) -> Vec<f32> {
    let one = |token: &u32| {
        session.forward(&[SequenceInput::chain(SeqId::ONLY, &[*token])], LogitRows::LastOfEach).unwrap();
        session.logits().to_vec()
    };
    tokens.iter().flat_map(one).collect()
}

#[test]
fn a_text_goes_on_after_a_prefix_to_the_bit() {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.kvp");
    // One that sees everything, one with windows in every other layer.
    for (i, name) in ["llama-gqa", "gemma3"].into_iter().enumerate() {
        let [gpu, cpu] = sides(&device, &ModelFile::Path(fixtures("parity").join(name)));
        let tokens: Vec<u32> = (0..48).map(|i| (7 * i + 3) % 50 + 3).collect();
        let (all, more) = tokens.split_at([37, 32][i]);
        for (kind, storage) in [("paged", "f32"), ("contiguous", "f16"), ("cells", "q8"), ("tree", "t4")] {
            let (what, storage) = (format!("{name} {kind} {storage}"), storage.parse::<Storage>().unwrap());
            let of = |config: CacheConfig| CacheConfig { k: storage, v: storage.for_values(), ..config };
            let (config, on_cpu) = (of(on(exact(kind, 64, 8))), of(exact(kind, 64, 8)));
            let mut before = gpu.frozen(&config, all, &path);
            let prefix = FrozenPrefix::open(&path).unwrap();
            let expected = go_on(&mut before, more);
            let (mut after, n) = gpu.begun(&config, &prefix).unwrap();
            assert_eq!(n, all.len(), "{what}");
            let found = go_on(&mut after, more);
            assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{what}");
            // Every device copies rows.
            let (mut elsewhere, n) = cpu.begun(&on_cpu, &prefix).unwrap();
            assert_eq!(n, all.len(), "{what} on the CPU");
            let found = go_on(&mut elsewhere, more);
            if storage == Storage::F32 {
                let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= TOLERANCE);
                assert!(near && found.len() == expected.len(), "{what} on the CPU");
            }
        }
    }
}

#[test]
fn what_a_gpu_does_not_attend_in_place_is_refused() {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.kvp");
    let [gpu, cpu] = sides(&device, &ModelFile::Path(fixtures("parity/llama-gqa")));
    let tokens: Vec<u32> = (3..40).collect();
    cpu.frozen(&exact("paged", 64, 8), &tokens, &path);
    let config = on(exact("paged", 64, 8));
    let refused = gpu.begun(&config, &FrozenPrefix::open(&path).unwrap()).map(drop).unwrap_err().to_string();
    assert!(refused.contains("freeze it again") && refused.contains("p.kvp"), "{refused}");
    let mut session = gpu.frozen(&config, &tokens, &path);
    let text = FrozenText { tokens: &tokens, system: None };
    let refused =
        share(&mut session, SeqId::ONLY, text, &gpu.origin(&config)).map(drop).unwrap_err().to_string();
    assert!(refused.contains("freeze it to a file"), "{refused}");
    // Rows are read again when they are copied: a file that has changed since it was opened is noticed.
    let prefix = FrozenPrefix::open(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let refused = gpu.begun(&config, &prefix).map(drop).unwrap_err().to_string();
    assert!(refused.contains("hash"), "{refused}");
}

/// A server finds the prefix at once and does not evict it.
#[tokio::test]
async fn an_engine_begins_with_a_prefix() {
    use crate::engines::{config, greedy, receive};
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.kvp");
    let [gpu, _] = sides(&device, &ModelFile::Embedded);
    let engine_config = || {
        let mut config = config(256);
        config.paged.cache.backend = crate::NAME.into();
        config
    };
    let tokens: Vec<u32> = (0..125).map(|i| (31 * i + 7) % 4000).collect();
    let aligned = engine_config().paged.block_aligned();
    gpu.frozen(&CacheConfig { max_step_tokens: 32, max_rows: 1, ..aligned.clone() }, &tokens[..120], &path);
    let mut with = engine_config();
    let prefix = Arc::new(FrozenPrefix::open(&path).unwrap());
    with.prefix = Some(EnginePrefix { prefix, salt: "".into(), origin: gpu.origin(&aligned) });
    let with = Engine::start(gpu.model.clone(), &gpu.registry, with).unwrap();
    let without = Engine::start(gpu.model.clone(), &gpu.registry, engine_config()).unwrap();
    for round in 0..2 {
        let mut texts = Vec::new();
        for (engine, least) in [(&with, 112), (&without, 0)] {
            let received = receive(&mut engine.submit(greedy(&tokens, 12)).unwrap()).await;
            let (found, _) = received.admitted.unwrap();
            assert!(found >= least, "{found} of {least} tokens were cached");
            texts.push(received.tokens);
        }
        assert_eq!(texts[0], texts[1], "{round}");
        // Another prompt fills the cache: everything that may be evicted is.
        let other: Vec<u32> = (0..120).map(|i| (17 * i + round) % 4000).collect();
        receive(&mut with.submit(greedy(&other, 4)).unwrap()).await;
    }
    assert!(with.stats().evicted_blocks > 0, "nothing was evicted");
}
