//! Converts the encodings that no device has kernels for, without loss.
//!
//! ggml's rare encodings (iq1 to iq3, tq) have at most sixteen values, small integer scales and one float per 256
//! weights. They become [`Encoding::Table16`], which stores exactly that. Their grids (`grids.bin`, written by
//! `tools/fixtures/grids.py`) are ggml's. Two other encodings are converted exactly as well: the single bit of q1_0
//! becomes a code of q4_0, and a product of nvfp4, whose scales change every 16 weights, fits into bf16.
use super::encoding::Encoding;
use std::borrow::Cow;

/// Converts the blocks of a tensor to [`Encoding::exact`].
pub fn exact(encoding: Encoding, bytes: Cow<'_, [u8]>) -> Cow<'_, [u8]> {
    match encoding {
        Encoding::Iq1S => table16(encoding, &bytes, iq1_s),
        Encoding::Iq1M => table16(encoding, &bytes, iq1_m),
        Encoding::Iq2Xxs => table16(encoding, &bytes, iq2_xxs),
        Encoding::Iq2Xs => table16(encoding, &bytes, iq2_xs),
        Encoding::Iq2S => table16(encoding, &bytes, iq2_s),
        Encoding::Iq3Xxs => table16(encoding, &bytes, iq3_xxs),
        Encoding::Iq3S => table16(encoding, &bytes, iq3_s),
        Encoding::Tq1_0 => table16(encoding, &bytes, tq1_0),
        Encoding::Tq2_0 => table16(encoding, &bytes, tq2_0),
        // Drops the sum of the codes.
        Encoding::Q8_1 => each(encoding, &bytes, |block, out| {
            out[..2].copy_from_slice(&block[..2]);
            out[2..].copy_from_slice(&block[4..]);
        }),
        Encoding::Q8K => each(encoding, &bytes, q8_k),
        Encoding::Q1_0 => each(encoding, &bytes, q1_0),
        Encoding::Nvfp4 => each(encoding, &bytes, nvfp4),
        Encoding::F64 => each(encoding, &bytes, |x, out| {
            let x = f64::from_le_bytes(std::array::from_fn(|i| x[i])) as f32;
            out.copy_from_slice(&x.to_le_bytes());
        }),
        _ => return bytes,
    }
    .into()
}

/// Converts every block. Allocates the output at its final size.
fn each(encoding: Encoding, bytes: &[u8], write: impl Fn(&[u8], &mut [u8])) -> Vec<u8> {
    let (elements, size) = encoding.block();
    let (exact_elements, exact_size) = encoding.exact().block();
    let new_size = elements / exact_elements * exact_size;
    let mut all = vec![0; bytes.len() / size * new_size];
    bytes.chunks_exact(size).zip(all.chunks_exact_mut(new_size)).for_each(|(block, out)| write(block, out));
    all
}

fn table16(encoding: Encoding, bytes: &[u8], convert: fn(&[u8]) -> Table16) -> Vec<u8> {
    each(encoding, bytes, |block, out| convert(block).write(out))
}

/// One float and 256 codes. No encoding with kernels has such a wide scale, so it is converted to floats.
fn q8_k(block: &[u8], out: &mut [u8]) {
    let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    for (code, out) in block[4..260].iter().zip(out.as_chunks_mut::<4>().0) {
        *out = (d * f32::from(code.cast_signed())).to_le_bytes();
    }
}

/// `d, bits[128]`; w = ±d. Becomes four blocks of q4_0, whose codes 7 and 9 mean −d and d.
fn q1_0(block: &[u8], out: &mut [u8]) {
    for (bits, out) in block[2..].chunks_exact(4).zip(out.chunks_exact_mut(18)) {
        let code = |i: usize| 7 + 2 * (bits[i / 8] >> (i % 8) & 1);
        out[..2].copy_from_slice(&block[..2]);
        out[2..].iter_mut().enumerate().for_each(|(i, out)| *out = code(i) | code(i + 16) << 4);
    }
}

/// `scales[4], codes of 4 bits[4][16]`; w = scale × value, as bf16. A scale has four significant bits and a value two,
/// so the product has at most six of bf16's eight.
fn nvfp4(block: &[u8], out: &mut [u8]) {
    const TWICE: [i8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
    for (i, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (group, i) = (i / 16, i % 16);
        let code = block[4 + 8 * group + i % 8] >> (4 * (i / 8)) & 15;
        let size = half_e4m3(block[group]) * f32::from(TWICE[usize::from(code & 7)]);
        *out = half::bf16::from_f32(if code < 8 { size } else { -size }).to_le_bytes();
    }
}

/// Half of a float with four exponent bits and three mantissa bits. Ignores the sign; NaN becomes 0, as in ggml.
fn half_e4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(x >> 3 & 15), f32::from(x & 7));
    match exponent {
        _ if x == 0x7f => 0.0,
        0 => mantissa * 2f32.powi(-10),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
    }
}

/// A super-block of [`Encoding::Table16`]: `w = d × scale of its 16 × values[code]`.
struct Table16 {
    d: f32,
    values: [i8; 16],
    scales: [u8; 16],
    codes: [u8; 256],
}

impl Table16 {
    fn write(&self, out: &mut [u8]) {
        let (head, runs) = out.split_at_mut(4 + 16 + 16);
        head[..4].copy_from_slice(&self.d.to_le_bytes());
        head[4..20].copy_from_slice(&self.values.map(|value| value.cast_unsigned() ^ 128));
        head[20..].copy_from_slice(&self.scales);
        for (codes, out) in self.codes.as_chunks::<32>().0.iter().zip(runs.as_chunks_mut::<16>().0) {
            *out = std::array::from_fn(|i| codes[i] | codes[i + 16] << 4);
        }
    }
}

fn u16_at(bytes: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])
}
fn u32_at(bytes: &[u8], i: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[4 * i + byte]))
}
fn f16_at(bytes: &[u8], i: usize) -> f32 {
    half::f16::from_bits(u16_at(bytes, i)).to_f32()
}
/// Reads a 4-bit field; two fields per byte, the lower one first.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}
/// Eight signs, of which seven are stored: the number of minus signs is even.
fn signs_of(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Entries of ggml's grids: eight 2-bit fields, or four 3-bit fields.
struct Grid {
    first: usize,
    fields: u32,
    bits: u32,
}

static GRIDS: &[u8] = include_bytes!("grids.bin");
const IQ2_XXS: Grid = Grid { first: 0, fields: 8, bits: 2 };
const IQ2_XS: Grid = Grid { first: 256, fields: 8, bits: 2 };
const IQ2_S: Grid = Grid { first: 768, fields: 8, bits: 2 };
const IQ3_XXS: Grid = Grid { first: 1792, fields: 4, bits: 3 };
const IQ3_S: Grid = Grid { first: 2048, fields: 4, bits: 3 };
const IQ1: Grid = Grid { first: 2560, fields: 8, bits: 2 };

impl Grid {
    fn entry(&self, index: usize) -> impl Iterator<Item = u8> {
        let (entry, bits) = (u16_at(GRIDS, self.first + index), self.bits);
        (0..self.fields).map(move |i| (entry >> (i * bits)) as u8 & ((1 << bits) - 1))
    }
}

/// Magnitudes, and from code `8` on the same ones negated.
fn signed(magnitudes: &[i8]) -> [i8; 16] {
    std::array::from_fn(|i| {
        let value = magnitudes.get(i % 8).copied().unwrap_or(0);
        if i < 8 { value } else { -value }
    })
}
const TWOS: [i8; 3] = [8, 25, 43];

/// 32 runs of eight codes, each from one grid entry (or two) and eight signs.
fn grids(d: f32, values: [i8; 16], scale: impl Fn(usize) -> u8, run: impl Fn(usize) -> [u8; 8]) -> Table16 {
    let mut codes = [0; 256];
    codes.as_chunks_mut::<8>().0.iter_mut().enumerate().for_each(|(i, codes)| *codes = run(i));
    Table16 { d, values, scales: std::array::from_fn(scale), codes }
}

fn with_signs(magnitudes: impl Iterator<Item = u8>, signs: u8) -> [u8; 8] {
    let mut codes = [0; 8];
    for (i, (code, magnitude)) in codes.iter_mut().zip(magnitudes).enumerate() {
        *code = magnitude | (signs >> i & 1) << 3;
    }
    codes
}

/// `d, 8 × (4 grid indices, 4 × 7 signs and 4 bits of scale)`; w = d × (1/2 + s) / 4 × ±grid
fn iq2_xxs(block: &[u8]) -> Table16 {
    let scale = |i: usize| 2 * (u32_at(&block[2..], i / 2 * 2 + 1) >> 28) as u8 + 1;
    grids(f16_at(block, 0) / 8.0, signed(&TWOS), scale, |i| {
        let signs = u32_at(&block[2..], i / 4 * 2 + 1) >> (7 * (i % 4));
        with_signs(IQ2_XXS.entry(block[2 + i / 4 * 8 + i % 4].into()), signs_of(signs))
    })
}

/// `d, 32 × (9 bits of a grid index, 7 signs), scales of 4 bits[16]`
fn iq2_xs(block: &[u8]) -> Table16 {
    grids(
        f16_at(block, 0) / 8.0,
        signed(&TWOS),
        |i| 2 * nibble(&block[66..], i) + 1,
        |i| {
            let run = u16_at(&block[2..], i);
            with_signs(IQ2_XS.entry((run & 511).into()), signs_of((run >> 9).into()))
        },
    )
}

/// `d, grid indices[32], signs[32], upper bits of the indices[8], scales of 4 bits[16]`
fn iq2_s(block: &[u8]) -> Table16 {
    grids(
        f16_at(block, 0) / 8.0,
        signed(&TWOS),
        |i| 2 * nibble(&block[74..], i) + 1,
        |i| {
            let upper = usize::from(block[66 + i / 4] >> (2 * (i % 4)) & 3);
            with_signs(IQ2_S.entry(usize::from(block[2 + i]) | upper << 8), block[34 + i])
        },
    )
}

/// `d, grid indices[64], 8 × (4 × 7 signs and 4 bits of scale)`; w = d × (1/2 + s) / 2 × ±grid
fn iq3_xxs(block: &[u8]) -> Table16 {
    let scale = |i: usize| 2 * (u32_at(&block[66..], i / 2) >> 28) as u8 + 1;
    grids(f16_at(block, 0) / 4.0, signed(&[4, 12, 20, 28, 36, 44, 52, 62]), scale, |i| {
        let signs = u32_at(&block[66..], i / 4) >> (7 * (i % 4));
        let entries = block[2 + 2 * i..][..2].iter().flat_map(|index| IQ3_XXS.entry((*index).into()));
        with_signs(entries, signs_of(signs))
    })
}

/// `d, grid indices[64], upper bits of the indices[8], signs[32], scales of 4 bits[8]`; w = d × (1 + 2s) × ±grid
fn iq3_s(block: &[u8]) -> Table16 {
    let scale = |i: usize| 2 * nibble(&block[106..], i / 2) + 1;
    grids(f16_at(block, 0), signed(&[1, 3, 5, 7, 9, 11, 13, 15]), scale, |i| {
        let entries = (2 * i..2 * i + 2).flat_map(|j| {
            let upper = usize::from(block[66 + j / 8] >> (j % 8) & 1);
            IQ3_S.entry(usize::from(block[2 + j]) | upper << 8)
        });
        with_signs(entries, block[74 + i])
    })
}

/// w = d × (2s + 1) × (grid − 1 ± 1/8): the sums times eight, by code; from code 8 on those with a minus.
const NEAR_ONES: [i8; 16] = [-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0];

/// `d, grid indices[32], 8 × (4 × 3 upper bits of the indices, 3 bits of scale, sign of the eighth)`
fn iq1_s(block: &[u8]) -> Table16 {
    let more = |i: usize| u16_at(&block[34..], i);
    let scale = |i: usize| 2 * (more(i / 2) >> 12 & 7) as u8 + 1;
    grids(f16_at(block, 0) / 8.0, NEAR_ONES, scale, |i| {
        let upper = usize::from(more(i / 4) >> (3 * (i % 4)) & 7);
        let minus = if more(i / 4) >> 15 == 1 { 255 } else { 0 };
        with_signs(IQ1.entry(usize::from(block[2 + i]) | upper << 8), minus)
    })
}

/// `grid indices[32], 32 × (3 upper bits of the index, sign of the eighth), 4 × (4 × 3 bits of scale, 4 bits of d)`
fn iq1_m(block: &[u8]) -> Table16 {
    let more = |i: usize| u16_at(&block[48..], i);
    let d = (0..4).fold(0, |d, i| d | more(i) >> 12 << (4 * i));
    let scale = |i: usize| 2 * (more(i / 4) >> (3 * (i % 4)) & 7) as u8 + 1;
    grids(half::f16::from_bits(d).to_f32() / 8.0, NEAR_ONES, scale, |i| {
        let upper = nibble(&block[32..], i);
        let minus = if upper >> 3 == 1 { 255 } else { 0 };
        with_signs(IQ1.entry(usize::from(block[i]) | usize::from(upper & 7) << 8), minus)
    })
}

fn ternary(d: f32, code: impl Fn(usize) -> u8) -> Table16 {
    let mut values = [0; 16];
    values[..4].copy_from_slice(&[-1, 0, 1, 2]);
    Table16 { d, values, scales: [1; 16], codes: std::array::from_fn(code) }
}

/// `codes of 2 bits[256], d`
fn tq2_0(block: &[u8]) -> Table16 {
    ternary(f16_at(block, 32), |i| block[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3)
}

/// Five base-3 digits per byte, as a fraction of 256: `[5][32]` in 32 bytes, `[5][16]` in 16, `[4][4]` in 4; `d`
fn tq1_0(block: &[u8]) -> Table16 {
    ternary(f16_at(block, 26), |i| {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + (i - 160) % 16, (i - 160) / 16),
            _ => (48 + (i - 240) % 4, (i - 240) / 4),
        };
        let shifted = block[byte].wrapping_mul([1, 3, 9, 27, 81][digit]);
        ((u16::from(shifted) * 3) >> 8) as u8
    })
}
