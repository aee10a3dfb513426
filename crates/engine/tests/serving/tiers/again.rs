//! A tier may drop at any time what the cache still has. It gets it again, and so it is not gone when the cache evicts it.
use crate::engines::*;
use kvist_engine::serving::*;
use kvist_scheduler::Write;
use kvist_store::{
    BlockKey, BlockStore, BoxFuture, Bytes, KeyChain, Ram, Rank, StoreError, StoreOver, Watcher,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

const MODEL: &[u8] = b"a model";

fn prompt(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

async fn serve(engine: &Engine, prompt: &[u32]) -> (Vec<u32>, u32) {
    let mut job = engine.submit(greedy(prompt, 4)).unwrap();
    let heard = receive(&mut job).await;
    engine.until_idle().await;
    // Until everything is written.
    let copies = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await;
    while copies().await != Some(0) || engine.stats().tiers.is_some_and(|tiers| tiers.store_bytes > 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (heard.tokens, heard.done.unwrap().usage.loaded_tokens)
}

/// Regression: a block counted as stored because it had been written once. In the meantime the tier had dropped it, as it does with what
/// it thinks is not used; and the cache, which answered from its own copy, dropped that too.
#[tokio::test]
async fn what_a_tier_has_dropped_comes_back_from_it_all_the_same() {
    for write in [Write::Through, Write::Back { ahead_tokens: 64 }] {
        let ram = Arc::new(Ram::new(1 << 30));
        let tier = TierStore { store: ram.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO };
        let grace = Duration::from_secs(3600);
        let tiers = TierConfig { write, grace, ..TierConfig::new(vec![tier], MODEL.to_vec()) };
        let engine = engine(EngineConfig { tiers: Some(tiers), ..config(320) });
        let text = prompt(100, 81);
        let keys: Vec<BlockKey> = KeyChain::root(MODEL, "").keys(&text[..80], 16);
        let n_stored = || keys.iter().filter(|key| ram.has(key) == Some(true)).count();
        let evict = async || {
            for i in 1..20 {
                serve(&engine, &prompt(100 + 100 * i, 33)).await;
            }
        };
        let (answer, _) = serve(&engine, &text).await;
        if write != Write::Through {
            evict().await;
            assert_eq!(serve(&engine, &text).await, (answer.clone(), 80), "it is written back");
        }
        assert_eq!(n_stored(), 5, "{write:?}");
        for key in &keys {
            ram.remove(key).await.unwrap();
        }
        // The cache has all of it.
        assert_eq!(serve(&engine, &text).await, (answer.clone(), 0));
        if write == Write::Through {
            while n_stored() < 5 {
                engine.inspect(|_| ()).await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        evict().await;
        assert_eq!(serve(&engine, &text).await, (answer, 80), "{write:?}");
    }
}

/// A store that takes nothing while it is told so.
struct Refusing {
    ram: Ram,
    refuses: AtomicBool,
}

impl StoreOver for Refusing {
    fn below(&self) -> &dyn BlockStore {
        &self.ram
    }
    // As a store that tells nothing, so that the engine goes by what it remembers.
    fn has(&self, _: &BlockKey) -> Option<bool> {
        None
    }
    fn keep(&self, _: &[BlockKey], _: Rank, _: Duration) -> bool {
        false
    }
    fn watch(&self, _: Watcher) -> bool {
        false
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        match self.refuses.load(SeqCst) {
            true => Box::pin(async {
                Err(StoreError::Failed {
                    store: "refusing".into(),
                    action: "write a block",
                    problem: "it is told so".into(),
                })
            }),
            false => self.ram.put(key, bytes, ttl),
        }
    }
}

/// Regression: with write-through, blocks that were not copied because too much was on its way, and blocks that the tier did not take, were
/// gone when the cache evicted them, unless a prompt had hit them before.
#[tokio::test]
async fn what_no_tier_got_is_copied_when_it_is_evicted() {
    for (n_in_flight, refuses) in [(3, false), (100, true)] {
        let config = config(320);
        let block_bytes = config.paged.block_bytes(model().config());
        let store = Arc::new(Refusing { ram: Ram::new(1 << 30), refuses: AtomicBool::new(refuses) });
        let tier = TierStore { store: store.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO };
        let tiers = TierConfig {
            grace: Duration::from_secs(3600),
            max_bytes_in_flight: n_in_flight * block_bytes,
            always: true,
            ..TierConfig::new(vec![tier], MODEL.to_vec())
        };
        let engine = engine(EngineConfig { tiers: Some(tiers), ..config });
        let text = prompt(100, 81);
        let keys: Vec<BlockKey> = KeyChain::root(MODEL, "").keys(&text[..80], 16);
        let n_stored = || keys.iter().filter(|key| store.ram.has(key) == Some(true)).count();
        let (answer, _) = serve(&engine, &text).await;
        let counters = || engine.stats().tiers.unwrap().counters;
        assert!(n_stored() < 5 && (refuses || counters().skipped_blocks > 0), "{:?}", counters());
        store.refuses.store(false, SeqCst);
        for i in 1..20 {
            serve(&engine, &prompt(100 + 100 * i, 33)).await;
        }
        assert_eq!(n_stored(), 5, "{:?}", counters());
        assert_eq!(serve(&engine, &text).await, (answer, 80));
    }
}
