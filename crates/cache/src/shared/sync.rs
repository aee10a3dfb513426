//! Mutexes and condition variables: those of the standard library, or in this crate's unit tests those of `shuttle`,
//! which runs a test under many schedules. `shared.rs` uses only this module.
pub(super) use imp::*;

#[cfg(not(test))]
mod imp {
    use std::sync::PoisonError;
    pub use std::sync::{Condvar, Mutex, MutexGuard};
    use std::time::Instant;

    /// Waits until notified or until `deadline`; may wake spuriously. Returns whether the deadline has passed.
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

    /// `shuttle` has no clock, and its `wait_timeout` never times out. Here a deadline less than an hour away may
    /// pass at any moment, including just when the request is being served; a later one never passes.
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
