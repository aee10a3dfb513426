//! Layout of 32 codes of each of sixteen rows in cache lines, and their unpacking in kernels.
//!
//! Four codes of a row form a quad; the quads of sixteen rows fill a vector, one quad per lane. So 32 codes are eight
//! vectors. Codes of fewer than eight bits share bytes in bit planes:
//!
//! ```text
//! plane of 4 bits   4 lines   line l contains quads l and l + 4, the first in the lower bits
//! plane of 2 bits   2 lines   line l contains quads l, l + 2, l + 4, l + 6
//! plane of 1 bit    1 line    all eight
//! ```
use crate::arch::{LANES, Simd};
use kvist_device::weights::blocks::Group;
use std::sync::atomic::{Ordering, compiler_fence};

pub trait Codes: 'static {
    /// Bits of a code.
    const BITS: u32;
    /// Bytes of 32 codes of 16 rows: whole cache lines.
    const BYTES: usize = 4 * LANES * Self::BITS as usize;

    /// Packs the codes of row `lane` into `place: [BYTES]`.
    fn put(codes: &Group, lane: usize, place: &mut [u8]);
    fn get(place: &[u8], lane: usize) -> Group;
    /// The eight quads of every row, unsigned.
    fn load<S: Simd>(s: S, place: &[u8]) -> [S::I; 8];
}

/// Codes of `LOW + HIGH` bits: a plane of the lower bits, and one of the higher bits if any.
pub struct Planes<const LOW: u32, const HIGH: u32>;

/// Loads the first `n` lines one after the other. Compilers reorder loads, and the processor stops prefetching lines that it does not
/// see in their order: 8 tokens of q8_0 took 1.5 times as long when lines 7 to 4 were loaded before lines 0 to 3.
#[inline(always)]
fn load_in_order<S: Simd>(s: S, place: &[u8], n: usize) -> [S::I; 8] {
    let lines = place.as_chunks::<{ 4 * LANES }>().0;
    let mut loaded = [s.splat_i(0); 8];
    for i in 0..n {
        loaded[i] = s.load_bytes(&lines[i]);
        compiler_fence(Ordering::SeqCst);
    }
    loaded
}

/// A mask of `bits` ones in each of four bytes.
const fn ones(bits: u32) -> u32 {
    0x0101_0101 * ((1 << bits) - 1)
}

/// Packs a plane of `BITS`, taken from the quads starting at bit `FROM`. Model loading spends its time in this loop, so
/// its bounds are compile-time constants.
fn put_plane<const FROM: u32, const BITS: u32>(quads: &[u32; 8], lane: usize, lines: &mut [u8]) {
    for (l, line) in lines.as_chunks_mut::<{ 4 * LANES }>().0.iter_mut().enumerate().take(BITS as usize) {
        let mut word = 0;
        for slot in 0..8 / BITS {
            let quad = quads[l + (slot * BITS) as usize];
            word |= (quad >> FROM & ones(BITS)) << (slot * BITS);
        }
        line[4 * lane..4 * lane + 4].copy_from_slice(&word.to_le_bytes());
    }
}

fn get_plane(lines: &[u8], bits: u32, lane: usize, to: u32, quads: &mut [u32; 8]) {
    for (l, line) in lines.chunks_exact(4 * LANES).enumerate() {
        let word = u32::from_le_bytes([0, 1, 2, 3].map(|i| line[4 * lane + i]));
        let sharing = quads[l..].iter_mut().step_by(bits as usize);
        (0..).zip(sharing).for_each(|(slot, quad)| *quad |= (word >> (slot * bits) & ones(bits)) << to);
    }
}

impl<const LOW: u32, const HIGH: u32> Codes for Planes<LOW, HIGH> {
    const BITS: u32 = LOW + HIGH;

    fn put(codes: &Group, lane: usize, place: &mut [u8]) {
        let quads = std::array::from_fn(|q| u32::from_le_bytes([0, 1, 2, 3].map(|i| codes[4 * q + i])));
        let (low, high) = place.split_at_mut(4 * LANES * LOW as usize);
        put_plane::<0, LOW>(&quads, lane, low);
        put_plane::<LOW, HIGH>(&quads, lane, high);
    }

    fn get(place: &[u8], lane: usize) -> Group {
        let (low, high) = place.split_at(4 * LANES * LOW as usize);
        let mut quads = [0; 8];
        get_plane(low, LOW, lane, 0, &mut quads);
        get_plane(high, HIGH, lane, LOW, &mut quads);
        std::array::from_fn(|i| quads[i / 4].to_le_bytes()[i % 4])
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, place: &[u8]) -> [S::I; 8] {
        let lines = load_in_order::<S>(s, place, Self::BITS as usize);
        let mut quads = lines;
        for (q, quad) in (0..8).zip(&mut quads) {
            if LOW < 8 {
                *quad = s.field(lines[(q % LOW) as usize], q / LOW * LOW, LOW, 0);
            }
            if HIGH > 0 {
                let high = lines[(LOW + q % HIGH) as usize];
                *quad = s.or(*quad, s.field(high, q / HIGH * HIGH, HIGH, LOW));
            }
        }
        quads
    }
}

/// Codes of six bits, four quads in three lines: the lower six bits of a line are one quad, and the upper two bits of
/// the three lines together are the fourth. This takes fewer instructions than two planes.
pub struct Sixes;

impl Codes for Sixes {
    const BITS: u32 = 6;

    fn put(codes: &Group, lane: usize, place: &mut [u8]) {
        for (half, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
            for (i, upper) in codes[12..].iter().enumerate() {
                for part in 0..3 {
                    let code = codes[4 * part + i] | upper >> (2 * part) << 6;
                    place[((3 * half + part) * LANES + lane) * 4 + i] = code;
                }
            }
        }
    }

    fn get(place: &[u8], lane: usize) -> Group {
        std::array::from_fn(|i| {
            let at = |part| place[((i / 16 * 3 + part) * LANES + lane) * 4 + i % 4];
            match i % 16 / 4 {
                3 => at(0) >> 6 | at(1) >> 6 << 2 | at(2) >> 6 << 4,
                part => at(part) & 63,
            }
        })
    }

    #[inline(always)]
    fn load<S: Simd>(s: S, place: &[u8]) -> [S::I; 8] {
        let [a, b, c, d, e, f, ..] = load_in_order::<S>(s, place, 6);
        let ([a, b, c, d], [e, f, g, h]) = (s.sixes([a, b, c]), s.sixes([d, e, f]));
        [a, b, c, d, e, f, g, h]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn comes_back<C: Codes>(bits: u32) {
        let code = |row: usize, i: usize| ((row * 37 + i * 11 + 5) % 251) as u8 & (0xff >> (8 - bits));
        let mut place = vec![0; C::BYTES];
        (0..LANES).for_each(|row| C::put(&std::array::from_fn(|i| code(row, i)), row, &mut place));
        for row in 0..LANES {
            assert_eq!(C::get(&place, row), std::array::from_fn(|i| code(row, i)), "{bits} bits, row {row}");
        }
        struct Load<'p, C>(&'p [u8], std::marker::PhantomData<C>);
        impl<C: Codes> crate::arch::Kernel for Load<'_, C> {
            type Out = [[[u8; 4]; 16]; 8];
            const USES: crate::arch::Uses = crate::arch::Uses::Bytes;
            #[inline(always)]
            fn run<S: Simd>(self, s: S) -> Self::Out {
                let shifts = [s.splat_i(1), s.splat_i(1 << 8), s.splat_i(1 << 16), s.splat_i(1 << 24)];
                C::load(s, self.0).map(|quad| {
                    // Extracts byte by byte, with a product that selects the byte.
                    let bytes = shifts.map(|pick| {
                        let mut lanes = [0.0; 16];
                        s.store(s.to_f32(s.dot4(s.splat_i(0), quad, pick)), &mut lanes);
                        lanes
                    });
                    std::array::from_fn(|row| std::array::from_fn(|byte| bytes[byte][row] as u8))
                })
            }
        }
        for isa in crate::arch::Isa::available() {
            let quads = isa.run(Load::<C>(&place, std::marker::PhantomData));
            for (q, rows) in quads.iter().enumerate() {
                for (row, bytes) in rows.iter().enumerate() {
                    assert_eq!(*bytes, std::array::from_fn(|i| code(row, 4 * q + i)), "{isa}, {bits} bits");
                }
            }
        }
    }

    #[test]
    fn codes_come_back() {
        comes_back::<Planes<8, 0>>(8);
        comes_back::<Planes<4, 2>>(6);
        comes_back::<Sixes>(6);
        comes_back::<Planes<4, 1>>(5);
        comes_back::<Planes<4, 0>>(4);
        comes_back::<Planes<2, 1>>(3);
        comes_back::<Planes<2, 0>>(2);
    }
}
