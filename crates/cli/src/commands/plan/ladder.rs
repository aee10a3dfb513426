//! The pairs of dtypes that a plan compares, and what each costs published models.
//!
//! f32 is not among them: it takes twice the memory of f16, and the difference in the text would not be noticeable.
use kvist_device::Storage;

/// How K and V are stored.
#[derive(Clone, Copy, Debug)]
pub struct Rung {
    pub k: Storage,
    pub v: Storage,
    /// KL divergence from a cache in f32, mean over tokens, in nats, for each of [`MODELS`].
    pub kl: [f64; 2],
}

/// The models on which the figures of [`LADDER`] were measured; docs/quality.md has the whole tables.
pub const MODELS: [&str; 2] = ["SmolLM2 135M", "Gemma 3 270M"];

/// The text on which they were measured.
pub const MEASURED_ON: &str = "2,048 tokens of English prose in windows of 1,024, weights held as f32";

const Q8_ROT: Storage = Storage { rotate: true, ..Storage::Q8 };
const Q4_ROT: Storage = Storage { rotate: true, ..Storage::Q4 };
const Q4_64_ROT: Storage = Storage { group: 64, ..Q4_ROT };

/// Sorted by bits per value at heads of 128, largest first. A new pair is one line here, and a row in docs/quality.md.
pub const LADDER: &[Rung] = &[
    Rung { k: Storage::F16, v: Storage::F16, kl: [8.3e-7, 8.0e-7] },
    Rung { k: Q8_ROT, v: Q8_ROT, kl: [8.7e-5, 3.1e-4] },
    Rung { k: Q8_ROT, v: Q4_ROT, kl: [2.1e-3, 2.3e-3] },
    Rung { k: Q8_ROT, v: Storage::T4, kl: [3.0e-3, 3.0e-3] },
    Rung { k: Q4_ROT, v: Q4_ROT, kl: [2.2e-2, 7.2e-2] },
    Rung { k: Q4_64_ROT, v: Q4_64_ROT, kl: [2.5e-2, 9.8e-2] },
    Rung { k: Storage::T4_O, v: Storage::T4, kl: [7.5e-3, 2.0e-2] },
    Rung { k: Storage::T4, v: Storage::T4, kl: [3.5e-2, 1.1e-1] },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ladder_goes_down_and_every_rung_costs_something() {
        let row = |rung: &Rung| rung.k.row_bytes(128) + rung.v.row_bytes(128);
        assert!(LADDER.is_sorted_by(|a, b| row(a) > row(b)), "not by bits per value");
        for rung in LADDER {
            let as_typed = |storage: Storage| storage.to_string().parse() == Ok(storage);
            assert!(as_typed(rung.k) && as_typed(rung.v), "{rung:?}");
            assert!(rung.kl.iter().all(|kl| kl.is_finite() && *kl > 0.0), "{rung:?}");
        }
    }
}
