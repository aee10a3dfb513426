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
