//! The tasks that talk to the stores.
use super::{Report, StoreStats, TierConfig};
use crate::serving::thread::Command;
use kvist_scheduler::TransferId;
use kvist_store::{BlockKey, BlockStore, Bytes, StoreError};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const LOOK_UP: &str = "look blocks up";

/// A lookup that a store never ends ends here.
const LONGEST_LOOKUP: Duration = Duration::from_secs(60);

/// Blocks that are fetched at a time, for one load.
const AT_ONCE: usize = 8;

/// Keys that are remembered as written, so that a block is not written again to a tier each time it is evicted.
const REMEMBERED: usize = 1 << 16;

/// The stores of an engine, and what happened to them.
pub struct Stores {
    list: Vec<OneStore>,
    max_bytes: u64,
    bytes: AtomicU64,
    written: Mutex<Written>,
    /// A lookup that takes longer than the scheduler waits for is of no use.
    patience: Duration,
}

struct OneStore {
    store: Arc<dyn BlockStore>,
    errors: AtomicU64,
    fails: AtomicBool,
}

#[derive(Default)]
struct Written {
    /// The tiers that have a block, a bit for each.
    tiers: HashMap<BlockKey, u8>,
    order: VecDeque<BlockKey>,
}

/// Bytes that wait to be written, until this is dropped.
pub struct Writing {
    stores: Arc<Stores>,
    bytes: u64,
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.stores.bytes.fetch_sub(self.bytes, Relaxed);
    }
}

impl OneStore {
    /// The result of an operation; failures are counted, and logged when they begin and when they end.
    fn note<T>(&self, what: &str, result: Result<T, StoreError>) -> Option<T> {
        match result {
            Ok(value) => {
                if self.fails.swap(false, Relaxed) {
                    tracing::info!(target: "kvist::engine", "the tier {} works again", self.store.name());
                }
                Some(value)
            }
            Err(error) => {
                self.errors.fetch_add(1, Relaxed);
                if !self.fails.swap(true, Relaxed) {
                    let name = self.store.name();
                    tracing::warn!(
                        target: "kvist::engine",
                        "the tier {name} fails to {what}: {error}; prompts are computed meanwhile"
                    );
                }
                None
            }
        }
    }
}

impl Stores {
    pub fn new(config: &TierConfig) -> Stores {
        let one = |store: &Arc<dyn BlockStore>| OneStore {
            store: store.clone(),
            errors: AtomicU64::new(0),
            fails: AtomicBool::new(false),
        };
        Stores {
            list: config.stores.iter().map(|tier| one(&tier.store)).collect(),
            max_bytes: config.max_bytes_in_flight,
            bytes: AtomicU64::new(0),
            written: Mutex::default(),
            patience: config.grace,
        }
    }

    pub fn stats(&self) -> Vec<StoreStats> {
        let one = |one: &OneStore| StoreStats {
            name: one.store.name().to_owned(),
            usage: one.store.usage(),
            errors: one.errors.load(Relaxed),
            counts: one.store.counts(),
        };
        self.list.iter().map(one).collect()
    }

    pub fn bytes_being_written(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Lets so many more bytes wait to be written, if they do not exceed the bound.
    pub fn may_write(self: &Arc<Self>, bytes: u64) -> Option<Writing> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= self.max_bytes);
        let may = self.bytes.fetch_update(Relaxed, Relaxed, more).is_ok();
        may.then(|| Writing { stores: self.clone(), bytes })
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    fn has(&self, key: &BlockKey, tier: usize) -> bool {
        self.written().tiers.get(key).is_some_and(|tiers| tiers & (1 << tier) != 0)
    }

    /// Whether this block was written to every tier, or read there, a while ago, as far as is remembered. A tier may have dropped
    /// it since.
    pub fn has_written(&self, key: &BlockKey) -> bool {
        (0..self.n()).all(|tier| self.has(key, tier))
    }

    fn remember(&self, key: BlockKey, tier: usize) {
        let mut written = self.written();
        let tiers = written.tiers.entry(key).or_default();
        let is_new = *tiers == 0;
        *tiers |= 1 << tier;
        if is_new {
            written.order.push_back(key);
        }
        if written.order.len() > REMEMBERED
            && let Some(oldest) = written.order.pop_front()
        {
            written.tiers.remove(&oldest);
        }
    }

    /// Number of tiers.
    pub fn n(&self) -> usize {
        self.list.len()
    }

    /// No tier has this block.
    pub fn forget(&self, key: &BlockKey) {
        self.written().tiers.remove(key);
    }

    fn forget_in(&self, key: &BlockKey, tier: usize) {
        let mut written = self.written();
        if let Some(tiers) = written.tiers.get_mut(key) {
            *tiers &= !(1 << tier);
            if *tiers == 0 {
                written.tiers.remove(key);
            }
        }
    }

    /// How many of the keys, from the first on, a tier has.
    pub async fn lookup(&self, tier: usize, keys: &[BlockKey]) -> usize {
        let Some(one) = self.list.get(tier) else { return 0 };
        let (store, wanted) = (one.store.clone(), keys.to_vec());
        // Goes on when this waits no longer: a store that is asked less often while it is down learns so that it is.
        let lookup =
            tokio::spawn(tokio::time::timeout(LONGEST_LOOKUP, async move { store.lookup(&wanted).await }));
        match tokio::time::timeout(self.patience, lookup).await {
            Ok(Ok(Ok(found))) => one.note(LOOK_UP, found).unwrap_or(0).min(keys.len()),
            // It was given up, or has panicked.
            Ok(_) => 0,
            Err(_) => {
                let limit_ms = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
                let late = StoreError::TimedOut { store: one.store.name().into(), action: LOOK_UP, limit_ms };
                one.note::<()>(LOOK_UP, Err(late));
                0
            }
        }
    }

    async fn get(&self, wanted: Wanted) -> Option<Bytes> {
        let one = self.list.get(wanted.tier)?;
        let found = one.note("read a block", one.store.get(&wanted.key).await).flatten();
        let found = found.filter(|bytes| bytes.len() == wanted.bytes);
        if found.is_none() {
            self.forget_in(&wanted.key, wanted.tier); // write it again
        }
        found
    }

    async fn put(&self, tier: usize, key: BlockKey, bytes: &Bytes) {
        let Some(one) = self.list.get(tier) else { return };
        let put = one.store.put(key, bytes.clone(), None).await;
        // Another attempt does not make it smaller.
        let never_fits = matches!(put, Err(StoreError::TooLarge { .. }));
        if one.note("write a block", put).is_some() || never_fits {
            self.remember(key, tier);
        }
    }
}

/// An object to fetch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// The tier that has it.
    pub tier: usize,
    pub key: BlockKey,
    pub bytes: usize,
}

/// What a load needs.
pub struct Fetch {
    pub id: TransferId,
    pub wanted: Vec<Wanted>,
}

/// What is reported at a time while more is read.
const ARRIVED_BYTES: usize = 4 << 20;

/// Reports the bytes of all objects as they arrive, and whether all have.
pub async fn fetch(stores: Arc<Stores>, fetch: Fetch, reports: Sender<Command>) {
    let started = Instant::now();
    let mut objects: Vec<Option<Bytes>> = vec![None; fetch.wanted.len()];
    let mut tasks = JoinSet::new();
    let mut wanted = fetch.wanted.iter().copied().enumerate();
    let mut ok = true;
    let (mut arrived, mut arrived_bytes) = (Vec::new(), 0);
    loop {
        while ok && tasks.len() < AT_ONCE {
            let Some((i, one)) = wanted.next() else { break };
            let stores = stores.clone();
            tasks.spawn(async move { (i, stores.get(one).await) });
        }
        let next = tasks.join_next().await;
        let is_last = next.is_none();
        match next {
            Some(Ok((i, Some(bytes)))) => {
                arrived_bytes += bytes.len();
                arrived.push((i, bytes.clone()));
                objects[i] = Some(bytes);
            }
            Some(_) => ok = false,
            None => {}
        }
        if arrived_bytes >= ARRIVED_BYTES || is_last {
            let objects = std::mem::take(&mut arrived);
            arrived_bytes = 0;
            let _ = reports.send(Command::Tier(Report::Arrived { id: fetch.id, objects }));
        }
        if is_last {
            break;
        }
    }
    let took = started.elapsed();
    // Faster tiers get what was read from slower ones. The bytes count as those of the load until its end is reported, and then as
    // bytes to write: what has no room there is not kept.
    let mut copies = Vec::new();
    for (one, bytes) in fetch.wanted.iter().zip(objects.drain(..).filter(|_| ok)) {
        stores.remember(one.key, one.tier);
        let Some(bytes) = bytes.filter(|_| one.tier > 0) else { continue };
        copies.extend(stores.may_write(bytes.len() as u64).map(|writing| (*one, bytes, writing)));
    }
    let _ = reports.send(Command::Tier(Report::Fetched { id: fetch.id, ok, took }));
    for (one, bytes, _writing) in copies {
        for tier in 0..one.tier {
            stores.put(tier, one.key, &bytes).await;
        }
    }
}

/// Removes blocks from all tiers.
pub async fn remove(stores: Arc<Stores>, keys: Vec<BlockKey>) {
    for key in keys {
        stores.forget(&key);
        for one in &stores.list {
            one.note("remove a block", one.store.remove(&key).await);
        }
    }
}

/// Writes a block to the tiers that do not have it.
pub async fn put(stores: Arc<Stores>, key: BlockKey, bytes: Bytes, _writing: Writing) {
    for tier in (0..stores.n()).filter(|&tier| !stores.has(&key, tier)) {
        stores.put(tier, key, &bytes).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serving::tiers::TierStore;
    use kvist_store::{BoxFuture, Counts, KeyChain, Ram, Usage};
    use tokio::sync::Semaphore;

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
        let wanted: Vec<Wanted> =
            keys(10).into_iter().map(|key| Wanted { tier: 1, key, bytes: BLOCK }).collect();
        for one in &wanted {
            slow.put(one.key, Bytes::from(vec![7; BLOCK]), None).await.unwrap();
        }
        let (reports, inbox) = std::sync::mpsc::channel();
        let load = Fetch { id: TransferId(0), wanted };
        let load = tokio::spawn(fetch(stores.clone(), load, reports));
        let report = tokio::task::spawn_blocking(move || {
            let ended =
                |command: &Command| matches!(command, Command::Tier(Report::Fetched { ok: true, .. }));
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
        let task = tokio::spawn(put(stores.clone(), keys(1)[0], Bytes::from(vec![7; 300]), writing));
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
            put(stores.clone(), key, Bytes::from(vec![7; BLOCK]), writing).await;
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
        stores.put(0, large, &Bytes::from(vec![7; 2 << 20])).await;
        assert!(stores.has(&large, 0) && !stores.has_written(&large));
        stores.forget(&large);
        assert!(!stores.has(&large, 0));
    }
}
