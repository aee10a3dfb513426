//! The routes. A refused request costs no engine time. All errors have one format, including those for unknown paths
//! and methods.
use crate::checks::{around, authenticate, cors};
use crate::error::ApiError;
use crate::state::ServerState;
use crate::{cache, dashboard, health, live, openai, sessions};
use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{get, post};
use std::sync::Arc;

/// Every route of the API.
pub fn router(state: Arc<ServerState>) -> Router {
    let keyed = Router::new()
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/completions/render", post(openai::render_completions))
        .route("/v1/chat/completions/render", post(openai::render_chat))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*id}", get(openai::model))
        .route("/v1/sessions", get(sessions::list).post(sessions::create))
        .route("/v1/sessions/load", post(sessions::load))
        .route("/v1/sessions/{id}", get(sessions::show).delete(sessions::delete))
        .route("/v1/sessions/{id}/append", post(sessions::append))
        .route("/v1/sessions/{id}/generate", post(sessions::generate))
        .route("/v1/sessions/{id}/fork", post(sessions::fork))
        .route("/v1/sessions/{id}/rollback", post(sessions::rollback))
        .route("/v1/sessions/{id}/save", post(sessions::save))
        .route("/v1/sessions/{id}/keep", post(sessions::keep))
        .route("/v1/cache", get(cache::show).post(cache::resize).delete(cache::forget))
        .route("/tokenize", post(openai::tokenize))
        .route("/detokenize", post(openai::detokenize))
        .route("/metrics", get(health::metrics))
        .route("/kvist/live", get(live::stream::events))
        .route("/get_server_info", get(health::server_info))
        .route("/kv_event_sources", get(health::kv_event_sources))
        .route_layer(middleware::from_fn_with_state(state.clone(), authenticate));
    let open = Router::new()
        .route("/", get(dashboard::index))
        .route("/favicon.svg", get(dashboard::favicon))
        .route("/example.jsonl.gz", get(dashboard::example))
        .route("/assets/{name}", get(dashboard::asset))
        .route("/health", get(health::healthy))
        .route("/ready", get(health::ready))
        .route("/version", get(health::version))
        .route("/openapi.json", get(health::openapi));
    let routes = keyed.merge(open).fallback(no_such_path).method_not_allowed_fallback(wrong_method);
    let routes = match cors(&state.http.cors_origins) {
        Some(cors) => routes.layer(cors),
        None => routes,
    };
    routes.layer(middleware::from_fn_with_state(state.clone(), around)).with_state(state)
}

async fn no_such_path(request: Request) -> ApiError {
    let message = format!("there is no {}; see /openapi.json", request.uri().path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(request: Request) -> ApiError {
    let message =
        format!("{} does not support {}; see /openapi.json", request.uri().path(), request.method());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// The router for connections beyond the limit.
pub(crate) fn reserve(state: Arc<ServerState>) -> Router {
    let full = async |State(state): State<Arc<ServerState>>| {
        let max = state.limits.max_connections;
        let message = format!("there are {max} connections already: close some, or try again");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message).retry_after(1)
    };
    Router::new()
        .route("/health", get(health::healthy))
        .route("/ready", get(health::ready))
        .fallback(full)
        .layer(middleware::from_fn_with_state(state.clone(), around))
        .with_state(state)
}
