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
use std::collections::{BTreeSet, HashMap};

/// Loads are out of balance if they differ by more requests than this,
const BALANCE_REQUESTS: u32 = 32;
/// and by more than this ratio.
const BALANCE_RATIO: f64 = 1.1;
/// The part of a prompt that must have been sent to a worker before.
const THRESHOLD: f64 = 0.5;
/// What is remembered per worker, in tokens: 2^25 characters at 8 per token, the default of vllm-router.
const REMEMBERED_TOKENS: u32 = 1 << 22;

pub(super) struct CacheAware {
    block_tokens: u32,
    sent: View,
    /// By worker.
    histories: Vec<History>,
    n_requests: u64,
    /// Blocks that are remembered per worker.
    most_blocks: usize,
}

/// When a block was sent last, how deep it lies, from the deepest on, and its hash. The first is forgotten first: so no
/// block is remembered without those before it.
type Age = (u64, std::cmp::Reverse<u32>, u64);

#[derive(Default)]
struct History {
    by_age: BTreeSet<Age>,
    /// Used for lookups only.
    ages: HashMap<u64, Age>,
}

impl CacheAware {
    pub fn new(block_tokens: u32, n_workers: u32) -> CacheAware {
        CacheAware {
            block_tokens,
            sent: View::new(n_workers),
            histories: (0..n_workers).map(|_| History::default()).collect(),
            n_requests: 0,
            most_blocks: (REMEMBERED_TOKENS / block_tokens).max(1) as usize,
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
        let worker = loads.by_requests().find(|&worker| holders.contains(worker))?;
        Some((worker, tokens))
    }

    fn remember(&mut self, worker: u32, hashes: &[u64]) {
        self.n_requests += 1;
        let history = &mut self.histories[worker as usize];
        for (depth, &hash) in (0..).zip(hashes) {
            let age = (self.n_requests, std::cmp::Reverse(depth), hash);
            match history.ages.insert(hash, age) {
                Some(before) => _ = history.by_age.remove(&before),
                None => self.sent.note(worker, hash, true),
            }
            history.by_age.insert(age);
        }
        while history.by_age.len() > self.most_blocks
            && let Some((_, _, hash)) = history.by_age.pop_first()
        {
            history.ages.remove(&hash);
            self.sent.note(worker, hash, false);
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

    /// What is remembered of random prompts, compared with a list of (hash, age) that is searched for the oldest.
    #[test]
    fn the_oldest_is_forgotten_first() {
        let mut random = SplitMix64(9);
        let mut policy = CacheAware { most_blocks: 20, ..CacheAware::new(16, 2) };
        let mut plain: [Vec<(u64, usize, std::cmp::Reverse<usize>)>; 2] = [Vec::new(), Vec::new()];
        for round in 0..2000 {
            // Prompts of 8 families that go on in three ways after some blocks.
            let (family, own) = (u64::from(random.below(8)) << 32, u64::from(random.below(3)) << 16);
            let common = u64::from(random.below(6));
            let hashes: Vec<u64> = (0..1 + u64::from(random.below(9)))
                .map(|i| family | if i < common { i } else { own | common << 8 | i })
                .collect();
            let worker = random.below(2);
            policy.remember(worker, &hashes);
            let list = &mut plain[worker as usize];
            list.retain(|(hash, ..)| !hashes.contains(hash));
            list.extend(
                hashes.iter().enumerate().map(|(depth, &hash)| (hash, round, std::cmp::Reverse(depth))),
            );
            while list.len() > 20 {
                let oldest = (0..list.len()).min_by_key(|&i| (list[i].1, list[i].2, list[i].0)).unwrap();
                list.remove(oldest);
            }
            for (worker, list) in (0..).zip(&plain) {
                let history = &policy.histories[worker as usize];
                assert!(
                    history.ages.len() == list.len() && history.by_age.len() == list.len(),
                    "round {round}"
                );
                for (hash, ..) in list {
                    let known = policy.sent.holders(*hash).is_some_and(|holders| holders.contains(worker));
                    assert!(known && history.ages.contains_key(hash), "round {round}");
                }
            }
        }
    }
}
