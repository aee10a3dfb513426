//! Data for plots: when each request was worked on, and the state of every block.
use crate::report::{Activity, BlockMap, BlockState, Phase};
use kvist_cache::{BlockUse, GroupId};
use kvist_scheduler::{Scheduler, Work};

/// Activity of requests. Consecutive steps without a gap are merged into one entry.
#[derive(Default)]
pub(super) struct Watched {
    pub activity: Vec<Activity>,
    /// Per request: index of its last entry in `activity`.
    last: Vec<Option<usize>>,
}

impl Watched {
    pub fn note(&mut self, work: &Work, from_ns: u64, to_ns: u64) {
        let request = work.request.0 as usize;
        let phase = if work.decodes { Phase::Decode } else { Phase::Prefill };
        if self.last.len() <= request {
            self.last.resize(request + 1, None);
        }
        if let Some(open) = self.last[request].map(|at| &mut self.activity[at])
            && (open.phase, open.to_ns) == (phase, from_ns)
        {
            open.to_ns = to_ns;
            return;
        }
        self.last[request] = Some(self.activity.len());
        self.activity.push(Activity { request: work.request.0, phase, from_ns, to_ns });
    }
}

/// Block states of a bounded cache. Sampled when the batch changes, and less often as the run goes on.
pub(super) struct Blocks {
    pub map: BlockMap,
    states: Vec<BlockState>,
}

impl Blocks {
    pub fn new(n_blocks: u32) -> Self {
        Blocks { map: BlockMap::new(n_blocks), states: Vec::new() }
    }

    pub fn note(&mut self, at_ns: u64, scheduler: &Scheduler) {
        if !self.map.wants() {
            return self.map.pass();
        }
        let cache = scheduler.cache();
        self.states.clear();
        self.states.extend(cache.block_uses(GroupId(0)).map(|used| match used {
            BlockUse::Free => BlockState::Free,
            BlockUse::Evictable | BlockUse::InTransfer => BlockState::Cached,
            BlockUse::InUse(_) => BlockState::Shared,
        }));
        let single: Vec<bool> = cache.block_uses(GroupId(0)).map(|used| used == BlockUse::InUse(1)).collect();
        for (id, seq) in scheduler.held() {
            for block in cache.block_table(GroupId(0), seq).into_iter().flatten().flatten() {
                if single.get(block as usize) == Some(&true) {
                    self.states[block as usize] = BlockState::Held(id.0);
                }
            }
        }
        self.map.note(at_ns, self.states.iter().copied());
    }
}
