//! When there is no space, or no place: who has to go.
use crate::config::Preempted;
use crate::entry::Key;
use crate::executor::Work;
use crate::log::Decision;
use crate::memory::At;
use crate::request::{End, Reason};
use crate::scheduler::Scheduler;
use kvist_cache::GroupId;

impl Scheduler {
    /// A step did not fit `group`: `needed` cells, `available` if nobody's blocks were evicted. In this order: evict
    /// what only the index holds; compute less of the prompts at once, if the group lets go of what leaves its window;
    /// drop the cache of the lowest-ranked paused request; preempt the lowest-ranked running one; end the last one,
    /// which has the cache to itself. `true` if evictions were enough to go on: then the batch is what it was.
    pub(crate) fn relieve(&mut self, at: At, group: GroupId, needed: u32, available: u32) -> bool {
        self.moved = true;
        if available >= needed {
            let freed = self.memory.make_room(needed, at);
            self.counters.make_rooms += 1;
            self.decide(at, Decision::MakeRoom { needed, freed });
            if freed > 0 {
                return true;
            }
        }
        if self.memory.lets_go(group) && self.shorten_prompts(needed.saturating_sub(available)) {
            return false;
        }
        if let Some(&worst) = self.holders.last() {
            self.drop_cache(at, worst.slot);
            return false;
        }
        let worst = self.worst_running().expect("a step has at least one request");
        if self.running.len() > 1 {
            self.preempt(at, worst.slot, "memory", false);
        } else {
            self.end(at, worst.slot, End::Refused(Reason::CacheFull));
        }
        false
    }

    /// Fewer tokens of prompts in this step, by the cells that are `missing`, and by one at least, so that it goes on.
    /// Not less than a block beside others, or they would wait for a chunk that lets no request advance.
    fn shorten_prompts(&mut self, missing: u32) -> bool {
        let of_prompts = |w: &&Work| w.n_tokens > 1 || !w.samples;
        let n_tokens: u32 = self.batch.iter().filter(of_prompts).map(|w| w.n_tokens).sum();
        let n_tokens = n_tokens.min(self.prompt_limit);
        let least = if self.running.len() > 1 { self.memory.block_tokens() } else { 1 };
        if n_tokens <= least {
            return false;
        }
        self.prompt_limit = n_tokens.saturating_sub(missing.max(1)).max(least);
        true
    }

    /// How a request that holds cells compares with those that would take its place.
    pub(crate) fn victim_key(&self, slot: u32) -> Key {
        let mut key = self.key(slot);
        let arrived = self.order.rank(&self.entries[slot as usize].view().as_it_arrived());
        key.rank = key.rank.min(arrived);
        key
    }

    fn worst_running(&self) -> Option<Key> {
        self.running.iter().map(|&slot| self.victim_key(slot)).max()
    }

    /// Preempt the lowest-ranked running request, if it ranks behind `key` and the policy preempts.
    pub(crate) fn preempt_behind(&mut self, at: At, key: Key, why: &str, budget: &mut u32) -> bool {
        if !self.order.policy().preempts() {
            return false;
        }
        let Some(worst) = self.worst_running().filter(|worst| worst.rank > key.rank) else { return false };
        *budget += self.entries[worst.slot as usize].share;
        let keep = self.config.preempted == Preempted::Kept;
        self.preempt(at, worst.slot, why, keep);
        true
    }

    /// Drop the cache of the lowest-ranked paused request, if it ranks behind `key`.
    pub(crate) fn drop_behind(&mut self, at: At, key: Key) -> bool {
        match self.holders.last() {
            Some(&worst) if self.victim_key(worst.slot) > key => {
                self.drop_cache(at, worst.slot);
                true
            }
            _ => false,
        }
    }

    /// Drop the cache of the lowest-ranked paused request other than `slot`.
    pub(crate) fn drop_worst_but(&mut self, at: At, slot: u32) -> bool {
        let worst = self.holders.iter().rev().find(|key| key.slot != slot).copied();
        worst.map(|key| self.drop_cache(at, key.slot)).is_some()
    }

    /// Out of the batch and back into the queue, generated tokens kept; the cache too if `keep`.
    fn preempt(&mut self, at: At, slot: u32, why: &str, keep: bool) {
        self.leave(slot);
        let entry = &mut self.entries[slot as usize];
        entry.share = 0;
        entry.preemptions += 1;
        let id = entry.id;
        self.counters.preemptions += 1;
        self.decide(at, Decision::Preempt { id, why, kept: keep });
        if !keep {
            self.lose(slot);
        }
        self.wait(slot);
    }

    /// A paused request loses what it kept.
    fn drop_cache(&mut self, at: At, slot: u32) {
        let entry = &self.entries[slot as usize];
        let (id, tokens) = (entry.id, entry.cached);
        self.decide(at, Decision::Drop { id, tokens });
        self.leave(slot);
        self.lose(slot);
        self.wait(slot);
    }

    fn lose(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        entry.lost_tokens += u64::from(entry.cached);
        self.counters.lost_tokens += u64::from(entry.cached);
        self.release(slot);
    }
}
