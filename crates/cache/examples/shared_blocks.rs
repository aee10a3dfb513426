//! Allocations and releases per second of a shared block pool, by number of threads, beside a lock-free free list: a
//! stack (Treiber: "Systems Programming: Coping with Parallelism", IBM, 1986) whose head carries a tag against ABA, which
//! takes and returns several blocks in one exchange. The stack cannot let a request wait its turn, which the pool can.
//!
//! `cargo run --release -p kvist-cache --example shared_blocks`
use kvist_cache::shared::SharedBlocks;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

const N_BLOCKS: u32 = 4096;
const N_ROUNDS: u32 = 200_000;
const N_RUNS: usize = 15;
const END: u32 = u32::MAX;

/// The tag in the upper half of `head` changes with every exchange, the block in the lower half is the first free one.
struct Stack {
    head: AtomicU64,
    next: Vec<AtomicU32>,
}

impl Stack {
    fn new(n_blocks: u32) -> Stack {
        let next = (1..n_blocks).chain([END]).map(AtomicU32::new);
        Stack { head: AtomicU64::new(0), next: next.collect() }
    }
    fn exchange(&self, head: u64, first: u32) -> Result<u64, u64> {
        let new = ((head >> 32).wrapping_add(1) << 32) | u64::from(first);
        self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire)
    }
    fn allocate(&self, n: usize) -> Option<Vec<u32>> {
        let (mut blocks, mut head) = (Vec::with_capacity(n), self.head.load(Ordering::Acquire));
        loop {
            blocks.clear();
            let mut block = head as u32;
            while blocks.len() < n && block != END {
                blocks.push(block);
                block = self.next[block as usize].load(Ordering::Relaxed);
            }
            // Another thread may have changed the list meanwhile. Then the exchange fails.
            let is_short = blocks.len() < n;
            match self.exchange(head, if is_short { head as u32 } else { block }) {
                Ok(_) => return (!is_short).then_some(blocks),
                Err(now) => head = now,
            }
        }
    }
    fn release(&self, blocks: &[u32]) {
        let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) else { return };
        for pair in blocks.windows(2) {
            self.next[pair[0] as usize].store(pair[1], Ordering::Relaxed);
        }
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            self.next[last as usize].store(head as u32, Ordering::Relaxed);
            match self.exchange(head, first) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}

/// Nanoseconds per round, when `n_threads` threads do `N_ROUNDS` rounds in total. The median of some runs, because in
/// the fastest run the threads never met.
fn nanoseconds(n_threads: u32, round: impl Fn() + Sync) -> f64 {
    let run = |_| {
        let (together, times) = (Barrier::new(n_threads as usize), Mutex::new(Vec::new()));
        std::thread::scope(|scope| {
            for _ in 0..n_threads {
                scope.spawn(|| {
                    together.wait();
                    let started = Instant::now();
                    (0..N_ROUNDS / n_threads).for_each(|_| round());
                    times.lock().expect("no thread panics").push((started, Instant::now()));
                });
            }
        });
        let times = times.into_inner().expect("no thread panics");
        let (first, last) = (times.iter().map(|t| t.0).min(), times.iter().map(|t| t.1).max());
        last.zip(first).map_or(0.0, |(last, first)| (last - first).as_nanos() as f64) / f64::from(N_ROUNDS)
    };
    let mut runs: Vec<f64> = (0..N_RUNS).map(run).collect();
    runs.sort_by(f64::total_cmp);
    runs[N_RUNS / 2]
}

fn main() {
    println!("nanoseconds per allocation and release, of {N_BLOCKS} blocks; median of {N_RUNS} runs");
    println!("{:>7} {:>8} {:>10} {:>10}", "blocks", "threads", "the pool", "a stack");
    for n in [1, 8, 64] {
        for n_threads in [1, 2, 4, 8] {
            let (pool, stack) = (SharedBlocks::new(N_BLOCKS), Stack::new(N_BLOCKS));
            let locked = nanoseconds(n_threads, || drop(pool.allocate(n).expect("8 threads use 512 blocks")));
            let lock_free = nanoseconds(n_threads, || {
                stack.release(&stack.allocate(n as usize).expect("8 threads use 512 blocks"));
            });
            println!("{n:>7} {n_threads:>8} {locked:>10.0} {lock_free:>10.0}");
        }
    }
    println!("16 of 16 blocks, one request at a time while the others wait:");
    for n_threads in [1, 2] {
        let (pool, deadline) = (SharedBlocks::new(16), Instant::now() + Duration::from_secs(3600));
        let waiting = || drop(pool.allocate_waiting(16, deadline).expect("an hour is long enough"));
        println!("{:>7} {n_threads:>8} {:>10.0} {:>10}", 16, nanoseconds(n_threads, waiting), "-");
    }
}
