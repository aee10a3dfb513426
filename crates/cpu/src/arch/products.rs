//! Products of codes and units that several instruction sets share, and how many of them a word holds.
use super::{LANES, Simd};

/// [`Simd::dot_units`], [`Simd::sum_of_units`] and [`Simd::store_units`] where units are two bytes.
#[inline(always)]
pub(super) fn dot_two_bytes<S: Simd, const R: usize, const C: usize>(
    s: S,
    sums: &mut [[[S::I; 2]; C]; R],
    codes: &[S::I; C],
    units: impl Fn(usize, usize) -> i32,
) {
    for r in 0..R {
        let (high, low) = (s.splat_i(units(r, 0)), s.splat_i(units(r, 1)));
        for c in 0..C {
            let [sum_high, sum_low] = sums[r][c];
            sums[r][c] = [s.dot4(sum_high, codes[c], high), s.dot4(sum_low, codes[c], low)];
        }
    }
}
#[inline(always)]
pub(super) fn sum_of_two_bytes<S: Simd>(s: S, [high, low]: [S::I; 2]) -> S::I {
    s.add_i(s.times_256(high), low)
}
#[inline(always)]
pub(super) fn store_two_bytes<S: Simd>(s: S, units: S::I, [high, low]: [&mut [u8; 16]; 2]) {
    s.store_low_bytes(units, low);
    s.store_low_bytes(s.over_256(s.add_i(units, s.splat_i(128))), high);
}

/// [`Simd::dot_words`] and [`Simd::word_pairs`] lane by lane, where no kernel needs them fast.
#[inline(always)]
pub(super) fn dot_words_in_lanes<S: Simd>(s: S, acc: S::I, a: S::I, b: S::I) -> S::I {
    let words = |pair: u32| [pair as i16, (pair >> 16) as i16].map(i32::from);
    in_lanes(s, [acc, a, b], |[acc, a, b]| {
        let ([a0, a1], [b0, b1]) = (words(a), words(b));
        acc.wrapping_add((a0 * b0).wrapping_add(a1 * b1).cast_unsigned())
    })
}
#[inline(always)]
pub(super) fn word_pairs_in_lanes<S: Simd>(s: S, even: S::I, odd: S::I) -> S::I {
    in_lanes(s, [even, odd], |[even, odd]| even & 0xffff | odd << 16)
}
#[inline(always)]
fn in_lanes<S: Simd, const N: usize>(s: S, x: [S::I; N], each: impl Fn([u32; N]) -> u32) -> S::I {
    let mut lanes = [[0; LANES]; N];
    for (x, lanes) in x.into_iter().zip(&mut lanes) {
        s.store_i(x, lanes);
    }
    let mut out = [0; LANES];
    for (i, out) in out.iter_mut().enumerate() {
        *out = each(lanes.map(|lanes| lanes[i]));
    }
    s.load_i(&out)
}

/// Four units as [`Simd::dot_units`] takes them. As bytes, `unit = 256 * high + low`, both signed: the high ones are the first
/// part, the low ones the second. As words: units 0 and 2 are the first part, 1 and 3 the second.
pub fn quad_of_units(words: bool, units: [i32; 4]) -> [i32; 2] {
    if words {
        return [0, 1].map(|i| (units[i] & 0xffff) | (units[i + 2] << 16));
    }
    let low = units.map(|unit| unit as i8);
    let high = std::array::from_fn(|i| ((units[i] - i32::from(low[i])) >> 8) as u8);
    [i32::from_le_bytes(high), i32::from_le_bytes(low.map(i8::cast_unsigned))]
}

/// [`Simd::dot_codes`] where [`dot4`](Simd::dot4) is the fastest product of any codes.
#[inline(always)]
pub(super) fn dot_quads<S: Simd, const N: usize>(
    s: S,
    codes: &[S::I],
    x: impl Fn(usize, usize) -> i32,
    start: [S::I; N],
) -> [S::I; N] {
    let mut sums = start;
    for (q, codes) in codes.iter().enumerate() {
        for n in 0..N {
            sums[n] = s.dot4(sums[n], *codes, s.splat_i(x(q, n)));
        }
    }
    sums
}

/// Quads of codes of `bits` bits whose products with bytes may be added up in words of 16 bits, two products of a quad in each.
pub const fn quads_per_word(bits: u32) -> usize {
    let quads = i16::MAX as usize / (2 * 127 * ((1 << bits) - 1));
    if quads == 0 { 1 } else { quads }
}

/// How many of `tokens` tokens take [`Simd::dot_codes`] of the same codes at a time: `S::TOGETHER`, or half as many where sums in words
/// take registers as well: of five bits, which are added to other sums twice, and of fewer where there are only four tokens (on Zen 3
/// q4_0 took 0.88 of the time so).
pub const fn together<S: Simd>(bits: u32, quads: usize, tokens: usize) -> usize {
    let words = quads_per_word(bits);
    let half = words > 2 && (words < quads || tokens < quads);
    if half { S::TOGETHER.div_ceil(2) } else { S::TOGETHER }
}
