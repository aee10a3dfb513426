use super::*;
use crate::serving::tiers::TierStore;
use kvist_store::{BoxFuture, Counts, KeyChain, Ram, Usage};

/// A store in memory whose writes wait for a permit each, and fail while it is told to.
struct Slow {
    store: Ram,
    gate: Semaphore,
    fails: AtomicBool,
    puts: AtomicU64,
}

impl Slow {
    fn new(permits: usize) -> Arc<Slow> {
        let (gate, fails, puts) = (Semaphore::new(permits), AtomicBool::new(false), AtomicU64::new(0));
        Arc::new(Slow { store: Ram::new(1 << 20), gate, fails, puts })
    }
}

impl BlockStore for Slow {
    fn name(&self) -> &str {
        "slow"
    }
    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<usize, StoreError>> {
        self.store.lookup(keys)
    }
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        self.store.get(key)
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.gate.acquire().await.unwrap().forget();
            self.puts.fetch_add(1, Relaxed);
            if self.fails.load(Relaxed) {
                let problem = "it is told to fail".into();
                return Err(StoreError::Failed { store: "slow".into(), action: "write", problem });
            }
            self.store.put(key, bytes, ttl).await
        })
    }
    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        self.store.remove(key)
    }
    fn usage(&self) -> Usage {
        self.store.usage()
    }
    fn counts(&self) -> Counts {
        self.store.counts()
    }
}

const BLOCK: usize = 100;

/// Two tiers, and 350 bytes that may be on their way to them.
fn two(fast: Arc<Slow>, slow: Arc<Slow>) -> Arc<Stores> {
    let tier = |store| TierStore { store, bytes_per_s: 1, latency: Duration::ZERO };
    let stores: Vec<TierStore> = [fast, slow].map(|store| tier(store as Arc<dyn BlockStore>)).into();
    let config = TierConfig { max_bytes_in_flight: 350, ..TierConfig::new(stores, Vec::new()) };
    Arc::new(Stores::new(&config))
}

fn keys(n: u32) -> Vec<BlockKey> {
    KeyChain::root(b"a model", "").keys(&(0..n).collect::<Vec<_>>(), 1)
}

/// What was loaded was kept until it was copied to faster tiers, however much it was.
#[tokio::test]
async fn copies_to_faster_tiers_are_bounded() {
    let (fast, slow) = (Slow::new(0), Slow::new(1000));
    let stores = two(fast.clone(), slow.clone());
    let wanted: Vec<Wanted> = keys(10).into_iter().map(|key| Wanted { tier: 1, key, bytes: BLOCK }).collect();
    for one in &wanted {
        slow.put(one.key, Bytes::from(vec![7; BLOCK]), None).await.unwrap();
    }
    let (reports, inbox) = std::sync::mpsc::channel();
    let load = Fetch { id: TransferId(0), wanted };
    let load = tokio::spawn(fetch(stores.clone(), load, reports));
    let report = tokio::task::spawn_blocking(move || {
        let ended = |command: &Command| matches!(command, Command::Tier(Report::Fetched { ok: true, .. }));
        inbox.iter().any(|command| ended(&command))
    });
    assert!(report.await.unwrap());
    // The load has ended, and the copies wait for their store.
    assert_eq!(stores.bytes_being_written(), 300);
    assert!(stores.may_write(51).is_none() && stores.may_write(50).is_some());
    fast.gate.add_permits(1000);
    load.await.unwrap();
    assert_eq!((fast.puts.load(Relaxed), stores.bytes_being_written()), (3, 0));
}

/// Copies that are given up do not count for ever.
#[tokio::test]
async fn a_copy_that_is_dropped_makes_room() {
    let (fast, slow) = (Slow::new(0), Slow::new(0));
    let stores = two(fast, slow);
    let writing = stores.may_write(300).unwrap();
    let task =
        tokio::spawn(put(stores.clone(), stores.ticket(keys(1)[0]), Bytes::from(vec![7; 300]), writing));
    tokio::task::yield_now().await;
    task.abort();
    assert!(task.await.is_err());
    assert_eq!(stores.bytes_being_written(), 0);
}

/// A block that one of two tiers had accepted counted as written, and the other one never got it.
#[tokio::test]
async fn a_tier_that_failed_gets_the_block_later() {
    let (fast, slow) = (Slow::new(1000), Slow::new(1000));
    let stores = two(fast.clone(), slow.clone());
    let key = keys(1)[0];
    let write = async || {
        let writing = stores.may_write(BLOCK as u64).unwrap();
        put(stores.clone(), stores.ticket(key), Bytes::from(vec![7; BLOCK]), writing).await;
        (fast.puts.load(Relaxed), slow.puts.load(Relaxed))
    };
    slow.fails.store(true, Relaxed);
    assert_eq!((write().await, stores.has_written(&key)), ((1, 1), false));
    slow.fails.store(false, Relaxed);
    assert_eq!((write().await, stores.has_written(&key)), ((1, 2), true), "the other one has it");
    // One that has lost it gets it again, and a block that is too large is not tried again.
    stores.list[0].store.remove(&key).await.unwrap();
    assert_eq!(stores.get(Wanted { tier: 0, key, bytes: BLOCK }).await, None);
    assert_eq!((write().await, stores.has_written(&key)), ((2, 2), true));
    let large = keys(2)[1];
    let stores = two(Slow::new(1000), Slow::new(1000));
    stores.put(0, &stores.ticket(large), &Bytes::from(vec![7; 2 << 20])).await;
    assert!(stores.has(&large, 0) && !stores.has_written(&large));
    stores.forget(&large);
    assert!(!stores.has(&large, 0));
}

/// A write that ended after the removal of its block brought it back.
#[tokio::test]
async fn a_block_that_is_removed_while_it_is_written_stays_away() {
    let (fast, slow) = (Slow::new(0), Slow::new(1000));
    let stores = two(fast.clone(), slow.clone());
    let key = keys(1)[0];
    let write = async |stores: &Arc<Stores>| {
        let writing = stores.may_write(BLOCK as u64).unwrap();
        put(stores.clone(), stores.ticket(key), Bytes::from(vec![7; BLOCK]), writing).await;
    };
    let here = async || (fast.lookup(&[key]).await.unwrap(), slow.lookup(&[key]).await.unwrap());
    let writing = stores.may_write(BLOCK as u64).unwrap();
    let task = tokio::spawn(put(stores.clone(), stores.ticket(key), Bytes::from(vec![7; BLOCK]), writing));
    tokio::task::yield_now().await;
    remove(stores.clone(), vec![key]).await;
    fast.gate.add_permits(1);
    task.await.unwrap();
    assert_eq!((here().await, stores.has_written(&key), fast.puts.load(Relaxed)), ((0, 0), false, 1));
    // Written later, it stays.
    fast.gate.add_permits(1000);
    write(&stores).await;
    assert_eq!((here().await, stores.has_written(&key)), ((1, 1), true));
    // A copy to a faster tier is a write, too.
    remove(stores.clone(), vec![key]).await;
    slow.put(key, Bytes::from(vec![7; BLOCK]), None).await.unwrap();
    let fast = Slow::new(0);
    let stores = two(fast.clone(), slow.clone());
    let (reports, inbox) = std::sync::mpsc::channel();
    let load = Fetch { id: TransferId(0), wanted: vec![Wanted { tier: 1, key, bytes: BLOCK }] };
    let load = tokio::spawn(fetch(stores.clone(), load, reports));
    let ended = tokio::task::spawn_blocking(move || {
        inbox.iter().any(|command| matches!(command, Command::Tier(Report::Fetched { ok: true, .. })))
    });
    assert!(ended.await.unwrap());
    remove(stores.clone(), vec![key]).await;
    fast.gate.add_permits(1);
    load.await.unwrap();
    let here = (fast.lookup(&[key]).await.unwrap(), slow.lookup(&[key]).await.unwrap());
    assert_eq!((here, stores.bytes_being_written()), ((0, 0), 0));
}

/// Reads that hang were given up with their loads, so their store never counted as one that fails.
#[tokio::test]
async fn reads_that_hang_are_errors_though_their_load_is_given_up() {
    /// Its reads never end.
    struct Hanging(Ram);
    impl BlockStore for Hanging {
        fn name(&self) -> &str {
            "hanging"
        }
        fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Result<usize, StoreError>> {
            self.0.lookup(keys)
        }
        fn get<'a>(&'a self, _: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
            Box::pin(std::future::pending())
        }
        fn put<'a>(
            &'a self,
            key: BlockKey,
            bytes: Bytes,
            ttl: Option<Duration>,
        ) -> BoxFuture<'a, Result<(), StoreError>> {
            self.0.put(key, bytes, ttl)
        }
        fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
            self.0.remove(key)
        }
        fn usage(&self) -> Usage {
            self.0.usage()
        }
        fn counts(&self) -> Counts {
            self.0.counts()
        }
    }
    let store = TierStore { store: Arc::new(Hanging(Ram::new(0))), bytes_per_s: 1, latency: Duration::ZERO };
    let mut stores = Stores::new(&TierConfig::new(vec![store], Vec::new()));
    stores.longest_read = Duration::from_millis(50);
    let stores = Arc::new(stores);
    let (reports, _inbox) = std::sync::mpsc::channel();
    {
        let wanted = keys(20).into_iter().map(|key| Wanted { tier: 0, key, bytes: BLOCK }).collect();
        let load = Fetch { id: TransferId(0), wanted };
        let load = tokio::spawn(fetch(stores.clone(), load, reports.clone()));
        tokio::task::yield_now().await;
        load.abort();
        assert!(load.await.is_err());
    }
    // The reads that go on end with an error, which a slow machine may see before the load is given up.
    while stores.stats()[0].errors < STRAGGLERS as u64
        || stores.list[0].stragglers.available_permits() < STRAGGLERS
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
