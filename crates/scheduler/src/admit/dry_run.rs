//! A dry run of an admission: would it succeed if the lower-ranked requests were preempted? It runs before any real
//! preemption; otherwise a victim could lose its cache for a request that still does not fit.
//!
//! The rules are those of a real admission: [`make_fit`] runs over hypothetical values. A first pass counts all cells
//! of each victim as freed, which is a cheap upper bound. A second pass counts block by block, because blocks can be
//! shared by several sequences.
use crate::admit::{MakeFit, Space, make_fit};
use crate::config::Preempted;
use crate::entry::Key;
use crate::scheduler::Scheduler;

/// What an admission would find after some requests were preempted.
struct DryRun<'s> {
    scheduler: &'s Scheduler,
    space: Space,
    /// Running requests by victim rank, worst last.
    running: Vec<Key>,
    /// Paused requests by rank, worst last.
    paused: Vec<Key>,
    /// Length of the request's prefix hit.
    hit: u32,
    /// Cells of the hit that need no additional memory, because other sequences already use them.
    supplied: u64,
    /// Per block, the number of sequences that still use it; `None` in the first pass.
    ref_counts: Option<Vec<u32>>,
}

impl Scheduler {
    /// Returns whether `key` would find room in the batch, and memory, if all lower-ranked requests were preempted or
    /// dropped.
    pub(crate) fn preemption_would_help(&self, key: Key) -> bool {
        if !self.order.policy().preempts() && self.paused.is_empty() {
            return false;
        }
        let head = &self.entries[key.index as usize];
        let (mut hit, mut supplied) = (0, 0);
        if head.seq.is_none() {
            let lookup = self.lookup(head);
            hit = lookup.hit_tokens;
            supplied = u64::from(lookup.hit_tokens.saturating_sub(lookup.evictable_tokens));
        }
        let mut running: Vec<Key> = self.running.iter().map(|&index| self.victim_key(index)).collect();
        running.sort_unstable();
        let pass = |ref_counts| {
            let (running, paused) = (running.clone(), self.paused.iter().copied().collect());
            let space = self.space_for(key.index);
            let mut run = DryRun { scheduler: self, space, running, paused, hit, supplied, ref_counts };
            make_fit(&mut run, key)
        };
        pass(None) && (!self.memory.shares() || pass(Some(self.memory.ref_counts())))
    }
}

impl DryRun<'_> {
    /// Counts what dropping the cache of `victim` frees.
    fn drop_cache(&mut self, key: Key, victim: u32) {
        let DryRun { scheduler, space, .. } = self;
        let victim = &scheduler.entries[victim as usize];
        space.reserved -= victim.reserved;
        let (Some(ref_counts), Some(seq)) = (&mut self.ref_counts, victim.seq) else {
            space.available += scheduler.memory.cells(victim.cached);
            return;
        };
        let head = &scheduler.entries[key.index as usize];
        let in_common = match head.salt == victim.salt {
            true => head.prompt.in_common(&victim.prompt, self.hit),
            false => 0,
        };
        let block = u64::from(scheduler.memory.block_tokens());
        for (i, b) in scheduler.memory.blocks_of(seq) {
            let ref_count = &mut ref_counts[b as usize];
            *ref_count = ref_count.saturating_sub(1);
            if *ref_count == 0 {
                space.available += block;
                // The new request would have shared this block. Now it has to allocate it.
                if (i + 1) * block <= u64::from(in_common) {
                    self.supplied = self.supplied.saturating_sub(block);
                }
            }
        }
    }
}

impl MakeFit for DryRun<'_> {
    fn has_batch_room(&self) -> bool {
        self.space.n_running < self.scheduler.config.max_batch as usize
    }
    fn try_admit(&mut self, key: Key) -> bool {
        self.scheduler.fits(key.index, &self.space, self.supplied)
    }
    fn drop_paused_lower_ranked(&mut self, key: Key) -> bool {
        let dropped = self.paused.pop_if(|worst| self.scheduler.victim_key(worst.index) > key);
        dropped.map(|victim| self.drop_cache(key, victim.index)).is_some()
    }
    fn preempt_lower_ranked(&mut self, key: Key, _why: &'static str) -> bool {
        let scheduler = self.scheduler;
        let Some(victim) = self.running.pop_if(|worst| scheduler.may_preempt(key, *worst)) else {
            return false;
        };
        self.space.n_running -= 1;
        self.space.promised = self.space.promised.saturating_sub(scheduler.remaining_demand(victim.index));
        if scheduler.config.preempted == Preempted::Kept {
            let key = scheduler.key(victim.index);
            self.paused.insert(self.paused.partition_point(|other| *other < key), key);
        } else {
            self.drop_cache(key, victim.index);
        }
        true
    }
}
