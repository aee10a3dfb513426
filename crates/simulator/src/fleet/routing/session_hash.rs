//! All requests of a session go to one worker, by consistent hashing (Karger et al., "Consistent Hashing and Random
//! Trees", STOC 1997), as `consistent_hash` of vllm-router 0.1.17 does, with as many points per worker. When a worker
//! fails, only its sessions move, and they return when it is back. Loads do not matter.
use super::{Asked, Choice, Loads, Routing, View};

/// Points of a worker on the ring.
const POINTS: u64 = 160;

#[derive(Default)]
pub(super) struct SessionHash {
    /// Points with their workers, in ascending order unless `is_stale`.
    ring: Vec<(u64, u32)>,
    /// Whether workers have joined since the ring was sorted. It is sorted when the next request comes, so that workers that
    /// join together, as all do at the start, cost one sort.
    is_stale: bool,
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
fn mix(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

impl Routing for SessionHash {
    fn choose(&mut self, asked: &Asked<'_>, _: &Loads, _: &View) -> Option<Choice> {
        if std::mem::take(&mut self.is_stale) {
            self.ring.sort(); // merges the points that are in order with the new ones
        }
        // The constant sets the hashes of sessions apart from those of points.
        let hash = mix(mix(asked.session).wrapping_add(0x9e37_79b9_7f4a_7c15));
        let after = self.ring.partition_point(|&(point, _)| point < hash);
        let (_, worker) = self.ring.get(after).or_else(|| self.ring.first())?;
        Some(Choice::without_credit(*worker))
    }

    fn joined(&mut self, worker: u32) {
        self.ring.extend((0..POINTS).map(|i| (mix(u64::from(worker) * POINTS + i + 1), worker)));
        self.is_stale = true;
    }

    fn left(&mut self, worker: u32) {
        self.ring.retain(|&(_, of)| of != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn homes(ring: &mut SessionHash, n_sessions: u64) -> Vec<u32> {
        let (loads, view) = (Loads::new(0), View::new(0));
        let mut home = |session| {
            let asked = Asked { session, prompt_tokens: 1, hashes: &[] };
            ring.choose(&asked, &loads, &view).unwrap().worker
        };
        (0..n_sessions).map(&mut home).collect()
    }

    /// Every worker has about its share of the sessions, and only the sessions of a worker that fails move.
    #[test]
    fn sessions_stay() {
        let mut ring = SessionHash::default();
        assert_eq!(
            ring.choose(&Asked { session: 1, prompt_tokens: 1, hashes: &[] }, &Loads::new(0), &View::new(0)),
            None
        );
        (0..10).for_each(|worker| ring.joined(worker));
        let before = homes(&mut ring, 20_000);
        for worker in 0..10 {
            let share = before.iter().filter(|home| **home == worker).count();
            assert!((1400..2600).contains(&share), "worker {worker} has {share} of 20,000 sessions");
        }
        ring.left(3);
        let without = homes(&mut ring, 20_000);
        assert!(before.iter().zip(&without).all(|(a, b)| if *a == 3 { *b != 3 } else { a == b }));
        ring.joined(3);
        assert_eq!(homes(&mut ring, 20_000), before);
    }

    /// The ring is the same whether workers join together or one by one between requests. It once was sorted for every
    /// worker, which took minutes for thousands of them.
    #[test]
    fn joins_together_are_joins_one_by_one() {
        let (mut together, mut one_by_one) = (SessionHash::default(), SessionHash::default());
        for worker in 0..100 {
            one_by_one.joined(worker);
            homes(&mut one_by_one, 1);
            assert!(one_by_one.ring.is_sorted());
            together.joined(worker);
        }
        assert!(!together.ring.is_sorted(), "sorted before a request needs it");
        one_by_one.left(7);
        together.left(7);
        assert_eq!(homes(&mut together, 20_000), homes(&mut one_by_one, 20_000));
        assert_eq!(together.ring, one_by_one.ring);
    }
}
