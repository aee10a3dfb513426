//! Admission: which waiting request is next, whether there is memory for it, and what to preempt or drop for it.
//!
//! A failed attempt changes nothing: no request is preempted, and no use of a block is counted. Before anything is
//! preempted, the same admission runs over hypothetical values (`dry_run.rs`).
mod dry_run;

use crate::config::{Admission, PrefixOrder};
use crate::entry::{Entry, Found, Key, Lower, State};
use crate::log::Decision;
use crate::memory::{Memory, StepTime};
use crate::request::{End, RefusalReason};
use crate::scheduler::Scheduler;
use kvist_cache::{Lookup, SeqId};

/// For [`PrefixOrder::Ties`]: how many requests of equal rank are searched for the longest hit, and how often the head
/// of the queue may be overtaken.
const TIES: u32 = 64;

/// The inputs of the admission test: current values, or those a dry run assumes after preempting some requests.
#[derive(Clone, Copy)]
pub(crate) struct Space {
    pub n_running: usize,
    /// Available cells: free plus evictable.
    pub available: u64,
    /// Cells that running requests still need for their known tokens, plus one block each. 0 under conservative
    /// admission, which does not use it.
    pub promised: u64,
    /// Cells reserved by conservative admission.
    pub reserved: u64,
}

impl Space {
    /// Available cells minus promised ones. After an admission failed for lack of memory, a retry fails too until this
    /// value or the prefix hit has grown.
    pub fn surplus(self) -> i128 {
        i128::from(self.available) - i128::from(self.promised)
    }
}

/// The state that an admission reads and changes: the scheduler, or the hypothetical values of a dry run (`dry_run.rs`).
pub(crate) trait MakeFit {
    /// Returns whether the batch has room for a further request.
    fn has_batch_room(&self) -> bool;
    /// Admits the request if memory suffices.
    fn try_admit(&mut self, key: Key) -> bool;
    /// Drops the cache of the lowest-ranked paused request, if it ranks lower than `key`.
    fn drop_paused_lower_ranked(&mut self, key: Key) -> bool;
    /// Preempts the lowest-ranked running request, if it ranks lower than `key` and the policy allows preemption.
    fn preempt_lower_ranked(&mut self, key: Key, why: &'static str) -> bool;
}

/// Admits `key`, at the expense of requests that rank lower. Returns `false` if it does not fit even then.
pub(crate) fn make_fit(target: &mut impl MakeFit, key: Key) -> bool {
    loop {
        let mut why = "rank";
        if target.has_batch_room() {
            if target.try_admit(key) {
                return true;
            }
            if target.drop_paused_lower_ranked(key) {
                continue;
            }
            why = "memory";
        }
        if !target.preempt_lower_ranked(key, why) {
            return false;
        }
    }
}

/// A real admission.
struct Admitting<'s, 'b> {
    scheduler: &'s mut Scheduler,
    now: StepTime,
    token_budget: &'b mut u32,
}

impl MakeFit for Admitting<'_, '_> {
    fn has_batch_room(&self) -> bool {
        self.scheduler.has_batch_room()
    }
    fn try_admit(&mut self, key: Key) -> bool {
        self.scheduler.enter(self.now, key.index)
    }
    fn drop_paused_lower_ranked(&mut self, key: Key) -> bool {
        self.scheduler.drop_lower_ranked(self.now, key)
    }
    fn preempt_lower_ranked(&mut self, key: Key, why: &'static str) -> bool {
        self.scheduler.preempt_lower_ranked(self.now, key, why, self.token_budget)
    }
}

impl Scheduler {
    fn has_batch_room(&self) -> bool {
        self.running.len() < self.config.max_batch as usize
    }

    /// Whether the next plan may admit a waiting request, as far as the batch and the memory are known. False if the batch has no place, if
    /// the last plan lacked the memory and there is no more of it now, and for requests that wait for a tier or for another's prefix.
    pub fn may_admit(&self) -> bool {
        let waits = self.next_waiting().is_some();
        let has_place = self.has_batch_room() || self.order.policy().preempts();
        waits && has_place && self.blocked.is_none_or(|surplus| self.space().surplus() > surplus)
    }

    /// Admits the next waiting request. Returns `None` if the batch is full or memory is short. Requests with blocks in a
    /// tier begin to load them instead, and the one after them is next.
    pub(crate) fn admit(&mut self, now: StepTime, token_budget: &mut u32) -> Option<u32> {
        loop {
            let index = self.admit_or_load(now, token_budget)?;
            if self.entries[index as usize].state == State::Running {
                return Some(index);
            }
        }
    }

    fn admit_or_load(&mut self, now: StepTime, token_budget: &mut u32) -> Option<u32> {
        loop {
            let key = self.pick()?;
            let head = self.next_waiting()?;
            if self.has_batch_room() && self.enter(now, key.index) {
                return Some(self.entered(key, head));
            }
            // A request comes before prompts that are only retained.
            if self.has_batch_room() && self.unretain(now, false) {
                continue;
            }
            let others_run = !self.running.is_empty();
            let helps = !others_run || self.preemption_would_help(key);
            if helps && make_fit(&mut Admitting { scheduler: self, now, token_budget }, key) {
                return Some(self.entered(key, head));
            }
            if !self.running.is_empty() {
                self.blocked = Some(self.space().surplus());
                return None;
            }
            // What is on its way to or from a tier takes memory until it has arrived.
            if self.tiers.as_ref().is_some_and(|tiers| tiers.is_busy()) {
                return None;
            }
            // The batch is empty: paused requests of a better rank lose their cells, too.
            while self.drop_worst_except(now, key.index) {
                if self.enter(now, key.index) {
                    return Some(self.entered(key, head));
                }
            }
            // No other request has cells, and pinned prompts have the rest.
            if self.unretain(now, true) {
                continue;
            }
            self.end(now, key.index, End::Refused(RefusalReason::NeverFits));
        }
    }

    fn entered(&mut self, key: Key, head: Key) -> u32 {
        if key != head {
            self.entries[head.index as usize].overtaken += 1;
        }
        key.index
    }

    /// The first waiting request that waits neither for a prefix nor for a tier.
    pub(crate) fn next_waiting(&self) -> Option<Key> {
        self.waiting.iter().find(|key| self.is_ready(key.index)).copied()
    }

    fn is_ready(&self, index: u32) -> bool {
        let waits_for_tier = match &self.entries[index as usize].lower {
            Lower::Done | Lower::Declined { .. } => false,
            Lower::Asked { .. } => true,
            Lower::Found { .. } => self.tiers.as_ref().is_some_and(|tiers| tiers.short != Some(index)),
        };
        !waits_for_tier && !self.waits_for_prefix(index)
    }

    /// Returns whether a running request is about to store blocks that this one would otherwise compute itself, or a
    /// loading one. Then the request waits, and those after it may be admitted. It cannot wait forever: a running
    /// request stores its prompt, or leaves the batch.
    pub(crate) fn waits_for_prefix(&self, index: u32) -> bool {
        let entry = &self.entries[index as usize];
        if !self.config.wait_for_prefix || !self.memory.shares() || entry.seq.is_some() {
            return false;
        }
        let block = self.memory.block_tokens();
        let whole_blocks = |n_tokens: u32| n_tokens - n_tokens % block;
        // The last known token is computed in any case.
        let wanted = whole_blocks(entry.wanted_content().min(entry.known - 1));
        let mut hit = None;
        let loading = self.tiers.as_ref().map_or(&[][..], |tiers| &tiers.loading);
        self.running.iter().chain(loading).map(|&other| &self.entries[other as usize]).any(|other| {
            let computes = wanted.min(whole_blocks(other.known_content()));
            if computes <= other.stored || entry.salt != other.salt {
                return false;
            }
            // Most prompts already differ in the block after the hit.
            let hit = *hit.get_or_insert_with(|| self.lookup(entry).hit_tokens);
            let next = hit.max(other.stored);
            let same = |range| entry.prompt.has_in_common(&other.prompt, range);
            computes > next && same(next..next + block) && same(0..next)
        })
    }

    /// The next request to admit: the head of the queue, or a request with a longer prefix hit that may overtake it.
    fn pick(&mut self) -> Option<Key> {
        let head = self.next_waiting()?;
        let n = match self.config.prefix_order {
            PrefixOrder::Off => return Some(head),
            PrefixOrder::Ties => TIES,
            PrefixOrder::Window(n) => n,
        };
        if self.entries[head.index as usize].overtaken >= n {
            return Some(head);
        }
        let ties = self.config.prefix_order == PrefixOrder::Ties;
        let mut best = None;
        let candidates: Vec<Key> = self
            .waiting
            .iter()
            .filter(|key| self.is_ready(key.index))
            .take(n as usize)
            .take_while(|key| !ties || key.rank == head.rank)
            .copied()
            .collect();
        for key in candidates {
            let entry = &mut self.entries[key.index as usize];
            let hit = match entry.seq {
                Some(_) => entry.cached,
                None => hit_tokens(&self.memory, entry),
            };
            if best.is_none_or(|(longest, _)| hit > longest) {
                best = Some((hit, key));
            }
        }
        Some(best.map_or(head, |(_, key)| key))
    }

    /// The prefix hit that the index would give. Changes nothing.
    pub(crate) fn lookup(&self, entry: &Entry) -> Lookup {
        self.memory.lookup(&entry.salt, &entry.prompt, entry.wanted_content())
    }

    /// The current values.
    pub(crate) fn space(&self) -> Space {
        let promised = match self.config.admission {
            Admission::Conservative => 0,
            Admission::Optimistic { .. } => {
                self.running.iter().map(|&index| self.remaining_demand(index)).sum()
            }
        };
        Space {
            n_running: self.running.len(),
            available: self.memory.available(),
            promised,
            reserved: self.reserved,
        }
    }

    /// The current values for a waiting request: what is being loaded for those before it is promised to them.
    pub(crate) fn space_for(&self, index: u32) -> Space {
        let space = self.space();
        match self.config.admission {
            Admission::Conservative => space,
            Admission::Optimistic { .. } => {
                Space { promised: space.promised + self.demand_of_loads_before(index), ..space }
            }
        }
    }

    /// Cells that a running request still needs for its known tokens, plus one block.
    pub(crate) fn remaining_demand(&self, index: u32) -> u64 {
        self.demand_after(index, self.entries[index as usize].cached)
    }

    /// Cells that a request still needs for its known tokens, plus one block, once it has `cached` tokens.
    pub(crate) fn demand_after(&self, index: u32, cached: u32) -> u64 {
        let next =
            self.memory.cells(self.entries[index as usize].known) + u64::from(self.memory.block_tokens());
        next - self.memory.cells(cached)
    }

    /// Cells that conservative admission reserves for this request. 0 if it kept its reservation together with its
    /// cache.
    fn reserve(&self, entry: &Entry) -> u64 {
        match self.config.admission {
            Admission::Conservative if entry.reserved == 0 => {
                self.memory.cells(entry.prompt_tokens + entry.max_new - 1)
            }
            _ => 0,
        }
    }

    /// What a waiting request takes when it is admitted: the cells that it reserves, or those for its known tokens that neither
    /// it nor the prefix index has, plus one block.
    pub(crate) fn demand_of_waiting(&mut self, index: u32) -> u64 {
        if self.config.admission == Admission::Conservative {
            return self.reserve(&self.entries[index as usize]);
        }
        let entry = &mut self.entries[index as usize];
        let cached = if entry.seq.is_some() { entry.cached } else { hit_tokens(&self.memory, entry) };
        self.demand_after(index, cached)
    }

    /// Returns whether there is memory for this request. `supplied`: cells of its prefix hit that other sequences
    /// already use, which need no additional memory.
    pub(crate) fn fits(&self, index: u32, space: &Space, supplied: u64) -> bool {
        let entry = &self.entries[index as usize];
        match self.config.admission {
            Admission::Conservative => space.reserved + self.reserve(entry) <= self.memory.capacity(),
            Admission::Optimistic { headroom_tokens } => {
                let mut demand = self.memory.cells(entry.known) - self.memory.cells(entry.cached);
                if space.promised > 0 {
                    demand += u64::from(headroom_tokens) + space.promised;
                }
                space.available + supplied >= demand
            }
        }
    }

    /// Moves a request into the batch if memory suffices, with its kept cache or with a prefix hit; or begins to load its
    /// blocks, if a tier has them.
    fn enter(&mut self, now: StepTime, index: u32) -> bool {
        if !self.has_memory(index, 0) {
            return false;
        }
        if self.loads_instead(now, index) {
            return true;
        }
        let resumed = self.entries[index as usize].seq.is_some();
        let hit = if resumed { 0 } else { self.open(now, index) };
        self.leave(index);
        self.set_lower(index, Lower::Done);
        if !resumed {
            self.clear_not_loaded(index);
        }
        let entry = &mut self.entries[index as usize];
        entry.state = State::Running;
        entry.scheduled = 0;
        entry.admitted_ns.get_or_insert(now.now_ns);
        let id = entry.id;
        match entry.seq {
            Some(seq) if !resumed => self.decide(now, Decision::Admit { id, seq, hit }),
            _ => self.decide(now, Decision::Resume { id }),
        }
        self.insert_running(index);
        true
    }

    /// Returns whether there is memory for a waiting request, with its kept cache or with its prefix hit. `ahead`: the
    /// [`demand_of_waiting`](Self::demand_of_waiting) of those that get theirs before it.
    pub(crate) fn has_memory(&self, index: u32, ahead: u64) -> bool {
        let entry = &self.entries[index as usize];
        let space = self.space_for(index);
        let space = Space { promised: space.promised + ahead, reserved: space.reserved + ahead, ..space };
        self.fits(index, &space, 0) || (entry.seq.is_none() && self.fits(index, &space, self.supply(entry)))
    }

    /// Gives a waiting request a sequence with its prefix hit, and what conservative admission reserves for it. Returns
    /// the length of the hit.
    pub(crate) fn open(&mut self, now: StepTime, index: u32) -> u32 {
        let entry = &self.entries[index as usize];
        let reserve = self.reserve(entry);
        let seq = SeqId(self.next_seq);
        let is_first = !entry.was_opened;
        let n_tokens = entry.wanted_content();
        let miss = (self.explain && !entry.skip_prefix_cache && is_first)
            .then(|| self.memory.explain(&entry.salt, &entry.prompt, n_tokens));
        let hit = self.memory.open(seq, &entry.salt, &entry.prompt, n_tokens, now, is_first);
        self.next_seq = self.next_seq.wrapping_add(1);
        let entry = &mut self.entries[index as usize];
        entry.seq = Some(seq);
        entry.miss = entry.miss.or(miss);
        (entry.cached, entry.stored) = (hit, hit);
        match is_first {
            true => entry.hit_tokens = hit,
            false => entry.regained_tokens += hit,
        }
        entry.was_opened = true;
        entry.reserved += reserve;
        self.reserved += reserve;
        self.counters.hit_tokens += u64::from(hit);
        hit
    }

    /// Cells of the prefix hit that other sequences already use. Hit blocks that no sequence uses count as new demand,
    /// because using them makes them no longer evictable.
    fn supply(&self, entry: &Entry) -> u64 {
        let found = self.lookup(entry);
        u64::from(found.hit_tokens.saturating_sub(found.evictable_tokens))
    }

    /// Inserts the request into `running`, which is ordered by sequence id, as the cache expects.
    fn insert_running(&mut self, index: u32) {
        let seq = self.entries[index as usize].seq;
        let place = self.running.partition_point(|&other| self.entries[other as usize].seq < seq);
        self.running.insert(place, index);
    }
}

/// Length of the prefix hit. Repeats the lookup only if the index or the content has changed, because prompts are long
/// and a waiting request is considered many times.
fn hit_tokens(memory: &Memory, entry: &mut Entry) -> u32 {
    let (of_tokens, version) = (entry.wanted_content(), memory.prefix_version());
    match entry.found {
        Some(found) if (found.of_tokens, found.version) == (of_tokens, version) => found.hit_tokens,
        _ => {
            let hit_tokens = memory.lookup(&entry.salt, &entry.prompt, of_tokens).hit_tokens;
            entry.found = Some(Found { hit_tokens, of_tokens, version });
            hit_tokens
        }
    }
}
