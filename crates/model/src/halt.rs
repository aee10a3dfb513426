//! Cancels long work (rendering a template, tokenizing a text): the client has disconnected, or the time is up.
//!
//! A halt is set for a thread while the work runs on it, and is checked between pieces of the work. How soon the work
//! ends depends on the size of the pieces; see [`template`](crate::template) and [`tokenizer`](crate::tokenizer).
use crate::error::Error;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// A flag that another thread may set, and a deadline.
#[derive(Clone, Debug, Default)]
pub struct Halt {
    cancelled: Arc<AtomicBool>,
    until: Option<Instant>,
}

impl Halt {
    /// Deadline; `None` for no limit.
    pub fn new(until: Option<Instant>) -> Self {
        Halt { cancelled: Arc::default(), until }
    }

    /// The same flag with a deadline.
    pub fn until(&self, until: Instant) -> Self {
        Halt { cancelled: self.cancelled.clone(), until: Some(until) }
    }

    /// Stops the work.
    pub fn cancel(&self) {
        self.cancelled.store(true, Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.cancelled.load(Relaxed) || self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Runs `work` on this thread. It fails with [`Error::Halted`] soon after this halt is set or its deadline passes.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Before(Option<Halt>);
        impl Drop for Before {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _before = Before(CURRENT.replace(Some(self.clone())));
        work()
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Halt>> = const { RefCell::new(None) };
}

/// Returns an error if the work on this thread must stop.
pub fn check() -> Result<(), Error> {
    match CURRENT.with_borrow(|halt| halt.as_ref().is_some_and(Halt::is_over)) {
        true => Err(Error::Halted),
        false => Ok(()),
    }
}
