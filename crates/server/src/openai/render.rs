//! `POST /v1/completions/render` and `POST /v1/chat/completions/render`: the prompt that a request would run, as tokens.
//! Routers ask for it to find the worker that has most of it in its cache.
use super::parts::{PART_TOKENS, in_parts, items};
use super::{chat, completions};
use crate::auth::Caller;
use crate::error::ApiError;
use crate::extract::Posted;
use crate::state::ServerState;
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::iter::once;
use std::sync::Arc;

/// A list with an object for each prompt.
pub(crate) async fn render_completions(posted: Posted) -> Result<Response, ApiError> {
    let rendered = posted.prepare(|state, caller, body| {
        let prompts = completions::prompts(state, caller, body)?;
        respond(state, caller, prompts, "prompt", true)
    });
    rendered.await
}

/// One object: a conversation is one prompt.
pub(crate) async fn render_chat(posted: Posted) -> Result<Response, ApiError> {
    let rendered = posted.prepare(|state, caller, body| {
        let prompts = chat::prompts(state, caller, body)?;
        respond(state, caller, prompts, "messages", false)
    });
    rendered.await
}

fn respond(
    state: &Arc<ServerState>,
    caller: &Caller,
    prompts: Vec<Arc<[u32]>>,
    param: &str,
    as_list: bool,
) -> Result<Response, ApiError> {
    let n_tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum();
    if n_tokens <= PART_TOKENS {
        let rendered = prompts.iter().map(|prompt| json!({"token_ids": &**prompt}));
        return Ok(match as_list {
            true => Json(Value::Array(rendered.collect())).into_response(),
            false => Json(rendered.into_iter().next()).into_response(),
        });
    }
    in_parts(state, caller, n_tokens * size_of::<u32>(), param, parts(prompts, as_list))
}

/// The JSON in parts.
fn parts(prompts: Vec<Arc<[u32]>>, as_list: bool) -> impl Iterator<Item = String> {
    let (open, close) = if as_list { ("[", "]") } else { ("", "") };
    let of_prompt = |(i, prompt): (usize, Arc<[u32]>)| {
        let comma = if i == 0 { "" } else { "," };
        once(format!("{comma}{{\"token_ids\":[")).chain(items(prompt.to_vec())).chain(once("]}".into()))
    };
    let prompts = prompts.into_iter().enumerate().flat_map(of_prompt);
    once(open.to_string()).chain(prompts).chain(once(close.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_answer() {
        let prompts: Vec<Arc<[u32]>> =
            vec![(0..3 * PART_TOKENS as u32).collect(), Arc::from([7]), (0..9).collect()];
        let objects: Vec<Value> = prompts.iter().map(|prompt| json!({"token_ids": &**prompt})).collect();
        let text = |prompts: &[Arc<[u32]>], as_list| parts(prompts.to_vec(), as_list).collect::<String>();
        assert_eq!(text(&prompts, true), Value::from(objects.clone()).to_string());
        assert_eq!(text(&prompts[..1], false), objects[0].to_string());
    }
}
