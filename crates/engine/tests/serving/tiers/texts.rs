//! Texts do not depend on the tiers below the cache: without them, with room, full, slow, failing, and returning wrong
//! bytes. The cache is so small that most prompts are evicted before they come again.
use crate::engines::*;
use kvist_device::Storage;
use kvist_engine::devices;
use kvist_engine::serving::*;
use kvist_model::ModelFile;
use kvist_scheduler::{NotLoaded, Preempted, TierCounters, Write};
use kvist_store::{BlockKey, BlockStore, BoxFuture, Bytes, Ram, Rank, StoreError, StoreOver, Watcher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;
use tokio::sync::Semaphore;

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. This is not \
     to be confused with the length of a vector, which specifies the number of actual elements within the vector.";

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Every third operation fails.
    Errors,
    /// Every operation fails.
    Down,
    /// Every fifth block is a byte too short. (A store checks what it returns; the engine relies on the length alone.)
    Short,
    /// A block that was found is gone when it is read.
    Forgets,
    /// Lookups never end.
    Silent,
    /// Every third read never ends: its load is late.
    Stuck,
    /// Every operation waits until others have gone on, reads for long.
    Slow,
}

/// A store in memory with faults.
struct Faulty {
    store: Ram,
    fault: Fault,
    n: AtomicU64,
}

impl Faulty {
    async fn begin(&self) -> Result<(), StoreError> {
        let n = self.n.fetch_add(1, SeqCst);
        match self.fault {
            Fault::Slow => {
                // Some end before others that began earlier.
                tokio::time::sleep(Duration::from_millis(n % 4 * 3)).await;
                Ok(())
            }
            Fault::Errors if !n.is_multiple_of(3) => Ok(()),
            Fault::Errors | Fault::Down => Err(StoreError::Failed {
                store: "faulty".into(),
                action: "work",
                problem: "it is told to fail".into(),
            }),
            _ => Ok(()),
        }
    }
}

impl StoreOver for Faulty {
    fn below(&self) -> &dyn BlockStore {
        &self.store
    }
    fn name(&self) -> &str {
        match self.fault {
            Fault::Silent | Fault::Stuck => "unanswered",
            _ => "faulty",
        }
    }
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(async move {
            self.begin().await?;
            if self.fault == Fault::Silent {
                std::future::pending::<()>().await;
            }
            self.store.lookup(keys, within).await
        })
    }
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        Box::pin(async move {
            self.begin().await?;
            if self.fault == Fault::Stuck && self.n.load(SeqCst).is_multiple_of(3) {
                std::future::pending::<()>().await;
            }
            let found = self.store.get(key).await?;
            Ok(match self.fault {
                Fault::Short if self.n.load(SeqCst).is_multiple_of(5) => found.map(|bytes| bytes.slice(1..)),
                Fault::Forgets if self.n.load(SeqCst).is_multiple_of(7) => None,
                _ => found,
            })
        })
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.begin().await?;
            self.store.put(key, bytes, ttl).await
        })
    }
    fn has(&self, _: &BlockKey) -> Option<bool> {
        None // it would know without a fault
    }
}

/// A store whose reads wait at a gate.
struct Gated {
    store: Arc<dyn BlockStore>,
    /// A permit for every read that may go on.
    gate: Semaphore,
    /// Reads that have begun, and those of them that wait or go on.
    begun: AtomicU64,
    reading: AtomicU64,
}

impl Gated {
    fn over(store: Arc<dyn BlockStore>) -> Arc<Gated> {
        Arc::new(Gated {
            store,
            gate: Semaphore::new(0),
            begun: AtomicU64::new(0),
            reading: AtomicU64::new(0),
        })
    }

    /// Opens the gate for good.
    fn open(&self) {
        self.gate.add_permits(1 << 20);
    }
}

/// A read that was dropped has ended too.
struct Reading<'a>(&'a AtomicU64);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
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
            self.begun.fetch_add(1, SeqCst);
            self.reading.fetch_add(1, SeqCst);
            let _reading = Reading(&self.reading);
            self.gate.acquire().await.unwrap().forget();
            self.store.get(key).await
        })
    }
}

/// Ten minutes and more, for an event that comes at once.
async fn until(mut happened: impl AsyncFnMut() -> bool, what: &str) {
    for _ in 0..600_000 {
        if happened().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it does not happen: {what}");
}

/// A tier that is always worth reading.
fn tier(store: impl BlockStore + 'static) -> TierStore {
    TierStore { store: Arc::new(store), bytes_per_s: u64::MAX, latency: Duration::ZERO }
}

fn faulty(bytes: u64, fault: Fault) -> TierStore {
    tier(Faulty { store: Ram::new(bytes), fault, n: AtomicU64::new(0) })
}

/// Requests wait for every answer of a store, except for one that never answers: no result depends on time.
fn tiered(write: Write, stores: Vec<TierStore>) -> TierConfig {
    let unanswered = stores.iter().any(|tier| tier.store.name() == "unanswered");
    let grace = Duration::from_millis(if unanswered { 20 } else { 3_600_000 });
    TierConfig { write, grace, ..TierConfig::new(stores, b"a model".to_vec()) }
}

/// Waits until no cell is in use. Copies, and imports of loads that were given up, may still run; nothing else uses cells.
async fn free(engine: &Engine) {
    let used = async || engine.inspect(|state| state.scheduler.used_cells()).await.unwrap();
    until(async || used().await == 0, "all cells are free").await;
}

/// A batch of jobs, several times: the tokens of each, and what the engine counted.
async fn serve(engine: Engine, prompts: &[Vec<u32>]) -> (Vec<Vec<u32>>, EngineStats, u64) {
    let (mut texts, mut loaded) = (Vec::new(), 0);
    for _ in 0..4 {
        // Two at a time, so that requests share, wait and are preempted.
        for pair in prompts.chunks(2) {
            let jobs: Vec<_> = pair.iter().map(|prompt| engine.submit(greedy(prompt, 24)).unwrap()).collect();
            for mut job in jobs {
                let heard = receive(&mut job).await;
                let usage = heard.done.expect("it ended").usage;
                assert!(
                    usage.loaded_tokens <= usage.cached_tokens && usage.cached_tokens < usage.prompt_tokens
                );
                loaded += u64::from(usage.loaded_tokens);
                texts.push(heard.tokens);
            }
        }
    }
    engine.until_idle().await;
    free(&engine).await;
    (texts, engine.stats(), loaded)
}

fn prompts() -> Vec<Vec<u32>> {
    let all = tokens(TEXT);
    let with = |first: u32, from: usize, n: usize| {
        let mut prompt = vec![first];
        prompt.extend(&all[from..from + n]);
        prompt
    };
    vec![
        with(all[0], 0, 60),
        with(all[0], 0, 44),
        with(all[1], 5, 50),
        with(all[2], 2, 64),
        with(all[2], 2, 30),
        with(all[3], 8, 40),
    ]
}

fn small(write: Option<(Write, Vec<TierStore>)>, preempted: Preempted) -> EngineConfig {
    let mut config = config(176);
    config.scheduler.preempted = preempted;
    config.scheduler.wait_for_prefix = true;
    config.tiers = write.map(|(write, stores)| tiered(write, stores));
    config
}

#[tokio::test]
async fn the_same_texts_with_every_kind_of_tier() {
    let prompts = prompts();
    let (expected, without, _) = serve(engine(small(None, Preempted::Recompute)), &prompts).await;
    assert!(without.tiers.is_none() && without.evicted_blocks > 0);
    let back = Write::Back { ahead_tokens: 32 };
    const PLENTY: u64 = 1 << 30;
    let cases = [
        ("room", Write::Through, vec![tier(Ram::new(PLENTY))], true),
        ("written back", back, vec![tier(Ram::new(PLENTY))], true),
        ("two tiers", Write::Through, vec![tier(Ram::new(200_000)), tier(Ram::new(PLENTY))], true),
        ("full", Write::Through, vec![tier(Ram::new(100_000))], false),
        ("no room", Write::Through, vec![tier(Ram::new(0))], false),
        ("errors", Write::Through, vec![faulty(PLENTY, Fault::Errors)], false),
        ("down", back, vec![faulty(PLENTY, Fault::Down)], false),
        ("short reads", Write::Through, vec![faulty(PLENTY, Fault::Short)], false),
        ("forgets", Write::Through, vec![faulty(PLENTY, Fault::Forgets)], false),
        ("silent", Write::Through, vec![faulty(PLENTY, Fault::Silent)], false),
        ("stuck", Write::Through, vec![faulty(PLENTY, Fault::Stuck)], false),
        ("slow", Write::Through, vec![faulty(PLENTY, Fault::Slow)], true),
        ("slow, written back", back, vec![faulty(PLENTY, Fault::Slow)], true),
        (
            "slow, below a full one",
            Write::Through,
            vec![tier(Ram::new(100_000)), faulty(PLENTY, Fault::Slow)],
            true,
        ),
        ("down, then room", Write::Through, vec![faulty(PLENTY, Fault::Down), tier(Ram::new(PLENTY))], true),
    ];
    for (i, (name, write, stores, loads)) in cases.into_iter().enumerate() {
        let preempted = if i % 2 == 0 { Preempted::Recompute } else { Preempted::Kept };
        let (texts, stats, loaded) = serve(engine(small(Some((write, stores)), preempted)), &prompts).await;
        assert_eq!(texts, expected, "{name}");
        let tiers = stats.tiers.unwrap();
        let all: u64 = tiers.counters.loaded_tokens.iter().sum();
        assert_eq!(loaded + tiers.counters.regained_tokens, all, "{name}: {tiers:?}");
        if loads {
            assert!(loaded > 0, "{name}: nothing was loaded: {tiers:?}");
        }
        match name {
            "down" => assert!(loaded == 0 && tiers.stores[0].errors > 0, "{tiers:?}"),
            "forgets" => assert!(loaded > 0 && tiers.counters.failed_loads > 0, "{tiers:?}"),
            "no room" | "silent" => assert_eq!(loaded, 0, "{name}: {tiers:?}"),
            "down, then room" => assert!(tiers.counters.loaded_tokens[1] > 0, "{tiers:?}"),
            _ => {}
        }
    }
}

/// Conversations that fork: both branches go on from the same answer, at the same time, while the cache, which has room for one of
/// them, drops blocks to tiers and takes them back. Returns all answers, and how many tokens were loaded.
async fn converse(engine: &Engine) -> (Vec<Vec<u32>>, u64) {
    let (all, mut answers, mut loaded) = (tokens(TEXT), Vec::new(), 0);
    let turn = |from: usize| &all[from % 40..from % 40 + 9];
    let mut branches: Vec<Vec<u32>> = [0, 11].map(|from| all[from..from + 30].to_vec()).into();
    for round in 0..4 {
        let jobs: Vec<_> =
            branches.iter().map(|history| engine.submit(greedy(history, 10)).unwrap()).collect();
        for (history, mut job) in branches.iter_mut().zip(jobs) {
            let heard = receive(&mut job).await;
            loaded += u64::from(heard.done.expect("it ended").usage.loaded_tokens);
            history.extend(&heard.tokens);
            answers.push(heard.tokens);
        }
        if round == 1 {
            branches = branches.iter().flat_map(|history| [history.clone(), history.clone()]).collect();
        }
        for (i, history) in branches.iter_mut().enumerate() {
            history.extend(turn(round * 5 + i * 3));
        }
    }
    engine.until_idle().await;
    free(engine).await;
    (answers, loaded)
}

/// Once the engine slept although a copy had just ended, whose memory a request waited for.
#[tokio::test]
async fn the_same_texts_in_conversations_that_fork() {
    let tight = |tiers, preempted| {
        let mut config = EngineConfig { scheduler: small(None, preempted).scheduler, ..config(112) };
        config.tiers = small(tiers, preempted).tiers;
        config
    };
    let (expected, _) = converse(&engine(tight(None, Preempted::Recompute))).await;
    let back = Write::Back { ahead_tokens: 32 };
    const PLENTY: u64 = 1 << 30;
    for (name, write, stores, loads) in [
        ("room", Write::Through, vec![tier(Ram::new(PLENTY))], true),
        ("written back", back, vec![tier(Ram::new(PLENTY))], true),
        ("full", Write::Through, vec![tier(Ram::new(60_000))], false),
        ("slow", Write::Through, vec![faulty(PLENTY, Fault::Slow)], true),
        ("stuck", Write::Through, vec![faulty(PLENTY, Fault::Stuck)], false),
        ("errors", back, vec![faulty(PLENTY, Fault::Errors)], false),
        ("forgets", Write::Through, vec![faulty(PLENTY, Fault::Forgets)], false),
        ("short reads", Write::Through, vec![faulty(PLENTY, Fault::Short)], false),
    ] {
        for preempted in [Preempted::Recompute, Preempted::Kept] {
            let mut config = tight(Some((write, stores.clone())), preempted);
            config.scheduler.wait_for_prefix = preempted == Preempted::Kept;
            let engine = engine(config);
            let (answers, loaded) = converse(&engine).await;
            assert_eq!(answers, expected, "{name}");
            assert!(loaded > 0 || !loads, "{name}: nothing was loaded: {:?}", engine.stats());
        }
    }
}

/// Packed weights and a packed cache with `--deterministic`, with and without rows in f16.
#[tokio::test]
async fn the_same_texts_of_packed_numbers() {
    let (model, registry) = deterministic();
    let prompts = prompts();
    for (k, recent) in
        [(Storage::Q8, 0), (Storage::Q8, 16), (Storage::Q4, 16), (Storage::T4, 16), (Storage::T4_O, 16)]
    {
        let run = async |stores: Option<Vec<TierStore>>| {
            let mut config = small(stores.map(|stores| (Write::Through, stores)), Preempted::Recompute);
            config.paged.cache.k = k;
            config.paged.cache.v = k.for_values();
            config.paged.cache.recent.tokens = recent;
            config.fit();
            serve(Engine::start(model.clone(), registry, config).unwrap(), &prompts).await
        };
        let (expected, ..) = run(None).await;
        let (texts, _, loaded) = run(Some(vec![tier(Ram::new(1 << 30))])).await;
        assert_eq!(texts, expected, "{k}, {recent} recent rows");
        assert!(loaded > 0);
    }
}

/// A packed tier has the same blocks in 34 bytes for 64, and is as good as no tier where it does not matter.
#[tokio::test]
async fn a_packed_tier_takes_half_the_bytes() {
    let prompts = prompts();
    let run = async |store: Arc<dyn BlockStore>| {
        let stores = vec![TierStore { store: store.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO }];
        let mut config = small(Some((Write::Through, stores)), Preempted::Recompute);
        (config.paged.cache.k, config.paged.cache.v) = (Storage::F16, Storage::F16);
        config.fit();
        let (texts, stats, loaded) = serve(engine(config), &prompts).await;
        assert!(loaded > 0 && stats.tiers.unwrap().counters.failed_loads == 0);
        let usage = store.usage();
        (texts, usage.bytes.unwrap() / usage.entries.unwrap())
    };
    let (exact, plain) = run(Arc::new(Ram::new(1 << 30))).await;
    let (rounded, packed) = run(Arc::new(PackedStore::new(Ram::new(1 << 30)))).await;
    // A block has a head besides.
    assert!(packed < plain * 35 / 64, "{packed} of {plain} bytes");
    // The first round computes everything.
    assert_eq!(rounded[..prompts.len()], exact[..prompts.len()]);
    let same = |(a, b): (&Vec<u32>, &Vec<u32>)| a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (same, all) =
        (rounded.iter().zip(&exact).map(same).sum::<usize>(), exact.iter().map(Vec::len).sum::<usize>());
    assert!(same * 10 > all * 7, "{same} of {all} tokens are the same");
}

/// Models some of whose layers have a window: the tiers have only some of those layers' blocks.
#[tokio::test]
async fn the_same_texts_of_models_with_windows() {
    for name in ["gemma3", "gpt-oss", "qwen2-window-mixed"] {
        let model = load_f32(&ModelFile::Path(fixtures("parity").join(name)));
        let vocab = model.config().vocab as u32;
        let prompt = |first: u32, n: u32| {
            (0..n).map(|i| (first + i * 7 + i * i) % (vocab - 4) + 3).collect::<Vec<_>>()
        };
        // The second is the beginning of the first, so that a load ends where nothing ended before.
        let prompts =
            [prompt(1, 60), prompt(1, 37), prompt(2, 50), prompt(3, 64), prompt(4, 30), prompt(5, 40)];
        for write in [Write::Through, Write::Back { ahead_tokens: 32 }] {
            let run = async |stores: Option<Vec<TierStore>>| {
                let mut config = small(stores.map(|stores| (write, stores)), Preempted::Recompute);
                config.paged.block_tokens = 4;
                // A longer step would push blocks out of the window before they are in the index.
                (config.scheduler.max_batch, config.scheduler.max_batch_tokens) = (4, 6);
                serve(Engine::start(model.clone(), &devices::all(), config).unwrap(), &prompts).await
            };
            let (expected, without, _) = run(None).await;
            assert!(without.evicted_blocks > 0);
            for (stores, loads) in [
                (vec![tier(Ram::new(1 << 30))], true),
                (vec![tier(Ram::new(40_000)), tier(Ram::new(1 << 30))], true),
                (vec![faulty(1 << 30, Fault::Errors)], false),
                (vec![faulty(1 << 30, Fault::Forgets)], false),
            ] {
                let (texts, stats, loaded) = run(Some(stores)).await;
                let tiers = stats.tiers.unwrap();
                assert_eq!(texts, expected, "{name}, {write:?}: {tiers:?}");
                assert!(loaded > 0 || !loads, "{name}, {write:?}: nothing was loaded: {tiers:?}");
            }
        }
    }
}

/// Another engine with the same fingerprint finds what this one stored, one with another fingerprint does not, and nor does
/// another salt.
#[tokio::test]
async fn engines_share_what_is_stored_under_the_same_fingerprint_and_salt() {
    let store: Arc<dyn BlockStore> = Arc::new(Ram::new(1 << 30));
    let prompt = &prompts()[0];
    let run = async |fingerprint: &[u8], salt: &str| {
        let stores = vec![TierStore { store: store.clone(), bytes_per_s: u64::MAX, latency: Duration::ZERO }];
        let grace = Duration::from_secs(60);
        let tiers = TierConfig { grace, ..TierConfig::new(stores, fingerprint.to_vec()) };
        let engine = engine(EngineConfig { tiers: Some(tiers), ..config(1024) });
        let job = Job { salt: salt.into(), ..greedy(prompt, 8) };
        let mut job = engine.submit(job).unwrap();
        let heard = receive(&mut job).await;
        // Until everything is written.
        while engine.stats().tiers.is_none_or(|tiers| tiers.store_bytes > 0) {
            engine.inspect(|_| ()).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        (heard.tokens, heard.done.unwrap().usage.loaded_tokens)
    };
    let (text, loaded) = run(b"a model", "").await;
    assert_eq!(loaded, 0);
    for (fingerprint, salt, loaded) in
        [(&b"a model"[..], "", 48), (b"another", "", 0), (b"a model", "tenant", 0), (b"a model", "", 48)]
    {
        assert_eq!(run(fingerprint, salt).await, (text.clone(), loaded), "{fingerprint:?} {salt}");
    }
}

/// What a prompt of this engine needs is in a store, which no read comes back from.
async fn held(grace: Duration) -> (Engine, Arc<Gated>, Vec<u32>, Vec<u32>) {
    let stored: Arc<dyn BlockStore> = Arc::new(Ram::new(1 << 30));
    let prompt = prompts()[3].clone();
    let with = |store: Arc<dyn BlockStore>, grace| {
        let stores = vec![TierStore { store, bytes_per_s: u64::MAX, latency: Duration::ZERO }];
        let tiers = TierConfig { grace, ..TierConfig::new(stores, b"a model".to_vec()) };
        engine(EngineConfig { tiers: Some(tiers), ..config(1024) })
    };
    let first = with(stored.clone(), Duration::from_secs(3600));
    let expected = receive(&mut first.submit(greedy(&prompt, 8)).unwrap()).await.tokens;
    let written = async || {
        first.inspect(|_| ()).await;
        first
            .stats()
            .tiers
            .is_some_and(|tiers| tiers.store_bytes == 0 && tiers.stores[0].usage.entries == Some(4))
    };
    until(written, "all blocks are written").await;
    let gated = Gated::over(stored);
    (with(gated.clone(), grace), gated, prompt, expected)
}

/// What the tiers did until now, and the bytes on their way. (`Engine::stats` is of the end of the last step.)
async fn counted(engine: &Engine) -> (TierCounters, (u64, u64)) {
    let count = |state: &mut EngineState| {
        (state.scheduler.tier_counters().unwrap(), state.scheduler.bytes_in_flight())
    };
    engine.inspect(count).await.unwrap()
}

/// A request that is cancelled while its blocks are read: the reads end, and its cells are free, though the store never answers.
#[tokio::test]
async fn a_load_of_a_cancelled_request_stops() {
    let (engine, gated, prompt, expected) = held(Duration::from_secs(3600)).await;
    let job = engine.submit(greedy(&prompt, 8)).unwrap();
    until(async || gated.begun.load(SeqCst) > 0, "a read begins").await;
    assert!(engine.inspect(|state| state.scheduler.used_cells()).await.unwrap() > 0);
    drop(job);
    free(&engine).await;
    until(async || gated.reading.load(SeqCst) <= 3, "the reads end, but for three").await;
    let (tiers, in_flight) = counted(&engine).await;
    assert_eq!((tiers.wasted_tokens, in_flight, tiers.late_loads), (64, (0, 0), 0), "{tiers:?}");
    gated.open();
    let heard = receive(&mut engine.submit(greedy(&prompt, 8)).unwrap()).await;
    assert_eq!((heard.tokens, heard.done.unwrap().usage.loaded_tokens), (expected, 64));
}

/// A store that is too slow: the request goes on without it, its text is the same, and the load ends, though the store never answers.
#[tokio::test]
async fn a_late_load_stops_and_its_tokens_are_computed() {
    // On a slow machine the lookup may be late, too: once more.
    loop {
        let (engine, gated, prompt, expected) = held(Duration::from_millis(500)).await;
        let heard = receive(&mut engine.submit(greedy(&prompt, 8)).unwrap()).await;
        assert_eq!((heard.tokens, heard.done.unwrap().usage.loaded_tokens), (expected, 0));
        free(&engine).await;
        until(async || gated.reading.load(SeqCst) <= 3, "the reads end, but for three").await;
        let (tiers, in_flight) = counted(&engine).await;
        // It may also give the load up before any read has begun.
        if tiers.late_loads > 0 && gated.begun.load(SeqCst) > 0 {
            assert_eq!(heard.not_loaded, Some(NotLoaded::Late));
            assert_eq!((tiers.wasted_tokens, in_flight), (64, (0, 0)), "{tiers:?}");
            return;
        }
    }
}

#[test]
fn tiers_that_cannot_be_used_are_refused() {
    let refused = |config| Engine::start(model().clone(), &devices::all(), config).err().unwrap().to_string();
    let tiers = |stores| Some(tiered(Write::Through, stores));
    let none = EngineConfig { tiers: tiers(Vec::new()), ..config(256) };
    assert!(refused(none).contains("there are 0 tiers"));
    let mut unshared = config(256);
    unshared.paged.prefix = None;
    unshared.tiers = tiers(vec![tier(Ram::new(1))]);
    assert!(refused(unshared).contains("prefix index"));
    let mut windowed = config(256);
    windowed.paged.cache.window = Some(32);
    windowed.tiers = tiers(vec![tier(Ram::new(1))]);
    let error = refused(windowed);
    assert!(error.contains("some layers that see the whole text"), "{error}");
}
