//! Aligneds that begin at a cache line.
use std::collections::TryReserveError;
use std::ops::{Deref, DerefMut};

/// Bytes of a cache line, and of a vector: an aligned vector lies in one line.
const LINE: usize = 64;

/// A fixed number of elements, the first of them at the beginning of a cache line.
#[derive(Default)]
pub struct Aligned<T> {
    all: Vec<T>,
    /// Elements before the cache line.
    skipped: usize,
}

impl<T: Copy + Default> Aligned<T> {
    /// Elements in addition to those that were asked for.
    const SPARE: usize = LINE / size_of::<T>();

    /// `n` elements, all of them the default.
    pub fn new(n: usize) -> Result<Self, TryReserveError> {
        let mut all = Vec::<T>::new();
        all.try_reserve_exact(n.saturating_add(Self::SPARE))?;
        // Where alignment is not known, a buffer works as well, only slower.
        let skipped = all.as_ptr().align_offset(LINE).min(Self::SPARE);
        all.resize(skipped + n, T::default());
        Ok(Aligned { all, skipped })
    }

    /// Bytes that a buffer of `n` elements takes.
    pub fn bytes(n: usize) -> Option<usize> {
        n.checked_add(Self::SPARE)?.checked_mul(size_of::<T>())
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.all[self.skipped..]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.all[self.skipped..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_element_begins_a_cache_line() {
        for n in [0, 1, 7, 16, 1000] {
            let buffer = Aligned::<f32>::new(n).unwrap();
            assert_eq!(buffer.len(), n);
            assert_eq!(buffer.as_ptr() as usize % LINE, 0);
            assert!(buffer.iter().all(|x| *x == 0.0));
        }
        assert_eq!(Aligned::<u32>::bytes(100), Some(464));
        assert_eq!(Aligned::<u32>::bytes(usize::MAX), None);
        assert!(Aligned::<u64>::new(usize::MAX).is_err());
    }
}
