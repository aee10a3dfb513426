//! Stores KV blocks below the cache, by the tokens that they hold.
//!
//! A [`BlockStore`] maps a [`BlockKey`] to the bytes of one exported block. The key is a hash of the model, the
//! storage and every token up to the block's end ([`KeyChain`]), so it is the same in every process and after
//! every restart, and a block never has to be invalidated: other tokens have another key.
//!
//! Guarantees: [`get`](BlockStore::get) returns the bytes that were put under that key, or nothing. A frame with
//! the key, the length and a hash surrounds every stored block ([`Framed`]): BLAKE3, or in RAM XXH3. A block that was flipped, cut
//! short, exchanged or written by a newer version is a miss that is counted and removed. No file and no server can
//! make this crate panic.
//!
//! It refuses: to keep every block. All stores are bounded or shared, so a block may be gone at any time. A failing
//! store returns an error soon, and the caller computes the block again.
#![forbid(unsafe_code)]

#[cfg(feature = "disk")]
mod disk;
mod error;
mod frame;
mod framed;
#[cfg(any(feature = "disk", feature = "remote"))]
mod guard;
mod key;
#[cfg(feature = "remote")]
mod lookups;
mod over;
mod ram;
mod regions;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "disk")]
mod removed;
#[cfg(feature = "disk")]
mod small;

pub use bytes::Bytes;
#[cfg(feature = "disk")]
pub use disk::{Disk, DiskFrames, DiskOptions};
pub use error::StoreError;
pub use frame::{Check, Damage, Frame, Opened};
pub use framed::{Counts, FrameStore, Framed, Turn};
#[cfg(any(feature = "disk", feature = "remote"))]
pub use guard::{Guarded, Limits};
pub use key::{BlockKey, KeyChain};
pub use over::StoreOver;
pub use ram::{Ram, RamFrames};
pub use regions::Regions;
#[cfg(feature = "remote")]
pub use remote::{Remote, RemoteFrames};

use std::cmp::Ordering;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

/// The same type as `futures::future::BoxFuture`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A store of blocks, to be shared by several tasks. Its futures run on a tokio runtime; dropping one cancels the
/// wait, but not always the work.
pub trait BlockStore: Send + Sync {
    /// For logs and metrics: "ram", "disk", "redis".
    fn name(&self) -> &str;

    /// How many blocks, from the first key on, are here. A later [`get`](Self::get) may still miss.
    ///
    /// A store that answers slowly says after `within` what it has found by then. If that is nothing, it goes on, up to its own time
    /// limit: whether it has failed does not depend on the patience of its callers.
    ///
    /// # Errors
    /// The store cannot be reached, or failed.
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>>;

    /// Whether a block is here, if the store knows that at once; `None` from one that would have to ask a server. It is no use of the
    /// block, and it must be quick. A later [`get`](Self::get) may still miss.
    fn has(&self, key: &BlockKey) -> Option<bool> {
        let _ = key;
        None
    }

    /// The bytes that were put under `key`, checked.
    ///
    /// # Errors
    /// The store cannot be reached, or failed. A damaged block is `Ok(None)`.
    fn get<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Bytes>, StoreError>>;

    /// Stores a block, in place of what was there. After `ttl` it is a miss. Other blocks may be evicted for it.
    /// `bytes` should own its memory: a store in RAM keeps all of a larger buffer that they are a slice of.
    ///
    /// # Errors
    /// The block is larger than the store, or the store cannot be reached, or failed. Then `get` returns what it
    /// returned before, or nothing.
    fn put<'a>(
        &'a self,
        key: BlockKey,
        bytes: Bytes,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>>;

    /// Keeps those of these blocks that are here before others, for `within`: when room is needed, they go after all that are not
    /// kept, the smallest rank first. At most half of the store is kept so: what is too much is kept no longer, of the smallest rank what
    /// was used longest ago. To keep blocks is to use them, the first of them last. If a block is kept already, the larger [`Keep`]
    /// counts. Returns false, and keeps nothing, if the store does not choose what goes: a disk overwrites what is oldest, a server
    /// follows its own rules. It must be quick.
    fn keep(&self, keys: &[BlockKey], rank: Rank, within: Duration) -> bool {
        let _ = (keys, rank, within);
        false
    }

    /// Keeps these blocks no longer than any others.
    fn release(&self, keys: &[BlockKey]) {
        let _ = keys;
    }

    /// Removes a block, if it is there.
    ///
    /// # Errors
    /// The store cannot be reached, or failed.
    fn remove<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>>;

    /// From now on tells `watcher` of every block that comes or goes, in order and before the call that changed it ends; first of
    /// every block that is here. Returns false, and tells nothing, if the store does not know: a server, or a disk that evicts by
    /// itself. A later watcher takes the place of an earlier one.
    fn watch(&self, watcher: Watcher) -> bool {
        drop(watcher);
        false
    }

    /// What is stored now, as far as the store knows.
    fn usage(&self) -> Usage;

    /// What happened so far.
    fn counts(&self) -> Counts;
}

/// What is kept longer when room is needed: any pin before all priorities, and a larger priority before a smaller one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    pub pin: bool,
    pub priority: u8,
}

/// Why a block is kept, and until when, on the clock that its user has. Ordered by rank, and of equal ranks by the end: of two for
/// the same block the larger one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep<T> {
    pub rank: Rank,
    /// `None`: for ever, as far as clocks go.
    pub until: Option<T>,
}

impl<T: Ord> Ord for Keep<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        // Never is later than any time.
        let key = |keep: &Self| (keep.rank, keep.until.is_none());
        key(self).cmp(&key(other)).then_with(|| self.until.cmp(&other.until))
    }
}

impl<T: Ord> PartialOrd for Keep<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Hears the key of a block, and whether the block is here now. It is called with the store locked: it must be quick, and must not
/// use the store.
pub type Watcher = Box<dyn Fn(&BlockKey, bool) + Send + Sync>;

/// What a store holds. Unknown figures are `None`: a server tells neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: Option<u64>,
    pub capacity_bytes: Option<u64>,
    pub entries: Option<u64>,
}
