//! Memory accounting by purpose. A budget refuses a reservation before any memory is allocated; reservations return
//! their bytes on drop.
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What memory is used for.
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
    /// The sum, saturated at 64 bits. A saturated sum fits no budget.
    pub fn total(&self) -> u64 {
        self.bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
    /// [`total`](Self::total), or `None` if it overflows.
    pub fn checked_total(&self) -> Option<u64> {
        self.bytes.iter().try_fold(0u64, |sum, bytes| sum.checked_add(*bytes))
    }
    fn largest(&self) -> Purpose {
        Purpose::ALL.into_iter().max_by_key(|purpose| self.of(*purpose)).unwrap_or(Purpose::KvCache)
    }
    /// The usage with `bytes` for `purpose`, replacing its previous value.
    pub fn with(mut self, purpose: Purpose, bytes: u64) -> Self {
        self.bytes[purpose as usize] = bytes;
        self
    }
}

/// More bytes were asked for than are free. Nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} for the {} do not fit: {} of {} are free", Bytes(*asked), purpose.name(), Bytes(*free), Bytes(*total))]
pub struct OutOfBudget {
    pub purpose: Purpose,
    pub asked: u64,
    pub free: u64,
    pub total: u64,
}

/// The memory that a process may use, and its current use. Shared by the models and sessions of a process.
#[derive(Debug)]
pub struct MemoryBudget {
    balance: Mutex<Balance>,
    /// The parent budget, in which this one's total is set aside; `None` for a budget of its own.
    parent: Option<Arc<MemoryBudget>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Balance {
    /// All bytes of the budget.
    total: u64,
    /// Bytes reserved here, including those reserved through promised sub-budgets.
    used: Usage,
    /// Bytes set aside for sub-budgets and not reserved yet.
    promised: u64,
}

impl Balance {
    fn of(total: u64) -> Mutex<Balance> {
        Mutex::new(Balance { total, ..Balance::default() })
    }
    /// Bytes neither reserved nor promised.
    fn free(&self) -> u64 {
        self.total - self.used.total() - self.promised
    }
}

impl MemoryBudget {
    pub fn new(total_bytes: u64) -> Arc<Self> {
        Arc::new(MemoryBudget { balance: Balance::of(total_bytes), parent: None })
    }
    /// A budget that counts but never refuses.
    pub fn unlimited() -> Arc<Self> {
        Self::new(u64::MAX)
    }
    pub fn total(&self) -> u64 {
        self.lock().total
    }
    /// Bytes reserved, including those reserved through sub-budgets.
    pub fn usage(&self) -> Usage {
        self.lock().used
    }
    /// Bytes neither reserved nor promised to a sub-budget.
    pub fn free(&self) -> u64 {
        self.lock().free()
    }
    /// The numbers stay correct even if a thread panicked, so a poisoned lock is safe to use.
    fn lock(&self) -> MutexGuard<'_, Balance> {
        self.balance.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Reserves `bytes`. Call it before allocating them.
    pub fn reserve(self: &Arc<Self>, purpose: Purpose, bytes: u64) -> Result<Reservation, OutOfBudget> {
        let mut reservation = Reservation::empty(self, purpose);
        reservation.grow(bytes)?;
        Ok(reservation)
    }

    /// Sets aside all of `usage` as a sub-budget. No other reservation can take these bytes while it lives, and they
    /// count as used here only once they are reserved from it. So a refusal comes now, not during later growth.
    pub fn promise(self: &Arc<Self>, usage: &Usage) -> Result<Arc<Self>, OutOfBudget> {
        let (asked, purpose) = (usage.total(), usage.largest());
        let mut balance = self.lock();
        let (free, total) = (balance.free(), balance.total);
        if asked > free {
            return Err(OutOfBudget { purpose, asked, free, total });
        }
        balance.promised += asked;
        let parent = Some(self.clone());
        Ok(Arc::new(MemoryBudget { balance: Balance::of(asked), parent }))
    }

    /// Sets aside `more` bytes for this sub-budget, or changes nothing. A budget of its own stays as large as it is.
    pub fn extend(&self, purpose: Purpose, more: u64) -> Result<(), OutOfBudget> {
        let Some(parent) = &self.parent else { return Ok(()) };
        let mut balance = parent.lock();
        let (free, total) = (balance.free(), balance.total);
        if more > free {
            return Err(OutOfBudget { purpose, asked: more, free, total });
        }
        balance.promised += more;
        drop(balance);
        self.lock().total += more;
        Ok(())
    }

    /// Returns up to `less` of this sub-budget's free bytes to its parent.
    pub fn shorten(&self, less: u64) {
        let Some(parent) = &self.parent else { return };
        let mut balance = self.lock();
        let less = less.min(balance.free());
        balance.total -= less;
        drop(balance);
        parent.lock().promised -= less;
    }

    /// Reserves bytes; `Err` says how many are free.
    fn draw(&self, purpose: Purpose, bytes: u64) -> Result<(), u64> {
        let mut balance = self.lock();
        let free = balance.free();
        if bytes > free {
            return Err(free);
        }
        balance.used.bytes[purpose as usize] += bytes;
        drop(balance);
        self.parents(|balance| {
            balance.promised -= bytes;
            balance.used.bytes[purpose as usize] += bytes;
        });
        Ok(())
    }
    fn give_back(&self, purpose: Purpose, bytes: u64) {
        self.lock().used.bytes[purpose as usize] -= bytes;
        self.parents(|balance| {
            balance.used.bytes[purpose as usize] -= bytes;
            balance.promised += bytes;
        });
    }
    /// Applies `change` to every budget that this one is a part of, the nearest first.
    fn parents(&self, change: impl Fn(&mut Balance)) {
        let mut next = &self.parent;
        while let Some(budget) = next {
            change(&mut budget.lock());
            next = &budget.parent;
        }
    }
}

/// The last user of a sub-budget is gone: returns its promised bytes to the parent.
impl Drop for MemoryBudget {
    fn drop(&mut self) {
        if let Some(parent) = &self.parent {
            parent.lock().promised -= self.total();
        }
    }
}

/// Reserved bytes. They are returned on drop, so usage returns exactly to its start.
#[derive(Debug)]
#[must_use = "a dropped reservation is given back"]
pub struct Reservation {
    budget: Arc<MemoryBudget>,
    purpose: Purpose,
    bytes: u64,
}

impl Reservation {
    /// A reservation of 0 bytes.
    pub fn empty(budget: &Arc<MemoryBudget>, purpose: Purpose) -> Self {
        Reservation { budget: budget.clone(), purpose, bytes: 0 }
    }
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }
    /// Reserves `more` bytes, or changes nothing.
    pub fn grow(&mut self, more: u64) -> Result<(), OutOfBudget> {
        let (purpose, total) = (self.purpose, self.budget.total());
        let refused = |free| OutOfBudget { purpose, asked: more, free, total };
        self.budget.draw(purpose, more).map_err(refused)?;
        self.bytes += more;
        Ok(())
    }
    /// Returns `less` bytes, at most all of them.
    pub fn shrink(&mut self, less: u64) {
        let less = less.min(self.bytes);
        self.budget.give_back(self.purpose, less);
        self.bytes -= less;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.give_back(self.purpose, self.bytes);
    }
}

/// Formats bytes for display: `512 KiB`, `1.50 GiB`.
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
