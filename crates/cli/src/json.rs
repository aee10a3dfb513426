//! The shapes of `--json`, described in docs/json.md. `version` changes when a field changes its meaning or is removed;
//! new fields may be added.
use kvist_device::{Bytes, Purpose};
use kvist_engine::generate::Generation;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::session::ModelSession;
use kvist_engine::speculate::Counts;
use kvist_model::Model;
use kvist_model::config::ModelConfig;
use serde::Serialize;

/// Version of every shape here.
pub const VERSION: u32 = 1;

/// Bytes by purpose.
#[derive(Serialize, Clone, Copy)]
pub struct MemoryBytes {
    pub weights: u64,
    pub kv_cache: u64,
    pub scratch: u64,
    pub activations: u64,
    pub total: u64,
}

impl From<kvist_device::Usage> for MemoryBytes {
    fn from(usage: kvist_device::Usage) -> Self {
        MemoryBytes {
            weights: usage.of(Purpose::Weights),
            kv_cache: usage.of(Purpose::KvCache),
            scratch: usage.of(Purpose::Scratch),
            activations: usage.of(Purpose::Activations),
            total: usage.total(),
        }
    }
}

#[derive(Serialize)]
pub struct CacheShape {
    pub backend: String,
    pub kind: String,
    pub k: String,
    pub v: String,
    /// Group size of the newest tokens that packed storages also keep in f16.
    pub kv_recent: u32,
    pub context_tokens: u32,
    pub window: Option<u32>,
    pub sinks: u32,
    /// `--keep`, if it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep: Option<String>,
    /// The windows and sinks that the layers' queries really see: the model may have windows of its own.
    pub layer_groups: Vec<LayerGroup>,
}

#[derive(Serialize)]
pub struct LayerGroup {
    pub layers: usize,
    pub window: Option<u32>,
    pub sinks: u32,
}

impl CacheShape {
    pub fn new(config: &CacheConfig, model: &ModelConfig) -> Self {
        let layout = model.layout();
        let group = |(g, group): (usize, kvist_cache::kinds::GroupSpec)| LayerGroup {
            layers: layout.layers.iter().filter(|layer| layer.group.0 as usize == g).count(),
            window: group.visibility.window,
            sinks: group.visibility.sinks,
        };
        CacheShape {
            layer_groups: config.groups(model).into_iter().enumerate().map(group).collect(),
            backend: config.backend.clone(),
            kind: config.kind.clone(),
            k: config.k.to_string(),
            v: config.v.to_string(),
            kv_recent: config.recent.tokens,
            context_tokens: config.context_tokens,
            window: config.window,
            sinks: config.sinks,
            keep: config.keep.map(|keep| keep.to_string()),
        }
    }
}

/// `kvist run --json`
#[derive(Serialize)]
pub struct Run {
    pub version: u32,
    pub model: String,
    pub prompt: String,
    pub text: String,
    /// The model's reasoning, if its format separates that from the answer.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reasoning: String,
    pub tokens: Vec<u32>,
    pub finish: &'static str,
    pub seed: u64,
    pub prompt_tokens: usize,
    pub prefill_seconds: f64,
    pub prefill_tokens_per_second: f64,
    pub decode_seconds: f64,
    pub decode_tokens_per_second: f64,
    /// What `--speculate` achieved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Counts>,
    /// With `--resume`: tokens before the prompt that were not computed again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_tokens: Option<usize>,
    /// With `--keep`: tokens removed from the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed_tokens: Option<u64>,
    pub cache: CacheShape,
    /// Reserved at the end of the run.
    pub used: MemoryBytes,
    /// The upper bound.
    pub bound: MemoryBytes,
    pub kv_bytes_read: u64,
    /// Peak resident set less the file-backed pages that are resident now, where the system reports it. Pages of a
    /// weight file that was mapped only while it was loaded are part of the peak.
    pub process_peak_bytes: Option<u64>,
}

impl Run {
    pub fn new(
        model: &Model,
        session: &ModelSession,
        plan: &MemoryPlan,
        prompt: &str,
        (generation, reasoning): (&Generation, String),
        seed: u64,
        speculation: Option<Counts>,
    ) -> Self {
        let used = model.budget().usage();
        let bound = plan.usage.with(Purpose::Weights, used.of(Purpose::Weights));
        Run {
            version: VERSION,
            model: model.name().to_string(),
            prompt: prompt.to_string(),
            text: generation.text.clone(),
            reasoning,
            tokens: generation.tokens.clone(),
            finish: generation.finish.name(),
            seed,
            prompt_tokens: generation.prompt_tokens,
            prefill_seconds: generation.prefill.as_secs_f64(),
            prefill_tokens_per_second: generation.prefill_rate(),
            decode_seconds: generation.decode.as_secs_f64(),
            decode_tokens_per_second: generation.decode_rate(),
            speculation,
            resumed_tokens: None,
            removed_tokens: session.config().keep.map(|_| session.removed_tokens()),
            cache: CacheShape::new(session.config(), model.config()),
            used: used.into(),
            bound: bound.into(),
            kv_bytes_read: session.counters().bytes_read,
            process_peak_bytes: peak_bytes(),
        }
    }

    /// The human-readable summary, for stderr.
    pub fn summary(&self) -> String {
        let kv = &self.cache;
        let mut lines = format!(
            "\nprompt {} tokens at {:.0} tokens/s; {} new tokens at {:.1} tokens/s ({}, seed {})\n\
             KV cache {} of at most {} ({}:{} K {} V {}); memory {} of the bound {}",
            self.prompt_tokens,
            self.prefill_tokens_per_second,
            self.tokens.len(),
            self.decode_tokens_per_second,
            self.finish.replace('_', " "),
            self.seed,
            Bytes(self.used.kv_cache),
            Bytes(self.bound.kv_cache),
            kv.backend,
            kv.kind,
            kv.k,
            kv.v,
            Bytes(self.used.total),
            Bytes(self.bound.total),
        );
        if let Some(counts) = &self.speculation {
            lines += &format!("\n{}", speculation_summary(counts));
        }
        if let (Some(removed), Some(keep)) = (self.removed_tokens, &kv.keep) {
            lines += &format!("; {removed} tokens removed, kept {keep}");
        }
        if let Some(peak) = self.process_peak_bytes {
            lines += &format!("; process peak {}", Bytes(peak));
        }
        lines
    }
}

/// One line about `--speculate`.
pub fn speculation_summary(counts: &Counts) -> String {
    let Counts { target_passes, drafted, accepted, .. } = *counts;
    let per_pass = (target_passes + accepted) as f64 / target_passes.max(1) as f64;
    let ended =
        counts.failure.as_ref().map_or(String::new(), |why| format!(", until a drafter failed: {why}"));
    format!(
        "speculation: {accepted} of {drafted} draft tokens accepted, {per_pass:.2} tokens per pass{ended}"
    )
}

/// Peak resident memory of this process, less its mapped file pages now.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    field("VmHWM:")?.checked_sub(field("RssFile:")?)
}
