//! What a C caller holds: a value behind a lock that is tried, never waited for.
use crate::status::{Failure, Outcome, kvist_status};
use std::sync::{Mutex, RwLock, TryLockError};

/// Whether a value can be freed.
pub(crate) trait Idle {
    /// Whether no call is using the value.
    fn is_idle(&self) -> bool;
}

pub(crate) struct Handle<T>(Mutex<T>);

/// Handles may be used from any thread, one at a time: this refuses values that may not.
impl<T: Send> Handle<T> {
    pub fn new(value: T) -> Self {
        Handle(Mutex::new(value))
    }

    /// Calls `run` with the value, unless another call is using it.
    pub fn with<R>(&self, run: impl FnOnce(&mut T) -> Outcome<R>) -> Outcome<R> {
        match self.0.try_lock() {
            Ok(mut value) => run(&mut value),
            Err(TryLockError::WouldBlock) => Err(Failure::new(
                kvist_status::KVIST_BUSY,
                "the handle is in use by another call: one at a time",
            )),
            Err(TryLockError::Poisoned(_)) => Err(Failure::new(
                kvist_status::KVIST_INTERNAL_ERROR,
                "an earlier call with this handle failed inside kvist: free the handle",
            )),
        }
    }
}

impl<T: Send> Idle for Handle<T> {
    fn is_idle(&self) -> bool {
        !matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}

/// A value that any number of threads use at once, and that is freed by one.
pub(crate) struct SharedHandle<T>(RwLock<T>);

impl<T: Send + Sync> SharedHandle<T> {
    pub fn new(value: T) -> Self {
        SharedHandle(RwLock::new(value))
    }

    /// Calls `run` with the value.
    pub fn with<R>(&self, run: impl FnOnce(&T) -> Outcome<R>) -> Outcome<R> {
        match self.0.try_read() {
            Ok(value) => run(&value),
            // `free` looks whether calls are using it: a call that begins meanwhile is a defect of the caller, told where it can be.
            Err(TryLockError::WouldBlock) => {
                Err(Failure::new(kvist_status::KVIST_BUSY, "another thread is freeing the handle"))
            }
            // No caller writes.
            Err(TryLockError::Poisoned(value)) => run(&value.into_inner()),
        }
    }
}

impl<T: Send + Sync> Idle for SharedHandle<T> {
    fn is_idle(&self) -> bool {
        !matches!(self.0.try_write(), Err(TryLockError::WouldBlock))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_value_is_used_by_many_and_is_idle_between_calls() {
        let shared = SharedHandle::new(7);
        let seen = shared.with(|value| {
            assert!(!shared.is_idle());
            std::thread::scope(|scope| {
                let other = scope.spawn(|| shared.with(|value| Ok(*value)).map_err(|why| why.text));
                assert_eq!(other.join().unwrap(), Ok(7));
            });
            assert!(!shared.is_idle());
            Ok(*value)
        });
        assert_eq!(seen.map_err(|why| why.text), Ok(7));
        assert!(shared.is_idle());
        // A panic leaves nothing half done: nothing is written.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            shared.with(|_| -> Outcome<()> { panic!("a defect") })
        }));
        assert!(panicked.is_err());
        assert!(shared.is_idle() && shared.with(|value| Ok(*value)).is_ok());
    }
}
