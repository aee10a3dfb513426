//! The endpoints of the server itself: health, version, the OpenAPI document, metrics.
use crate::error::ApiError;
use crate::extract::Call;
use crate::metrics;
use crate::state::ServerState;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// The same response as vLLM's.
pub(crate) async fn version() -> Response {
    Json(serde_json::json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

/// Also while the server shuts down, so that a supervisor does not kill it meanwhile.
pub(crate) async fn healthy(State(state): State<Arc<ServerState>>) -> Response {
    if let Some(why) = state.engine.failure() {
        return ApiError::engine_failed(&why).into_response();
    }
    Json(serde_json::json!({"status": "ok"})).into_response()
}

pub(crate) async fn ready(State(state): State<Arc<ServerState>>) -> Response {
    if state.is_draining() {
        return ApiError::shutting_down(state.retry_after_s()).into_response();
    }
    if let Some(why) = state.engine.failure() {
        return ApiError::engine_failed(&why).into_response();
    }
    Json(serde_json::json!({"status": "ready"})).into_response()
}

/// What routers ask a worker: vLLM's and SGLang's names.
pub(crate) async fn server_info(State(state): State<Arc<ServerState>>) -> Response {
    let name = state.model_name();
    Json(serde_json::json!({
        "model_id": name,
        "served_model_name": name,
        "instance_id": state.instance_id,
        "is_generation": true,
        "kv_block_size": state.block_tokens,
        "max_model_len": state.max_model_len(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
    .into_response()
}

/// Where routers find this server's KV events.
pub(crate) async fn kv_event_sources(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    let Some(events) = state.kv_events.get() else {
        let message = "this server publishes no KV events: start it with --kv-events";
        return Err(ApiError::new(StatusCode::NOT_FOUND, "no_kv_events", message));
    };
    Ok(Json(events.sources()).into_response())
}

pub(crate) async fn openapi(State(state): State<Arc<ServerState>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], state.openapi.clone()).into_response()
}

pub(crate) async fn metrics(Call { state, caller }: Call) -> Result<Response, ApiError> {
    if !caller.admin && !state.http.open_metrics {
        let message = "metrics cover the requests of all users and need an admin key";
        return Err(ApiError::new(StatusCode::FORBIDDEN, "admin_only", message));
    }
    let stats = state.engine.stats();
    let mut readings = metrics::of_engine(&stats);
    readings.push(metrics::of_cache(&stats, state.block_tokens));
    readings.extend(metrics::of_limits(state.engine.rejected(), &state.connections));
    readings.extend(state.kv_events.get().map(|events| metrics::of_events(events.n_messages())));
    readings.extend(
        state
            .shared_sessions
            .get()
            .into_iter()
            .flat_map(|shared| metrics::of_shared_sessions(shared.counts())),
    );
    let failed = |error| {
        ApiError::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "server_error",
            format!("cannot render the metrics: {error}"),
        )
    };
    let text = state.metrics.render(&readings).map_err(failed)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}
