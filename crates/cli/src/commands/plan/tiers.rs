//! What the tiers of a server add to a plan: memory of the host, and a disk.
use super::{Args, candidates};
use crate::commands::serve::tiers as served;
use crate::options::{CacheArgs, wrong_usage};
use kvist_device::{Bytes, Footprint};
use kvist_engine::memory::CacheConfig;
use kvist_model::config::ModelConfig;
use kvist_server::config::TiersSection;
use serde::Serialize;

/// The fields have the names that `kvist serve --dry-run --json` gives them.
#[derive(Serialize)]
pub struct Tiers {
    /// Memory of the host: what the tiers hold there, what is on its way, and what a disk's store needs.
    pub tier_bytes: u64,
    /// Of them, those that are locked in place for the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier_pinned_bytes: Option<u64>,
    /// What the tier on a disk takes there, all of it from the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier_disk_bytes: Option<u64>,
    #[serde(skip)]
    line: String,
}

/// The section `[tiers]` that the flags make. With a tier, `cache` becomes that of a server: paged, unless a recommendation
/// compares all kinds.
///
/// # Errors
/// The flags ask for a cache that has no tiers.
pub fn section(args: &Args, recommends: bool, cache: &mut CacheArgs) -> anyhow::Result<TiersSection> {
    let mut section = TiersSection::default();
    args.tiers.apply(&mut section);
    if !section.is_on() {
        return Ok(section);
    }
    match &cache.kind {
        Some(kind) if kind != "paged" => {
            return Err(wrong_usage(format!(
                "--kind {kind}: only kvist serve has tiers, and its cache is paged: leave --kind out, or the tiers"
            )));
        }
        None if !recommends => cache.kind = Some("paged".into()),
        _ => {}
    }
    if cache.window.is_some() {
        return Err(wrong_usage(
            "--window: only kvist serve has tiers, and it has the model's own windows: leave --window out, or the tiers",
        ));
    }
    Ok(section)
}

/// Refuses flags that `kvist serve` would refuse with this model and this cache.
pub fn check(
    args: &Args,
    section: &TiersSection,
    cache: &CacheConfig,
    model: &ModelConfig,
) -> anyhow::Result<()> {
    if args.tiers.as_typed().is_empty() {
        return Ok(());
    }
    let config = candidates::server(cache, section);
    config.check().map_err(|error| wrong_usage(error.to_string()))?;
    served::check(&config, &config.engine(model), model)
}

impl Tiers {
    /// Of a server with this cache. `None` without tiers.
    pub fn of(
        section: &TiersSection,
        cache: &CacheConfig,
        model: &ModelConfig,
        device: &dyn Footprint,
    ) -> Option<Tiers> {
        let tier_bytes = section.memory_bytes(&candidates::server(cache, section).engine(model).paged, model);
        let tier_pinned_bytes = served::pinned_bytes(section, device);
        section.is_on().then(|| Tiers {
            tier_bytes,
            tier_pinned_bytes,
            tier_disk_bytes: section.disk_dir.is_some().then_some(section.disk_bytes),
            line: served::line(section, tier_bytes, tier_pinned_bytes),
        })
    }

    /// `bound`: without the tiers, or nothing if their memory is another one.
    pub fn lines(&self, bound: Option<u64>) -> Vec<String> {
        let sum = bound.map(|bound| bound.saturating_add(self.tier_bytes));
        let sum = sum.map(|sum| format!("with the tiers   {}", Bytes(sum)));
        [Some(self.line.clone()), sum].into_iter().flatten().collect()
    }
}
