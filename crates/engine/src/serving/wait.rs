//! Waiting for the engine on threads that run no async tasks.
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The output of a future without timers, if it is ready within `limit`. Blocks this thread. A future that is not ready is dropped: an
/// event that [`GenerationHandle::next`](super::GenerationHandle::next) would have given then comes from the next call.
pub fn ready_within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    // A time that clocks do not have never comes.
    let until = Instant::now().checked_add(limit);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        let Some(until) = until else {
            std::thread::park();
            continue;
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::park_timeout(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::sync::mpsc;

    #[test]
    fn what_is_not_ready_comes_later() {
        assert_eq!(ready_within(Duration::ZERO, ready(3)), Some(3));
        assert_eq!(ready_within(Duration::from_millis(1), pending::<u32>()), None);
        let (sender, mut receiver) = mpsc::unbounded_channel();
        assert_eq!(ready_within(Duration::ZERO, receiver.recv()), None);
        let sends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            sender.send(7).unwrap();
            sender.send(8).unwrap();
        });
        // Without an end, as far as clocks go.
        assert_eq!(ready_within(Duration::MAX, receiver.recv()), Some(Some(7)));
        sends.join().unwrap();
        assert_eq!(ready_within(Duration::ZERO, receiver.recv()), Some(Some(8)));
        assert_eq!(ready_within(Duration::ZERO, receiver.recv()), Some(None));
    }
}
