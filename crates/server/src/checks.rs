//! The checks in front of every handler: host, origin, API key, and the number of requests in progress.
use crate::blocking::with_document;
use crate::connections::Connection;
use crate::error::ApiError;
use crate::state::ServerState;
use axum::extract::{Request, State};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// What lets pages of the configured origins call; `None` if there are none.
pub(crate) fn cors(origins: &[String]) -> Option<CorsLayer> {
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
        // Clients send headers of their own (OpenAI's `x-stainless-*`), and kvist acts on none that a page of an
        // allowed origin should not send.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, HeaderName::from_static("x-should-retry")])
        .max_age(Duration::from_secs(600));
    Some(layer)
}

/// Runs around every request: checks `Host` and counts response statuses.
pub(crate) async fn around(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let refused = one_host(request.headers()).and_then(|()| known_host(&state, request.headers()));
    let mut response = match refused {
        Err(error) => error.into_response(),
        Ok(()) => next.run(request).await,
    };
    response
        .headers_mut()
        .insert(HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff"));
    state.metrics.responded(response.status().as_u16());
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
fn known_host(state: &ServerState, headers: &HeaderMap) -> Result<(), ApiError> {
    if !state.keys.is_open() || !state.http.host.is_loopback() || state.http.open {
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
    let message = "this server has no API keys, so it only answers requests to localhost; \
                   configure [[keys]] to allow others";
    Err(ApiError::new(StatusCode::FORBIDDEN, "unknown_host", message))
}

/// Identifies the caller and attaches it to the request for all handlers.
pub(crate) async fn authenticate(
    State(state): State<Arc<ServerState>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = state.keys.caller(request.headers())?;
    if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
        let permit = state.requests.take(&caller.name).map_err(|full| {
            let message = format!(
                "{} requests of this key's name are in progress, and the remaining slots are reserved for other \
                 keys: try again when some are answered",
                full.taken
            );
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).retry_after(1)
        })?;
        connection.set_caller(&caller.name, permit);
    }
    request.extensions_mut().insert(caller);
    Ok(with_document(next.run(request)).await)
}
