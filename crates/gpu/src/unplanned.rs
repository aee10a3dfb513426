//! Bytes that a step turns out to need beyond what the plan of its cache lists.
//!
//! The budget of a cache is exactly its plan, and K and V may grow into all that is left of it. So these bytes are set aside in addition:
//! they are refused only where the process has none left, never at the cost of K and V.
use kvist_device::{MemoryBudget, OutOfBudget, Purpose, Reservation};
use std::sync::Arc;

/// Reserved bytes beyond the plan. They are given back on drop, and the budget is as large as before.
#[derive(Debug)]
pub struct Unplanned {
    reservation: Reservation,
    purpose: Purpose,
}

impl Unplanned {
    /// No bytes yet.
    pub fn none(budget: &Arc<MemoryBudget>, purpose: Purpose) -> Self {
        Unplanned { reservation: Reservation::empty(budget, purpose), purpose }
    }

    /// Reserves `more` bytes. Call it before allocating them.
    ///
    /// # Errors
    /// So many are not free, in the budget that this one is a part of. Nothing has changed then.
    pub fn grow(&mut self, more: u64) -> Result<(), OutOfBudget> {
        self.reservation.budget().extend(self.purpose, more)?;
        self.reservation.grow(more).inspect_err(|_| self.reservation.budget().shorten(more))
    }

    /// Gives `less` bytes back, at most all of them.
    pub fn shrink(&mut self, less: u64) {
        let less = less.min(self.reservation.bytes());
        self.reservation.shrink(less);
        self.reservation.budget().shorten(less);
    }
}

impl Drop for Unplanned {
    fn drop(&mut self) {
        self.shrink(u64::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_device::Usage;

    /// Bytes beyond a plan came out of it once, and K and V were refused their last ones.
    #[test]
    fn what_was_promised_stays_free() {
        let process = MemoryBudget::new(150);
        let promised = process.promise(&Usage::default().with(Purpose::KvCache, 100)).unwrap();
        let mut taps = Unplanned::none(&promised, Purpose::Activations);
        taps.grow(30).unwrap();
        assert_eq!((promised.free(), process.free()), (100, 20));
        assert_eq!(taps.grow(21).unwrap_err().free, 20, "the process has no more");
        assert_eq!((promised.free(), process.free()), (100, 20), "a refusal changes nothing");
        taps.shrink(10);
        assert_eq!((promised.free(), process.free()), (100, 30));
        drop(taps);
        assert_eq!((promised.free(), process.free(), process.usage()), (100, 50, Usage::default()));
        // A budget of its own does not grow.
        let mut own = Unplanned::none(&process, Purpose::Scratch);
        own.grow(50).unwrap();
        assert!(own.grow(1).is_err());
    }
}
