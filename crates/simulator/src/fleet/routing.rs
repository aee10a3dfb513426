//! Policies: which worker gets a request. One per file, after those of published routers.
mod cache_aware;
mod least_loaded;
mod overlap_cost;
mod prefix_aware;
mod round_robin;
mod session_hash;
mod softmax;

use super::FleetOptions;
use super::router::{Loads, View};
use serde::Serialize;

/// The names of policies, and what each does.
pub const POLICIES: &[(Policy, &str, &str)] = &[
    (Policy::RoundRobin, "round_robin", "each worker in turn"),
    (Policy::LeastLoaded, "least_loaded", "the worker with the fewest requests"),
    (Policy::SessionHash, "session_hash", "all requests of a session to one worker, by consistent hashing"),
    (
        Policy::PrefixAware,
        "prefix_aware",
        "the least work: tokens to compute times requests, with what caches report (kv_aware of vllm-router)",
    ),
    (
        Policy::CacheAware,
        "cache_aware",
        "the worker that was sent the longest beginning of the prompt, unless loads differ too much (cache_aware of \
         smg and vllm-router)",
    ),
    (
        Policy::OverlapCost { overlap_weight: OVERLAP_WEIGHT },
        "overlap_cost",
        "the least cost: blocks to compute, less those that caches report, plus blocks in use (Dynamo's KV router)",
    ),
];

/// The weight of a cached block under [`Policy::OverlapCost`], unless another is given: that of a block to compute.
pub const OVERLAP_WEIGHT: f64 = 1.0;

/// Which worker gets a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    RoundRobin,
    LeastLoaded,
    SessionHash,
    PrefixAware,
    CacheAware,
    OverlapCost {
        /// What a cached block saves, in blocks to compute. At least 0.
        overlap_weight: f64,
    },
}

impl Policy {
    /// The policy with this name; its parameters are the defaults.
    pub fn by_name(name: &str) -> Option<Policy> {
        POLICIES.iter().find(|(_, known, _)| *known == name).map(|(policy, ..)| *policy)
    }

    pub fn name(self) -> &'static str {
        let same = |other: &Policy| std::mem::discriminant(other) == std::mem::discriminant(&self);
        POLICIES.iter().find(|(policy, ..)| same(policy)).map_or("", |(_, name, _)| name)
    }

    /// Whether it weighs workers by a cost, so that a temperature means something.
    pub fn has_cost(self) -> bool {
        matches!(self, Policy::PrefixAware | Policy::OverlapCost { .. })
    }

    /// Whether it asks what the caches store.
    pub(super) fn needs_view(self) -> bool {
        self.has_cost()
    }

    /// Whether it asks for the hashes of a prompt's blocks.
    pub(super) fn needs_hashes(self) -> bool {
        self.has_cost() || self == Policy::CacheAware
    }
}

/// A request, as the router sees it.
pub(super) struct Asked<'a> {
    pub session: u64,
    pub prompt_tokens: u32,
    /// Of the whole blocks of the prompt, in order; empty if the policy does not ask for them.
    pub hashes: &'a [u64],
}

/// The worker for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub worker: u32,
    /// Prompt tokens that the router expects in its cache.
    pub credited_tokens: u32,
}

impl Choice {
    fn without_credit(worker: u32) -> Choice {
        Choice { worker, credited_tokens: 0 }
    }
}

/// A policy at work.
pub(super) trait Routing {
    /// Chooses a worker. `None` if none is there.
    fn choose(&mut self, asked: &Asked<'_>, loads: &Loads, view: &View) -> Option<Choice>;
    /// A worker is there from now on. Called for those at the start, too.
    fn joined(&mut self, _worker: u32) {}
    /// A worker is gone.
    fn left(&mut self, _worker: u32) {}
}

pub(super) fn build(options: &FleetOptions, n_workers: u32, block_tokens: u32) -> Box<dyn Routing> {
    let softmax = softmax::Softmax::new(options.temperature, options.seed);
    match options.policy {
        Policy::RoundRobin => Box::new(round_robin::RoundRobin::default()),
        Policy::LeastLoaded => Box::new(least_loaded::LeastLoaded),
        Policy::SessionHash => Box::new(session_hash::SessionHash::default()),
        Policy::PrefixAware => Box::new(prefix_aware::PrefixAware::new(block_tokens, softmax)),
        Policy::CacheAware => Box::new(cache_aware::CacheAware::new(block_tokens, n_workers)),
        Policy::OverlapCost { overlap_weight } => {
            Box::new(overlap_cost::OverlapCost::new(block_tokens, overlap_weight, softmax))
        }
    }
}
