//! Tracks how many blocks are in use and how many are cached, step by step, from block events.
//!
//! Between iterations, the cache can only be queried after ended requests have freed their blocks. The number of blocks
//! in use during a step is known only from block events. They are counted in the layer group in which the scheduler
//! counts available memory.
use kvist_cache::{BlockEvent, Cache, Change, GroupId};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    InUse,
    Cached,
}

/// Blocks at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blocks {
    pub used: u64,
    pub cached: u64,
}

pub(super) struct Memory {
    group: GroupId,
    states: Vec<State>,
    /// Since the last update.
    pub now: Blocks,
    /// Committed steps (or multi-step runs). Compared with the step numbers of events.
    commits: u64,
    /// Events of the last iteration, group by group and in order.
    pub events: Vec<BlockEvent>,
}

impl Memory {
    /// Turns on block events of `cache`.
    pub fn new(cache: &mut Cache) -> Memory {
        cache.watch_blocks(true);
        // The same choice as the scheduler's: the smallest group without a sliding window.
        let counted = cache
            .occupancy()
            .enumerate()
            .min_by_key(|(_, room)| (room.frees_out_of_window, room.capacity_cells));
        Memory {
            group: GroupId(counted.map_or(0, |(group, _)| group as u16)),
            states: Vec::new(),
            now: Blocks::default(),
            commits: 0,
            events: Vec::new(),
        }
    }

    /// Returns the blocks in use at the end of the last iteration's steps, before ended requests freed theirs, and the
    /// blocks in use now. `ran`: whether the iteration ran any steps.
    pub fn update(&mut self, cache: &mut Cache, ran: bool) -> (Blocks, Blocks) {
        self.events.clear();
        cache.drain_block_events(&mut self.events);
        self.commits += u64::from(ran);
        let mut at_end = None;
        for event in &self.events {
            if event.group != self.group {
                continue;
            }
            if ran && event.step >= self.commits {
                at_end.get_or_insert(self.now);
            }
            let state = match event.change {
                Change::Alloc
                | Change::CopyOnWrite { .. }
                | Change::Move { .. }
                | Change::Share
                | Change::Hit => State::InUse,
                Change::Free | Change::Evict => State::Free,
                Change::Evictable => State::Cached,
                Change::Store | Change::Release => continue, // a sequence uses it
            };
            let block = event.block as usize;
            if self.states.len() <= block {
                self.states.resize(block + 1, State::Free);
            }
            let before = std::mem::replace(&mut self.states[block], state);
            let is = |state, wanted| u64::from(state == wanted);
            self.now.used = self.now.used + is(state, State::InUse) - is(before, State::InUse);
            self.now.cached = self.now.cached + is(state, State::Cached) - is(before, State::Cached);
        }
        (at_end.unwrap_or(self.now), self.now)
    }
}
