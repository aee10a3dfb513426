//! The layout of a paged cache as written in the header of an event log: everything that decisions depend on, but no
//! KV data.
use kvist_cache::evict::Parameters;
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{PagedSpec, PrefixSpec, RecomputeCost, Vocabulary};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A [`PagedSpec`] in a stable serialized form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CacheShape {
    block_tokens: u32,
    groups: Vec<Group>,
    rollback_tokens: u32,
    prefix: Option<Prefix>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    capacity_tokens: u32,
    window: Option<u32>,
    sinks: u32,
    max_step_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Prefix {
    /// `None`: prompts are given as token ids.
    tokens_per_id: Option<u32>,
    policy: String,
    half_life: Option<Duration>,
    n_ghosts: u32,
    block_bytes: Vec<u64>,
    cost_per_token: f64,
    cost_per_pair: f64,
}

impl CacheShape {
    pub fn of(spec: &PagedSpec) -> CacheShape {
        let group = |group: &GroupSpec| Group {
            capacity_tokens: group.capacity_tokens,
            window: group.visibility.window,
            sinks: group.visibility.sinks,
            max_step_tokens: group.max_step_tokens,
        };
        let prefix = |prefix: &PrefixSpec| Prefix {
            tokens_per_id: match prefix.vocabulary {
                Vocabulary::Tokens => None,
                Vocabulary::Ids { tokens_per_id } => Some(tokens_per_id),
            },
            policy: prefix.policy.clone(),
            half_life: prefix.parameters.half_life,
            n_ghosts: prefix.n_ghosts,
            block_bytes: prefix.block_bytes.clone(),
            cost_per_token: prefix.cost.per_token,
            cost_per_pair: prefix.cost.per_pair,
        };
        CacheShape {
            block_tokens: spec.block_tokens,
            groups: spec.groups.iter().map(group).collect(),
            rollback_tokens: spec.rollback_tokens,
            prefix: spec.prefix.as_ref().map(prefix),
        }
    }

    pub fn spec(self) -> PagedSpec {
        let group = |group: Group| GroupSpec {
            capacity_tokens: group.capacity_tokens,
            visibility: Visibility { window: group.window, sinks: group.sinks },
            max_step_tokens: group.max_step_tokens,
        };
        let prefix = |prefix: Prefix| PrefixSpec {
            vocabulary: match prefix.tokens_per_id {
                None => Vocabulary::Tokens,
                Some(tokens_per_id) => Vocabulary::Ids { tokens_per_id },
            },
            policy: prefix.policy,
            parameters: Parameters { half_life: prefix.half_life },
            n_ghosts: prefix.n_ghosts,
            block_bytes: prefix.block_bytes,
            cost: RecomputeCost { per_token: prefix.cost_per_token, per_pair: prefix.cost_per_pair },
        };
        PagedSpec {
            block_tokens: self.block_tokens,
            groups: self.groups.into_iter().map(group).collect(),
            rollback_tokens: self.rollback_tokens,
            prefix: self.prefix.map(prefix),
        }
    }
}
