//! Connections are accepted, given a place, and served until they end or another one needs their place more.
use crate::app::App;
use crate::connection;
use crate::connections::{Connections, Door, Phase, Seat};
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

/// Connections beyond `limits.max_connections` that are told so, and whose health checks are answered; and how long
/// each may take.
const RESERVE: usize = 32;
const RESERVE_TIME: Duration = Duration::from_secs(5);

/// Lines of a request's head.
const MAX_HEADERS: usize = 100;

/// Before a full system, or a full reserve, is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// Connections that make room where files are short, so that not each new one has to ask.
const ROOM: usize = 16;
/// What a connection that makes room takes to close.
const CLOSING: Duration = Duration::from_millis(1);
/// The log says this often that connections cannot be accepted.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// A router, and how it is spoken to.
#[derive(Clone)]
struct Desk {
    http: http1::Builder,
    router: Router,
    /// A connection is over this long after it began.
    longest: Duration,
}

/// Accept and serve for as long as this is polled. `reserve` answers where `router` has no place.
pub(crate) async fn accept(
    listener: &TcpListener,
    app: &Arc<App>,
    router: Router,
    reserve: Router,
    graceful: &GracefulShutdown,
) {
    let limits = &app.limits;
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.read_timeout())
        .max_headers(MAX_HEADERS)
        // The second alone lets heads pass that come in one piece, whatever their length.
        .max_header_size(limits.max_header_bytes)
        .max_buf_size(limits.max_header_bytes)
        // A client that is gone is noticed while its answer is still being generated.
        .half_close(false);
    let mut briefly = http.clone();
    briefly.keep_alive(false).header_read_timeout(limits.read_timeout().min(RESERVE_TIME));
    let desk = Desk { http, router, longest: Duration::MAX };
    let spare = Desk { http: briefly, router: reserve, longest: RESERVE_TIME };
    let reserved = Arc::new(Connections::new(RESERVE, false));
    let mut told: Option<Instant> = None;
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of files, or a client that went away: neither is a reason to end.
                if told.is_none_or(|told| told.elapsed() >= TELL_AGAIN) {
                    told = Some(Instant::now());
                    tracing::warn!(target: "kvist::server", "cannot accept a connection: {error}");
                }
                let has_room = is_out_of_files(&error) && app.connections.make_room(ROOM, Instant::now());
                tokio::time::sleep(if has_room { CLOSING } else { ASK_AGAIN }).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true); // an answer's tokens are small, and wait for nothing
        let (seat, desk) = loop {
            let now = Instant::now();
            if let Some(seat) = app.connections.enter(address.ip(), now) {
                break (seat, &desk);
            }
            if let Some(seat) = reserved.enter(address.ip(), now) {
                break (seat, &spare);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        };
        attend(app, stream, seat, desk, graceful);
    }
}

/// Of this process, or of the system.
fn is_out_of_files(error: &std::io::Error) -> bool {
    const ENFILE: i32 = 23;
    const EMFILE: i32 = 24;
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE))
}

/// Serve one connection, in a task of its own.
fn attend(app: &Arc<App>, stream: TcpStream, seat: Seat, desk: &Desk, graceful: &GracefulShutdown) {
    let door = seat.door.clone();
    let (socket, watched) = connection::watched(stream, door.clone());
    let service = serve_behind(door.clone(), desk.router.clone());
    let connection = graceful.watch(desk.http.serve_connection(TokioIo::new(socket), service));
    let (patience, head) = (app.limits.read_timeout(), app.limits.header_timeout());
    // What a refused request may still send.
    let (most, longest) = (app.limits.max_body_bytes.saturating_mul(4), desk.longest);
    tokio::spawn(async move {
        let served = async {
            let is_bad = tokio::select! {
                // A client that broke off is no error of ours.
                ended = connection => ended.is_err_and(|error| error.is_parse()),
                () = watched.lost(patience, head) => return,
            };
            if is_bad || watched.door().has_unread() {
                watched.linger(most).await;
            }
        };
        tokio::select! {
            () = served => {}
            () = door.closed() => {}
            () = tokio::time::sleep(longest) => {}
        }
        drop(seat);
    });
}

type Answered = Result<Response<AnswerBody>, Infallible>;

/// The router, where a door tells how far each request is.
fn serve_behind(
    door: Arc<Door>,
    router: Router,
) -> impl Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future: Send> {
    let router = TowerToHyperService::new(router.into_service::<RequestBody>());
    service_fn(move |request: Request<Incoming>| {
        use hyper::body::Body;
        let whole = request.body().is_end_stream();
        door.goes_on(None, if whole { Phase::Answer } else { Phase::Body });
        let under_way = UnderWay(door.clone());
        let mut request = request.map(|body| RequestBody { body, door: door.clone() });
        request.extensions_mut().insert(door.clone());
        let answer = router.call(request);
        async move {
            let mut answer = answer.await?;
            // The rest of the request is in the way of the next one.
            if under_way.0.phase() == Phase::Body {
                under_way.0.leave_unread();
                answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            }
            under_way.0.goes_on(None, Phase::Answer);
            Answered::Ok(answer.map(|body| AnswerBody { body, _under_way: under_way }))
        }
    })
}

/// A request that is being answered.
struct UnderWay(Arc<Door>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.goes_on(None, Phase::Idle);
    }
}

/// Tells when the last of it has come.
struct RequestBody {
    body: Incoming,
    door: Arc<Door>,
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
            self.door.goes_on(Some(Phase::Body), Phase::Answer);
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

/// Its request is over when it is dropped.
struct AnswerBody {
    body: Body,
    _under_way: UnderWay,
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
