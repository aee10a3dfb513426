//! Text to tokens and back: what prompts and log-probabilities need, and `POST /tokenize`, `POST /detokenize` as vLLM
//! has them.
use super::request::{check, read};
use crate::app::App;
use crate::error::ApiError;
use crate::http::{blocking, json_body};
use crate::work::{Taken, halted};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use kvist_engine::Error;
use kvist_engine::model::Model;
use kvist_engine::tokenizer::{Ends, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::borrow::Cow;
use std::sync::Arc;

/// With `special`, what the model expects at the start of a text comes first. Refused if the tokenizer gives a token that
/// the model does not know: repackaged models have such ones, for padding.
fn encode(app: &App, text: &str, special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
    let model = app.engine.model();
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    let _taken = room_for(app, tokenizer, text, TOKEN_BYTES, param)?;
    let tokens = tokenizer.encode(text, special).map_err(failed)?;
    known(model, tokenizer, &tokens).map_err(|error| error.about(param))?;
    Ok(tokens)
}

/// [`encode`] of rendered text, and where its tokens end.
pub(crate) fn encode_with_ends(app: &App, text: &str, special: bool, param: &str) -> Result<Ends, ApiError> {
    let model = app.engine.model();
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    let _taken = room_for(app, tokenizer, text, TOKEN_AND_END_BYTES, param)?;
    let ends = tokenizer.encode_with_ends(text, special).map_err(failed)?;
    known(model, tokenizer, &ends.tokens).map_err(|error| error.about(param))?;
    Ok(ends)
}

fn failed(error: Error) -> ApiError {
    match error {
        Error::Halted => halted(),
        error => ApiError::internal(error.to_string()),
    }
}

/// Bytes of a text that a tokenizer takes at once, and how many bytes of memory it takes for each. Measured: 118, of
/// white space.
const MAX_PIECE_BYTES: usize = 512 << 10;
const PIECE_FACTOR: usize = 128;

/// Bytes for each byte of a text, each of which may be a token: in lists that grow by doubling, and are copied.
const TOKEN_BYTES: usize = 12;
const TOKEN_AND_END_BYTES: usize = 16;

/// Room for the tokens of a text.
fn room_for(
    app: &App,
    tokenizer: &Tokenizer,
    text: &str,
    each: usize,
    param: &str,
) -> Result<Taken, ApiError> {
    let piece = tokenizer.largest_piece(text);
    if piece > MAX_PIECE_BYTES {
        let message = format!(
            "the text has {piece} bytes in one piece; this model's tokenizer takes {MAX_PIECE_BYTES} at once, where no \
             word ends that is followed by a blank or a line break"
        );
        return Err(ApiError::invalid(param, message));
    }
    app.work.take(piece * PIECE_FACTOR + text.len() * each, param)
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
    encode(app, text, special, param)
}

/// White space that a text may have beside what the context's longest tokens can be.
const SPARE_WHITE_SPACE: usize = 64 << 10;

/// Refuse a text that is longer than the context's longest tokens. Of white space a control token may take in what
/// stands beside it, so that [`SPARE_WHITE_SPACE`] is not counted.
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
        if text.len() > room.saturating_add(SPARE_WHITE_SPACE) {
            let message = format!(
                "the prompt has {} bytes, {bytes} of them besides white space, more than {most} tokens can be; prompt and \
                 answer together have room for {most} tokens",
                text.len()
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

#[derive(Serialize)]
struct Tokens {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
}

pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.tokenize, &app.bounds.model)?;
        let fields: Tokenize = read(&body)?;
        let special = fields.add_special_tokens.unwrap_or(true);
        let tokens = encode(&app, &fields.prompt, special, "prompt")?;
        // Written here, and not as a document: it may be long.
        Ok(Json(Tokens { count: tokens.len(), max_model_len: app.bounds.max_tokens, tokens }).into_response())
    })
    .await
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

/// Bytes of a token, where tokens have none of their own.
const LONGEST_UNKNOWN: usize = 256;

pub(crate) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = json_body(&app, request).await?;
    blocking(move || {
        check(&mut body, &app.schemas.detokenize, &app.bounds.model)?;
        let fields: Detokenize = read(&body)?;
        // Each is a text of its own before they are one, which is copied into the answer.
        let longest = app.longest_token().unwrap_or(LONGEST_UNKNOWN);
        let _taken = app.work.take(fields.tokens.len() * (64 + 4 * longest), "tokens")?;
        Ok(Json(json!({"prompt": app.decode(&fields.tokens)?})).into_response())
    })
    .await
}
