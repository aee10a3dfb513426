//! The tasks that talk to the stores.
use super::{Report, StoreStats, TierConfig};
use crate::serving::thread::Command;
use kvist_scheduler::TransferId;
use kvist_store::{BlockKey, BlockStore, Bytes, StoreError};
use std::collections::{HashSet, VecDeque};
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

/// Keys that are remembered as written, so that a block is not written again each time it is evicted.
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
    keys: HashSet<BlockKey>,
    order: VecDeque<BlockKey>,
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
        };
        self.list.iter().map(one).collect()
    }

    pub fn bytes_being_written(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Whether so many more bytes may wait to be written. Then they count as such.
    pub fn may_write(&self, bytes: u64) -> bool {
        let may = self.bytes.load(Relaxed).saturating_add(bytes) <= self.max_bytes;
        if may {
            self.bytes.fetch_add(bytes, Relaxed);
        }
        may
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Whether this block was written or read a while ago, as far as is remembered. The tier may have dropped it since.
    pub fn has_written(&self, key: &BlockKey) -> bool {
        self.written().keys.contains(key)
    }

    fn remember(&self, key: BlockKey) {
        let mut written = self.written();
        if written.keys.insert(key) {
            written.order.push_back(key);
        }
        if written.order.len() > REMEMBERED
            && let Some(oldest) = written.order.pop_front()
        {
            written.keys.remove(&oldest);
        }
    }

    /// Number of tiers.
    pub fn n(&self) -> usize {
        self.list.len()
    }

    pub fn forget(&self, key: &BlockKey) {
        self.written().keys.remove(key);
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
            self.forget(&wanted.key); // write it again
        }
        found
    }

    async fn put(&self, tiers: std::ops::Range<usize>, key: BlockKey, bytes: &Bytes) {
        for one in self.list.get(tiers).unwrap_or_default() {
            if one.note("write a block", one.store.put(key, bytes.clone(), None).await).is_some() {
                self.remember(key);
            }
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
    let _ = reports.send(Command::Tier(Report::Fetched { id: fetch.id, ok, took }));
    let objects: Option<Vec<Bytes>> = objects.into_iter().filter(|_| ok).collect();
    // Faster tiers get what was read from slower ones.
    for (one, bytes) in fetch.wanted.iter().zip(objects.iter().flatten()) {
        stores.remember(one.key);
        stores.put(0..one.tier, one.key, bytes).await;
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

/// Writes a block to all tiers.
pub async fn put(stores: Arc<Stores>, key: BlockKey, bytes: Bytes) {
    stores.put(0..stores.list.len(), key, &bytes).await;
    stores.bytes.fetch_sub(bytes.len() as u64, Relaxed);
}
