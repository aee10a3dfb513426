//! The worker with the least work, after `kv_aware` of vllm-router 0.1.17 (`src/policies/kv_aware.rs`, and its picker).
//!
//! The cost of a worker is (tokens of the prompt that it would have to compute + tokens of its backlog) × (its requests +
//! 1). The tokens to compute are those after the blocks that its cache is known to store; the last token is always computed.
//! At a temperature of 0 the lowest cost wins, of several the first worker; otherwise a worker is drawn by the softmax of
//! −cost / temperature, where the cost is not normalized.
//!
//! The lowest cost is found without looking at every worker. Among workers with equal credit and equally many requests, the
//! one with the smallest backlog is best, so one per number of requests is enough; and workers are looked at one by one only
//! where few store a block. Where many do, the search may still pass all that do not, so the bound is O(levels × workers).
use super::softmax::Softmax;
use super::{Asked, Choice, Loads, Routing, View};
use crate::fleet::router::{HoldersOf, LoadOf};

/// Up to this number, all workers that store a block are looked at.
const FEW: u32 = 32;

pub(super) struct PrefixAware {
    block_tokens: u32,
    softmax: Softmax,
    costs: Vec<f64>,
    credits: Vec<u32>,
}

/// The lowest (cost, worker) so far, and the credit that it came from.
struct Best {
    cost: u128,
    worker: u32,
    credited_tokens: u32,
}

impl PrefixAware {
    pub fn new(block_tokens: u32, softmax: Softmax) -> PrefixAware {
        PrefixAware { block_tokens, softmax, costs: Vec::new(), credits: Vec::new() }
    }

    /// Draws a worker. Looks at all, and for their credits at every level of the prompt: see [`credits`].
    fn draw(&mut self, asked: &Asked<'_>, loads: &Loads, view: &View) -> Option<Choice> {
        let alive = loads.alive();
        credits(asked, self.block_tokens, alive, view, &mut self.credits);
        self.costs.clear();
        for (&worker, &credited) in alive.iter().zip(&self.credits) {
            let load = loads.of(worker).unwrap_or_default();
            self.costs.push(cost_at(asked.prompt_tokens - credited, load) as f64);
        }
        let at = self.softmax.draw(&self.costs, 1.0)?;
        Some(Choice { worker: alive[at], credited_tokens: self.credits[at] })
    }
}

impl Routing for PrefixAware {
    fn choose(&mut self, asked: &Asked<'_>, loads: &Loads, view: &View) -> Option<Choice> {
        if self.softmax.draws() {
            return self.draw(asked, loads, view);
        }
        let mut best = None;
        search(asked.prompt_tokens, 0, loads, &mut best, |_| true);
        for_each_level(asked, self.block_tokens, view, |credited, holders| {
            if holders.len() > FEW {
                search(asked.prompt_tokens, credited, loads, &mut best, |worker| holders.contains(worker));
                return;
            }
            holders.for_each(|worker| {
                if let Some(load) = loads.of(worker) {
                    note(&mut best, cost_at(asked.prompt_tokens - credited, load), worker, credited);
                }
            });
        });
        best.map(|best| Choice { worker: best.worker, credited_tokens: best.credited_tokens })
    }
}

fn cost(tokens: u32, requests: u32, backlog_tokens: u64) -> u128 {
    (u128::from(tokens) + u128::from(backlog_tokens)) * (u128::from(requests) + 1)
}

fn cost_at(tokens: u32, load: LoadOf) -> u128 {
    cost(tokens, load.requests, load.backlog_tokens)
}

/// Calls `each` with every set of workers along the prompt that differs from the next one, and with the prompt tokens that
/// its workers need not compute.
pub(super) fn for_each_level<'v>(
    asked: &Asked<'_>,
    block_tokens: u32,
    view: &'v View,
    mut each: impl FnMut(u32, HoldersOf<'v>),
) {
    let usable = (asked.prompt_tokens - 1) / block_tokens;
    let mut level: Option<(u32, HoldersOf<'v>)> = None;
    for (blocks, hash) in (1..=usable).zip(asked.hashes) {
        let Some(holders) = view.holders(*hash) else { break };
        // Those that store a block also store the one before it, so sets of the same size are the same.
        if let Some((credited, before)) = level.filter(|(_, before)| before.len() != holders.len()) {
            each(credited, before);
        }
        level = Some((blocks * block_tokens, holders));
    }
    if let Some((credited, holders)) = level {
        each(credited, holders);
    }
}

/// The prompt tokens that each of the workers `alive` need not compute. O(workers + h log workers), where h counts the workers
/// of every level: a worker counts once for each level that it stores.
pub(super) fn credits(
    asked: &Asked<'_>,
    block_tokens: u32,
    alive: &[u32],
    view: &View,
    credits: &mut Vec<u32>,
) {
    credits.clear();
    credits.resize(alive.len(), 0);
    for_each_level(asked, block_tokens, view, |credited, holders| {
        holders.for_each(|worker| {
            if let Ok(at) = alive.binary_search(&worker) {
                credits[at] = credited;
            }
        });
    });
}

/// Looks for a lower cost among all workers that `is_in`, if each is credited with so many tokens.
fn search(
    prompt_tokens: u32,
    credited: u32,
    loads: &Loads,
    best: &mut Option<Best>,
    is_in: impl Fn(u32) -> bool,
) {
    let tokens = prompt_tokens - credited;
    for (requests, group) in loads.groups() {
        let is_too_dear = |backlog_tokens: u64, best: &Option<Best>| {
            let least = cost(tokens, requests, backlog_tokens);
            best.as_ref().is_some_and(|best| least > best.cost)
        };
        if is_too_dear(0, best) {
            break; // as are all groups with more requests
        }
        for (backlog_tokens, worker) in group {
            if is_too_dear(backlog_tokens, best) {
                break;
            }
            if is_in(worker) {
                note(best, cost(tokens, requests, backlog_tokens), worker, credited);
                break;
            }
        }
    }
}

fn note(best: &mut Option<Best>, cost: u128, worker: u32, credited_tokens: u32) {
    if best.as_ref().is_none_or(|best| (cost, worker) < (best.cost, best.worker)) {
        *best = Some(Best { cost, worker, credited_tokens });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// Compared with the cost of every worker, over sets of all sizes, and loads among which many are equal.
    #[test]
    fn the_lowest_cost_of_all() {
        let mut random = SplitMix64(4);
        let mut credited = 0;
        for round in 0..3000 {
            let n_workers = 1 + random.below(if round % 3 == 0 { 400 } else { 40 });
            let (mut loads, mut view) = (Loads::new(n_workers), View::new(n_workers));
            let hashes: Vec<u64> = (0..8).collect();
            let mut depths = vec![0u32; n_workers as usize];
            let most = [1, 4, 30][random.below(3) as usize];
            let scarce = 1 + random.below(20);
            for worker in 0..n_workers {
                if random.below(20) == 0 {
                    continue; // it is not there
                }
                loads.joined(worker);
                for _ in 0..random.below(most) {
                    loads.sent(worker, 100, u64::from(random.below(4)) * 16);
                }
                if random.below(scarce) == 0 {
                    depths[worker as usize] = random.below(9);
                    hashes[..depths[worker as usize] as usize]
                        .iter()
                        .for_each(|&hash| view.note(worker, hash, true));
                }
            }
            let asked = Asked { session: 0, prompt_tokens: 1 + random.below(140), hashes: &hashes };
            let credit = |worker: u32| (depths[worker as usize]).min((asked.prompt_tokens - 1) / 16) * 16;
            let expected = (0..n_workers)
                .filter_map(|worker| {
                    let tokens = asked.prompt_tokens - credit(worker);
                    Some((cost_at(tokens, loads.of(worker)?), worker))
                })
                .min()
                .map(|(_, worker)| Choice { worker, credited_tokens: credit(worker) });
            let mut policy = PrefixAware::new(16, Softmax::new(0.0, 1));
            assert_eq!(policy.choose(&asked, &loads, &view), expected, "round {round}");
            credited += expected.map_or(0, |choice| choice.credited_tokens);

            // At a temperature so low that only equal costs are drawn from, it is one of the lowest.
            let mut policy = PrefixAware::new(16, Softmax::new(1e-9, round));
            let drawn = policy.choose(&asked, &loads, &view);
            let cost = |choice: Option<Choice>| {
                choice
                    .map(|it| cost_at(asked.prompt_tokens - it.credited_tokens, loads.of(it.worker).unwrap()))
            };
            assert_eq!(cost(drawn), cost(expected), "round {round}");
        }
        assert!(credited > 10_000, "{credited}");
    }
}
