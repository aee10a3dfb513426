//! Mutexes and condition variables: those of the standard library, and in this crate's unit tests those of `shuttle`,
//! which runs a test under many schedules. `shared.rs` is written against this file and nothing else.
pub(super) use imp::*;

#[cfg(not(test))]
mod imp {
    use std::sync::PoisonError;
    pub use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::Instant;

    /// Sleep until woken or `deadline`, or for no reason. Says whether the deadline has passed.
    pub fn wait_until<'a, T>(
        wake: &Condvar,
        _mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (guard, true);
        }
        let woken = wake.wait_timeout(guard, left);
        (woken.unwrap_or_else(PoisonError::into_inner).0, false)
    }
}

#[cfg(test)]
mod imp {
    use shuttle::rand::Rng;
    use std::sync::PoisonError;
    use std::time::{Duration, Instant};

    pub use shuttle::sync::{Condvar, Mutex, MutexGuard};

    /// `shuttle` knows no time, and its `wait_timeout` never times out. Here a deadline within the hour may pass at
    /// any moment, in particular just when the waiter is being served; a later one never passes.
    pub fn wait_until<'a, T>(
        wake: &Condvar,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        deadline: Instant,
    ) -> (MutexGuard<'a, T>, bool) {
        if deadline.saturating_duration_since(Instant::now()) > Duration::from_secs(3600) {
            return (wake.wait(guard).unwrap_or_else(PoisonError::into_inner), false);
        }
        drop(guard);
        shuttle::thread::yield_now();
        let passed = shuttle::rand::thread_rng().gen_bool(0.5);
        (mutex.lock().unwrap_or_else(PoisonError::into_inner), passed)
    }
}
