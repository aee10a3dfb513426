//! Memory that a model and its cache need, computed before anything is loaded. Uses the same arithmetic as the budget.
use crate::keep::{KeepBy, KeepConfig};
use kvist_cache::Cache;
use kvist_cache::kinds::{self, GroupSpec, KindTraits, Visibility};
use kvist_device::*;
use kvist_model::Error;
use kvist_model::Opened;
use kvist_model::config::ModelConfig;
use kvist_model::weights::WeightFormat;
use std::sync::Arc;

/// Tokens of a recent group, which is read in f16. Equals the block size of the server's cache.
pub const RECENT_TOKENS: u32 = 16;

/// Number of sequences whose newest tokens a session keeps in f16, in kinds with several sequences.
pub const RECENT_SEQUENCES: u32 = 8;

/// The cache policy of one session. The architecture comes from the model.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    pub backend: String,
    pub kind: String,
    pub k: Storage,
    pub v: Storage,
    /// The number of tokens stored at once over all sequences. A ring computes its own number of cells. With
    /// [`keep`](Self::keep), the longest text: then the cells follow from the budget.
    pub context_tokens: u32,
    /// Tokens of the largest step. This is also the prefill chunk size.
    pub max_step_tokens: u32,
    /// In addition to the model's own windows: the number of positions that a query sees, and (`sinks`) the number of
    /// first positions that stay visible.
    pub window: Option<u32>,
    pub sinks: u32,
    /// Rows of logits computed at once: 1 for a conversation, more for batches and evaluation.
    pub max_rows: u32,
    /// The newest tokens, which quantised storages also keep in f16.
    pub recent: Recent,
    /// Keep only some tokens of a text that grows beyond this budget. Sessions of one text only.
    pub keep: Option<KeepConfig>,
}

/// Tokens of a step on a backend, at most, where the user does not say: over CUDA long prompts are read faster in longer steps (docs/cuda.md).
pub fn step_tokens(backend: &str) -> u32 {
    if backend == "cuda" { 1024 } else { 256 }
}

impl CacheConfig {
    pub fn new(context_tokens: u32) -> Self {
        CacheConfig {
            backend: "cpu".into(),
            kind: "contiguous".into(),
            k: Storage::F16,
            v: Storage::F16,
            context_tokens,
            max_step_tokens: step_tokens("cpu"),
            window: None,
            sinks: 0,
            max_rows: 1,
            recent: Recent { tokens: RECENT_TOKENS, sequences: RECENT_SEQUENCES },
            keep: None,
        }
    }

    /// Tokens that the cells are for: [`context_tokens`](Self::context_tokens), or with [`keep`](Self::keep) the budget and
    /// a step. A step that does not fit into them makes the session remove tokens first.
    pub fn capacity_tokens(&self) -> u32 {
        match self.keep {
            None => self.context_tokens,
            Some(keep) => {
                let budget = keep.budget(if self.kind == "paged" { kinds::BLOCK_TOKENS } else { 1 });
                budget.saturating_add(self.max_step_tokens).min(self.context_tokens)
            }
        }
    }

    /// Refuses a [`keep`](Self::keep) that this cache or the device cannot do.
    pub fn check_keep(&self, device: &dyn Footprint) -> Result<(), Error> {
        let Some(keep) = self.keep else { return Ok(()) };
        if !self.kind_traits().many_sequences {
            return Err(Error::Usage(format!(
                "a cache of kind {} removes nothing from the middle: to keep {keep}, use cells, tree or paged",
                self.kind
            )));
        }
        if keep.by != KeepBy::None && !device.returns_attention_mass() {
            return Err(Error::Usage(format!(
                "the device {} does not return attention mass, so it cannot keep {keep}: use by=none, or the CPU",
                device.info().name
            )));
        }
        Ok(())
    }

    /// The layer groups of `model` under this policy. If the model and the policy both have a window, the shorter one
    /// applies: the policy's with its sinks, the model's without sinks.
    pub fn groups(&self, model: &ModelConfig) -> Vec<GroupSpec> {
        let windows = model.group_windows();
        let group = |native: Option<u32>| {
            let visibility = match (native, self.window) {
                (None, None) => Visibility::FULL,
                (None, Some(window)) => Visibility { window: Some(window), sinks: self.sinks },
                (Some(native), Some(window)) if window < native => {
                    Visibility { window: Some(window), sinks: self.sinks }
                }
                (Some(native), _) => Visibility { window: Some(native), sinks: 0 },
            };
            GroupSpec {
                capacity_tokens: self.capacity_tokens(),
                visibility,
                max_step_tokens: self.max_step_tokens,
            }
        };
        windows.into_iter().map(group).collect()
    }

    /// The last position up to `position` at which a sequence can be truncated and then continue as if it had never
    /// been longer. The f16 rows of the recent group that contains `position` may be gone, so this is the start of that
    /// group.
    pub fn cut_before(&self, position: u32) -> u32 {
        let mut groups = self.recent.of_storages(self.k, self.v).tokens;
        if self.keep.is_some() && self.kind == "paged" {
            groups = groups.max(kinds::BLOCK_TOKENS); // the block in which the text would end may be gone
        }
        position - position.checked_rem(groups).unwrap_or(0)
    }

    /// The largest step.
    pub fn step_limits(&self) -> StepLimits {
        StepLimits { max_tokens: self.max_step_tokens as usize, max_rows: self.max_rows.max(1) as usize }
    }

    /// The properties of the kind. A kind that does not exist is refused when the cache is built.
    pub fn kind_traits(&self) -> KindTraits {
        kinds::traits(&self.kind).unwrap_or(KindTraits {
            bounded: false,
            many_sequences: true,
            verifies_trees: false,
        })
    }

    /// The cache kind fills in the capacities.
    pub fn pool_spec(&self, layout: &Layout, budget: &Arc<MemoryBudget>) -> PoolSpec {
        PoolSpec {
            layout: layout.clone(),
            k: self.k,
            v: self.v,
            capacity_cells: Vec::new(),
            max_step_tokens: self.max_step_tokens,
            budget: budget.clone(),
            channels: None,
            recent: match self.kind_traits().many_sequences {
                true => self.recent,
                false => Recent { sequences: 1, ..self.recent },
            },
        }
    }
}

/// Bytes by purpose, before anything is allocated.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// The upper bound: weights, a full cache, and scratch and activations of the largest step.
    pub usage: Usage,
    /// How many bytes of [`usage`](Self::usage) lie in the host's memory, on a device that has its own. 0 on the CPU, whose
    /// memory is the host's.
    pub host_bytes: u64,
    /// KV bytes per token over all layers, scales included.
    pub kv_bytes_per_token: u64,
    /// Cells of each layer group.
    pub capacity_cells: Vec<u32>,
}

impl MemoryPlan {
    /// The plan of a session alone: [`Purpose::Weights`] is 0.
    pub fn of_session(model: &ModelConfig, registry: &Registry, config: &CacheConfig) -> Result<Self, Error> {
        let groups = config.groups(model);
        let (cache, backend) = registry.plan(&config.backend, &config.kind, &groups)?;
        Self::of_cache(model, registry, backend, &cache, config)
    }

    /// The plan of an existing cache. Of `config`, only the fields about bytes are used.
    pub fn of_cache(
        model: &ModelConfig,
        registry: &Registry,
        backend: &dyn Backend,
        cache: &Cache,
        config: &CacheConfig,
    ) -> Result<Self, Error> {
        let overflow = || Error::Usage("these sizes overflow: no machine has enough memory".into());
        let layout = model.layout();
        let spec = PoolSpec {
            capacity_cells: cache.capacity_cells(),
            ..config.pool_spec(&layout, &MemoryBudget::unlimited())
        };
        backend.check_spec(&spec)?;
        let usage = backend.bound(&spec).ok_or_else(overflow)?;
        let (device, shape, limits) = (registry.device(), model.shape(), config.step_limits());
        let activations = device.activation_bytes(&shape, &limits).ok_or_else(overflow)?;
        let of_host = [device.host_bytes(&shape, &limits), backend.host_bytes(&spec)];
        let host_bytes = of_host.into_iter().try_fold(0u64, |sum, bytes| sum.checked_add(bytes?));
        Ok(MemoryPlan {
            host_bytes: host_bytes.ok_or_else(overflow)?,
            usage: usage.with(Purpose::Activations, activations),
            kv_bytes_per_token: spec.bytes_per_token(),
            capacity_cells: spec.capacity_cells,
        })
    }

    /// The total without the weights.
    pub fn session_bound(&self) -> u64 {
        self.usage.with(Purpose::Weights, 0).total()
    }

    /// The plan of a session over a model that is not loaded yet. Fails if model and session together do not fit into
    /// the budget. `min` is the shortest useful context: the advice in the error does not go below it.
    pub fn admit(
        opened: &Opened,
        format: WeightFormat,
        registry: &Registry,
        config: &CacheConfig,
        min: usize,
        budget: &MemoryBudget,
    ) -> Result<Self, Error> {
        let model = opened.config();
        let plan = Self::of_session(model, registry, config)?;
        let free = Self::free_after(opened, registry, format, budget)?;
        if plan.session_bound() <= free {
            return Ok(plan);
        }
        Err(plan.too_large(model, registry, config, min, free, budget.total()))
    }

    /// The longest context for which a session fits into `free` bytes: that of `config`, or else a multiple of 64
    /// tokens below it. Returns 0 if none fits.
    pub fn longest_context(model: &ModelConfig, registry: &Registry, config: &CacheConfig, free: u64) -> u32 {
        let fits = |context_tokens: u32| {
            let config = CacheConfig { context_tokens, ..config.clone() };
            Self::of_session(model, registry, &config).is_ok_and(|plan| plan.session_bound() <= free)
        };
        Self::longest(config.context_tokens, fits)
    }

    /// The longest context for which `fits` is true: `max`, or else a multiple of 64 tokens below it. Returns 0 if
    /// none fits. `fits` must be monotonic: true for every context shorter than one that fits.
    pub fn longest(max: u32, fits: impl Fn(u32) -> bool) -> u32 {
        if fits(max) {
            return max;
        }
        let (mut low, mut high) = (0, max / 64);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle * 64) { low = middle } else { high = middle - 1 }
        }
        low * 64
    }

    /// Bytes that are free after the weights are loaded.
    pub fn free_after(
        opened: &Opened,
        registry: &Registry,
        format: WeightFormat,
        budget: &MemoryBudget,
    ) -> Result<u64, Error> {
        let asked = opened.weight_bytes(registry.device(), format)?;
        let (free, total) = (budget.free(), budget.total());
        free.checked_sub(asked)
            .ok_or_else(|| OutOfBudget { purpose: Purpose::Weights, asked, free, total }.into())
    }

    /// The error for a session that does not fit, with advice on what would fit.
    pub(crate) fn too_large(
        &self,
        model: &ModelConfig,
        registry: &Registry,
        config: &CacheConfig,
        min: usize,
        free: u64,
        total: u64,
    ) -> Error {
        let fits = |config: &CacheConfig| {
            Self::of_session(model, registry, config).is_ok_and(|plan| plan.session_bound() <= free)
        };
        let mut advice = Vec::new();
        // The first combination that fits: a smaller dtype, a smaller chunk, or both.
        let storages = [config.k, Storage::Q8, Storage::Q4];
        let chunks = [config.max_step_tokens, 256, 64, 16];
        for (storage, chunk) in chunks.iter().flat_map(|chunk| storages.map(|storage| (storage, *chunk))) {
            let keeps = storage == config.k;
            let v = if keeps { config.v } else { storage };
            let max_step_tokens = chunk.min(config.max_step_tokens);
            let max_rows = config.max_rows.min(max_step_tokens);
            if fits(&CacheConfig { k: storage, v, max_step_tokens, max_rows, ..config.clone() }) {
                let kv = (!keeps).then(|| format!("--kv {storage}"));
                let chunk = (chunk < config.max_step_tokens).then(|| format!("--chunk {chunk}"));
                advice.push(kv.into_iter().chain(chunk).collect::<Vec<_>>().join(" "));
                break;
            }
        }
        // The longest context that fits, with the largest chunk that leaves room for one.
        for chunk in chunks {
            let max_step_tokens = chunk.min(config.max_step_tokens);
            let max_rows = config.max_rows.min(max_step_tokens);
            let shorter = CacheConfig { max_step_tokens, max_rows, ..config.clone() };
            let longest = Self::longest_context(model, registry, &shorter, free);
            if longest > 0 && longest as usize >= min {
                let chunk = (chunk < config.max_step_tokens).then(|| format!(" --chunk {chunk}"));
                advice.push(format!("--context {longest}{}", chunk.unwrap_or_default()));
                break;
            }
        }
        if advice.is_empty() {
            advice.push("a smaller model, or more memory with --memory".into());
        }
        Error::CacheTooLarge {
            context: config.context_tokens,
            asked: self.session_bound(),
            free,
            total,
            device: registry.device().adapter().map_or(String::new(), |adapter| format!(" on {adapter}")),
            advice: advice.join(" or "),
        }
    }
}

impl MemoryPlan {
    /// KV bytes that decoding one token reads at a full cache, counting per layer only what its window makes visible.
    pub fn kv_bytes_visible(&self, model: &ModelConfig, config: &CacheConfig) -> u64 {
        let groups = config.groups(model);
        let layout = model.layout();
        let seen = |layer: &LayerSpec| {
            let visibility = groups[layer.group.0 as usize].visibility;
            let window = visibility.window.map_or(u32::MAX, |w| w.saturating_add(visibility.sinks));
            u64::from(window.min(config.capacity_tokens()))
        };
        let row = |layer: &LayerSpec| layer.cell_bytes(config.k, config.v);
        // Layers that share another layer's KV store nothing, but read.
        layout.layers.iter().map(|l| seen(l) * u64::from(l.n_kv_heads) * row(l)).sum()
    }

    /// Stored bits per element of K and V, scales included.
    pub fn kv_bits_per_value(&self, model: &ModelConfig) -> f64 {
        let values: u64 =
            model.layout().owners().map(|(_, l)| u64::from(l.n_kv_heads * (l.k_dim + l.v_dim))).sum();
        8.0 * self.kv_bytes_per_token as f64 / values.max(1) as f64
    }
}
