//! When work of many milliseconds (a rendering, a tokenization) ends before it is done: the client that wanted its result
//! has left, or its time is over.
//!
//! Set for a thread while the work runs on it, and looked at between pieces of the work. It promises nothing about how
//! soon that is; [`template`](crate::template) and [`tokenizer`](crate::tokenizer) say how large their pieces are.
use crate::error::Error;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// A flag that another thread may raise, and a time.
#[derive(Clone, Debug, Default)]
pub struct Halt {
    cancelled: Arc<AtomicBool>,
    until: Option<Instant>,
}

impl Halt {
    /// `None`: the work may take as long as it takes.
    pub fn new(until: Option<Instant>) -> Self {
        Halt { cancelled: Arc::default(), until }
    }

    /// The same flag, with a time.
    pub fn until(&self, until: Instant) -> Self {
        Halt { cancelled: self.cancelled.clone(), until: Some(until) }
    }

    /// End the work.
    pub fn cancel(&self) {
        self.cancelled.store(true, Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.cancelled.load(Relaxed) || self.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Work on this thread, which fails with [`Error::Halted`] soon after this halt is over.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
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

/// An error if the work that runs on this thread is to end.
pub fn check() -> Result<(), Error> {
    match CURRENT.with_borrow(|halt| halt.as_ref().is_some_and(Halt::is_over)) {
        true => Err(Error::Halted),
        false => Ok(()),
    }
}
