//! Evictable entries, ordered by rank.
//!
//! An [`Order`] combines two structures; its users do not see which entry is in which:
//! - a *list*, for ranks that arrive in ascending order. Under `lru` and `fifo` all of them do, and every operation
//!   is O(1).
//! - a *heap* with four children per node (Johnson: *Priority queues with update and finding minimum spanning trees*,
//!   Information Processing Letters 4(3), 1975), for ranks that arrive below the last one of the list. Each entry
//!   knows its place in the heap, so any entry can be removed or updated in O(log n).
//!
//! The smallest rank is the smaller of the list's first and the heap's root.
use super::Rank;

/// End of the list.
const NONE: u32 = u32::MAX;
const N_CHILDREN: usize = 4;

/// 32 bytes per entry number ever used, and 24 per entry in the heap. Entry numbers are below `u32::MAX`.
#[derive(Clone, Debug)]
pub struct Order {
    entries: Vec<Member>, // [entries]
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
        Order { entries: Vec::new(), heap: Vec::new(), first: NONE, last: NONE, len: 0 }
    }
}

impl Order {
    /// Number of entries in the order.
    pub fn len(&self) -> u32 {
        self.len
    }
    /// Whether no entry is evictable.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Whether `entry` is in the order.
    pub fn contains(&self, entry: u32) -> bool {
        self.rank(entry).is_some()
    }
    /// The rank of `entry`; `None` if it is not in the order.
    pub fn rank(&self, entry: u32) -> Option<Rank> {
        let member = self.entries.get(entry as usize)?;
        (member.place != Place::Absent).then_some(member.rank)
    }

    /// The entry to evict first. O(1).
    pub fn first(&self) -> Option<u32> {
        let listed = (self.first != NONE).then(|| (self.entries[self.first as usize].rank, self.first));
        let heaped = self.heap.first().copied();
        match (listed, heaped) {
            (Some(listed), Some(heaped)) => Some(listed.min(heaped).1),
            (listed, heaped) => listed.or(heaped).map(|(_, entry)| entry),
        }
    }

    /// Removes and returns the entry to evict first.
    pub fn pop(&mut self) -> Option<u32> {
        let entry = self.first()?;
        self.remove(entry);
        Some(entry)
    }

    /// Makes `entry` evictable. It must not be in the order.
    pub fn insert(&mut self, entry: u32, rank: Rank) {
        assert_ne!(entry, NONE, "entries are below u32::MAX");
        let at = entry as usize;
        if at >= self.entries.len() {
            self.entries.resize(at + 1, Member { rank: Rank::default(), place: Place::Absent });
        }
        let place = self.entries[at].place;
        assert_eq!(place, Place::Absent, "entry {entry} is in the order already, {} entries", self.len);
        self.len += 1;
        self.place(entry, rank);
    }

    /// Removes `entry`, because it is in use or gone. Returns its rank; `None` if it was not in the order.
    pub fn remove(&mut self, entry: u32) -> Option<Rank> {
        let rank = self.rank(entry)?;
        self.displace(entry);
        self.entries[entry as usize].place = Place::Absent;
        self.len -= 1;
        Some(rank)
    }

    /// Gives `entry` its new rank after a use. Returns `false`, with nothing changed, if it is not in the order.
    pub fn update(&mut self, entry: u32, rank: Rank) -> bool {
        match self.entries.get(entry as usize).map(|member| member.place) {
            None | Some(Place::Absent) => false,
            Some(_) if self.entries[entry as usize].rank == rank => true, // `fifo`: the rank never changes
            Some(Place::Heaped { at }) if !self.is_last(rank) => {
                self.entries[entry as usize].rank = rank;
                self.sift(at as usize, (rank, entry));
                true
            }
            Some(_) => {
                self.displace(entry);
                self.place(entry, rank);
                true
            }
        }
    }

    /// Whether the list stays sorted if this rank is appended.
    fn is_last(&self, rank: Rank) -> bool {
        self.last == NONE || rank >= self.entries[self.last as usize].rank
    }

    /// Puts an entry that is in neither structure into one of them. Does not count it.
    fn place(&mut self, entry: u32, rank: Rank) {
        self.entries[entry as usize].rank = rank;
        if self.is_last(rank) {
            let before = std::mem::replace(&mut self.last, entry);
            self.entries[entry as usize].place = Place::Listed { before, after: NONE };
            self.set_after(before, entry);
        } else {
            let at = self.heap.len();
            self.heap.push((rank, entry));
            self.sift(at, (rank, entry));
        }
    }

    /// Takes an entry out of its structure. Leaves its `Member` unchanged, for the caller to overwrite.
    fn displace(&mut self, entry: u32) {
        match self.entries[entry as usize].place {
            Place::Absent => unreachable!("entry {entry} is in neither structure"),
            Place::Listed { before, after } => {
                self.set_after(before, after);
                self.set_before(after, before);
            }
            Place::Heaped { at } => {
                let moved = self.heap.pop().expect("a heap that holds an entry is not empty");
                if moved.1 != entry {
                    self.sift(at as usize, moved);
                }
            }
        }
    }

    /// Sets the successor of `entry` in the list; for `NONE`, the first entry.
    fn set_after(&mut self, entry: u32, to: u32) {
        match self.entries.get_mut(entry as usize).map(|member| &mut member.place) {
            Some(Place::Listed { after, .. }) => *after = to,
            _ => self.first = to,
        }
    }
    fn set_before(&mut self, entry: u32, to: u32) {
        match self.entries.get_mut(entry as usize).map(|member| &mut member.place) {
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
            let Some(min) = children.min_by_key(|&child| self.heap[child]) else { break };
            if entry <= self.heap[min] {
                break;
            }
            self.settle(at, self.heap[min]);
            at = min;
        }
        self.settle(at, entry);
    }

    fn settle(&mut self, at: usize, entry: (Rank, u32)) {
        self.heap[at] = entry;
        self.entries[entry.1 as usize].place = Place::Heaped { at: at as u32 };
    }
}
