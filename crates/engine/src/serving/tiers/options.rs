//! Which stores are below a cache, as users configure it, and how they are opened.
use super::{PackedStore, TierConfig, TierStore};
use crate::executor::PagedConfig;
use crate::serving::Engine;
use kvist_model::config::ModelConfig;
use kvist_scheduler::{Config, Write};
use kvist_store::{BlockStore, Ram, StoreError};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// Tiers below a cache, from the fastest on. Texts are the same as without. A program that has stores of its own makes a [`TierConfig`].
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TierOptions {
    /// Bytes of the host's memory for evicted blocks; 0 for none. Of use where the cache is in the memory of a GPU. Over CUDA they are
    /// locked when the engine starts.
    pub ram_bytes: u64,
    /// Store blocks in that memory as q8, which takes half of what f16 takes. What is loaded from there is rounded.
    pub ram_packed: bool,
    /// A directory for blocks, which are found again after a restart. One process at a time uses it.
    pub disk_dir: Option<PathBuf>,
    /// What `disk_dir` takes, all of it from the start.
    pub disk_bytes: u64,
    /// The URL of a store that several engines share; `kvist_store::Remote::open` has its forms. May contain a password.
    pub store: Option<String>,
    /// When blocks are copied to the tiers.
    pub write: WriteTime,
    /// Which blocks are loaded.
    pub load: LoadRule,
    /// How long a request waits for a tier to say what it has, and for a load beyond four times its estimate. Then its prompt is
    /// computed. An operation of a disk or a shared store may take as long before it counts as failed, but no less than 2 s and no more
    /// than 50 s.
    pub grace_ms: u64,
}

impl Default for TierOptions {
    fn default() -> Self {
        TierOptions {
            ram_bytes: 0,
            ram_packed: false,
            disk_dir: None,
            disk_bytes: 0,
            store: None,
            write: WriteTime::default(),
            load: LoadRule::default(),
            grace_ms: u64::try_from(TierConfig::GRACE.as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// Which blocks of the tiers are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LoadRule {
    /// Those that are expected to be there sooner than they would be computed.
    #[default]
    Auto,
    /// All that a tier has: less work for the device, even if a prompt takes longer.
    Always,
}

/// When blocks are copied to the tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteTime {
    /// As soon as they are cached.
    #[default]
    Through,
    /// Shortly before they are evicted.
    Back,
}

impl LoadRule {
    pub fn name(self) -> &'static str {
        match self {
            LoadRule::Auto => "auto",
            LoadRule::Always => "always",
        }
    }
}

impl WriteTime {
    pub fn name(self) -> &'static str {
        match self {
            WriteTime::Through => "through",
            WriteTime::Back => "back",
        }
    }
}

/// First guesses; what loads take is measured.
mod guess {
    use std::time::Duration;

    pub struct Speed {
        pub bytes_per_s: u64,
        pub latency: Duration,
    }

    pub const RAM: Speed = Speed { bytes_per_s: 2_000_000_000, latency: Duration::from_micros(200) };
    pub const DISK: Speed = Speed { bytes_per_s: 500_000_000, latency: Duration::from_micros(500) };
    /// Over a network of 10 Gbit/s, or within the machine.
    pub const REDIS: Speed = Speed { bytes_per_s: 300_000_000, latency: Duration::from_millis(1) };
    pub const FOLDER: Speed = Speed { bytes_per_s: 200_000_000, latency: Duration::from_millis(2) };
    pub const S3: Speed = Speed { bytes_per_s: 100_000_000, latency: Duration::from_millis(30) };
}

impl TierOptions {
    /// Whether this program was built with tiers on a disk.
    pub const HAS_DISK: bool = cfg!(feature = "disk-tier");
    /// Whether this program was built with stores on servers.
    pub const HAS_STORE: bool = cfg!(feature = "shared-tier");

    pub fn is_on(&self) -> bool {
        self.ram_bytes > 0 || self.outlives_process()
    }

    /// Whether blocks are found by other processes than this one, so that they need a fingerprint of what they depend on.
    pub fn outlives_process(&self) -> bool {
        self.disk_dir.is_some() || self.store.is_some()
    }

    /// Bytes that may be on their way from the tiers at a time, as many that may be copied out of the cache, and as many that may wait to
    /// be written to each tier.
    fn bytes_in_flight(&self) -> u64 {
        let most = 256 << 20;
        if self.outlives_process() { most } else { (self.ram_bytes / 8).clamp(16 << 20, most) }
    }

    /// Of [`memory_bytes`](Self::memory_bytes) what is locked in place if the cache is on a device that copies from such memory by itself:
    /// that of the blocks in RAM, of those that are copied out of the cache, and of those that wait to be written to RAM. Packed blocks are
    /// made by the host, in ordinary memory.
    pub fn pinned_bytes(&self) -> u64 {
        if self.ram_bytes == 0 || self.ram_packed {
            0
        } else {
            self.ram_bytes.saturating_add(2 * self.bytes_in_flight())
        }
    }

    /// Memory of the host that the tiers take below this cache: what they hold, what is on its way, what a store on a disk needs to find
    /// and to write it, and what the engine remembers.
    pub fn memory_bytes(&self, paged: &PagedConfig, model: &ModelConfig) -> u64 {
        if !self.is_on() {
            return 0;
        }
        let stored_bytes = paged.stored_bytes(model);
        let n_tiers = self.n_tiers();
        let disk = if self.disk_dir.is_some() { disk_memory(self.disk_bytes, stored_bytes) } else { 0 };
        // What is loaded, what is copied out of the cache, and what waits to be written to each tier.
        let in_flight = (2 + n_tiers as u64).saturating_mul(self.bytes_in_flight());
        let n_blocks = u64::from(paged.cache.context_tokens.div_ceil(paged.block_tokens.max(1)));
        let n_in_flight = self.bytes_in_flight() / stored_bytes.max(1) + 1;
        let known = TierConfig::bookkeeping_bytes(n_tiers, n_blocks, n_in_flight);
        [self.ram_bytes, in_flight, disk, known].into_iter().fold(0, u64::saturating_add)
    }

    pub fn n_tiers(&self) -> usize {
        [self.ram_bytes > 0, self.disk_dir.is_some(), self.store.is_some()]
            .into_iter()
            .filter(|is| *is)
            .count()
    }

    /// What the tiers are, in one line, without secrets.
    pub fn describe(&self) -> String {
        let mut parts = Vec::new();
        if self.ram_bytes > 0 {
            let packed = if self.ram_packed { ", packed" } else { "" };
            parts.push(format!("{} of RAM{packed}", kvist_device::Bytes(self.ram_bytes)));
        }
        if let Some(dir) = &self.disk_dir {
            parts.push(format!("{} on disk in {}", kvist_device::Bytes(self.disk_bytes), dir.display()));
        }
        if let Some(url) = &self.store {
            parts.push(format!("a shared store ({})", url.split(':').next().unwrap_or_default()));
        }
        parts.join(", ")
    }

    /// Refuses a disk that is too small or too large for blocks of so many bytes. Looks at no file.
    ///
    /// # Errors
    /// See there. Without the feature `disk-tier` nothing is refused here.
    pub fn check_disk(&self, block_bytes: u64) -> Result<(), StoreError> {
        self.disk_dir.as_ref().map_or(Ok(()), |dir| check_disk(dir, self.disk_bytes, block_bytes))
    }

    /// Opens the stores. `block_bytes`: of a block of the cache. `fingerprint`: see [`TierConfig::fingerprint`].
    ///
    /// # Errors
    /// A store cannot be opened as configured. A shared store that cannot be reached now is no error.
    pub fn open(
        &self,
        scheduler: &Config,
        block_bytes: u64,
        fingerprint: Vec<u8>,
    ) -> Result<Option<OpenTiers>, StoreError> {
        if !self.is_on() {
            return Ok(None);
        }
        let (runtime, grace) = (store_runtime("tiers")?, Duration::from_millis(self.grace_ms));
        let mut stores = Vec::new();
        let mut add = |store: Arc<dyn BlockStore>, guess: guess::Speed| {
            let guess::Speed { bytes_per_s, latency } = guess;
            stores.push(TierStore { store, bytes_per_s, latency });
        };
        match self.ram_bytes {
            0 => {}
            bytes if self.ram_packed => add(Arc::new(PackedStore::new(Ram::new(bytes))), guess::RAM),
            bytes => add(Arc::new(Ram::new(bytes)), guess::RAM),
        }
        if let Some(dir) = &self.disk_dir {
            add(runtime.block_on(open_disk(dir, self.disk_bytes, block_bytes, grace))?, guess::DISK);
        }
        if let Some(url) = &self.store {
            let _within = runtime.enter();
            let store = open_shared_store(url, grace)?;
            let guess = match store.name() {
                "redis" => guess::REDIS,
                "s3" => guess::S3,
                _ => guess::FOLDER,
            };
            add(store, guess);
        }
        let write = match self.write {
            WriteTime::Through => Write::Through,
            WriteTime::Back => Write::Back { ahead_tokens: scheduler.max_batch_tokens },
        };
        // What follows rounded K and V is other than what follows the ones that were computed.
        let rounded = if self.ram_packed { &b"rounded to q8"[..] } else { b"" };
        let fingerprint = [&fingerprint, rounded].concat();
        let config = TierConfig {
            write,
            max_bytes_in_flight: self.bytes_in_flight(),
            grace,
            always: self.load == LoadRule::Always,
            pinned_bytes: self.pinned_bytes(),
            runtime: Some(runtime.handle().clone()),
            ..TierConfig::new(stores, fingerprint)
        };
        Ok(Some(OpenTiers { config, runtime: Some(runtime) }))
    }
}

/// A runtime for the tasks that talk to stores: they mostly wait, and check what they read. `of` names the stores in the error.
///
/// # Errors
/// The system starts no more threads.
pub fn store_runtime(of: &str) -> Result<Runtime, StoreError> {
    tier_runtime().map_err(|error| StoreError::Open {
        store: of.into(),
        problem: format!("cannot start threads: {error}"),
        advice: "Allow this user more threads (ulimit -u)".into(),
    })
}

pub(super) fn tier_runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(2).thread_name("kvist-tiers").enable_all().build()
}

/// Most that a store has for an operation. The engine gives up after [`LONGEST_READ`](super::task::LONGEST_READ), and a store that is given
/// up never counts as failed.
#[cfg(any(feature = "disk-tier", feature = "shared-tier"))]
const LONGEST: Duration = Duration::from_secs(50);

/// Limits of a store for which requests wait so long.
#[cfg(any(feature = "disk-tier", feature = "shared-tier"))]
fn limits(grace: Duration) -> kvist_store::Limits {
    let limits = kvist_store::Limits::default();
    kvist_store::Limits { timeout: limits.timeout.max(grace.min(LONGEST)), ..limits }
}

/// Opens the store behind a URL, within a runtime. One that cannot be reached now is no error. `grace`: how long requests wait for it. An
/// operation of the store may take as long before it counts as failed, but no less than 2 s and no more than 50 s.
///
/// # Errors
/// The URL is none of a store, or the program was built without the feature `shared-tier`.
#[cfg(feature = "shared-tier")]
pub fn open_shared_store(url: &str, grace: Duration) -> Result<Arc<dyn BlockStore>, StoreError> {
    Ok(Arc::new(kvist_store::Remote::open(url, limits(grace))?))
}

/// Refuses a URL that [`open_shared_store`] refuses. Connects to nothing.
///
/// # Errors
/// The URL is none of a store.
#[cfg(feature = "shared-tier")]
pub fn check_shared_store(url: &str) -> Result<(), StoreError> {
    kvist_store::Remote::check(url)
}

/// Refuses every URL, as [`open_shared_store`] does.
///
/// # Errors
/// Always.
#[cfg(not(feature = "shared-tier"))]
pub fn check_shared_store(url: &str) -> Result<(), StoreError> {
    open_shared_store(url, Duration::ZERO).map(|_| ())
}

/// Refuses to open the store behind a URL: the program was built without the feature `shared-tier`.
///
/// # Errors
/// Always.
#[cfg(not(feature = "shared-tier"))]
pub fn open_shared_store(_: &str, _: Duration) -> Result<Arc<dyn BlockStore>, StoreError> {
    Err(StoreError::Open {
        store: "remote store".into(),
        problem: "cannot be opened".into(),
        advice: not_built("stores on a server", "shared-tier"),
    })
}

#[cfg(feature = "disk-tier")]
async fn open_disk(
    dir: &Path,
    capacity_bytes: u64,
    block_bytes: u64,
    grace: Duration,
) -> Result<Arc<dyn BlockStore>, StoreError> {
    let options = disk_options(dir, capacity_bytes, block_bytes, grace);
    Ok(Arc::new(kvist_store::Disk::open(options).await?))
}

#[cfg(feature = "disk-tier")]
fn disk_options(
    dir: &Path,
    capacity_bytes: u64,
    block_bytes: u64,
    grace: Duration,
) -> kvist_store::DiskOptions {
    let (dir, limits) = (dir.to_path_buf(), limits(grace));
    kvist_store::DiskOptions { dir, capacity_bytes, largest_block_bytes: block_bytes, limits }
}

#[cfg(feature = "disk-tier")]
fn check_disk(dir: &Path, capacity_bytes: u64, block_bytes: u64) -> Result<(), StoreError> {
    disk_options(dir, capacity_bytes, block_bytes, Duration::ZERO).check()
}

#[cfg(not(feature = "disk-tier"))]
fn check_disk(_: &Path, _: u64, _: u64) -> Result<(), StoreError> {
    Ok(())
}

#[cfg(feature = "disk-tier")]
fn disk_memory(capacity_bytes: u64, block_bytes: u64) -> u64 {
    kvist_store::DiskOptions::memory_bytes(capacity_bytes, block_bytes)
}

#[cfg(any(not(feature = "disk-tier"), not(feature = "shared-tier")))]
fn not_built(what: &str, feature: &str) -> String {
    format!("Build kvist with {what}: its feature {feature}")
}

#[cfg(not(feature = "disk-tier"))]
async fn open_disk(dir: &Path, _: u64, _: u64, _: Duration) -> Result<Arc<dyn BlockStore>, StoreError> {
    Err(StoreError::Open {
        store: "disk".into(),
        problem: format!("cannot open {}", dir.display()),
        advice: not_built("tiers on a disk", "disk-tier"),
    })
}

#[cfg(not(feature = "disk-tier"))]
fn disk_memory(_: u64, _: u64) -> u64 {
    0
}

/// Tiers whose stores are open. Their tasks end when this is dropped; the engine then computes what it would have loaded.
pub struct OpenTiers {
    config: TierConfig,
    /// `None` while it is being dropped.
    runtime: Option<Runtime>,
}

impl OpenTiers {
    /// For [`EngineConfig::tiers`](crate::serving::EngineConfig::tiers).
    pub fn config(&self) -> TierConfig {
        self.config.clone()
    }

    /// Waits until `engine`, which computes nothing any more, has written what is on its way to the tiers, or the time is up:
    /// what is not written is computed again some day, and the log says how much this is.
    pub fn flush(&self, engine: &Engine, most: Duration) {
        let started = Instant::now();
        let left = || {
            // The engine thread updates the figure when something is reported to it.
            engine.blocking_inspect(|_| ());
            engine.stats().tiers.map_or(0, |tiers| tiers.store_bytes)
        };
        loop {
            match left() {
                0 => return,
                bytes if started.elapsed() >= most => {
                    return tracing::warn!(
                        target: "kvist::engine",
                        "{} were still on their way to the tiers and are dropped: their tokens are computed again when they are needed",
                        kvist_device::Bytes(bytes)
                    );
                }
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Ends the stores' tasks and closes the stores, once the engine's thread has ended. Then another one may open them.
    pub fn close(mut self, most: Duration) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(most);
        }
    }
}

impl Drop for OpenTiers {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(all(test, feature = "disk-tier", feature = "shared-tier"))]
mod tests {
    use super::*;

    #[test]
    fn stores_have_as_long_as_requests_wait() {
        let seconds = [0, 1, 2, 10, 600].map(|grace| limits(Duration::from_secs(grace)).timeout.as_secs());
        assert_eq!(seconds, [2, 2, 2, 10, 50]);
        assert!(LONGEST < crate::serving::tiers::task::LONGEST_READ);
    }
}
