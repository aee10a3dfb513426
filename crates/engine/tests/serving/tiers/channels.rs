//! Tiers of a cache in t4-o, whose rows have the channels of K in an order that is measured: blocks in another order are not found.
use crate::engines::*;
use kvist_device::Storage;
use kvist_engine::serving::*;
use kvist_model::Model;
use kvist_store::{BlockStore, Ram};
use std::sync::Arc;
use std::time::Duration;

/// The text of a prompt of 60 tokens in an engine of its own, and how many of them it loaded.
async fn run(model: &Arc<Model>, k: Storage, store: Option<&Arc<dyn BlockStore>>) -> (Vec<u32>, u32) {
    let mut config = config(1024);
    (config.paged.cache.k, config.paged.cache.v) = (k, k.for_values());
    config.tiers = store.map(|store| {
        let stores = vec![TierStore { store: store.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO }];
        let grace = Duration::from_secs(60);
        TierConfig { grace, always: true, ..TierConfig::new(stores, b"a model".to_vec()) }
    });
    let engine = Engine::start(model.clone(), &deterministic().1, config).unwrap();
    let prompt: Vec<u32> = (0..60).map(|i| 5 + i * i % 1000).collect();
    let heard = receive(&mut engine.submit(greedy(&prompt, 8)).unwrap()).await;
    // Until everything is written.
    while engine.stats().tiers.is_some_and(|tiers| tiers.store_bytes > 0) {
        engine.inspect(|_| ()).await;
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (heard.tokens, heard.done.unwrap().usage.loaded_tokens)
}

#[tokio::test]
async fn blocks_in_another_order_of_channels_are_not_found() {
    let (model, other) = (load_deterministic(), load_deterministic());
    other.channels().set(kvist_testing::other_channels(other.layout()).into()).unwrap();
    for k in [Storage::T4_O, Storage::T4, Storage::Q4] {
        let store: Arc<dyn BlockStore> = Arc::new(Ram::new(1 << 30));
        let (expected, of_the_other) = (run(&model, k, None).await.0, run(&other, k, None).await.0);
        assert_eq!(run(&model, k, Some(&store)).await, (expected.clone(), 0), "{k}");
        assert_eq!(run(&model, k, Some(&store)).await, (expected.clone(), 48), "{k}");
        let found = if k.outliers { 0 } else { 48 };
        assert_eq!(run(&other, k, Some(&store)).await, (of_the_other.clone(), found), "{k}");
        // Its own blocks are found, and do not replace those of the first.
        assert_eq!(run(&other, k, Some(&store)).await, (of_the_other, 48), "{k}");
        assert_eq!(run(&model, k, Some(&store)).await, (expected, 48), "{k}");
    }
    // The order is the same whenever it is measured.
    let again = load_deterministic();
    run(&again, Storage::T4_O, None).await;
    assert_eq!(again.channels().get(), model.channels().get());
    assert_ne!(other.channels().get(), model.channels().get());
}
