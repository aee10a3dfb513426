//! Routes, the checks in front of them (host, origin, API key, limits), and the main server loop.
//!
//! Health checks are answered whatever the engine does. A refused request costs no engine time. All errors have one
//! format, including those for unknown paths and methods.
use crate::accept::accept;
use crate::app::App;
use crate::body::with_body;
pub(crate) use crate::body::{blocking, json_body};
use crate::connections::Door;
use crate::error::ApiError;
use crate::work::THREADS;
use crate::{dashboard, metrics, openai, sessions};
use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use hyper_util::server::graceful::GracefulShutdown;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Every route of the API.
pub fn router(app: Arc<App>) -> Router {
    let keyed = Router::new()
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*id}", get(openai::model))
        .route("/v1/sessions", get(sessions::list).post(sessions::create))
        .route("/v1/sessions/{id}", get(sessions::look).delete(sessions::delete))
        .route("/v1/sessions/{id}/append", post(sessions::append))
        .route("/v1/sessions/{id}/generate", post(sessions::generate))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/rollback", post(sessions::rollback))
        .route("/v1/sessions/{id}/keep", post(sessions::keep))
        .route("/tokenize", post(openai::tokenize))
        .route("/detokenize", post(openai::detokenize))
        .route("/metrics", get(show_metrics))
        .route("/kvist/live", get(dashboard::live))
        .route_layer(middleware::from_fn_with_state(app.clone(), authenticate));
    let open = Router::new()
        .route("/", get(dashboard::index))
        .route("/favicon.svg", get(dashboard::favicon))
        .route("/example.jsonl.gz", get(dashboard::example))
        .route("/assets/{name}", get(dashboard::asset))
        .route("/health", get(healthy))
        .route("/ready", get(ready))
        .route("/version", get(version))
        .route("/openapi.json", get(describe));
    let routes = keyed.merge(open).fallback(no_such_path).method_not_allowed_fallback(wrong_method);
    let routes = match cors(&app.http.cors_origins) {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes.layer(middleware::from_fn_with_state(app.clone(), around)).with_state(app)
}

/// A path parameter. If it is invalid, the refusal has the common error format.
pub(crate) struct Path<T>(pub T);

impl<S: Send + Sync> FromRequestParts<S> for Path<String> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = axum::extract::Path::<String>::from_request_parts(parts, state).await;
        let bad = |_| {
            let message = format!("{} is no UTF-8 once its percent signs are resolved", parts.uri.path());
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        };
        path.map(|axum::extract::Path(name)| Path(name)).map_err(bad)
    }
}

async fn no_such_path(request: Request) -> ApiError {
    let message = format!("there is no {}; see /openapi.json", request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(request: Request) -> ApiError {
    let message = format!("{} does not take {}; see /openapi.json", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// What lets pages of the configured origins call; `None` if there are none.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let origins = origins.to_vec();
    let allowed = move |origin: &HeaderValue, _: &Parts| {
        origins.iter().any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes())
    };
    let layer = CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(allowed))
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // Clients send headers of their own (OpenAI's `x-stainless-*`), and kvist acts on none that a page of an allowed
        // origin should not send.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, HeaderName::from_static("x-should-retry")])
        .max_age(Duration::from_secs(600));
    Some(layer)
}

/// Runs around every request: checks `Host` and counts response statuses.
async fn around(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let refused = one_host(request.headers()).and_then(|()| known_host(&app, request.headers()));
    let mut response = match refused {
        Err(error) => error.into_response(),
        Ok(()) => next.run(request).await,
    };
    response
        .headers_mut()
        .insert(HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff"));
    app.metrics.responded(response.status().as_u16());
    response
}

/// Refuse several `Host` headers: a proxy in front of this server may have read a different one than this server would.
fn one_host(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get_all(header::HOST).iter().count() {
        0 | 1 => Ok(()),
        n => {
            let message = format!("the request has {n} `Host` headers: send one");
            Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message))
        }
    }
}

/// Guard against DNS rebinding: a server that only this machine may reach must not answer to a host name that a web
/// page made its browser resolve.
fn known_host(app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    if !app.keys.is_open() || !app.http.host.is_loopback() || app.http.open {
        return Ok(());
    }
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    let host = host.to_str().unwrap_or_default();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    let local = name.eq_ignore_ascii_case("localhost")
        || bare.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if local {
        return Ok(());
    }
    let message =
        "this server has no API keys and answers to localhost alone; configure [[keys]] to serve others";
    Err(ApiError::new(StatusCode::FORBIDDEN, "unknown_host", message))
}

/// Identifies the caller and attaches it to the request for all handlers.
async fn authenticate(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = app.keys.caller(request.headers())?;
    if let Some(door) = request.extensions().get::<Arc<Door>>() {
        let place = app.under_way.take(&caller.name).map_err(|full| {
            let message = format!(
                "{} requests of this key's name are under way, and the places left are shares of other keys: try again \
                 when some are answered",
                full.taken
            );
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).retry_after(1)
        })?;
        door.knows(&caller.name, place);
    }
    request.extensions_mut().insert(caller);
    Ok(with_body(next.run(request)).await)
}

/// The same response as vLLM's.
async fn version() -> Response {
    axum::Json(serde_json::json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn healthy() -> Response {
    axum::Json(serde_json::json!({"status": "ok"})).into_response()
}

async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.is_draining() {
        return ApiError::shutting_down(app.retry_after_s()).into_response();
    }
    if !app.engine.is_alive() {
        return ApiError::internal("the engine has stopped: restart the server").into_response();
    }
    axum::Json(serde_json::json!({"status": "ready"})).into_response()
}

async fn describe(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], app.openapi.clone()).into_response()
}

async fn show_metrics(
    State(app): State<Arc<App>>,
    axum::Extension(caller): axum::Extension<crate::auth::Caller>,
) -> Result<Response, ApiError> {
    if !caller.admin && !app.http.open_metrics {
        let message = "metrics tell of all users, and are for admin keys";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message));
    }
    let mut readings = metrics::of_engine(&app.engine.stats());
    readings.extend(metrics::of_limits(&app));
    let failed = |error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", format!("no metrics: {error}"))
    };
    let text = app.metrics.render(&readings).map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

/// How long a connection may take to end once all answers are sent.
const FAREWELL: Duration = Duration::from_secs(2);

/// The router for connections beyond the limit.
fn reserve(app: Arc<App>) -> Router {
    let full = async |State(app): State<Arc<App>>| {
        let most = app.limits.max_connections;
        let message = format!("there are {most} connections already: close some, or try again");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).retry_after(1)
    };
    Router::new()
        .route("/health", get(healthy))
        .route("/ready", get(ready))
        .fallback(full)
        .layer(middleware::from_fn_with_state(app.clone(), around))
        .with_state(app)
}

/// How long shutdown waits for the disk to take the rest of a recording.
const LAST_LINES: Duration = Duration::from_secs(10);

/// Waits until the recording, if there is one, is completely written.
async fn recorded(app: &App) {
    if tokio::time::timeout(LAST_LINES, app.engine.live().recorded(&app.engine)).await.is_err() {
        tracing::error!(target: "kvist::server", "the recording lacks its end: the disk is too slow");
    }
}

/// The runtime that [`serve`] needs.
pub fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2) // they only move text; computing happens on other threads
        .max_blocking_threads(THREADS) // they tokenize; each additional one would keep its own heap
        .enable_all()
        .build()
}

/// Accept and serve until `shutdown` resolves, then drain: new requests get a 503, and running requests may continue
/// for `limits.grace_s`, after which they are notified and ended. A recording is written to its end. Returns an error
/// if the engine ends by itself: a supervisor should then restart the program.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let limits = &app.limits;
    let (router, reserve) = (router(app.clone()), reserve(app.clone()));
    let graceful = GracefulShutdown::new();
    let accept = accept(&listener, &app, router, reserve, &graceful);
    let drained = async {
        shutdown.await;
        tracing::info!(target: "kvist::server", "draining");
        app.drain();
        let end = tokio::time::Instant::now() + limits.grace();
        if tokio::time::timeout_at(end, app.engine.idle()).await.is_err() {
            tracing::warn!(target: "kvist::server", "the grace is over: running requests are ended");
            app.stopping.send_replace(true);
        }
        end
    };
    let end = tokio::select! {
        () = accept => tokio::time::Instant::now(),
        end = drained => end,
        () = app.engine.ended() => {
            recorded(&app).await;
            return Err(io::Error::other("the engine has stopped, after an error of this program: start it again"));
        }
    };
    drop(listener);
    // The engine finishes before its answers are sent. And after the first answer of a request, others may follow.
    let mut sent = std::pin::pin!(graceful.shutdown());
    if tokio::time::timeout_at(end, &mut sent).await.is_err() {
        app.stopping.send_replace(true);
        let _ = tokio::time::timeout(FAREWELL, sent).await;
    }
    recorded(&app).await;
    Ok(())
}
