//! Evictable slots, ordered by rank.
//!
//! An [`Order`] combines two structures; its users do not see which slot is in which:
//! - a *list*, for ranks that arrive in ascending order. Under `lru` and `fifo` all of them do, and every operation
//!   is O(1).
//! - a *heap* with four children per node (Johnson: *Priority queues with update and finding minimum spanning trees*,
//!   Information Processing Letters 4(3), 1975), for ranks that arrive below the last one of the list. Each slot
//!   knows its place in the heap, so any slot can be removed or updated in O(log n).
//!
//! The smallest rank is the smaller of the list's first and the heap's root.
use super::Rank;

/// End of the list.
const NONE: u32 = u32::MAX;
const N_CHILDREN: usize = 4;

/// 32 bytes per slot number ever used, and 24 per slot in the heap. Slot numbers are below `u32::MAX`.
#[derive(Clone, Debug)]
pub struct Order {
    slots: Vec<Member>, // [slots]
    heap: Vec<(Rank, u32)>,
    first: u32,
    last: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    rank: Rank,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    Listed { before: u32, after: u32 },
    Heaped { at: u32 },
}

impl Default for Order {
    fn default() -> Self {
        Order { slots: Vec::new(), heap: Vec::new(), first: NONE, last: NONE, len: 0 }
    }
}

impl Order {
    /// Number of slots in the order.
    pub fn len(&self) -> u32 {
        self.len
    }
    /// Whether no slot is evictable.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Whether `slot` is in the order.
    pub fn contains(&self, slot: u32) -> bool {
        self.rank(slot).is_some()
    }
    /// The rank of `slot`; `None` if it is not in the order.
    pub fn rank(&self, slot: u32) -> Option<Rank> {
        let member = self.slots.get(slot as usize)?;
        (member.place != Place::Absent).then_some(member.rank)
    }

    /// The slot to evict first. O(1).
    pub fn first(&self) -> Option<u32> {
        let listed = (self.first != NONE).then(|| (self.slots[self.first as usize].rank, self.first));
        let heaped = self.heap.first().copied();
        match (listed, heaped) {
            (Some(listed), Some(heaped)) => Some(listed.min(heaped).1),
            (listed, heaped) => listed.or(heaped).map(|(_, slot)| slot),
        }
    }

    /// Removes and returns the slot to evict first.
    pub fn pop(&mut self) -> Option<u32> {
        let slot = self.first()?;
        self.remove(slot);
        Some(slot)
    }

    /// Makes `slot` evictable. It must not be in the order.
    pub fn insert(&mut self, slot: u32, rank: Rank) {
        assert_ne!(slot, NONE, "slots are below u32::MAX");
        let at = slot as usize;
        if at >= self.slots.len() {
            self.slots.resize(at + 1, Member { rank: Rank::default(), place: Place::Absent });
        }
        let place = self.slots[at].place;
        assert_eq!(place, Place::Absent, "slot {slot} is in the order already, {} slots", self.len);
        self.len += 1;
        self.place(slot, rank);
    }

    /// Removes `slot`, because it is in use or gone. Returns its rank; `None` if it was not in the order.
    pub fn remove(&mut self, slot: u32) -> Option<Rank> {
        let rank = self.rank(slot)?;
        self.displace(slot);
        self.slots[slot as usize].place = Place::Absent;
        self.len -= 1;
        Some(rank)
    }

    /// Gives `slot` its new rank after a use. Returns `false`, with nothing changed, if it is not in the order.
    pub fn update(&mut self, slot: u32, rank: Rank) -> bool {
        match self.slots.get(slot as usize).map(|member| member.place) {
            None | Some(Place::Absent) => false,
            Some(_) if self.slots[slot as usize].rank == rank => true, // `fifo`: the rank never changes
            Some(Place::Heaped { at }) if !self.is_last(rank) => {
                self.slots[slot as usize].rank = rank;
                self.sift(at as usize, (rank, slot));
                true
            }
            Some(_) => {
                self.displace(slot);
                self.place(slot, rank);
                true
            }
        }
    }

    /// Whether the list stays sorted if this rank is appended.
    fn is_last(&self, rank: Rank) -> bool {
        self.last == NONE || rank >= self.slots[self.last as usize].rank
    }

    /// Puts a slot that is in neither structure into one of them. Does not count it.
    fn place(&mut self, slot: u32, rank: Rank) {
        self.slots[slot as usize].rank = rank;
        if self.is_last(rank) {
            let before = std::mem::replace(&mut self.last, slot);
            self.slots[slot as usize].place = Place::Listed { before, after: NONE };
            self.set_after(before, slot);
        } else {
            let at = self.heap.len();
            self.heap.push((rank, slot));
            self.sift(at, (rank, slot));
        }
    }

    /// Takes a slot out of its structure. Leaves its `Member` unchanged, for the caller to overwrite.
    fn displace(&mut self, slot: u32) {
        match self.slots[slot as usize].place {
            Place::Absent => unreachable!("slot {slot} is in neither structure"),
            Place::Listed { before, after } => {
                self.set_after(before, after);
                self.set_before(after, before);
            }
            Place::Heaped { at } => {
                let moved = self.heap.pop().expect("a heap that holds a slot is not empty");
                if moved.1 != slot {
                    self.sift(at as usize, moved);
                }
            }
        }
    }

    /// Sets the successor of `slot` in the list; for `NONE`, the first slot.
    fn set_after(&mut self, slot: u32, to: u32) {
        match self.slots.get_mut(slot as usize).map(|member| &mut member.place) {
            Some(Place::Listed { after, .. }) => *after = to,
            _ => self.first = to,
        }
    }
    fn set_before(&mut self, slot: u32, to: u32) {
        match self.slots.get_mut(slot as usize).map(|member| &mut member.place) {
            Some(Place::Listed { before, .. }) => *before = to,
            _ => self.last = to,
        }
    }

    /// Puts `entry` into the hole at `at`, and moves the hole to where the rank belongs.
    fn sift(&mut self, mut at: usize, entry: (Rank, u32)) {
        while at > 0 {
            let parent = (at - 1) / N_CHILDREN;
            if self.heap[parent] <= entry {
                break;
            }
            self.settle(at, self.heap[parent]);
            at = parent;
        }
        loop {
            let first = at * N_CHILDREN + 1;
            let children = first..(first + N_CHILDREN).min(self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.heap[child]) else { break };
            if entry <= self.heap[least] {
                break;
            }
            self.settle(at, self.heap[least]);
            at = least;
        }
        self.settle(at, entry);
    }

    fn settle(&mut self, at: usize, entry: (Rank, u32)) {
        self.heap[at] = entry;
        self.slots[entry.1 as usize].place = Place::Heaped { at: at as u32 };
    }
}
