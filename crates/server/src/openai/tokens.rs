//! Text to tokens and back, for prompts and log-probabilities, and the endpoints `POST /tokenize` and `POST
//! /detokenize`, which follow vLLM's.
use super::fields::{check, read};
use super::parts::{PART_BYTES, PART_TOKENS, escaped, in_parts, items};
use crate::error::ApiError;
use crate::extract::Posted;
use crate::state::ServerState;
use crate::work::ReservedMemory;
use axum::Json;
use axum::response::{IntoResponse, Response};
use kvist_engine::Error;
use kvist_model::Model;
use kvist_model::tokenizer::{Ends, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::borrow::Cow;
use std::iter::once;

/// Tokenize `text`. With `special`, the tokens that the model expects at the start of a text come first. An error if
/// the tokenizer yields a token outside the model's vocabulary: repackaged models have such tokens, for padding. Also
/// returns the memory reservation.
fn encode(
    state: &ServerState,
    text: &str,
    special: bool,
    param: &str,
) -> Result<(Vec<u32>, ReservedMemory), ApiError> {
    let model = state.engine.model();
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    let taken = reserve_for(state, tokenizer, text, TOKEN_BYTES, param)?;
    let tokens = tokenizer.encode(text, special).map_err(failed)?;
    known(model, tokenizer, &tokens).map_err(|error| error.about(param))?;
    Ok((tokens, taken))
}

/// [`encode`] for rendered text. Also returns where each token ends in the text.
pub(crate) fn encode_with_ends(
    state: &ServerState,
    text: &str,
    special: bool,
    param: &str,
) -> Result<Ends, ApiError> {
    let model = state.engine.model();
    let tokenizer = model.tokenizer().ok_or_else(no_tokenizer)?;
    let _reserved = reserve_for(state, tokenizer, text, TOKEN_AND_END_BYTES, param)?;
    let ends = tokenizer.encode_with_ends(text, special).map_err(failed)?;
    known(model, tokenizer, &ends.tokens).map_err(|error| error.about(param))?;
    Ok(ends)
}

fn failed(error: Error) -> ApiError {
    match error {
        Error::Halted => ApiError::not_ready_in_time(),
        error => ApiError::internal(error.to_string()),
    }
}

/// Memory that a tokenizer takes per byte of the piece that it processes at once, in bytes. Measured: 118, for white
/// space.
const PIECE_FACTOR: usize = 128;

/// Memory per byte of text, in bytes. Each byte may become a token, and the lists grow by doubling and are copied.
const TOKEN_BYTES: usize = 12;
const TOKEN_AND_END_BYTES: usize = 16;

/// Reserve memory to tokenize a text.
fn reserve_for(
    state: &ServerState,
    tokenizer: &Tokenizer,
    text: &str,
    each: usize,
    param: &str,
) -> Result<ReservedMemory, ApiError> {
    let piece = tokenizer.largest_piece(text);
    let (lists, max) = (text.len() * each, state.work.bytes());
    if piece * PIECE_FACTOR + lists > max {
        let max = max.saturating_sub(lists) / PIECE_FACTOR;
        let message = format!(
            "the text has a piece of {piece} bytes in which no word is followed by a space or a line break; this \
             model's tokenizer can process pieces of at most {max} bytes (a larger max_body_bytes allows more)"
        );
        return Err(ApiError::invalid(param, message));
    }
    state.work.take(piece * PIECE_FACTOR + lists, param)
}

/// An error if a token lies outside the model's vocabulary.
pub(crate) fn known(model: &Model, tokenizer: &Tokenizer, tokens: &[u32]) -> Result<(), ApiError> {
    let vocab = model.config().vocab;
    let Some(&token) = tokens.iter().find(|token| **token as usize >= vocab) else { return Ok(()) };
    let name = tokenizer.name(token).unwrap_or_default();
    let message = format!(
        "the text contains {name:?}, which is token {token} of the tokenizer, but the model's vocabulary has only \
         {vocab} tokens"
    );
    Err(ApiError::unknown_token(message))
}

/// [`encode`], after [`refuse_long`] has refused texts that cannot fit into the context.
pub(crate) fn encode_prompt(
    state: &ServerState,
    text: &str,
    special: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    refuse_long(state, text, param)?;
    encode(state, text, special, param).map(|(tokens, _reserved)| tokens)
}

/// White space, in bytes, that a text may have beyond the length of the context's longest tokens.
const SPARE_WHITE_SPACE: usize = 64 << 10;

/// Refuse a text that is longer than a context full of the longest tokens. A control token may absorb white space
/// in addition, so [`SPARE_WHITE_SPACE`] is allowed in addition.
pub(crate) fn refuse_long(state: &ServerState, text: &str, param: &str) -> Result<(), ApiError> {
    let max = state.bounds.max_tokens;
    // Most texts are shorter and do not need the token table.
    let long = text.len() > max as usize;
    let max_bytes = long
        .then(|| state.longest_token())
        .flatten()
        .map_or(usize::MAX, |longest| longest.saturating_mul(max as usize));
    if text.len() > max_bytes {
        let bytes: usize = text.split_whitespace().map(str::len).sum();
        if bytes > max_bytes {
            let message = format!(
                "the prompt has {bytes} bytes besides white space, more than {max} tokens can represent; prompt \
                 and answer together can have at most {max} tokens"
            );
            return Err(ApiError::too_long(param, message));
        }
        if text.len() > max_bytes.saturating_add(SPARE_WHITE_SPACE) {
            let message = format!(
                "the prompt has {} bytes, {bytes} of them besides white space, more than {max} tokens can \
                 represent; prompt and answer together can have at most {max} tokens",
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

/// A token's name in log-probabilities.
pub(crate) struct Name<'a> {
    /// Bytes that are not valid UTF-8 by themselves are replaced.
    pub text: Cow<'a, str>,
    /// The bytes that the token adds to a text; for a control token its name. `None` if the tokenizer's tokens have no
    /// bytes of their own.
    pub bytes: Option<&'a [u8]>,
}

/// Without a tokenizer the name is the token's id.
pub(crate) fn name_of(state: &ServerState, token: u32) -> Name<'_> {
    match state.pieces().and_then(|pieces| pieces.get(token as usize)) {
        Some(piece) => Name { text: String::from_utf8_lossy(&piece.bytes), bytes: Some(&piece.bytes) },
        None => {
            let text = state.decode(&[token]).unwrap_or_else(|_| token.to_string());
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

/// The JSON of [`Tokens`], in parts.
fn token_parts(tokens: Vec<u32>, max_model_len: u32) -> impl Iterator<Item = String> {
    let count = tokens.len();
    let head = format!("{{\"count\":{count},\"max_model_len\":{max_model_len},\"tokens\":[");
    once(head).chain(items(tokens)).chain(once("]}".into()))
}

/// The JSON `{"prompt": text}`, in parts.
fn text_parts(text: String) -> impl Iterator<Item = String> {
    once("{\"prompt\":\"".to_string()).chain(escaped(text)).chain(once("\"}".into()))
}

pub(crate) async fn tokenize(posted: Posted) -> Result<Response, ApiError> {
    let tokenized = posted.prepare(|state, caller, body| {
        check(body, &state.schemas.tokenize, &state.bounds.model)?;
        let fields: Tokenize = read(body)?;
        let special = fields.add_special_tokens.unwrap_or(true);
        let (mut tokens, _reserved) = encode(state, &fields.prompt, special, "prompt")?;
        let max_model_len = state.max_model_len();
        if tokens.len() <= PART_TOKENS {
            return Ok(Json(Tokens { count: tokens.len(), max_model_len, tokens }).into_response());
        }
        tokens.shrink_to_fit();
        let bytes = tokens.len() * size_of::<u32>();
        in_parts(state, caller, bytes, "prompt", token_parts(tokens, max_model_len))
    });
    tokenized.await
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Vec<u32>,
}

/// Assumed largest size of a token in bytes, if tokens have no bytes of their own.
const LONGEST_UNKNOWN: usize = 256;

/// Upper bound of the size of these tokens' text, in bytes. The first call may take a while.
pub(crate) fn text_bytes(state: &ServerState, tokens: &[u32]) -> usize {
    let pieces = state.pieces();
    let bytes = |token: &u32| match pieces {
        Some(pieces) => pieces.get(*token as usize).map_or(0, |piece| piece.bytes.len()),
        None => {
            let name = state.engine.model().tokenizer().and_then(|tokenizer| tokenizer.name(*token));
            name.map_or(LONGEST_UNKNOWN, |name| name.len())
        }
    };
    tokens.iter().map(bytes).sum()
}

/// Memory to decode these tokens, in bytes: each first becomes a text of its own, and the joined text is copied.
pub(crate) fn decoding_bytes(state: &ServerState, tokens: &[u32]) -> usize {
    tokens.len() * 64 + 4 * text_bytes(state, tokens)
}

pub(crate) async fn detokenize(posted: Posted) -> Result<Response, ApiError> {
    let text = posted.prepare(|state, caller, body| {
        check(body, &state.schemas.detokenize, &state.bounds.model)?;
        let fields: Detokenize = read(body)?;
        let _reserved = state.work.take(decoding_bytes(state, &fields.tokens), "tokens")?;
        let mut text = state.decode(&fields.tokens)?;
        if text.len() <= PART_BYTES {
            return Ok(Json(json!({"prompt": text})).into_response());
        }
        text.shrink_to_fit();
        in_parts(state, caller, text.len(), "tokens", text_parts(text))
    });
    text.await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_answer() {
        for n in [1, PART_TOKENS, PART_TOKENS + 1, 3 * PART_TOKENS] {
            let tokens: Vec<u32> = (0..n as u32).collect();
            let whole = json!({"count": n, "max_model_len": 7, "tokens": tokens}).to_string();
            let parts: Vec<String> = token_parts(tokens, 7).collect();
            assert!(parts.iter().all(|part| part.len() <= 11 * PART_TOKENS));
            assert_eq!(parts.concat(), whole);
        }
        for text in ["", "a", "\"\\\n\u{1}é", "日本"] {
            for n in [1, PART_BYTES, PART_BYTES + 1] {
                let text = text.repeat(n);
                let parts: Vec<String> = text_parts(text.clone()).collect();
                assert!(parts.iter().all(|part| part.len() <= 6 * PART_BYTES));
                assert_eq!(parts.concat(), json!({"prompt": text}).to_string());
            }
        }
    }
}
