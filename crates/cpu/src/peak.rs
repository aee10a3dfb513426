//! Measures peak arithmetic throughput, the limit for compute-bound kernels.
use crate::Compute;
use crate::arch::{Kernel, Simd, Uses};
use std::time::{Duration, Instant};

/// Products per chain. A thread runs several chains at once, one per register in use.
const STEPS: usize = 1 << 18;
/// Number of parts, so that a thread that starts late takes fewer.
const PARTS: usize = 16;

/// The operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// f32 times f32 plus f32: two operations per lane.
    F32,
    /// Two bf16 times two bf16, summed and added to f32 ([`Simd::dot2`]), or two words times two words, where those are faster
    /// ([`Simd::dot_words`]): four operations per lane.
    Pairs,
    /// Four bytes times four bytes, summed: eight operations per lane. [`Simd::dot4`] where that is one instruction, else
    /// [`Simd::dot_codes`] of codes of 8 bits, as linear layers multiply them; those of fewer bits are faster.
    Bytes,
}

/// Operations per second of all threads together, with operands that stay in registers.
pub fn operations_per_s(compute: &Compute, product: Product) -> f64 {
    let mut done = vec![0u64; PARTS];
    let mut no_scratch = vec![(); compute.threads.n()];
    let started = Instant::now();
    compute.threads.parts(&mut done, 1, &mut no_scratch, |_, done, ()| {
        done[0] = compute.isa.run(Chains(product));
    });
    done.iter().sum::<u64>() as f64 / started.elapsed().max(Duration::from_nanos(1)).as_secs_f64()
}

struct Chains(Product);

impl Kernel for Chains {
    /// Number of operations.
    type Out = u64;
    const USES: Uses = Uses::Pairs;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> u64 {
        // Enough chains to hide the latency of a product, and few enough to stay in registers.
        if S::ACCUMULATORS >= 16 { chains::<S, 16>(s, self.0) } else { chains::<S, 4>(s, self.0) }
    }
}

#[inline(always)]
fn chains<S: Simd, const N: usize>(s: S, product: Product) -> u64 {
    // Hide the values from the compiler.
    let (half, ones, halves, zero) = std::hint::black_box((0.5f32, [0x0101_0101; 4], [0x3f00_3f00; 4], 0));
    match product {
        Product::F32 => {
            let (x, mut sums) = (s.splat(half), [s.splat(half); N]);
            for _ in 0..STEPS {
                for sum in &mut sums {
                    *sum = s.fma(*sum, x, x);
                }
            }
            let total = sums.into_iter().map(|sum| s.sum(sum)).sum::<f32>();
            assert!(std::hint::black_box(total).is_finite(), "x becomes x / 2 + 1 / 2");
            (2 * 16 * N * STEPS) as u64
        }
        Product::Pairs if S::WORD_PAIRS => {
            /// As the kernel of attention: registers hold no more sums.
            const ROWS: usize = 6;
            let rows = std::hint::black_box([0x0001_0001; ROWS]);
            let (mut x, mut sums) = (s.splat_i(rows[0]), [s.splat_i(0); ROWS]);
            for _ in 0..STEPS {
                // Hidden, as in `Factors`.
                x = s.xor(x, s.splat_i(zero));
                for (sum, row) in sums.iter_mut().zip(&rows) {
                    *sum = s.dot_words(*sum, s.splat_i(*row), x);
                }
            }
            let total = sums.into_iter().map(|sum| s.sum(s.to_f32(sum))).sum::<f32>();
            assert_eq!(
                std::hint::black_box(total),
                (2 * 16 * ROWS * STEPS) as f32,
                "two ones per lane and step"
            );
            (4 * 16 * ROWS * STEPS) as u64
        }
        Product::Pairs => {
            let (mut factors, mut sums) = (Factors::new(s, halves), [s.splat(0.0); N]);
            for _ in 0..STEPS {
                factors.hide(s, zero);
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = s.dot2(*sum, factors.w[n % 4], factors.x);
                }
            }
            let total = sums.into_iter().map(|sum| s.sum(sum)).sum::<f32>();
            // Exact: all lanes have the same power of two.
            assert_eq!(
                std::hint::black_box(total),
                (16 * N * STEPS / 2) as f32,
                "two quarters per lane and step"
            );
            (4 * 16 * N * STEPS) as u64
        }
        Product::Bytes => {
            let (mut factors, mut sums) = (Factors::new(s, ones), [s.splat_i(0); N]);
            let mut codes = s.add_i(factors.x, s.splat_i(i32::from_le_bytes([128; 4])));
            for _ in 0..STEPS {
                if S::BYTE_DOTS {
                    factors.hide(s, zero);
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = s.dot4(*sum, factors.w[n % 4], factors.x);
                    }
                    continue;
                }
                // As linear layers multiply codes of 8 bits, whose zero is 128, with four tokens.
                codes = s.xor(codes, s.splat_i(zero));
                for sums in sums.as_chunks_mut::<4>().0 {
                    let start = [s.splat_i(-4 * 128); 4];
                    let found = s.dot_codes(8, &[codes], |_, token| ones[token], start);
                    for (sum, found) in sums.iter_mut().zip(found) {
                        *sum = s.add_i(*sum, found);
                    }
                }
            }
            let total = sums.into_iter().map(|sum| s.sum(s.to_f32(sum))).sum::<f32>();
            assert_eq!(
                std::hint::black_box(total),
                (4 * 16 * N * STEPS) as f32,
                "four ones per lane and step"
            );
            (8 * 16 * N * STEPS) as u64
        }
    }
}

/// Factors that the compiler must take for new ones in every step, and different ones in neighbouring chains: where a product takes
/// several instructions, it would compute all but the last only once.
struct Factors<S: Simd> {
    w: [S::I; 4],
    x: S::I,
}

impl<S: Simd> Factors<S> {
    #[inline(always)]
    fn new(s: S, lanes: [i32; 4]) -> Self {
        Factors { w: lanes.map(|lane| s.splat_i(lane)), x: s.splat_i(lanes[0]) }
    }
    /// `zero` is 0, which the compiler does not know.
    #[inline(always)]
    fn hide(&mut self, s: S, zero: i32) {
        let zero = s.splat_i(zero);
        self.x = s.xor(self.x, zero);
        for w in &mut self.w {
            *w = s.xor(*w, zero);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;

    #[test]
    fn chains_are_computed() {
        for isa in Isa::available() {
            let compute = Compute::new(isa, 2);
            for product in [Product::F32, Product::Pairs, Product::Bytes] {
                let rate = operations_per_s(&compute, product);
                assert!(rate.is_finite() && rate > 0.0, "{isa} {product:?}: {rate}");
            }
        }
    }
}
