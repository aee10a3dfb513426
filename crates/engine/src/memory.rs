//! What a model and its cache will take, before anything is loaded: the same arithmetic that the budget records.
use crate::config::ModelConfig;
use crate::error::Error;
use crate::model::Activations;
use kvist_backend::*;
use kvist_cache::kinds::{GroupSpec, Visibility};
use std::sync::Arc;

/// The policy of one session's cache. The architecture comes from the model.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    pub backend: String,
    pub kind: String,
    pub k: Storage,
    pub v: Storage,
    /// Cells: the tokens that may be held at once, over all sequences. A ring derives its own number.
    pub context_tokens: u32,
    /// Tokens of the largest step, which is also the chunk of a prefill.
    pub max_step_tokens: u32,
    /// Beside the model's own windows: positions a query sees, and first positions that stay visible.
    pub window: Option<u32>,
    pub sinks: u32,
    /// Rows of logits wanted at once: 1 for a conversation, more for batches and for evaluation.
    pub max_rows: u32,
}

impl CacheConfig {
    pub fn new(context_tokens: u32) -> Self {
        CacheConfig {
            backend: "cpu".into(),
            kind: "contiguous".into(),
            k: Storage::F16,
            v: Storage::F16,
            context_tokens,
            max_step_tokens: 256,
            window: None,
            sinks: 0,
            max_rows: 1,
        }
    }

    /// The layer groups of `model` under this policy. Where both have a window the shorter one counts; sinks are
    /// kept only for the policy's own window, since a model's window has none.
    pub fn groups(&self, model: &ModelConfig) -> Vec<GroupSpec> {
        let windows = model.group_windows();
        let group = |native: Option<u32>| {
            let visibility = match (native, self.window) {
                (None, None) => Visibility::FULL,
                (None, Some(window)) => Visibility { window: Some(window), sinks: self.sinks },
                (Some(native), policy) => {
                    Visibility { window: Some(native.min(policy.unwrap_or(u32::MAX))), sinks: 0 }
                }
            };
            GroupSpec {
                capacity_tokens: self.context_tokens,
                visibility,
                max_step_tokens: self.max_step_tokens,
            }
        };
        windows.into_iter().map(group).collect()
    }

    /// Capacities are filled in by the kind.
    pub fn pool_spec(&self, layout: &Layout, budget: &Arc<MemoryBudget>) -> PoolSpec {
        PoolSpec {
            layout: layout.clone(),
            k: self.k,
            v: self.v,
            capacity_cells: Vec::new(),
            max_step_tokens: self.max_step_tokens,
            budget: budget.clone(),
        }
    }
}

/// Bytes by purpose, before they are asked for.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// The bound: weights, a full cache, scratch and activations at the largest step.
    pub usage: Usage,
    /// KV bytes one token costs in every layer, scales included.
    pub kv_bytes_per_token: u64,
    /// Cells of each layer group.
    pub capacity_cells: Vec<u32>,
}

impl MemoryPlan {
    /// A session alone: its [`Purpose::Weights`] are 0.
    pub fn of_session(
        model: &ModelConfig,
        registry: &Registry,
        config: &CacheConfig,
    ) -> Result<Self, Error> {
        let overflow = || Error::Usage("these sizes overflow: no machine holds such a cache".into());
        let groups = config.groups(model);
        let (cache, backend) = registry.plan(&config.backend, &config.kind, &groups)?;
        let layout = model.layout();
        let spec = PoolSpec {
            capacity_cells: cache.capacity_cells(),
            ..config.pool_spec(&layout, &MemoryBudget::unlimited())
        };
        let usage = backend.bound(&spec).ok_or_else(overflow)?;
        let activations =
            Activations::bytes(model, config.max_step_tokens as usize, config.max_rows as usize)
                .ok_or_else(overflow)?;
        Ok(MemoryPlan {
            usage: usage.with(Purpose::Activations, activations),
            kv_bytes_per_token: spec.bytes_per_token(),
            capacity_cells: spec.capacity_cells,
        })
    }

    /// Everything but the weights.
    pub fn session_bound(&self) -> u64 {
        self.usage.with(Purpose::Weights, 0).total()
    }

    /// The refusal of a session that does not fit, with what would.
    pub(crate) fn too_large(
        &self,
        model: &ModelConfig,
        registry: &Registry,
        config: &CacheConfig,
        free: u64,
        total: u64,
    ) -> Error {
        let fits = |config: &CacheConfig| {
            Self::of_session(model, registry, config).is_ok_and(|plan| plan.session_bound() <= free)
        };
        let mut advice = Vec::new();
        for storage in [Storage::Q8, Storage::Q4] {
            let smaller = CacheConfig { k: storage, v: storage, ..config.clone() };
            if fits(&smaller) {
                advice.push(format!("--kv {storage}"));
                break;
            }
        }
        // The longest context that fits, to the nearest 256 tokens below.
        let context = |tokens| CacheConfig { context_tokens: tokens, ..config.clone() };
        let (mut low, mut high) = (0, config.context_tokens / 256);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(&context(middle * 256)) { low = middle } else { high = middle - 1 }
        }
        if low > 0 {
            advice.push(format!("--context {}", low * 256));
        }
        if advice.is_empty() {
            advice.push("a smaller model, or more memory with --memory".into());
        }
        Error::CacheTooLarge {
            context: config.context_tokens,
            asked: self.session_bound(),
            free,
            total,
            advice: advice.join(" or "),
        }
    }
}
