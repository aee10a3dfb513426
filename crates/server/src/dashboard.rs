//! The dashboard page at `/`, embedded in the binary, and the event stream that it subscribes to.
//!
//! The bundle is built from `/dashboard` and committed, so building the server needs no Node. The page loads nothing
//! from other origins, and its content security policy allows no script but its own.
use crate::error::ApiError;
use crate::extract::Call;
use crate::live::{ListenError, MAX_LISTENERS, below, sessions, tiers};
use crate::state::ServerState;
use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Path, content type, bytes.
const FILES: &[(&str, &str, &[u8])] = &[
    ("", "text/html; charset=utf-8", include_bytes!("../dashboard/index.html")),
    ("assets/app.js", "text/javascript; charset=utf-8", include_bytes!("../dashboard/assets/app.js")),
    ("assets/index.css", "text/css; charset=utf-8", include_bytes!("../dashboard/assets/index.css")),
    ("favicon.svg", "image/svg+xml", include_bytes!("../dashboard/favicon.svg")),
    ("example.jsonl.gz", "application/gzip", include_bytes!("../dashboard/example.jsonl.gz")),
];

fn file(path: &str) -> Response {
    let Some((_, kind, bytes)) = FILES.iter().find(|(name, ..)| *name == path) else {
        let message = format!("there is no /{path}; see /openapi.json");
        return ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message).into_response();
    };
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-cache"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, *bytes).into_response()
}

pub(crate) async fn index() -> Response {
    file("")
}
pub(crate) async fn favicon() -> Response {
    file("favicon.svg")
}
pub(crate) async fn example() -> Response {
    file("example.jsonl.gz")
}
pub(crate) async fn asset(Path(name): Path<String>) -> Response {
    file(&format!("assets/{name}"))
}

/// `GET /kvist/live`: an event `snapshot`, then events `lines` ([`crate::live`]), `sessions` ([`sessions`]) and, with tiers,
/// `tiers` ([`tiers`]) and `below` ([`below`]). The stream shows all users, so if keys are configured it requires an admin key.
pub(crate) async fn live(Call { state, caller }: Call) -> Result<Response, ApiError> {
    if !caller.admin {
        let message = "the live view shows the requests of all users and needs an admin key";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message));
    }
    let joined = state.live.listen(&state.engine, state.model_name().to_owned()).await;
    let (snapshot, lines) = joined.map_err(|why| match why {
        ListenError::TooMany => {
            let message = format!("{MAX_LISTENERS} dashboards are connected already: close one of them");
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_listeners", message).retry_after(5)
        }
        ListenError::Stopped => ApiError::internal("the engine has stopped: restart the server"),
    })?;
    let first = stream::once(async move { Event::default().event("snapshot").data(snapshot) });
    let rest = stream::unfold(lines, |mut lines| async move {
        let batch = lines.recv().await?;
        Some((Event::default().event("lines").data(&*batch), lines))
    });
    let sessions =
        sessions::watch(state.session_list.clone()).map(|now| Event::default().event("sessions").data(now));
    let tiers = tiers::watch(state.engine.clone()).map(|now| Event::default().event("tiers").data(now));
    let below = below::watch(state.clone()).map(|now| Event::default().event("below").data(&*now));
    let others = stream::select(sessions, stream::select(tiers, below)).map(Some);
    let rest = stream::select(rest.map(Some).chain(stream::once(async { None })), others);
    // The stream ends when the lines end.
    let rest = rest.take_while(|event| std::future::ready(event.is_some())).filter_map(std::future::ready);
    let events = first.chain(rest.take_until(drained(state))).map(Ok::<_, Infallible>);
    let keep_alive = KeepAlive::new().interval(Duration::from_secs(15));
    Ok(([(header::CACHE_CONTROL, "no-store")], Sse::new(events).keep_alive(keep_alive)).into_response())
}

/// Waits until the server is shutting down and nothing runs any more: there is nothing left to show.
async fn drained(state: Arc<ServerState>) {
    loop {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let stats = state.engine.stats();
        if state.is_draining() && stats.running + stats.waiting == 0 {
            return;
        }
    }
}
