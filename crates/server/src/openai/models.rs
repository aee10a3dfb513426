//! `GET /v1/models`, `GET /v1/models/{id}`: the one model.
use crate::error::ApiError;
use crate::extract::Path;
use crate::state::ServerState;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

fn card(state: &ServerState) -> Value {
    json!({
        "id": state.bounds.model,
        "object": "model",
        "created": state.started,
        "owned_by": "kvist",
        "max_model_len": state.max_model_len(),
        "chat_template": state.bounds.template,
    })
}

pub(crate) async fn models(State(state): State<Arc<ServerState>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&state)]}))
}

pub(crate) async fn model(
    State(state): State<Arc<ServerState>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id != state.bounds.model {
        let message = format!("there is no model {id:?} here; this server serves {:?}", state.bounds.model);
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model"));
    }
    Ok(Json(card(&state)))
}
