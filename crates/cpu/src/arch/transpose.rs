//! Small transpositions of bytes, for rows that are interleaved with each other. They need no detection: SSE2 is part of x86-64,
//! and other CPUs take the portable code, which is also what the tests compare with.

/// Columns of four rows of four 4-byte units.
#[inline(always)]
pub fn words(rows: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    return unsafe { sse2::words(rows) };
    #[cfg(not(target_arch = "x86_64"))]
    portable::units::<4, 4>(rows)
}

/// Columns of eight rows of eight 2-byte units.
#[inline(always)]
pub fn halves(rows: [[u8; 16]; 8]) -> [[u8; 16]; 8] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    return unsafe { sse2::halves(rows) };
    #[cfg(not(target_arch = "x86_64"))]
    portable::units::<2, 8>(rows)
}

/// The bytes of four rows in turns: the first of each, then the second of each.
#[inline(always)]
pub fn interleave(rows: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    return unsafe { sse2::interleave(rows) };
    #[cfg(not(target_arch = "x86_64"))]
    portable::interleave(rows)
}

/// The inverse of [`interleave`].
#[inline(always)]
pub fn separate(turns: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE2 is part of x86-64.
    return unsafe { sse2::separate(turns) };
    #[cfg(not(target_arch = "x86_64"))]
    portable::separate(turns)
}

#[cfg(target_arch = "x86_64")]
mod sse2 {
    use std::arch::x86_64::*;

    #[inline(always)]
    fn load(x: [u8; 16]) -> __m128i {
        // SAFETY: SSE2 is part of x86-64; the array is as long as the vector.
        unsafe { _mm_loadu_si128(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store(x: __m128i) -> [u8; 16] {
        let mut out = [0; 16];
        // SAFETY: SSE2 is part of x86-64; the array is as long as the vector.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), x) };
        out
    }

    /// Takes units of the first and of the second half of the rows in turns. After log2 N times, rows are columns.
    #[inline(always)]
    fn shuffled<const N: usize>(
        rows: [__m128i; N],
        low: impl Fn(__m128i, __m128i) -> __m128i,
        high: impl Fn(__m128i, __m128i) -> __m128i,
    ) -> [__m128i; N] {
        std::array::from_fn(|i| {
            let (a, b) = (rows[i / 2], rows[i / 2 + N / 2]);
            if i % 2 == 0 { low(a, b) } else { high(a, b) }
        })
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    pub fn words(rows: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
        let turn = |rows| shuffled(rows, |a, b| _mm_unpacklo_epi32(a, b), |a, b| _mm_unpackhi_epi32(a, b));
        turn(turn(rows.map(load))).map(store)
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    pub fn halves(rows: [[u8; 16]; 8]) -> [[u8; 16]; 8] {
        let turn = |rows| shuffled(rows, |a, b| _mm_unpacklo_epi16(a, b), |a, b| _mm_unpackhi_epi16(a, b));
        turn(turn(turn(rows.map(load)))).map(store)
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    pub fn interleave(rows: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
        let turn = |rows| shuffled(rows, |a, b| _mm_unpacklo_epi8(a, b), |a, b| _mm_unpackhi_epi8(a, b));
        turn(turn(rows.map(load))).map(store)
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    pub fn separate(turns: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
        // The even bytes of two vectors, and the odd ones.
        let low = |x| _mm_and_si128(x, _mm_set1_epi16(0xff));
        let even = |a, b| _mm_packus_epi16(low(a), low(b));
        let odd = |a, b| _mm_packus_epi16(_mm_srli_epi16::<8>(a), _mm_srli_epi16::<8>(b));
        let [a, b, c, d] = turns.map(load);
        let (evens, odds) = ([even(a, b), even(c, d)], [odd(a, b), odd(c, d)]);
        [even(evens[0], evens[1]), even(odds[0], odds[1]), odd(evens[0], evens[1]), odd(odds[0], odds[1])]
            .map(store)
    }
}

/// The same in plain loops.
#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable {
    use std::array::from_fn;

    pub fn units<const UNIT: usize, const N: usize>(rows: [[u8; 16]; N]) -> [[u8; 16]; N] {
        from_fn(|column| from_fn(|at| rows[at / UNIT][column * UNIT + at % UNIT]))
    }
    pub fn interleave(rows: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
        from_fn(|i| from_fn(|at| rows[at % 4][i * 4 + at / 4]))
    }
    pub fn separate(turns: [[u8; 16]; 4]) -> [[u8; 16]; 4] {
        from_fn(|row| from_fn(|at| turns[at / 4][at % 4 * 4 + row]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transposition_is_that_of_plain_loops() {
        let mut n = 0u8;
        let mut next = || {
            n = n.wrapping_mul(5).wrapping_add(77);
            n
        };
        for _ in 0..8 {
            let four: [[u8; 16]; 4] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
            let eight: [[u8; 16]; 8] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
            assert_eq!(words(four), portable::units::<4, 4>(four));
            assert_eq!(halves(eight), portable::units::<2, 8>(eight));
            assert_eq!(interleave(four), portable::interleave(four));
            assert_eq!(separate(four), portable::separate(four));
            assert_eq!(separate(interleave(four)), four);
        }
    }
}
