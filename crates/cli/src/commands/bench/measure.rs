//! What the measuring commands share: flags, and the loop.
use super::machine::ReadLimit;
use crate::{interrupt, progress};
use kvist_cpu::Compute;
use kvist_device::Storage;
use std::time::Duration;

#[derive(clap::Args)]
pub struct KvArgs {
    /// Storage of K
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    pub k: Storage,
    /// Storage of V
    #[arg(long, default_value = "f16", value_name = "DTYPE")]
    pub v: Storage,
}

/// Commands that take long or short say their own default for `--runs`, by `mut_arg`.
#[derive(clap::Args)]
pub struct RunsArgs {
    /// Measured runs; medians are reported
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Print one JSON document per row, a line each
    #[arg(long)]
    pub json: bool,
}

impl RunsArgs {
    /// Collects the times that `run` returns: one warm-up run, then `runs` runs that count. The read limit, if there is
    /// one, is sampled after each. If `run` returns `None`, or on an interrupt, it ends early with fewer times, maybe none.
    pub fn measure(
        &self,
        compute: &Compute,
        mut limit: Option<&mut ReadLimit>,
        quiet: bool,
        mut run: impl FnMut() -> anyhow::Result<Option<Duration>>,
    ) -> anyhow::Result<Vec<Duration>> {
        let mut runs = Vec::new();
        let bar = progress::bar("measuring", u64::from(self.runs) + 1, quiet);
        for i in 0..=self.runs {
            let Some(taken) = run()? else { break };
            if i > 0 {
                runs.push(taken);
            }
            if let Some(limit) = &mut limit {
                limit.measure(compute);
            }
            bar.inc(1);
            if interrupt::interrupted() && i > 0 {
                break;
            }
        }
        bar.finish_and_clear();
        Ok(runs)
    }
}
