//! The serving engine over CUDA, above a tier in RAM whose blocks are in pinned memory: nothing is copied by the host on the way there and
//! back, and without such memory texts are the same. Emulated, or on GPU N if `KVIST_CUDA=N`.
use crate::emulated;
use crate::engines::{config, greedy, receive};
use kvist_device::{ArenaUsage, MemoryBudget, Registry};
use kvist_engine::devices::Place;
use kvist_engine::serving::*;
use kvist_model::weights::WeightFormat;
use kvist_model::{LoadOptions, Model, ModelFile};
use kvist_store::{BlockStore, KeyChain, Ram};
use std::sync::Arc;
use std::time::Duration;

const MODEL: &[u8] = b"a model";

fn prompt(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

fn loaded() -> Option<(Arc<Model>, Registry)> {
    let device = emulated::device()?;
    let options = LoadOptions { format: WeightFormat::F32, ..LoadOptions::default() };
    let budget = MemoryBudget::unlimited();
    let model = Model::load(&ModelFile::Embedded, device.clone(), &options, &budget, &mut |_, _| {}).unwrap();
    Some((Arc::new(model), Place::Cuda(device).registry()))
}

/// What happened to a text that was evicted and came back.
struct Seen {
    answers: [Vec<u32>; 2],
    loaded_tokens: u32,
    staged_bytes: u64,
    pinned: Option<ArenaUsage>,
}

/// Serves a text, then others for which it has to go, then it again, which comes back from the first tier that has it.
async fn come_back(
    (model, registry): &(Arc<Model>, Registry),
    stores: &[Arc<Ram>],
    pinned_bytes: u64,
) -> Seen {
    let mut config = config(128);
    config.paged.cache.backend = "cuda".into();
    let tier =
        |store: &Arc<Ram>| TierStore { store: store.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO };
    let tiers = TierConfig::new(stores.iter().map(tier).collect(), MODEL.to_vec());
    config.tiers = Some(TierConfig { grace: Duration::from_secs(3600), always: true, pinned_bytes, ..tiers });
    let engine = Engine::start(model.clone(), registry, config).unwrap();
    let text = prompt(100, 65);
    let mut answers = Vec::new();
    let mut loaded_tokens = 0;
    for prompt in [&text, &prompt(1000, 65), &prompt(2000, 65), &text] {
        let heard = receive(&mut engine.submit(greedy(prompt, 4)).unwrap()).await;
        loaded_tokens = heard.done.unwrap_or_else(|| panic!("{:?}", heard.failure)).usage.loaded_tokens;
        answers.push(heard.tokens);
        engine.until_idle().await;
        let copies = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await;
        while copies().await != Some(0) || engine.stats().tiers.is_some_and(|tiers| tiers.store_bytes > 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert!(engine.failure().is_none());
    let staged_bytes = engine.inspect(|state| state.executor.counters().bytes_staged).await.unwrap();
    let pinned = engine.stats().tiers.unwrap().pinned;
    Seen { answers: [answers.remove(0), answers.pop().unwrap()], loaded_tokens, staged_bytes, pinned }
}

#[tokio::test]
async fn blocks_in_ram_are_in_pinned_memory() {
    let Some(loaded) = loaded() else { return };
    let block_bytes = config(128).paged.block_bytes(loaded.0.config());
    assert_eq!(block_bytes % 64, 0);
    let ram = || Arc::new(Ram::new(1 << 30));

    // Without pinned memory.
    let plain = come_back(&loaded, &[ram()], 0).await;
    let [expected, again] = &plain.answers;
    assert_eq!((again, plain.loaded_tokens, plain.pinned), (expected, 64, None));
    assert!(
        plain.staged_bytes >= 16 * block_bytes,
        "12 blocks went down, and 4 came up: {}",
        plain.staged_bytes
    );

    // All blocks are in it, and no byte of them is copied by the host.
    let store = ram();
    let seen = come_back(&loaded, std::slice::from_ref(&store), 1 << 26).await;
    assert_eq!(seen.answers, plain.answers);
    assert_eq!((seen.loaded_tokens, seen.staged_bytes), (64, 0));
    let stored = store.usage().entries.unwrap();
    let pinned = seen.pinned.unwrap();
    assert_eq!((pinned.lent_bytes, pinned.refused_blocks), (stored * block_bytes, 0));

    // An engine that finds blocks in another's memory, which is ordinary memory to it. The store keeps that though its engine has ended.
    let other = come_back(&loaded, std::slice::from_ref(&store), 1 << 26).await;
    assert_eq!(other.answers, plain.answers);
    assert_eq!(other.loaded_tokens, 64);

    // What comes from a slower tier is kept in pinned memory, too: the next time it is not copied.
    let (fast, slow) = (ram(), store);
    let keys = KeyChain::root(MODEL, "").keys(&prompt(100, 64), 16);
    let seen = come_back(&loaded, &[fast.clone(), slow], 1 << 26).await;
    assert_eq!((&seen.answers, seen.loaded_tokens), (&plain.answers, 64));
    assert_eq!(seen.staged_bytes, 12 * block_bytes, "each of three texts comes from the slow tier once");
    assert!(keys.iter().all(|key| fast.has(key) == Some(true)));
    assert_eq!(seen.pinned.unwrap().lent_bytes, fast.usage().entries.unwrap() * block_bytes);
}

#[tokio::test]
async fn without_room_blocks_are_in_ordinary_memory() {
    let Some(loaded) = loaded() else { return };
    let block_bytes = config(128).paged.block_bytes(loaded.0.config());
    let run = async |pinned_bytes| come_back(&loaded, &[Arc::new(Ram::new(1 << 30))], pinned_bytes).await;
    let plain = run(0).await;
    // Room for three blocks.
    let little = run(3 * block_bytes + 100).await;
    assert_eq!((&little.answers, little.loaded_tokens), (&plain.answers, 64));
    let pinned = little.pinned.unwrap();
    assert!(pinned.refused_blocks > 0 && pinned.lent_bytes == 3 * block_bytes, "{pinned:?}");
    assert!(little.staged_bytes > 0 && little.staged_bytes < plain.staged_bytes);
    // More than the system has.
    let none = run(1 << 60).await;
    assert_eq!((&none.answers, none.loaded_tokens), (&plain.answers, 64));
    assert_eq!((none.pinned, none.staged_bytes), (Some(ArenaUsage::default()), plain.staged_bytes));
}
