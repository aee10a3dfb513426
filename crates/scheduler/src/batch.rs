//! Builds the next step: which requests take part, and with how many tokens.
//!
//! 1. Every decoding request gets one token.
//! 2. The rest of the budget goes to prefills in rank order, as whole prompts or chunks. A prompt token of a request
//!    with `skip_prefix_cache` counts twice, because the caller wants output for each token. Waiting requests are
//!    admitted after the prefills of the batch or, if the policy preempts, at their rank among them. If a
//!    sliding-window group has less space than the budget, that space is the limit, so a long prompt passes through a
//!    small pool in chunks.
//!
//! If the policy preempts, a waiting request may also take the place in the batch or the memory of a lower-ranked
//! request. A victim is ranked by the best of its current rank, its rank on arrival, and its rank without its computed
//! tokens. Progress therefore never makes a request easier to preempt, decoding alone never changes the batch, and two
//! requests cannot preempt each other forever, each losing its computed tokens.
mod fused_steps;

use crate::entry::State;
use crate::executor::Work;
use crate::memory::StepTime;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Fills `batch`. Returns `false` if there is nothing to run.
    pub(crate) fn build_batch(&mut self, now: StepTime, mut admit: bool) -> bool {
        let mut token_budget = self.config.max_batch_tokens;
        let preempts = self.order.policy().preempts();
        let mut prefilling = std::mem::take(&mut self.prefilling);
        prefilling.clear();
        for i in 0..self.running.len() {
            let index = self.running[i];
            let entry = &mut self.entries[index as usize];
            if entry.known - entry.cached == 1 {
                entry.scheduled = 1;
                token_budget -= 1; // `max_batch` is at most `max_batch_tokens`
            } else {
                entry.scheduled = 0;
                prefilling.push(self.key(index));
            }
        }
        token_budget = token_budget.min(self.prompt_limit);
        if prefilling.len() > 1 {
            prefilling.sort_unstable();
        }
        if self.blocked.is_some_and(|surplus| self.space().surplus() > surplus) {
            self.blocked = None;
        }
        let mut next = 0;
        loop {
            let full = self.running.len() >= self.config.max_batch as usize;
            if token_budget == 0 && !(admit && preempts && full) {
                break;
            }
            if full && !preempts {
                admit = false;
            }
            let prefill = prefilling.get(next).copied();
            let head = if admit && self.blocked.is_none() { self.next_waiting() } else { None };
            let head = head.filter(|h| prefill.is_none_or(|p| preempts && *h < p));
            if head.is_some() {
                match self.admit(now, &mut token_budget) {
                    Some(index) => self.schedule(index, &mut token_budget),
                    None => admit = false,
                }
                continue;
            }
            let Some(key) = prefill else { break };
            next += 1;
            // A request admitted in this loop may have preempted it.
            if self.entries[key.index as usize].state == State::Running {
                self.schedule(key.index, &mut token_budget);
            }
        }
        self.prefilling = prefilling;
        self.batch.clear();
        for &index in &self.running {
            let entry = &self.entries[index as usize];
            if entry.scheduled > 0 {
                let samples = entry.cached + entry.scheduled == entry.known;
                self.batch.push(Work {
                    request: entry.id,
                    first: entry.cached,
                    n_tokens: entry.scheduled,
                    samples,
                    decodes: samples && entry.scheduled == 1 && entry.generated() > 0,
                    index,
                });
            }
        }
        !self.batch.is_empty()
    }

    /// Gives a request its part of the remaining budget.
    fn schedule(&mut self, index: u32, token_budget: &mut u32) {
        let entry = &mut self.entries[index as usize];
        // With `skip_prefix_cache`, every prompt token has its own logits, which count as one more token. An odd budget
        // is rounded up; otherwise a budget of one could never make progress.
        let each = if entry.skip_prefix_cache { 2 } else { 1 };
        entry.scheduled = (entry.known - entry.cached).min(token_budget.div_ceil(each));
        *token_budget = token_budget.saturating_sub(entry.scheduled.saturating_mul(each));
    }
}
