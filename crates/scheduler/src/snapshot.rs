//! A snapshot of everything live at one moment, from which a live view can start in the middle of a run.
//!
//! It contains every live request, the block table of every sequence in the cache (including sequences of sessions,
//! which belong to no request), and the blocks that only the prefix index uses. Building it walks everything, so it is
//! only made on demand. It contains no tokens and no salts.
use crate::entry::State;
use crate::log::{GroupShape, groups};
use crate::request::RequestId;
use crate::scheduler::{Scheduler, SchedulerCounters};
use crate::tiers::{MAX_TIERS, Run};
use kvist_cache::{BlockUse, GroupId};
use serde::Serialize;

/// Everything live. Times are in nanoseconds on the driver's clock.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Layer groups, in order.
    pub groups: Vec<GroupShape>,
    /// Ascending by id.
    pub requests: Vec<LiveRequest>,
    /// Ascending by id.
    pub sequences: Vec<LiveSequence>,
    /// Per group, ascending: cached blocks that no sequence uses (ref_count 0).
    #[serde(rename = "idle")]
    pub evictable: Vec<Vec<u32>>,
    /// Names of the tiers below the cache, fastest first; `None` without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Vec<String>>,
    /// Running totals.
    pub counters: SchedulerCounters,
}

/// A request that has not ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRequest {
    /// Identifies the request in every log.
    pub id: RequestId,
    /// True if in the batch, false if waiting.
    pub running: bool,
    /// Its sequence, if it has cells in the cache.
    pub seq: Option<u32>,
    /// When it arrived.
    pub arrival_ns: u64,
    /// When it was first admitted.
    pub admitted_ns: Option<u64>,
    /// The end of the step that sampled its first token.
    pub first_token_ns: Option<u64>,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Maximum tokens to generate.
    pub max_new: u32,
    /// Tokens generated.
    pub generated: u32,
    /// Tokens whose K and V are in the cache.
    pub cached: u32,
    /// Tokens served from the prefix index at its first admission.
    pub hit_tokens: u32,
    /// Tokens that were loaded for it, by tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded: Option<[u32; MAX_TIERS]>,
    /// What is being loaded for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loading: Option<LiveLoad>,
}

/// Blocks that are on their way from the tiers to a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveLoad {
    /// The position of the first of their tokens.
    pub hit: u32,
    /// Their tokens.
    pub tokens: u32,
    /// Where they are, in order.
    pub runs: Vec<Run>,
    /// By group: the blocks that they are written to, in position order. They are in no table before they have arrived.
    pub blocks: Vec<Vec<u32>>,
}

/// A sequence in the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveSequence {
    /// Its id.
    pub seq: u32,
    /// Tokens in the cache, as counted by the first group.
    pub len: u32,
    /// Per group, its block table in position order; `None` for blocks that have left the window.
    pub tables: Vec<Vec<Option<u32>>>,
}

impl Snapshot {
    /// Takes a snapshot of `scheduler`. Call it between iterations.
    pub fn of(scheduler: &Scheduler) -> Snapshot {
        let cache = scheduler.cache();
        let n_groups = cache.n_groups() as u16;
        let tiers = scheduler.tiers.as_ref();
        let mut requests: Vec<_> = (0..)
            .zip(&scheduler.entries)
            .filter(|(_, entry)| entry.state != State::Vacant)
            .map(|(index, entry)| LiveRequest {
                id: entry.id,
                running: entry.state == State::Running,
                seq: entry.seq.map(|seq| seq.0),
                arrival_ns: entry.arrival_ns,
                admitted_ns: entry.admitted_ns,
                first_token_ns: entry.first_token_ns,
                prompt_tokens: entry.prompt_tokens,
                max_new: entry.max_new,
                generated: entry.generated(),
                cached: entry.cached,
                hit_tokens: entry.hit_tokens,
                loaded: Some(entry.loaded).filter(|loaded| loaded.iter().any(|&n| n > 0)),
                loading: tiers
                    .filter(|_| entry.state == State::Loading)
                    .and_then(|tiers| tiers.load_of(index, n_groups)),
            })
            .collect();
        requests.sort_by_key(|request| request.id);
        let first = cache.report().into_iter().next().unwrap_or_default();
        let sequences = first.sequences.iter().map(|sequence| LiveSequence {
            seq: sequence.seq.0,
            len: sequence.len,
            tables: (0..n_groups)
                .map(|group| cache.block_table(GroupId(group), sequence.seq).unwrap_or_default())
                .collect(),
        });
        let evictable = (0..n_groups).map(|group| {
            let blocks = (0..).zip(cache.block_uses(GroupId(group)));
            blocks.filter(|(_, of)| *of == BlockUse::Evictable).map(|(block, _)| block).collect()
        });
        Snapshot {
            groups: groups(cache).collect(),
            requests,
            sequences: sequences.collect(),
            evictable: evictable.collect(),
            tiers: tiers.map(|tiers| tiers.config.list.iter().map(|tier| tier.name.clone()).collect()),
            counters: *scheduler.counters(),
        }
    }
}
