//! Random weights, in every encoding.
use crate::SplitMix64;
use kvist_device::weights::Encoding;
use kvist_device::{bf16, f16};

pub fn random(seed: u64, n: usize, amplitude: f32) -> Vec<f32> {
    let mut random = SplitMix64(seed);
    (0..n).map(|_| amplitude * (random.unit() * 2.0 - 1.0) as f32).collect()
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Random blocks with scales of the usual size.
pub fn encoded(encoding: Encoding, rows: usize, inputs: usize, seed: u64) -> Vec<u8> {
    let mut random_ = SplitMix64(seed);
    let scale = |random: &mut SplitMix64| f16::from_f32(0.01 + random.unit() as f32 * 0.02).to_le_bytes();
    let values = || random(seed, rows * inputs, 1.0);
    match encoding {
        Encoding::F32 => return bytes(&values()),
        Encoding::F16 => return values().iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Encoding::BF16 => return values().iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => {}
    }
    let mut all: Vec<u8> =
        (0..encoding.row_bytes(inputs).unwrap() * rows).map(|_| random_.next() as u8).collect();
    let scales: &[usize] = match encoding {
        Encoding::Q4_1 | Encoding::Q5_1 | Encoding::Q4K | Encoding::Q5K => &[0, 2],
        Encoding::Q2K => &[80, 82],
        Encoding::Q3K => &[108],
        Encoding::Q6K => &[208],
        Encoding::Tq2_0 => &[64],
        Encoding::Mxfp4 | Encoding::Int8 => &[],
        _ => &[0],
    };
    if encoding == Encoding::Int8 {
        // A scale per row.
        for row in all.chunks_exact_mut(encoding.row_bytes(inputs).unwrap()) {
            let scale = (0.01 + random_.unit() as f32 * 0.02).to_le_bytes();
            row.chunks_exact_mut(36).for_each(|block| block[..4].copy_from_slice(&scale));
        }
    }
    for block in all.chunks_exact_mut(encoding.block().1) {
        if encoding == Encoding::Mxfp4 {
            block[0] = 118 + block[0] % 9;
        }
        for at in scales {
            block[*at..at + 2].copy_from_slice(&scale(&mut random_));
        }
    }
    all
}

/// What kernels decode. No file is in `Table16`: instead of it, encodings that become it.
pub fn encodings() -> Vec<Encoding> {
    let mut all = Encoding::RESIDENT.to_vec();
    all.retain(|encoding| *encoding != Encoding::Table16);
    all.extend([Encoding::Iq2Xxs, Encoding::Tq2_0, Encoding::Q1_0]);
    all
}
