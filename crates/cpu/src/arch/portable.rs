//! Portable implementation: arrays, which the compiler vectorises where it can.
use super::{Kernel, Simd};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

#[inline(always)]
fn each<T: Copy>(f: impl FnMut(usize) -> T) -> [T; 16] {
    std::array::from_fn(f)
}

#[inline(always)]
fn bytes(x: I) -> [[u8; 4]; 16] {
    each(|i| x[i].to_le_bytes())
}

#[inline(always)]
fn half_at(x: &[u8; 32], i: usize) -> u16 {
    u16::from_le_bytes([x[2 * i], x[2 * i + 1]])
}

type F = [f32; 16];
type I = [i32; 16];

/// Operations that are one expression: name, arguments, result.
macro_rules! ops {
    ($($name:ident($($x:ident: $X:ty),*) -> $Y:ty = $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($x: $X),*) -> $Y {
                $body
            }
        )*
    };
}

impl Simd for Portable {
    type F = F;
    type I = I;
    const ACCUMULATORS: usize = 4;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }

    #[inline(always)]
    fn prefetch<T>(self, _: &T, _: usize) {}
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; 16]
    }
    ops! {
        load(x: &[f32; 16]) -> F = *x;
        load_f16(x: &[u8; 32]) -> F = each(|i| widen(half_at(x, i)));
        load_bf16(x: &[u8; 32]) -> F = each(|i| f32::from_bits(u32::from(half_at(x, i)) << 16));
        add(a: F, b: F) -> F = each(|i| a[i] + b[i]);
        sub(a: F, b: F) -> F = each(|i| a[i] - b[i]);
        mul(a: F, b: F) -> F = each(|i| a[i] * b[i]);
        div(a: F, b: F) -> F = each(|i| a[i] / b[i]);
        max(a: F, b: F) -> F = each(|i| if a[i] > b[i] { a[i] } else { b[i] });
        mul_nonzero(a: F, b: F) -> F = each(|i| if a[i] == 0.0 { 0.0 } else { a[i] * b[i] });
        or(a: I, b: I) -> I = each(|i| a[i] | b[i]);
        xor(a: I, b: I) -> I = each(|i| a[i] ^ b[i]);
        add_i(a: I, b: I) -> I = each(|i| a[i].wrapping_add(b[i]));
        sub_i(a: I, b: I) -> I = each(|i| a[i].wrapping_sub(b[i]));
        mul_i(a: I, b: I) -> I = each(|i| a[i].wrapping_mul(b[i]));
        shift_left(x: I, n: u32) -> I = each(|i| x[i] << (n & 31));
        times_256(x: I) -> I = each(|i| x[i] << 8);
        over_256(x: I) -> I = each(|i| x[i] >> 8);
        to_f32(x: I) -> F = each(|i| x[i] as f32);
        load_i8(x: &[u8; 16]) -> I = each(|i| i32::from(x[i] as i8));
    }
    #[inline(always)]
    fn store(self, x: F, out: &mut [f32; 16]) {
        *out = x;
    }
    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> F {
        each(|i| f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]))
    }
    // Two roundings: without a hardware instruction, a single rounding would be a call into the C library.
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn round(self, a: F) -> F {
        // Adding and subtracting 2²³ rounds smaller values; larger ones are integral already.
        each(|i| {
            let big = 8_388_608.0f32.copysign(a[i]);
            if a[i].abs() < 8_388_608.0 { (a[i] + big) - big } else { a[i] }
        })
    }
    #[inline(always)]
    fn scale_by_power(self, a: F, n: F) -> F {
        each(|i| {
            let exponent = n[i].clamp(-127.0, 127.0) as i32 + 127;
            a[i] * f32::from_bits((exponent as u32) << 23)
        })
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        [x; 16]
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> I {
        each(|i| i32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]))
    }
    #[inline(always)]
    fn dot4(self, acc: I, unsigned: I, signed: I) -> I {
        let part =
            |j: u32| each(|i| ((unsigned[i] >> (8 * j)) & 255) * i32::from((signed[i] >> (8 * j)) as i8));
        let (a, b, c, d) = (part(0), part(1), part(2), part(3));
        each(|i| acc[i].wrapping_add(a[i] + b[i] + c[i] + d[i]))
    }
    #[inline(always)]
    fn dot2(self, acc: F, a: I, b: I) -> F {
        let ((a0, a1), (b0, b1)) = (self.widen_pairs(a), self.widen_pairs(b));
        self.fma(a1, b1, self.fma(a0, b0, acc))
    }
    #[inline(always)]
    fn byte<const N: u32>(self, x: I) -> I {
        each(|i| x[i] >> (8 * N) & 255)
    }
    #[inline(always)]
    fn field(self, x: I, at: u32, bits: u32, to: u32) -> I {
        let mask = (((1 << bits) - 1) << to) * 0x0101_0101;
        each(|i| {
            let x = x[i] as u32;
            ((if at >= to { x >> (at - to) } else { x << (to - at) }) & mask) as i32
        })
    }
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], x: I) -> I {
        each(|i| i32::from_le_bytes(x[i].to_le_bytes().map(|code| table[usize::from(code & 15)])))
    }
    #[inline(always)]
    fn sixes(self, [a, b, c]: [I; 3]) -> [I; 4] {
        let low = |x: I| each(|i| x[i] & 0x3f3f_3f3f);
        let upper = each(|i| a[i] >> 6 & 0x0303_0303 | b[i] >> 4 & 0x0c0c_0c0c | c[i] >> 2 & 0x3030_3030);
        [low(a), low(b), low(c), upper]
    }
    #[inline(always)]
    fn to_i32(self, x: F) -> I {
        let rounded = self.round(x);
        each(|i| rounded[i] as i32)
    }
    #[inline(always)]
    fn store_low_bytes(self, x: I, out: &mut [u8; 16]) {
        *out = each(|i| bytes(x)[i][0]);
    }
    #[inline(always)]
    fn widen_pairs(self, x: I) -> (F, F) {
        let bits = each(|i| x[i] as u32);
        (each(|i| f32::from_bits(bits[i] << 16)), each(|i| f32::from_bits(bits[i] & 0xffff_0000)))
    }
    #[inline(always)]
    fn cut_pairs(self, even: F, odd: F) -> I {
        each(|i| (even[i].to_bits() >> 16 | odd[i].to_bits() & 0xffff_0000).cast_signed())
    }
    #[inline(always)]
    fn round_pairs(self, even: F, odd: F) -> I {
        let rounded = |x: f32| x.to_bits().wrapping_add(0x8000);
        each(|i| (rounded(even[i]) >> 16 | rounded(odd[i]) & 0xffff_0000).cast_signed())
    }
    #[inline(always)]
    fn cut(self, x: F) -> F {
        each(|i| f32::from_bits(x[i].to_bits() & 0xffff_0000))
    }
    #[inline(always)]
    fn as_floats(self, x: I) -> F {
        each(|i| f32::from_bits(x[i].cast_unsigned()))
    }
    #[inline(always)]
    fn load_i(self, x: &[u32; 16]) -> I {
        each(|i| x[i].cast_signed())
    }
    #[inline(always)]
    fn store_bytes(self, x: I, out: &mut [u8; 64]) {
        out.as_chunks_mut().0.iter_mut().zip(x).for_each(|(out, x)| *out = x.to_le_bytes());
    }
    #[inline(always)]
    fn store_i(self, x: I, out: &mut [u32; 16]) {
        *out = each(|i| x[i].cast_unsigned());
    }
}

/// Converts f16 to f32 without branches, so that a loop of it vectorises on any machine: shifts the fields into place,
/// then corrects the exponent bias by a multiplication, which also normalises subnormals.
#[inline(always)]
pub fn widen(code: u16) -> f32 {
    let code = u32::from(code);
    let magnitude = (code & 0x7fff) << 13;
    let finite = f32::from_bits(magnitude) * f32::from_bits(0x7780_0000); // 2^112
    let special = f32::from_bits(magnitude | 0x7f80_0000); // infinite or NaN
    let value = if code & 0x7c00 == 0x7c00 { special } else { finite };
    f32::from_bits(value.to_bits() | (code & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn every_f16_widens_as_the_half_crate_says() {
        for code in 0..=u16::MAX {
            let (found, expected) = (widen(code), f16::from_bits(code).to_f32());
            let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
            assert!(same, "{code:#06x} became {found}, not {expected}");
        }
    }
}
