//! What `EngineState::watch_tiers` tells is what the stores have: after texts, evictions, deletions and other capacities at random.
use crate::engines::*;
use kvist_engine::serving::*;
use kvist_scheduler::Write;
use kvist_store::{BlockKey, BlockStore, KeyChain, Ram, StoreOver, Watcher};
use kvist_testing::SplitMix64;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MODEL: &[u8] = b"a model";
const BLOCK: usize = 16;
const TEXTS: usize = 8;

/// A text of 72 tokens. Texts share beginnings with the one before.
fn text(i: usize) -> Vec<u32> {
    let mut random = SplitMix64(i as u64 / 2);
    let mut text: Vec<u32> = (0..72).map(|_| random.below(4000)).collect();
    text[32..].iter_mut().for_each(|token| *token += i as u32 % 2);
    text
}

/// A store that does not tell what it has, as a disk that evicts by itself.
struct Silent(Ram);

impl StoreOver for Silent {
    fn below(&self) -> &dyn BlockStore {
        &self.0
    }
    fn name(&self) -> &str {
        "silent"
    }
    fn has(&self, _: &BlockKey) -> Option<bool> {
        None
    }
    fn watch(&self, _: Watcher) -> bool {
        false
    }
}

/// A cache of ten blocks above these stores, which are always worth reading.
fn over(stores: &[Arc<dyn BlockStore>], write: Write) -> Engine {
    let mut config = config(160);
    let tier = |store: &Arc<dyn BlockStore>| TierStore {
        store: store.clone(),
        bytes_per_s: u64::MAX,
        latency: Duration::ZERO,
    };
    let stores = stores.iter().map(tier).collect();
    let grace = Duration::from_secs(3600);
    config.tiers = Some(TierConfig { write, grace, always: true, ..TierConfig::new(stores, MODEL.to_vec()) });
    engine(config)
}

async fn ask(engine: &Engine, salt: &str, text: &[u32]) -> Done {
    let job = Job { salt: salt.into(), ..greedy(text, 6) };
    let done = receive(&mut engine.submit(job).unwrap()).await.done.expect("it ended");
    copied(engine).await;
    done
}

/// Waits for the copies that are on their way, from the cache's memory and then to the stores.
async fn copied(engine: &Engine) {
    engine.until_idle().await;
    let in_flight = async || engine.inspect(|state| state.scheduler.bytes_in_flight().1).await;
    while in_flight().await != Some(0) || engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes > 0) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Tiers, and hashes of blocks.
type Here = BTreeSet<(usize, u64)>;

/// A listener that hears the events.
#[derive(Clone, Default)]
struct Subscriber(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    here: BTreeSet<(usize, u64)>,
    blocks: BTreeMap<u64, Arc<TierBlock>>,
    n_removed: usize,
}

impl Subscriber {
    async fn of(engine: &Engine) -> (Self, Vec<String>) {
        let subscriber = Subscriber::default();
        let told = subscriber.0.clone();
        let tell = move |event: TierEvent| {
            let mut told = told.lock().unwrap();
            match event {
                TierEvent::Stored { tier, block } => {
                    assert!(told.here.insert((tier, block.hash)), "stored twice");
                    told.blocks.insert(block.hash, block);
                }
                TierEvent::Removed { tier, hash } => {
                    assert!(told.here.remove(&(tier, hash)), "only what is here is removed");
                    told.n_removed += 1;
                }
            }
        };
        let names = engine.inspect(move |state| state.watch_tiers("", Box::new(tell))).await.unwrap();
        (subscriber, names)
    }

    fn here(&self) -> BTreeSet<(usize, u64)> {
        self.0.lock().unwrap().here.clone()
    }

    async fn until(&self, is_true: impl Fn(BTreeSet<(usize, u64)>) -> bool, what: &str) {
        // Only ends a test that fails.
        let end = Instant::now() + Duration::from_secs(600);
        while !is_true(self.here()) {
            assert!(Instant::now() < end, "{what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The hashes by which prefix events name the blocks of all texts, text by text.
async fn hashes(engine: &Engine) -> Vec<Vec<u64>> {
    let all = |state: &mut EngineState| {
        let cache = state.scheduler.cache();
        (0..TEXTS).map(|i| cache.prefix_hashes("", &kvist_cache::Content::Tokens(&text(i)))).collect()
    };
    engine.inspect(all).await.unwrap()
}

/// What the stores have of the texts, of this generation of the salt.
async fn stored(
    stores: &[Arc<dyn BlockStore>],
    hashes: &[Vec<u64>],
    generation: u64,
) -> BTreeSet<(usize, u64)> {
    let mut all = BTreeSet::new();
    for (i, hashes) in hashes.iter().enumerate() {
        let keys = KeyChain::root_of(MODEL, "", generation).keys(&text(i), BLOCK);
        for (key, hash) in keys.into_iter().zip(hashes) {
            for (tier, store) in stores.iter().enumerate() {
                if store.lookup(&[key], Duration::MAX).await.unwrap() == 1 {
                    all.insert((tier, *hash));
                }
            }
        }
    }
    all
}

/// By tier.
fn of_tiers(all: Here) -> (Here, Here) {
    all.into_iter().partition(|(tier, _)| *tier == 0)
}

/// Deletes what is under the salt, and returns the generation that begins.
async fn forget(engine: &Engine, store: &dyn BlockStore) -> u64 {
    // It waits two seconds at most, and the machine may be slow.
    while !engine.forget("").await.unwrap().untold.is_empty() {}
    let note = store.get(&KeyChain::note(MODEL, "")).await.unwrap().expect("the store was told");
    u64::from_le_bytes(note[..].try_into().unwrap())
}

/// Bytes that a store in RAM takes for a block.
async fn stored_bytes() -> u64 {
    let ram: Arc<dyn BlockStore> = Arc::new(Ram::new(1 << 30));
    ask(&over(std::slice::from_ref(&ram), Write::Through), "", &text(0)).await;
    let usage = ram.usage();
    usage.bytes.unwrap() / usage.entries.unwrap()
}

#[tokio::test]
async fn a_subscriber_knows_what_the_stores_have() {
    let block_bytes = stored_bytes().await;
    let (mut removed, mut loaded, mut n_told, mut n_silent) = (0, 0, 0, 0);
    for seed in 0..6 {
        let mut random = SplitMix64(seed);
        let write = if seed % 2 == 0 { Write::Through } else { Write::Back { ahead_tokens: 32 } };
        // Room for some of the blocks; below it for all of them, in some rounds.
        let ram: Arc<dyn BlockStore> = Arc::new(Ram::new(12 * block_bytes));
        let mut stores = vec![ram];
        if seed >= 4 {
            stores.push(Arc::new(Silent(Ram::new(1 << 30))));
        }
        let tiered = over(&stores, write);
        let (subscriber, names) = Subscriber::of(&tiered).await;
        assert_eq!(names, ["ram", "silent"][..stores.len()]);
        let hashes = hashes(&tiered).await;
        let mut generation = 0;
        for step in 0..60 {
            let i = random.index(TEXTS);
            match random.below(12) {
                0..8 => loaded += ask(&tiered, "", &text(i)).await.usage.loaded_tokens,
                8 | 9 => drop(ask(&tiered, "secret", &text(i)).await),
                10 => {
                    let tokens = 112 + 16 * random.below(4);
                    tiered.resize(tokens, Duration::from_secs(60)).await.unwrap();
                }
                _ => generation = forget(&tiered, &*stores[stores.len() - 1]).await,
            }
            copied(&tiered).await;
            // Blocks are told after a step, and a note that is written late can push out others.
            let end = Instant::now() + Duration::from_secs(600);
            let in_silent = loop {
                let (in_ram, in_silent) = of_tiers(stored(&stores, &hashes, generation).await);
                if of_tiers(subscriber.here()).0 == in_ram {
                    break in_silent;
                }
                assert!(Instant::now() < end, "seed {seed}, step {step}");
                tokio::time::sleep(Duration::from_millis(1)).await;
            };
            let (_, told_silent) = of_tiers(subscriber.here());
            // Of the silent one, what lies behind a gap of a text that was looked up counts as gone.
            assert!(told_silent.is_subset(&in_silent), "seed {seed}, step {step}");
            (n_told, n_silent) = (n_told + told_silent.len(), n_silent + in_silent.len());
        }
        let told = subscriber.0.lock().unwrap();
        for (i, hashes) in hashes.iter().enumerate() {
            for (n, hash) in hashes.iter().enumerate() {
                let Some(block) = told.blocks.get(hash) else { continue };
                let parent = n.checked_sub(1).map(|before| hashes[before]);
                assert_eq!(block.parent, parent);
                assert_eq!(block.tokens, text(i)[n * BLOCK..(n + 1) * BLOCK]);
            }
        }
        removed += told.n_removed;
    }
    assert!(removed > 100 && loaded > 500, "{removed} removed, {loaded} loaded");
    assert!(n_told > n_silent * 3 / 4 && n_told > 100, "{n_told} told of {n_silent}");
}

/// What a silent store has lost is told when it is missed, and again when it is stored again.
#[tokio::test]
async fn what_is_missed_is_told() {
    let silent: Arc<dyn BlockStore> = Arc::new(Silent(Ram::new(1 << 30)));
    let stores = [silent];
    let tiered = over(&stores, Write::Through);
    let (subscriber, _) = Subscriber::of(&tiered).await;
    let hashes = hashes(&tiered).await;
    for i in 0..TEXTS {
        ask(&tiered, "", &text(i)).await;
    }
    // The cache has the last two texts.
    let lost = KeyChain::root(MODEL, "").keys(&text(0), BLOCK)[2];
    stores[0].remove(&lost).await.unwrap();
    subscriber.until(|here| here.contains(&(0, hashes[0][2])), "it is lost, and that was not noticed").await;
    assert_eq!(ask(&tiered, "", &text(0)).await.usage.loaded_tokens, 32);
    let told = subscriber.0.lock().unwrap().n_removed;
    assert!(told > 0, "it was missed");
    let expected = stored(&stores, &hashes, 0).await;
    subscriber.until(|here| here == expected, "it is stored again").await;
}
