//! Taps: the residual stream after some layers, on its way to the host.
//!
//! No plan knows how many there will be. Their buffers are made when a step first asks for them, of memory beyond the plan, and stay.
use crate::driver::{BufferCopy, Driver};
use crate::stream::f32s;
use crate::unplanned::Unplanned;
use kvist_device::{DeviceError, MemoryBudget, Purpose};
use std::sync::Arc;

/// A tap of the current step.
#[derive(Debug)]
struct Tap<D: Driver> {
    data: D::Buffer, // [tokens, width]
    width: u32,
    /// Of [`data`](Self::data).
    bytes: u64,
    /// Whether this step has written it.
    used: bool,
}

/// The taps of steps.
#[derive(Debug)]
pub struct Taps<D: Driver> {
    all: Vec<Option<Tap<D>>>,
    /// What the host reads, and its bytes.
    staging: Option<(D::Buffer, u64)>,
    /// `None` until a step has begun.
    bytes: Option<Unplanned>,
}

impl<D: Driver> Default for Taps<D> {
    fn default() -> Self {
        Taps { all: Vec::new(), staging: None, bytes: None }
    }
}

/// Bytes of taps of so many rows, and of where the host reads them, if a row of all has `width` elements. `None` on overflow.
pub fn tap_bytes(rows: usize, width: usize) -> Option<u64> {
    f32s(rows, width)?.checked_mul(2)
}

/// A buffer whose bytes are reserved before, and given back if there is none.
fn reserved<B>(
    bytes: &mut Option<Unplanned>,
    of_buffer: u64,
    make: impl FnOnce() -> Result<B, DeviceError>,
) -> Result<B, DeviceError> {
    let bytes = bytes.as_mut().ok_or(DeviceError::StalePlan)?;
    bytes.grow(of_buffer)?;
    make().inspect_err(|_| bytes.shrink(of_buffer))
}

impl<D: Driver> Taps<D> {
    /// No tap has been written. `budget` is that of the pools.
    pub fn begin(&mut self, budget: &Arc<MemoryBudget>) {
        self.all.iter_mut().flatten().for_each(|tap| tap.used = false);
        self.bytes.get_or_insert_with(|| Unplanned::none(budget, Purpose::Activations));
    }

    /// The buffer of tap `i`, `[max_tokens, width]`, for the caller to write it.
    ///
    /// # Errors
    /// There is no memory for it. Then there is no such tap, and its bytes are given back.
    pub fn write(
        &mut self,
        gpu: &D,
        i: usize,
        (max_tokens, width): (usize, u32),
    ) -> Result<&D::Buffer, DeviceError> {
        if self.all.len() <= i {
            self.all.resize_with(i + 1, || None);
        }
        let Taps { all, bytes, .. } = self;
        let slot = &mut all[i];
        if let Some(other) = slot.take_if(|tap| tap.width != width)
            && let Some(bytes) = bytes
        {
            bytes.shrink(other.bytes);
        }
        let tap = match slot.take() {
            Some(tap) => Tap { used: true, ..tap },
            None => {
                let overflow = || DeviceError::OutOfMemory { what: "taps", bytes: u64::MAX };
                let of_tap = f32s(max_tokens, width as usize).ok_or_else(overflow)?;
                let data = reserved(bytes, of_tap, || gpu.buffer("taps", of_tap))?;
                Tap { data, width, bytes: of_tap, used: true }
            }
        };
        Ok(&slot.insert(tap).data)
    }

    fn used(&self) -> impl Iterator<Item = (usize, &Tap<D>)> {
        self.all.iter().enumerate().filter_map(|(i, tap)| Some((i, tap.as_ref().filter(|tap| tap.used)?)))
    }

    /// The copies of what the step has written, of `n_tokens` rows each, to where the host reads it.
    ///
    /// # Errors
    /// There is no memory for that. Its bytes are given back.
    pub fn copies(&mut self, gpu: &D, n_tokens: u32) -> Result<Vec<BufferCopy<'_, D>>, DeviceError> {
        let of = |tap: &Tap<D>| u64::from(n_tokens) * u64::from(tap.width) * 4;
        let total: u64 = self.used().map(|(_, tap)| of(tap)).sum();
        let staged = self.staging.as_ref().map_or(0, |staging| staging.1);
        if total > staged {
            self.staging = None;
            if let Some(bytes) = &mut self.bytes {
                bytes.shrink(staged);
            }
            let staging = reserved(&mut self.bytes, total, || gpu.staging("taps", total))?;
            self.staging = Some((staging, total));
        }
        let Some((to, _)) = &self.staging else { return Ok(Vec::new()) };
        let mut to_byte = 0;
        let copies = self.used().map(|(_, tap)| {
            let copy = BufferCopy { from: &tap.data, from_byte: 0, to, to_byte, bytes: of(tap) };
            to_byte += copy.bytes;
            copy
        });
        Ok(copies.collect())
    }

    /// Reads what the step has written into `out`, by tap.
    ///
    /// # Errors
    /// The device has failed.
    pub fn read(&self, gpu: &D, n_tokens: u32, out: &mut [Vec<f32>]) -> Result<(), DeviceError> {
        let Some((staging, _)) = &self.staging else { return Ok(()) };
        let len = |tap: &Tap<D>| n_tokens as usize * tap.width as usize;
        let total: usize = self.used().map(|(_, tap)| len(tap)).sum();
        gpu.read(staging, 0..4 * total as u64, |bytes| {
            let mut values = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x));
            for (i, tap) in self.used() {
                if let Some(out) = out.get_mut(i) {
                    out.clear();
                    out.extend(values.by_ref().take(len(tap)));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_driver::TestDriver;
    use kvist_device::Usage;

    /// Every retry of a step whose taps had no memory left their bytes reserved.
    #[test]
    fn refused_taps_leave_no_bytes_behind() {
        let (gpu, budget) = (TestDriver::new(u64::MAX), MemoryBudget::new(10_000));
        let mut taps = Taps::default();
        taps.begin(&budget);
        for _ in 0..100 {
            gpu.refuse_after(0);
            taps.write(&*gpu, 1, (8, 32)).unwrap_err();
            assert_eq!(budget.usage(), Usage::default());
        }
        taps.write(&*gpu, 1, (8, 32)).unwrap();
        for _ in 0..100 {
            gpu.refuse_after(0);
            taps.copies(&gpu, 8).map(drop).unwrap_err();
            assert_eq!(budget.usage().total(), 1024);
        }
        assert_eq!(taps.copies(&gpu, 5).unwrap().len(), 1);
        assert_eq!(budget.usage().total(), 1024 + 5 * 128);
        assert_eq!(taps.copies(&gpu, 8).unwrap().len(), 1);
        assert_eq!(budget.usage().total(), tap_bytes(8, 32).unwrap());
        // Another width, and one that does not fit.
        taps.write(&*gpu, 1, (8, 16)).unwrap();
        assert_eq!(budget.usage().total(), 512 + 1024);
        taps.write(&*gpu, 1, (8, 1 << 20)).unwrap_err();
        assert_eq!(budget.usage().total(), 1024, "of the staging");
        assert_eq!(gpu.allocated_bytes(), Some(1024));
        drop(taps);
        assert_eq!((budget.usage(), gpu.allocated_bytes()), (Usage::default(), Some(0)));
    }
}
