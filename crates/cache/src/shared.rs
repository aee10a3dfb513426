//! A thread-safe block pool.
//!
//! For what a cache's own bookkeeping does not cover: staging buffers, host blocks, one budget for several engines.
//! One mutex guards the pool; waiting requests are served in order of arrival. A lock-free free list is not used: it
//! takes a half to two thirds of the time for requests of up to 8 blocks, but more than twice as much for 64, and it
//! cannot queue a large request (`examples/shared_blocks.rs` measures both).
//!
//! A block belongs to one [`OwnedBlocks`] at a time. No request overtakes a waiting one, so small requests cannot
//! starve a large one. A request that times out wakes the next. A request for more blocks than exist is refused at
//! once instead of waiting.
mod sync;

#[cfg(test)]
mod model;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use sync::{Condvar, Mutex, MutexGuard};

/// A thread-safe block pool; see the [module](self). Clones share the same blocks.
#[derive(Clone)]
pub struct SharedBlocks {
    shared: Arc<Shared>,
}

struct Shared {
    n_blocks: u32,
    state: Mutex<State>,
}

struct State {
    /// A stack: the block released last is handed out first, because it may still be in a CPU cache.
    free: Vec<u32>,
    /// In order of arrival. While the mutex is unlocked, the first request wants more blocks than are free.
    queue: VecDeque<Waiter>,
    /// By ticket: blocks taken from `free` for a waiting request whose thread has not picked them up yet.
    served: BTreeMap<u64, Vec<u32>>,
    n_tickets: u64,
}

struct Waiter {
    ticket: u64,
    n_blocks: u32,
    wake: Arc<Condvar>,
}

/// Blocks of a [`SharedBlocks`], owned by the caller. Dropping them returns them to the pool and serves waiting
/// requests.
#[must_use = "blocks that are dropped are free again"]
pub struct OwnedBlocks {
    ids: Vec<u32>,
    shared: Arc<Shared>,
}

impl SharedBlocks {
    /// Makes a pool of `n_blocks` free blocks.
    pub fn new(n_blocks: u32) -> SharedBlocks {
        let state = State {
            free: (0..n_blocks).rev().collect(),
            queue: VecDeque::new(),
            served: BTreeMap::new(),
            n_tickets: 0,
        };
        SharedBlocks { shared: Arc::new(Shared { n_blocks, state: Mutex::new(state) }) }
    }

    /// Total number of blocks.
    pub fn n_blocks(&self) -> u32 {
        self.shared.n_blocks
    }
    /// Number of free blocks.
    pub fn n_free(&self) -> u32 {
        self.shared.lock().free.len() as u32
    }
    /// Number of waiting requests.
    pub fn n_waiting(&self) -> usize {
        self.shared.lock().queue.len()
    }

    /// Takes `n` blocks without waiting. `None` if fewer are free, or if another request is waiting, because that one
    /// comes first.
    pub fn allocate(&self, n: u32) -> Option<OwnedBlocks> {
        let ids = self.shared.lock().allocate(n)?;
        Some(OwnedBlocks { ids, shared: Arc::clone(&self.shared) })
    }

    /// Takes `n` blocks, waiting until all earlier requests are served and enough blocks are free. `None` if that
    /// does not happen before `deadline`, or if the pool has fewer than `n` blocks.
    pub fn allocate_waiting(&self, n: u32, deadline: Instant) -> Option<OwnedBlocks> {
        if n > self.shared.n_blocks {
            return None;
        }
        let shared = &self.shared;
        let blocks = |ids| Some(OwnedBlocks { ids, shared: Arc::clone(shared) });
        let mut state = shared.lock();
        if let Some(ids) = state.allocate(n) {
            return blocks(ids);
        }
        let (ticket, wake) = (state.n_tickets, Arc::new(Condvar::new()));
        state.n_tickets += 1;
        state.queue.push_back(Waiter { ticket, n_blocks: n, wake: Arc::clone(&wake) });
        loop {
            let passed;
            (state, passed) = sync::wait_until(&wake, &shared.state, state, deadline);
            if let Some(ids) = state.served.remove(&ticket) {
                return blocks(ids); // even after the deadline: the blocks are assigned already
            }
            if passed {
                let at = state.queue.iter().position(|waiter| waiter.ticket == ticket);
                let at = at.unwrap_or_else(|| panic!("ticket {ticket} neither waits nor is served"));
                state.queue.remove(at);
                state.serve(); // a later request may want fewer blocks
                return None;
            }
        }
    }
}

impl Shared {
    /// Every critical section keeps the invariants at each point, so a poisoned mutex is safe to use.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn allocate(&mut self, n: u32) -> Option<Vec<u32>> {
        let free_after = self.free.len().checked_sub(n as usize)?;
        self.queue.is_empty().then(|| self.free.split_off(free_after))
    }

    /// Serves waiting requests in order, until one wants more blocks than are free.
    fn serve(&mut self) {
        while let Some(first) = self.queue.front() {
            let Some(free_after) = self.free.len().checked_sub(first.n_blocks as usize) else { return };
            self.served.insert(first.ticket, self.free.split_off(free_after));
            first.wake.notify_one();
            self.queue.pop_front();
        }
    }
}

impl OwnedBlocks {
    /// The block numbers, in no particular order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

impl Drop for OwnedBlocks {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.free.append(&mut self.ids);
        state.serve();
    }
}
