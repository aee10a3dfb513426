//! A connection, and when it is over before HTTP says so.
//!
//! hyper looks for the end of a connection only while it reads from it, which it does not do while an answer is under
//! way and bytes of the next request lie in its buffer; and it waits for a client that does not read as long as that
//! likes. Here both ends are found beside it: [`Watched::lost`].
use futures_util::FutureExt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// What hyper reads and writes. It is closed when it is dropped.
pub(crate) struct Socket(Arc<Shared>);

/// The same connection, for whoever watches it.
pub(crate) struct Watched(Arc<Shared>);

struct Shared {
    stream: TcpStream,
    began: Instant,
    /// Milliseconds after `began` since when the client takes nothing of what it should take; 0 if it does.
    stalled_ms: AtomicU64,
}

pub(crate) fn watched(stream: TcpStream) -> (Socket, Watched) {
    let shared = Arc::new(Shared { stream, began: Instant::now(), stalled_ms: AtomicU64::new(0) });
    (Socket(shared.clone()), Watched(shared))
}

/// How often a connection is looked at.
const LOOK: Duration = Duration::from_millis(100);

impl Watched {
    /// Until the client has hung up, or has taken nothing for `patience` of what it should take.
    pub async fn lost(&self, patience: Duration) {
        loop {
            tokio::time::sleep(LOOK).await;
            // Known to the runtime already: this asks nobody.
            let ready = self.0.stream.ready(Interest::READABLE).now_or_never();
            let gone = ready.is_some_and(|ready| ready.map_or(true, |ready| ready.is_read_closed()));
            let stalled = Duration::from_millis(self.0.stalled_ms.load(Relaxed));
            if gone || (!stalled.is_zero() && self.0.began.elapsed().saturating_sub(stalled) >= patience) {
                return;
            }
        }
    }
}

impl Socket {
    fn write(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let Shared { stream, began, stalled_ms } = &*self.0;
        loop {
            let Poll::Ready(ready) = stream.poll_write_ready(cx) else {
                let now = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
                let _ = stalled_ms.compare_exchange(0, now, Relaxed, Relaxed);
                return Poll::Pending;
            };
            ready?;
            match write(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    stalled_ms.store(0, Relaxed);
                    return Poll::Ready(written);
                }
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = &self.0.stream;
        loop {
            ready!(stream.poll_read_ready(cx))?;
            match stream.try_read(into.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    into.advance(read?);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(cx, |stream| stream.try_write(bytes))
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream| stream.try_write_vectored(parts))
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
