//! Allocations and releases per second of a shared block pool, with 1 and with 2 threads, without waiting and while
//! waiting.
//!
//! `cargo run --release -p kvist-cache --example shared_blocks`
use kvist_cache::shared::SharedBlocks;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const N_ROUNDS: u32 = 200_000;
const N_RUNS: usize = 25;

/// Seconds in which each thread takes `n` of `n_blocks` blocks and returns them, `N_ROUNDS` rounds in total.
fn seconds(n_threads: u32, n_blocks: u32, n: u32) -> f64 {
    let shared = SharedBlocks::new(n_blocks);
    let deadline = Instant::now() + Duration::from_secs(3600);
    let together = Barrier::new(n_threads as usize + 1);
    let started = std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(|| {
                together.wait();
                for _ in 0..N_ROUNDS / n_threads {
                    drop(shared.allocate_waiting(n, deadline).expect("an hour is long enough"));
                }
            });
        }
        together.wait();
        Instant::now()
    });
    started.elapsed().as_secs_f64()
}

fn main() {
    // The median, because the fastest run of two threads is the one in which they never contended.
    println!("{N_ROUNDS} rounds of allocate and free, median of {N_RUNS} runs");
    println!("{:<34} {:>7} {:>12} {:>9}", "", "threads", "rounds/s", "ns/round");
    let cases = [("16 of 4096 blocks: there is room", 4096, 16), ("16 of 16 blocks: one at a time", 16, 16)];
    for (what, n_blocks, n) in cases {
        for n_threads in [1, 2] {
            let mut runs: Vec<f64> = (0..N_RUNS).map(|_| seconds(n_threads, n_blocks, n)).collect();
            runs.sort_by(f64::total_cmp);
            let median = runs[N_RUNS / 2];
            let (per_second, ns) = (f64::from(N_ROUNDS) / median, median * 1e9 / f64::from(N_ROUNDS));
            println!("{what:<34} {n_threads:>7} {per_second:>12.0} {ns:>9.1}");
        }
    }
}
