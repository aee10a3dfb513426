//! The tasks that talk to the stores.
use super::events::TierEvents;
use super::generations::{Generations, Untold};
use super::kept::Kept;
use super::pinned::BlockMemory;
use super::recent::Recent;
use super::writes::{Writes, copy_up};
use super::{Report, StoreStats, TierConfig};
use crate::serving::thread::Command;
use kvist_scheduler::TransferId;
use kvist_store::{BlockKey, BlockStore, Bytes, StoreError};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

const LOOK_UP: &str = "look blocks up";

/// A lookup that a store never ends ends here.
const LONGEST_LOOKUP: Duration = Duration::from_secs(60);

/// A read that a store never ends ends here.
pub(super) const LONGEST_READ: Duration = Duration::from_secs(60);

/// So many reads of a store go on after their load was given up: enough that a store which hangs is found to fail
/// ([`Limits::failures`](kvist_store) is 3), and few, because each holds a block when it ends.
const STRAGGLERS: usize = 3;

/// Blocks that are fetched at a time, for one load.
const AT_ONCE: usize = 8;

/// The stores of an engine, and what happened to them.
pub struct Stores {
    list: Vec<OneStore>,
    pub(super) writes: Writes,
    /// The tiers that have a block, a bit for each, so that it is not written again to them each time it is evicted.
    written: Mutex<Recent<u8>>,
    /// Grows whenever the tiers of a cached block may be others.
    changes: AtomicU64,
    pub(super) generations: Generations,
    pub(super) untold: Untold,
    pub(super) events: TierEvents,
    pub(super) kept: Kept,
    pub(super) memory: BlockMemory,
    /// How long a request waits for what the tiers have.
    patience: Duration,
    longest_read: Duration,
}

pub(super) struct OneStore {
    pub store: Arc<dyn BlockStore>,
    errors: AtomicU64,
    fails: AtomicBool,
    /// It had no room for what was written last.
    is_full: AtomicBool,
    stragglers: Arc<Semaphore>,
    /// The smallest object that it has refused as too large.
    too_large_bytes: AtomicU64,
}

/// When the lookups for a prompt end.
#[derive(Clone, Copy, Debug)]
pub struct LookupTimes {
    /// Then a tier that has found some blocks says so, and is not asked for more.
    parts: Instant,
    /// Then a tier that has said nothing is late.
    last: Instant,
}

impl LookupTimes {
    /// The same, but tiers say what they have found when half of the time is over.
    pub fn first_half(self) -> LookupTimes {
        let now = Instant::now();
        LookupTimes { parts: now + self.parts.saturating_duration_since(now) / 2, ..self }
    }

    pub fn are_over(&self) -> bool {
        Instant::now() >= self.parts
    }

    /// Nothing is asked for any more.
    pub fn have_passed(&self) -> bool {
        Instant::now() >= self.last
    }

    pub fn last(&self) -> Instant {
        self.last
    }
}

impl OneStore {
    /// The result of an operation, or that it took too long.
    pub async fn within<T>(
        &self,
        limit: Duration,
        action: &'static str,
        work: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let late = |_| Err(StoreError::TimedOut { store: self.store.name().into(), action, limit_ms });
        tokio::time::timeout(limit, work).await.unwrap_or_else(late)
    }

    /// It had room for what was written last.
    pub(super) fn note_room(&self) {
        self.is_full.store(false, Relaxed);
    }

    /// It takes no object of so many bytes.
    pub(super) fn note_too_large(&self, bytes: u64) {
        self.too_large_bytes.fetch_min(bytes, Relaxed);
    }

    /// The result of an operation; failures are counted, and logged when they begin and when they end.
    pub fn note<T>(&self, what: &str, result: Result<T, StoreError>) -> Option<T> {
        match result {
            Ok(value) => {
                if self.fails.swap(false, Relaxed) {
                    tracing::info!(target: "kvist::engine", "the tier {} works again", self.store.name());
                }
                Some(value)
            }
            // It has answered, so it does not fail.
            Err(error @ StoreError::Full { .. }) => {
                self.errors.fetch_add(1, Relaxed);
                if !self.is_full.swap(true, Relaxed) {
                    tracing::warn!(
                        target: "kvist::engine",
                        "{error}. It is still read; a Redis for blocks should evict: `maxmemory-policy allkeys-lru`"
                    );
                }
                None
            }
            Err(error) => {
                self.errors.fetch_add(1, Relaxed);
                if !self.fails.swap(true, Relaxed) {
                    let name = self.store.name();
                    tracing::warn!(
                        target: "kvist::engine",
                        "the tier {name} fails to {what}: {error}; prompts are computed meanwhile. Look at the store; if it is only \
                         slow, --tier-grace gives it more time"
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
            is_full: AtomicBool::new(false),
            stragglers: Arc::new(Semaphore::new(STRAGGLERS)),
            too_large_bytes: AtomicU64::new(u64::MAX),
        };
        Stores {
            list: config.stores.iter().map(|tier| one(&tier.store)).collect(),
            writes: Writes::new(config.max_bytes_in_flight),
            written: Mutex::default(),
            changes: AtomicU64::new(0),
            generations: Generations::default(),
            untold: Untold::default(),
            events: TierEvents::default(),
            kept: Kept::default(),
            memory: BlockMemory::default(),
            patience: config.grace,
            longest_read: LONGEST_READ,
        }
    }

    /// Blocks get this memory.
    pub fn with_memory(self, memory: BlockMemory) -> Stores {
        Stores { memory, ..self }
    }

    pub fn stats(&self) -> Vec<StoreStats> {
        let one = |(tier, one): (usize, &OneStore)| StoreStats {
            name: one.store.name().to_owned(),
            usage: one.store.usage(),
            errors: one.errors.load(Relaxed),
            unwritten_blocks: self.writes.n_dropped(tier),
            counts: one.store.counts(),
        };
        self.list.iter().enumerate().map(one).collect()
    }

    pub fn bytes_being_written(&self) -> u64 {
        self.writes.bytes()
    }

    fn written(&self) -> std::sync::MutexGuard<'_, Recent<u8>> {
        self.written.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Whether a tier has a block, or will have it soon: as the store says, or as far as is remembered.
    fn has(&self, tier: usize, key: &BlockKey) -> bool {
        let Some(one) = self.one(tier) else { return false };
        let is_remembered = || self.written().get(key).is_some_and(|tiers| tiers & (1 << tier) != 0);
        self.writes.has(key, tier) || one.store.has(key).unwrap_or_else(is_remembered)
    }

    /// Whether an object of so many bytes should be written to a tier. Of one that does not say what it has this is known as far as it is
    /// remembered what was written to it and read there a while ago; it may have dropped it since.
    pub fn lacks(&self, tier: usize, key: &BlockKey, bytes: u64) -> bool {
        let fits = self.one(tier).is_some_and(|one| bytes < one.too_large_bytes.load(Relaxed));
        fits && !self.has(tier, key)
    }

    /// Whether a tier did what it was asked for last.
    pub fn works(&self, tier: usize) -> bool {
        self.one(tier).is_some_and(|one| !one.fails.load(Relaxed))
    }

    /// The tiers that have each of these blocks, a bit for each, as far as is remembered what was written to them and read
    /// there. A tier may have dropped it since.
    pub fn tiers_with<'a>(&self, keys: impl Iterator<Item = &'a BlockKey>) -> Vec<u8> {
        let written = self.written();
        keys.map(|key| written.get(key).copied().unwrap_or_default()).collect()
    }

    /// A number that grows whenever [`tiers_with`](Self::tiers_with) may say something else of the cached blocks.
    pub fn changes(&self) -> u64 {
        self.changes.load(Relaxed)
    }

    pub fn note_change(&self) {
        self.changes.fetch_add(1, Relaxed);
    }

    /// A tier has this block.
    pub(super) fn remember(&self, key: BlockKey, tier: usize) {
        self.writes.note_written(&key, tier);
        let mut written = self.written();
        if let Some(oldest) = written.add(key) {
            (0..self.n()).for_each(|tier| self.events.noticed(&oldest, tier, false));
        }
        *written.entry(key) |= 1 << tier;
        self.events.noticed(&key, tier, true);
        drop(written);
        self.note_change();
    }

    /// Number of tiers.
    pub fn n(&self) -> usize {
        self.list.len()
    }

    pub(super) fn one(&self, tier: usize) -> Option<&OneStore> {
        self.list.get(tier)
    }

    /// Does something with every tier.
    pub(super) fn each(&self, act: impl FnMut(&OneStore)) {
        self.list.iter().for_each(act);
    }

    /// No tier has this block.
    pub fn forget(&self, key: &BlockKey) {
        self.forget_in(key, 0..self.n());
    }

    fn forget_in(&self, key: &BlockKey, tiers: impl IntoIterator<Item = usize>) {
        if let Some(has) = self.written().get_mut(key) {
            for tier in tiers {
                *has &= !(1 << tier);
                self.events.noticed(key, tier, false);
            }
        }
        self.note_change();
    }

    /// When the lookups for a prompt have to end that begin now, so that its request hears of them before it goes on without.
    pub fn lookup_times(&self) -> LookupTimes {
        let now = Instant::now();
        LookupTimes { parts: now + self.patience * 8 / 10, last: now + self.patience * 9 / 10 }
    }

    /// How many of the keys, from the first on, a tier has, as far as it says in time. `None` if it says nothing.
    pub async fn lookup(&self, tier: usize, keys: &[BlockKey], times: LookupTimes) -> Option<usize> {
        let one = self.list.get(tier)?;
        // Not asked: an earlier tier took all of the time, which says nothing about this one.
        if times.have_passed() {
            return None;
        }
        let (store, wanted) = (one.store.clone(), keys.to_vec());
        let within = times.parts.saturating_duration_since(Instant::now());
        // Goes on when this waits no longer: a store that is asked less often while it is down learns so that it is.
        let lookup = async move { store.lookup(&wanted, within).await };
        let lookup = tokio::spawn(tokio::time::timeout(LONGEST_LOOKUP, lookup));
        match tokio::time::timeout_at(times.last, lookup).await {
            // The store was not asked, which says nothing about it.
            Ok(Ok(Ok(Err(StoreError::Busy { .. })))) => None,
            Ok(Ok(Ok(found))) => one.note(LOOK_UP, found).map(|found| found.min(keys.len())),
            // It was given up, or has panicked.
            Ok(_) => None,
            Err(_) => {
                self.note_late(one, LOOK_UP);
                None
            }
        }
    }

    /// Counts that a tier did not answer in time.
    pub(super) fn note_late(&self, one: &OneStore, action: &'static str) {
        let limit_ms = u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX);
        let late = StoreError::TimedOut { store: one.store.name().into(), action, limit_ms };
        one.note::<()>(action, Err(late));
    }

    pub(super) async fn get(self: &Arc<Self>, wanted: Wanted) -> Option<Bytes> {
        let stragglers = self.list.get(wanted.tier)?.stragglers.clone();
        let mut reading = Reading { read: tokio::spawn(read(self.clone(), wanted)), stragglers };
        let found = (&mut reading.read).await.ok().flatten();
        let found = found.filter(|bytes| bytes.len() == wanted.bytes);
        if found.is_none() {
            self.forget_in(&wanted.key, [wanted.tier]); // write it again
        }
        found
    }
}

/// Reads a block, also after its load was given up.
async fn read(stores: Arc<Stores>, wanted: Wanted) -> Option<Bytes> {
    const READ: &str = "read a block";
    let one = stores.list.get(wanted.tier)?;
    let found = one.within(stores.longest_read, READ, one.store.get(&wanted.key)).await;
    one.note(READ, found).flatten()
}

/// A read that is waited for. When this is dropped before it has ended, the read stops, but for a few of each store: otherwise a store
/// whose reads hang would never be found to fail, because each is given up before its time limit.
struct Reading {
    read: JoinHandle<Option<Bytes>>,
    stragglers: Arc<Semaphore>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if self.read.is_finished() {
            return;
        }
        match (self.stragglers.clone().try_acquire_owned(), Handle::try_current()) {
            (Ok(straggler), Ok(runtime)) => {
                let read = std::mem::replace(&mut self.read, runtime.spawn(async { None }));
                runtime.spawn(async move {
                    let _ = read.await;
                    drop(straggler);
                });
            }
            _ => self.read.abort(),
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

/// Reports the bytes of all objects as they arrive, up to the first that cannot be read and the few that were asked for with it.
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
    let of_each = fetch.wanted.iter().copied().zip(objects.drain(..).filter(|_| ok));
    let read: Vec<(Wanted, Bytes)> = of_each.filter_map(|(one, bytes)| Some((one, bytes?))).collect();
    read.iter().for_each(|(one, _)| stores.remember(one.key, one.tier));
    let report = || drop(reports.send(Command::Tier(Report::Fetched { id: fetch.id, took })));
    copy_up(stores, read.into_iter(), report).await;
}

/// Removes blocks from all tiers. One that fails keeps them.
pub async fn remove(stores: Arc<Stores>, keys: Vec<BlockKey>) {
    for key in keys {
        stores.forget(&key);
        for one in &stores.list {
            one.note("remove a block", one.store.remove(&key).await);
        }
    }
}

#[cfg(test)]
mod tests;
