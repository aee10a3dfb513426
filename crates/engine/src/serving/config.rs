//! What an engine is configured with.
use super::{TierConfig, Watcher};
use crate::Error;
use crate::executor::PagedConfig;
use crate::frozen::EnginePrefix;
use crate::keep::KeepConfig;
use crate::memory::CacheConfig;
use crate::speculate::Speculator;
use kvist_cache::PrefixSpec;
use kvist_device::Footprint;
use kvist_scheduler::{Config, Thinned};
use std::sync::Arc;

/// Most prompt tokens of a step in an engine that [keeps only some tokens](EngineConfig::keep_only) of each request: a request
/// stores up to twice as many above its budget.
const THINNED_STEP: u32 = 256;

/// Configuration of an engine, besides the model.
pub struct EngineConfig {
    /// The cache. [`EngineConfig::fit`] sets its `max_step_tokens`, `max_rows` and `recent.sequences` to those of the
    /// largest batch.
    pub paged: PagedConfig,
    pub scheduler: Config,
    /// Largest number of waiting requests. More are rejected.
    pub max_queue: usize,
    /// The tenants, each once. The queue is divided among them. If empty, all requests share one queue.
    pub tenants: Vec<Arc<str>>,
    /// Record the logs from which a run can be replayed. Watchers collect them.
    pub record: bool,
    /// Observers of every step; see [`Engine::add_watcher`](super::Engine::add_watcher).
    pub watchers: Vec<Box<dyn Watcher>>,
    /// Largest number of draft tokens in a step, over all its requests. The memory plan has logits for so many more rows.
    pub max_draft_tokens: u32,
    /// Proposes drafts; `None` for plain decoding.
    pub speculator: Option<Speculator>,
    /// Tiers below the cache; `None` for none. They need prefix caching, and a layer without a sliding window.
    pub tiers: Option<TierConfig>,
    /// A prefix that is in the index from the start and stays there.
    pub prefix: Option<EnginePrefix>,
    /// Keep only some tokens of every request that grows beyond this budget. Requests then share no blocks: see
    /// [`EngineConfig::keep_only`].
    pub keep: Option<KeepConfig>,
}

impl EngineConfig {
    /// A paged cache with prefix caching, in blocks of 16 tokens, and the scheduler's defaults, except that a request
    /// waits for a prefix that another one computes. All requests share one queue of 256. `cache` says how many tokens
    /// fit into the cache, over all requests, and how it stores them; its kind is ignored.
    pub fn new(cache: CacheConfig) -> Self {
        let cache = CacheConfig { kind: "paged".into(), ..cache };
        let mut config = EngineConfig {
            paged: PagedConfig { cache, block_tokens: 16, prefix: Some(PrefixSpec::default()) },
            scheduler: Config { wait_for_prefix: true, ..Config::default() },
            max_queue: 256,
            tenants: Vec::new(),
            record: false,
            watchers: Vec::new(),
            max_draft_tokens: 0,
            speculator: None,
            tiers: None,
            prefix: None,
            keep: None,
        };
        config.fit();
        config
    }

    /// Keep only some tokens of every request: `keep` says which. A prefix index would give blocks of a thinned text to
    /// requests that ask for the whole one, so there is none.
    pub fn keep_only(&mut self, keep: KeepConfig) {
        self.keep = Some(keep);
        self.paged.prefix = None;
        self.scheduler.wait_for_prefix = false;
        let sequence_tokens = self.thinned_above(keep);
        self.scheduler.thinned = Some(Thinned { sequence_tokens, step_tokens: self.thinned_step() });
    }

    /// Prompt tokens of a step.
    fn thinned_step(&self) -> u32 {
        self.scheduler.max_batch_tokens.clamp(1, THINNED_STEP)
    }
    /// Sequences with more tokens are reduced to the budget after a step.
    pub(super) fn thinned_above(&self, keep: KeepConfig) -> u32 {
        keep.budget(self.paged.block_tokens).saturating_add(self.thinned_step())
    }

    /// Refuses what does not go with [`keep`](Self::keep), and a cache that is too small for one request.
    pub fn check_keep(&self, device: &dyn Footprint) -> Result<(), Error> {
        if self.paged.cache.keep.is_some() {
            return Err(Error::Usage(
                "an engine keeps some tokens of each request by `EngineConfig::keep`".into(),
            ));
        }
        let Some(keep) = self.keep else { return Ok(()) };
        CacheConfig { keep: Some(keep), kind: "paged".into(), ..self.paged.cache.clone() }
            .check_keep(device)?;
        let with = [
            (self.paged.prefix.is_some(), "a prefix index"),
            (self.tiers.is_some(), "tiers"),
            (self.prefix.is_some(), "a frozen prefix"),
            (self.speculator.is_some(), "speculation"),
            (self.record, "a recording"),
        ];
        if let Some((_, what)) = with.into_iter().find(|(is_on, _)| *is_on) {
            return Err(Error::Usage(format!(
                "an engine that keeps {keep} of each request cannot have {what}: leave one out"
            )));
        }
        let (capacity, most) =
            (self.paged.cache.context_tokens, self.thinned_above(keep).saturating_add(self.thinned_step()));
        if capacity < most {
            return Err(Error::Usage(format!(
                "the cache holds {capacity} tokens, and a request that keeps {keep} needs {most} at times: give it a larger \
                 cache or a smaller budget"
            )));
        }
        Ok(())
    }

    /// Set the cache's limits to those of the largest batch that the scheduler can build.
    pub fn fit(&mut self) {
        let Config { max_batch, max_batch_tokens, .. } = self.scheduler;
        let rows = max_batch.saturating_add(self.max_draft_tokens);
        let cache = &mut self.paged.cache;
        cache.max_step_tokens = max_batch_tokens;
        // Each row belongs to a token of the step.
        cache.max_rows = rows.min(max_batch_tokens.max(max_batch));
        // A node of a draft tree takes a row too. Twice, because a rejected node keeps it until its cell is written again.
        let group = cache.recent.within_blocks(self.paged.block_tokens).tokens.max(1);
        cache.recent.sequences =
            max_batch.saturating_add(self.max_draft_tokens.div_ceil(group).saturating_mul(2));
    }
}
