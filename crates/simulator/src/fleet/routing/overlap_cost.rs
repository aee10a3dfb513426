//! The worker with the lowest cost, after the KV router of Dynamo: `worker_logit` of dynamo-kv-router 1.6.1
//! (`src/scheduling/selector/reference.rs`) with its defaults.
//!
//! The cost of a worker is max(0, blocks to compute − weight × blocks of the prompt that its cache is known to store) +
//! blocks of its requests in flight. Blocks to compute are those of its backlog and of the whole prompt. At a temperature of
//! 0 the lowest cost wins, of several a random one; otherwise a worker is drawn by the softmax of −cost / ((highest − lowest
//! cost) · temperature).
//!
//! Dynamo counts a block that requests in flight share once, here each request counts its own. Every
//! request looks at every worker, also at a temperature of 0, and for their credits at every level of the prompt.
use super::prefix_aware::credits;
use super::softmax::Softmax;
use super::{Asked, Choice, Loads, Routing, View};

pub(super) struct OverlapCost {
    block_tokens: u32,
    weight: f64,
    softmax: Softmax,
    costs: Vec<f64>,
    credits: Vec<u32>,
}

impl OverlapCost {
    pub fn new(block_tokens: u32, weight: f64, softmax: Softmax) -> OverlapCost {
        OverlapCost { block_tokens, weight, softmax, costs: Vec::new(), credits: Vec::new() }
    }
}

impl Routing for OverlapCost {
    fn choose(&mut self, asked: &Asked<'_>, loads: &Loads, view: &View) -> Option<Choice> {
        let alive = loads.alive();
        credits(asked, self.block_tokens, alive, view, &mut self.credits);
        let blocks = |tokens: u64| tokens as f64 / f64::from(self.block_tokens);
        self.costs.clear();
        for (&worker, &credited) in alive.iter().zip(&self.credits) {
            let load = loads.of(worker).unwrap_or_default();
            let compute = blocks(load.backlog_tokens + u64::from(asked.prompt_tokens));
            let compute = (compute - self.weight * blocks(credited.into())).max(0.0);
            self.costs.push(compute + blocks(load.prompt_tokens));
        }
        let at = if self.softmax.draws() {
            let highest = self.costs.iter().copied().fold(0.0, f64::max);
            let lowest = self.costs.iter().copied().fold(f64::INFINITY, f64::min);
            self.softmax.draw(&self.costs, highest - lowest)
        } else {
            self.softmax.lowest(&self.costs)
        }?;
        Some(Choice { worker: alive[at], credited_tokens: self.credits[at] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand, with blocks of 10 tokens and a prompt of 40: worker 0 is idle and knows nothing, worker 1 has a request of
    /// 30 tokens that it decodes and stores the first 20 tokens, worker 2 computes 20 of 50 tokens and stores all.
    #[test]
    fn costs_by_hand() {
        let (mut loads, mut view) = (Loads::new(3), View::new(3));
        (0..3).for_each(|worker| loads.joined(worker));
        loads.sent(1, 30, 0);
        loads.sent(2, 50, 20);
        for (worker, depth) in [(1, 2), (2, 4)] {
            (0..depth).for_each(|hash| view.note(worker, hash, true));
        }
        let asked = Asked { session: 0, prompt_tokens: 40, hashes: &[0, 1, 2, 3] };
        // The last block has the last token, which is computed: 3 blocks of worker 2 count.
        for (weight, costs, chosen) in [
            (0.0, [4.0, 7.0, 11.0], 0),
            (1.0, [4.0, 5.0, 8.0], 0),
            (2.0, [4.0, 3.0, 5.0], 1),
            (3.0, [4.0, 3.0, 5.0], 1),
        ] {
            let mut policy = OverlapCost::new(10, weight, Softmax::new(0.0, 1));
            let choice = policy.choose(&asked, &loads, &view);
            assert_eq!(policy.costs, costs, "weight {weight}");
            let credited_tokens = [0, 20, 30][chosen as usize];
            assert_eq!(choice, Some(Choice { worker: chosen, credited_tokens }), "weight {weight}");
        }
        // Of equal costs either may be chosen; a high temperature chooses any.
        let seen = |temperature| {
            let mut policy = OverlapCost::new(10, 1.5, Softmax::new(temperature, 3));
            let mut seen: Vec<u32> =
                (0..200).filter_map(|_| Some(policy.choose(&asked, &loads, &view)?.worker)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!((seen(0.0), seen(50.0)), (vec![0, 1], vec![0, 1, 2]));
    }
}
