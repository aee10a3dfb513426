//! AVX-512: foundation, byte and word, doubleword, vector length, and VNNI (Ice Lake, Zen 4 and later); with bf16
//! products where `BF16` says so (Cooper Lake, Sapphire Rapids, Zen 4). A vector is one register.
use super::{Kernel, Simd, Uses};
use std::arch::x86_64::*;

/// Proof that the CPU supports it; created only by [`detect`](Self::detect), or from one that has more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    pub fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!BF16 || is_x86_feature_detected!("avx512bf16"));
        has.then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn plain<K: Kernel>(s: Avx512<false>, kernel: K) -> K::Out {
    kernel.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn with_bf16<K: Kernel>(s: Avx512<true>, kernel: K) -> K::Out {
    kernel.run(s)
}

type F = __m512;
type I = __m512i;

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

impl<const BF16: bool> Simd for Avx512<BF16> {
    type F = F;
    type I = I;
    const ACCUMULATORS: usize = 16;
    const BF16_DOTS: bool = BF16;
    const BYTE_DOTS: bool = true;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        // SAFETY: `detect` found every feature that the functions are compiled for.
        unsafe {
            match K::USES {
                Uses::Pairs if BF16 => with_bf16(Avx512(()), kernel),
                _ => plain(Avx512(()), kernel),
            }
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, x: &T, ahead: usize) {
        let address = std::ptr::from_ref(x).cast::<i8>().wrapping_add(ahead);
        // SAFETY: `detect` checked the CPU features; prefetching any address, mapped or not, affects only caches.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address) }
    }
    ops! {
        splat(x: f32) -> F = _mm512_set1_ps(x);
        add(a: F, b: F) -> F = _mm512_add_ps(a, b);
        sub(a: F, b: F) -> F = _mm512_sub_ps(a, b);
        mul(a: F, b: F) -> F = _mm512_mul_ps(a, b);
        div(a: F, b: F) -> F = _mm512_div_ps(a, b);
        fma(a: F, b: F, c: F) -> F = _mm512_fmadd_ps(a, b, c);
        max(a: F, b: F) -> F = _mm512_max_ps(a, b);
        round(a: F) -> F = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        splat_i(x: i32) -> I = _mm512_set1_epi32(x);
        dot4(acc: I, unsigned: I, signed: I) -> I = _mm512_dpbusd_epi32(acc, unsigned, signed);
        or(a: I, b: I) -> I = _mm512_or_si512(a, b);
        xor(a: I, b: I) -> I = _mm512_xor_si512(a, b);
        add_i(a: I, b: I) -> I = _mm512_add_epi32(a, b);
        sub_i(a: I, b: I) -> I = _mm512_sub_epi32(a, b);
        mul_i(a: I, b: I) -> I = _mm512_mullo_epi32(a, b);
        shift_left(x: I, n: u32) -> I = _mm512_sllv_epi32(x, _mm512_set1_epi32(n.cast_signed()));
        times_256(x: I) -> I = _mm512_slli_epi32::<8>(x);
        over_256(x: I) -> I = _mm512_srai_epi32::<8>(x);
        to_f32(x: I) -> F = _mm512_cvtepi32_ps(x);
        to_i32(x: F) -> I = _mm512_cvtps_epi32(x);
        as_floats(x: I) -> F = _mm512_castsi512_ps(x);
        sum(x: F) -> f32 = _mm512_reduce_add_ps(x);
        largest(x: F) -> f32 = _mm512_reduce_max_ps(x);
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn store(self, x: F, out: &mut [f32; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_loadu_ps(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    fn scale_by_power(self, a: F, n: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let tiny = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(n, _mm512_set1_ps(-126.0));
            _mm512_mask_mov_ps(_mm512_scalef_ps(a, n), tiny, _mm512_setzero_ps())
        }
    }
    // With instructions that take the fraction, of −∞ too, and round the exponent down.
    #[inline(always)]
    fn exp2_for_bf16(self, x: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x);
            let p = self.fma(self.splat(0.078_024_52), f, self.splat(0.226_067_17));
            let p = self.fma(p, f, self.splat(0.695_833_5));
            let p = self.fma(p, f, self.splat(0.999_925_2));
            // Not less: NaN stays.
            let some = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(-126.0));
            _mm512_maskz_scalef_ps(some, p, x)
        }
    }
    #[inline(always)]
    fn mul_nonzero(self, a: F, b: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(a, _mm512_setzero_ps());
            _mm512_maskz_mul_ps(some, a, b)
        }
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn dot2(self, acc: F, a: I, b: I) -> F {
        if BF16 {
            // SAFETY: `detect` checked the CPU features, bf16 included; the vectors are only renamed.
            unsafe {
                let pair = |x: I| std::mem::transmute::<I, __m512bh>(x);
                _mm512_dpbf16_ps(acc, pair(a), pair(b))
            }
        } else {
            let ((a0, a1), (b0, b1)) = (self.widen_pairs(a), self.widen_pairs(b));
            self.fma(a1, b1, self.fma(a0, b0, acc))
        }
    }
    #[inline(always)]
    fn byte<const N: u32>(self, x: I) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            _mm512_and_si512(_mm512_srlv_epi32(x, _mm512_set1_epi32(8 * N as i32)), _mm512_set1_epi32(255))
        }
    }
    #[inline(always)]
    fn field(self, x: I, at: u32, bits: u32, to: u32) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let mask = _mm512_set1_epi8((((1u32 << bits) - 1) << to) as i8);
            let by = _mm_cvtsi32_si128(at.abs_diff(to).cast_signed());
            _mm512_and_si512(if at >= to { _mm512_srl_epi16(x, by) } else { _mm512_sll_epi16(x, by) }, mask)
        }
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: I) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, x)
        }
    }
    #[inline(always)]
    fn sixes(self, [a, b, c]: [I; 3]) -> [I; 4] {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let mask = _mm512_set1_epi8(0x3f);
            let low = |x| _mm512_and_si512(x, mask);
            let [a2, b2, c2] = [0x03, 0x0c, 0x30].map(|mask| _mm512_set1_epi8(mask));
            let upper = _mm512_and_si512(_mm512_srli_epi16::<6>(a), a2);
            // 0xf8: the first, or the two others' common bits.
            let upper = _mm512_ternarylogic_epi32::<0xf8>(upper, _mm512_srli_epi16::<4>(b), b2);
            let upper = _mm512_ternarylogic_epi32::<0xf8>(upper, _mm512_srli_epi16::<2>(c), c2);
            [low(a), low(b), low(c), upper]
        }
    }
    #[inline(always)]
    fn store_low_bytes(self, x: I, out: &mut [u8; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x)) }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn widen_pairs(self, x: I) -> (F, F) {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let high = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(high))
        }
    }
    #[inline(always)]
    fn cut_pairs(self, even: F, odd: F) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let odd = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(0xffff_0000u32 as i32));
            _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(even)), odd)
        }
    }
    #[inline(always)]
    fn round_pairs(self, even: F, odd: F) -> I {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let half = _mm512_set1_epi32(0x8000);
            let even = _mm512_srli_epi32::<16>(_mm512_add_epi32(_mm512_castps_si512(even), half));
            let odd = _mm512_add_epi32(_mm512_castps_si512(odd), half);
            // 0xf8: the first, or the two others' common bits.
            _mm512_ternarylogic_epi32::<0xf8>(even, odd, _mm512_set1_epi32(0xffff_0000u32 as i32))
        }
    }
    #[inline(always)]
    fn cut(self, x: F) -> F {
        // SAFETY: `detect` checked the CPU features.
        unsafe {
            let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), upper))
        }
    }
    #[inline(always)]
    fn load_i(self, x: &[u32; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut [u8; 64]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
    }
    #[inline(always)]
    fn store_i(self, x: I, out: &mut [u32; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the vector.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
    }
}
