//! The fuzzer's bytes choose operations on a cache, which is compared with its reference model after each operation.
use kvist_testing::reference::{Choices, replay};

/// Bolero's own random inputs are shorter than a hundred bytes, which is too short to fill a pool.
const LONG_INPUTS: u64 = 100;

macro_rules! target {
    ($($name:ident: $kind:literal),* $(,)?) => {$(
        #[test]
        fn $name() {
            bolero::check!().with_iterations(2_000).for_each(|bytes: &[u8]| {
                replay($kind, &mut Choices::from_bytes(bytes));
            });
            for seed in 0..LONG_INPUTS {
                let bytes = long_input(seed);
                replay($kind, &mut Choices::from_bytes(&bytes));
            }
        }
    )*};
}

target! {
    cache_ops_contiguous: "contiguous",
    cache_ops_ring: "ring",
    cache_ops_cells: "cells",
    cache_ops_tree: "tree",
}

/// Up to 4 KiB of pseudo-random bytes.
fn long_input(seed: u64) -> Vec<u8> {
    let mut choices = Choices::from_seed(seed, 0);
    let len = 1 + choices.below(4_096);
    (0..len).map(|_| choices.below(256) as u8).collect()
}

/// Rewrites the committed corpus: `cargo test -p kvist-fuzz -- --ignored write_corpus`.
#[test]
#[ignore = "writes files into the source tree"]
fn write_corpus() {
    for target in ["contiguous", "ring", "cells", "tree"] {
        let dir = format!("{}/tests/__fuzz__/cache_ops_{target}/corpus", env!("CARGO_MANIFEST_DIR"));
        std::fs::create_dir_all(&dir).expect("the source tree can be written");
        for seed in 0..8 {
            let bytes = long_input(1_000 + seed);
            std::fs::write(format!("{dir}/random-{seed}"), &bytes).expect("the source tree can be written");
        }
    }
}
