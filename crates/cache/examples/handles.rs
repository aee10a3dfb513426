//! Handles per second of the arena's allocators, by number of blocks. The number should hardly matter. One thread.
//!
//! `cargo run --release -p kvist-cache --example handles`
use kvist_cache::arena::{ALLOCATORS, Handle};
use kvist_testing::reference::Choices;
use std::time::Instant;

const N_ROUNDS: u32 = 300_000;

fn main() {
    println!("{N_ROUNDS} rounds of free one of many, allocate 1 to 64 blocks; best of 5");
    println!("{:<10} {:>9} {:>8} {:>12} {:>9}", "allocator", "blocks", "handles", "rounds/s", "ns/round");
    for (name, build) in ALLOCATORS {
        for n_blocks in [1 << 12, 1 << 16, 1 << 20] {
            let (mut fastest, mut n_handles) = (f64::INFINITY, 0);
            for _ in 0..5 {
                let mut choices = Choices::from_seed(7, u64::MAX);
                let mut allocator = build(n_blocks);
                let mut live: Vec<Handle> = Vec::new();
                while let Some(handle) = allocator.find(1 + choices.below(64)) {
                    allocator.take(handle);
                    live.push(handle);
                }
                // First full, then fragmented: every round frees one handle somewhere and looks for space of another
                // size.
                let started = Instant::now();
                for _ in 0..N_ROUNDS {
                    let high = choices.below(1 << 16) as usize;
                    let at = (high << 16 | choices.below(1 << 16) as usize) % live.len();
                    allocator.release(live.swap_remove(at));
                    if let Some(handle) = allocator.find(1 + choices.below(64)) {
                        allocator.take(handle);
                        live.push(handle);
                    }
                }
                fastest = fastest.min(started.elapsed().as_secs_f64());
                n_handles = live.len();
            }
            let (per_second, ns) = (f64::from(N_ROUNDS) / fastest, fastest * 1e9 / f64::from(N_ROUNDS));
            println!("{name:<10} {n_blocks:>9} {n_handles:>8} {per_second:>12.0} {ns:>9.1}");
        }
    }
}
