//! Blocks that several threads take from and give back to.
//!
//! For what a cache's own bookkeeping does not cover: staging buffers, host blocks, one budget under several
//! engines. One mutex guards it; who waits is served in the order of arrival.
//!
//! It promises that a block belongs to one [`OwnedBlocks`] at a time, that nobody overtakes who waits (a large request
//! cannot be starved by small ones), and that a waiter who gives up wakes the next. It refuses to wait for what can never
//! come: a request for more than there are is answered at once.
mod sync;

#[cfg(test)]
mod model;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::Instant;
use sync::{Condvar, Mutex, MutexGuard};

/// See the module. Clones share the same blocks.
#[derive(Clone)]
pub struct SharedBlocks {
    shared: Arc<Shared>,
}

struct Shared {
    n_blocks: u32,
    state: Mutex<State>,
}

struct State {
    /// The last one given back is the first to be given out: it may still be warm.
    free: Vec<u32>,
    /// In order of arrival. Whenever the mutex is free, the first of them wants more than is free.
    queue: VecDeque<Waiter>,
    /// By ticket: taken out of `free`, and not yet fetched by whom they are for.
    served: BTreeMap<u64, Vec<u32>>,
    n_tickets: u64,
}

struct Waiter {
    ticket: u64,
    n_blocks: u32,
    wake: Arc<Condvar>,
}

/// Blocks of a [`SharedBlocks`], owned. Dropping them gives them back and serves who waits.
#[must_use = "blocks that are dropped are free again"]
pub struct OwnedBlocks {
    ids: Vec<u32>,
    shared: Arc<Shared>,
}

impl SharedBlocks {
    /// All of `n_blocks` blocks free.
    pub fn new(n_blocks: u32) -> SharedBlocks {
        let state = State {
            free: (0..n_blocks).rev().collect(),
            queue: VecDeque::new(),
            served: BTreeMap::new(),
            n_tickets: 0,
        };
        SharedBlocks { shared: Arc::new(Shared { n_blocks, state: Mutex::new(state) }) }
    }

    /// Blocks in it.
    pub fn n_blocks(&self) -> u32 {
        self.shared.n_blocks
    }
    /// Blocks that nobody owns.
    pub fn n_free(&self) -> u32 {
        self.shared.lock().free.len() as u32
    }
    /// Requests in the queue.
    pub fn n_waiting(&self) -> usize {
        self.shared.lock().queue.len()
    }

    /// `n` blocks now. `None` if fewer are free, or if somebody waits: then these are his.
    pub fn allocate(&self, n: u32) -> Option<OwnedBlocks> {
        let ids = self.shared.lock().allocate(n)?;
        Some(OwnedBlocks { ids, shared: Arc::clone(&self.shared) })
    }

    /// `n` blocks as soon as everyone who came before is served and they are free. `None` if that is not before
    /// `deadline`, or if there are fewer in all.
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
                return blocks(ids); // also if it is late: they are here
            }
            if passed {
                let at = state.queue.iter().position(|waiter| waiter.ticket == ticket);
                let at = at.unwrap_or_else(|| panic!("ticket {ticket} neither waits nor is served"));
                state.queue.remove(at);
                state.serve(); // who came after may want less
                return None;
            }
        }
    }
}

impl Shared {
    /// No invariant is broken in the middle of a critical section, so a thread that panicked elsewhere poisons
    /// nothing.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn allocate(&mut self, n: u32) -> Option<Vec<u32>> {
        let free_after = self.free.len().checked_sub(n as usize)?;
        self.queue.is_empty().then(|| self.free.split_off(free_after))
    }

    /// Serve from the head of the queue until one wants more than is free.
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
    /// Which ones. In no order.
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
