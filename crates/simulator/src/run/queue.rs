//! Future arrivals, ordered by time and, at equal times, by list position.
use crate::request::Request;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Future arrivals of one or several copies of a list of requests. Request `i` of copy `k` has the number
/// `k * requests + i`. A follow-up is added when its parent has ended. O(list + copies) memory, however many copies
/// there are of a list.
pub(crate) struct Arrivals {
    /// Requests of one copy.
    n_requests: usize,
    /// Requests without a parent, earliest first.
    roots: Vec<(u64, usize)>,
    /// How much later each copy arrives, in nanoseconds.
    shifts_ns: Vec<u64>,
    /// For each copy: the time and number of its next request without a parent, and its place in `roots`.
    next_roots: BinaryHeap<Reverse<(u64, usize, usize)>>,
    follow_ups: BinaryHeap<Reverse<(u64, usize)>>,
    /// `first_child`: first follow-up of each request. `next_child`: next follow-up of the same parent.
    first_child: Vec<Option<usize>>,
    next_child: Vec<Option<usize>>,
    /// Earliest arrival and think time of each request.
    times: Vec<(u64, u64)>,
}

impl Arrivals {
    /// Builds the queue for this list. A parent may come after its follow-ups, as in a list sorted by time. A request
    /// whose parent is not in the list arrives on its own; in a cycle of parents, one request arrives on its own.
    pub fn new(requests: &[Request]) -> Arrivals {
        Arrivals::of_copies(requests, &parents(requests), vec![0])
    }

    /// Several copies of `requests`, of which copy `k` arrives `shifts_ns[k]` later. `parents`: see [`parents`].
    pub fn of_copies(requests: &[Request], parents: &[Option<usize>], shifts_ns: Vec<u64>) -> Arrivals {
        let n = requests.len();
        let (mut first_child, mut next_child) = (vec![None; n], vec![None; n]);
        let mut last_child: Vec<Option<usize>> = vec![None; n];
        let mut roots = Vec::new();
        for (i, parent) in parents.iter().enumerate() {
            let Some(parent) = *parent else {
                roots.push((requests[i].arrival_ns, i));
                continue;
            };
            match last_child[parent] {
                None => first_child[parent] = Some(i),
                Some(sibling) => next_child[sibling] = Some(i),
            }
            last_child[parent] = Some(i);
        }
        roots.sort_unstable();
        let times = requests.iter().map(|r| (r.arrival_ns, r.think_ns)).collect();
        let mut arrivals = Arrivals {
            n_requests: n,
            roots,
            shifts_ns,
            next_roots: BinaryHeap::new(),
            follow_ups: BinaryHeap::new(),
            first_child,
            next_child,
            times,
        };
        (0..arrivals.shifts_ns.len()).for_each(|copy| arrivals.push_root(copy, 0));
        arrivals
    }

    /// The root at `place` is the next of `copy`.
    fn push_root(&mut self, copy: usize, place: usize) {
        if let Some(&(at_ns, i)) = self.roots.get(place) {
            let at_ns = at_ns.saturating_add(self.shifts_ns[copy]);
            self.next_roots.push(Reverse((at_ns, copy * self.n_requests + i, place)));
        }
    }

    fn next(&self) -> Option<(u64, usize)> {
        let follow_up = self.follow_ups.peek().map(|&Reverse(next)| next);
        let root = self.next_roots.peek().map(|&Reverse((at_ns, number, _))| (at_ns, number));
        match (root, follow_up) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Time of the next arrival, not counting follow-ups whose parent has not ended.
    pub fn next_ns(&self) -> Option<u64> {
        self.next().map(|(at_ns, _)| at_ns)
    }

    /// Takes the next request that has arrived by `now_ns`. Returns its arrival time and its number.
    pub fn pop(&mut self, now_ns: u64) -> Option<(u64, usize)> {
        let next = self.next().filter(|&(at_ns, _)| at_ns <= now_ns)?;
        match self.next_roots.peek() {
            Some(&Reverse((at_ns, number, place))) if (at_ns, number) == next => {
                self.next_roots.pop();
                self.push_root(number / self.n_requests, place + 1);
            }
            _ => {
                self.follow_ups.pop();
            }
        }
        Some(next)
    }

    /// Request `number` has finished: schedules its follow-ups.
    pub fn ended(&mut self, number: usize, at_ns: u64) {
        let (copy, i) = (number / self.n_requests, number % self.n_requests);
        let mut child = self.first_child[i];
        while let Some(follow_up) = child {
            let (earliest_ns, think_ns) = self.times[follow_up];
            let earliest_ns = earliest_ns.saturating_add(self.shifts_ns[copy]);
            let at_ns = earliest_ns.max(at_ns.saturating_add(think_ns));
            self.follow_ups.push(Reverse((at_ns, copy * self.n_requests + follow_up)));
            child = self.next_child[follow_up];
        }
    }
}

/// List index of each request's parent, with cycles broken.
pub(crate) fn parents(requests: &[Request]) -> Vec<Option<usize>> {
    let place: HashMap<u64, usize> = requests.iter().enumerate().map(|(i, r)| (r.id, i)).collect(); // never iterated
    let mut parents: Vec<Option<usize>> =
        requests.iter().map(|request| place.get(&request.parent?).copied()).collect();
    #[derive(Clone, Copy, PartialEq)]
    enum Walk {
        NotYet,
        Now,
        Done,
    }
    let mut walked = vec![Walk::NotYet; requests.len()];
    let mut path = Vec::new();
    for i in 0..requests.len() {
        let mut at = i;
        while walked[at] == Walk::NotYet {
            walked[at] = Walk::Now;
            path.push(at);
            match parents[at] {
                Some(parent) if walked[parent] == Walk::Now => parents[at] = None,
                Some(parent) => at = parent,
                None => {}
            }
        }
        path.drain(..).for_each(|place| walked[place] = Walk::Done);
    }
    parents
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(requests: &[Request]) -> Vec<(u64, u64)> {
        let mut arrivals = Arrivals::new(requests);
        let mut order = Vec::new();
        while let Some((at_ns, i)) = arrivals.pop(u64::MAX) {
            order.push((at_ns, requests[i].id));
            arrivals.ended(i, at_ns + 10);
        }
        order
    }

    #[test]
    fn parents_stand_anywhere() {
        let request = |id, at_ns, parent| Request { parent, think_ns: 5, ..Request::new(id, at_ns, 1, 1) };
        for (requests, expected) in [
            (vec![request(1, 0, Some(0)), request(0, 100, None)], vec![(100, 0), (115, 1)]),
            (
                vec![request(2, 0, Some(1)), request(1, 0, Some(0)), request(0, 7, None)],
                vec![(7, 0), (22, 1), (37, 2)],
            ),
            (vec![request(1, 3, Some(9))], vec![(3, 1)]),
            (vec![request(1, 3, Some(1))], vec![(3, 1)]),
            // In a cycle, the last request walked arrives first.
            (vec![request(1, 3, Some(2)), request(2, 4, Some(1))], vec![(4, 2), (19, 1)]),
        ] {
            assert_eq!(order(&requests), expected, "{requests:?}");
        }
    }
}
