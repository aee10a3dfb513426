//! Measures peak read bandwidth, the limit for memory-bound kernels.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd, Uses};
use crate::pages::Pages;
use std::time::{Duration, Instant};

/// Bytes of a row of one head.
const ROW: usize = 128;
/// Bytes that a thread takes at once.
const PART: usize = 256 << 10;

/// Memory to read, on the same kind of pages as caches and weights.
pub struct Stream {
    pages: Pages,
    sums: Vec<f32>,
}

impl Stream {
    /// Allocates `bytes` bytes, written once by the threads that read them. `Err` is the number of bytes the system
    /// refused.
    pub fn new(compute: &Compute, bytes: usize) -> Result<Self, u64> {
        Stream::on(compute, bytes, true)
    }

    /// Like [`new`](Self::new), with or without huge pages.
    pub fn on(compute: &Compute, bytes: usize, huge_pages: bool) -> Result<Self, u64> {
        let mut pages = Pages::of(bytes.next_multiple_of(PART), huge_pages)?;
        let mut no_scratch = vec![(); compute.threads.n()];
        compute.threads.parts(pages.bytes_mut(), PART, &mut no_scratch, |_, part, ()| part.fill(0));
        let sums = vec![0.0; pages.bytes().len() / PART];
        Ok(Stream { pages, sums })
    }

    pub fn bytes(&self) -> usize {
        self.pages.bytes().len()
    }

    /// Reads everything once, on all threads.
    pub fn read(&mut self, compute: &Compute) -> Duration {
        self.timed(compute, |bytes, i| compute.isa.run(Read(&bytes[i * PART..(i + 1) * PART])))
    }

    /// Reads everything once as rows of 128 bytes (64 f16) of `heads` heads, head by head as attention does, from a
    /// token-major layout: the heads of a token are adjacent instead of the tokens of a head. `heads` divides 2,048.
    pub fn read_token_major(&mut self, compute: &Compute, heads: usize) -> Duration {
        let (rows, stride) = (PART / ROW, heads * ROW);
        // Part i covers `rows` tokens of head `i % heads`.
        self.timed(compute, |bytes, i| {
            let first = i / heads * rows * stride + i % heads * ROW;
            compute.isa.run(ReadRows { bytes: &bytes[first..], stride, rows })
        })
    }

    fn timed(&mut self, compute: &Compute, part: impl Fn(&[u8], usize) -> f32 + Sync) -> Duration {
        let bytes = self.pages.bytes();
        let mut no_scratch = vec![(); compute.threads.n()];
        let start = Instant::now();
        compute.threads.parts(&mut self.sums, 1, &mut no_scratch, |i, sum, ()| {
            sum[0] = part(bytes, i);
        });
        let taken = start.elapsed();
        // The sums are used, so that the compiler cannot drop the reads.
        assert!(std::hint::black_box(&self.sums).iter().all(|x| *x == 0.0), "zeroed memory");
        taken
    }
}

struct Read<'r>(&'r [u8]);

impl Kernel for Read<'_> {
    type Out = f32;
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let (lines, _) = self.0.as_chunks::<{ 4 * LANES }>().0.as_chunks::<4>();
        let mut sums = [s.splat(0.0); 4];
        for line in lines {
            for i in 0..4 {
                s.prefetch(&line[i], 4096);
                sums[i] = s.add(sums[i], s.load_f32_bytes(&line[i]));
            }
        }
        s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
    }
}

struct ReadRows<'r> {
    bytes: &'r [u8],
    stride: usize,
    rows: usize,
}

impl Kernel for ReadRows<'_> {
    type Out = f32;
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let mut sums = [s.splat(0.0); 2];
        for row in 0..self.rows {
            let line = self.bytes[row * self.stride..].as_chunks::<{ 4 * LANES }>().0;
            for i in 0..2 {
                s.prefetch(&line[i], 32 * self.stride);
                sums[i] = s.add(sums[i], s.load_f32_bytes(&line[i]));
            }
        }
        s.sum(s.add(sums[0], sums[1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Isa;

    #[test]
    fn every_byte_is_read() {
        for isa in Isa::available() {
            let compute = Compute::new(isa, 2);
            let mut stream = Stream::new(&compute, 3 * PART + 1).unwrap();
            assert_eq!(stream.bytes(), 4 * PART);
            stream.read(&compute);
            let whole = 4 * PART / (2 * PART) * 2 * PART;
            assert_eq!(stream.bytes(), whole, "two heads, whole parts");
            stream.read_token_major(&compute, 2);
            let last = stream.bytes() - 1;
            stream.pages.bytes_mut()[last] = 0x40; // 2.0
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stream.read(&compute)));
            assert!(found.is_err(), "{isa}: the last byte was not read");
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                stream.read_token_major(&compute, 2)
            }));
            assert!(found.is_err(), "{isa}: the last byte was not read token by token");
        }
    }
}
