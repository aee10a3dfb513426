//! Blocks in this process's memory, bounded; the least recently used go first.
use crate::{BlockKey, BoxFuture, Check, Frame, FrameStore, Framed, StoreError, Usage, Watcher};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

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
    /// Keys by their last use, oldest first.
    by_use: BTreeMap<u64, BlockKey>,
    uses: u64,
    bytes: u64,
    evicted: u64,
    watcher: Option<Watcher>,
}

struct Entry {
    frame: Frame,
    used: u64,
}

fn entry_bytes(frame: &Frame) -> u64 {
    frame.len() as u64 + ENTRY_BYTES
}

impl Blocks {
    fn take(&mut self, key: &BlockKey) -> Option<Frame> {
        let entry = self.entries.remove(key)?;
        self.by_use.remove(&entry.used);
        self.bytes -= entry_bytes(&entry.frame);
        Some(entry.frame)
    }

    fn insert(&mut self, key: BlockKey, frame: Frame) {
        self.uses += 1;
        self.bytes += entry_bytes(&frame);
        self.by_use.insert(self.uses, key);
        self.entries.insert(key, Entry { frame, used: self.uses });
    }

    fn use_frame(&mut self, key: &BlockKey) -> Option<Frame> {
        let entry = self.entries.get_mut(key)?;
        self.by_use.remove(&entry.used);
        self.uses += 1;
        entry.used = self.uses;
        self.by_use.insert(self.uses, *key);
        Some(entry.frame.clone())
    }

    fn tell(&self, key: &BlockKey, is_here: bool) {
        if let Some(watcher) = &self.watcher {
            watcher(key, is_here);
        }
    }

    fn evict_down_to(&mut self, bytes: u64) {
        while self.bytes > bytes {
            let Some((_, oldest)) = self.by_use.first_key_value() else { return };
            let oldest = *oldest;
            self.take(&oldest);
            self.evicted += 1;
            self.tell(&oldest, false);
        }
    }
}

impl RamFrames {
    /// No method leaves the blocks half changed, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self, key: BlockKey, frame: Frame) -> Result<(), StoreError> {
        let bytes = entry_bytes(&frame);
        if bytes > self.capacity_bytes {
            let (store, capacity_bytes) = (self.name().to_owned(), self.capacity_bytes);
            return Err(StoreError::TooLarge { store, bytes, capacity_bytes });
        }
        let mut blocks = self.lock();
        blocks.take(&key);
        blocks.evict_down_to(self.capacity_bytes - bytes);
        blocks.insert(key, frame);
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
        let blocks = self.lock();
        let here = keys.iter().take_while(|key| blocks.entries.contains_key(key)).count();
        Box::pin(std::future::ready(Ok(here)))
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(std::future::ready(Ok(self.lock().use_frame(key))))
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
