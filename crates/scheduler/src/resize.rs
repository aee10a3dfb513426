//! A cache that grows and shrinks while requests live.
//!
//! To shrink, the scheduler evicts, gives up retained prompts, drops the cells of paused requests and preempts running ones, in this
//! order and only as far as needed; then the blocks above the new capacity move below it. No request ends, and no text changes.
use crate::entry::State;
use crate::memory::StepTime;
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use kvist_cache::{MovePlan, Refused};

/// Why the capacity stays what it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    /// A live request could not finish.
    #[error("request {id} needs {needed} tokens of the cache, and {capacity} are wanted")]
    NeverFits {
        /// The request.
        id: RequestId,
        /// Its prompt and answer.
        needed: u64,
        /// The capacity that was asked for.
        capacity: u64,
    },
    /// Copies to or from a tier use blocks that would have to move. They end by themselves: try again.
    #[error("copies to or from a tier use blocks that would have to move: try again when they have ended")]
    InTransfer,
    /// The cache cannot change its capacity, or not to this one.
    #[error(transparent)]
    Cache(Refused),
}

/// A resize that has begun.
pub(crate) struct Resizing {
    capacity_tokens: Vec<u32>,
    moves: MovePlan,
}

impl Scheduler {
    /// Frees what capacities of `capacity_tokens`, one per layer group, have no room for, and returns the moves that the device has to make
    /// now. [`end_resize`](Self::end_resize) must follow, before anything else is asked of this scheduler. Call it between iterations.
    ///
    /// # Errors
    /// See [`ResizeRefused`]. The capacity stays what it is, but prompts may have been evicted and requests preempted.
    pub fn begin_resize(&mut self, now_ns: u64, capacity_tokens: &[u32]) -> Result<&MovePlan, ResizeRefused> {
        let n = self.event();
        self.events.resize(n, now_ns, capacity_tokens);
        let now = self.timestamp(now_ns);
        let moves = self.make_room(now, capacity_tokens)?;
        let resizing = Resizing { capacity_tokens: capacity_tokens.to_vec(), moves };
        Ok(&self.resizing.insert(resizing).moves)
    }

    /// Ends what [`begin_resize`](Self::begin_resize) began: `moved` says whether the device made the moves. If not, the capacity stays
    /// what it is. Does nothing if nothing was begun.
    pub fn end_resize(&mut self, now_ns: u64, moved: bool) {
        let n = self.event();
        self.events.resized(n, now_ns, moved);
        let Some(Resizing { capacity_tokens, moves }) = self.resizing.take() else { return };
        if moved {
            self.memory.resize(&capacity_tokens, &moves);
            if let (Some(tiers), Some(naming)) = (&mut self.tiers, self.memory.naming_group()) {
                tiers.moved(&moves.renamed(), naming);
            }
        }
        self.shelf.tighten(&mut self.memory.cache, moved.then_some(&moves));
        self.blocked = None;
    }

    /// Frees memory until the capacities have room for the rest, with all retained prompts unpinned at the end.
    fn make_room(&mut self, now: StepTime, capacity_tokens: &[u32]) -> Result<MovePlan, ResizeRefused> {
        if capacity_tokens.len() != self.memory.cache.n_groups() {
            return Err(ResizeRefused::Cache(Refused::Unsupported(
                "a capacity for every layer group is needed",
            )));
        }
        let capacity = self.memory.capacity_of(capacity_tokens);
        for entry in self.entries.iter().filter(|entry| entry.state != State::Vacant) {
            // The last sampled token is never fed back, so it needs no cell.
            let needed = self.memory.cells((entry.prompt_tokens + entry.max_new).saturating_sub(1));
            if needed > capacity {
                return Err(ResizeRefused::NeverFits { id: entry.id, needed, capacity });
            }
        }
        while self.shelf.n_tokens() > capacity / 2 && self.unretain(now, true) {}
        while self.reserved > capacity && self.preempt_one(now) {}
        let mut moves = MovePlan::default();
        loop {
            self.shelf.loosen(&mut self.memory.cache);
            let planned = self.memory.cache.plan_resize(capacity_tokens, &mut moves);
            if planned.is_ok() {
                return Ok(moves);
            }
            self.shelf.tighten(&mut self.memory.cache, None);
            match planned {
                Err(Refused::TooSmall { .. }) => {
                    let freed = self.memory.evict_down_to(capacity_tokens, now) > 0
                        || self.unretain(now, false)
                        || self.drop_one(now)
                        || self.preempt_one(now)
                        || self.unretain(now, true);
                    // What is left is loading.
                    if !freed {
                        return Err(ResizeRefused::InTransfer);
                    }
                }
                Err(Refused::InTransfer(_)) => return Err(ResizeRefused::InTransfer),
                Err(other) => return Err(ResizeRefused::Cache(other)),
                Ok(()) => {}
            }
        }
    }
}
