//! Touches per second of a flat cache under every policy, hash lookup included. One thread.
//!
//! `cargo run --release -p kvist-cache --example touches`
use kvist_cache::evict::{Flat, POLICIES, Parameters, Use, build, next_uses};
use kvist_testing::reference::Choices;
use std::time::Instant;

const N_TOUCHES: usize = 2_000_000;
const N_KEYS: u32 = 60_000;

fn main() {
    let mut choices = Choices::from_seed(1, u64::MAX);
    // Half of the touches go to a 64th of the keys.
    let mut key =
        || u64::from(if choices.one_in(2) { choices.below(N_KEYS / 64) } else { choices.below(N_KEYS) });
    let stream: Vec<u64> = (0..N_TOUCHES).map(|_| key()).collect();
    let next = next_uses(&stream);
    println!("{N_TOUCHES} touches of {N_KEYS} keys, best of 5");
    println!("{:<10} {:>9} {:>9} {:>12} {:>10}", "policy", "capacity", "hit ratio", "touches/s", "ns/touch");
    for policy in POLICIES {
        for capacity in [1_000, 10_000, 50_000] {
            let (mut fastest, mut n_hits) = (f64::INFINITY, 0);
            for _ in 0..5 {
                let policy = build(policy.name, &Parameters::default()).expect("a policy of the table");
                let mut flat = Flat::new(capacity, policy);
                let started = Instant::now();
                n_hits = 0;
                for (i, (&key, &next_use)) in stream.iter().zip(&next).enumerate() {
                    let at = Use { now_ns: i as u64 * 1_000, tick: i as u64, cost: 1.0, bytes: 1, next_use };
                    n_hits += u64::from(flat.touch_or_insert(key, &at).hit);
                }
                fastest = fastest.min(started.elapsed().as_secs_f64());
            }
            let n = N_TOUCHES as f64;
            let (ratio, per_second, ns) = (n_hits as f64 / n, n / fastest, fastest * 1e9 / n);
            println!("{:<10} {capacity:>9} {ratio:>9.4} {per_second:>12.0} {ns:>10.1}", policy.name);
        }
    }
}
