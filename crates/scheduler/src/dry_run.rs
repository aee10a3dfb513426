//! Dry run: would preempting all lower-ranked requests make this one fit? It runs before any real preemption;
//! otherwise a victim could lose its cache for a request that still does not fit.
//!
//! The dry run follows the steps of `admit.rs` in the same order. A first pass counts all cells of each victim as
//! freed, which is a cheap upper bound. A second pass counts block by block, because blocks can be shared by several
//! sequences.
use crate::admit::Space;
use crate::config::Preempted;
use crate::entry::Key;
use crate::scheduler::Scheduler;

/// The prefix hit of the request to admit.
#[derive(Clone, Copy, Default)]
struct Found {
    hit: u32,
    /// Cells of the hit that need no additional memory, because other sequences already use them.
    supplied: u64,
}

impl Scheduler {
    /// Returns whether `key` would get a batch slot and memory if all lower-ranked requests were preempted or dropped.
    pub(crate) fn preemption_would_help(&self, key: Key) -> bool {
        let preempts = self.order.policy().preempts();
        if !preempts && self.holders.is_empty() {
            return false;
        }
        let mut running: Vec<Key> = self.running.iter().map(|&slot| self.victim_key(slot)).collect();
        running.retain(|victim| preempts && victim.rank > key.rank);
        running.sort_unstable();
        let head = &self.entries[key.slot as usize];
        let mut found = Found::default();
        if head.seq.is_none() {
            let lookup = self.lookup(head);
            found.hit = lookup.hit_tokens;
            found.supplied = u64::from(lookup.hit_tokens.saturating_sub(lookup.evictable_tokens));
        }
        let mut holders_left = None;
        if !self.simulate(key, running.clone(), found, &mut holders_left) {
            return false;
        }
        if !self.memory.shares() {
            return true;
        }
        holders_left = Some(self.memory.holders());
        self.simulate(key, running, found, &mut holders_left)
    }

    /// One pass of the dry run. `running`: requests that may be preempted, worst rank last. `holders_left`: per block,
    /// the number of sequences that still use it; `None` in the first pass.
    fn simulate(
        &self,
        key: Key,
        mut running: Vec<Key>,
        mut found: Found,
        holders_left: &mut Option<Vec<u32>>,
    ) -> bool {
        let keep = self.config.preempted == Preempted::Kept;
        let mut space = self.space();
        let mut paused: Vec<Key> = self.holders.iter().copied().collect();
        loop {
            if space.n_running < self.config.max_batch as usize {
                if self.fits(key.slot, &space, found.supplied) {
                    return true;
                }
                if let Some(worst) = paused.pop_if(|worst| self.victim_key(worst.slot) > key) {
                    self.simulate_drop(key, worst.slot, &mut space, &mut found, holders_left);
                    continue;
                }
            }
            let Some(worst) = running.pop() else { return false };
            space.n_running -= 1;
            space.promised = space.promised.saturating_sub(self.due(worst.slot));
            if keep {
                let key = self.key(worst.slot);
                paused.insert(paused.partition_point(|other| *other < key), key);
            } else {
                self.simulate_drop(key, worst.slot, &mut space, &mut found, holders_left);
            }
        }
    }

    /// Simulates dropping the cache of `victim`.
    fn simulate_drop(
        &self,
        key: Key,
        victim: u32,
        space: &mut Space,
        found: &mut Found,
        holders_left: &mut Option<Vec<u32>>,
    ) {
        let victim = &self.entries[victim as usize];
        space.reserved -= victim.reserved;
        let (Some(left), Some(seq)) = (holders_left, victim.seq) else {
            space.room += self.memory.cells(victim.cached);
            return;
        };
        let head = &self.entries[key.slot as usize];
        let in_common = match head.salt == victim.salt {
            true => head.prompt.in_common(&victim.prompt, found.hit),
            false => 0,
        };
        let block = u64::from(self.memory.block_tokens());
        for (i, b) in self.memory.blocks_of(seq) {
            let left = &mut left[b as usize];
            *left = left.saturating_sub(1);
            if *left == 0 {
                space.room += block;
                // The new request would have shared this block. Now it has to allocate it.
                if (i + 1) * block <= u64::from(in_common) {
                    found.supplied = found.supplied.saturating_sub(block);
                }
            }
        }
    }
}
