//! `[tiers]`: where K and V go that the cache has no room for, and from where they come back. The section is the engine's `TierOptions`.
use super::check::bad;
use super::{ConfigError, ServerConfig};
use crate::kv_events::tier_event_bytes;
use kvist_device::Storage;
use kvist_engine::executor::PagedConfig;
pub use kvist_engine::serving::{LoadRule, OpenTiers, TierOptions as TiersSection, WriteTime};
use kvist_engine::serving::{TierConfig, open_shared_store, store_runtime};
use kvist_engine::sessions::SharedStore;
use kvist_model::config::ModelConfig;
use kvist_store::{Ram, StoreError};
use std::time::Duration;
use tokio::runtime::Runtime;

/// Refuses tiers that cannot be. `kv`: the storages of K and V.
pub fn check(tiers: &TiersSection, kv: [Storage; 2]) -> Result<(), ConfigError> {
    if tiers.ram_packed {
        if tiers.ram_bytes == 0 {
            return Err(bad("tiers.ram_packed", true, "tiers.ram_bytes (--tier-ram) too"));
        }
        if let Some(other) = kv.into_iter().find(|&kv| kv != Storage::F16) {
            let expected = format!("a cache in f16, but cache.kv or cache.kv_v is {other}");
            return Err(bad("tiers.ram_packed", true, expected));
        }
    }
    let default = TiersSection::default();
    let without_effect = [
        (tiers.write != default.write).then(|| ("tiers.write (--tier-write)", tiers.write.name())),
        (tiers.load != default.load).then(|| ("tiers.load (--tier-load)", tiers.load.name())),
    ];
    if !tiers.is_on()
        && let Some((field, value)) = without_effect.into_iter().flatten().next()
    {
        let expected = "a tier too: tiers.ram_bytes (--tier-ram), tiers.disk_dir (--tier-disk) or tiers.store (--tier-store)";
        return Err(bad(field, value, expected));
    }
    if tiers.grace_ms == 0 {
        let expected = "1 ms at least (--tier-grace): without a wait nothing is ever loaded";
        return Err(bad("tiers.grace_ms", 0, expected));
    }
    match &tiers.disk_dir {
        None if tiers.disk_bytes > 0 => {
            return Err(bad("tiers.disk_bytes", tiers.disk_bytes, "tiers.disk_dir (--tier-disk) too"));
        }
        Some(dir) if tiers.disk_bytes == 0 => {
            let expected =
                format!("the size of {} (--tier-disk-size), which it takes at once", dir.display());
            return Err(bad("tiers.disk_bytes", 0, expected));
        }
        Some(dir) if !TiersSection::HAS_DISK => {
            let dir = dir.display();
            return Err(bad("tiers.disk_dir (--tier-disk)", dir, not_built("tiers on a disk", "disk-tier")));
        }
        _ => {}
    }
    if tiers.store.is_some() && !TiersSection::HAS_STORE {
        return Err(bad("tiers.store (--tier-store)", "a URL", no_remote_stores()));
    }
    Ok(())
}

/// Memory that it takes at most to know what routers are told of the tiers (`kv_events.tiers`).
pub fn event_bytes(tiers: &TiersSection, paged: &PagedConfig, model: &ModelConfig) -> u64 {
    let object = paged.stored_bytes(model);
    let object = if tiers.ram_packed { object / 64 * 34 } else { object };
    let n_ram = tiers.ram_bytes / object.saturating_add(Ram::ENTRY_BYTES);
    let n_blocks = u64::from(paged.cache.context_tokens.div_ceil(paged.block_tokens.max(1)));
    let of_engine = TierConfig::event_bytes(n_ram, n_blocks, paged.block_tokens);
    let published = n_ram + if tiers.disk_dir.is_some() { TierConfig::REMEMBERED_BLOCKS } else { 0 };
    of_engine.saturating_add(tier_event_bytes(published))
}

/// What a program without stores on servers expects instead of a URL.
pub fn no_remote_stores() -> String {
    not_built("stores on a server", "shared-tier")
}

fn not_built(what: &str, feature: &str) -> String {
    format!("a kvist that was built with {what}: cargo build --release --features {feature}")
}

/// The store in which workers share sessions, opened for them: its failures and its counts are not those of a tier, and its threads do not
/// wait behind blocks. Sessions are not recorded any more when this is dropped.
pub struct OpenSessions {
    store: SharedStore,
    /// `None` while it is being dropped.
    runtime: Option<Runtime>,
}

impl OpenSessions {
    /// `None` if workers share no sessions. The store is not connected to: one that is down now may be up later. `model_context`: tokens.
    ///
    /// # Errors
    /// The store cannot be opened as configured.
    pub fn open(config: &ServerConfig, model_context: u32) -> Result<Option<Self>, StoreError> {
        let Some(url) = config.sessions.shared_store(&config.tiers) else { return Ok(None) };
        let runtime = store_runtime("sessions")?;
        let deadline = Duration::from_millis(config.tiers.grace_ms);
        let store = {
            let _within = runtime.enter();
            open_shared_store(url, deadline)?
        };
        let most_tokens = config.most_taken_over(model_context);
        let store = SharedStore { store, runtime: runtime.handle().clone(), deadline, most_tokens };
        Ok(Some(OpenSessions { store, runtime: Some(runtime) }))
    }

    /// For [`ServerState::share_sessions`](crate::ServerState::share_sessions).
    pub fn store(&self) -> SharedStore {
        self.store.clone()
    }
}

impl Drop for OpenSessions {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests;
