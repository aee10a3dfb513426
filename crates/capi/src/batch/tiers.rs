//! Tiers below the cache of a batch.
use crate::model::Model;
use crate::status::{Failure, Outcome, kvist_status};
use kvist_engine::kvist_device::{self, Purpose, Reservation, Storage};
use kvist_engine::kvist_store::StoreError;
use kvist_engine::serving::{Engine, EngineConfig, OpenTiers, TierOptions, fingerprint};
use std::time::Duration;

/// The tiers of a batch, open.
pub(super) struct BatchTiers {
    open: OpenTiers,
    /// What they take of the model's memory.
    _memory: Reservation,
}

/// How long what is on its way to the tiers may take when a batch is freed.
const FLUSH: Duration = Duration::from_secs(2);
/// How long the stores may take to end what they are doing then.
const CLOSING: Duration = Duration::from_secs(60);

fn not_built(name: &str, what: &str, feature: &str) -> Failure {
    Failure::unsupported(format!(
        "{name}: this libkvist was built without {what}: cargo build --profile dist -p kvist-capi --features {feature}"
    ))
}

/// Refuses options that do not go together, and tiers that this library was built without.
pub(super) fn check(options: &TierOptions) -> Outcome<()> {
    let wrong = |text: String| Err(Failure::argument(text));
    match options {
        TierOptions { disk_dir: None, disk_bytes: 1.., .. } => {
            wrong("tier_disk_bytes: give tier_disk_dir too, a directory".into())
        }
        TierOptions { ram_bytes: 0, ram_packed: true, .. } => {
            wrong("tier_ram_packed: give tier_ram_bytes too, a size".into())
        }
        TierOptions { disk_dir: Some(dir), disk_bytes: 0, .. } => {
            wrong(format!("tier_disk_bytes is 0: give the size of {}, which it takes at once", dir.display()))
        }
        TierOptions { disk_dir: Some(_), .. } if !TierOptions::HAS_DISK => {
            Err(not_built("tier_disk_dir", "tiers on a disk", "disk-tier"))
        }
        TierOptions { store: Some(_), .. } if !TierOptions::HAS_STORE => {
            Err(not_built("tier_store", "stores on a server", "shared-tier"))
        }
        _ => Ok(()),
    }
}

impl BatchTiers {
    /// Opens the stores for a batch, and tells its configuration.
    pub fn open(options: &TierOptions, model: &Model, config: &mut EngineConfig) -> Outcome<BatchTiers> {
        let (paged, shape) = (&config.paged, model.weights.config());
        if paged.prefix.is_none() {
            return Err(Failure::argument(
                "tiers keep what the prefix index finds: leave out no_prefix_index",
            ));
        }
        let other = [paged.cache.k, paged.cache.v].into_iter().find(|kv| *kv != Storage::F16);
        if let Some(other) = other.filter(|_| options.ram_packed) {
            return Err(Failure::argument(format!(
                "tier_ram_packed packs a cache in f16, and this one has {other}: leave one out"
            )));
        }
        if !paged.suits_tiers(shape) {
            return Err(Failure::unsupported(
                "all layers of this model or cache have a sliding window, which tiers do not support: leave out the tiers",
            ));
        }
        let block_bytes = paged.block_bytes(shape);
        let memory = options.memory_bytes(paged, shape);
        let memory = model.weights.budget().reserve(Purpose::KvCache, memory).map_err(|why| {
            let bytes = kvist_device::Bytes;
            let (asked, free, total) = (bytes(why.asked), bytes(why.free), bytes(why.total));
            Failure::new(
                kvist_status::KVIST_OUT_OF_MEMORY,
                format!(
                    "the tiers' {asked} of memory do not fit: {free} of {total} are free; give less tier_ram_bytes or \
                     tier_disk_bytes"
                ),
            )
        })?;
        let fingerprint = match options.outlives_process() {
            true => {
                let origin = model.origin.of(&model.weights, &paged.block_aligned())?;
                fingerprint(&origin, paged.block_tokens, &model.registry.device().numerics())?
            }
            // This batch alone finds them.
            false => Vec::new(),
        };
        let open = options.open(&config.scheduler, block_bytes, fingerprint).map_err(failed)?;
        let open = open.ok_or_else(|| Failure::argument("no tier: give a size, a directory or a store"))?;
        config.tiers = Some(open.config());
        Ok(BatchTiers { open, _memory: memory })
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

fn failed(error: StoreError) -> Failure {
    let text = error.to_string();
    match &error {
        StoreError::Open { store, .. } if store == "disk" => {
            Failure::new(kvist_status::KVIST_BAD_FILE, format!("tier_disk_dir: {text}"))
        }
        StoreError::Open { store, .. } if store == "remote store" => {
            Failure::argument(format!("tier_store: {text}"))
        }
        _ => Failure::new(kvist_status::KVIST_OUT_OF_MEMORY, text),
    }
}
