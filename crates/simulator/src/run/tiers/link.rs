//! The bandwidth of a shared store in one direction: a link for each worker, and what the store gives to all of them.
//!
//! A worker's link serves its transfers one after the other, as a tier of its own does. All workers that transfer at a moment
//! get the same rate: what a link carries, or an equal part of what the store gives if that is less (processor sharing). So
//! the bytes that a busy worker has got are a function of time that is the same for all: a transfer that begins when it stands at
//! `b` ends when it stands at `b` plus its own bytes, whatever happens in between. Ends lie in order of that sum, and every
//! operation takes O(log workers), however many transfers share the store.
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Transfers count bytes in parts of 10^-9, so that a rate in bytes per second times nanoseconds is a whole number of them.
const PARTS: u128 = 1_000_000_000;

/// A transfer of a worker: unique among all that a link was ever given.
pub(crate) type Number = u64;

struct Waiting {
    number: Number,
    bytes: u64,
}

/// One direction of the store.
pub(super) struct Link {
    worker_bytes_per_s: u64,
    /// `None`: the store is never the bottleneck.
    total_bytes_per_s: Option<u64>,
    /// Parts that a worker has got that was busy from the beginning, at `at_ns`.
    served: u128,
    at_ns: u64,
    /// Transfers under way, one for each busy worker, by where `served` stands at their end.
    active: BTreeMap<(u128, Number), u32>,
    /// What a busy worker transfers now, where it ends, and what waits behind it.
    busy: HashMap<u32, Queue, ahash::RandomState>,
}

struct Queue {
    ends: u128,
    current: Waiting,
    behind: VecDeque<Waiting>,
}

impl Link {
    pub fn new(worker_bytes_per_s: u64, total_bytes_per_s: Option<u64>) -> Link {
        Link {
            worker_bytes_per_s: worker_bytes_per_s.max(1),
            total_bytes_per_s,
            served: 0,
            at_ns: 0,
            active: BTreeMap::new(),
            busy: HashMap::default(),
        }
    }

    /// What each busy worker gets now.
    fn bytes_per_s(&self) -> u64 {
        let share = self.total_bytes_per_s.map(|total| total / self.active.len().max(1) as u64);
        share.map_or(self.worker_bytes_per_s, |share| share.clamp(1, self.worker_bytes_per_s))
    }

    /// When the next transfer ends, if none begins before.
    pub fn next_ns(&self) -> Option<u64> {
        let (&(ends, _), _) = self.active.first_key_value()?;
        let left_ns = ends.saturating_sub(self.served).div_ceil(self.bytes_per_s().into());
        Some(self.at_ns.saturating_add(u64::try_from(left_ns).unwrap_or(u64::MAX)))
    }

    /// Lets time pass until `now`, which is no later than the next end.
    fn advance(&mut self, now: u64) {
        if !self.active.is_empty() {
            let passed_ns = now.saturating_sub(self.at_ns);
            self.served += u128::from(passed_ns) * u128::from(self.bytes_per_s());
        }
        self.at_ns = self.at_ns.max(now);
    }

    /// Takes the next transfer that has ended by `now`: when it did, its worker and its number. Those that end at the same time
    /// come in the order of their numbers.
    pub fn pop(&mut self, now: u64) -> Option<(u64, u32, Number)> {
        let at_ns = self.next_ns().filter(|at_ns| *at_ns <= now)?;
        self.advance(at_ns);
        let ((_, number), worker) = self.active.pop_first()?;
        self.go_on(worker);
        Some((at_ns, worker, number))
    }

    /// The transfer of `worker` is not under way any more: the next one is.
    fn go_on(&mut self, worker: u32) {
        let Some(queue) = self.busy.get_mut(&worker) else { return };
        let Some(next) = queue.behind.pop_front() else {
            self.busy.remove(&worker);
            return;
        };
        queue.ends = self.served + u128::from(next.bytes) * PARTS;
        self.active.insert((queue.ends, next.number), worker);
        queue.current = next;
    }

    /// `worker` begins to transfer `bytes` at `now`, when it has transferred what it began before. All that has ended by `now` was
    /// taken ([`pop`](Self::pop)).
    pub fn begin(&mut self, now: u64, worker: u32, number: Number, bytes: u64) {
        self.advance(now);
        let new = Waiting { number, bytes };
        match self.busy.get_mut(&worker) {
            Some(queue) => queue.behind.push_back(new),
            None => {
                let ends = self.served + u128::from(bytes) * PARTS;
                self.active.insert((ends, number), worker);
                self.busy.insert(worker, Queue { ends, current: new, behind: VecDeque::new() });
            }
        }
    }

    /// Bytes of the transfers of `worker` that have not ended, the whole one that is under way included.
    pub fn bytes_of(&self, worker: u32) -> u64 {
        let Some(queue) = self.busy.get(&worker) else { return 0 };
        queue.behind.iter().fold(queue.current.bytes, |sum, waiting| sum.saturating_add(waiting.bytes))
    }

    /// Stops a transfer, if it has not ended; nothing more is transferred for it. All that has ended by `now` was taken.
    pub fn stop(&mut self, now: u64, worker: u32, number: Number) {
        self.advance(now);
        let Some(queue) = self.busy.get_mut(&worker) else { return };
        if queue.current.number == number {
            self.active.remove(&(queue.ends, number));
            self.go_on(worker);
        } else {
            queue.behind.retain(|waiting| waiting.number != number);
        }
    }

    /// Stops all transfers of `worker`.
    pub fn stop_all(&mut self, now: u64, worker: u32) {
        self.advance(now);
        if let Some(queue) = self.busy.remove(&worker) {
            self.active.remove(&(queue.ends, queue.current.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    /// Two workers share 4 bytes/s, where each link carries 3. The first has 6 bytes to transfer, the second 3.
    #[test]
    fn a_shared_rate_by_hand() {
        const S: u64 = 1_000_000_000;
        let mut link = Link::new(3, Some(4));
        link.begin(0, 0, 7, 6);
        // Alone, at 3 bytes/s, it would be over after 2 s.
        assert_eq!(link.next_ns(), Some(2 * S));
        // After 1 s it has 3 of its 6 bytes; from now on both get 2 bytes/s, and end together.
        link.begin(S, 1, 8, 3);
        assert_eq!(link.next_ns(), Some(5 * S / 2));
        // A worker's next transfer waits for its first.
        link.begin(S, 1, 9, 3);
        assert_eq!((link.pop(5 * S / 2 - 1), link.bytes_of(1)), (None, 6));
        assert_eq!(link.pop(9 * S), Some((5 * S / 2, 0, 7)));
        assert_eq!(link.pop(9 * S), Some((5 * S / 2, 1, 8)));
        // It is alone now.
        assert_eq!(link.pop(9 * S), Some((7 * S / 2, 1, 9)));
        assert_eq!((link.pop(9 * S), link.next_ns(), link.bytes_of(1)), (None, None, 0));
    }

    #[test]
    fn a_stopped_transfer_leaves_its_share_to_the_others() {
        let mut link = Link::new(10, Some(10));
        link.begin(0, 0, 0, 10);
        link.begin(0, 1, 1, 10);
        link.begin(0, 1, 2, 10);
        link.stop(0, 1, 2);
        assert_eq!((link.next_ns(), link.bytes_of(1)), (Some(2_000_000_000), 10));
        // After 1 s the first has 5 of its 10 bytes, and gets the whole rate.
        link.stop(1_000_000_000, 1, 1);
        assert_eq!(link.next_ns(), Some(1_500_000_000));
        link.stop_all(1_000_000_000, 0);
        assert_eq!(link.next_ns(), None);
    }

    /// The same in the plainest way: bytes left for each transfer, and every end recomputed whenever anything happens.
    #[derive(Default)]
    struct Plain {
        at_ns: u64,
        /// For each worker: (number, parts left), the one under way first.
        queues: BTreeMap<u32, Vec<(Number, i128)>>,
    }

    impl Plain {
        fn rate(&self, worker_rate: u64, total: Option<u64>) -> u64 {
            let n = self.queues.len().max(1) as u64;
            total.map_or(worker_rate, |total| (total / n).clamp(1, worker_rate))
        }
        /// Lets time pass, and returns what ends meanwhile.
        fn run(&mut self, until: u64, worker_rate: u64, total: Option<u64>) -> Vec<(u64, u32, Number)> {
            let mut ended = Vec::new();
            loop {
                let rate = i128::from(self.rate(worker_rate, total));
                let ends = |(worker, queue): (&u32, &Vec<(Number, i128)>)| {
                    let left_ns = ((queue[0].1.max(0) + rate - 1) / rate) as u64;
                    (self.at_ns + left_ns, queue[0].1, queue[0].0, *worker)
                };
                let next = self.queues.iter().map(ends).min();
                let at_ns = next.map_or(until, |next| next.0).min(until);
                let parts = i128::from(at_ns - self.at_ns) * rate;
                self.queues.values_mut().for_each(|queue| queue[0].1 -= parts);
                self.at_ns = at_ns;
                let Some((_, _, number, worker)) = next.filter(|next| next.0 <= until) else { return ended };
                ended.push((at_ns, worker, number));
                let queue = self.queues.get_mut(&worker).unwrap();
                queue.remove(0);
                if queue.is_empty() {
                    self.queues.remove(&worker);
                }
            }
        }
    }

    #[test]
    fn random_transfers_end_as_in_the_plain_link() {
        let mut n_ended = 0;
        for seed in 0..200 {
            let mut random = SplitMix64(seed);
            let worker_rate = 1 + u64::from(random.below(1000));
            let total = (seed % 4 > 0).then(|| 1 + u64::from(random.below(3000)));
            let (mut link, mut plain) = (Link::new(worker_rate, total), Plain::default());
            let mut now = 0;
            for number in 0..120 {
                now += u64::from(random.below(3)) * u64::from(random.below(1 << 30));
                let expected = plain.run(now, worker_rate, total);
                let ended: Vec<_> = std::iter::from_fn(|| link.pop(now)).collect();
                assert_eq!(ended, expected, "seed {seed}, before {number}");
                n_ended += ended.len();
                let worker = random.below(6);
                match random.below(8) {
                    0 => {
                        link.stop_all(now, worker);
                        plain.queues.remove(&worker);
                    }
                    1 => {
                        let stopped = u64::from(random.below(number as u32 + 1));
                        link.stop(now, worker, stopped);
                        if let Some(queue) = plain.queues.get_mut(&worker) {
                            queue.retain(|(number, _)| *number != stopped);
                            if queue.is_empty() {
                                plain.queues.remove(&worker);
                            }
                        }
                    }
                    _ => {
                        let bytes = u64::from(random.below(2)) * u64::from(random.below(2000));
                        link.begin(now, worker, number, bytes);
                        let parts = i128::from(bytes) * PARTS as i128;
                        plain.queues.entry(worker).or_default().push((number, parts));
                    }
                }
            }
        }
        assert!(n_ended > 5000, "{n_ended}");
    }
}
