//! What a server takes: whether it fits, and `--dry-run`.
use super::args::Args;
use super::speculation::SpeculationPlan;
use super::tiers;
use crate::{json, memory as host, output};
use anyhow::Context;
use kvist_device::{Bytes, Purpose, Registry};
use kvist_engine::memory::MemoryPlan;
use kvist_model::Opened;
use kvist_server::ServerConfig;
use serde::Serialize;

/// `kvist serve --dry-run --json`
#[derive(Serialize)]
struct Plan {
    version: u32,
    model: String,
    cache_tokens: u32,
    block_tokens: u32,
    k: String,
    v: String,
    kv_recent: u32,
    max_batch: u32,
    max_batch_tokens: u32,
    /// Absent if the server does not speculate.
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<SpeculationPlan>,
    /// Memory of the host for tiers below the cache, and for what is on its way; absent without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    tier_bytes: Option<u64>,
    /// Of them, those that are locked in place for the GPU; absent if none are.
    #[serde(skip_serializing_if = "Option::is_none")]
    tier_pinned_bytes: Option<u64>,
    /// What a tier takes on a disk; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    tier_disk_bytes: Option<u64>,
    /// Memory of the model and its cache; never exceeded.
    bound: json::MemoryBytes,
    /// Memory of all requests together: while they are prepared, and their prompts from then on.
    requests_bytes: u64,
    /// The sum, a draft model included, which must be available. On a device with memory of its own without `host_bytes`.
    total_bytes: u64,
    /// Of the device, or `--memory`.
    available_bytes: Option<u64>,
    /// What requests and tiers take of the host's memory, beside a device with memory of its own; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    host_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_available_bytes: Option<u64>,
}

/// What a server needs besides the weights, in bytes.
pub struct Needed {
    /// Of the cache.
    pub tokens: u32,
    /// Working memory included.
    pub cache: u64,
    pub requests: u64,
    pub tiers: u64,
    pub draft: Option<u64>,
    /// The device has memory of its own: requests and tiers take the host's.
    pub is_apart: bool,
}

impl Needed {
    /// What it takes of the device's memory beside the model and its session, and what of the host's.
    fn parts(&self) -> (u64, u64) {
        let others = self.requests.saturating_add(self.tiers);
        let (device, host) = if self.is_apart { (0, others) } else { (others, 0) };
        (device.saturating_add(self.draft.unwrap_or(0)), host)
    }

    /// Refuses a server that does not fit into the `free` bytes that the weights leave, or into the `host` bytes that are
    /// free beside a device with memory of its own. `longest` is the longest cache that fits into so many bytes.
    pub fn check(
        &self,
        free: u64,
        total: u64,
        host: Option<u64>,
        adapter: Option<&str>,
        longest: impl Fn(u64) -> u32,
    ) -> anyhow::Result<()> {
        let free = free.saturating_sub(self.draft.unwrap_or(0));
        if self.is_apart
            && let Some(host) = host
            && self.requests.saturating_add(self.tiers) > host
        {
            anyhow::bail!(
                "requests need {} of the host's memory and the tiers {}, and {} are free there; try a smaller --tier-ram, \
                 --tier-disk-size, --max-queue or --max-body",
                Bytes(self.requests),
                Bytes(self.tiers),
                Bytes(host)
            );
        }
        let (requests, tiers) = if self.is_apart { (0, 0) } else { (self.requests, self.tiers) };
        let taken = self.cache.saturating_add(requests);
        if taken.saturating_add(tiers) <= free {
            return Ok(());
        }
        if taken <= free {
            anyhow::bail!(
                "the tiers need {} (with what is on its way), and {} are free besides the rest; try a smaller --tier-ram \
                 or --tier-disk-size",
                Bytes(self.tiers),
                Bytes(free - taken)
            );
        }
        let weights = if self.draft.is_some() { "the weights and the draft model" } else { "the weights" };
        let on = adapter.map_or(String::new(), |adapter| format!(" on {adapter}"));
        let context = match longest(free.saturating_sub(requests)) {
            0 => "a smaller --context".to_string(),
            tokens => format!("--context {tokens}"),
        };
        anyhow::bail!(
            "the cache of {} tokens needs {}{on} (working memory included), requests need {}, and {} of {} are free besides \
             {weights}; try {context}, --kv q8, --max-batch-tokens, --max-batch, --max-queue or --max-body",
            self.tokens,
            Bytes(self.cache),
            Bytes(self.requests),
            Bytes(free),
            Bytes(total)
        );
    }
}

/// Shows what a server takes, and of what: `available` are the bytes of the budget. Whether it fits, [`Needed::check`] says.
pub fn show_plan(
    args: &Args,
    config: &ServerConfig,
    (opened, registry): (&Opened, &Registry),
    plan: &MemoryPlan,
    speculation: Option<SpeculationPlan>,
    needed: &Needed,
    available: Option<u64>,
) -> anyhow::Result<()> {
    let weights = opened.weight_bytes(registry.device(), args.model.weights)?;
    let bound = plan.usage.with(Purpose::Weights, weights);
    let total = bound.checked_total().context("these sizes overflow: no machine has enough memory")?;
    let (beside, host_bytes) = needed.parts();
    let total = total.saturating_add(beside);
    let host_available = host::available().filter(|_| needed.is_apart);
    let report = Plan {
        version: json::VERSION,
        model: config.model_name(opened.name()),
        cache_tokens: config.cache_tokens(opened.config().context),
        block_tokens: config.cache.block_tokens,
        k: config.cache.kv.to_string(),
        v: config.cache.values().to_string(),
        kv_recent: config.cache.recent_tokens(),
        max_batch: config.scheduler.max_batch,
        max_batch_tokens: config.scheduler.max_batch_tokens,
        speculation,
        tier_bytes: config.tiers.is_on().then_some(needed.tiers),
        tier_pinned_bytes: tiers::pinned_bytes(&config.tiers, registry.device()),
        tier_disk_bytes: config.tiers.disk_dir.is_some().then_some(config.tiers.disk_bytes),
        bound: bound.into(),
        requests_bytes: needed.requests,
        total_bytes: total,
        available_bytes: available,
        host_bytes: needed.is_apart.then_some(host_bytes),
        host_available_bytes: host_available,
    };
    if args.json {
        output::show_json(&report)?;
    } else {
        let mut lines = vec![
            format!("model            {}", report.model),
            format!(
                "cache            {} tokens in blocks of {}, K {}, V {}",
                report.cache_tokens, report.block_tokens, report.k, report.v
            ),
            format!(
                "batch            {} requests, {} tokens a step",
                report.max_batch, report.max_batch_tokens
            ),
            String::new(),
            format!("weights          {}", Bytes(report.bound.weights)),
            format!("KV cache         {}", Bytes(report.bound.kv_cache)),
            format!("  per token      {}", Bytes(plan.kv_bytes_per_token)),
            format!("scratch          {}", Bytes(report.bound.scratch)),
            format!("activations      {}", Bytes(report.bound.activations)),
            format!("requests         {}", Bytes(needed.requests)),
        ];
        if let Some(speculation) = &report.speculation {
            let SpeculationPlan { speculate, max_draft_tokens, .. } = speculation;
            lines.insert(
                3,
                format!("speculation      {speculate}, at most {max_draft_tokens} draft tokens a step"),
            );
        }
        if let Some(bytes) = report.tier_bytes {
            lines.push(tiers::line(&config.tiers, bytes, report.tier_pinned_bytes));
        }
        if let Some(bytes) = needed.draft {
            lines.push(format!("draft model      {}", Bytes(bytes)));
        }
        lines.push(format!("total bound      {}", Bytes(total)));
        if let Some(available) = available {
            lines.push(format!("available        {}", Bytes(available)));
        }
        if let Some(bytes) = report.host_bytes {
            let free = host_available.map_or(String::new(), |free| format!(" of {} available", Bytes(free)));
            lines.push(format!("host's part      {}{free}: requests and tiers", Bytes(bytes)));
        }
        output::show(&(lines.join("\n") + "\n"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU of 8 GB in a host of 64 GB: a RAM tier takes the host's memory, the cache the GPU's.
    #[test]
    fn tiers_beside_a_gpu_take_the_hosts_memory() {
        const GB: u64 = 1 << 30;
        let check = |is_apart: bool, cache: u64, tiers: u64| {
            let needed = Needed {
                tokens: 1,
                cache: cache * GB,
                requests: GB,
                tiers: tiers * GB,
                draft: None,
                is_apart,
            };
            let checked = needed.check(8 * GB, 8 * GB, Some(64 * GB), None, |_| 0);
            checked.map_err(|error| error.to_string())
        };
        check(true, 8, 16).unwrap();
        let refused = check(true, 8, 64).unwrap_err();
        assert!(refused.contains("of the host's memory") && refused.contains("--tier-ram"), "{refused}");
        assert!(check(true, 9, 0).unwrap_err().contains("--context"));
        // Where they share it, everything must fit.
        check(false, 5, 2).unwrap();
        assert!(check(false, 5, 3).unwrap_err().contains("--tier-ram"));
        assert!(check(false, 8, 0).unwrap_err().contains("requests need"));
        // The dry run compared the sum of both with the host's memory.
        let needed =
            |is_apart| Needed { tokens: 1, cache: GB, requests: 2, tiers: 3, draft: Some(4), is_apart };
        assert_eq!((needed(true).parts(), needed(false).parts()), ((4, 5), (9, 0)));
    }
}
