//! `GET /v1/models`, `GET /v1/models/{id}`: the one model.
use crate::app::App;
use crate::error::ApiError;
use crate::http::Path;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;

fn card(app: &App) -> Value {
    json!({
        "id": app.bounds.model,
        "object": "model",
        "created": app.started,
        "owned_by": "kvist",
        "max_model_len": app.bounds.max_tokens,
        "chat_template": app.bounds.template,
    })
}

pub(crate) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

pub(crate) async fn model(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id != app.bounds.model {
        let message = format!("there is no model {id:?} here; this server serves {:?}", app.bounds.model);
        return Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model"));
    }
    Ok(Json(card(&app)))
}
