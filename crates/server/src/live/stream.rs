//! `GET /kvist/live`: the live view as server-sent events.
use super::{ListenError, MAX_LISTENERS, below, sessions, tiers};
use crate::error::ApiError;
use crate::extract::Call;
use crate::state::ServerState;
use axum::http::{StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// A stream without an event sends a comment after this time. The page reconnects if nothing comes for three times as long.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// An event `snapshot`, then events `lines`, `sessions` ([`sessions`]) and, with tiers, `tiers` ([`tiers`]) and `below`
/// ([`below`]). The stream shows all users, so if keys are configured it requires an admin key.
pub(crate) async fn events(Call { state, caller }: Call) -> Result<Response, ApiError> {
    if !caller.admin {
        let message = "the live view shows the requests of all users and needs an admin key";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message));
    }
    let joined = state.live.listen(&state).await;
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
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE);
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
