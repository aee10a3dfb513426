//! What to evict, shorten, drop or preempt when memory or the batch are full.
use crate::config::Preempted;
use crate::entry::{Key, Lower};
use crate::executor::Work;
use crate::log::Decision;
use crate::memory::StepTime;
use crate::policy::View;
use crate::request::{End, RefusalReason};
use crate::scheduler::Scheduler;
use kvist_cache::GroupId;

/// How memory was freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freed {
    /// By eviction alone: the batch is unchanged.
    Evicted,
    /// The batch has changed.
    Changed,
    /// Not now: copies to or from a tier take the memory, and nothing runs until one of them has ended.
    Later,
}

impl Scheduler {
    /// Frees memory after a step did not fit `group`. `needed`: cells the step needs; `available`: cells that are free
    /// or evictable. Tries in this order: evict blocks that only the prefix index uses; give up retained prompts; compute fewer prompt tokens in
    /// this step, if the group frees blocks that left its window; drop the cache of the lowest-ranked paused request;
    /// preempt the lowest-ranked running request; end the only running request, which already has the cache to itself.
    /// If copies to or from a tier have the rest of the cache, that request waits for them.
    pub(crate) fn free_memory(
        &mut self,
        now: StepTime,
        group: GroupId,
        needed: u32,
        available: u32,
    ) -> Freed {
        self.batch_changed = true;
        if available >= needed {
            let freed = self.memory.evict_until_free(needed, now);
            self.counters.evictions += 1;
            self.decide(now, Decision::Evict { needed, freed });
            if freed > 0 {
                return Freed::Evicted;
            }
        }
        if self.unretain(now, false) {
            return Freed::Evicted;
        }
        if self.memory.frees_out_of_window(group) && self.shorten_prompts(needed.saturating_sub(available)) {
            return Freed::Changed;
        }
        if let Some(&worst) = self.paused.last() {
            self.drop_cache(now, worst.index);
            return Freed::Changed;
        }
        let worst = self.worst_running().expect("a step has at least one request");
        if self.running.len() > 1 {
            self.preempt(now, worst.index, "memory", false);
        } else if self.tiers.as_ref().is_some_and(|tiers| tiers.is_busy()) {
            return Freed::Later;
        } else if self.unretain(now, true) {
            return Freed::Evicted;
        } else {
            self.end(now, worst.index, End::Refused(RefusalReason::CacheFull));
        }
        Freed::Changed
    }

    /// Lowers the limit on prompt tokens in this step by the `missing` cells, and by at least one token so that the
    /// retry loop makes progress. If other requests run too, the limit never goes below one block: they would
    /// otherwise wait for a chunk so small that no request advances.
    fn shorten_prompts(&mut self, missing: u32) -> bool {
        let of_prompts = |w: &&Work| w.n_tokens > 1 || !w.samples;
        let n_tokens: u32 = self.batch.iter().filter(of_prompts).map(|w| w.n_tokens).sum();
        let n_tokens = n_tokens.min(self.prompt_limit);
        let min = if self.running.len() > 1 { self.memory.block_tokens() } else { 1 };
        if n_tokens <= min {
            return false;
        }
        self.prompt_limit = n_tokens.saturating_sub(missing.max(1)).max(min);
        true
    }

    /// The rank used to compare a request that has cells with requests that want them: the best of its current rank,
    /// its rank on arrival, and the rank that it would have without its cells. Without the last one, a victim could
    /// rank before the request that preempted it, and preempt that one in return.
    pub(crate) fn victim_key(&self, index: u32) -> Key {
        let mut key = self.key(index);
        let view = self.entries[index as usize].view();
        let without_cells = View { cached_tokens: 0, ..view };
        key.rank = key.rank.min(self.order.rank(&view.as_it_arrived())).min(self.order.rank(&without_cells));
        key
    }

    fn worst_running(&self) -> Option<Key> {
        self.running.iter().map(|&index| self.victim_key(index)).max()
    }

    /// Whether the policy lets a waiting request preempt this running one. `victim` is a
    /// [`victim_key`](Self::victim_key).
    pub(crate) fn may_preempt(&self, key: Key, victim: Key) -> bool {
        self.order.policy().preempts() && victim.rank > key.rank
    }

    /// Preempts the lowest-ranked running request, if it ranks lower than `key` and the policy allows preemption.
    pub(crate) fn preempt_lower_ranked(
        &mut self,
        now: StepTime,
        key: Key,
        why: &str,
        token_budget: &mut u32,
    ) -> bool {
        let worst = self.worst_running().filter(|worst| self.may_preempt(key, *worst));
        let Some(worst) = worst else { return false };
        *token_budget += self.entries[worst.index as usize].scheduled;
        let keep = self.config.preempted == Preempted::Kept;
        self.preempt(now, worst.index, why, keep);
        true
    }

    /// Drops the cache of the lowest-ranked paused request, if it ranks lower than `key`.
    pub(crate) fn drop_lower_ranked(&mut self, now: StepTime, key: Key) -> bool {
        match self.paused.last() {
            Some(&worst) if self.victim_key(worst.index) > key => {
                self.drop_cache(now, worst.index);
                true
            }
            _ => false,
        }
    }

    /// Drops the cache of the lowest-ranked paused request other than `index`.
    pub(crate) fn drop_worst_except(&mut self, now: StepTime, index: u32) -> bool {
        let worst = self.paused.iter().rev().find(|key| key.index != index).copied();
        worst.map(|key| self.drop_cache(now, key.index)).is_some()
    }

    /// Drops the cache of the lowest-ranked paused request. Returns whether there was one.
    pub(crate) fn drop_one(&mut self, now: StepTime) -> bool {
        let worst = self.paused.last().map(|worst| worst.index);
        worst.map(|index| self.drop_cache(now, index)).is_some()
    }

    /// Preempts the lowest-ranked running request, for a smaller cache. Returns whether there was one.
    pub(crate) fn preempt_one(&mut self, now: StepTime) -> bool {
        let worst = self.worst_running();
        worst.map(|worst| self.preempt(now, worst.index, "resize", false)).is_some()
    }

    /// Moves a request from the batch back to the waiting queue. Its generated tokens are kept; its cache only if
    /// `keep`.
    fn preempt(&mut self, now: StepTime, index: u32, why: &str, keep: bool) {
        self.leave(index);
        let entry = &mut self.entries[index as usize];
        entry.scheduled = 0;
        entry.preemptions += 1;
        let id = entry.id;
        self.counters.preemptions += 1;
        self.decide(now, Decision::Preempt { id, why, kept: keep });
        if !keep {
            self.drop_cells(now, index);
        }
        self.wait(index);
    }

    /// Drops the kept cache of a paused request.
    fn drop_cache(&mut self, now: StepTime, index: u32) {
        let entry = &self.entries[index as usize];
        let (id, tokens) = (entry.id, entry.cached);
        self.decide(now, Decision::Drop { id, tokens });
        self.leave(index);
        self.drop_cells(now, index);
        self.wait(index);
    }

    /// Drops the cells of a request. What the tiers have of them may be loaded again.
    fn drop_cells(&mut self, now: StepTime, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.lost_tokens += u64::from(entry.cached);
        self.counters.lost_tokens += u64::from(entry.cached);
        self.release(index);
        if matches!(self.entries[index as usize].lower, Lower::Done | Lower::Declined { .. }) {
            // Its blocks are still cached, and are the next to be evicted.
            self.ask_tiers(now.now_ns, index, true);
        }
    }
}
