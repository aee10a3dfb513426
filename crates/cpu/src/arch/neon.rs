//! NEON, which every 64-bit ARM CPU has. A vector takes four registers.
//!
//! Products of bytes are one instruction where both sides are signed (`dotprod`: Armv8.2, Apple's M1) or where one is unsigned
//! (`i8mm`: Armv8.6, Apple's M2, Graviton 3). They are assembly, as is the conversion of f16, because
//! Rust's intrinsics for them are not stable or too new for kvist's oldest Rust.
use super::products::dot_quads;
use super::{Kernel, Simd, Uses};
use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

/// How bytes are multiplied: widened to words; signed by signed; unsigned by signed.
pub const WORDS: u8 = 0;
pub const DOTPROD: u8 = 1;
pub const I8MM: u8 = 2;

/// Proof that the CPU supports it; created only by [`detect`](Self::detect), or from one that has more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon<const BYTES: u8>(());

impl<const BYTES: u8> Neon<BYTES> {
    pub fn detect() -> Option<Self> {
        let has = is_aarch64_feature_detected!("neon")
            && (BYTES != DOTPROD || is_aarch64_feature_detected!("dotprod"))
            && (BYTES != I8MM || is_aarch64_feature_detected!("i8mm"));
        has.then_some(Self(()))
    }
}

/// NEON belongs to the architecture: everything is compiled for it.
#[inline(never)]
fn plain<K: Kernel>(s: Neon<WORDS>, kernel: K) -> K::Out {
    kernel.run(s)
}

#[target_feature(enable = "neon,dotprod")]
fn with_dotprod<K: Kernel>(s: Neon<DOTPROD>, kernel: K) -> K::Out {
    kernel.run(s)
}

#[target_feature(enable = "neon,i8mm")]
fn with_i8mm<K: Kernel>(s: Neon<I8MM>, kernel: K) -> K::Out {
    kernel.run(s)
}

type F = [float32x4_t; 4];
type I = [int32x4_t; 4];

/// One result per register.
#[inline(always)]
fn each<T>(f: impl Fn(usize) -> T) -> [T; 4] {
    [f(0), f(1), f(2), f(3)]
}

/// The sums of products of four signed bytes, added to `acc`.
///
/// # Safety
/// The CPU has `dotprod`.
#[inline(always)]
unsafe fn sdot(acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = acc;
    // SAFETY: the caller says that the CPU has the instruction, which touches registers only.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum, a = in(vreg) a, b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// The same of unsigned and signed bytes.
///
/// # Safety
/// The CPU has `i8mm`.
#[inline(always)]
unsafe fn usdot(acc: int32x4_t, unsigned: uint8x16_t, signed: int8x16_t) -> int32x4_t {
    let mut sum = acc;
    // SAFETY: the caller says that the CPU has the instruction, which touches registers only.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "usdot {sum:v}.4s, {u:v}.16b, {s:v}.16b",
            sum = inout(vreg) sum, u = in(vreg) unsigned, s = in(vreg) signed,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// f16 as f32.
#[inline(always)]
fn of_halves(x: uint16x4_t) -> float32x4_t {
    let wide;
    // SAFETY: every CPU of this architecture has NEON; the instruction touches registers only.
    unsafe {
        asm!(
            "fcvtl {wide:v}.4s, {x:v}.4h", wide = out(vreg) wide, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    wide
}

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

/// The upper half of every lane.
#[inline(always)]
fn upper_half(x: uint32x4_t) -> uint32x4_t {
    // SAFETY: every CPU of this architecture has NEON.
    unsafe { vandq_u32(x, vdupq_n_u32(0xffff_0000)) }
}

/// The upper halves of two lanes in one.
#[inline(always)]
fn pair(even: uint32x4_t, odd: uint32x4_t) -> int32x4_t {
    // SAFETY: every CPU of this architecture has NEON.
    unsafe { vreinterpretq_s32_u32(vsriq_n_u32::<16>(odd, even)) }
}

/// A function of bytes, register by register.
#[inline(always)]
fn of_bytes(x: I, f: impl Fn(uint8x16_t) -> uint8x16_t) -> I {
    // SAFETY: every CPU of this architecture has NEON; registers are only renamed.
    each(|i| unsafe { vreinterpretq_s32_u8(f(vreinterpretq_u8_s32(x[i]))) })
}

impl<const BYTES: u8> Simd for Neon<BYTES> {
    type F = F;
    type I = I;
    const ACCUMULATORS: usize = 4;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match (K::USES, BYTES) {
            // SAFETY: `detect` found the features that the function is compiled for.
            (Uses::Bytes | Uses::Pairs, I8MM) => unsafe { with_i8mm(Neon(()), kernel) },
            // SAFETY: the same.
            (Uses::Bytes | Uses::Pairs, DOTPROD) => unsafe { with_dotprod(Neon(()), kernel) },
            _ => plain(Neon(()), kernel),
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, x: &T, ahead: usize) {
        let address = std::ptr::from_ref(x).cast::<u8>().wrapping_add(ahead);
        // SAFETY: prefetching any address, mapped or not, affects only caches.
        unsafe {
            asm!("prfm pldl2keep, [{0}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
    }
    ops! {
        splat(x: f32) -> F = [vdupq_n_f32(x); 4];
        add(a: F, b: F) -> F = each(|i| vaddq_f32(a[i], b[i]));
        sub(a: F, b: F) -> F = each(|i| vsubq_f32(a[i], b[i]));
        mul(a: F, b: F) -> F = each(|i| vmulq_f32(a[i], b[i]));
        div(a: F, b: F) -> F = each(|i| vdivq_f32(a[i], b[i]));
        fma(a: F, b: F, c: F) -> F = each(|i| vfmaq_f32(c[i], a[i], b[i]));
        // The machine's own maximum is NaN if either is.
        max(a: F, b: F) -> F = each(|i| vbslq_f32(vcgtq_f32(a[i], b[i]), a[i], b[i]));
        round(a: F) -> F = each(|i| vrndnq_f32(a[i]));
        mul_nonzero(a: F, b: F) -> F = each(|i| {
            let product = vreinterpretq_u32_f32(vmulq_f32(a[i], b[i]));
            vreinterpretq_f32_u32(vbicq_u32(product, vceqzq_f32(a[i])))
        });
        scale_by_power(a: F, n: F) -> F = each(|i| {
            let n = vcvtnq_s32_f32(vmaxnmq_f32(n[i], vdupq_n_f32(-127.0)));
            let power = vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)));
            vmulq_f32(a[i], vreinterpretq_f32_s32(power))
        });
        splat_i(x: i32) -> I = [vdupq_n_s32(x); 4];
        or(a: I, b: I) -> I = each(|i| vorrq_s32(a[i], b[i]));
        xor(a: I, b: I) -> I = each(|i| veorq_s32(a[i], b[i]));
        field(x: I, at: u32, bits: u32, to: u32) -> I = {
            let up = vdupq_n_s8((to.cast_signed() - at.cast_signed()) as i8);
            let mask = vdupq_n_u8((((1u32 << bits) - 1) << to) as u8);
            of_bytes(x, |x| vandq_u8(vshlq_u8(x, up), mask))
        };
        add_i(a: I, b: I) -> I = each(|i| vaddq_s32(a[i], b[i]));
        sub_i(a: I, b: I) -> I = each(|i| vsubq_s32(a[i], b[i]));
        mul_i(a: I, b: I) -> I = each(|i| vmulq_s32(a[i], b[i]));
        shift_left(x: I, n: u32) -> I = each(|i| vshlq_s32(x[i], vdupq_n_s32(n.cast_signed())));
        times_256(x: I) -> I = each(|i| vshlq_n_s32::<8>(x[i]));
        over_256(x: I) -> I = each(|i| vshrq_n_s32::<8>(x[i]));
        to_f32(x: I) -> F = each(|i| vcvtq_f32_s32(x[i]));
        to_i32(x: F) -> I = each(|i| vcvtnq_s32_f32(x[i]));
        widen_pairs(x: I) -> (F, F) = (
            each(|i| vreinterpretq_f32_s32(vshlq_n_s32::<16>(x[i]))),
            each(|i| vreinterpretq_f32_u32(upper_half(vreinterpretq_u32_s32(x[i])))),
        );
        cut_pairs(even: F, odd: F) -> I = each(|i| {
            pair(vreinterpretq_u32_f32(even[i]), vreinterpretq_u32_f32(odd[i]))
        });
        round_pairs(even: F, odd: F) -> I = each(|i| {
            let rounded = |x| vaddq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x8000));
            pair(rounded(even[i]), rounded(odd[i]))
        });
        cut(x: F) -> F = each(|i| vreinterpretq_f32_u32(upper_half(vreinterpretq_u32_f32(x[i]))));
        as_floats(x: I) -> F = each(|i| vreinterpretq_f32_s32(x[i]));
        // The order of the default.
        sum(x: F) -> f32 = {
            let four = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        };
        largest(x: F) -> f32 = vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x[0], x[2]), vmaxnmq_f32(x[1], x[3])));
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> F {
        // SAFETY: `detect` checked the CPU features; the array is as long as the four registers.
        each(|i| unsafe { vld1q_f32(x.as_ptr().add(4 * i)) })
    }
    #[inline(always)]
    fn store(self, x: F, out: &mut [f32; 16]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            // SAFETY: `detect` checked the CPU features; the chunk is as long as the register.
            unsafe { vst1q_f32(out.as_mut_ptr(), x) }
        }
    }
    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> F {
        self.as_floats(self.load_bytes(x))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> F {
        // SAFETY: `detect` checked the CPU features; the array has eight bytes for each register.
        each(|i| unsafe { of_halves(vreinterpret_u16_u8(vld1_u8(x.as_ptr().add(8 * i)))) })
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> F {
        each(|i| {
            // SAFETY: `detect` checked the CPU features; the array has eight bytes for each register.
            unsafe {
                let codes = vreinterpret_u16_u8(vld1_u8(x.as_ptr().add(8 * i)));
                vreinterpretq_f32_u32(vshll_n_u16::<16>(codes))
            }
        })
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the four registers.
        each(|i| unsafe { vreinterpretq_s32_u8(vld1q_u8(x.as_ptr().add(16 * i))) })
    }
    #[inline(always)]
    fn dot4(self, acc: I, unsigned: I, signed: I) -> I {
        // SAFETY: `detect` checked the CPU features, those of `BYTES` included.
        unsafe {
            each(|i| {
                let (u, s) = (vreinterpretq_u8_s32(unsigned[i]), vreinterpretq_s8_s32(signed[i]));
                match BYTES {
                    I8MM => usdot(acc[i], u, s),
                    // u = (u − 128) + 64 + 64
                    DOTPROD => {
                        let less = vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(128)));
                        let half = vdupq_n_s8(64);
                        sdot(sdot(sdot(acc[i], half, s), half, s), less, s)
                    }
                    // A product of two such bytes fits into a word.
                    _ => {
                        let low = vmulq_s16(
                            vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u))),
                            vmovl_s8(vget_low_s8(s)),
                        );
                        let high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(u)), vmovl_high_s8(s));
                        vaddq_s32(acc[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
                    }
                }
            })
        }
    }
    // Codes of less than 8 bits are signed numbers, too; those of 8 bits are without their zero.
    #[inline(always)]
    fn dot_codes<const Q: usize, const N: usize>(
        self,
        bits: u32,
        codes: &[I; Q],
        x: impl Fn(usize, usize) -> i32,
        start: [I; N],
    ) -> [I; N] {
        if BYTES != DOTPROD {
            return dot_quads(self, codes, x, start);
        }
        let mut sums = if bits == 8 { [self.splat_i(0); N] } else { start };
        for (q, codes) in codes.iter().enumerate() {
            for n in 0..N {
                for ((sum, codes), x) in sums[n].iter_mut().zip(codes).zip(self.splat_i(x(q, n))) {
                    // SAFETY: `detect` checked the CPU features, `dotprod` included.
                    unsafe {
                        let codes = vreinterpretq_u8_s32(*codes);
                        let codes = if bits == 8 { veorq_u8(codes, vdupq_n_u8(128)) } else { codes };
                        *sum = sdot(*sum, vreinterpretq_s8_u8(codes), vreinterpretq_s8_s32(x));
                    }
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn dot2(self, acc: F, a: I, b: I) -> F {
        let ((a0, a1), (b0, b1)) = (self.widen_pairs(a), self.widen_pairs(b));
        self.fma(a1, b1, self.fma(a0, b0, acc))
    }
    #[inline(always)]
    fn byte<const N: u32>(self, x: I) -> I {
        each(|i| {
            // SAFETY: `detect` checked the CPU features.
            unsafe {
                let down = vshlq_u32(vreinterpretq_u32_s32(x[i]), vdupq_n_s32(-8 * N.cast_signed()));
                vreinterpretq_s32_u32(vandq_u32(down, vdupq_n_u32(255)))
            }
        })
    }
    #[inline(always)]
    fn sixes(self, [a, b, c]: [I; 3]) -> [I; 4] {
        let low = |x| self.field(x, 0, 6, 0);
        let upper = self.or(self.field(a, 6, 2, 0), self.or(self.field(b, 6, 2, 2), self.field(c, 6, 2, 4)));
        [low(a), low(b), low(c), upper]
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: I) -> I {
        // SAFETY: `detect` checked the CPU features; the table is as long as the register.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            of_bytes(x, |x| vqtbl1q_u8(table, x))
        }
    }
    #[inline(always)]
    fn store_low_bytes(self, x: I, out: &mut [u8; 16]) {
        // SAFETY: `detect` checked the CPU features; the array is as long as the register.
        unsafe {
            let words = |a, b| vcombine_s16(vmovn_s32(a), vmovn_s32(b));
            let bytes = vcombine_s8(vmovn_s16(words(x[0], x[1])), vmovn_s16(words(x[2], x[3])));
            vst1q_s8(out.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the register.
        unsafe {
            let bytes = vld1q_s8(x.as_ptr().cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ]
        }
    }
    #[inline(always)]
    fn load_i(self, x: &[u32; 16]) -> I {
        // SAFETY: `detect` checked the CPU features; the array is as long as the four registers.
        each(|i| unsafe { vreinterpretq_s32_u32(vld1q_u32(x.as_ptr().add(4 * i))) })
    }
    #[inline(always)]
    fn store_i(self, x: I, out: &mut [u32; 16]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            // SAFETY: `detect` checked the CPU features; the chunk is as long as the register.
            unsafe { vst1q_u32(out.as_mut_ptr(), vreinterpretq_u32_s32(x)) }
        }
    }
    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut [u8; 64]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: `detect` checked the CPU features; the chunk is as long as the register.
            unsafe { vst1q_u8(out.as_mut_ptr(), vreinterpretq_u8_s32(x)) }
        }
    }
}
