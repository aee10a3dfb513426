//! Waiting without the GIL, so that other threads go on and Ctrl-C is heard.
use crate::errors::Class;
pub use kvist_engine::serving::ready_within;
use pyo3::prelude::*;
use std::future::Future;
use std::pin::pin;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;
use tokio::runtime::Builder;

/// How long a wait may take until it looks for Ctrl-C again.
pub const PATIENCE: Duration = Duration::from_millis(50);

/// The future's output, waited for without the GIL. The future may use timers. The error of a signal comes at once, and drops the future.
pub fn block_on<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.map_err(|why| Class::Error.with(format!("cannot wait for the batch: {why}")))?;
    let mut future = pin!(future);
    loop {
        let some_time = async { tokio::time::timeout(PATIENCE, future.as_mut()).await.ok() };
        if let Some(output) = py.detach(|| runtime.block_on(some_time)) {
            return Ok(output);
        }
        py.check_signals()?;
    }
}

/// The lock of something that one thread uses at a time; a second thread gets `Busy`. A panic elsewhere leaves nothing
/// half done behind such a lock, because the engine's steps commit as a whole.
pub fn exclusive<'m, T>(what: &str, mutex: &'m Mutex<T>) -> PyResult<MutexGuard<'m, T>> {
    match mutex.try_lock() {
        Ok(guard) => Ok(guard),
        Err(TryLockError::Poisoned(broken)) => Ok(broken.into_inner()),
        Err(TryLockError::WouldBlock) => Err(Class::Busy
            .with(format!("another thread is using this {what}: wait for it, or use one for each thread"))),
    }
}

/// The lock, after waiting for it. With the GIL held, only for locks whose holders never wait for the GIL.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` without the GIL, and then handles signals. The error of a signal comes after the work is done.
pub fn without_gil<T: Send>(py: Python<'_>, work: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    let done = py.detach(work)?;
    py.check_signals()?;
    Ok(done)
}
