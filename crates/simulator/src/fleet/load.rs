//! The load of a fleet: one or several copies of a list of requests, made as they arrive.
use crate::request::Request;
use crate::run::{Arrivals, parents};
use std::borrow::Cow;

/// The first copy arrives as the list says; the others begin spread evenly over this time. A trace whose times are rounded
/// to seconds would otherwise send all copies of a request at once.
const SPREAD_NS: u64 = 60_000_000_000;

pub(super) struct Load<'a> {
    requests: &'a [Request],
    copies: u32,
    pub arrivals: Arrivals,
    /// For each request of the list: the first request of its chain of parents.
    roots: Vec<usize>,
}

impl<'a> Load<'a> {
    pub fn new(requests: &'a [Request], copies: u32) -> Load<'a> {
        let parents = parents(requests);
        let shift = |copy: u32| (u128::from(SPREAD_NS) * u128::from(copy) / u128::from(copies)) as u64;
        let shifts_ns = (0..copies).map(shift).collect();
        let arrivals = Arrivals::of_copies(requests, &parents, shifts_ns);
        Load { requests, copies, arrivals, roots: roots(&parents) }
    }

    pub fn n_requests(&self) -> usize {
        self.requests.len() * self.copies as usize
    }

    /// Request `number`. Copies differ by their salt, so that they share no content.
    pub fn request(&self, number: usize) -> Cow<'a, Request> {
        let request = &self.requests[number % self.requests.len()];
        match number / self.requests.len() {
            0 => Cow::Borrowed(request),
            copy => {
                let salt = format!("{}\u{0}copy {copy}", request.salt());
                Cow::Owned(Request { id: number as u64, salt: Some(salt.into()), ..request.clone() })
            }
        }
    }

    /// The session of a request: it has the number of the first request of the chain of parents.
    pub fn session(&self, number: usize) -> u64 {
        let n = self.requests.len();
        (number - number % n + self.roots[number % n]) as u64
    }
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
        let mut requests: Vec<Request> = (0..3).map(|i| Request::new(i + 7, i * 5, 10, 10)).collect();
        requests[2].parent = Some(7);
        requests[2].think_ns = 4;
        let mut load = Load::new(&requests, 2);
        assert_eq!(load.n_requests(), 6);
        let mut order = Vec::new();
        while let Some((at_ns, number)) = load.arrivals.pop(u64::MAX) {
            order.push((at_ns, number));
            load.arrivals.ended(number, at_ns + 100);
        }
        let half = SPREAD_NS / 2;
        assert_eq!(order, [(0, 0), (5, 1), (104, 2), (half, 3), (half + 5, 4), (half + 104, 5)]);
        assert_eq!((0..6).map(|n| load.session(n)).collect::<Vec<_>>(), [0, 1, 0, 3, 4, 3]);
        assert_eq!(*load.request(1), requests[1]);
        assert_ne!(load.request(4).salt(), load.request(1).salt());
        assert_eq!(load.request(4).prompt_tokens, 10);
    }
}
