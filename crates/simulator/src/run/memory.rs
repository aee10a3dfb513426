//! How many blocks are held and how many are cached, step by step, told by what happens to blocks.
//!
//! A cache can be asked between turns, after those who ended have let go; what a step held is known only from the
//! events of its blocks. They are counted in the layer group in which the scheduler counts room.
use kvist_cache::{BlockEvent, Cache, Change, GroupId, PrefixEvent};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Free,
    Held,
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
    now: Blocks,
    /// Steps (or runs of steps) committed: what the events of a step count from.
    commits: u64,
    /// Of the last turn, group by group and in order.
    pub events: Vec<BlockEvent>,
    prefixes: Vec<PrefixEvent>,
}

impl Memory {
    /// Listens to `cache` from now on.
    pub fn new(cache: &mut Cache) -> Memory {
        cache.watch_blocks(true);
        // As the scheduler chooses: the smallest group of those that keep everything.
        let counted = cache.room().enumerate().min_by_key(|(_, room)| (room.lets_go, room.capacity_cells));
        Memory {
            group: GroupId(counted.map_or(0, |(group, _)| group as u16)),
            states: Vec::new(),
            now: Blocks::default(),
            commits: 0,
            events: Vec::new(),
            prefixes: Vec::new(),
        }
    }

    /// What the steps of the last turn held at their end, before anybody let go; and what is held since. `ran`: did it
    /// run any?
    pub fn turn(&mut self, cache: &mut Cache, ran: bool) -> (Blocks, Blocks) {
        self.events.clear();
        self.prefixes.clear(); // the same told by content
        cache.drain_events(&mut self.events, &mut self.prefixes);
        self.commits += u64::from(ran);
        let mut during = None;
        for event in &self.events {
            if event.group != self.group {
                continue;
            }
            if ran && event.step >= self.commits {
                during.get_or_insert(self.now);
            }
            let state = match event.change {
                Change::Alloc
                | Change::CopyOnWrite { .. }
                | Change::Move { .. }
                | Change::Share
                | Change::Hit => State::Held,
                Change::Free | Change::Evict => State::Free,
                Change::Idle => State::Cached,
                Change::Store | Change::Release => continue, // somebody holds it
            };
            let block = event.block as usize;
            if self.states.len() <= block {
                self.states.resize(block + 1, State::Free);
            }
            let before = std::mem::replace(&mut self.states[block], state);
            let is = |state, wanted| u64::from(state == wanted);
            self.now.used = self.now.used + is(state, State::Held) - is(before, State::Held);
            self.now.cached = self.now.cached + is(state, State::Cached) - is(before, State::Cached);
        }
        (during.unwrap_or(self.now), self.now)
    }
}
