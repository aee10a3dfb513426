//! A store that all workers of a fleet write to and find blocks in, in virtual time.
//!
//! It is the last tier of every worker. A worker begins to write a step's blocks when the step is over, and they are found when all
//! of them are written. Two workers that compute the same blocks at the same time both write them, as they would in a store that
//! knows nothing of its clients. A worker that fails takes what it has not written with it; what it has written stays.
//! How workers share the bandwidth: [`link`](super::link).
use super::contents::{Contents, TierOrder};
use super::link::{Link, Number};
use std::collections::{BTreeMap, HashMap};

/// How the store is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedSpec {
    pub capacity_bytes: Option<u64>,
    pub block_bytes: u64,
    pub latency_ns: u64,
    /// Of a worker's link, in each direction.
    pub worker_bytes_per_s: u64,
    /// Of the store, in each direction, over all workers; `None` if it is never the bottleneck.
    pub total_bytes_per_s: Option<u64>,
    /// More bytes than that do not wait to be written by a worker: what exceeds them is not copied.
    pub max_store_bytes: u64,
}

/// A transfer of a worker is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landed {
    pub worker: u32,
    /// What the worker calls it.
    pub transfer: u64,
}

struct Transfer {
    worker: u32,
    what: What,
}

enum What {
    /// The worker calls it so.
    Read { transfer: u64 },
    /// `transfer`: if the worker wants to know when it is over.
    Write { hashes: Vec<u64>, transfer: Option<u64> },
}

#[derive(Clone, Copy)]
enum Next {
    /// A worker begins to write.
    Write,
    /// The last byte of a transfer arrives, a latency after the store has sent it.
    Land,
}

pub(crate) struct SharedStore {
    spec: SharedSpec,
    pub contents: Contents,
    reads: Link,
    writes: Link,
    /// Transfers that are not over, by number.
    transfers: HashMap<Number, Transfer, ahash::RandomState>,
    /// By time and the order in which they were entered. Void if the transfer is over.
    agenda: BTreeMap<(u64, u64), (Next, Number)>,
    n_entered: u64,
    n_begun: Number,
    /// Reads by what the worker calls them.
    reading: HashMap<(u32, u64), Number, ahash::RandomState>,
    /// The time until when everything has happened.
    now: u64,
}

impl SharedStore {
    pub fn new(spec: SharedSpec) -> SharedStore {
        let link = || Link::new(spec.worker_bytes_per_s, spec.total_bytes_per_s);
        SharedStore {
            contents: Contents::new(spec.capacity_bytes, spec.block_bytes, TierOrder::Lru),
            reads: link(),
            writes: link(),
            transfers: HashMap::default(),
            agenda: BTreeMap::new(),
            n_entered: 0,
            n_begun: 0,
            reading: HashMap::default(),
            now: 0,
            spec,
        }
    }

    /// When something happens next.
    pub fn next_ns(&self) -> Option<u64> {
        let agenda = self.agenda.first_key_value().map(|((at_ns, _), _)| *at_ns);
        [agenda, self.reads.next_ns(), self.writes.next_ns()].into_iter().flatten().min()
    }

    /// Lets everything happen until `now`, in order. Returns the transfers that are over and that workers wait for.
    pub fn run_until(&mut self, now: u64) -> Vec<Landed> {
        let mut landed = Vec::new();
        while let Some(at_ns) = self.next_ns().filter(|at_ns| *at_ns <= now) {
            self.now = at_ns;
            let ended = [self.writes.pop(at_ns), self.reads.pop(at_ns)];
            if ended.iter().any(Option::is_some) {
                for (_, _, number) in ended.into_iter().flatten() {
                    self.enter(at_ns.saturating_add(self.spec.latency_ns), Next::Land, number);
                }
                continue;
            }
            match self.agenda.pop_first() {
                Some((_, (Next::Write, number))) => landed.extend(self.begin_write(number)),
                Some((_, (Next::Land, number))) => landed.extend(self.land(number)),
                None => {}
            }
        }
        self.now = self.now.max(now);
        landed
    }

    fn enter(&mut self, at_ns: u64, next: Next, number: Number) {
        self.agenda.insert((at_ns, self.n_entered), (next, number));
        self.n_entered += 1;
    }

    fn add(&mut self, worker: u32, what: What) -> Number {
        self.n_begun += 1;
        self.transfers.insert(self.n_begun, Transfer { worker, what });
        self.n_begun
    }

    fn bytes(&self, n_blocks: usize) -> u64 {
        self.spec.block_bytes.saturating_mul(n_blocks as u64)
    }

    /// `worker` begins to read so many blocks at `now`, until when everything has happened. [`run_until`](Self::run_until) tells
    /// when they have arrived.
    pub fn read(&mut self, now: u64, worker: u32, transfer: u64, n_blocks: usize) {
        let number = self.add(worker, What::Read { transfer });
        self.reading.insert((worker, transfer), number);
        self.reads.begin(now, worker, number, self.bytes(n_blocks));
    }

    /// Stops a read, if it is not over. Nothing is told of it then.
    pub fn stop_read(&mut self, now: u64, worker: u32, transfer: u64) {
        if let Some(number) = self.reading.remove(&(worker, transfer)) {
            self.transfers.remove(&number);
            self.reads.stop(now, worker, number);
        }
    }

    /// `worker` writes blocks of one prompt, in order, from `from_ns` on, as far as the store does not have them then. `transfer`: the
    /// name under which [`run_until`](Self::run_until) tells when all of them are there.
    pub fn write(&mut self, worker: u32, from_ns: u64, hashes: Vec<u64>, transfer: Option<u64>) {
        let number = self.add(worker, What::Write { hashes, transfer });
        self.enter(from_ns.max(self.now), Next::Write, number);
    }

    fn begin_write(&mut self, number: Number) -> Option<Landed> {
        let Transfer { worker, what: What::Write { hashes, transfer } } = self.transfers.get_mut(&number)?
        else {
            return None;
        };
        let (worker, transfer) = (*worker, *transfer);
        hashes.retain(|hash| !self.contents.has(*hash));
        if transfer.is_none() {
            // The scheduler bounds what it waits for itself.
            let room = self.spec.max_store_bytes.saturating_sub(self.writes.bytes_of(worker));
            let room = room / self.spec.block_bytes.max(1);
            hashes.truncate(usize::try_from(room).unwrap_or(usize::MAX));
        }
        if hashes.is_empty() {
            self.transfers.remove(&number);
            return transfer.map(|transfer| Landed { worker, transfer });
        }
        let n_blocks = hashes.len();
        self.contents.counts.written_blocks += n_blocks as u64;
        self.writes.begin(self.now, worker, number, self.bytes(n_blocks));
        None
    }

    fn land(&mut self, number: Number) -> Option<Landed> {
        let Transfer { worker, what } = self.transfers.remove(&number)?;
        let transfer = match what {
            What::Read { transfer } => {
                self.reading.remove(&(worker, transfer));
                Some(transfer)
            }
            What::Write { hashes, transfer } => {
                self.contents.place(&hashes);
                transfer
            }
        };
        transfer.map(|transfer| Landed { worker, transfer })
    }

    /// `worker` has failed at `now`: what it transfers is never over.
    pub fn fail(&mut self, now: u64, worker: u32) {
        self.transfers.retain(|_, transfer| transfer.worker != worker);
        self.reading.retain(|(of, _), _| *of != worker);
        self.reads.stop_all(now, worker);
        self.writes.stop_all(now, worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;

    /// Blocks of 10 bytes, 10 bytes/s for each worker and in all, a latency of half a second.
    fn store(capacity_blocks: Option<u64>, max_store_bytes: u64) -> SharedStore {
        SharedStore::new(SharedSpec {
            capacity_bytes: capacity_blocks.map(|n| n * 10),
            block_bytes: 10,
            latency_ns: S / 2,
            worker_bytes_per_s: 10,
            total_bytes_per_s: Some(10),
            max_store_bytes,
        })
    }

    fn has(store: &SharedStore, hashes: std::ops::Range<u64>) -> Vec<u64> {
        hashes.filter(|hash| store.contents.has(*hash)).collect()
    }

    #[test]
    fn blocks_are_there_when_all_of_them_are_written() {
        let mut store = store(None, u64::MAX);
        store.write(0, S, vec![1, 2], Some(7));
        assert!(store.run_until(3 * S + S / 2 - 1).is_empty());
        assert!(has(&store, 0..9).is_empty());
        assert_eq!(store.run_until(3 * S + S / 2), [Landed { worker: 0, transfer: 7 }]);
        assert_eq!(has(&store, 0..9), [1, 2]);
        // What is there is not written again, and takes no time.
        store.write(1, 4 * S, vec![1, 2], Some(8));
        assert_eq!(store.run_until(4 * S), [Landed { worker: 1, transfer: 8 }]);
        assert_eq!(store.contents.counts.written_blocks, 2);
    }

    #[test]
    fn a_full_store_drops_what_was_used_longest_ago() {
        let mut store = store(Some(3), u64::MAX);
        store.write(0, 0, vec![1, 2, 3], None);
        store.run_until(10 * S);
        store.contents.look_up(&[1, 2]);
        store.write(1, 10 * S, vec![4], None);
        store.run_until(20 * S);
        assert_eq!(has(&store, 0..9), [1, 2, 4]);
        store.write(1, 20 * S, vec![5], None);
        store.run_until(30 * S);
        // Of a prompt, the end goes first.
        assert_eq!(has(&store, 0..9), [1, 4, 5]);
        assert_eq!((store.contents.counts.dropped_blocks, store.contents.counts.peak_blocks), (2, 3));
    }

    #[test]
    fn a_worker_that_fails_leaves_what_it_has_written() {
        let mut store = store(None, u64::MAX);
        store.write(0, 0, vec![1], None);
        store.write(1, 0, vec![2, 3], None);
        store.write(0, 3 * S, vec![4], None);
        store.read(0, 0, 5, 1);
        // Both write at 5 bytes/s: the first is done after 2 s, and visible half a second later.
        store.run_until(2 * S + S / 2);
        store.write(0, 2 * S + S / 2, vec![6], None);
        store.run_until(2 * S + S / 2);
        store.fail(2 * S + S / 2, 0);
        assert!(store.run_until(20 * S).is_empty());
        assert_eq!(has(&store, 0..9), [1, 2, 3]);
    }

    #[test]
    fn too_much_that_waits_is_not_written() {
        let mut store = store(None, 30);
        store.write(0, 0, vec![1, 2], None);
        store.write(0, 0, vec![3, 4], None);
        store.write(0, 0, vec![5], None);
        store.write(1, 0, vec![6, 7], None);
        store.run_until(100 * S);
        assert_eq!(has(&store, 0..9), [1, 2, 3, 6, 7]);
    }
}
