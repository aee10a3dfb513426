//! How many steps may run as one. Everything that could change a decision, or what the cache does, ends a run: somebody who
//! reaches `max_new`, a block that the index must be told of, memory that runs out, windows that let go. What the executor
//! knows besides (arrivals, ends) it says itself.
use crate::executor::{Batch, Executor, Work};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// How many decode steps may run as one: no decision may fall due before the last of them ends. Asked only when
    /// everybody who waits has just been considered.
    pub(crate) fn foresee(&mut self, now_ns: u64, executor: &mut dyn Executor) -> u32 {
        let all_decode = self.batch.len() == self.running.len() && self.batch.iter().all(|w| w.decodes);
        if !all_decode || self.memory.shrinks_while_decoding() {
            return 1;
        }
        // Who waits now waits for a place or for memory, and neither comes before somebody ends: decoding only
        // fills the cache, and makes nobody an easier victim than before.
        let block = self.memory.block_tokens();
        let left = |w: &Work| {
            let entry = &self.entries[w.slot as usize];
            (entry.max_new - entry.generated()).min(entry.steps_to_store(block))
        };
        let limit = self.batch.iter().map(left).min().unwrap_or(1);
        let limit = self.steps_that_fit(limit);
        if limit < 2 {
            return 1;
        }
        let batch = Batch { work: &self.batch, steps: 1, entries: &self.entries };
        let steps = executor.foresee(now_ns, batch, limit).clamp(1, limit);
        self.batch.iter_mut().for_each(|w| w.n_tokens = steps);
        steps
    }

    /// The most decode steps, up to `limit`, for which free cells suffice. Eviction waits for the very step that
    /// needs it, as it would if they were run one by one.
    fn steps_that_fit(&self, limit: u32) -> u32 {
        let free = self.memory.free();
        let n = self.batch.len() as u64;
        let block = self.memory.block_tokens();
        let fits = |steps: u32| {
            // Each sequence begins at most `steps / block` rounded up new blocks.
            if n * self.memory.cells(steps) <= free {
                return true;
            }
            self.growth(steps) <= free
        };
        if fits(limit) {
            return limit;
        }
        // A sequence alone takes the free cells and those left in its last block, which are fewer than a block: so many
        // steps do not fit.
        let (mut good, mut bad) = (0, u32::try_from(free + u64::from(block)).unwrap_or(limit).min(limit));
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            if fits(middle) { good = middle } else { bad = middle }
        }
        good
    }

    /// Cells by which the batch grows if every share of it is taken `steps` times.
    pub(crate) fn growth(&self, steps: u32) -> u64 {
        let grown = |w: &Work| self.memory.cells(w.first + w.n_tokens * steps) - self.memory.cells(w.first);
        self.batch.iter().map(grown).sum()
    }
}
