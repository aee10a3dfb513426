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
pub(crate) struct Name {
    /// Bytes that are no UTF-8 by themselves are replaced.
    pub text: String,
    /// What it adds to a text; a control token's name. `None` if the tokenizer gives its tokens no bytes of their own.
    pub bytes: Option<Vec<u8>>,
}

/// Of a model without a tokenizer the token's number.
pub(crate) fn name_of(app: &App, token: u32) -> Name {
    match app.pieces().and_then(|pieces| pieces.get(token as usize)) {
        Some(piece) => {
            let text = String::from_utf8_lossy(&piece.bytes).into_owned();
            Name { text, bytes: Some(piece.bytes.clone()) }
        }
        None => Name { text: app.decode(&[token]).unwrap_or_else(|_| token.to_string()), bytes: None },
    }
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
