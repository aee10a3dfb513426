//! A connection, and the detection of clients that have disconnected or stopped reading.
//!
//! hyper notices the end of a connection only while it reads from it. It does not read while an answer is in progress
//! and bytes of the next request are in its buffer. It also waits without limit for a client that does not read. Here a
//! separate task detects both cases: [`Watched::lost`].
//!
//! A request that is refused is answered before all of it has arrived. Closing a connection with unread bytes resets
//! it, and a client that is still sending then never sees the refusal. So [`Watched::linger`] reads the rest first.
use crate::connections::{Connection, Phase};
use futures_util::FutureExt;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

/// The side of the connection that hyper reads and writes. Dropping it closes the connection.
pub(crate) struct Socket(Arc<Shared>);

/// The same connection, for the task that monitors it.
pub(crate) struct Watched(Arc<Shared>);

struct Shared {
    stream: TcpStream,
    connection: Arc<Connection>,
}

pub(crate) fn watched(stream: TcpStream, connection: Arc<Connection>) -> (Socket, Watched) {
    let shared = Arc::new(Shared { stream, connection });
    (Socket(shared.clone()), Watched(shared))
}

/// Interval at which a connection is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How long the rest of a refused request may still arrive.
const LINGER: Duration = Duration::from_secs(30);

/// Shuts down the sending side. tokio does this only for a stream that it may change, and this one is shared.
fn end_sending(stream: &TcpStream) -> io::Result<()> {
    #[cfg(unix)]
    let same = std::os::fd::AsFd::as_fd(stream).try_clone_to_owned()?;
    #[cfg(windows)]
    let same = std::os::windows::io::AsSocket::as_socket(stream).try_clone_to_owned()?;
    std::net::TcpStream::from(same).shutdown(Shutdown::Write)
}

impl Watched {
    pub fn connection(&self) -> &Connection {
        &self.0.connection
    }

    /// Waits until the client has disconnected, has read nothing of its answer for `patience`, or takes longer than
    /// `head` to send the head of a request.
    pub async fn lost(&self, patience: Duration, head: Duration) {
        let Shared { stream, connection } = &*self.0;
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            // The runtime has this status already, so no system call is needed.
            let ready = stream.ready(Interest::READABLE).now_or_never();
            let disconnected = ready.is_some_and(|ready| ready.map_or(true, |ready| ready.is_read_closed()));
            let stalled = connection.stalled().is_some_and(|since| since.elapsed() >= patience);
            if disconnected || stalled || connection.is_slow_head(head) {
                return;
            }
        }
    }

    /// Shut down the sending side, then read and discard what the client still sends, so that the client sees its
    /// answer. At most `max` bytes, for at most [`LINGER`].
    pub async fn linger(&self, max: usize) {
        let Shared { stream, connection } = &*self.0;
        connection.advance(None, Phase::Closing);
        if end_sending(stream).is_err() {
            return;
        }
        let rest = async {
            let (mut left, mut bytes) = (max, vec![0; 16 << 10]);
            while left > 0 && stream.readable().await.is_ok() {
                match stream.try_read(&mut bytes) {
                    Ok(0) => return,
                    Ok(n) => left = left.saturating_sub(n),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) => return,
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, rest).await;
    }
}

impl Socket {
    fn write(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        let Shared { stream, connection } = &*self.0;
        loop {
            let Poll::Ready(ready) = stream.poll_write_ready(cx) else {
                connection.set_stalled();
                return Poll::Pending;
            };
            ready?;
            match write(stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    connection.clear_stalled();
                    return Poll::Ready(written);
                }
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Shared { stream, connection } = &*self.0;
        loop {
            ready!(stream.poll_read_ready(cx))?;
            match stream.try_read(into.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => {
                    let n = read?;
                    into.advance(n);
                    if n > 0 {
                        connection.advance(Some(Phase::Idle), Phase::Head);
                    }
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
