//! The operations that every instruction set has, and the code that is compiled for each.
use super::products::{
    dot_quads, dot_two_bytes, dot_words_in_lanes, store_two_bytes, sum_of_two_bytes, word_pairs_in_lanes,
};

/// Lanes per vector: f32, i32, or four bytes each.
pub const LANES: usize = 16;

/// One instruction set: operations on vectors of [`LANES`] lanes.
pub trait Simd: Copy + Send + Sync + 'static {
    /// f32 lanes.
    type F: Copy;
    /// i32 lanes, or 64 bytes.
    type I: Copy;
    /// Number of accumulators that a kernel can keep in registers in addition to its loads.
    const ACCUMULATORS: usize;
    /// True if products of bf16 pairs ([`dot2`](Self::dot2)) exist and are faster than widening.
    const BF16_DOTS: bool = false;
    /// True if products of bytes ([`dot4`](Self::dot4)) are one instruction, and fastest with as few scales as possible.
    const BYTE_DOTS: bool = false;
    /// True if [`dot_units`](Self::dot_units) multiplies words of 16 bits, and not two bytes one after the other.
    const WORD_DOTS: bool = false;
    /// True if pairs of words ([`dot_words`](Self::dot_words)) are the fastest products of two numbers each. On cores that start one
    /// multiplication of words per cycle they take as long as those of f32.
    const WORD_PAIRS: bool = false;
    /// Most tokens (1, 2 or 4) whose products with the same codes share loads: see [`together`](super::together).
    const TOGETHER: usize = 1;
    /// The sums that [`dot_units`](Self::dot_units) keeps: a register of lanes each.
    const UNIT_SUMS: usize = if Self::WORD_DOTS { 1 } else { 2 };

    /// Runs `kernel` in a function compiled for this instruction set.
    fn run<K: Kernel>(self, kernel: K) -> K::Out;

    /// Prefetch hint for the cache line `ahead` bytes after `x`, into the second-level cache. The address need not be valid.
    ///
    /// Not into the first-level cache: a core waits for few lines there (24 on Zen 4), so it would read 64 bytes * 24 per latency of
    /// memory, half of what it can.
    fn prefetch<T>(self, x: &T, ahead: usize);

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; 16]) -> Self::F;
    fn store(self, x: Self::F, out: &mut [f32; 16]);
    fn load_f32_bytes(self, x: &[u8; 64]) -> Self::F;
    fn load_f16(self, x: &[u8; 32]) -> Self::F;
    fn load_bf16(self, x: &[u8; 32]) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once if the machine supports it.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Returns `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, a: Self::F) -> Self::F;
    /// `a * 2^n` for integral `n ≤ 127`; 0 where `n` is below −126.
    fn scale_by_power(self, a: Self::F, n: Self::F) -> Self::F;
    /// `a * b`, but 0 where `a` is 0, for any `b`.
    fn mul_nonzero(self, a: Self::F, b: Self::F) -> Self::F;

    fn splat_i(self, x: i32) -> Self::I;
    fn load_bytes(self, x: &[u8; 64]) -> Self::I;
    /// Per lane: `acc + Σ unsigned[j] * signed[j]` over the lane's four bytes.
    fn dot4(self, acc: Self::I, unsigned: Self::I, signed: Self::I) -> Self::I;
    /// Per lane, of `R` rows of units and `C` vectors of codes: adds `Σ codes[j] * units[j]` over the lane's four unsigned codes to
    /// `sums`, whose total is [`sum_of_units`](Self::sum_of_units). Every lane has the same units: four of ±32,639, of which
    /// `units(row, part)` are the two parts that [`quad_of_units`](super::quad_of_units) writes. Sums and total wrap.
    #[inline(always)]
    fn dot_units<const R: usize, const C: usize>(
        self,
        sums: &mut [[[Self::I; 2]; C]; R],
        codes: &[Self::I; C],
        units: impl Fn(usize, usize) -> i32,
    ) {
        dot_two_bytes(self, sums, codes, units);
    }
    #[inline(always)]
    fn sum_of_units(self, sums: [Self::I; 2]) -> Self::I {
        sum_of_two_bytes(self, sums)
    }
    /// Stores the units of sixteen lanes as four quads: the first parts of [`quad_of_units`](super::quad_of_units), and the second
    /// ones.
    #[inline(always)]
    fn store_units(self, units: Self::I, parts: [&mut [u8; 16]; 2]) {
        store_two_bytes(self, units, parts);
    }
    /// Per lane and of `N` tokens: `Σ (code − zero) · x` over `Q` quads of codes, four in a lane. All lanes have the same `x(quad,
    /// token)`, of −127 to 127. Codes have `bits` bits, and `start` is −zero · Σ x; of 8 bits the zero is 128.
    #[inline(always)]
    fn dot_codes<const Q: usize, const N: usize>(
        self,
        bits: u32,
        codes: &[Self::I; Q],
        x: impl Fn(usize, usize) -> i32,
        start: [Self::I; N],
    ) -> [Self::I; N] {
        let _ = bits;
        dot_quads(self, codes, x, start)
    }
    /// Per lane: adds `Σ codes[j] * x[j]` to `products`, over the lane's four codes of four bits and four signed bytes (±127), the same
    /// in every lane. Only [`add_nibbles`](Self::add_nibbles) knows what `products` are; they begin with zeros, and hold eight calls.
    #[inline(always)]
    fn dot_nibbles(self, products: Self::I, codes: Self::I, x: i32) -> Self::I {
        self.dot4(products, codes, self.splat_i(x))
    }
    /// `sums + products`, per lane.
    #[inline(always)]
    fn add_nibbles(self, sums: Self::I, products: Self::I) -> Self::I {
        self.add_i(sums, products)
    }
    /// Per lane, for bf16 pairs: `acc + a[0]*b[0] + a[1]*b[1]`.
    fn dot2(self, acc: Self::F, a: Self::I, b: Self::I) -> Self::F;
    /// Per lane, for pairs of signed words: `acc + a[0]*b[0] + a[1]*b[1]`, which wraps.
    #[inline(always)]
    fn dot_words(self, acc: Self::I, a: Self::I, b: Self::I) -> Self::I {
        dot_words_in_lanes(self, acc, a, b)
    }
    /// Pairs of the low words of both: of `even` in the lower half of every lane, of `odd` in the upper.
    #[inline(always)]
    fn word_pairs(self, even: Self::I, odd: Self::I) -> Self::I {
        word_pairs_in_lanes(self, even, odd)
    }
    /// Byte `N` of every lane, unsigned.
    fn byte<const N: u32>(self, x: Self::I) -> Self::I;
    /// From every byte, extracts `bits` bits starting at bit `at` and moves them to bit `to`.
    fn field(self, x: Self::I, at: u32, bits: u32, to: u32) -> Self::I;
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// Looks up every byte, which is less than 16, in the table.
    fn lookup(self, table: &[u8; 16], x: Self::I) -> Self::I;
    /// Unpacks four 6-bit codes from three bytes: the lower six bits of each byte, and a fourth code from their upper
    /// two bits, the first byte's lowest.
    fn sixes(self, x: [Self::I; 3]) -> [Self::I; 4];
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn mul_i(self, a: Self::I, b: Self::I) -> Self::I;
    /// `x * 2^n`.
    fn shift_left(self, x: Self::I, n: u32) -> Self::I;
    /// `x * 256`.
    fn times_256(self, x: Self::I) -> Self::I;
    /// `x / 256`, rounded down.
    fn over_256(self, x: Self::I) -> Self::I;
    fn to_f32(self, x: Self::I) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    fn to_i32(self, x: Self::F) -> Self::I;
    /// Stores the low byte of every lane.
    fn store_low_bytes(self, x: Self::I, out: &mut [u8; 16]);
    /// Sign-extends bytes to lanes.
    fn load_i8(self, x: &[u8; 16]) -> Self::I;
    /// The even and the odd bf16 of every lane's pair, widened.
    fn widen_pairs(self, x: Self::I) -> (Self::F, Self::F);
    /// Pairs of bf16, cut off instead of rounded: `even` in the lower half of every lane, `odd` in the upper.
    fn cut_pairs(self, even: Self::F, odd: Self::F) -> Self::I;
    /// Pairs of bf16, rounded to the nearest, halves away from 0: `even` in the lower half of every lane, `odd` in the upper.
    /// A NaN whose upper mantissa bits are all set, which no operation makes, may become a number.
    fn round_pairs(self, even: Self::F, odd: Self::F) -> Self::I;
    /// Every lane cut off to bf16. The difference to the lane is exact.
    fn cut(self, x: Self::F) -> Self::F;
    /// The same bits as floats.
    fn as_floats(self, x: Self::I) -> Self::F;
    fn load_i(self, x: &[u32; 16]) -> Self::I;
    fn store_i(self, x: Self::I, out: &mut [u32; 16]);
    fn store_bytes(self, x: Self::I, out: &mut [u8; 64]);

    /// The low half of every byte.
    #[inline(always)]
    fn low_nibbles(self, x: Self::I) -> Self::I {
        self.field(x, 0, 4, 0)
    }
    /// The high half of every byte.
    #[inline(always)]
    fn high_nibbles(self, x: Self::I) -> Self::I {
        self.field(x, 4, 4, 0)
    }
    /// Sum of the lanes, always in the same order.
    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        let mut lanes = [0.0; 16];
        self.store(x, &mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
        }
        lanes[0]
    }
    /// The largest lane; NaN may be dropped.
    #[inline(always)]
    fn largest(self, x: Self::F) -> f32 {
        let mut lanes = [0.0; 16];
        self.store(x, &mut lanes);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lanes[i] = if lanes[i + half] > lanes[i] { lanes[i + half] } else { lanes[i] };
            }
        }
        lanes[0]
    }
    /// `2^x` as mantissa minus 1, and integral exponent: `x = n + f`, `|f| ≤ 1/2`; the pair is `(2^f − 1, n)`, with a
    /// relative error below 2e-7 even for small `f`.
    #[inline(always)]
    fn exp2_parts(self, x: Self::F) -> (Self::F, Self::F) {
        let n = self.round(x);
        let f = self.sub(x, n);
        // 2^f by its series up to f^6; the next term is 1.2e-7 at f = 1/2.
        let mut p = self.splat(1.540_353e-4);
        for c in [1.333_355_8e-3, 9.618_129e-3, 5.550_411e-2, 2.402_265e-1, std::f32::consts::LN_2] {
            p = self.fma(p, f, self.splat(c));
        }
        (self.mul(p, f), n)
    }
    /// `2^x` for `x ≤ 127` with a relative error below 8e-5, which is a fiftieth of the last bit of bf16. Below −126
    /// it may be 0, and below −127 and for −∞ it is. NaN passes through.
    #[inline(always)]
    fn exp2_for_bf16(self, x: Self::F) -> Self::F {
        let x = self.max(self.splat(-1e30), x);
        let n = self.round(x);
        let f = self.sub(x, n);
        let p = self.fma(self.splat(0.055_171_67), f, self.splat(0.242_611_13));
        let p = self.fma(p, f, self.splat(0.693_260_99));
        self.scale_by_power(self.fma(p, f, self.splat(0.999_928_07)), n)
    }
    /// Clamps to `-limit ≤ x ≤ limit`; NaN passes through.
    #[inline(always)]
    fn clamp(self, x: Self::F, limit: f32) -> Self::F {
        let x = self.max(self.splat(-limit), x);
        let zero = self.splat(0.0);
        self.sub(zero, self.max(self.splat(-limit), self.sub(zero, x)))
    }
    /// `e^x`, constant beyond ±126 powers of two. NaN passes through.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let x = self.clamp(self.mul(x, self.splat(std::f32::consts::LOG2_E)), 126.0);
        let (mantissa, exponent) = self.exp2_parts(x);
        self.scale_by_power(self.add(mantissa, self.splat(1.0)), exponent)
    }
    /// `tanh x = (e^2x − 1) / (e^2x + 1)`. The numerator is computed directly from the series, so that it is accurate
    /// for small x. NaN passes through.
    #[inline(always)]
    fn tanh(self, x: Self::F) -> Self::F {
        let one = self.splat(1.0);
        // Beyond ±20 tanh is ±1 in f32.
        let x = self.clamp(x, 20.0);
        let (mantissa, exponent) = self.exp2_parts(self.mul(x, self.splat(2.0 * std::f32::consts::LOG2_E)));
        let power = self.scale_by_power(one, exponent);
        let numerator = self.fma(mantissa, power, self.sub(power, one));
        self.div(numerator, self.add(numerator, self.splat(2.0)))
    }
}

/// The products that a kernel uses. A kernel that declares too little runs slower products, its products of pairs round
/// differently, and [`Simd::dot_units`] may expect other quads than [`Isa::multiplies_words`](super::Isa::multiplies_words) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uses {
    /// Products of floats and of pairs of words alone.
    Floats,
    /// Products of bytes and of units, too ([`Simd::dot4`], [`Simd::dot_units`]).
    Bytes,
    /// Products of bytes and of pairs of bf16, too ([`Simd::dot2`]).
    Pairs,
}

/// Code that is compiled for each instruction set. `run` must be `#[inline(always)]`, and so must everything it calls:
/// a function that is not inlined is not compiled for the instruction set.
pub trait Kernel {
    type Out;
    /// Instruction sets that differ only in products that the kernel does not use share its code.
    const USES: Uses;
    fn run<S: Simd>(self, s: S) -> Self::Out;
}
