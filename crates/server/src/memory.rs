//! Memory that requests take from a shared pool.
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A semaphore hands out at most this many permits at a time, so in a larger pool a permit stands for several bytes.
const MAX_PERMITS: usize = match u32::MAX as usize {
    most if most < Semaphore::MAX_PERMITS => most,
    _ => Semaphore::MAX_PERMITS,
};

/// A pool of bytes that all requests share, and the part of it that each name may take. As long as the pool is large
/// enough for the largest request of every name at once, no name can take another's part. With more names, the names
/// take turns.
pub(crate) struct BytePool {
    all: Arc<Semaphore>,
    shares: BTreeMap<Arc<str>, Arc<Semaphore>>,
    /// Bytes of a permit. What is taken is rounded up to whole permits.
    unit: usize,
}

/// Bytes taken from a pool. Dropping it returns them.
pub(crate) struct Permit {
    own: Option<OwnedSemaphorePermit>,
    all: OwnedSemaphorePermit,
}

impl BytePool {
    /// Names share the pool evenly. Each may take at least `max`, however many names there are.
    pub fn new(bytes: usize, max: usize, names: &[Arc<str>]) -> Self {
        let unit = bytes.max(max).div_ceil(MAX_PERMITS).max(1);
        // As many of the largest requests fit as without rounding.
        let rounding = if unit > 1 { bytes / max.max(1) } else { 0 };
        let permits = |bytes: usize| (bytes.div_ceil(unit) + rounding).min(Semaphore::MAX_PERMITS);
        let semaphore = |bytes: usize| Arc::new(Semaphore::new(permits(bytes)));
        let share = (bytes / names.len().max(1)).max(max);
        let shares = names.iter().map(|name| (name.clone(), semaphore(share))).collect();
        BytePool { all: semaphore(bytes), shares, unit }
    }

    /// Bytes that are not taken.
    #[cfg(test)]
    pub fn available(&self) -> usize {
        self.all.available_permits() * self.unit
    }

    fn permits(&self, bytes: usize) -> Option<u32> {
        u32::try_from(bytes.div_ceil(self.unit)).ok()
    }

    /// `None` if there are not enough bytes now.
    pub fn try_take(&self, name: &str, bytes: usize) -> Option<Permit> {
        let n = self.permits(bytes)?;
        let own = self.shares.get(name).map(|own| own.clone().try_acquire_many_owned(n)).transpose().ok()?;
        Some(Permit { own, all: self.all.clone().try_acquire_many_owned(n).ok()? })
    }

    /// Waits for bytes. `None` if that much can never be granted.
    pub async fn take(&self, name: &str, bytes: usize) -> Option<Permit> {
        let n = self.permits(bytes)?;
        // First wait in the line of the own name, so that each name is only once in the common line.
        let own = match self.shares.get(name) {
            Some(own) => Some(own.clone().acquire_many_owned(n).await.ok()?),
            None => None,
        };
        Some(Permit { own, all: self.all.clone().acquire_many_owned(n).await.ok()? })
    }
}

impl Permit {
    /// Adds bytes of the same pool.
    pub fn merge(&mut self, more: Permit) {
        self.all.merge(more.all);
        if let (Some(own), Some(more)) = (&mut self.own, more.own) {
            own.merge(more);
        }
    }
}
