//! Independent requests for blocks of Zipf popularity in an LRU cache: hit ratios against Che's approximation (Che,
//! Tung, Wang, "Hierarchical Web caching systems: modeling, design and experimental results", IEEE JSAC 20(7), 2002;
//! why it is so good: Fricker, Robert, Roberts, "A versatile and accurate approximation for LRU cache performance",
//! ITC 24, 2012).
use kvist_cache::evict::Parameters;
use kvist_simulator::workload::{Arrivals, Contents, Lengths, Prefixes, Workload};
use kvist_simulator::zero_service::{BlockStream, TouchOrder, replay};

const N_BLOCKS: u32 = 2_000;
const N_REQUESTS: usize = 400_000;

/// The time T in which a cache of `capacity` blocks is filled, Σ 1 − exp(−p T) = capacity, by halving; then the hit
/// ratio Σ p (1 − exp(−p T)).
fn approximation(probabilities: &[f64], capacity: f64) -> f64 {
    let resident = |t: f64| probabilities.iter().map(|p| 1.0 - (-p * t).exp()).sum::<f64>();
    let (mut low, mut high) = (0.0, 1e12);
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if resident(middle) < capacity { low = middle } else { high = middle }
    }
    probabilities.iter().map(|p| p * (1.0 - (-p * low).exp())).sum()
}

#[test]
fn lru_hits_as_often_as_che_says() {
    for exponent in [0.7, 1.0, 1.3, 1.5] {
        let weights: Vec<f64> = (1..=N_BLOCKS).map(|rank| f64::from(rank).powf(-exponent)).collect();
        let total: f64 = weights.iter().sum();
        let probabilities: Vec<f64> = weights.iter().map(|weight| weight / total).collect();
        let workload = Workload {
            n_requests: N_REQUESTS,
            arrivals: Arrivals::AtOnce,
            prompt_tokens: Lengths::Deterministic { tokens: 16 },
            output_tokens: Lengths::Deterministic { tokens: 1 },
            contents: Contents::Prefixes(Prefixes {
                n_prefixes: N_BLOCKS,
                exponent,
                prefix_tokens: 16,
                share: 1.0,
                own_prompt: false,
                tokens_per_id: 16,
            }),
        };
        let requests = workload.generate(5).expect("a workload");
        let stream = BlockStream::of(&requests, Some(16)).expect("blocks");
        for capacity in [20, 100, 500, 1_500] {
            let done = replay(&stream, "lru", &Parameters::default(), Some(capacity), TouchOrder::Reverse)
                .expect("lru");
            let measured = done.cache.hit_blocks as f64 / done.cache.total_blocks as f64;
            // A cold cache misses once per block of its capacity; the approximation assumes a warm cache.
            let cold = f64::from(capacity) / N_REQUESTS as f64;
            let expected = approximation(&probabilities, capacity.into());
            let off = (measured - expected).abs();
            println!("zipf {exponent}, {capacity} blocks: {measured:.4}, Che {expected:.4}");
            assert!(
                off < 0.004 + cold,
                "zipf {exponent}, {capacity} blocks: {measured:.4}, Che {expected:.4}"
            );
        }
    }
}
