//! ggml's super-blocks.
//!
//! ```text
//!          groups    sc       code                                          bits per weight: in the file, here
//! q2_K     16 × 16   4 bits   0..=3, minima of 4 bits                        2.63   3.25
//! q3_K     16 × 16   6        −4..=3                                         3.44   3.56
//! q4_K     8 × 32    6        0..=15, minima of 6 bits                       4.5    4.63
//! q5_K     8 × 32    6        0..=31, minima of 6 bits                       5.5    5.63
//! q6_K     16 × 16   8        −32..=31                                       6.56   6.56
//! iq4_xs   8 × 32    6        16 values of 8 bits                            4.25   4.31
//! few      16 × 16   8        any 16 values of 8 bits                               4.63
//! ```
//!
//! Scales are kept unpacked, one byte each. `few` is not a ggml format: ggml's rarer formats (iq1 to iq3, tq) are
//! converted to it when a file is read. The conversion is lossless, because none of them has more than 16 values.
use super::blocks::{Group, IQ4, nibbles, pair};
use half::f16;

/// Weights per super-block.
pub const SUPER: usize = 256;

/// An encoding with super-blocks of 256 weights: groups have small integer scales, and the super-block one float scale.
/// How a file lays it out.
pub trait SuperBlock: 'static {
    /// Bytes of a super-block.
    const BYTES: usize;
    /// The code that represents 0, as a power of two; `None` for encodings with minima.
    const ZERO_BITS: Option<u32>;
    /// Groups have 16 weights, two groups per 32 inputs, instead of 32.
    const HALVES: bool;
    /// How codes map to values.
    const VALUES: Values = Values::Codes;

    /// The codes of the 32 weights from `32 × i` on, before the table look-up.
    fn codes(block: &[u8], i: usize) -> Group;
    /// Scale and minimum of group `i`.
    fn scale(block: &[u8], i: usize) -> (i8, u8);
    /// d and dmin in f16. Encodings without minima have only d; those with their own table have d in f32. Most blocks
    /// begin with these.
    #[inline]
    fn factors(block: &[u8]) -> [[u8; 2]; 2] {
        [pair(block), pair(&block[2..])]
    }
    /// The super-block's own table, if any.
    #[inline]
    fn table(_: &[u8]) -> [u8; 16] {
        [0; 16]
    }
}

/// The values of codes: the codes themselves or, for 4-bit codes, table entries.
pub enum Values {
    Codes,
    Table([u8; 16]),
    /// Every super-block has its own table.
    OwnTable,
}

/// Decodes a super-block.
pub(super) fn decode<B: SuperBlock>(block: &[u8], out: &mut [f32]) {
    let (table, [d, dmin]) = match B::VALUES {
        Values::OwnTable => {
            let [[a, b], [c, d]] = B::factors(block);
            (Some(B::table(block)), [f32::from_le_bytes([a, b, c, d]), 0.0])
        }
        Values::Table(table) => (Some(table), B::factors(block).map(|x| f16::from_le_bytes(x).to_f32())),
        Values::Codes => (None, B::factors(block).map(|x| f16::from_le_bytes(x).to_f32())),
    };
    let zero = B::ZERO_BITS.map_or(0, |bits| 1i32 << bits);
    for (i, out) in out.chunks_exact_mut(32).enumerate() {
        for (j, (out, code)) in out.iter_mut().zip(B::codes(block, i)).enumerate() {
            let (scale, minimum) = B::scale(block, if B::HALVES { 2 * i + j / 16 } else { i });
            let code = table.map_or(code, |table| table[usize::from(code)]);
            *out = d * f32::from(scale) * (i32::from(code) - zero) as f32;
            if B::ZERO_BITS.is_none() {
                *out -= dmin * f32::from(minimum);
            }
        }
    }
}

/// 2-bit fields: 32 bytes contain four groups of 32, one in each pair of bits.
fn twos(bytes: &[u8], i: usize) -> Group {
    std::array::from_fn(|l| bytes[i / 4 * 32 + l] >> (2 * (i % 4)) & 3)
}

/// 4-bit fields: the lower halves of 32 bytes are one group of 32, the upper halves the next.
fn fours(bytes: &[u8], i: usize) -> Group {
    std::array::from_fn(|l| bytes[i / 2 * 32 + l] >> (4 * (i % 2)) & 15)
}

/// Scale and minimum of group `i` from the 12 bytes of q4_K and q5_K.
#[inline]
fn scale_min(q: &[u8], i: usize) -> (i8, u8) {
    let (scale, minimum) = if i < 4 {
        (q[i] & 63, q[i + 4] & 63)
    } else {
        ((q[i + 4] & 15) | (q[i - 4] >> 6 << 4), (q[i + 4] >> 4) | (q[i] >> 6 << 4))
    };
    (scale.cast_signed(), minimum)
}

/// `scales[16], codes[64], d, dmin`
pub struct Q2K;
impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const ZERO_BITS: Option<u32> = None;
    const HALVES: bool = true;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        twos(&block[16..80], i)
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        ((block[i] & 15).cast_signed(), block[i] >> 4)
    }
    #[inline]
    fn factors(block: &[u8]) -> [[u8; 2]; 2] {
        [pair(&block[80..]), pair(&block[82..])]
    }
}

/// `upper bits[32], codes[64], scales[12], d`
pub struct Q3K;
impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const ZERO_BITS: Option<u32> = Some(2);
    const HALVES: bool = true;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        let low = twos(&block[32..96], i);
        std::array::from_fn(|l| low[l] | (block[l] >> i & 1) << 2)
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        let scales = &block[96..108];
        let low = scales[i % 8] >> (4 * (i / 8)) & 15;
        let upper = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
        ((low | upper << 4).cast_signed() - 32, 0)
    }
    #[inline]
    fn factors(block: &[u8]) -> [[u8; 2]; 2] {
        [pair(&block[108..]), [0; 2]]
    }
}

/// `d, dmin, scales[12], codes[128]`
pub struct Q4K;
impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const ZERO_BITS: Option<u32> = None;
    const HALVES: bool = false;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        fours(&block[16..], i)
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        scale_min(&block[4..16], i)
    }
}

/// `d, dmin, scales[12], upper bits[32], codes[128]`
pub struct Q5K;
impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const ZERO_BITS: Option<u32> = None;
    const HALVES: bool = false;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        let low = fours(&block[48..], i);
        std::array::from_fn(|l| low[l] | (block[16 + l] >> i & 1) << 4)
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        scale_min(&block[4..16], i)
    }
}

/// `lower bits[128], upper bits[64], scales[16], d`
pub struct Q6K;
impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const ZERO_BITS: Option<u32> = Some(5);
    const HALVES: bool = true;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        let (half, quarter) = (i / 4, i % 4);
        std::array::from_fn(|l| {
            let low = block[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
            low | (block[128 + half * 32 + l] >> (2 * quarter) & 3) << 4
        })
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        (block[192 + i].cast_signed(), 0)
    }
    #[inline]
    fn factors(block: &[u8]) -> [[u8; 2]; 2] {
        [pair(&block[208..]), [0; 2]]
    }
}

/// `d, upper bits of scales[2], lower bits[4], codes[128]`
pub struct Iq4Xs;
impl SuperBlock for Iq4Xs {
    const BYTES: usize = 136;
    const ZERO_BITS: Option<u32> = Some(7);
    const HALVES: bool = false;
    const VALUES: Values = Values::Table(IQ4);
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        nibbles(&block[8 + 16 * i..])
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        let low = block[4 + i / 2] >> (4 * (i % 2)) & 15;
        let upper = block[2 + i / 4] >> (2 * (i % 4)) & 3;
        ((low | upper << 4).cast_signed() - 32, 0)
    }
}

/// `d as f32, table[16], scales[16], codes[128]`
pub struct Table16;
impl SuperBlock for Table16 {
    const BYTES: usize = 164;
    const ZERO_BITS: Option<u32> = Some(7);
    const HALVES: bool = true;
    const VALUES: Values = Values::OwnTable;
    #[inline]
    fn codes(block: &[u8], i: usize) -> Group {
        nibbles(&block[36 + 16 * i..])
    }
    #[inline]
    fn scale(block: &[u8], i: usize) -> (i8, u8) {
        (block[20 + i].cast_signed(), 0)
    }
    #[inline]
    fn table(block: &[u8]) -> [u8; 16] {
        std::array::from_fn(|i| block[4 + i])
    }
}
