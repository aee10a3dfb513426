//! Every byte by purpose. A budget refuses before anyone allocates, and guards give back on drop.
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What bytes are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    Weights,
    KvCache,
    /// Working memory of the attention kernels, at the largest step.
    Scratch,
    /// Hidden states and logits of a forward pass, at the largest step.
    Activations,
}

impl Purpose {
    pub const ALL: [Purpose; 4] =
        [Purpose::Weights, Purpose::KvCache, Purpose::Scratch, Purpose::Activations];

    pub fn name(self) -> &'static str {
        match self {
            Purpose::Weights => "weights",
            Purpose::KvCache => "KV cache",
            Purpose::Scratch => "scratch",
            Purpose::Activations => "activations",
        }
    }
}

/// Bytes per purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    bytes: [u64; Purpose::ALL.len()],
}

impl Usage {
    pub fn of(&self, purpose: Purpose) -> u64 {
        self.bytes[purpose as usize]
    }
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
    /// The usage with `bytes` for `purpose` instead of what it was.
    pub fn with(mut self, purpose: Purpose, bytes: u64) -> Self {
        self.bytes[purpose as usize] = bytes;
        self
    }
}

/// More was asked for than is free. Nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} for the {} do not fit: {} of {} are free", Bytes(*asked), purpose.name(), Bytes(*free), Bytes(*total))]
pub struct OutOfBudget {
    pub purpose: Purpose,
    pub asked: u64,
    pub free: u64,
    pub total: u64,
}

/// The memory a process may use, and who uses it. Shared by the models and sessions of a process.
#[derive(Debug)]
pub struct MemoryBudget {
    total: u64,
    used: Mutex<Usage>,
}

impl MemoryBudget {
    pub fn new(total_bytes: u64) -> Arc<Self> {
        Arc::new(MemoryBudget { total: total_bytes, used: Mutex::default() })
    }
    /// Counts, and refuses nothing.
    pub fn unlimited() -> Arc<Self> {
        Self::new(u64::MAX)
    }
    pub fn total(&self) -> u64 {
        self.total
    }
    pub fn usage(&self) -> Usage {
        *self.lock()
    }
    pub fn free(&self) -> u64 {
        self.total - self.lock().total()
    }
    /// Numbers stay right even if a holder panicked, so a poisoned lock is no reason to stop.
    fn lock(&self) -> MutexGuard<'_, Usage> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Reserve `bytes` before allocating them.
    pub fn reserve(self: &Arc<Self>, purpose: Purpose, bytes: u64) -> Result<Reservation, OutOfBudget> {
        let mut reservation = Reservation::empty(self, purpose);
        reservation.grow(bytes)?;
        Ok(reservation)
    }
}

/// Bytes held. Gives them back on drop, so that usage returns exactly to its start.
#[derive(Debug)]
#[must_use = "a dropped reservation is given back"]
pub struct Reservation {
    budget: Arc<MemoryBudget>,
    purpose: Purpose,
    bytes: u64,
}

impl Reservation {
    /// Holds nothing yet.
    pub fn empty(budget: &Arc<MemoryBudget>, purpose: Purpose) -> Self {
        Reservation { budget: budget.clone(), purpose, bytes: 0 }
    }
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }
    /// Reserve `more` bytes, or change nothing.
    pub fn grow(&mut self, more: u64) -> Result<(), OutOfBudget> {
        let mut used = self.budget.lock();
        let free = self.budget.total - used.total();
        if more > free {
            let total = self.budget.total;
            return Err(OutOfBudget { purpose: self.purpose, asked: more, free, total });
        }
        used.bytes[self.purpose as usize] += more;
        self.bytes += more;
        Ok(())
    }
    /// Give `less` bytes back, at most all.
    pub fn shrink(&mut self, less: u64) {
        let less = less.min(self.bytes);
        self.budget.lock().bytes[self.purpose as usize] -= less;
        self.bytes -= less;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.lock().bytes[self.purpose as usize] -= self.bytes;
    }
}

/// Bytes for people: `512 KiB`, `1.50 GiB`.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        if self.0 == u64::MAX {
            return f.write_str("unlimited");
        }
        let (mut value, mut unit) = (self.0 as f64, 0);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if value.fract() == 0.0 {
            write!(f, "{value} {}", UNITS[unit])
        } else {
            write!(f, "{value:.2} {}", UNITS[unit])
        }
    }
}
