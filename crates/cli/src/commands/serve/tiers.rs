//! Tiers below the cache of a server: flags override the section `[tiers]` of its configuration. `kvist plan` takes the same
//! flags.
use crate::commands::simulate::spec::duration;
use crate::options::{Size, TierLoad, wrong_usage};
use anyhow::Context;
use clap::{ValueEnum, ValueHint};
use kvist_device::{Bytes, Footprint, Registry};
use kvist_engine::saved::Origin;
use kvist_engine::serving::{EngineConfig, check_shared_store, fingerprint};
use kvist_model::Opened;
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use kvist_server::ServerConfig;
use kvist_server::config::{LoadRule, OpenTiers, TiersSection, WriteTime};
use std::path::PathBuf;
use std::time::Duration;

#[derive(clap::Args, Default)]
pub struct TierFlags {
    /// Memory of the host for blocks that the cache evicts: 8GiB. Of use where the cache is in the memory of a GPU
    #[arg(long, value_name = "SIZE", help_heading = "Tiers below the cache")]
    tier_ram: Option<Size>,
    /// Store f16 blocks in that memory as q8: almost twice as many fit, and what is loaded from there is rounded
    #[arg(long, help_heading = "Tiers below the cache")]
    tier_ram_packed: bool,
    /// Keep blocks in this directory too: prompts that were computed once are loaded, also after a restart
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Tiers below the cache")]
    tier_disk: Option<PathBuf>,
    /// What that directory takes, at once: 200GiB
    #[arg(long, value_name = "SIZE", help_heading = "Tiers below the cache")]
    tier_disk_size: Option<Size>,
    /// Share blocks with other servers: redis://HOST:6379/PREFIX, s3://BUCKET/PREFIX?region=REGION or fs:///PATH
    #[arg(long, value_name = "URL", help_heading = "Tiers below the cache")]
    tier_store: Option<String>,
    /// When blocks are copied to the tiers: as soon as they are cached, or shortly before they are evicted
    #[arg(long, value_name = "WHEN", help_heading = "Tiers below the cache")]
    tier_write: Option<When>,
    /// Which blocks are loaded: those that come sooner than they would be computed, or all that a tier has
    #[arg(long, value_name = "WHICH", help_heading = "Tiers below the cache")]
    tier_load: Option<TierLoad>,
    /// How long a request waits for a tier to say what it has: 250ms, 2s. A load may take this much longer than four times its
    /// estimate; then its tokens are computed. An operation of a disk or a shared store has as long, 2s at least and 50s at most
    #[arg(long, value_name = "TIME", value_parser = duration, help_heading = "Tiers below the cache")]
    tier_grace: Option<Duration>,
}

#[derive(Clone, Copy, ValueEnum)]
enum When {
    Through,
    Back,
}

impl TierFlags {
    /// Overrides `section` with the flags that are given.
    pub fn apply(&self, section: &mut TiersSection) {
        section.ram_bytes = self.tier_ram.map_or(section.ram_bytes, |size| size.0);
        section.ram_packed |= self.tier_ram_packed;
        section.disk_dir = self.tier_disk.clone().or(section.disk_dir.take());
        section.disk_bytes = self.tier_disk_size.map_or(section.disk_bytes, |size| size.0);
        section.store = self.tier_store.clone().or(section.store.take());
        section.write = match self.tier_write {
            None => section.write,
            Some(When::Through) => WriteTime::Through,
            Some(When::Back) => WriteTime::Back,
        };
        section.load = match self.tier_load {
            None => section.load,
            Some(TierLoad::Auto) => LoadRule::Auto,
            Some(TierLoad::Always) => LoadRule::Always,
        };
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        section.grace_ms = self.tier_grace.map_or(section.grace_ms, milliseconds);
    }

    /// The flags that were given, with their values, as one types them. A URL with a password is left for the reader to fill in:
    /// what is printed ends up in logs.
    pub fn as_typed(&self) -> Vec<(&'static str, String)> {
        let store = |url: &String| if url.contains('@') { "URL".into() } else { url.clone() };
        let flags = [
            ("--tier-ram", self.tier_ram.map(|size| size.to_string())),
            ("--tier-ram-packed", self.tier_ram_packed.then(String::new)),
            ("--tier-disk", self.tier_disk.as_ref().map(|dir| dir.display().to_string())),
            ("--tier-disk-size", self.tier_disk_size.map(|size| size.to_string())),
            ("--tier-store", self.tier_store.as_ref().map(store)),
            ("--tier-write", self.tier_write.as_ref().map(word)),
            ("--tier-load", self.tier_load.as_ref().map(word)),
            ("--tier-grace", self.tier_grace.map(|time| format!("{}ms", time.as_millis()))),
        ];
        flags.into_iter().filter_map(|(flag, value)| Some((flag, value?))).collect()
    }
}

/// The tiers as a line of a memory plan. `memory_bytes`: of the host, as [`TiersSection::memory_bytes`] has them; `pinned_bytes`: of them,
/// those that are [locked](pinned_bytes).
pub fn line(tiers: &TiersSection, memory_bytes: u64, pinned_bytes: Option<u64>) -> String {
    let locked = pinned_bytes.map_or(String::new(), |bytes| format!(" ({} locked)", Bytes(bytes)));
    let (memory, stores, write) = (Bytes(memory_bytes), tiers.describe(), tiers.write.name());
    format!("tiers            {memory}{locked}: {stores}, written {write}")
}

/// Memory of the host that a server locks in place for its tiers; `None` if it locks none.
pub fn pinned_bytes(tiers: &TiersSection, device: &dyn Footprint) -> Option<u64> {
    Some(tiers.pinned_bytes()).filter(|bytes| *bytes > 0 && device.pins_blocks())
}

/// The word for a choice.
fn word(choice: &impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
}

/// Refuses tiers for a model that cannot use them, and places that cannot be opened, also of shared sessions. Opens none.
pub fn check(config: &ServerConfig, engine: &EngineConfig, model: &ModelConfig) -> anyhow::Result<()> {
    let (tiers, sessions) = (&config.tiers, &config.sessions);
    if tiers.is_on() && !engine.paged.suits_tiers(model) {
        let what = "all layers of this model have a sliding window, which tiers do not support: serve it without --tier-ram, \
                    --tier-disk and --tier-store";
        return Err(wrong_usage(what));
    }
    let block_bytes = engine.paged.block_bytes(model);
    tiers.check_disk(block_bytes).context("--tier-disk-size (tiers.disk_bytes)")?;
    let check = |url: &Option<String>| url.as_deref().map_or(Ok(()), check_shared_store);
    check(&tiers.store).context("--tier-store (tiers.store)")?;
    check(&sessions.store).context("--sessions-store (sessions.store)")
}

/// Opens the tiers, if there are some. For those that outlive the process all weights are read once, for their hash.
pub fn open(
    config: &ServerConfig,
    engine: &EngineConfig,
    opened: &Opened,
    weights: WeightFormat,
    registry: &Registry,
) -> anyhow::Result<Option<OpenTiers>> {
    let paged = &engine.paged;
    let fingerprint = match config.tiers.outlives_process() {
        true => {
            let origin = Origin::new(opened.fingerprint()?, weights, &paged.block_aligned(), opened.config());
            fingerprint(&origin, paged.block_tokens, &registry.device().numerics())?
        }
        // This process alone finds them, and it serves one model.
        false => Vec::new(),
    };
    let block_bytes = paged.block_bytes(opened.config());
    let opened = config.tiers.open(&config.scheduler, block_bytes, fingerprint);
    opened.context("--tier-disk, --tier-store ([tiers])")
}
