//! A store in memory that does what a test tells it.
use super::task::Stores;
use super::{TierConfig, TierStore};
use kvist_store::{BlockKey, BlockStore, BoxFuture, Bytes, KeyChain, Ram, StoreError, StoreOver};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Semaphore;

pub struct TestStore {
    pub ram: Ram,
    /// Every write takes a permit.
    pub writes: Semaphore,
    pub is_down: AtomicBool,
    pub reads_hang: AtomicBool,
    pub lookups_hang: AtomicBool,
    pub says_what_it_has: AtomicBool,
    pub puts: AtomicU64,
}

impl TestStore {
    pub fn new(writes: usize) -> Arc<TestStore> {
        Arc::new(TestStore {
            ram: Ram::new(1 << 20),
            writes: Semaphore::new(writes),
            is_down: AtomicBool::new(false),
            reads_hang: AtomicBool::new(false),
            lookups_hang: AtomicBool::new(false),
            says_what_it_has: AtomicBool::new(false),
            puts: AtomicU64::new(0),
        })
    }

    /// Whether a block is there, whatever the store is told.
    pub fn has(&self, key: BlockKey) -> bool {
        pollster::block_on(self.ram.lookup(&[key], Duration::MAX)).is_ok_and(|n| n == 1)
    }

    async fn answer(&self, hangs: &AtomicBool) -> Result<(), StoreError> {
        if hangs.load(Relaxed) {
            std::future::pending::<()>().await;
        }
        match self.is_down.load(Relaxed) {
            false => Ok(()),
            true => Err(StoreError::Failed {
                store: "test".into(),
                action: "work",
                problem: "it is told to fail".into(),
            }),
        }
    }
}

impl StoreOver for TestStore {
    fn below(&self) -> &dyn BlockStore {
        &self.ram
    }
    fn name(&self) -> &str {
        "test"
    }
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(async move {
            self.answer(&self.lookups_hang).await?;
            self.ram.lookup(keys, within).await
        })
    }
    fn has(&self, key: &BlockKey) -> Option<bool> {
        self.says_what_it_has.load(Relaxed).then(|| TestStore::has(self, *key))
    }
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        Box::pin(async move {
            self.answer(&self.reads_hang).await?;
            self.ram.get(key).await
        })
    }
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.writes.acquire().await.expect("it is never closed").forget();
            self.puts.fetch_add(1, Relaxed);
            self.answer(&AtomicBool::new(false)).await?;
            self.ram.put(key, bytes, ttl).await
        })
    }
    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.answer(&AtomicBool::new(false)).await?;
            self.ram.remove(key).await
        })
    }
}

/// Tiers, fastest first, and 350 bytes that may be on their way to them.
pub fn config<const N: usize>(tiers: [Arc<TestStore>; N]) -> TierConfig {
    let tier =
        |store| TierStore { store: store as Arc<dyn BlockStore>, bytes_per_s: 1, latency: Duration::ZERO };
    let tiers: Vec<TierStore> = tiers.map(tier).into();
    TierConfig { max_bytes_in_flight: 350, ..TierConfig::new(tiers, Vec::new()) }
}

pub fn stores<const N: usize>(tiers: [Arc<TestStore>; N]) -> Arc<Stores> {
    Arc::new(Stores::new(&config(tiers)))
}

/// Of a text with a token per block.
pub fn keys(n: u32) -> Vec<BlockKey> {
    KeyChain::root(b"a model", "").keys(&(0..n).collect::<Vec<_>>(), 1)
}
