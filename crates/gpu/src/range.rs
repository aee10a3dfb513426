//! How large the weights of a matrix can be: some kernels for many tokens decode them to f16.
use kvist_device::weights::Encoding;
use kvist_device::{bf16, f16};

/// A power of two that brings the largest weight of a matrix to at most 2^15. It is found from the scales alone, so the largest one may
/// also be a few times smaller than that. Weights that are not finite have no part in it. Weights in f16 and f32, and codes
/// of int8, whose scales are the row's, are taken as they are: 1. `None`: no weight is finite and not 0.
pub fn scale(encoding: Encoding, bytes: &[u8]) -> Option<f32> {
    let largest = match encoding {
        Encoding::F32 | Encoding::F16 | Encoding::Int8 => return Some(1.0),
        Encoding::BF16 => {
            // Magnitudes have the order of their bits.
            let magnitudes = bytes.as_chunks::<2>().0.iter().map(|x| u16::from_le_bytes(*x) & 0x7fff);
            let largest = magnitudes.map(|x| if x < 0x7f80 { x } else { 0 }).max();
            bf16::from_bits(largest.unwrap_or(0)).to_f32()
        }
        _ => {
            let bounds = bytes.chunks_exact(encoding.block().1).map(|block| bound(encoding, block));
            bounds.filter(|bound| bound.is_finite()).fold(0.0, f32::max)
        }
    };
    // 2^exponent <= largest < 2^(exponent + 1); the largest times 2^(14 - exponent) is in [2^14, 2^15).
    let exponent = (largest.to_bits() >> 23) as i32 - 127;
    let wanted = (14 - exponent).clamp(-126, 126);
    (largest > 0.0).then(|| f32::from_bits(((wanted + 127) as u32) << 23))
}

/// What no weight of a block exceeds.
fn bound(encoding: Encoding, block: &[u8]) -> f32 {
    let magnitude = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32().abs();
    match encoding {
        Encoding::Q8_0 => 128.0 * magnitude(0),
        Encoding::Q4_0 => 8.0 * magnitude(0),
        Encoding::Q4_1 => 15.0 * magnitude(0) + magnitude(2),
        Encoding::Q5_0 => 16.0 * magnitude(0),
        Encoding::Q5_1 => 31.0 * magnitude(0) + magnitude(2),
        Encoding::Iq4Nl => 127.0 * magnitude(0),
        Encoding::Mxfp4 => (12.0 * (f32::from(block[0]) - 128.0).exp2()).min(f32::MAX),
        // Scales and minimums of groups have 4 or 6 bits, or 6 or 8 with a sign.
        Encoding::Q2K => 3.0 * 15.0 * magnitude(80) + 15.0 * magnitude(82),
        Encoding::Q3K => 4.0 * 32.0 * magnitude(108),
        Encoding::Q4K => 15.0 * 63.0 * magnitude(0) + 63.0 * magnitude(2),
        Encoding::Q5K => 31.0 * 63.0 * magnitude(0) + 63.0 * magnitude(2),
        Encoding::Q6K => 32.0 * 128.0 * magnitude(208),
        Encoding::Iq4Xs => 127.0 * 32.0 * magnitude(0),
        Encoding::Table16 => {
            let scale = f32::from_le_bytes([block[0], block[1], block[2], block[3]]).abs();
            if scale.is_finite() { (128.0 * 128.0 * scale).min(f32::MAX) } else { scale }
        }
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_device::weights::FileTensor;

    #[test]
    fn the_largest_weight_fits_into_f16() {
        for encoding in Encoding::RESIDENT {
            if encoding.is_float() || encoding == Encoding::Int8 {
                continue;
            }
            let (elements, size) = encoding.block();
            for seed in 1..200u32 {
                let mut state = seed;
                let bytes: Vec<u8> = std::iter::repeat_with(|| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .take(size * 2)
                .collect();
                let scale = scale(encoding, &bytes).unwrap_or(1.0);
                assert_eq!(scale.to_bits() << 9, 0, "{scale} is no power of two");
                let (shape, bytes) = ([1, 2 * elements], (&bytes[..]).into());
                let tensor = FileTensor { name: "w", shape: &shape, encoding, bytes, factor: 1.0 };
                let decoded = tensor.to_f32();
                let largest = decoded.iter().filter(|x| x.is_finite()).fold(0f32, |max, x| max.max(x.abs()));
                assert!(largest * scale <= 65504.0, "{}: {largest} * {scale}", encoding.name());
            }
        }
    }

    #[test]
    fn floats_have_their_largest() {
        let bytes: Vec<u8> = [0.01f32, -3.0, f32::NAN, f32::INFINITY]
            .iter()
            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
            .collect();
        assert_eq!(scale(Encoding::BF16, &bytes), Some(8192.0));
        assert_eq!(scale(Encoding::BF16, &[0; 8]), None);
        assert_eq!(scale(Encoding::F16, &bytes), Some(1.0));
    }
}
