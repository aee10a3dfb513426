//! Tiers below the cache of a batch.
use crate::errors::{Class, argument, engine};
use crate::loading::Bytes;
use crate::model::Model;
use kvist_device::{Purpose, Registry, Reservation, Storage};
use kvist_engine::serving::{Engine, EngineConfig, TierStats, fingerprint};
use kvist_server::config::{LoadRule, OpenTiers, TiersSection, WriteTime};
use kvist_store::StoreError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Where K and V of a `Batch` go that its cache has no room for, and from where they come back: memory, a disk, a store that
/// several machines share. Texts are the same as without. Several tiers are asked from the fastest on.
///
/// Args:
///     ram: bytes, or a size such as "8GiB", of this machine's memory. On a CPU a larger `context` does the same without copies.
///     ram_packed: store blocks there as q8, half of what f16 takes. What is loaded is rounded, so texts can differ.
///     disk: a directory, which is created if it is missing. What it has is found again later. One `Batch` at a time uses it.
///     disk_size: what the directory takes, all of it at once: at least 128 MiB.
///     store: the URL of a store: redis://HOST:6379/PREFIX, s3://BUCKET/PREFIX?region=REGION or fs:///PATH.
///     write: when blocks are copied to the tiers: "through", as soon as they are computed, or "back", shortly before they are evicted.
///     load: which blocks are loaded: "auto", those that come sooner than they would be computed, or "always", all that a tier has.
///     grace: seconds that a request waits for a tier to say what it has. A load may take this much longer than four times its
///         estimate; then its tokens are computed. An operation of a disk or a shared store has as long, 2 s at least and 50 s at most.
///
/// Raises:
///     ArgumentError: a size is missing, or this kvist was built without such a tier.
#[pyclass(frozen, module = "kvist")]
#[derive(Clone)]
pub struct Tiers {
    section: TiersSection,
}

#[pymethods]
impl Tiers {
    #[new]
    #[allow(clippy::too_many_arguments)] // keyword arguments
    #[pyo3(signature = (*, ram=None, ram_packed=false, disk=None, disk_size=None, store=None, write="through", load="auto", grace=0.25))]
    fn new(
        ram: Option<Bytes>,
        ram_packed: bool,
        disk: Option<PathBuf>,
        disk_size: Option<Bytes>,
        store: Option<String>,
        write: &str,
        load: &str,
        grace: f64,
    ) -> PyResult<Self> {
        let write = match write {
            "through" => WriteTime::Through,
            "back" => WriteTime::Back,
            _ => return Err(argument(format!("`write`: {write:?} is neither \"through\" nor \"back\""))),
        };
        let load = match load {
            "auto" => LoadRule::Auto,
            "always" => LoadRule::Always,
            _ => return Err(argument(format!("`load`: {load:?} is neither \"auto\" nor \"always\""))),
        };
        let grace_ms = grace * 1000.0;
        if !(1.0..=1e12).contains(&grace_ms) {
            return Err(argument(format!(
                "`grace`: {grace} seconds is not a time of 0.001 seconds at least"
            )));
        }
        let size = |name: &str, bytes: Option<Bytes>| bytes.map_or(Ok(0), |bytes| bytes.get(name));
        let section = TiersSection {
            ram_bytes: size("ram", ram)?,
            ram_packed,
            disk_bytes: size("disk_size", disk_size)?,
            disk_dir: disk,
            store,
            write,
            load,
            grace_ms: grace_ms as u64,
        };
        let unbuilt = |name: &str, feature: &str| {
            argument(format!(
                "`{name}`: this kvist was built without it: build the package with the feature {feature}, see docs/python.md"
            ))
        };
        match &section {
            TiersSection { disk_dir: Some(_), .. } if !TiersSection::HAS_DISK => {
                Err(unbuilt("disk", "disk-tier"))
            }
            TiersSection { store: Some(_), .. } if !TiersSection::HAS_STORE => {
                Err(unbuilt("store", "shared-tier"))
            }
            TiersSection { disk_dir: Some(dir), disk_bytes: 0, .. } => Err(argument(format!(
                "`disk_size`: give the size of {}, which it takes at once",
                dir.display()
            ))),
            TiersSection { ram_bytes: 0, ram_packed: true, .. } => {
                Err(argument("`ram_packed`: give `ram` too, a size"))
            }
            TiersSection { disk_dir: None, disk_bytes: 1.., .. } => {
                Err(argument("`disk_size`: give `disk` too, a directory"))
            }
            section if !section.is_on() => {
                Err(argument("no tier: give at least one of `ram`, `disk` and `store`"))
            }
            _ => Ok(Tiers { section }),
        }
    }

    /// The arguments that this kvist was built with, of `ram`, `disk` and `store`.
    #[classattr]
    fn built() -> Vec<&'static str> {
        let all = [("ram", true), ("disk", TiersSection::HAS_DISK), ("store", TiersSection::HAS_STORE)];
        all.into_iter().filter_map(|(name, built)| built.then_some(name)).collect()
    }

    fn __repr__(&self) -> String {
        format!("<kvist.Tiers {}>", self.section.describe())
    }
}

/// The tiers of a batch, open.
pub struct BatchTiers {
    open: OpenTiers,
    /// What they take of the model's memory.
    _memory: Reservation,
    /// Fastest first.
    pub names: Arc<[String]>,
}

/// How long what is on its way to the tiers may take when a batch is closed.
const FLUSH: Duration = Duration::from_secs(2);
/// How long the stores may take to end what they are doing then.
const CLOSING: Duration = Duration::from_secs(60);

impl BatchTiers {
    /// Opens the stores for a batch, and tells its configuration.
    pub fn open(
        tiers: &Tiers,
        model: &Model,
        registry: &Registry,
        config: &mut EngineConfig,
    ) -> PyResult<BatchTiers> {
        let (section, paged) = (&tiers.section, &config.paged);
        if paged.prefix.is_none() {
            return Err(argument("`tiers` keep what the prefix index finds: leave `prefix_cache` on"));
        }
        let shape = model.model.config();
        if section.ram_packed && [paged.cache.k, paged.cache.v].iter().any(|&kv| kv != Storage::F16) {
            return Err(argument(
                "`tiers`: `ram_packed` packs a cache in f16, and this one has another storage",
            ));
        }
        if !paged.suits_tiers(shape) {
            return Err(argument(
                "`tiers`: all layers have a sliding window, which is not supported; leave `tiers` out",
            ));
        }
        let block_bytes = paged.block_bytes(shape);
        let memory = section.memory_bytes(paged, shape);
        let memory = model.model.budget().reserve(Purpose::KvCache, memory);
        let memory = memory.map_err(|why| {
            let fits = format!("{} of {}", kvist_device::Bytes(why.free), kvist_device::Bytes(why.total));
            Class::OutOfMemory.with(format!(
                "`tiers`: their {} of memory do not fit: {fits} are free; give less `ram` or `disk_size`",
                kvist_device::Bytes(why.asked)
            ))
        })?;
        let fingerprint = match section.outlives_process() {
            true => {
                let origin = model.origin.of(&model.model, &paged.block_aligned()).map_err(engine)?;
                fingerprint(&origin, paged.block_tokens, &registry.device().numerics()).map_err(engine)?
            }
            // This batch alone finds them.
            false => Vec::new(),
        };
        let open = section.open(&config.scheduler, block_bytes, fingerprint).map_err(store)?;
        let open = open.ok_or_else(|| argument("`tiers`: there is none"))?;
        let opened = open.config();
        let names = opened.stores.iter().map(|tier| tier.store.name().to_owned()).collect();
        config.tiers = Some(opened);
        Ok(BatchTiers { open, _memory: memory, names })
    }

    /// Waits until what is on its way is written. For an engine that computes nothing any more.
    pub fn flush(&self, engine: &Engine) {
        self.open.flush(engine, FLUSH);
    }

    /// Closes the stores, after the engine's thread has ended.
    pub fn close(self) {
        self.open.close(CLOSING);
    }
}

fn store(error: StoreError) -> PyErr {
    let text = error.to_string();
    match &error {
        StoreError::Open { store, .. } if store == "disk" => Class::File.with(format!("`disk`: {text}")),
        StoreError::Open { store, .. } if store == "remote store" => argument(format!("`store`: {text}")),
        _ => Class::Error.with(text),
    }
}

/// For `Batch.stats()`.
pub fn stats<'py>(py: Python<'py>, tiers: &TierStats) -> PyResult<Bound<'py, PyDict>> {
    let (dict, c) = (PyDict::new(py), &tiers.counters);
    dict.set_item("loads", c.loads)?;
    dict.set_item("failed_loads", c.failed_loads)?;
    dict.set_item("late_loads", c.late_loads)?;
    dict.set_item("wasted_tokens", c.wasted_tokens)?;
    dict.set_item("declined_tokens", c.declined_tokens)?;
    dict.set_item("regained_tokens", c.regained_tokens)?;
    dict.set_item("load_s", c.load_ns as f64 / 1e9)?;
    dict.set_item("stored_blocks", c.stored_blocks)?;
    dict.set_item("failed_blocks", c.failed_blocks)?;
    dict.set_item("skipped_blocks", c.skipped_blocks)?;
    dict.set_item("load_bytes", tiers.load_bytes)?;
    dict.set_item("store_bytes", tiers.store_bytes)?;
    dict.set_item("pinned_bytes", tiers.pinned.map(|pinned| pinned.bytes))?;
    dict.set_item("pinned_used_bytes", tiers.pinned.map(|pinned| pinned.lent_bytes))?;
    dict.set_item("unpinned_blocks", tiers.pinned.map(|pinned| pinned.refused_blocks))?;
    let stores = tiers.stores.iter().zip(c.loaded_tokens).map(|(store, loaded_tokens)| {
        let one = PyDict::new(py);
        one.set_item("name", &store.name)?;
        one.set_item("bytes", store.usage.bytes)?;
        one.set_item("capacity_bytes", store.usage.capacity_bytes)?;
        one.set_item("loaded_tokens", loaded_tokens)?;
        one.set_item("errors", store.errors)?;
        one.set_item("unwritten_blocks", store.unwritten_blocks)?;
        one.set_item("damaged_blocks", store.counts.damaged)?;
        one.set_item("evicted_blocks", store.counts.evicted)?;
        one.set_item("expired_blocks", store.counts.expired)?;
        Ok(one)
    });
    dict.set_item("stores", stores.collect::<PyResult<Vec<_>>>()?)?;
    Ok(dict)
}
