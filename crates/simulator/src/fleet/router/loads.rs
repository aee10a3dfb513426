//! What the router counts of each worker: requests that it has sent and not seen end, and their prompt tokens that are not
//! computed yet.
use std::collections::BTreeSet;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::fleet) struct LoadOf {
    pub requests: u32,
    /// Prompt tokens to compute, of requests without a first token.
    pub backlog_tokens: u64,
    /// Prompt tokens of all its requests.
    pub prompt_tokens: u64,
}

/// The loads of all workers that are there, ordered so that the least loaded is found without looking at all.
pub(in crate::fleet) struct Loads {
    by_worker: Vec<Option<LoadOf>>,
    alive: Vec<u32>,
    /// (requests, worker)
    by_requests: BTreeSet<(u32, u32)>,
    /// (requests, tokens of the backlog, worker)
    by_backlog: BTreeSet<(u32, u64, u32)>,
}

impl Loads {
    pub fn new(n_workers: u32) -> Loads {
        Loads {
            by_worker: vec![None; n_workers as usize],
            alive: Vec::new(),
            by_requests: BTreeSet::new(),
            by_backlog: BTreeSet::new(),
        }
    }

    /// The workers that are there, in ascending order.
    pub fn alive(&self) -> &[u32] {
        &self.alive
    }

    /// `None` if the worker is not there.
    pub fn of(&self, worker: u32) -> Option<LoadOf> {
        self.by_worker.get(worker as usize).copied().flatten()
    }

    /// The lowest number of requests, and the first worker that has so few.
    pub fn fewest_requests(&self) -> Option<(u32, u32)> {
        self.by_requests.first().copied()
    }

    /// All workers, those with the fewest requests first.
    pub fn by_requests(&self) -> impl Iterator<Item = u32> {
        self.by_requests.iter().map(|(_, worker)| *worker)
    }

    /// The highest number of requests.
    pub fn most_requests(&self) -> Option<u32> {
        self.by_requests.last().map(|(requests, _)| *requests)
    }

    /// Workers with equal numbers of requests, group after group, fewest first; in a group (tokens of the backlog, worker),
    /// fewest first.
    pub fn groups(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = (u64, u32)>)> {
        let first_from = |requests: u32| self.by_backlog.range((requests, 0, 0)..).next().map(|key| key.0);
        let numbers =
            std::iter::successors(first_from(0), move |&requests| first_from(requests.checked_add(1)?));
        numbers.map(|requests| {
            let group = self.by_backlog.range((requests, 0, 0)..=(requests, u64::MAX, u32::MAX));
            (requests, group.map(|&(_, tokens, worker)| (tokens, worker)))
        })
    }

    pub fn joined(&mut self, worker: u32) {
        self.by_worker[worker as usize] = Some(LoadOf::default());
        self.alive.insert(self.alive.partition_point(|&other| other < worker), worker);
        self.by_requests.insert((0, worker));
        self.by_backlog.insert((0, 0, worker));
    }

    pub fn left(&mut self, worker: u32) {
        if let Some(load) = self.by_worker[worker as usize].take() {
            self.by_requests.remove(&(load.requests, worker));
            self.by_backlog.remove(&(load.requests, load.backlog_tokens, worker));
        }
        self.alive.retain(|&other| other != worker);
    }

    fn change(&mut self, worker: u32, change: impl FnOnce(LoadOf) -> LoadOf) {
        let Some(load) = &mut self.by_worker[worker as usize] else { return };
        let before = std::mem::replace(load, change(*load));
        if load.requests != before.requests {
            self.by_requests.remove(&(before.requests, worker));
            self.by_requests.insert((load.requests, worker));
        }
        self.by_backlog.remove(&(before.requests, before.backlog_tokens, worker));
        self.by_backlog.insert((load.requests, load.backlog_tokens, worker));
    }

    /// A request was sent. `backlog_tokens` of its prompt are to be computed.
    pub fn sent(&mut self, worker: u32, prompt_tokens: u64, backlog_tokens: u64) {
        self.change(worker, |load| LoadOf {
            requests: load.requests + 1,
            backlog_tokens: load.backlog_tokens + backlog_tokens,
            prompt_tokens: load.prompt_tokens + prompt_tokens,
        });
    }

    /// A request has its first token, so these tokens are computed.
    pub fn prefilled(&mut self, worker: u32, backlog_tokens: u64) {
        self.change(worker, |load| LoadOf { backlog_tokens: load.backlog_tokens - backlog_tokens, ..load });
    }

    /// A request has ended. `backlog_tokens`: those that it still had.
    pub fn ended(&mut self, worker: u32, prompt_tokens: u64, backlog_tokens: u64) {
        self.change(worker, |load| LoadOf {
            requests: load.requests - 1,
            backlog_tokens: load.backlog_tokens - backlog_tokens,
            prompt_tokens: load.prompt_tokens - prompt_tokens,
        });
    }
}
