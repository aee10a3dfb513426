//! Would an admission come to something, if those who rank behind made way? Asked before anybody does: who loses its
//! cache for a request that then does not fit has lost it for nothing.
//!
//! The steps of `admit.rs` are gone through on paper, in their order. First with all that the victims hold, which is
//! more than what would become free and soon said; then block by block, for blocks of which several are holders.
use crate::admit::Space;
use crate::config::Preempted;
use crate::entry::Key;
use crate::scheduler::Scheduler;

/// What the head of the queue would find.
#[derive(Clone, Copy, Default)]
struct Found {
    hit: u32,
    /// Cells of the hit that need no room.
    supplied: u64,
}

impl Scheduler {
    /// Would `key` find a place and memory if all went who rank behind it?
    pub(crate) fn way_can_be_made(&self, key: Key) -> bool {
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
            found.supplied = u64::from(lookup.hit_tokens.saturating_sub(lookup.idle_tokens));
        }
        let mut holders_left = None;
        if !self.goes_well(key, running.clone(), found, &mut holders_left) {
            return false;
        }
        if !self.memory.shares() {
            return true;
        }
        holders_left = Some(self.memory.holders());
        self.goes_well(key, running, found, &mut holders_left)
    }

    /// `running`: who may be preempted, the worst last. `holders_left`: of each block, how many sequences hold it.
    fn goes_well(
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
                    self.let_go(key, worst.slot, &mut space, &mut found, holders_left);
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
                self.let_go(key, worst.slot, &mut space, &mut found, holders_left);
            }
        }
    }

    /// `victim` loses its cache, on paper.
    fn let_go(
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
                // What the head would have shared it will have to hold itself.
                if (i + 1) * block <= u64::from(in_common) {
                    found.supplied = found.supplied.saturating_sub(block);
                }
            }
        }
    }
}
