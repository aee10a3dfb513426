//! f32, f16 and bf16 as they are stored in caches and in weights.
use crate::arch::{LANES, Simd, widen};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

pub struct F32;
pub struct F16;
pub struct BF16;

/// One of these element types.
pub trait Element: 'static {
    const BYTES: usize;
    /// The least number of bf16 whose sum is any element.
    const BF16_PARTS: usize;
    /// Vectors per cache line.
    const PER_LINE: usize = 64 / (LANES * Self::BYTES);
    /// Sixteen elements.
    type Raw: Copy;
    fn vectors(bytes: &[u8]) -> &[Self::Raw];
    fn widen<S: Simd>(s: S, raw: &Self::Raw) -> S::F;
    fn decode(bytes: &[u8]) -> f32;
    /// Stores a row. Returns true if every stored value is finite.
    fn encode_all(row: &[f32], bytes: &mut [u8]) -> bool;
}

impl Element for F32 {
    const BYTES: usize = 4;
    const BF16_PARTS: usize = 3;
    type Raw = [u8; 64];
    #[inline(always)]
    fn vectors(bytes: &[u8]) -> &[[u8; 64]] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn widen<S: Simd>(s: S, raw: &[u8; 64]) -> S::F {
        s.load_f32_bytes(raw)
    }
    fn decode(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    #[inline(always)]
    fn encode_all(row: &[f32], bytes: &mut [u8]) -> bool {
        let mut finite = true;
        for (x, bytes) in row.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = x.to_le_bytes();
            finite &= x.is_finite();
        }
        finite
    }
}

/// An element of two bytes, which `half` encodes. Values of f16 past ±65,504 become infinite.
macro_rules! two_bytes {
    ($E:ident, $half:ident, $parts:literal, $load:ident, $decode:expr) => {
        impl Element for $E {
            const BYTES: usize = 2;
            const BF16_PARTS: usize = $parts;
            type Raw = [u8; 32];
            #[inline(always)]
            fn vectors(bytes: &[u8]) -> &[[u8; 32]] {
                bytes.as_chunks().0
            }
            #[inline(always)]
            fn widen<S: Simd>(s: S, raw: &[u8; 32]) -> S::F {
                s.$load(raw)
            }
            fn decode(bytes: &[u8]) -> f32 {
                $decode(u16::from_le_bytes([bytes[0], bytes[1]]))
            }
            #[inline(always)]
            fn encode_all(row: &[f32], bytes: &mut [u8]) -> bool {
                let mut finite = true;
                for (row, bytes) in row.chunks(LANES).zip(bytes.chunks_mut(2 * LANES)) {
                    // Whole vectors: `half` converts f16 with instructions where there are some, and bf16 in a loop.
                    let (mut wide, mut codes) = ([0.0; LANES], [$half::ZERO; LANES]);
                    wide[..row.len()].copy_from_slice(row);
                    codes.convert_from_f32_slice(&wide);
                    for (code, bytes) in codes.iter().zip(bytes.as_chunks_mut().0) {
                        *bytes = code.to_le_bytes();
                        finite &= code.is_finite();
                    }
                }
                finite
            }
        }
    };
}
two_bytes!(F16, f16, 2, load_f16, widen);
two_bytes!(BF16, bf16, 1, load_bf16, |code| bf16::from_bits(code).to_f32());
