//! Accepts connections, gives each a permit, and serves it until it ends or until a more urgent connection needs the
//! permit.
use crate::connection;
use crate::connections::{Connection, ConnectionPermit, Connections, Phase};
use crate::state::ServerState;
use axum::Router;
use axum::body::Body;
use axum::http::header::{CONNECTION, HeaderValue};
use axum::http::{Request, Response};
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};

/// Connections beyond `limits.max_connections`. They get a 503, except for health checks, and each may last this long.
const RESERVE: usize = 32;
const RESERVE_TIME: Duration = Duration::from_secs(5);

/// Largest number of header lines of a request.
const MAX_HEADERS: usize = 100;

/// Wait before the next attempt when the system has no file descriptors left, or the reserve is full.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// Connections to close when file descriptors run out, so that not every new connection has to wait.
const ROOM: usize = 16;
/// Time that a displaced connection takes to close.
const CLOSING: Duration = Duration::from_millis(1);
/// Minimum time between log messages about connections that cannot be accepted.
const WARN_AGAIN: Duration = Duration::from_secs(10);

/// A router, and the HTTP settings to serve it with.
#[derive(Clone)]
struct Served {
    http: http1::Builder,
    router: Router,
    /// Longest lifetime of a connection.
    longest: Duration,
}

/// Accept and serve connections until this future is dropped. `reserve` answers the connections that find no permit in
/// `router`.
pub(crate) async fn accept(
    listener: &TcpListener,
    state: &Arc<ServerState>,
    router: Router,
    reserve: Router,
    graceful: &GracefulShutdown,
) {
    let limits = &state.limits;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.read_timeout())
        .max_headers(MAX_HEADERS)
        // `max_buf_size` alone lets a head of any length pass if it arrives in one piece.
        .max_header_size(limits.max_header_bytes)
        .max_buf_size(limits.max_header_bytes)
        // Detect a client that disconnects while its answer is still being generated.
        .half_close(false);
    let mut briefly = http.clone();
    briefly.keep_alive(false).header_read_timeout(limits.read_timeout().min(RESERVE_TIME));
    let main = Served { http, router, longest: Duration::MAX };
    let from_reserve = Served { http: briefly, router: reserve, longest: RESERVE_TIME };
    let reserved = Arc::new(Connections::new(RESERVE, false));
    let mut warned: Option<Instant> = None;
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Either file descriptors ran out or a client disconnected. Neither is a reason to stop.
                if warned.is_none_or(|warned| warned.elapsed() >= WARN_AGAIN) {
                    warned = Some(Instant::now());
                    tracing::warn!(target: "kvist::server", "cannot accept a connection: {error}");
                }
                let has_room = is_out_of_files(&error) && state.connections.displace(ROOM, Instant::now());
                tokio::time::sleep(if has_room { CLOSING } else { ASK_AGAIN }).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true); // tokens are small packets and must not wait
        let (permit, served) = loop {
            let now = Instant::now();
            if let Some(permit) = state.connections.enter(address.ip(), now) {
                break (permit, &main);
            }
            if let Some(permit) = reserved.enter(address.ip(), now) {
                break (permit, &from_reserve);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        };
        serve_connection(state, stream, permit, served, graceful);
    }
}

/// Returns whether this process or the system has no file descriptors left.
fn is_out_of_files(error: &std::io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

/// Serve one connection in its own task.
fn serve_connection(
    state: &Arc<ServerState>,
    stream: TcpStream,
    permit: ConnectionPermit,
    served: &Served,
    graceful: &GracefulShutdown,
) {
    let connection = permit.connection.clone();
    let (socket, watched) = connection::watched(stream, connection.clone());
    let service = service_of(connection.clone(), served.router.clone());
    let http = graceful.watch(served.http.serve_connection(TokioIo::new(socket), service));
    let (patience, head) = (state.limits.read_timeout(), state.limits.header_timeout());
    // Bytes that a refused request may still send.
    let (max, longest) = (state.limits.max_body_bytes.saturating_mul(4), served.longest);
    tokio::spawn(async move {
        let serve = async {
            let is_bad = tokio::select! {
                // A client that disconnects is not a server error.
                ended = http => ended.is_err_and(|error| error.is_parse()),
                () = watched.lost(patience, head) => return,
            };
            if is_bad || watched.connection().has_unread() {
                watched.linger(max).await;
            }
        };
        tokio::select! {
            () = serve => {}
            () = connection.closed() => {}
            () = tokio::time::sleep(longest) => {}
        }
        drop(permit);
    });
}

type Answered = Result<Response<AnswerBody>, Infallible>;

/// Wraps the router. The connection records how far each request has come.
fn service_of(
    connection: Arc<Connection>,
    router: Router,
) -> impl Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future: Send> {
    let router = TowerToHyperService::new(router.into_service::<RequestBody>());
    service_fn(move |request: Request<Incoming>| {
        use hyper::body::Body;
        let whole = request.body().is_end_stream();
        connection.advance(None, if whole { Phase::Answer } else { Phase::Body });
        let in_progress = InProgress(connection.clone());
        let mut request = request.map(|body| RequestBody { body, connection: connection.clone() });
        request.extensions_mut().insert(connection.clone());
        let answer = router.call(request);
        async move {
            let mut answer = answer.await?;
            // Unread bytes of this request would precede the next one, so close the connection.
            if in_progress.0.phase() == Phase::Body {
                in_progress.0.set_unread();
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            in_progress.0.advance(None, Phase::Answer);
            Answered::Ok(answer.map(|body| AnswerBody { body, _in_progress: in_progress }))
        }
    })
}

/// A request in progress. Dropping it ends the request.
struct InProgress(Arc<Connection>);

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.advance(None, Phase::Idle);
    }
}

/// A request body that notes when its last byte has arrived.
struct RequestBody {
    body: Incoming,
    connection: Arc<Connection>,
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_none() || self.body.is_end_stream() {
            self.connection.advance(Some(Phase::Body), Phase::Answer);
        }
        Poll::Ready(frame)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body. Dropping it ends the request.
struct AnswerBody {
    body: Body,
    _in_progress: InProgress,
}

impl hyper::body::Body for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
