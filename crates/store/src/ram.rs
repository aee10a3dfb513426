//! Blocks in this process's memory, bounded; the least recently used go first, and those that are kept last.
//!
//! A lookup is the use of what it finds. Reading is not: the blocks of a text are read from its beginning on, and its end, which is of no
//! use alone, would stay longest.
use crate::{BlockKey, BoxFuture, Check, Frame, FrameStore, Framed, Keep, Rank, StoreError, Usage, Watcher};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// A store in RAM.
///
/// ```
/// # pollster::block_on(async {
/// use kvist_store::{BlockStore, KeyChain, Ram};
/// let store = Ram::new(64 << 20);
/// let key = KeyChain::root(b"model", "").next(&[1, 2, 3, 4]);
/// store.put(key, "K and V".into(), None).await?;
/// assert_eq!(store.get(&key).await?.as_deref(), Some(&b"K and V"[..]));
/// # Ok::<(), kvist_store::StoreError>(()) }).unwrap();
/// ```
pub type Ram = Framed<RamFrames>;

impl Ram {
    /// What a block takes besides its bytes, at most.
    pub const ENTRY_BYTES: u64 = ENTRY_BYTES;

    /// Holds at most `capacity_bytes`, of blocks with their frames and what finding them takes.
    pub fn new(capacity_bytes: u64) -> Self {
        Framed::over(RamFrames { capacity_bytes, blocks: Mutex::default() })
    }
}

/// The frames of [`Ram`].
pub struct RamFrames {
    capacity_bytes: u64,
    blocks: Mutex<Blocks>,
}

/// Bytes that an entry takes besides its frame: in the map, in the order, and in the allocations of the frame. A
/// bound, which a test compares with what is allocated.
const ENTRY_BYTES: u64 = 512;

#[derive(Default)]
struct Blocks {
    entries: HashMap<BlockKey, Entry>,
    /// Keys in the order in which they go: those that are not kept, then those of smaller ranks; of equal ones, what was used
    /// longest ago.
    order: BTreeMap<Place, BlockKey>,
    /// Kept ones by the time when they are so no longer.
    ends: BTreeSet<(SystemTime, BlockKey)>,
    uses: u64,
    bytes: u64,
    /// Of them, those of kept ones.
    kept_bytes: u64,
    evicted: u64,
    watcher: Option<Watcher>,
}

struct Entry {
    frame: Frame,
    used: u64,
    keep: Option<Keep<SystemTime>>,
}

/// What an entry is kept for, and its last use.
type Place = (Option<Rank>, u64);

/// The first of those that are kept.
const FIRST_KEPT: Place = (Some(Rank { pin: false, priority: 0 }), 0);

impl Entry {
    fn bytes(&self) -> u64 {
        entry_bytes(&self.frame)
    }

    fn place(&self) -> Place {
        (self.keep.map(|keep| keep.rank), self.used)
    }
}

fn entry_bytes(frame: &Frame) -> u64 {
    frame.len() as u64 + ENTRY_BYTES
}

impl Blocks {
    fn take(&mut self, key: &BlockKey) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.order.remove(&entry.place());
        self.bytes -= entry.bytes();
        if let Some(keep) = entry.keep {
            self.kept_bytes -= entry.bytes();
            keep.until.map(|until| self.ends.remove(&(until, *key)));
        }
        Some(entry)
    }

    fn insert(&mut self, key: BlockKey, entry: Entry) {
        self.bytes += entry.bytes();
        self.order.insert(entry.place(), key);
        if let Some(keep) = entry.keep {
            self.kept_bytes += entry.bytes();
            keep.until.map(|until| self.ends.insert((until, key)));
        }
        self.entries.insert(key, entry);
    }

    /// This block was used last.
    fn note_use(&mut self, key: &BlockKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            self.order.remove(&entry.place());
            self.uses += 1;
            entry.used = self.uses;
            self.order.insert(entry.place(), *key);
        }
    }

    /// Keeps a block so, in place of what it was kept for.
    fn keep(&mut self, key: &BlockKey, keep: Option<Keep<SystemTime>>) {
        if let Some(entry) = self.take(key) {
            self.insert(*key, Entry { keep, ..entry });
        }
    }

    fn tell(&self, key: &BlockKey, is_here: bool) {
        if let Some(watcher) = &self.watcher {
            watcher(key, is_here);
        }
    }

    /// Releases what is kept beyond so many bytes: of the smallest rank what was used longest ago.
    fn keep_no_more_than(&mut self, bytes: u64) {
        while self.kept_bytes > bytes {
            let Some((_, &next)) = self.order.range(FIRST_KEPT..).next() else { return };
            self.keep(&next, None);
        }
    }

    fn evict_down_to(&mut self, bytes: u64) {
        while self.bytes > bytes {
            let Some(next) = self.order.first_key_value().map(|(_, key)| *key) else { return };
            self.take(&next);
            self.evicted += 1;
            self.tell(&next, false);
        }
    }
}

impl RamFrames {
    /// No method leaves the blocks half changed, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn most_kept_bytes(&self) -> u64 {
        self.capacity_bytes / 2
    }

    fn store(&self, key: BlockKey, frame: Frame) -> Result<(), StoreError> {
        let bytes = entry_bytes(&frame);
        if bytes > self.capacity_bytes {
            let (store, capacity_bytes) = (self.name().to_owned(), self.capacity_bytes);
            return Err(StoreError::TooLarge { store, bytes, capacity_bytes });
        }
        let mut blocks = self.lock();
        let keep = blocks.take(&key).and_then(|entry| entry.keep);
        blocks.evict_down_to(self.capacity_bytes - bytes);
        blocks.uses += 1;
        let used = blocks.uses;
        blocks.insert(key, Entry { frame, used, keep });
        blocks.keep_no_more_than(self.most_kept_bytes());
        blocks.tell(&key, true);
        Ok(())
    }
}

impl FrameStore for RamFrames {
    fn name(&self) -> &str {
        "ram"
    }

    fn check(&self) -> Check {
        Check::Xxh3
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        _within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        let mut blocks = self.lock();
        let here = keys.iter().take_while(|key| blocks.entries.contains_key(key)).count();
        // A text is of no use without its beginning, which is used last therefore, and goes last.
        keys[..here].iter().rev().for_each(|key| blocks.note_use(key));
        Box::pin(std::future::ready(Ok(here)))
    }

    fn has(&self, key: &BlockKey) -> Option<bool> {
        Some(self.lock().entries.contains_key(key))
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        let frame = self.lock().entries.get(key).map(|entry| entry.frame.clone());
        Box::pin(std::future::ready(Ok(frame)))
    }

    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        _ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(std::future::ready(self.store(key, frame)))
    }

    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        let mut blocks = self.lock();
        if blocks.take(key).is_some() {
            blocks.tell(key, false);
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn keep(&self, keys: &[BlockKey], rank: Rank, until: Option<SystemTime>) -> bool {
        let (mut blocks, keep) = (self.lock(), Keep { rank, until });
        for key in keys.iter().rev() {
            blocks.note_use(key);
            let before = blocks.entries.get(key).and_then(|entry| entry.keep);
            if before.is_none_or(|before| keep > before) {
                blocks.keep(key, Some(keep));
            }
        }
        blocks.keep_no_more_than(self.most_kept_bytes());
        true
    }

    fn release(&self, keys: &[BlockKey]) {
        let mut blocks = self.lock();
        keys.iter().for_each(|key| blocks.keep(key, None));
    }

    fn release_until(&self, now: SystemTime) {
        let mut blocks = self.lock();
        while let Some((_, key)) = blocks.ends.first().copied().filter(|(until, _)| *until <= now) {
            blocks.keep(&key, None);
        }
    }

    fn watch(&self, watcher: Watcher) -> bool {
        let mut blocks = self.lock();
        blocks.entries.keys().for_each(|key| watcher(key, true));
        blocks.watcher = Some(watcher);
        true
    }

    fn usage(&self) -> Usage {
        let blocks = self.lock();
        Usage {
            bytes: Some(blocks.bytes),
            capacity_bytes: Some(self.capacity_bytes),
            entries: Some(blocks.entries.len() as u64),
        }
    }

    fn evicted(&self) -> u64 {
        self.lock().evicted
    }
}
