//! The worker that was sent the longest beginning of the prompt before, after `cache_aware` of vllm-router 0.1.17
//! (`src/policies/cache_aware.rs`) and of smg 1.13.0, which descend from SGLang's router. It needs no events: the router
//! remembers what it has sent to which worker, and forgets what is oldest.
//!
//! If the numbers of requests differ by more than 32 and a tenth, the worker with the fewest gets the request. Otherwise, if
//! some worker was sent more than half of the prompt, the one that was sent most; of several, the one with the fewest
//! requests. Otherwise the worker with the fewest.
//!
//! The routers compare tokens or characters, here whole blocks are compared. They forget every 30 seconds, here as soon as
//! the bound is passed.
use super::{Asked, Choice, Loads, Routing, View};
use history::History;

mod history;

/// Loads are out of balance if they differ by more requests than this,
const BALANCE_REQUESTS: u32 = 32;
/// and by more than this ratio.
const BALANCE_RATIO: f64 = 1.1;
/// The part of a prompt that must have been sent to a worker before.
const THRESHOLD: f64 = 0.5;
/// What is remembered per worker, in tokens: 2^25 characters at 8 per token, the default of vllm-router. Memory grows to
/// that of [`History`] for each worker, once it was sent so much.
const REMEMBERED_TOKENS: u32 = 1 << 22;

/// Up to this number, all workers that were sent a block are looked at. Of more, one is found soon among those with the fewest
/// requests.
const FEW: u32 = 32;

pub(super) struct CacheAware {
    block_tokens: u32,
    sent: View,
    /// By worker.
    histories: Vec<History>,
}

impl CacheAware {
    pub fn new(block_tokens: u32, n_workers: u32) -> CacheAware {
        CacheAware {
            block_tokens,
            sent: View::new(n_workers),
            histories: (0..n_workers).map(|_| History::default()).collect(),
        }
    }

    /// The worker that was sent most of the prompt, if that is more than the threshold, and how many tokens.
    fn best_match(&self, asked: &Asked<'_>, loads: &Loads) -> Option<(u32, u32)> {
        let found = asked.hashes.iter().map_while(|hash| self.sent.holders(*hash));
        let (depth, holders) = (1..).zip(found).last()?;
        let tokens: u32 = depth * self.block_tokens;
        if f64::from(tokens) <= THRESHOLD * f64::from(asked.prompt_tokens) {
            return None;
        }
        let worker = if holders.len() <= FEW {
            let mut best = None;
            holders.for_each(|worker| {
                let found = loads.of(worker).map(|load| (load.requests, worker));
                best = best.into_iter().chain(found).min();
            });
            best.map(|(_, worker)| worker)
        } else {
            loads.by_requests().find(|&worker| holders.contains(worker))
        };
        Some((worker?, tokens))
    }

    /// The deepest block counts as sent first, and is forgotten first: no block is remembered without those before it.
    fn remember(&mut self, worker: u32, hashes: &[u64]) {
        let most = (REMEMBERED_TOKENS / self.block_tokens).max(1) as usize;
        for &hash in hashes.iter().rev() {
            let (is_new, forgotten) = self.histories[worker as usize].sent(hash, most);
            if let Some(forgotten) = forgotten {
                self.sent.note(worker, forgotten, false);
            }
            if is_new {
                self.sent.note(worker, hash, true);
            }
        }
    }
}

impl Routing for CacheAware {
    fn choose(&mut self, asked: &Asked<'_>, loads: &Loads, _: &View) -> Option<Choice> {
        let (fewest, least_loaded) = loads.fewest_requests()?;
        let most = loads.most_requests().unwrap_or(fewest);
        let is_imbalanced =
            most - fewest > BALANCE_REQUESTS && f64::from(most) > f64::from(fewest) * BALANCE_RATIO;
        let found = if is_imbalanced { None } else { self.best_match(asked, loads) };
        let (worker, credited) = found.unwrap_or((least_loaded, 0));
        self.remember(worker, asked.hashes);
        // The last token is always computed.
        let usable = (asked.prompt_tokens - 1) / self.block_tokens * self.block_tokens;
        Some(Choice { worker, credited_tokens: credited.min(usable) })
    }

    fn left(&mut self, worker: u32) {
        self.histories[worker as usize] = History::default();
        self.sent.forget(worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// Compared with the definition, worker by worker, where one, some or nearly all were sent the prompt.
    #[test]
    fn the_fewest_requests_of_those_with_the_prefix() {
        let mut random = SplitMix64(9);
        let (mut few, mut many) = (0, 0);
        for round in 0..1000 {
            let n_workers = 1 + random.below(100);
            let mut loads = Loads::new(n_workers);
            let mut policy = CacheAware::new(16, n_workers);
            let scarce = 1 + random.below(10);
            let mut expected: Option<(u32, u32)> = None;
            let mut n_holders = 0;
            for worker in 0..n_workers {
                loads.joined(worker);
                (0..random.below(8)).for_each(|_| loads.sent(worker, 100, 100));
                if random.below(scarce) == 0 {
                    policy.remember(worker, &[1, 2, 3]);
                    n_holders += 1;
                    let requests = loads.of(worker).unwrap().requests;
                    expected = Some(expected.map_or((requests, worker), |best| best.min((requests, worker))));
                }
            }
            let asked = Asked { session: 0, prompt_tokens: 50, hashes: &[1, 2, 3] };
            let found = policy.best_match(&asked, &loads);
            assert_eq!(found, expected.map(|(_, worker)| (worker, 48)), "round {round}, of {n_holders}");
            few += u32::from((1..=FEW).contains(&n_holders));
            many += u32::from(n_holders > FEW);
        }
        assert!(few > 100 && many > 100, "{few} and {many}");
    }
}
