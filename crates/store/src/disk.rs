//! Blocks on a disk, over [foyer](https://docs.rs/foyer): a log of regions, which are overwritten in turn, the
//! [oldest](age) first.
//!
//! What foyer leaves to its user is here. One process at a time has a directory (a lock). The files take all of
//! their room when the store is opened, so a disk that fills up later harms nothing. `put` returns when the block
//! is written, and says so if it was not: foyer drops blocks while its buffer is full, so puts wait for room. With
//! [another capacity](directory) than before, blocks stay as far as they fit.
//!
//! Blocks of a few bytes, which are notes, have a [file of their own](crate::small), so that they outlive all others.
//!
//! After a crash of the process, whole blocks are found again. After a crash of the machine too, as far as they
//! reached the disk: only notes are synced, because a lost block costs only its computation.
mod age;
mod directory;
mod entry;
mod reads;
mod room;
#[cfg(test)]
mod tests;

use crate::regions::{OVERHEAD_BYTES, PAGE, REGION_BYTES, room_bytes};
use crate::removed::Removed;
use crate::small::Small;
use crate::{
    BlockKey, BoxFuture, Frame, FrameStore, Framed, Guarded, Limits, Regions, StoreError, Turn, Usage,
};
use age::OldestFirst;
use directory::{Layout, Lock, Prepared, prepare};
use entry::{Key, Stored};
use foyer::{
    Age, BlockEngineConfig, Device, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder,
    HybridCachePolicy, Load, PsyncIoEngineConfig, RecoverMode,
};
use reads::{Reading, Reads};
use room::{no_room, remove_regions, reserve};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

const NAME: &str = "disk";

/// Of a block in foyer's index in memory: a hash, an address, and what the table leaves free.
const INDEX_BYTES: u64 = 96;

/// What a disk store needs to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskOptions {
    /// Created if missing. Has to be empty, or of a disk store.
    pub dir: PathBuf,
    /// What the files take, all of it from the start.
    pub capacity_bytes: u64,
    /// No larger block is accepted. Twice this much memory, or 32 MiB if that is more, buffers writes.
    pub largest_block_bytes: u64,
    pub limits: Limits,
}

impl DiskOptions {
    /// Memory that such a store takes: buffers of writes, an index of what is on disk, and notes.
    pub fn memory_bytes(capacity_bytes: u64, block_bytes: u64) -> u64 {
        let block = room_bytes(block_bytes);
        let blocks = capacity_bytes / block;
        let buffers = block.max(REGION_BYTES).saturating_mul(2);
        buffers.saturating_add(blocks.saturating_mul(INDEX_BYTES)).saturating_add(crate::small::MOST_BYTES)
    }

    /// Refuses a capacity that no such store can have. Looks at no file.
    ///
    /// # Errors
    /// It is too small or too large for its blocks.
    pub fn check(&self) -> Result<(), StoreError> {
        Layout::of(self).map(|_| ())
    }
}

/// A store on a disk.
pub type Disk = Framed<Guarded<DiskFrames>>;

impl Disk {
    /// Opens or creates a store. Reads the indexes of all regions. If the files are of another capacity, blocks stay as far as they fit, and
    /// the log says if some do not. Call it on a tokio runtime, where the store then
    /// runs its tasks.
    ///
    /// # Errors
    /// The directory cannot be written to, belongs to another process or contains other files; there is not enough
    /// room; the capacity is less than eight regions.
    pub async fn open(options: DiskOptions) -> Result<Disk, StoreError> {
        let limits = options.limits;
        Ok(Framed::over(Guarded::new(DiskFrames::open(options).await?, limits)))
    }

    /// Waits until everything is written. Later puts fail. Then the directory can be opened again.
    ///
    /// # Errors
    /// foyer failed to close it.
    pub async fn close(self) -> Result<(), StoreError> {
        let frames = self.into_frames().into_inner();
        let closed = frames.cache.close().await;
        closed.map_err(|error| failed("close", &error))
    }
}

/// The frames of [`Disk`].
pub struct DiskFrames {
    cache: HybridCache<Key, Stored>,
    options: DiskOptions,
    /// Pages of foyer's write buffer.
    buffer: Arc<Semaphore>,
    buffer_pages: u32,
    /// The same pages for those that wait until it is their turn.
    turns: Arc<Semaphore>,
    in_order: Mutex<()>,
    reads: Reads,
    /// Blocks that may be on their way to the files.
    writing: Arc<AtomicUsize>,
    /// Where it was opened.
    runtime: Handle,
    removed: Removed,
    small: Arc<Small>,
    /// Blocks that failed foyer's own check.
    damaged: AtomicU64,
    // Last, so that the files are closed before the lock is free.
    _lock: Lock,
}

/// The room of a block in foyer's buffer, and its place among those that are being written.
struct Room {
    _pages: OwnedSemaphorePermit,
    writing: Arc<AtomicUsize>,
}

impl Room {
    fn of(pages: OwnedSemaphorePermit, writing: &Arc<AtomicUsize>) -> Room {
        writing.fetch_add(1, Relaxed);
        Room { _pages: pages, writing: writing.clone() }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.writing.fetch_sub(1, Relaxed);
    }
}

fn failed(action: &'static str, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::Failed { store: NAME.into(), action, problem: error.to_string() }
}

impl DiskFrames {
    async fn open(options: DiskOptions) -> Result<DiskFrames, StoreError> {
        let prepared = prepare(&options)?;
        DiskFrames::open_prepared(options, prepared).await
    }

    async fn open_prepared(options: DiskOptions, prepared: Prepared) -> Result<DiskFrames, StoreError> {
        let Prepared { lock, layout, kept, ages } = prepared;
        let cache = match build(&options.dir, &layout, ages).await {
            Ok(cache) => cache,
            Err(problem) => {
                let advice = format!(
                    "{} needs {} bytes: free some, or give the store less",
                    options.dir.display(),
                    layout.regions * layout.region_bytes
                );
                return Err(StoreError::Open { store: NAME.into(), problem, advice });
            }
        };
        if let Err(error) = reserve(&options.dir, layout.region_bytes) {
            let _ = cache.close().await;
            // The room that the disk has is of more use elsewhere; but what was there before stays.
            let _ = remove_regions(&options.dir, kept);
            return Err(no_room(&options, &error.to_string()));
        }
        let lists = removed(&options.dir, layout.cycle_bytes(), &cache)
            .and_then(|removed| Ok((removed, Small::open(&options.dir)?)));
        let (removed, small) = match lists {
            Ok((removed, small)) => (removed, Arc::new(small)),
            Err(error) => {
                let _ = cache.close().await;
                let problem =
                    format!("cannot read the lists beside the blocks in {}: {error}", options.dir.display());
                let advice = "Give a directory that this user may write to, or an empty one".into();
                return Err(StoreError::Open { store: NAME.into(), problem, advice });
            }
        };
        let buffer_pages = u32::try_from(layout.buffer_bytes / PAGE).unwrap_or(u32::MAX);
        Ok(DiskFrames {
            cache,
            options,
            buffer: Arc::new(Semaphore::new(buffer_pages as usize)),
            buffer_pages,
            turns: Arc::new(Semaphore::new(buffer_pages as usize)),
            in_order: Mutex::new(()),
            reads: Reads::default(),
            writing: Arc::new(AtomicUsize::new(0)),
            runtime: Handle::current(),
            damaged: AtomicU64::new(0),
            removed,
            small,
            _lock: lock,
        })
    }

    /// Of foyer's buffer, for a block.
    fn pages(&self, bytes: u64) -> u32 {
        u32::try_from((bytes + OVERHEAD_BYTES).div_ceil(PAGE)).unwrap_or(u32::MAX).min(self.buffer_pages)
    }

    /// Waits until foyer's buffer has room for a block: what does not fit there is dropped without a word.
    async fn room(&self, bytes: u64) -> Result<Room, StoreError> {
        let pages = self.buffer.clone().acquire_many_owned(self.pages(bytes)).await;
        Ok(Room::of(pages.map_err(|error| failed("write a block", &error))?, &self.writing))
    }

    /// Waits until what was queued is in the files, and then gives its room back: also if nothing waits for this any more.
    fn flush(&self, room: Room) -> JoinHandle<()> {
        let cache = self.cache.clone();
        self.runtime.spawn(async move {
            cache.storage().wait().await;
            drop(room);
        })
    }

    /// foyer numbers entries before it queues them, and what follows a smaller number in a region is lost when the store is
    /// opened again. So one entry at a time is numbered and queued.
    fn enqueue(&self, key: &BlockKey, frame: Frame) {
        let _one = self.in_order();
        self.reads.note_change(key);
        self.cache.storage_writer(Key(*key.as_bytes())).force().insert(Stored(frame));
    }

    /// The same for a block that was read, unless it has been removed or put since.
    fn enqueue_again(&self, reading: &Reading<'_>, frame: Frame) {
        let _one = self.in_order();
        if !self.removed.has(&reading.key) && reading.is_current() {
            self.cache.storage_writer(Key(*reading.key.as_bytes())).force().insert(Stored(frame));
        }
    }

    fn in_order(&self) -> std::sync::MutexGuard<'_, ()> {
        self.in_order.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Whether a region has it.
    fn is_in_regions(&self, key: &BlockKey) -> bool {
        self.cache.storage().may_contains(&Key(*key.as_bytes()))
    }

    fn is_here(&self, key: &BlockKey) -> bool {
        self.is_in_regions(key) || self.small.has(key)
    }

    /// Changes the small blocks: a thread for it waits for the disk.
    async fn change_small(
        &self,
        action: &'static str,
        change: impl FnOnce(&Small) -> io::Result<()> + Send + 'static,
    ) -> Result<(), StoreError> {
        let small = self.small.clone();
        let changed = tokio::task::spawn_blocking(move || change(&small)).await;
        changed.map_err(|error| failed(action, &error))?.map_err(|error| failed(action, &error))
    }

    async fn remove_small(&self, action: &'static str, key: BlockKey) -> Result<(), StoreError> {
        match self.small.has(&key) {
            true => self.change_small(action, move |small| small.remove(&key)).await,
            false => Ok(()),
        }
    }

    async fn delete(&self, key: &BlockKey) -> Result<(), StoreError> {
        self.remove_small("remove a block", *key).await?;
        self.remove(key)
    }

    /// Removes a block from the regions.
    fn remove(&self, key: &BlockKey) -> Result<(), StoreError> {
        let _one = self.in_order();
        self.reads.note_change(key);
        // What is not there needs no place in the list, unless it is just being written.
        if !self.is_in_regions(key) && self.writing.load(Relaxed) == 0 {
            return Ok(());
        }
        let noted = self.removed.remove(key);
        self.cache.storage().delete(&Key(*key.as_bytes()));
        noted.map_err(|error| failed("remove a block", &error))
    }

    async fn write(&self, key: BlockKey, frame: Frame) -> Result<(), StoreError> {
        let (bytes, capacity_bytes) = (frame.body.len() as u64, self.options.largest_block_bytes);
        if bytes > capacity_bytes {
            return Err(StoreError::TooLarge { store: NAME.into(), bytes, capacity_bytes });
        }
        if Small::is_for(&frame) {
            self.remove(&key)?;
            return self.change_small("write a block", move |small| small.put(key, &frame)).await;
        }
        // First, because it is what reads find first.
        self.remove_small("write a block", key).await?;
        let room = self.room(bytes).await?;
        let was_here = self.is_in_regions(&key);
        self.enqueue(&key, frame);
        self.flush(room).await.map_err(|error| failed("write a block", &error))?;
        // A removal in between stays in the list.
        let _one = self.in_order();
        // foyer logs what it cannot write, and reports nothing.
        match self.is_in_regions(&key) {
            true => {
                // If the list cannot be written to, the next process does not find the block, as it may lack any.
                let _ = self.removed.written(&key);
                // What was there before says nothing about whether this was written.
                if !was_here {
                    let _ = self.removed.wrote(bytes);
                }
                Ok(())
            }
            // It was removed while it was written.
            false if self.removed.has(&key) => Ok(()),
            false => Err(failed("write a block", &"the write failed; the log has the reason")),
        }
    }

    /// Counts a damaged block, and logs the first of them and ever fewer of those that follow.
    fn note_damaged(&self) {
        let n = self.damaged.fetch_add(1, Relaxed) + 1;
        if n.is_power_of_two() {
            let dir = self.options.dir.display();
            tracing::warn!(
                target: "kvist::store",
                "{n} of the blocks in {dir} did not pass their check and are not used; look at that disk"
            );
        }
    }

    async fn read(&self, key: &BlockKey) -> Result<Option<Frame>, StoreError> {
        if let Some(frame) = self.small.get(key) {
            return Ok(Some(frame));
        }
        let was_here = self.is_in_regions(key);
        let reading = self.reads.begin(key);
        let load = self.cache.storage().load(&Key(*key.as_bytes())).await;
        Ok(match load.map_err(|error| failed("read a block", &error))? {
            Load::Entry { value, populated, .. } => {
                // Its region is one of the next to be overwritten: a block that is used stays.
                if populated.age == Age::Old
                    && let Ok(pages) =
                        self.buffer.clone().try_acquire_many_owned(self.pages(value.0.body.len() as u64))
                {
                    let room = Room::of(pages, &self.writing);
                    self.enqueue_again(&reading, value.0.clone());
                    drop(self.flush(room));
                }
                Some(value.0)
            }
            Load::Piece { piece, .. } => Some(piece.value().0.clone()),
            Load::Miss => {
                // foyer checks what it reads, forgets what is damaged, and says no more. A block that is overwritten in this moment counts
                // too.
                if was_here && !self.is_in_regions(key) && !self.removed.has(key) {
                    self.note_damaged();
                }
                None
            }
            Load::Throttled => None,
        })
    }
}

impl FrameStore for DiskFrames {
    fn name(&self) -> &str {
        NAME
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        _within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        let here = keys.iter().take_while(|key| self.is_here(key)).count();
        Box::pin(std::future::ready(Ok(here)))
    }

    fn has(&self, key: &BlockKey) -> Option<bool> {
        Some(self.is_here(key))
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(self.read(key))
    }

    /// Until foyer's buffer has room: a queue of writes in front of a slow disk says nothing about its health.
    fn turn<'a>(&'a self, bytes: u64) -> BoxFuture<'a, Turn> {
        let turn = self.turns.clone().acquire_many_owned(self.pages(bytes));
        Box::pin(async move { Turn(turn.await.ok().map(|turn| Box::new(turn) as Box<dyn Send>)) })
    }

    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        _ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.write(key, frame))
    }

    /// foyer forgets it until it is opened again, and then is told again.
    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.delete(key))
    }

    fn damaged(&self) -> u64 {
        self.damaged.load(Relaxed)
    }

    fn usage(&self) -> Usage {
        // foyer counts neither.
        Usage { bytes: None, capacity_bytes: Some(self.options.capacity_bytes), entries: None }
    }
}

/// Removes again what was removed before, and what foyer has found again.
fn removed(dir: &Path, cycle_bytes: u64, cache: &HybridCache<Key, Stored>) -> io::Result<Removed> {
    let is_here = |key: &BlockKey| cache.storage().may_contains(&Key(*key.as_bytes()));
    let removed = Removed::open(dir, cycle_bytes, is_here)?;
    removed.keys().iter().for_each(|key| cache.storage().delete(&Key(*key.as_bytes())));
    Ok(removed)
}

/// `ages`: of the regions.
async fn build(
    dir: &Path,
    layout: &Layout,
    ages: Vec<Option<u64>>,
) -> Result<HybridCache<Key, Stored>, String> {
    let size =
        |bytes: u64| usize::try_from(bytes).map_err(|_| format!("{bytes} bytes cannot be addressed here"));
    // The region that foyer empties when the picker marks them is one of them.
    let n_old = size(Regions { n: layout.regions, bytes: layout.region_bytes }.n_old() + 1)?;
    // Through the page cache: memory that nothing else needs makes blocks that were written or read lately as fast as a tier in RAM, and a
    // write waits for memory alone. foyer could open the files with O_DIRECT; its O_NOATIME then refuses files of another user.
    let device = FsDeviceBuilder::new(dir).with_capacity(size(layout.regions * layout.region_bytes)?).build();
    let device: Arc<dyn Device> = device.map_err(|error| error.to_string())?;
    let engine = BlockEngineConfig::new(device)
        .with_block_size(size(layout.region_bytes)?)
        .with_buffer_pool_size(size(layout.buffer_bytes)?)
        // In turn: what was removed is in no region when all have been written to.
        .with_eviction_pickers(vec![Box::new(OldestFirst::new(ages, n_old))])
        // `room` is the bound.
        .with_submit_queue_size_threshold(usize::MAX);
    HybridCacheBuilder::new()
        .with_name("kvist")
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .with_flush_on_close(false)
        // Nothing is kept in memory: that is another tier.
        .memory(1)
        .with_shards(1)
        .storage()
        .with_io_engine_config(PsyncIoEngineConfig::new())
        .with_engine_config(engine)
        .with_recover_mode(RecoverMode::Quiet)
        .build()
        .await
        .map_err(|error| error.to_string())
}
