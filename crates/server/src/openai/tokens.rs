//! Text to tokens and back: what prompts and log-probabilities need, and `POST /tokenize`, `POST /detokenize` as vLLM
//! has them.
use super::request::{check, read};
use crate::app::App;
use crate::error::ApiError;
use crate::http::{blocking, json_body};
use axum::Json;
use axum::extract::{Request, State};
use kvist_engine::model::Model;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// With `special`, what the model expects at the start of a text comes first.
pub(crate) fn encode(model: &Model, text: &str, special: bool) -> Result<Vec<u32>, ApiError> {
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    tokenizer.encode(text, special).map_err(|e| ApiError::internal(e.to_string()))
}

pub(crate) fn no_tokenizer() -> ApiError {
    ApiError::unsupported("prompt", "this model has no tokenizer: send lists of tokens")
}

/// A token as log-probabilities call it.
pub(crate) fn name_of(app: &App, token: u32) -> String {
    app.decode(&[token]).unwrap_or_default()
}

#[derive(Deserialize)]
struct Tokenize {
    prompt: String,
    add_special_tokens: Option<bool>,
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.tokenize, &app.bounds.model)?;
        let fields: Tokenize = read(&body)?;
        let tokens = encode(app.engine.model(), &fields.prompt, fields.add_special_tokens.unwrap_or(true))?;
        let max = app.bounds.max_tokens;
        Ok(Json(json!({"count": tokens.len(), "max_model_len": max, "tokens": tokens})))
    })
    .await
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.detokenize, &app.bounds.model)?;
        let fields: Detokenize = read(&body)?;
        Ok(Json(json!({"prompt": app.decode(&fields.tokens)?})))
    })
    .await
}
