//! What is live at one moment, as data: where a live view begins that was not there from the start.
//!
//! It names every live request, the block table of every sequence that the cache holds (a session's too, which belongs to
//! no request), and the blocks that only the index knows. It walks everything, so it is made when somebody asks. It
//! tells no token and no salt.
use crate::entry::State;
use crate::recording::{GroupShape, groups};
use crate::request::RequestId;
use crate::scheduler::{Counters, Scheduler};
use kvist_cache::{BlockUse, GroupId};
use serde::Serialize;

/// Everything live. Times are of the driver's clock, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Snapshot {
    /// Layer groups, in order.
    pub groups: Vec<GroupShape>,
    /// Ascending by id.
    pub requests: Vec<LiveRequest>,
    /// Ascending by id.
    pub sequences: Vec<LiveSequence>,
    /// Per group, ascending: blocks that an index knows and nobody holds.
    pub idle: Vec<Vec<u32>>,
    /// What happened so far, summed.
    pub counters: Counters,
}

/// A request that has not ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveRequest {
    /// Its name in every log.
    pub id: RequestId,
    /// In the batch, or waiting.
    pub running: bool,
    /// Its sequence, while it holds cells.
    pub seq: Option<u32>,
    /// When it arrived.
    pub arrival_ns: u64,
    /// When it was first admitted.
    pub admitted_ns: Option<u64>,
    /// The end of the step that sampled its first token.
    pub first_token_ns: Option<u64>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens it may generate at most.
    pub max_new: u32,
    /// Tokens generated.
    pub generated: u32,
    /// Tokens whose K and V are held.
    pub cached: u32,
    /// Tokens that the prefix index supplied on its first admission.
    pub hit_tokens: u32,
}

/// A sequence that the cache holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LiveSequence {
    /// Its id.
    pub seq: u32,
    /// Tokens held, as the first group counts them.
    pub len: u32,
    /// Per group, its blocks in the order of its positions; `None` for those that have left the window.
    pub tables: Vec<Vec<Option<u32>>>,
}

impl Snapshot {
    /// Of `scheduler`, between turns.
    pub fn of(scheduler: &Scheduler) -> Snapshot {
        let cache = scheduler.cache();
        let n_groups = cache.n_groups() as u16;
        let mut requests: Vec<_> = scheduler
            .entries
            .iter()
            .filter(|entry| entry.state != State::Vacant)
            .map(|entry| LiveRequest {
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
        let idle = (0..n_groups).map(|group| {
            let blocks = (0..).zip(cache.block_uses(GroupId(group)));
            blocks.filter(|(_, of)| *of == BlockUse::Idle).map(|(block, _)| block).collect()
        });
        Snapshot {
            groups: groups(cache).collect(),
            requests,
            sequences: sequences.collect(),
            idle: idle.collect(),
            counters: *scheduler.counters(),
        }
    }
}
