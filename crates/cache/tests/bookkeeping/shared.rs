//! The shared block pool with real threads and a real clock. `src/shared/model.rs` tests it under modelled schedules.
use kvist_cache::shared::SharedBlocks;
use kvist_testing::reference::Choices;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const N_BLOCKS: u32 = 24;

#[test]
fn a_hundred_thousand_requests_of_four_threads() {
    let shared = SharedBlocks::new(N_BLOCKS);
    let owned: Vec<AtomicBool> = (0..N_BLOCKS).map(|_| AtomicBool::new(false)).collect();
    let n_served = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (shared, owned, n_served) = (shared.clone(), &owned, &n_served);
            scope.spawn(move || {
                let mut choices = Choices::from_seed(seed, 25_000);
                let mut allocated = Vec::new();
                while choices.go_on() {
                    let n = choices.below(8);
                    // A thread that keeps blocks and waits for more could wait for another thread that does the same.
                    // Only the deadline ends that.
                    let wait = Duration::from_micros(u64::from(choices.below(50)));
                    let blocks = match choices.below(3) {
                        0 => shared.allocate(n),
                        _ => shared.allocate_waiting(n, Instant::now() + wait),
                    };
                    if let Some(blocks) = blocks {
                        assert_eq!(blocks.ids().len() as u32, n);
                        for &id in blocks.ids() {
                            assert!(
                                !owned[id as usize].swap(true, Ordering::SeqCst),
                                "block {id} has two owners"
                            );
                        }
                        n_served.fetch_add(1, Ordering::Relaxed);
                        allocated.push(blocks);
                    }
                    while allocated.len() > 2 || !allocated.is_empty() && choices.one_in(2) {
                        let blocks = allocated.swap_remove(choices.below(allocated.len() as u32) as usize);
                        blocks.ids().iter().for_each(|&id| owned[id as usize].store(false, Ordering::SeqCst));
                    }
                }
                for blocks in allocated {
                    blocks.ids().iter().for_each(|&id| owned[id as usize].store(false, Ordering::SeqCst));
                }
            });
        }
    });
    assert_eq!((shared.n_free(), shared.n_waiting()), (N_BLOCKS, 0));
    let n_served = n_served.into_inner();
    assert!(n_served > 0, "no request was served");
}

#[test]
fn deadlines_are_kept() {
    let shared = SharedBlocks::new(2);
    let allocated = shared.allocate(2).unwrap();
    let started = Instant::now();
    let wait = Duration::from_millis(30);
    assert!(shared.allocate_waiting(1, started + wait).is_none());
    assert!(started.elapsed() >= wait, "it gave up after {:?}", started.elapsed());
    assert!(shared.allocate_waiting(1, started).is_none(), "a deadline in the past asks without waiting");
    assert_eq!(shared.n_waiting(), 0);
    let an_hour = started + Duration::from_secs(3600);
    assert!(shared.allocate_waiting(3, an_hour).is_none(), "what can never come is not waited for");
    let waiting = std::thread::spawn({
        let shared = shared.clone();
        move || shared.allocate_waiting(2, an_hour).map(|blocks| blocks.ids().len())
    });
    while shared.n_waiting() == 0 {
        std::thread::yield_now();
    }
    drop(allocated);
    assert_eq!(waiting.join().unwrap(), Some(2));
    assert_eq!(shared.allocate(0).map(|blocks| blocks.ids().len()), Some(0));
}
