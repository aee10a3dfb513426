//! A request that is preempted loses its cells. What it had computed comes back from a tier, if that is expected to be faster.
use crate::engines::*;
use kvist_engine::devices;
use kvist_engine::serving::*;
use kvist_model::ModelFile;
use kvist_scheduler::{Preempted, Write};
use kvist_store::{BlockStore, Ram};
use kvist_testing::SplitMix64;
use std::sync::Arc;
use std::time::Duration;

const REQUESTS: usize = 4;
const PROMPT: usize = 40;
const ANSWER: u32 = 80;

/// Without its last token, which is not computed, a text has so many whole blocks.
const BLOCKS: usize = (PROMPT + ANSWER as usize - 1) / 16;

fn prompt(i: usize) -> Vec<u32> {
    let mut random = SplitMix64(i as u64);
    (0..PROMPT).map(|_| random.below(4000)).collect()
}

/// Room for two of the requests at their ends.
fn small() -> EngineConfig {
    let mut config = config(256);
    config.scheduler.preempted = Preempted::Recompute;
    config
}

/// The same above a store with this latency, as the engine believes. Requests wait for every answer of it.
fn over(store: &Arc<Ram>, write: Write, latency: Duration, without: EngineConfig) -> EngineConfig {
    let store = store.clone() as Arc<dyn BlockStore>;
    let tier = TierStore { store, bytes_per_s: u64::MAX, latency };
    let grace = Duration::from_secs(24 * 3600);
    let tiers = TierConfig { write, grace, ..TierConfig::new(vec![tier], b"a model".to_vec()) };
    EngineConfig { tiers: Some(tiers), ..without }
}

/// The answers to all of these requests at once, and what the engine counted. Some are preempted.
async fn serve(engine: Engine, prompts: &[Vec<u32>]) -> (Vec<Vec<u32>>, EngineStats) {
    // The engine begins when it has all of them: how many run at a time does not depend on how fast they are sent.
    let jobs = submit_together(&engine, prompts.iter().map(|prompt| greedy(prompt, ANSWER))).await;
    let mut answers = Vec::new();
    for mut job in jobs {
        answers.push(receive(&mut job).await.tokens);
    }
    engine.until_idle().await;
    // Until everything is written.
    let copies = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await;
    while copies().await != Some(0) || engine.stats().tiers.is_some_and(|tiers| tiers.store_bytes > 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let stats = engine.stats();
    assert!(stats.counters.preemptions > 0 && stats.counters.lost_tokens > 0, "{stats:?}");
    (answers, stats)
}

/// The same with the embedded model.
async fn serve_small(config: EngineConfig) -> (Vec<Vec<u32>>, EngineStats) {
    serve(engine(config), &(0..REQUESTS).map(prompt).collect::<Vec<_>>()).await
}

#[tokio::test]
async fn what_a_preempted_request_had_computed_comes_back_from_a_tier() {
    let (expected, _) = serve_small(small()).await;
    let store = Arc::new(Ram::new(1 << 30));
    let (answers, _) = serve_small(over(&store, Write::Through, Duration::ZERO, small())).await;
    assert_eq!(answers, expected);
    // From here on the store has all of every text, so what is found in it does not depend on how fast blocks are written.
    assert_eq!(store.usage().entries, Some((REQUESTS * BLOCKS) as u64));
    for write in [Write::Through, Write::Back { ahead_tokens: 64 }] {
        let (answers, stats) = serve_small(over(&store, write, Duration::ZERO, small())).await;
        assert_eq!(answers, expected, "{write:?}");
        let tiers = stats.tiers.as_ref().unwrap().counters;
        assert!(tiers.regained_tokens > 0 && tiers.declined_tokens == 0, "{write:?}: {tiers:?}");
        // Nothing is computed twice but what did not fill a block.
        let before: u64 = tiers.loaded_tokens.iter().sum::<u64>() - tiers.regained_tokens;
        let most =
            REQUESTS as u64 * (PROMPT as u64 + u64::from(ANSWER) - 1) + 16 * stats.counters.preemptions;
        assert!(stats.counters.computed_tokens + before <= most, "{write:?}: {most}, {stats:?}");

        // A tier that is expected to be slower than computing is not asked for them.
        let (answers, stats) = serve_small(over(&store, write, Duration::from_secs(3600), small())).await;
        assert_eq!(answers, expected, "{write:?}");
        let tiers = stats.tiers.as_ref().unwrap().counters;
        assert!(tiers.loads == 0 && tiers.declined_tokens > 0, "{write:?}: {tiers:?}");
    }
}

/// Regression: the cache had all of a preempted request when it was looked up, so the parts of its blocks in layers with a window were
/// not looked for, and nothing was loaded when the cache had evicted them.
#[tokio::test]
async fn what_a_preempted_request_of_a_model_with_windows_had_computed_comes_back() {
    for name in ["gemma3", "gpt-oss"] {
        let model = load_f32(&ModelFile::Path(fixtures("parity").join(name)));
        let vocab = model.config().vocab as u32;
        let prompts: Vec<Vec<u32>> =
            (0..REQUESTS).map(|i| prompt(i).iter().map(|token| token % (vocab - 4) + 3).collect()).collect();
        let small = || {
            let mut config = small();
            config.paged.block_tokens = 4;
            // A longer step would push blocks out of the window before they are in the index.
            (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (4, 6);
            config
        };
        let start = |config| Engine::start(model.clone(), &devices::all(), config).unwrap();
        let (expected, _) = serve(start(small()), &prompts).await;
        let store = Arc::new(Ram::new(1 << 30));
        for (round, write) in
            [Write::Through, Write::Through, Write::Back { ahead_tokens: 64 }].into_iter().enumerate()
        {
            let (answers, stats) = serve(start(over(&store, write, Duration::ZERO, small())), &prompts).await;
            assert_eq!(answers, expected, "{name}, {write:?}");
            // In the first round it depends on how fast blocks are written.
            let tiers = stats.tiers.as_ref().unwrap().counters;
            assert!(tiers.regained_tokens > 0 || round == 0, "{name}, {write:?}: {tiers:?}");
        }
    }
}
