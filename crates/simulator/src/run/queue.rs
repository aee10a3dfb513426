//! What will arrive, and when: in order of time and, at equal times, of the list.
use crate::request::Request;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Arrivals to come. Follow-ups join when their parent has ended.
pub struct Arrivals {
    /// Those without a parent, latest first.
    roots: Vec<(u64, usize)>,
    follow_ups: BinaryHeap<Reverse<(u64, usize)>>,
    /// The first follow-up of each request, and the next one of the same parent.
    first_child: Vec<Option<usize>>,
    next_child: Vec<Option<usize>>,
    /// Its earliest arrival, and how long its user thinks.
    times: Vec<(u64, u64)>,
}

impl Arrivals {
    /// Arrivals of this list. A follow-up whose parent does not stand before it arrives on its own.
    pub fn new(requests: &[Request]) -> Arrivals {
        let n = requests.len();
        let (mut first_child, mut next_child) = (vec![None; n], vec![None; n]);
        let mut last_child: Vec<Option<usize>> = vec![None; n];
        let mut place: HashMap<u64, usize> = HashMap::new(); // asked, never iterated
        let mut roots = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            match request.parent.and_then(|id| place.get(&id).copied()) {
                None => roots.push((request.arrival_ns, i)),
                Some(parent) => {
                    match last_child[parent] {
                        None => first_child[parent] = Some(i),
                        Some(brother) => next_child[brother] = Some(i),
                    }
                    last_child[parent] = Some(i);
                }
            }
            place.insert(request.id, i);
        }
        roots.sort_unstable_by_key(|&root| Reverse(root));
        let times = requests.iter().map(|r| (r.arrival_ns, r.think_ns)).collect();
        Arrivals { roots, follow_ups: BinaryHeap::new(), first_child, next_child, times }
    }

    fn next(&self) -> Option<(u64, usize)> {
        let follow_up = self.follow_ups.peek().map(|&Reverse(next)| next);
        match (self.roots.last().copied(), follow_up) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// When the next one arrives, of those that are sure to.
    pub fn next_ns(&self) -> Option<u64> {
        self.next().map(|(at_ns, _)| at_ns)
    }

    /// The next that has arrived by `now_ns`: when, and its place in the list.
    pub fn pop(&mut self, now_ns: u64) -> Option<(u64, usize)> {
        let next = self.next().filter(|&(at_ns, _)| at_ns <= now_ns)?;
        if self.roots.last() == Some(&next) {
            self.roots.pop();
        } else {
            self.follow_ups.pop();
        }
        Some(next)
    }

    /// Request `i` has finished: its follow-ups will come.
    pub fn ended(&mut self, i: usize, at_ns: u64) {
        let mut child = self.first_child[i];
        while let Some(follow_up) = child {
            let (earliest_ns, think_ns) = self.times[follow_up];
            let at_ns = earliest_ns.max(at_ns.saturating_add(think_ns));
            self.follow_ups.push(Reverse((at_ns, follow_up)));
            child = self.next_child[follow_up];
        }
    }
}
