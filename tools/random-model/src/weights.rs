//! The numbers: each is a function of seed, tensor and place alone, so that a model is the same in either format,
//! in any encoding up to its rounding, and however many threads made it.
use crate::shape::{Kind, Spec};
use rayon::prelude::*;

/// SplitMix64's finaliser: a good hash of 64 bits.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Nearly normal, mean 0 and variance 1: the sum of four uniform numbers of 16 bits. Block quantisation sees a peak
/// and tails, as in trained weights; uniform numbers would be too kind to it.
fn normal(key: u64, at: u64) -> f32 {
    let bits = mix(key ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let sum: i64 = (0..4).map(|i| ((bits >> (16 * i)) & 0xffff) as i64 - 0x8000).sum();
    sum as f32 * (3f32.sqrt() / 65536.0)
}

/// The values of `spec`, row by row; `index` is its place in the list of tensors, `gguf` whose order of rows.
pub fn values(spec: &Spec, index: usize, seed: u64, gguf: bool) -> Vec<f32> {
    let elements = spec.shape.iter().product();
    if spec.kind == Kind::Norm {
        return vec![1.0; elements];
    }
    let columns = spec.columns();
    let key = mix(seed.wrapping_add(mix(index as u64 + 1)));
    // A product keeps the variance of what goes in.
    let scale = 1.0 / (columns as f32).sqrt();
    let mut all = vec![0f32; elements];
    all.par_chunks_mut(columns).enumerate().for_each(|(row, out)| {
        let row = match spec.kind {
            Kind::Rotated { heads } if gguf => hf_row(row, spec.shape[0] / heads),
            _ => row,
        };
        let first = (row * columns) as u64;
        for (value, at) in out.iter_mut().zip(first..) {
            *value = normal(key, at) * scale;
        }
    });
    all
}

/// Hugging Face keeps the first halves of a head's pairs before the second ones, GGUF pair by pair.
fn hf_row(row: usize, head_dim: usize) -> usize {
    let (head, at) = (row / head_dim, row % head_dim);
    head * head_dim + at % 2 * (head_dim / 2) + at / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_normal_enough_and_do_not_repeat() {
        let all: Vec<f64> = (0..100_000).map(|i| f64::from(normal(mix(7), i))).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.02, "{variance}");
        assert!(all.windows(2).filter(|w| w[0] == w[1]).count() < 10);
    }

    #[test]
    fn rows_are_only_reordered() {
        let spec = Spec {
            hf: String::new(),
            gguf: String::new(),
            shape: vec![8, 2],
            kind: Kind::Rotated { heads: 2 },
        };
        let (hf, gguf) = (values(&spec, 3, 1, false), values(&spec, 3, 1, true));
        let order = [0, 2, 1, 3, 4, 6, 5, 7]; // two heads of two pairs
        for (row, from) in order.into_iter().enumerate() {
            assert_eq!(gguf[row * 2..][..2], hf[from * 2..][..2]);
        }
    }
}
