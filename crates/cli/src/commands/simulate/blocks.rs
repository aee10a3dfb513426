//! Options of the simulated cache.
use super::costs::CostArgs;
use super::layers::Blocks;
use super::spec::{self, Capacity};
use crate::options::wrong_usage;
use kvist_cache::evict::Parameters;
use kvist_cache::{Cache, PagedSpec, PrefixSpec, Vocabulary};
use kvist_simulator::request::Request;
use std::time::Duration;

const CACHE: &str = "Cache";

#[derive(clap::Args, Clone, Debug)]
pub struct BlockArgs {
    /// Blocks of the cache: a number, inf, or auto for what fits into the hardware in addition to the weights
    #[arg(long, default_value = "auto", value_name = "N", help_heading = CACHE)]
    pub capacity_blocks: Capacity,
    /// Tokens per block [default: 16; with --zero-service as many as an id of the trace covers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = CACHE)]
    pub block_tokens: Option<u32>,
    /// Eviction policy: lru, fifo, lfu, lfu_decay, cost; with --zero-service also opt
    #[arg(long, default_value = "lru", value_name = "NAME", help_heading = CACHE)]
    pub policy: String,
    /// Time in which the weight of a use halves, for lfu_decay and cost: 300s, 5m
    #[arg(long, value_name = "TIME", value_parser = spec::duration, help_heading = CACHE)]
    pub half_life: Option<Duration>,
    /// Do not share blocks between requests
    #[arg(long, help_heading = CACHE)]
    pub no_prefix_cache: bool,
}

const BLOCK_TOKENS: u32 = 16;

impl BlockArgs {
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens.unwrap_or(BLOCK_TOKENS)
    }

    /// The blocks that fit into the machine; `None`, which is no bound, if its memory is unknown.
    pub fn auto_blocks(&self, costs: &CostArgs) -> anyhow::Result<Option<u32>> {
        let tokens = costs.cache_tokens()?;
        Ok(tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX - 1) / self.block_tokens()))
    }

    pub fn parameters(&self) -> anyhow::Result<Parameters> {
        Ok(Parameters { half_life: self.half_life })
    }

    /// An empty cache for these requests. `costs` has the memory of the hardware, and a block's bytes and recompute
    /// cost in steps of `batch_tokens`.
    pub fn cache(&self, requests: &[Request], costs: &CostArgs, batch_tokens: u32) -> anyhow::Result<Cache> {
        let spec = self.spec(requests, costs, batch_tokens)?;
        Cache::paged(&spec).map_err(|why| wrong_usage(why.to_string()))
    }

    /// What [`cache`](Self::cache) is made from.
    pub fn spec(
        &self,
        requests: &[Request],
        costs: &CostArgs,
        batch_tokens: u32,
    ) -> anyhow::Result<PagedSpec> {
        let block_tokens = self.block_tokens();
        let capacity_tokens = match (self.capacity_blocks, costs.cache_tokens()?) {
            (Capacity::Blocks(n), _) => {
                n.checked_mul(block_tokens).filter(|&n| n < u32::MAX).ok_or_else(|| {
                    wrong_usage(format!(
                        "--capacity-blocks {n} of {block_tokens} tokens pass 2^32 tokens: give fewer, or inf"
                    ))
                })?
            }
            (Capacity::Hardware, Some(tokens)) => {
                let tokens = u32::try_from(tokens).unwrap_or(u32::MAX - 1);
                tokens - tokens % block_tokens // whole blocks: a server's cache rounds up what it is asked for
            }
            (Capacity::Hardware, None) | (Capacity::Endless, _) => u32::MAX,
        };
        let prefix = PrefixSpec {
            vocabulary: vocabulary(requests)?,
            policy: self.policy.clone(),
            parameters: self.parameters()?,
            ..PrefixSpec::default()
        };
        let prefix = (!self.no_prefix_cache).then_some(prefix);
        let blocks = Blocks {
            bytes: costs.token_bytes()?.map(|bytes| (bytes * f64::from(block_tokens)) as u64),
            cost: costs.recompute(batch_tokens)?,
        };
        Ok(costs.layers.paged(block_tokens, capacity_tokens, prefix, blocks))
    }
}

/// The kind of content (ids or tokens) of all requests' prompts.
fn vocabulary(requests: &[Request]) -> anyhow::Result<Vocabulary> {
    let mut found: Option<(Vocabulary, u64)> = None;
    for request in requests {
        let Some(here) = request.content.vocabulary() else { continue };
        match found {
            None => found = Some((here, request.id)),
            Some((there, first)) if there != here => anyhow::bail!(
                "requests {first} and {} name their content in different ways ({there:?} and {here:?}), so nothing could \
                 be shared between them: give all of them the same tokens_per_id",
                request.id
            ),
            Some(_) => {}
        }
    }
    Ok(found.map_or(Vocabulary::Tokens, |(vocabulary, _)| vocabulary))
}
