//! The paged cache of an engine: its policy, its block size, and what follows from both for a model.
use crate::memory::{CacheConfig, MemoryPlan};
use kvist_cache::{Cache, PagedSpec, PrefixSpec, RecomputeCost};
use kvist_device::{Layout, Registry};
use kvist_model::Error;
use kvist_model::config::ModelConfig;

/// A paged cache for a model: its policy and its block size.
#[derive(Clone, Debug)]
pub struct PagedConfig {
    /// `kind` is ignored. `max_step_tokens` and `max_rows` are those of the largest batch, and `recent.sequences` is the
    /// number of its requests. The size of a recent group is at most the largest power of two that divides the block size.
    pub cache: CacheConfig,
    /// Tokens per block, at least 1. Capacities are rounded up to whole blocks.
    pub block_tokens: u32,
    /// Prefix cache settings; `None` shares nothing. `block_bytes` and `cost` are overwritten with the model's values.
    pub prefix: Option<PrefixSpec>,
}

impl PagedConfig {
    /// The bookkeeping for `model`, without any KV bytes.
    pub fn cache(&self, model: &ModelConfig) -> Result<Cache, Error> {
        Ok(Cache::paged(&self.spec(model))?)
    }

    /// What [`cache`](Self::cache) is made from.
    pub fn spec(&self, model: &ModelConfig) -> PagedSpec {
        let mut groups = self.cache.groups(model);
        for group in &mut groups {
            // Round the capacity up to whole blocks, so that every requested token fits.
            let whole = group.capacity_tokens.checked_next_multiple_of(self.block_tokens.max(1));
            group.capacity_tokens = whole.unwrap_or(group.capacity_tokens);
        }
        let prefix = self.prefix.clone().map(|prefix| PrefixSpec {
            block_bytes: block_bytes(&model.layout(), &self.cache, self.block_tokens),
            cost: recompute_cost(model),
            ..prefix
        });
        PagedSpec { block_tokens: self.block_tokens, groups, rollback_tokens: 0, prefix }
    }

    /// K and V bytes of a block, over all layers.
    pub fn block_bytes(&self, model: &ModelConfig) -> u64 {
        block_bytes(&model.layout(), &self.cache, self.block_tokens).iter().sum()
    }

    /// Mean bytes of the objects that a block is stored as in [tiers](crate::serving::TierConfig).
    pub fn stored_bytes(&self, model: &ModelConfig) -> u64 {
        let windows =
            self.cache.groups(model).iter().filter(|group| group.visibility.window.is_some()).count();
        self.block_bytes(model) / (1 + windows as u64)
    }

    /// Whether tiers can have this model's blocks: some layers see the whole text.
    pub fn suits_tiers(&self, model: &ModelConfig) -> bool {
        self.cache.groups(model).iter().any(|group| group.visibility.window.is_none())
    }

    /// Bytes by purpose, before anything is allocated.
    pub fn plan(&self, model: &ModelConfig, registry: &Registry) -> Result<MemoryPlan, Error> {
        let cache = self.cache(model)?;
        let (_, backend) = registry.plan(&self.cache.backend, "paged", &self.cache.groups(model))?;
        MemoryPlan::of_cache(model, registry, backend, &cache, &self.block_aligned())
    }

    /// The cache policy with kind `paged` and recent groups cut to the block size. Prefix hits end at block boundaries.
    /// If recent groups end there too, a request that starts with a hit reads the same values as it would without one.
    pub fn block_aligned(&self) -> CacheConfig {
        let recent = self.cache.recent.within_blocks(self.block_tokens);
        CacheConfig { kind: "paged".into(), recent, ..self.cache.clone() }
    }
}

/// K and V bytes of a block, per layer group.
fn block_bytes(layout: &Layout, config: &CacheConfig, block_tokens: u32) -> Vec<u64> {
    let mut bytes = vec![0; layout.n_groups()];
    for (_, layer) in layout.owners() {
        let row = layer.cell_bytes(config.k, config.v);
        bytes[layer.group.0 as usize] += u64::from(layer.n_kv_heads) * row * u64::from(block_tokens);
    }
    bytes
}

/// Multiply-adds per token: of the linear layers (without the output layer, which prompt tokens skip), and of attention
/// per visible position.
fn recompute_cost(model: &ModelConfig) -> RecomputeCost {
    let hidden = model.hidden as f64;
    let wide: usize = model.layers.iter().map(|layer| model.mlp_width(layer)).sum();
    let (q, kv) = ((model.n_heads * model.head_dim) as f64, (model.n_kv_heads * model.head_dim) as f64);
    let n_layers = model.n_layers as f64;
    RecomputeCost {
        per_token: hidden * (n_layers * (2.0 * q + 2.0 * kv) + 3.0 * wide as f64),
        per_pair: n_layers * 2.0 * q,
    }
}
