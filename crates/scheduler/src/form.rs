//! Which requests make up the next step, and how many tokens of each.
//!
//! 1. Everybody who decodes gets one token.
//! 2. What is left of the budget goes to prefills in the order of rank, whole prompts or chunks of them; a token of a
//!    prompt that is computed afresh, because something is wanted of each, counts as two. Who waits
//!    is admitted when its turn comes: behind the prefills of the batch, or, under a policy that preempts, among them.
//!    Where a group with a window has less room than the budget, the room is the bound: the chunks of a long prompt
//!    go through a small pool one after the other.
//!
//! Under a policy that preempts, who waits also takes the place or the memory of whoever ranks behind it. A victim
//! is judged by its rank as it stands or as it arrived, whichever is better. So being served makes nobody an easier
//! victim, decoding alone never changes who runs, and two requests cannot preempt each other forever, each losing what
//! it had computed.
use crate::entry::State;
use crate::executor::Work;
use crate::memory::At;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Fill `batch`; `false` if there is nothing to run.
    pub(crate) fn form(&mut self, at: At, mut admit: bool) -> bool {
        let mut budget = self.config.max_batch_tokens;
        let preempts = self.order.policy().preempts();
        let mut prefilling = std::mem::take(&mut self.prefilling);
        prefilling.clear();
        for i in 0..self.running.len() {
            let slot = self.running[i];
            let entry = &mut self.entries[slot as usize];
            if entry.known - entry.cached == 1 {
                entry.share = 1;
                budget -= 1; // `max_batch` is at most `max_batch_tokens`
            } else {
                entry.share = 0;
                prefilling.push(self.key(slot));
            }
        }
        budget = budget.min(self.prompt_limit);
        if prefilling.len() > 1 {
            prefilling.sort_unstable();
        }
        if self.blocked.is_some_and(|spare| self.space().spare() > spare) {
            self.blocked = None;
        }
        let mut next = 0;
        loop {
            let full = self.running.len() >= self.config.max_batch as usize;
            if budget == 0 && !(admit && preempts && full) {
                break;
            }
            if full && !preempts {
                admit = false;
            }
            let prefill = prefilling.get(next).copied();
            let head = if admit && self.blocked.is_none() { self.waiting.first().copied() } else { None };
            let head = head.filter(|h| prefill.is_none_or(|p| preempts && *h < p));
            if head.is_some() {
                match self.admit(at, &mut budget) {
                    Some(slot) => self.serve(slot, &mut budget),
                    None => admit = false,
                }
                continue;
            }
            let Some(key) = prefill else { break };
            next += 1;
            // It may have been preempted by a request that was admitted a moment ago.
            if self.entries[key.slot as usize].state == State::Running {
                self.serve(key.slot, &mut budget);
            }
        }
        self.prefilling = prefilling;
        self.batch.clear();
        for &slot in &self.running {
            let entry = &self.entries[slot as usize];
            if entry.share > 0 {
                let samples = entry.cached + entry.share == entry.known;
                self.batch.push(Work {
                    request: entry.id,
                    first: entry.cached,
                    n_tokens: entry.share,
                    samples,
                    decodes: samples && entry.share == 1 && entry.generated() > 0,
                    slot,
                });
            }
        }
        !self.batch.is_empty()
    }

    /// A share of what is left of the budget.
    fn serve(&mut self, slot: u32, budget: &mut u32) {
        let entry = &mut self.entries[slot as usize];
        // Where something is wanted of every token, each has logits of its own, which count as another token. An odd
        // budget is rounded up, or a budget of one would never go on.
        let each = if entry.fresh { 2 } else { 1 };
        entry.share = (entry.known - entry.cached).min(budget.div_ceil(each));
        *budget = budget.saturating_sub(entry.share.saturating_mul(each));
    }
}
