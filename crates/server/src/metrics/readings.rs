//! Figures counted elsewhere: the engine, its tiers and drafts, the cache, events, connections.
use crate::connections::Connections;
use kvist_engine::serving::{EngineStats, TierStats};
use kvist_engine::speculate::Counts;

/// One figure of the engine: name, type, help, value, and labels with their values.
pub struct Reading(
    pub &'static str,
    pub &'static str,
    pub &'static str,
    pub f64,
    pub Vec<(&'static str, String)>,
);

/// Gauges and counters of the engine.
pub fn of_engine(stats: &EngineStats) -> Vec<Reading> {
    let usage = stats.used_cells as f64 / stats.capacity_cells.max(1) as f64;
    let gauge = |name, help, value: f64| Reading(name, "gauge", help, value, Vec::new());
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64, Vec::new());
    let c = &stats.counters;
    let mut readings = vec![
        gauge("vllm:num_requests_running", "Requests in the batch.", stats.running as f64),
        gauge(
            "vllm:num_requests_waiting",
            "Requests waiting for admission to the batch.",
            stats.waiting as f64,
        ),
        gauge("vllm:kv_cache_usage_perc", "Share of the KV cells that requests use; 1 means all.", usage),
        count("vllm:num_preemptions_total", "Preemptions of requests.", c.preemptions),
        gauge("kvist_cells_held", "KV cells that requests use.", stats.used_cells as f64),
        gauge(
            "kvist_cells_idle",
            "KV cells that are cached in the prefix index and not used by any request.",
            stats.evictable_cells as f64,
        ),
        gauge(
            "kvist_cells_free",
            "KV cells that are neither used by a request nor cached in the prefix index.",
            stats.free_cells as f64,
        ),
        count("kvist_blocks_stored_total", "Blocks added to the prefix index.", stats.stored_blocks),
        count("kvist_blocks_evicted_total", "Blocks evicted from the prefix index.", stats.evicted_blocks),
        gauge(
            "kvist_prefix_cache_recent_hit_ratio",
            "Share of the tokens of the last 1000 prompts that were found in the prefix index; 1 means all. A \
             prompt counts again when a preempted request is readmitted.",
            stats.recent_hits.ratio().unwrap_or(0.0),
        ),
        gauge("kvist_kv_bytes", "Bytes reserved for K and V.", stats.kv_bytes as f64),
        count("kvist_kv_bytes_read_total", "Bytes of K and V that attention has read.", stats.kv_bytes_read),
        Reading(
            "kvist_busy_seconds_total",
            "counter",
            "Seconds spent in steps.",
            stats.busy_ns as f64 / 1e9,
            Vec::new(),
        ),
        count("kvist_steps_total", "Steps that succeeded.", c.steps),
        count("kvist_failed_steps_total", "Steps that failed.", c.failed_steps),
        count("kvist_computed_tokens_total", "Tokens computed.", c.computed_tokens),
        count("kvist_lost_tokens_total", "Computed tokens that preemptions discarded.", c.lost_tokens),
    ];
    readings.extend(stats.speculation.iter().flat_map(of_speculation));
    let retained = stats.retained_tokens as f64;
    readings.push(Reading(
        "kvist_retained_tokens",
        "gauge",
        "Tokens of prompts that requests asked to keep.",
        retained,
        Vec::new(),
    ));
    let removed = "Tokens removed to keep requests within their budget (cache.keep).";
    readings.extend(stats.removed_tokens.map(|n| count("kvist_tokens_removed_total", removed, n)));
    readings.extend(stats.tiers.iter().flat_map(of_tiers));
    readings
}

/// The cache's shape, under vLLM's name: routers that weigh workers by their capacity read its labels.
pub fn of_cache(stats: &EngineStats, block_tokens: u32) -> Reading {
    let n_blocks = stats.capacity_cells / u64::from(block_tokens.max(1));
    let labels = vec![("block_size", block_tokens.to_string()), ("num_gpu_blocks", n_blocks.to_string())];
    Reading("vllm:cache_config_info", "gauge", "The cache: tokens of a block, and blocks.", 1.0, labels)
}

/// Messages for routers.
pub fn of_events(messages: u64) -> Reading {
    let help = "Messages with KV events that were published.";
    Reading("kvist_kv_event_messages_total", "counter", help, messages as f64, Vec::new())
}

/// What tiers below the cache did.
fn of_tiers(tiers: &TierStats) -> Vec<Reading> {
    let c = &tiers.counters;
    let gauge = |name, help, value: u64| Reading(name, "gauge", help, value as f64, Vec::new());
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64, Vec::new());
    let mut readings = vec![
        count("kvist_tier_loads_total", "Loads from tiers that were started.", c.loads),
        count(
            "kvist_tier_failed_loads_total",
            "Loads whose bytes did not arrive or were wrong.",
            c.failed_loads,
        ),
        count("kvist_tier_late_loads_total", "Loads that took too long.", c.late_loads),
        count(
            "kvist_tier_wasted_tokens_total",
            "Tokens of failed, late and cancelled loads: they were computed.",
            c.wasted_tokens,
        ),
        count(
            "kvist_tier_declined_tokens_total",
            "Tokens that a tier had and that were computed because that was expected to be faster.",
            c.declined_tokens,
        ),
        count(
            "kvist_tier_regained_tokens_total",
            "Loaded tokens of preempted requests, which had computed them before.",
            c.regained_tokens,
        ),
        Reading(
            "kvist_tier_load_seconds_total",
            "counter",
            "Seconds that loads took, over those that arrived in time.",
            c.load_ns as f64 / 1e9,
            Vec::new(),
        ),
        count(
            "kvist_tier_stored_blocks_total",
            "Blocks copied out of the cache for tiers; whether a tier wrote them is told by its errors.",
            c.stored_blocks,
        ),
        count(
            "kvist_tier_failed_blocks_total",
            "Blocks that could not be copied out of the cache.",
            c.failed_blocks,
        ),
        count(
            "kvist_tier_skipped_blocks_total",
            "Blocks not copied because too many were on their way.",
            c.skipped_blocks,
        ),
        gauge("kvist_tier_load_bytes", "Bytes on their way from tiers.", tiers.load_bytes),
        gauge("kvist_tier_store_bytes", "Bytes on their way to tiers.", tiers.store_bytes),
    ];
    if let Some(pinned) = &tiers.pinned {
        readings.extend([
            gauge(
                "kvist_tier_pinned_bytes",
                "Memory locked for blocks of the tier in RAM and those on their way there; 0 if the system has refused it.",
                pinned.bytes,
            ),
            gauge("kvist_tier_pinned_used_bytes", "Of it, that of blocks.", pinned.lent_bytes),
            count(
                "kvist_tier_unpinned_blocks_total",
                "Blocks that had no room in it, so that the host copied them once more.",
                pinned.refused_blocks,
            ),
        ]);
    }
    for (store, loaded_tokens) in tiers.stores.iter().zip(c.loaded_tokens) {
        let of = |name, kind, help, value: u64| {
            Reading(name, kind, help, value as f64, vec![("tier", store.name.clone())])
        };
        readings.extend([
            of(
                "kvist_tier_loaded_tokens_total",
                "counter",
                "Prompt tokens loaded from a tier below the cache.",
                loaded_tokens,
            ),
            of("kvist_tier_errors_total", "counter", "Operations of a store that failed.", store.errors),
            of(
                "kvist_tier_unwritten_blocks_total",
                "counter",
                "Blocks that were not written to a tier because it was too slow.",
                store.unwritten_blocks,
            ),
            of(
                "kvist_tier_damaged_blocks_total",
                "counter",
                "Blocks that failed their check and were removed.",
                store.counts.damaged,
            ),
            of(
                "kvist_tier_evicted_blocks_total",
                "counter",
                "Blocks that a tier has dropped to make room, if it knows them.",
                store.counts.evicted,
            ),
            of(
                "kvist_tier_expired_blocks_total",
                "counter",
                "Blocks that were read after their time.",
                store.counts.expired,
            ),
        ]);
        if let Some(bytes) = store.usage.bytes {
            readings.push(of("kvist_tier_bytes", "gauge", "Bytes in a tier, if it knows them.", bytes));
        }
    }
    readings
}

/// What speculation has achieved.
fn of_speculation(counts: &Counts) -> Vec<Reading> {
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64, Vec::new());
    let mut readings = vec![
        count("vllm:spec_decode_num_drafts_total", "Drafts that were verified.", counts.drafts),
        count("vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified.", counts.drafted),
        count(
            "vllm:spec_decode_num_accepted_tokens_total",
            "Draft tokens that were accepted.",
            counts.accepted,
        ),
        Reading(
            "kvist_speculation_failed",
            "gauge",
            "1 if a drafter has failed, which ended speculation.",
            f64::from(u8::from(counts.failure.is_some())),
            Vec::new(),
        ),
    ];
    readings.extend(counts.accepted_per_position.iter().enumerate().map(|(position, accepted)| {
        Reading(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Draft tokens that were accepted, by their position in the accepted path.",
            *accepted as f64,
            vec![("position", position.to_string())],
        )
    }));
    readings
}

/// Gauges and counters of requests and connections that were refused or closed because a limit was reached.
pub(crate) fn of_limits(rejected: u64, connections: &Connections) -> Vec<Reading> {
    let (open, known) = connections.count();
    let gauge = |name, help, value: usize| Reading(name, "gauge", help, value as f64, Vec::new());
    let count = |name, help, value: u64| Reading(name, "counter", help, value as f64, Vec::new());
    vec![
        count(
            "kvist_queue_full_total",
            "Requests refused because the queue was full for their key.",
            rejected,
        ),
        gauge("kvist_connections", "Open connections, without the reserve.", open),
        gauge(
            "kvist_connections_known",
            "Open connections that have sent a known API key, without the reserve.",
            known,
        ),
        count(
            "kvist_connections_displaced_total",
            "Connections closed in favour of new ones while the server waited for the client.",
            connections.displaced(),
        ),
    ]
}
