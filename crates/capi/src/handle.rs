//! What a C caller holds: a value behind a lock that is tried, never waited for.
use crate::status::{Failure, Outcome, kvist_status};
use std::sync::{Mutex, TryLockError};

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

    /// Whether no call is using the value.
    pub fn is_idle(&self) -> bool {
        !matches!(self.0.try_lock(), Err(TryLockError::WouldBlock))
    }
}
