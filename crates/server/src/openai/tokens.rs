//! Text to tokens and back: what prompts and log-probabilities need, and `POST /tokenize`, `POST /detokenize` as vLLM
//! has them.
use super::request::{check, read};
use crate::app::App;
use crate::error::ApiError;
use crate::http::{blocking, json_body};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use kvist_engine::model::Model;
use kvist_engine::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::json;
use std::borrow::Cow;
use std::sync::Arc;

/// With `special`, what the model expects at the start of a text comes first. Refused if the tokenizer gives a token that
/// the model does not know: repackaged models have such ones, for padding.
pub(crate) fn encode(model: &Model, text: &str, special: bool) -> Result<Vec<u32>, ApiError> {
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    let tokens = tokenizer.encode(text, special).map_err(|e| ApiError::internal(e.to_string()))?;
    known(model, tokenizer, &tokens)?;
    Ok(tokens)
}

/// Refuse tokens that the model does not know.
pub(crate) fn known(model: &Model, tokenizer: &Tokenizer, tokens: &[u32]) -> Result<(), ApiError> {
    let vocab = model.decoder().config().vocab;
    let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) else { return Ok(()) };
    let name = tokenizer.name(token).unwrap_or_default();
    let message = format!(
        "the text has {name:?}, which is token {token} to the tokenizer; the model's vocabulary has {vocab}"
    );
    Err(ApiError::unknown_token(message))
}

/// [`encode`], unless the text is too long for any tokens: [`refuse_long`].
pub(crate) fn encode_prompt(app: &App, text: &str, special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
    refuse_long(app, text, param)?;
    encode(app.engine.model(), text, special).map_err(|error| error.about(param))
}

/// Refuse a text that is longer than the context's longest tokens. White space is not counted, because a control token
/// may take in whatever of it stands beside.
pub(crate) fn refuse_long(app: &App, text: &str, param: &str) -> Result<(), ApiError> {
    let most = app.bounds.max_tokens;
    // Most texts are shorter, and need not know the vocabulary.
    let long = text.len() > most as usize;
    let room = long
        .then(|| app.longest_token())
        .flatten()
        .map_or(usize::MAX, |longest| longest.saturating_mul(most as usize));
    if text.len() > room {
        let bytes: usize = text.split_whitespace().map(str::len).sum();
        if bytes > room {
            let message = format!(
                "the prompt has {bytes} bytes besides white space, more than {most} tokens can be; prompt and answer \
                 together have room for {most} tokens"
            );
            return Err(ApiError::too_long(param, message));
        }
    }
    Ok(())
}

pub(crate) fn no_tokenizer() -> ApiError {
    ApiError::unsupported("prompt", "this model has no tokenizer: send lists of tokens")
}

/// A token as log-probabilities call it.
pub(crate) struct Name<'a> {
    /// Bytes that are no UTF-8 by themselves are replaced.
    pub text: Cow<'a, str>,
    /// What it adds to a text; a control token's name. `None` if the tokenizer gives its tokens no bytes of their own.
    pub bytes: Option<&'a [u8]>,
}

/// Of a model without a tokenizer the token's number.
pub(crate) fn name_of(app: &App, token: u32) -> Name<'_> {
    match app.pieces().and_then(|pieces| pieces.get(token as usize)) {
        Some(piece) => Name { text: String::from_utf8_lossy(&piece.bytes), bytes: Some(&piece.bytes) },
        None => {
            let text = app.decode(&[token]).unwrap_or_else(|_| token.to_string());
            Name { text: text.into(), bytes: None }
        }
    }
}

#[derive(Deserialize)]
struct Tokenize {
    prompt: String,
    add_special_tokens: Option<bool>,
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.tokenize, &app.bounds.model)?;
        let fields: Tokenize = read(&body)?;
        let special = fields.add_special_tokens.unwrap_or(true);
        let tokens = encode(app.engine.model(), &fields.prompt, special).map_err(|e| e.about("prompt"))?;
        let max = app.bounds.max_tokens;
        // Written here: it may be long.
        Ok(Json(json!({"count": tokens.len(), "max_model_len": max, "tokens": tokens})).into_response())
    })
    .await
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

pub(crate) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.detokenize, &app.bounds.model)?;
        let fields: Detokenize = read(&body)?;
        Ok(Json(json!({"prompt": app.decode(&fields.tokens)?})).into_response())
    })
    .await
}
