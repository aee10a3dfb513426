//! Copies to memory that is not read soon, and prefetches. They need no detection: SSE2 is part of x86-64. Other CPUs copy as usual.

/// Copies past the caches. An ordinary store reads its cache line first and puts others out of the cache; large copies took twice the
/// time.
pub struct Uncached(());

impl Uncached {
    /// Runs `copies`. All of them are done, for every thread, when this returns or unwinds.
    pub fn run<R>(copies: impl FnOnce(&Uncached) -> R) -> R {
        struct Fence;
        impl Drop for Fence {
            fn drop(&mut self) {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: SSE is part of x86-64.
                unsafe {
                    std::arch::x86_64::_mm_sfence();
                }
            }
        }
        let _fence = Fence;
        copies(&Uncached(()))
    }

    /// Copies `from` to `to`, which are equally long: past the caches where `to` begins and ends with a cache line.
    #[inline]
    pub fn copy(&self, to: &mut [u8], from: &[u8]) {
        assert_eq!(to.len(), from.len(), "a copy has the length of its source");
        #[cfg(target_arch = "x86_64")]
        if to.as_ptr().addr().is_multiple_of(64) && to.len().is_multiple_of(64) {
            use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
            let lines = to.as_chunks_mut::<64>().0.iter_mut().zip(from.as_chunks::<64>().0);
            for (to, from) in lines {
                let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
                // SAFETY: SSE2 is part of x86-64; both lines are four vectors long, and `to` is aligned. `run` fences the stores, which
                // the processor may order after later ones, before anything else can happen to this memory in another thread: until
                // then it is borrowed from the caller of `run`, mutably.
                unsafe { (0..4).for_each(|i| _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i)))) }
            }
            return;
        }
        to.copy_from_slice(from);
    }
}

/// Asks for the cache lines of `bytes`, which are read soon.
#[inline]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and prefetching affects only caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Aligned or not, whole lines or not.
    #[test]
    fn copies_are_copies() {
        let from: Vec<u8> = (0..1024).map(|i| (i * 7 % 251) as u8).collect();
        for start in [0, 1, 16, 64] {
            for len in [0, 1, 63, 64, 65, 128, 512] {
                let mut to = vec![0xaa; 1024];
                let aligned = to.as_ptr().align_offset(64);
                let range = aligned + start..aligned + start + len;
                Uncached::run(|uncached| uncached.copy(&mut to[range.clone()], &from[..len]));
                assert_eq!(to[range.clone()], from[..len]);
                let others = to[..range.start].iter().chain(&to[range.end..]);
                assert!(others.into_iter().all(|byte| *byte == 0xaa), "{start} {len}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "length")]
    fn lengths_are_equal() {
        Uncached::run(|uncached| uncached.copy(&mut [0; 64], &[0; 63]));
    }
}
