//! A disk tier to serve with, and what the simulator has to know of it.
use crate::options::{Size, wrong_usage};
use anyhow::Context;
use clap::ValueHint;
use kvist_engine::serving::{EngineConfig, TierConfig};
use kvist_model::config::ModelConfig;
use kvist_server::config::{OpenTiers, TiersSection};
use kvist_store::{BlockStore, Bytes, KeyChain};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

#[derive(clap::Args)]
pub struct DiskArgs {
    /// Serve the load twice, without a tier and with one in this directory, and compare the goodput. It must be empty, or have
    /// been used by this command
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    tier_disk: Option<PathBuf>,
    /// What that directory takes
    #[arg(long, value_name = "SIZE", default_value = "4GiB", requires = "tier_disk")]
    tier_disk_size: Size,
}

/// A disk tier, measured.
pub struct DiskTier {
    pub open: OpenTiers,
    pub capacity_bytes: u64,
    pub bytes_per_s: u64,
    pub latency: Duration,
}

/// Blocks to measure with: as many as a load of some thousand tokens has.
const MEASURED: usize = 256;
/// As many as the engine reads at a time.
const AT_ONCE: usize = 8;

impl DiskArgs {
    /// Opens the tier, if there is one, and measures it. `engine`: what will be served.
    pub fn open(&self, engine: &EngineConfig, model: &ModelConfig) -> anyhow::Result<Option<DiskTier>> {
        let Some(dir) = &self.tier_disk else { return Ok(None) };
        let section = TiersSection {
            disk_dir: Some(dir.clone()),
            disk_bytes: self.tier_disk_size.0,
            ..TiersSection::default()
        };
        let block_bytes = engine.paged.block_bytes(model);
        // Other runs' blocks are not found.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let fingerprint = format!("bench predict at {} ns", now.as_nanos()).into_bytes();
        if !TiersSection::HAS_DISK {
            return Err(wrong_usage(
                "--tier-disk needs a kvist that was built with it: cargo build --release --features disk-tier",
            ));
        }
        let open =
            section.open(&engine.scheduler, block_bytes, fingerprint)?.context("the section has a tier")?;
        let store = open.config().stores.first().context("it is open")?.store.clone();
        let tasks = open.config().runtime.context("it runs on a runtime")?;
        let (bytes_per_s, latency) = tasks.block_on(measure(store, block_bytes as usize))?;
        Ok(Some(DiskTier { open, capacity_bytes: self.tier_disk_size.0, bytes_per_s, latency }))
    }
}

impl DiskTier {
    /// For an engine: with the measured figures as the first guess.
    pub fn config(&self) -> TierConfig {
        let mut config = self.open.config();
        for tier in &mut config.stores {
            (tier.bytes_per_s, tier.latency) = (self.bytes_per_s, self.latency);
        }
        config
    }
}

/// Bytes per second of blocks that are read several at a time, and the time of one alone; medians.
async fn measure(store: Arc<dyn BlockStore>, block_bytes: usize) -> anyhow::Result<(u64, Duration)> {
    let tokens: Vec<u32> = (0..MEASURED as u32).collect();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let keys = KeyChain::root(format!("measured at {}", now.as_nanos()).as_bytes(), "").keys(&tokens, 1);
    for key in &keys {
        store.put(*key, Bytes::from(vec![1; block_bytes]), None).await?;
    }
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let began = Instant::now();
        let mut reads = tokio::task::JoinSet::new();
        let mut left = keys.iter().copied();
        loop {
            while reads.len() < AT_ONCE
                && let Some(key) = left.next()
            {
                let store = store.clone();
                reads.spawn(async move { store.get(&key).await });
            }
            let Some(read) = reads.join_next().await else { break };
            read??.context("a block that was just written is gone: give a larger --tier-disk-size")?;
        }
        rates.push((MEASURED * block_bytes) as f64 / began.elapsed().as_secs_f64());
        let began = Instant::now();
        store.get(&keys[0]).await?;
        times.push(began.elapsed());
    }
    for key in &keys {
        store.remove(key).await?;
    }
    rates.sort_by(f64::total_cmp);
    times.sort();
    Ok((rates[2] as u64, times[2]))
}
