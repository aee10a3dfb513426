//! The load of a fleet: one or several copies of a list of requests, made as they arrive.
use crate::request::Request;
use crate::run::{Arrivals, parents};
use std::borrow::Cow;

/// The first copy arrives as the list says; the others begin spread evenly over this time, so that copies of a request do not
/// arrive at once where a trace rounds times to seconds,
const SPREAD_NS: u64 = 60_000_000_000;
/// but over no more than this part of the time in which the list arrives: the load is to be scaled, not to be prolonged.
const SPREAD_PART: u64 = 20;

pub(super) struct Load<'a> {
    requests: &'a [Request],
    pub arrivals: Arrivals,
    /// For each request of the list: the first request of its chain of parents.
    roots: Vec<usize>,
    /// How much later each copy arrives, in nanoseconds.
    shifts_ns: Vec<u64>,
    /// The id of the first request of the first copy. No request of the list has this or a following one that copies need.
    first_id: u64,
}

impl<'a> Load<'a> {
    pub fn new(requests: &'a [Request], copies: u32) -> Load<'a> {
        let parents = parents(requests);
        let times = || requests.iter().map(|request| request.arrival_ns);
        let span_ns = times().max().unwrap_or(0) - times().min().unwrap_or(0);
        let spread_ns = SPREAD_NS.min(span_ns / SPREAD_PART);
        let shift = |copy: u32| (u128::from(spread_ns) * u128::from(copy) / u128::from(copies)) as u64;
        let shifts_ns: Vec<u64> = (0..copies).map(shift).collect();
        let arrivals = Arrivals::of_copies(requests, &parents, shifts_ns.clone());
        let n_copied = requests.len() as u64 * u64::from(copies - 1);
        let first_id = free_ids(requests.iter().map(|request| request.id).collect(), n_copied);
        Load { requests, arrivals, roots: roots(&parents), shifts_ns, first_id }
    }

    pub fn n_requests(&self) -> usize {
        self.requests.len() * self.shifts_ns.len()
    }

    /// Request `number`. Copies differ by their salt, so that they share no content. Their times are those of the copy, and
    /// their ids are their own.
    pub fn request(&self, number: usize) -> Cow<'a, Request> {
        let n = self.requests.len();
        let request = &self.requests[number % n];
        match number / n {
            0 => Cow::Borrowed(request),
            copy => {
                let later = |ns: u64| ns.saturating_add(self.shifts_ns[copy]);
                Cow::Owned(Request {
                    id: self.first_id + (number - n) as u64,
                    arrival_ns: later(request.arrival_ns),
                    deadline_ns: request.deadline_ns.map(later),
                    salt: Some(format!("{}\u{0}copy {copy}", request.salt()).into()),
                    ..request.clone()
                })
            }
        }
    }

    /// The session of a request: it has the number of the first request of the chain of parents.
    pub fn session(&self, number: usize) -> u64 {
        let n = self.requests.len();
        (number - number % n + self.roots[number % n]) as u64
    }
}

/// The first of `n` ids in a row that are not among `taken`. There are some: both numbers are small against 2^64.
fn free_ids(mut taken: Vec<u64>, n: u64) -> u64 {
    taken.sort_unstable();
    let mut free = 0;
    for id in taken {
        if id.saturating_sub(free) >= n {
            break;
        }
        free = free.max(id.saturating_add(1));
    }
    free
}

/// The end of every chain of parents, which has no cycles. Each link is followed once.
fn roots(parents: &[Option<usize>]) -> Vec<usize> {
    let mut roots: Vec<Option<usize>> = vec![None; parents.len()];
    let mut path = Vec::new();
    for i in 0..parents.len() {
        let mut at = i;
        let root = loop {
            match (roots[at], parents[at]) {
                (Some(root), _) => break root,
                (None, None) => break at,
                (None, Some(parent)) => {
                    path.push(at);
                    at = parent;
                }
            }
        };
        roots[i] = Some(root);
        path.drain(..).for_each(|on_path| roots[on_path] = Some(root));
    }
    roots.into_iter().enumerate().map(|(i, root)| root.unwrap_or(i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_chains_of_parents() {
        let parent = |parents: &[Option<usize>]| roots(parents);
        assert_eq!(parent(&[None, Some(0), Some(1), None, Some(2)]), [0, 0, 0, 3, 0]);
        assert_eq!(parent(&[Some(2), Some(0), None]), [2, 2, 2]);
        assert!(parent(&[]).is_empty());
    }

    /// Copies arrive at their own times, share no content, and keep the chains of the list to themselves.
    #[test]
    fn copies() {
        const MINUTE: u64 = 60_000_000_000;
        // The spread is a twentieth of the time of the list, and a minute at most.
        for (last_ns, half) in [(10, 0), (4000, 100), (20 * MINUTE, MINUTE / 2), (30 * MINUTE, MINUTE / 2)] {
            let mut requests: Vec<Request> = (0..4).map(|i| Request::new(i + 7, i * 5, 10, 10)).collect();
            requests[2].parent = Some(7);
            requests[2].think_ns = 4;
            requests[1].deadline_ns = Some(90);
            requests[3].arrival_ns = last_ns;
            let mut load = Load::new(&requests, 2);
            assert_eq!(load.n_requests(), 8);
            let mut order = Vec::new();
            while let Some((at_ns, number)) = load.arrivals.pop(u64::MAX) {
                order.push((at_ns, number));
                load.arrivals.ended(number, at_ns + 100);
            }
            let once = [(0, 0), (5, 1), (104, 2), (last_ns, 3)];
            let mut expected: Vec<_> =
                once.into_iter().chain(once.map(|(ns, i)| (ns + half, i + 4))).collect();
            expected.sort_unstable();
            assert_eq!(order, expected);
            assert_eq!((0..8).map(|n| load.session(n)).collect::<Vec<_>>(), [0, 1, 0, 3, 4, 5, 4, 7]);
            assert_eq!(*load.request(1), requests[1]);
            let copy = load.request(5);
            assert_ne!(copy.salt(), load.request(1).salt());
            assert_eq!((copy.prompt_tokens, copy.arrival_ns), (10, 5 + half));
            assert_eq!(copy.deadline_ns, Some(90 + half));
            assert_eq!(load.request(4).deadline_ns, None);
        }
    }

    #[test]
    fn copies_have_ids_of_their_own() {
        for (ids, copies) in [
            (vec![0, 1, 2], [3, 4, 5, 6, 7, 8]),
            (vec![7, 4, 4], [8, 9, 10, 11, 12, 13]),
            (vec![7, 20, 6], [0, 1, 2, 3, 4, 5]),
            (vec![u64::MAX, 5, 0], [6, 7, 8, 9, 10, 11]),
        ] {
            let requests: Vec<Request> = ids.iter().map(|&id| Request::new(id, 0, 1, 1)).collect();
            let load = Load::new(&requests, 3);
            assert_eq!((0..3).map(|n| load.request(n).id).collect::<Vec<_>>(), ids);
            assert_eq!((3..9).map(|n| load.request(n).id).collect::<Vec<_>>(), copies, "{ids:?}");
        }
    }
}
