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
    /// Arrivals of this list. A parent may stand behind its follow-ups, as in a list sorted by time. Who names a parent
    /// that is not in the list arrives on its own, and so does one of those who wait for each other in a circle.
    pub fn new(requests: &[Request]) -> Arrivals {
        let n = requests.len();
        let (mut first_child, mut next_child) = (vec![None; n], vec![None; n]);
        let mut last_child: Vec<Option<usize>> = vec![None; n];
        let mut roots = Vec::new();
        for (i, parent) in parents(requests).into_iter().enumerate() {
            let Some(parent) = parent else {
                roots.push((requests[i].arrival_ns, i));
                continue;
            };
            match last_child[parent] {
                None => first_child[parent] = Some(i),
                Some(brother) => next_child[brother] = Some(i),
            }
            last_child[parent] = Some(i);
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

/// The place of each request's parent, without circles.
fn parents(requests: &[Request]) -> Vec<Option<usize>> {
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
            // In a circle, the last that is walked to goes first.
            (vec![request(1, 3, Some(2)), request(2, 4, Some(1))], vec![(4, 2), (19, 1)]),
        ] {
            assert_eq!(order(&requests), expected, "{requests:?}");
        }
    }
}
