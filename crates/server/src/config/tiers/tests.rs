use super::*;
use crate::ServerConfig;
use kvist_engine::devices;
use kvist_engine::serving::{Engine, Event, GenerationHandle, Job, TierStore};
use kvist_scheduler::Config;
use kvist_scheduler::NotLoaded;
use kvist_store::{BlockKey, BlockStore, BoxFuture, Bytes, Rank, StoreOver, Usage, Watcher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Instant;
use tokio::sync::Semaphore;

/// Models, as the tests of `kvist-model` have them.
#[path = "../../../../model/tests/common/mod.rs"]
mod models;

/// Only ends tests that would hang; nothing is measured against it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Blocks of a prompt, and a token more, which is always computed.
const N_BLOCKS: u64 = 4;
const PROMPT_TOKENS: u32 = N_BLOCKS as u32 * 16 + 1;

/// `always` changed the speed of the tiers to a boundless one, by which every load was late after the grace.
#[test]
fn what_is_always_loaded_is_estimated_like_any_load() {
    let opened = |load| {
        let section = TiersSection { ram_bytes: 64 << 20, grace_ms: 1234, load, ..TiersSection::default() };
        section.open(&Config::default(), 1 << 20, Vec::new()).unwrap().unwrap().config()
    };
    for (load, always) in [(LoadRule::Auto, false), (LoadRule::Always, true)] {
        let config = opened(load);
        let [tier] = &config.stores[..] else { panic!("one tier") };
        // What the other has.
        let guessed = opened(LoadRule::Auto);
        let [guess] = &guessed.stores[..] else { panic!("one tier") };
        assert_eq!((tier.bytes_per_s, tier.latency), (guess.bytes_per_s, guess.latency), "{load:?}");
        assert!(tier.bytes_per_s < u64::MAX && tier.latency > Duration::ZERO);
        assert_eq!((config.always, config.grace), (always, Duration::from_millis(1234)));
    }
    let read: TiersSection = toml::from_str("ram_bytes = 5\ngrace_ms = 2000").unwrap();
    assert_eq!((read.grace_ms, TiersSection::default().grace_ms), (2000, 250));
}

/// What is locked for the tier in RAM is part of what the plan counts: its capacity, what is copied out of the cache, and what waits to be
/// written there.
#[test]
fn locked_memory_is_that_of_the_plan() {
    let mib = 1 << 20;
    for (section, expected) in [
        (TiersSection::default(), 0),
        (TiersSection { ram_bytes: 512 * mib, ..TiersSection::default() }, 640 * mib),
        (
            TiersSection { ram_bytes: 512 * mib, store: Some("redis://h".into()), ..TiersSection::default() },
            1024 * mib,
        ),
        (TiersSection { ram_bytes: 512 * mib, ram_packed: true, ..TiersSection::default() }, 0),
        (TiersSection { store: Some("redis://h".into()), ..TiersSection::default() }, 0),
    ] {
        assert_eq!(section.pinned_bytes(), expected, "{section:?}");
        let model = models::f32_model();
        let paged =
            ServerConfig { tiers: section.clone(), ..ServerConfig::default() }.engine(model.config()).paged;
        assert!(section.memory_bytes(&paged, model.config()) >= expected, "{section:?}");
    }
}

/// A store in memory whose reads and writes wait for permits.
struct Gated {
    store: Arc<Ram>,
    reads: Semaphore,
    writes: Semaphore,
    begun_reads: AtomicU64,
    begun_writes: AtomicU64,
    /// So many questions for its usage, and writes go on. [`Engine::stats`] asks once.
    questions_until_writes: AtomicU64,
}

const OPEN: usize = 1 << 20;

impl Gated {
    fn over(store: &Arc<Ram>, reads: usize, writes: usize) -> Arc<Gated> {
        Arc::new(Gated {
            store: store.clone(),
            reads: Semaphore::new(reads),
            writes: Semaphore::new(writes),
            begun_reads: AtomicU64::new(0),
            begun_writes: AtomicU64::new(0),
            questions_until_writes: AtomicU64::new(u64::MAX),
        })
    }
}

impl StoreOver for Gated {
    fn below(&self) -> &dyn BlockStore {
        &*self.store
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
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        Box::pin(async move {
            self.begun_reads.fetch_add(1, SeqCst);
            self.reads.acquire().await.unwrap().forget();
            self.store.get(key).await
        })
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.begun_writes.fetch_add(1, SeqCst);
            self.writes.acquire().await.unwrap().forget();
            self.store.put(key, bytes, ttl).await
        })
    }
    fn usage(&self) -> Usage {
        if self.questions_until_writes.fetch_sub(1, SeqCst) == 1 {
            self.writes.add_permits(OPEN);
        }
        self.store.usage()
    }
}

/// An engine with the tiers of this section, whose stores are replaced by `stores`.
fn start(section: &str, stores: Vec<Arc<dyn BlockStore>>) -> (Engine, OpenTiers) {
    let mut config = ServerConfig::parse(Path::new("k.toml"), section).unwrap();
    config.check().unwrap();
    config.cache.kv = Storage::F32;
    config.cache.tokens = Some(512);
    let model = models::f32_model();
    let mut settings = config.engine(model.config());
    settings.tenants.clear();
    let tiers = config.tiers.open(&config.scheduler, 1 << 20, Vec::new()).unwrap().unwrap();
    // As if it took no time to read them, so that a load is expected at once.
    let fast = |store| TierStore { store, bytes_per_s: u64::MAX, latency: Duration::ZERO };
    let stores = stores.into_iter().map(fast).collect();
    settings.tiers = Some(TierConfig { stores, ..tiers.config() });
    (Engine::start(model.clone(), &devices::all(), settings).unwrap(), tiers)
}

fn submit(engine: &Engine) -> GenerationHandle {
    let prompt: Vec<u32> = (5..5 + PROMPT_TOKENS).collect();
    engine.submit(Job { ignore_eos: true, explain: true, ..Job::new(prompt, 8) }).unwrap()
}

/// The text, the loaded tokens, and why no more were.
fn receive(mut generation: GenerationHandle) -> (Vec<u32>, u32, Option<NotLoaded>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (mut text, mut why) = (Vec::new(), None);
        loop {
            match generation.next().await.expect("it ends") {
                Event::Admitted { not_loaded, .. } => why = not_loaded,
                Event::Token(token) => text.push(token.id),
                Event::Done(done) => return (text, done.usage.loaded_tokens, why),
                _ => {}
            }
        }
    })
}

fn until(happened: impl Fn() -> bool) {
    let began = Instant::now();
    while !happened() {
        assert!(began.elapsed() < PATIENCE, "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A store in memory that has the blocks of the prompt, and the text that follows it.
fn filled() -> (Arc<Ram>, Vec<u32>) {
    let stored = Arc::new(Ram::new(1 << 30));
    let (engine, tiers) = start("[tiers]\nram_bytes = 1", vec![stored.clone()]);
    let (text, loaded, _) = receive(submit(&engine));
    tiers.flush(&engine, PATIENCE);
    assert_eq!((loaded, stored.usage().entries), (0, Some(N_BLOCKS)));
    (stored, text)
}

/// The same reads of the same store are held for both: one server gives up, the other, asked before it, still waits, and loads.
#[test]
fn a_server_gives_up_a_slow_store_after_its_grace() {
    let (stored, expected) = filled();
    let section = |grace_ms: u64| format!("[tiers]\nram_bytes = 1\nload = \"always\"\ngrace_ms = {grace_ms}");
    // On a slow machine a lookup may be late, too: once more.
    loop {
        let gated = Gated::over(&stored, 0, OPEN);
        let (patient, _tiers) = start(&section(3_600_000), vec![gated.clone()]);
        let waits = submit(&patient);
        until(|| gated.begun_reads.load(SeqCst) > 0);
        let (hurried, _tiers) = start(&section(50), vec![gated.clone()]);
        let (text, loaded, why) = receive(submit(&hurried));
        assert_eq!((&text, loaded), (&expected, 0));
        gated.reads.add_permits(OPEN);
        let waited = receive(waits);
        if why == Some(NotLoaded::Late) {
            assert_eq!(waited, (expected, N_BLOCKS as u32 * 16, None));
            return;
        }
        assert_eq!(why, Some(NotLoaded::Unanswered));
    }
}

/// What a server does before it ends: blocks that were computed, and blocks that were read from a slower tier for a faster one, are
/// written first. Their writes are held until the flush has asked for the third time.
#[test]
fn a_flush_waits_for_what_is_stored_and_promoted() {
    let n_promoted = [0, N_BLOCKS];
    for promoted in n_promoted {
        let gated = Gated::over(&Arc::new(Ram::new(1 << 30)), OPEN, 0);
        let mut stores: Vec<Arc<dyn BlockStore>> = vec![gated.clone()];
        if promoted > 0 {
            stores.push(filled().0);
        }
        let section = "[tiers]\nram_bytes = 1\nload = \"always\"\ngrace_ms = 3600000";
        let (engine, tiers) = start(section, stores);
        let (_, loaded, _) = receive(submit(&engine));
        assert_eq!(u64::from(loaded), promoted * 16);
        until(|| gated.begun_writes.load(SeqCst) > 0);

        // One that never ends is given up.
        tiers.flush(&engine, Duration::from_millis(1));
        assert_eq!(gated.store.usage().entries, Some(0));

        gated.questions_until_writes.store(3, SeqCst);
        tiers.flush(&engine, PATIENCE);
        assert_eq!(gated.store.usage().entries, Some(N_BLOCKS), "{promoted} blocks are promoted");
        assert_eq!(engine.stats().tiers.unwrap().store_bytes, 0);
    }
}
