//! AVX2 with FMA and F16C (Haswell, Zen and later); with products of bytes where `VNNI` says so (AVX-VNNI: Intel's Alder Lake and
//! later, which have no AVX-512, and Zen 5). A vector takes two registers.
mod by_words;

use super::products::{dot_quads, dot_two_bytes, store_two_bytes, sum_of_two_bytes};
use super::{Kernel, Simd, Uses};
use std::arch::x86_64::*;

/// Proof that the CPU supports it; created only by [`detect`](Self::detect), or from one that has more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn plain<K: Kernel>(s: Avx2<false>, kernel: K) -> K::Out {
    kernel.run(s)
}

#[target_feature(enable = "avx2,avxvnni,fma,f16c")]
fn with_vnni<K: Kernel>(s: Avx2<true>, kernel: K) -> K::Out {
    kernel.run(s)
}

type F = [__m256; 2];
type I = [__m256i; 2];

/// Operations on registers, which touch no memory: name, arguments, result.
macro_rules! ops {
    ($($name:ident($($x:ident: $X:ty),*) -> $Y:ty = $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($x: $X),*) -> $Y {
                // SAFETY: `detect` checked the CPU features.
                unsafe { $body }
            }
        )*
    };
}

impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type F = F;
    type I = I;
    const ACCUMULATORS: usize = 4;
    // With `VNNI`, too: weights that `--fast-prefill` makes wide took 1.3 times the time, because 16 registers do not hold the sums.
    const BYTE_DOTS: bool = false;
    const WORD_DOTS: bool = !VNNI;
    const WORD_PAIRS: bool = true;
    const TOGETHER: usize = if VNNI { 1 } else { 4 };

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        // SAFETY: `detect` found every feature that the functions are compiled for.
        unsafe {
            match K::USES {
                Uses::Bytes | Uses::Pairs if VNNI => with_vnni(Avx2(()), kernel),
                _ => plain(Avx2(()), kernel),
            }
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, x: &T, ahead: usize) {
        let address = std::ptr::from_ref(x).cast::<i8>().wrapping_add(ahead);
        // SAFETY: `detect` checked the CPU features; prefetching any address, mapped or not, affects only caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn store(self, x: F, out: &mut [f32; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
    }
    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let x: *const f32 = x.as_ptr().cast();
            [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))]
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let x: *const __m128i = x.as_ptr().cast();
            [_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x.add(1)))]
        }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let x: *const __m128i = x.as_ptr().cast();
            let wide =
                |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(x))));
            [wide(x), wide(x.add(1))]
        }
    }
    ops! {
        add(a: F, b: F) -> F = [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])];
        sub(a: F, b: F) -> F = [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])];
        mul(a: F, b: F) -> F = [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])];
        div(a: F, b: F) -> F = [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])];
        fma(a: F, b: F, c: F) -> F = [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])];
        max(a: F, b: F) -> F = [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])];
        or(a: I, b: I) -> I = [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])];
        xor(a: I, b: I) -> I = [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])];
        add_i(a: I, b: I) -> I = [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])];
        sub_i(a: I, b: I) -> I = [_mm256_sub_epi32(a[0], b[0]), _mm256_sub_epi32(a[1], b[1])];
        mul_i(a: I, b: I) -> I = [_mm256_mullo_epi32(a[0], b[0]), _mm256_mullo_epi32(a[1], b[1])];
        times_256(x: I) -> I = [_mm256_slli_epi32::<8>(x[0]), _mm256_slli_epi32::<8>(x[1])];
        over_256(x: I) -> I = [_mm256_srai_epi32::<8>(x[0]), _mm256_srai_epi32::<8>(x[1])];
        to_f32(x: I) -> F = [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])];
        to_i32(x: F) -> I = [_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])];
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            [_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])]
        }
    }
    #[inline(always)]
    fn scale_by_power(self, a: F, n: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let scale = |a, n| {
                let n = _mm256_max_ps(n, _mm256_set1_ps(-127.0));
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            };
            [scale(a[0], n[0]), scale(a[1], n[1])]
        }
    }
    #[inline(always)]
    fn mul_nonzero(self, a: F, b: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let mul = |a, b| {
                let some = _mm256_cmp_ps::<_CMP_NEQ_UQ>(a, _mm256_setzero_ps());
                _mm256_and_ps(some, _mm256_mul_ps(a, b))
            };
            [mul(a[0], b[0]), mul(a[1], b[1])]
        }
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let x: *const __m256i = x.as_ptr().cast();
            [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))]
        }
    }
    #[inline(always)]
    fn dot4(self, acc: I, unsigned: I, signed: I) -> I {
        if !VNNI {
            return self.dot4_by_words(acc, unsigned, signed);
        }
        // SAFETY: `detect` checked the CPU features, VNNI included.
        unsafe { [0, 1].map(|i| _mm256_dpbusd_avx_epi32(acc[i], unsigned[i], signed[i])) }
    }
    #[inline(always)]
    fn dot_units<const R: usize, const C: usize>(
        self,
        sums: &mut [[[I; 2]; C]; R],
        codes: &[I; C],
        units: impl Fn(usize, usize) -> i32,
    ) {
        if VNNI {
            dot_two_bytes(self, sums, codes, units)
        } else {
            self.dot_words_of_units(sums, codes, units)
        }
    }
    #[inline(always)]
    fn sum_of_units(self, sums: [I; 2]) -> I {
        if VNNI { sum_of_two_bytes(self, sums) } else { sums[0] }
    }
    #[inline(always)]
    fn store_units(self, units: I, parts: [&mut [u8; 16]; 2]) {
        if VNNI { store_two_bytes(self, units, parts) } else { self.store_words_of_units(units, parts) }
    }
    #[inline(always)]
    fn dot_codes<const Q: usize, const N: usize>(
        self,
        bits: u32,
        codes: &[I; Q],
        x: impl Fn(usize, usize) -> i32,
        start: [I; N],
    ) -> [I; N] {
        if VNNI { dot_quads(self, codes, x, start) } else { self.dot_codes_by_words(bits, codes, x, start) }
    }
    #[inline(always)]
    fn dot_nibbles(self, products: I, codes: I, x: i32) -> I {
        if VNNI {
            self.dot4(products, codes, self.splat_i(x))
        } else {
            self.dot_nibbles_as_words(products, codes, x)
        }
    }
    #[inline(always)]
    fn add_nibbles(self, sums: I, products: I) -> I {
        if VNNI { self.add_i(sums, products) } else { self.add_words(sums, products) }
    }
    #[inline(always)]
    fn dot2(self, acc: F, a: I, b: I) -> F {
        let ((a0, a1), (b0, b1)) = (self.widen_pairs(a), self.widen_pairs(b));
        self.fma(a1, b1, self.fma(a0, b0, acc))
    }
    #[inline(always)]
    fn sum(self, x: F) -> f32 {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let eight = _mm256_add_ps(x[0], x[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn largest(self, x: F) -> f32 {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }
    #[inline(always)]
    fn dot_words(self, acc: I, a: I, b: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe { [0, 1].map(|i| _mm256_add_epi32(acc[i], _mm256_madd_epi16(a[i], b[i]))) }
    }
    #[inline(always)]
    fn word_pairs(self, even: I, odd: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let pair = |even, odd| _mm256_blend_epi16::<0b1010_1010>(even, _mm256_slli_epi32::<16>(odd));
            [pair(even[0], odd[0]), pair(even[1], odd[1])]
        }
    }
    #[inline(always)]
    fn sixes(self, [a, b, c]: [I; 3]) -> [I; 4] {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let low = |x| _mm256_and_si256(x, _mm256_set1_epi8(0x3f));
            let [a2, b2, c2] = [0x03, 0x0c, 0x30].map(|mask| _mm256_set1_epi8(mask));
            let upper = |a, b, c| {
                let a = _mm256_and_si256(_mm256_srli_epi16::<6>(a), a2);
                let b = _mm256_and_si256(_mm256_srli_epi16::<4>(b), b2);
                _mm256_or_si256(_mm256_or_si256(a, b), _mm256_and_si256(_mm256_srli_epi16::<2>(c), c2))
            };
            let both = |x: I| [low(x[0]), low(x[1])];
            [both(a), both(b), both(c), [upper(a[0], b[0], c[0]), upper(a[1], b[1], c[1])]]
        }
    }
    #[inline(always)]
    fn byte<const N: u32>(self, x: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let (by, mask) = (_mm256_set1_epi32(8 * N as i32), _mm256_set1_epi32(255));
            let byte = |x| _mm256_and_si256(_mm256_srlv_epi32(x, by), mask);
            [byte(x[0]), byte(x[1])]
        }
    }
    #[inline(always)]
    fn field(self, x: I, at: u32, bits: u32, to: u32) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let mask = _mm256_set1_epi8((((1u32 << bits) - 1) << to) as i8);
            let by = _mm_cvtsi32_si128(at.abs_diff(to).cast_signed());
            let one = |x| if at >= to { _mm256_srl_epi16(x, by) } else { _mm256_sll_epi16(x, by) };
            [_mm256_and_si256(one(x[0]), mask), _mm256_and_si256(one(x[1]), mask)]
        }
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: I) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, x[0]), _mm256_shuffle_epi8(table, x[1])]
        }
    }
    #[inline(always)]
    fn shift_left(self, x: I, n: u32) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let n = _mm256_set1_epi32(n.cast_signed());
            [_mm256_sllv_epi32(x[0], n), _mm256_sllv_epi32(x[1], n)]
        }
    }
    #[inline(always)]
    fn store_low_bytes(self, x: I, out: &mut [u8; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as half a register.
        unsafe {
            // Of the four lanes in every half of a register.
            let to_low = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
            let to_next = _mm_setr_epi8(-1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
            let a = _mm256_shuffle_epi8(x[0], _mm256_broadcastsi128_si256(to_low));
            let b = _mm256_shuffle_epi8(x[1], _mm256_broadcastsi128_si256(to_next));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_or_si256(a, b), order);
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm256_castsi256_si128(bytes));
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            [_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))]
        }
    }
    #[inline(always)]
    fn widen_pairs(self, x: I) -> (F, F) {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let even = |x| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x));
            let odd = |x| _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000u32 as i32)));
            ([even(x[0]), even(x[1])], [odd(x[0]), odd(x[1])])
        }
    }
    #[inline(always)]
    fn cut_pairs(self, even: F, odd: F) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
            let pair = |even, odd| {
                let odd = _mm256_and_si256(_mm256_castps_si256(odd), upper);
                _mm256_or_si256(_mm256_srli_epi32::<16>(_mm256_castps_si256(even)), odd)
            };
            [pair(even[0], odd[0]), pair(even[1], odd[1])]
        }
    }
    #[inline(always)]
    fn round_pairs(self, even: F, odd: F) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
            let rounded = |x| _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
            let pair = |even, odd| {
                let odd = _mm256_and_si256(rounded(odd), upper);
                _mm256_or_si256(_mm256_srli_epi32::<16>(rounded(even)), odd)
            };
            [pair(even[0], odd[0]), pair(even[1], odd[1])]
        }
    }
    #[inline(always)]
    fn cut(self, x: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let upper = _mm256_castsi256_ps(_mm256_set1_epi32(0xffff_0000u32 as i32));
            [_mm256_and_ps(x[0], upper), _mm256_and_ps(x[1], upper)]
        }
    }
    #[inline(always)]
    fn as_floats(self, x: I) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe { [_mm256_castsi256_ps(x[0]), _mm256_castsi256_ps(x[1])] }
    }
    #[inline(always)]
    fn load_i(self, x: &[u32; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as both vectors.
        unsafe {
            let x: *const __m256i = x.as_ptr().cast();
            [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))]
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut [u8; 64]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as both vectors.
        unsafe {
            let out: *mut __m256i = out.as_mut_ptr().cast();
            _mm256_storeu_si256(out, x[0]);
            _mm256_storeu_si256(out.add(1), x[1]);
        }
    }
    #[inline(always)]
    fn store_i(self, x: I, out: &mut [u32; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out.as_mut_ptr().add(8).cast(), x[1]);
        }
    }
}
