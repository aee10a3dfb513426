//! Blocks over frames: the one place that frames, checks, counts and removes what is damaged.
use crate::frame::Opened;
use crate::{BlockKey, BlockStore, BoxFuture, Check, Damage, Frame, Rank, StoreError, Usage, Watcher};
use bytes::Bytes;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Where frames are kept: what a new kind of store implements. It neither reads nor checks them.
pub trait FrameStore: Send + Sync {
    fn name(&self) -> &str;

    /// How its frames are checked.
    fn check(&self) -> Check {
        Check::default()
    }

    /// Whether other processes write here too.
    fn is_shared(&self) -> bool {
        false
    }

    /// How many frames, from the first key on, are here, as [`BlockStore::lookup`] says.
    ///
    /// # Errors
    /// The store cannot be reached, or failed. So for every method.
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>>;

    /// Whether a frame is here, as [`BlockStore::has`] says.
    fn has(&self, key: &BlockKey) -> Option<bool> {
        let _ = key;
        None
    }

    /// The stored bytes, as they are.
    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>>;

    /// Waits, for as long as it takes, until a frame of so many bytes can be written at once, and holds its place while it is.
    /// `Guarded` calls it before the time limit of a write begins.
    fn turn<'a>(&'a self, bytes: u64) -> BoxFuture<'a, Turn> {
        let _ = bytes;
        Box::pin(std::future::ready(Turn(None)))
    }

    /// Stores a frame, in place of what was there. `ttl` is a hint for when to delete it.
    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Keeps frames that are here before others until then, or for ever, as [`BlockStore::keep`] says.
    fn keep(&self, keys: &[BlockKey], rank: Rank, until: Option<SystemTime>) -> bool {
        let _ = (keys, rank, until);
        false
    }

    /// Keeps these frames no longer than any others.
    fn release(&self, keys: &[BlockKey]) {
        let _ = keys;
    }

    /// Releases what was kept until now. Called before a frame is written or kept.
    fn release_until(&self, now: SystemTime) {
        let _ = now;
    }

    /// Tells of every frame that comes or goes, as [`BlockStore::watch`] says.
    fn watch(&self, watcher: Watcher) -> bool {
        drop(watcher);
        false
    }

    fn usage(&self) -> Usage;

    /// How many frames were evicted to make room, where known.
    fn evicted(&self) -> u64 {
        0
    }

    /// How many frames it found damaged itself, which it reports as missing.
    fn damaged(&self) -> u64 {
        0
    }
}

/// A place among the writes of a store, until it is dropped.
pub struct Turn(pub Option<Box<dyn Send>>);

/// A store of blocks over a store of frames.
pub struct Framed<S> {
    frames: S,
    clock: fn() -> SystemTime,
    counters: Counters,
}

/// What happened in a store since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub hits: u64,
    pub hit_bytes: u64,
    /// Including expired and damaged blocks.
    pub misses: u64,
    pub expired: u64,
    /// Blocks that failed their check and were removed. Never returned.
    pub damaged: u64,
    pub puts: u64,
    pub put_bytes: u64,
    /// Where the store knows: a server does not say.
    pub evicted: u64,
    /// Calls that returned an error.
    pub errors: u64,
}

#[derive(Default)]
struct Counters {
    hits: AtomicU64,
    hit_bytes: AtomicU64,
    misses: AtomicU64,
    expired: AtomicU64,
    damaged: AtomicU64,
    puts: AtomicU64,
    put_bytes: AtomicU64,
    errors: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl<S: FrameStore> Framed<S> {
    pub fn over(frames: S) -> Self {
        Framed { frames, clock: SystemTime::now, counters: Counters::default() }
    }

    /// Reads the time from `clock`, which decides what has expired.
    pub fn with_clock(self, clock: fn() -> SystemTime) -> Self {
        Framed { clock, ..self }
    }

    /// The store of frames below.
    pub fn frames(&self) -> &S {
        &self.frames
    }

    pub fn into_frames(self) -> S {
        self.frames
    }

    fn noted<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if result.is_err() {
            add(&self.counters.errors, 1);
        }
        result
    }

    async fn get(&self, key: &BlockKey) -> Result<Option<Bytes>, StoreError> {
        let Some(frame) = self.noted(self.frames.read(key).await)? else {
            add(&self.counters.misses, 1);
            return Ok(None);
        };
        match frame.open(key, (self.clock)(), self.frames.check()) {
            Ok(Opened::Block(bytes)) => {
                add(&self.counters.hits, 1);
                add(&self.counters.hit_bytes, bytes.len() as u64);
                return Ok(Some(bytes));
            }
            Ok(Opened::Expired) => {
                add(&self.counters.expired, 1);
                if self.frames.is_shared() {
                    // By now another process may have put a new frame under this key, and a removal would take that one.
                    add(&self.counters.misses, 1);
                    return Ok(None);
                }
            }
            // It is removed from a shared store as well: as long as it is found there, no server puts the block again.
            Err(Damage::Length | Damage::Magic | Damage::Version | Damage::Key | Damage::Hash) => {
                add(&self.counters.damaged, 1);
            }
        }
        add(&self.counters.misses, 1);
        // If the removal fails too, the next `get` finds the same bytes, and refuses them again.
        let _ = self.noted(self.frames.delete(key).await);
        Ok(None)
    }

    async fn put(&self, key: BlockKey, bytes: Bytes, ttl: Option<Duration>) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        let now = (self.clock)();
        self.frames.release_until(now);
        // A time beyond the calendar is never.
        let expires = ttl.and_then(|ttl| now.checked_add(ttl));
        let frame = Frame::new(&key, bytes, expires, self.frames.check());
        self.noted(self.frames.write(key, frame, ttl).await)?;
        add(&self.counters.puts, 1);
        add(&self.counters.put_bytes, length);
        Ok(())
    }
}

impl<S: FrameStore> BlockStore for Framed<S> {
    fn name(&self) -> &str {
        self.frames.name()
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(async move { self.noted(self.frames.lookup(keys, within).await) })
    }

    fn has(&self, key: &BlockKey) -> Option<bool> {
        self.frames.has(key)
    }

    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>> {
        Box::pin(self.get(key))
    }

    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.put(key, bytes, ttl))
    }

    fn keep(&self, keys: &[BlockKey], rank: Rank, within: Duration) -> bool {
        let now = (self.clock)();
        self.frames.release_until(now);
        // For ever, if that is beyond the calendar.
        self.frames.keep(keys, rank, now.checked_add(within))
    }

    fn release(&self, keys: &[BlockKey]) {
        self.frames.release(keys);
    }

    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async { self.noted(self.frames.delete(key).await) })
    }

    fn watch(&self, watcher: Watcher) -> bool {
        self.frames.watch(watcher)
    }

    fn usage(&self) -> Usage {
        self.frames.usage()
    }

    fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            hits: read(&self.counters.hits),
            hit_bytes: read(&self.counters.hit_bytes),
            misses: read(&self.counters.misses),
            expired: read(&self.counters.expired),
            damaged: read(&self.counters.damaged) + self.frames.damaged(),
            puts: read(&self.counters.puts),
            put_bytes: read(&self.counters.put_bytes),
            evicted: self.frames.evicted(),
            errors: read(&self.counters.errors),
        }
    }
}
