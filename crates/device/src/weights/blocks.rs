//! ggml's formats with one scale per 32 weights.
//!
//! ```text
//! q4_0     w = d × (code − 8)         4.5 bits per weight     q4_1    w = d × code + m       5
//! q5_0     w = d × (code − 16)        5.5                     q5_1    w = d × code + m       6
//! q8_0     w = d × code               8.5
//! iq4_nl   w = d × values[code]       4.5                     mxfp4   w = 2^e × values[code]   4.25 in the file, 4.5 here
//! ```
use half::{bf16, f16};

/// The codes of 32 weights, in the order of the row.
pub type Group = [u8; 32];

/// An encoding with one scale per 32 codes: how a file lays out a block.
pub trait Block: 'static {
    /// Bytes of a block.
    const BYTES: usize;
    /// The code that represents 0, as a power of two; `None` for encodings with a minimum.
    const ZERO_BITS: Option<u32>;
    /// Values of the 4-bit codes, if they differ from the codes.
    const TABLE: Option<[u8; 16]> = None;
    /// Whether [`scale`](Self::scale) is a bf16 instead of an f16.
    const BF16_SCALE: bool = false;

    /// The codes before the table look-up.
    fn codes(block: &[u8]) -> Group;
    /// The scale: f16 or bf16. Blocks begin with it.
    #[inline]
    fn scale(block: &[u8]) -> [u8; 2] {
        pair(block)
    }
    /// The minimum, an f16, of encodings that have one.
    #[inline]
    fn minimum(block: &[u8]) -> [u8; 2] {
        pair(&block[2..])
    }
}

/// The first two bytes, which are an f16.
#[inline]
pub(super) fn pair(bytes: &[u8]) -> [u8; 2] {
    [bytes[0], bytes[1]]
}

/// Decodes a block.
pub(super) fn decode<B: Block>(block: &[u8], out: &mut [f32]) {
    let scale = match B::BF16_SCALE {
        true => bf16::from_le_bytes(B::scale(block)).to_f32(),
        false => f16::from_le_bytes(B::scale(block)).to_f32(),
    };
    let minimum = if B::ZERO_BITS.is_none() { f16::from_le_bytes(B::minimum(block)).to_f32() } else { 0.0 };
    let zero = B::ZERO_BITS.map_or(0, |bits| 1i32 << bits);
    for (out, code) in out.iter_mut().zip(B::codes(block)) {
        let code = B::TABLE.map_or(code, |table| table[usize::from(code)]);
        *out = scale * (i32::from(code) - zero) as f32 + minimum;
    }
}

/// Element j is in the low half of byte j, element j + 16 in its high half.
pub fn nibbles(bytes: &[u8]) -> Group {
    std::array::from_fn(|i| bytes[i % 16] >> (4 * (i / 16)) & 15)
}

/// The same, with one more bit per element in four bytes.
#[inline]
fn fives(upper: &[u8], bytes: &[u8]) -> Group {
    let low = nibbles(bytes);
    std::array::from_fn(|i| low[i] | (upper[i / 8] >> (i % 8) & 1) << 4)
}

pub struct Q4_0;
impl Block for Q4_0 {
    const BYTES: usize = 18;
    const ZERO_BITS: Option<u32> = Some(3);
    #[inline]
    fn codes(block: &[u8]) -> Group {
        nibbles(&block[2..])
    }
}

pub struct Q4_1;
impl Block for Q4_1 {
    const BYTES: usize = 20;
    const ZERO_BITS: Option<u32> = None;
    #[inline]
    fn codes(block: &[u8]) -> Group {
        nibbles(&block[4..])
    }
}

pub struct Q5_0;
impl Block for Q5_0 {
    const BYTES: usize = 22;
    const ZERO_BITS: Option<u32> = Some(4);
    #[inline]
    fn codes(block: &[u8]) -> Group {
        fives(&block[2..6], &block[6..])
    }
}

pub struct Q5_1;
impl Block for Q5_1 {
    const BYTES: usize = 24;
    const ZERO_BITS: Option<u32> = None;
    #[inline]
    fn codes(block: &[u8]) -> Group {
        fives(&block[4..8], &block[8..])
    }
}

pub struct Q8_0;
impl Block for Q8_0 {
    const BYTES: usize = 34;
    const ZERO_BITS: Option<u32> = Some(7);
    #[inline]
    fn codes(block: &[u8]) -> Group {
        std::array::from_fn(|i| block[2 + i] ^ 128)
    }
}

/// Signed byte values with 128 added, to make them unsigned.
const fn unsigned(values: [i8; 16]) -> [u8; 16] {
    let (mut table, mut i) = ([0; 16], 0);
    while i < 16 {
        table[i] = values[i].cast_unsigned() ^ 128;
        i += 1;
    }
    table
}

/// The values of iq4_nl and iq4_xs.
pub const IQ4: [u8; 16] =
    unsigned([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);

pub struct Iq4Nl;
impl Block for Iq4Nl {
    const BYTES: usize = 18;
    const ZERO_BITS: Option<u32> = Some(7);
    const TABLE: Option<[u8; 16]> = Some(IQ4);
    #[inline]
    fn codes(block: &[u8]) -> Group {
        nibbles(&block[2..])
    }
}

/// OCP's microscaling format: FP4 values, doubled here so that they are integers, and a power-of-two scale.
pub struct Mxfp4;
impl Block for Mxfp4 {
    const BYTES: usize = 17;
    const ZERO_BITS: Option<u32> = Some(7);
    const BF16_SCALE: bool = true;
    const TABLE: Option<[u8; 16]> = Some(unsigned([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]));
    #[inline]
    fn codes(block: &[u8]) -> Group {
        nibbles(&block[1..])
    }
    /// 2^(e − 128) as bf16, whose exponent has the same number of bits; the two smallest are subnormal there.
    #[inline]
    fn scale(block: &[u8]) -> [u8; 2] {
        let e = u16::from(block[0]);
        let bits = if e < 2 { 0x20 << e } else { (e - 1) << 7 };
        bits.to_le_bytes()
    }
}
