//! Work of many milliseconds (parsing, tokenizing, templates), off the threads that answer health checks.
use crate::error::{ApiError, PREPARATION_TIME};
use crate::memory::Permit;
use kvist_model::halt::Halt;
use std::cell::Cell;
use std::time::Instant;

tokio::task_local! {
    /// The permit for a document, on its way from the body to the work on the document.
    static DOCUMENT: Cell<Option<Permit>>;
}

/// Scope in which handlers that take bodies run.
pub(crate) async fn with_document<T>(handler: impl Future<Output = T>) -> T {
    DOCUMENT.scope(Cell::new(None), handler).await
}

/// Keeps the permit for the document of the current request, until [`take_document`].
pub(crate) fn keep_document(permit: Permit) {
    let _ = DOCUMENT.try_with(|cell| cell.set(Some(permit)));
}

/// Take the permit for the document of the current request. The work drops it after it has dropped the document.
pub(crate) fn take_document() -> Option<Permit> {
    DOCUMENT.try_with(Cell::take).ok().flatten()
}

/// Runs work on a blocking thread. The permit for the current request's document stays taken until the work is done, even
/// if the client has disconnected. Work that renders or tokenizes must reserve memory instead:
/// [`Work::run`](crate::work::Work::run).
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let document = take_document();
    let halt = Halt::default();
    // A handler is dropped when its client disconnects.
    let _cancel = CancelOnDrop(halt.clone());
    let done = tokio::task::spawn_blocking(move || {
        let done = match halt.is_over() {
            true => Err(ApiError::not_ready_in_time()),
            false => halt.until(Instant::now() + PREPARATION_TIME).run(work),
        };
        drop(document);
        done
    });
    done.await.unwrap_or_else(|_| Err(ApiError::internal("a request could not be prepared")))
}

/// Cancels the work when its handler is dropped.
pub(crate) struct CancelOnDrop(pub Halt);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Poll;

    /// A client disconnects while its work waits for a thread: the work never starts.
    #[test]
    fn work_that_is_not_wanted_any_more_is_not_begun() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().max_blocking_threads(1).build().unwrap();
        for disconnects in [true, false] {
            let has_begun = Arc::new(AtomicBool::new(false));
            let flag = has_begun.clone();
            runtime.block_on(async {
                let (go, wait) = std::sync::mpsc::channel::<()>();
                let before = tokio::task::spawn_blocking(move || wait.recv().is_ok());
                let mut work = Box::pin(blocking(move || {
                    flag.store(true, Ordering::Relaxed);
                    Ok(())
                }));
                let waits = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx).is_pending()));
                assert!(waits.await);
                let kept = (!disconnects).then_some(work); // or dropped, like its handler
                go.send(()).unwrap();
                assert!(before.await.unwrap());
                tokio::task::spawn_blocking(|| ()).await.unwrap(); // runs after it, on the same thread
                drop(kept);
            });
            assert_eq!(has_begun.load(Ordering::Relaxed), !disconnects);
        }
    }
}
