//! Reading and nothing else: what a kernel that must read so many bytes is measured against.
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd};
use crate::pages::Pages;
use std::time::{Duration, Instant};

/// Bytes a thread takes at once.
const PART: usize = 256 << 10;

/// Memory to be read, on the same pages as caches and weights.
pub struct Stream {
    pages: Pages,
    sums: Vec<f32>,
}

impl Stream {
    /// `bytes` bytes, written once by the threads that read them. `Err` is what the system refused.
    pub fn new(compute: &Compute, bytes: usize) -> Result<Self, u64> {
        let mut pages = Pages::new(bytes.next_multiple_of(PART))?;
        let mut nothing = vec![(); compute.threads.n()];
        compute.threads.parts(pages.bytes_mut(), PART, &mut nothing, |_, part, ()| part.fill(0));
        let sums = vec![0.0; pages.bytes().len() / PART];
        Ok(Stream { pages, sums })
    }

    pub fn bytes(&self) -> usize {
        self.pages.bytes().len()
    }

    /// Read everything once, on all threads.
    pub fn read(&mut self, compute: &Compute) -> Duration {
        let bytes = self.pages.bytes();
        let mut nothing = vec![(); compute.threads.n()];
        let start = Instant::now();
        compute.threads.parts(&mut self.sums, 1, &mut nothing, |i, sum, ()| {
            sum[0] = compute.isa.run(Read(&bytes[i * PART..(i + 1) * PART]));
        });
        let taken = start.elapsed();
        // The sums are used, so the reading was not for nothing.
        assert!(std::hint::black_box(&self.sums).iter().all(|x| *x == 0.0), "zeroed memory");
        taken
    }
}

struct Read<'r>(&'r [u8]);

impl Kernel for Read<'_> {
    type Out = f32;
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
            let last = stream.bytes() - 1;
            stream.pages.bytes_mut()[last] = 0x40; // 2.0
            let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stream.read(&compute)));
            assert!(found.is_err(), "{isa}: the last byte was not read");
        }
    }
}
