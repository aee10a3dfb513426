//! Tests the block pool under random and adversarial schedules (Burckhardt, Kothari, Musuvathi, Nagarakatte: *A
//! randomized scheduler with probabilistic guarantees of finding bugs*, ASPLOS 2010). A waiting request that is never
//! served is a deadlock; `shuttle` reports it together with the schedule.
use super::{OwnedBlocks, SharedBlocks};
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::{check_pct, check_random, thread};
use std::sync::Arc;
use std::time::{Duration, Instant};

const N_SCHEDULES: usize = 2_000;

fn check(model: fn()) {
    check_random(model, N_SCHEDULES);
    check_pct(model, N_SCHEDULES, 3);
}

/// A deadline that may pass at any moment.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(1)
}
/// A deadline that never passes.
fn never() -> Instant {
    Instant::now() + Duration::from_secs(1 << 20)
}

/// Marks blocks while they are owned, to detect two owners of one block.
struct Marks(Vec<AtomicBool>);

impl Marks {
    fn new(n_blocks: u32) -> Arc<Marks> {
        Arc::new(Marks((0..n_blocks).map(|_| AtomicBool::new(false)).collect()))
    }
    fn own(&self, blocks: OwnedBlocks, n: u32) {
        assert_eq!(blocks.ids().len() as u32, n);
        for &id in blocks.ids() {
            assert!(!self.0[id as usize].swap(true, Ordering::SeqCst), "block {id} has two owners");
        }
        thread::yield_now();
        for &id in blocks.ids() {
            assert!(self.0[id as usize].swap(false, Ordering::SeqCst));
        }
        drop(blocks);
    }
}

/// Threads that wait, time out or do not wait at all: every block has one owner, and in the end all blocks are free.
#[test]
fn a_block_has_one_owner_and_none_is_lost() {
    check(|| {
        let (shared, marks) = (SharedBlocks::new(4), Marks::new(4));
        let threads: Vec<_> = [(1, 3), (3, 2), (2, 4)]
            .into_iter()
            .map(|(first, second)| {
                let (shared, marks) = (shared.clone(), Arc::clone(&marks));
                thread::spawn(move || {
                    if let Some(blocks) = shared.allocate(first) {
                        marks.own(blocks, first);
                    }
                    if let Some(blocks) = shared.allocate_waiting(second, soon()) {
                        marks.own(blocks, second);
                    }
                    marks.own(shared.allocate_waiting(first, never()).expect("it never passes"), first);
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((shared.n_free(), shared.n_waiting()), (4, 0));
    });
}

/// With one block free, a request for two blocks waits first in the queue. Neither the request for one block behind
/// it nor a request that does not wait may overtake it.
#[test]
fn no_waiter_is_overtaken() {
    check(|| {
        let shared = SharedBlocks::new(2);
        let (one, other) = (shared.allocate(1).unwrap(), shared.allocate(1).unwrap());
        let waits_for = |n: u32| {
            let shared = shared.clone();
            thread::spawn(move || shared.allocate_waiting(n, never()).expect("it never passes"))
        };
        let queued = |n: usize| {
            while shared.n_waiting() < n {
                thread::yield_now();
            }
        };
        let large = waits_for(2);
        queued(1);
        let small = waits_for(1);
        queued(2);
        drop(one);
        assert!(shared.allocate(1).is_none(), "the free block belongs to the request that came first");
        assert_eq!((shared.n_free(), shared.n_waiting()), (1, 2));
        drop(other);
        let large = large.join().unwrap();
        assert_eq!((large.ids().len(), shared.n_waiting()), (2, 1));
        drop(large);
        assert_eq!(small.join().unwrap().ids().len(), 1);
    });
}

/// When the first request in the queue times out, the next one must be served if enough blocks are free for it.
/// Otherwise it would wait forever.
#[test]
fn giving_up_serves_the_next() {
    check(|| {
        let shared = SharedBlocks::new(3);
        let allocated = shared.allocate(2).unwrap();
        let large = {
            let shared = shared.clone();
            thread::spawn(move || shared.allocate_waiting(3, soon()).is_some())
        };
        let small = {
            let shared = shared.clone();
            thread::spawn(move || shared.allocate_waiting(1, never()).map(|blocks| blocks.ids().len()))
        };
        assert!(!large.join().unwrap(), "two blocks are held all the time");
        assert_eq!(small.join().unwrap(), Some(1));
        drop(allocated);
        assert_eq!((shared.n_free(), shared.n_waiting()), (3, 0));
    });
}

/// One release can satisfy several requests, and must: no thread releases blocks before all are served.
#[test]
fn one_release_serves_all_it_can() {
    check(|| {
        let shared = SharedBlocks::new(3);
        let allocated = shared.allocate(3).unwrap();
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || shared.allocate_waiting(1, never()).expect("it never passes"))
            })
            .collect();
        drop(allocated);
        let blocks: Vec<OwnedBlocks> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!((shared.n_free(), shared.n_waiting()), (0, 0));
        drop(blocks);
        assert_eq!(shared.n_free(), 3);
    });
}
