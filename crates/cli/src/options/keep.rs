//! `--keep`: which tokens stay in the cache when a text outgrows it.
use super::wrong_usage;
use kvist_engine::keep::{KeepBy, KeepConfig};
use kvist_engine::memory::CacheConfig;

#[derive(clap::Args, Clone, Debug)]
pub struct KeepArgs {
    /// Keep only these tokens of a long text: sinks=4,recent=1024,top=2048 are the first, the newest, and those between
    /// them that matter most, by=last (attention of the newest queries), attention (of all) or none; --context is then the
    /// longest text. Approximate: answers change
    #[arg(long, value_name = "BUDGET")]
    pub keep: Option<KeepConfig>,
}

impl KeepArgs {
    /// Adds the budget to `config`. `asked` is `--kind`: without it the cache is one that removes from the middle.
    pub fn prepare(&self, config: &mut CacheConfig, asked: Option<&str>) -> anyhow::Result<()> {
        let Some(keep) = self.keep else { return Ok(()) };
        match asked {
            None => config.kind = "cells".into(),
            Some("cells" | "tree" | "paged") => {}
            Some(kind) => {
                return Err(wrong_usage(format!(
                    "--keep {keep}: a cache of kind {kind} removes nothing from the middle; use --kind cells, tree or paged"
                )));
            }
        }
        if keep.by != KeepBy::None && !["cpu", "reference"].contains(&config.backend.as_str()) {
            return Err(wrong_usage(format!(
                "--keep {keep}: the device {} does not return attention mass; add by=none",
                config.backend
            )));
        }
        config.keep = Some(keep);
        Ok(())
    }
}
