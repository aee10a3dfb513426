//! Multi-step runs: how many decode steps can be executed as one. A run ends at anything that could change a decision
//! or the cache's behavior: a request reaches `max_new`, a block must be added to the prefix index, free memory runs
//! out, or a sliding window frees blocks. The executor limits the run further for events that only it knows (arrivals,
//! ends of requests).
use crate::drafts::{BatchDrafts, Lookahead};
use crate::executor::{Batch, Work};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// The number of decode steps to run as one, such that no decision is needed before the last of them ends. Called
    /// only right after all waiting requests were considered for admission.
    pub(crate) fn max_fused_steps(&mut self, lookahead: &mut dyn Lookahead) -> u32 {
        let all_decode = self.batch.len() == self.running.len() && self.batch.iter().all(|w| w.decodes);
        if !all_decode || self.memory.shrinks_while_decoding() {
            return 1;
        }
        // Requests still waiting need room in the batch or memory. Neither becomes available before a running request
        // ends: decoding only fills the cache and makes no request easier to preempt.
        let block = self.memory.block_tokens();
        let left = |w: &Work| {
            let entry = &self.entries[w.index as usize];
            (entry.max_new - entry.generated()).min(entry.steps_to_store(block))
        };
        let limit = self.batch.iter().map(left).min().unwrap_or(1);
        let limit = self.steps_that_fit(limit);
        if limit < 2 {
            return 1;
        }
        let batch = Batch { work: &self.batch, steps: 1, entries: &self.entries, drafts: BatchDrafts::NONE };
        let steps = lookahead.max_fused_steps(batch, limit).clamp(1, limit);
        self.batch.iter_mut().for_each(|w| w.n_tokens = steps);
        steps
    }

    /// The largest number of decode steps, up to `limit`, that fit into free cells. Eviction must happen at exactly
    /// the step that needs it, as when steps run one by one.
    fn steps_that_fit(&self, limit: u32) -> u32 {
        let free = self.memory.free().saturating_sub(self.kept_free());
        let n = self.batch.len() as u64;
        let block = self.memory.block_tokens();
        let fits = |steps: u32| {
            // Each sequence begins at most ⌈`steps` / `block`⌉ new blocks.
            if n * self.memory.cells(steps) <= free {
                return true;
            }
            self.growth(steps) <= free
        };
        if fits(limit) {
            return limit;
        }
        // Upper bound for the search: even a single sequence can use at most the free cells plus the rest of its last
        // block, which is less than one block. So this many steps do not fit.
        let (mut good, mut bad) = (0, u32::try_from(free + u64::from(block)).unwrap_or(limit).min(limit));
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle) { good = middle } else { bad = middle }
        }
        good
    }

    /// Cells that stay free because cached blocks are copied to a tier and evicted in time.
    fn kept_free(&self) -> u64 {
        match &self.tiers {
            Some(tiers) if self.memory.evictable() > 0 => tiers.ahead_tokens(self.memory.capacity()),
            _ => 0,
        }
    }

    /// Cells by which the batch grows if every entry is repeated for `steps` steps.
    fn growth(&self, steps: u32) -> u64 {
        let grown = |w: &Work| self.memory.cells(w.first + w.n_tokens * steps) - self.memory.cells(w.first);
        self.batch.iter().map(grown).sum()
    }
}
