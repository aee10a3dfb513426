//! Products of codes without VNNI, by instructions over words.
use super::{Avx2, I};
use crate::arch::products::quads_per_word;
use std::arch::x86_64::*;
use std::hint::black_box;

// Each of these is the operation of `Simd` with the similar name.
impl<const VNNI: bool> Avx2<VNNI> {
    // `maddubs` would saturate for codes above 127, so bytes are widened first.
    #[inline(always)]
    pub fn dot4_by_words(self, acc: I, unsigned: I, signed: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let low = _mm256_set1_epi16(255);
            let dot = |acc, u, s| {
                let even = _mm256_madd_epi16(
                    _mm256_and_si256(u, low),
                    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(s)),
                );
                let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(u), _mm256_srai_epi16::<8>(s));
                _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
            };
            [dot(acc[0], unsigned[0], signed[0]), dot(acc[1], unsigned[1], signed[1])]
        }
    }
    // An instruction multiplies sixteen words and adds the products in pairs. Bytes would need two products, and codes
    // of 8 bits would have to become words for both. First the even codes of all rows, then the odd ones: beside the sums sixteen
    // registers hold no more.
    #[inline(always)]
    pub fn dot_words_of_units<const R: usize, const C: usize>(
        self,
        sums: &mut [[[I; 2]; C]; R],
        codes: &[I; C],
        units: impl Fn(usize, usize) -> i32,
    ) {
        for c in 0..C {
            for part in 0..2 {
                // SAFETY: `detect` checked the CPU features.
                unsafe {
                    let words = |codes| match part {
                        0 => _mm256_and_si256(codes, _mm256_set1_epi16(255)),
                        _ => _mm256_srli_epi16::<8>(codes),
                    };
                    let words = [words(codes[c][0]), words(codes[c][1])];
                    for r in 0..R {
                        let units = _mm256_set1_epi32(units(r, part));
                        let [sum, _] = &mut sums[r][c];
                        for half in 0..2 {
                            sum[half] = _mm256_add_epi32(sum[half], _mm256_madd_epi16(words[half], units));
                        }
                    }
                }
            }
        }
    }
    #[inline(always)]
    pub fn store_words_of_units(self, units: I, parts: [&mut [u8; 16]; 2]) {
        let [first, second] = parts;
        // SAFETY: `detect` checked the CPU features; both arrays are as long as half a register.
        unsafe {
            // Of the four units in every half of a register: the even words, then the odd ones.
            const NONE: i8 = -128;
            let to_low =
                _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE);
            let to_high =
                _mm_setr_epi8(NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE, 0, 1, 8, 9, 4, 5, 12, 13);
            let a = _mm256_shuffle_epi8(units[0], _mm256_broadcastsi128_si256(to_low));
            let b = _mm256_shuffle_epi8(units[1], _mm256_broadcastsi128_si256(to_high));
            // Quads 0 and 2 are in the lower half now, 1 and 3 in the upper.
            let order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
            let quads = _mm256_permutevar8x32_epi32(_mm256_or_si256(a, b), order);
            _mm_storeu_si128(first.as_mut_ptr().cast(), _mm256_castsi256_si128(quads));
            _mm_storeu_si128(second.as_mut_ptr().cast(), _mm256_extracti128_si256::<1>(quads));
        }
    }
    // Sums of two products fit into words if the codes have seven bits, and those of several quads if they have fewer.
    // Codes of 8 bits are signed numbers, whose signs move to x.
    //
    // `black_box` hides the length of loops over eight quads: a compiler that knows it loads the inputs of several quads at once, and
    // sixteen registers do not hold these beside the sums.
    #[inline(always)]
    pub fn dot_codes_by_words<const Q: usize, const N: usize>(
        self,
        bits: u32,
        codes: &[I; Q],
        x: impl Fn(usize, usize) -> i32,
        start: [I; N],
    ) -> [I; N] {
        let rolled = |end: usize| if Q == 8 && N > 1 { black_box(end) } else { end };
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let (zero, ones) = (_mm256_setzero_si256(), _mm256_set1_epi16(1));
            let mut sums = if bits == 8 { [[zero; 2]; N] } else { start };
            match quads_per_word(bits) {
                1 => {
                    for q in 0..rolled(Q) {
                        for half in 0..2 {
                            let signed = _mm256_xor_si256(codes[q][half], _mm256_set1_epi8(-128));
                            let unsigned = if bits == 8 { _mm256_abs_epi8(signed) } else { codes[q][half] };
                            for n in 0..N {
                                let x = _mm256_set1_epi32(x(q, n));
                                let x = if bits == 8 { _mm256_sign_epi8(x, signed) } else { x };
                                let words = _mm256_maddubs_epi16(unsigned, x);
                                sums[n][half] =
                                    _mm256_add_epi32(sums[n][half], _mm256_madd_epi16(words, ones));
                            }
                        }
                    }
                }
                2 if Q.is_multiple_of(2) => {
                    for q in 0..rolled(Q) / 2 {
                        let q = [2 * q, 2 * q + 1];
                        for n in 0..N {
                            let x = q.map(|q| _mm256_set1_epi32(x(q, n)));
                            for half in 0..2 {
                                let [a, b] = [0, 1].map(|i| _mm256_maddubs_epi16(codes[q[i]][half], x[i]));
                                let words = _mm256_madd_epi16(_mm256_add_epi16(a, b), ones);
                                sums[n][half] = _mm256_add_epi32(sums[n][half], words);
                            }
                        }
                    }
                }
                per_word => {
                    let mut first = 0;
                    while first < Q {
                        let end = if first + per_word < Q { first + per_word } else { Q };
                        let mut words = [[zero; 2]; N];
                        for q in first..rolled(end) {
                            for half in 0..2 {
                                for n in 0..N {
                                    let products =
                                        _mm256_maddubs_epi16(codes[q][half], _mm256_set1_epi32(x(q, n)));
                                    words[n][half] = _mm256_add_epi16(words[n][half], products);
                                }
                            }
                        }
                        for (sum, words) in sums.as_flattened_mut().iter_mut().zip(words.as_flattened()) {
                            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*words, ones));
                        }
                        first = end;
                    }
                }
            }
            sums
        }
    }
    // Words, two in a lane. Each of eight calls adds up to 2 * 15 * 127 to one.
    #[inline(always)]
    pub fn dot_nibbles_as_words(self, products: I, codes: I, x: i32) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let x = _mm256_set1_epi32(x);
            let add = |sum, codes| _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
            [add(products[0], codes[0]), add(products[1], codes[1])]
        }
    }
    #[inline(always)]
    pub fn add_words(self, sums: I, products: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let add = |sum, words| _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
            [add(sums[0], products[0]), add(sums[1], products[1])]
        }
    }
}
