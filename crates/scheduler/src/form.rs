//! Which requests make up the next step, and how many tokens of each.
//!
//! 1. Everybody who decodes gets one token.
//! 2. What is left of the budget goes to prefills in the order of rank, whole prompts or chunks of them. Who waits
//!    is admitted when its turn comes: behind the prefills of the batch, or, under a policy that preempts, among them.
//!
//! Under a policy that preempts, who waits also takes the place or the memory of whoever ranks behind it. A victim
//! is judged by its rank as it stands and by its rank without its cache, whichever is better: else two requests
//! could preempt each other forever, each losing what it had computed.
use crate::config::{Admission, PrefixOrder};
use crate::entry::{Key, State};
use crate::executor::Work;
use crate::log::Decision;
use crate::memory::At;
use crate::request::{End, Reason};
use crate::scheduler::Scheduler;
use kvist_cache::SeqId;

/// Among how many of equal rank the longest hit is looked for.
const TIES: usize = 64;

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
        if prefilling.len() > 1 {
            prefilling.sort_unstable();
        }
        let mut next = 0;
        loop {
            let full = self.running.len() >= self.config.max_batch as usize;
            if budget == 0 && !(admit && preempts && full) {
                break;
            }
            let prefill = prefilling.get(next).copied();
            let head = if admit && !self.blocked { self.waiting.first().copied() } else { None };
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
        entry.share = (entry.known - entry.cached).min(*budget);
        *budget -= entry.share;
    }

    /// Admit whose turn it is. `None` if there is no place, or no memory, for it.
    fn admit(&mut self, at: At, budget: &mut u32) -> Option<u32> {
        let full = self.running.len() >= self.config.max_batch as usize;
        if full && !self.order.policy().preempts() {
            return None;
        }
        loop {
            let key = self.pick()?;
            let head = self.waiting.first().copied()?;
            let full = self.running.len() >= self.config.max_batch as usize;
            if full && !self.preempt_behind(at, key, "rank", budget) {
                return None;
            }
            loop {
                if self.enter(at, key.slot) {
                    if key != head {
                        self.entries[head.slot as usize].overtaken += 1;
                    }
                    return Some(key.slot);
                }
                if self.drop_behind(at, key) || self.preempt_behind(at, key, "memory", budget) {
                    continue;
                }
                if !self.running.is_empty() {
                    self.blocked = true;
                    return None;
                }
                if self.drop_worst_but(at, key.slot) {
                    continue;
                }
                // Nobody else holds anything.
                self.end(at, key.slot, End::Refused(Reason::NeverFits));
                break;
            }
        }
    }

    /// Whose turn it is: the head of the queue, or a longer prefix hit that may overtake it.
    fn pick(&self) -> Option<Key> {
        let head = self.waiting.first().copied()?;
        let n = match self.config.prefix_order {
            PrefixOrder::Off => return Some(head),
            PrefixOrder::Ties => TIES,
            PrefixOrder::Window(n) if self.entries[head.slot as usize].overtaken < n => n as usize,
            PrefixOrder::Window(_) => return Some(head),
        };
        let ties = self.config.prefix_order == PrefixOrder::Ties;
        let candidates = self.waiting.iter().take(n).take_while(|key| !ties || key.rank == head.rank);
        let hit = |key: &Key| {
            let entry = &self.entries[key.slot as usize];
            match entry.seq {
                Some(_) => entry.cached,
                None => self.memory.lookup(&entry.salt, &entry.prompt, entry.known_content()),
            }
        };
        let mut best = (hit(&head), head);
        for key in candidates.skip(1) {
            let hit = hit(key);
            if hit > best.0 {
                best = (hit, *key);
            }
        }
        Some(best.1)
    }

    /// Into the batch, if there is memory: with what it kept, or with what the prefix index supplies.
    fn enter(&mut self, at: At, slot: u32) -> bool {
        let entry = &self.entries[slot as usize];
        let (known, cached) = (entry.known, entry.cached);
        let alone = self.running.is_empty();
        let mut reserve = 0;
        let mut demand = self.memory.cells(known) - self.memory.cells(cached);
        match self.config.admission {
            Admission::Conservative => {
                // Who kept its cells kept its reservation.
                if entry.reserved == 0 {
                    reserve = self.memory.cells(entry.prompt_tokens + entry.max_new - 1);
                    if self.reserved + reserve > self.memory.capacity() {
                        return false;
                    }
                }
                demand = 0;
            }
            Admission::Optimistic { headroom_tokens } => {
                if !alone {
                    demand += u64::from(headroom_tokens) + self.promised();
                }
            }
        }
        let resumed = entry.seq.is_some();
        let mut hit = 0;
        if resumed {
            if self.memory.room() < demand {
                return false;
            }
        } else {
            let seq = SeqId(self.next_seq);
            let plenty = self.memory.room() >= demand;
            if !plenty {
                let hit = self.memory.lookup(&entry.salt, &entry.prompt, entry.known_content());
                if self.memory.room() + u64::from(hit) < demand {
                    return false;
                }
            }
            let miss = (self.explain && entry.admitted_ns.is_none())
                .then(|| self.memory.explain(&entry.salt, &entry.prompt, entry.known_content()));
            hit = self.memory.open(seq, &entry.salt, &entry.prompt, entry.known_content(), at);
            if !plenty && self.memory.room() + u64::from(hit) < demand {
                self.memory.release(seq);
                self.next_seq = self.next_seq.wrapping_add(1);
                return false;
            }
            self.next_seq = self.next_seq.wrapping_add(1);
            let entry = &mut self.entries[slot as usize];
            entry.seq = Some(seq);
            entry.miss = entry.miss.or(miss);
        }
        self.leave(slot);
        let entry = &mut self.entries[slot as usize];
        entry.state = State::Running;
        entry.share = 0;
        entry.reserved += reserve;
        self.reserved += reserve;
        let id = entry.id;
        if resumed {
            self.decide(at, Decision::Resume { id });
        } else {
            entry.cached = hit;
            entry.stored = hit;
            match entry.admitted_ns {
                None => entry.hit_tokens = hit,
                Some(_) => entry.regained_tokens += hit,
            }
            entry.admitted_ns.get_or_insert(at.now_ns);
            self.counters.hit_tokens += u64::from(hit);
            self.decide(at, Decision::Admit { id, hit });
        }
        self.seat(slot);
        true
    }

    /// A place among the running, in the order of sequence numbers: the cache sees ascending ones.
    fn seat(&mut self, slot: u32) {
        let seq = self.entries[slot as usize].seq;
        let place = self.running.partition_point(|&other| self.entries[other as usize].seq < seq);
        self.running.insert(place, slot);
    }

    /// Cells that the batch will still fill with what it already knows, and one block more for each.
    fn promised(&self) -> u64 {
        let due = |&slot: &u32| {
            let entry = &self.entries[slot as usize];
            let next = self.memory.cells(entry.known) + u64::from(self.memory.block_tokens());
            next - self.memory.cells(entry.cached)
        };
        self.running.iter().map(due).sum()
    }
}
