//! `/v1/cache`: its state, another capacity, and what it forgets.
use crate::error::ApiError;
use crate::extract::{Call, Posted};
use crate::openai::fields::{check, read};
use crate::openai::request::object;
use crate::state::ServerState;
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use axum::http::StatusCode;
use kvist_engine::serving::ResizeError;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Copies to and from tiers end by themselves. A smaller cache waits so long for them.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Forgotten {
    #[serde(default)]
    cache_salt: String,
}

/// Drops what the cache has of prompts of the caller under a salt.
pub(crate) async fn forget(
    call: Call,
    query: Result<Query<Forgotten>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(Forgotten { cache_salt }) = query.map_err(|error| {
        let message =
            format!("the query is wrong: {}; the only parameter is `cache_salt`", error.body_text());
        ApiError::invalid("cache_salt", message)
    })?;
    count_deletion(&call)?;
    let salt = call.caller.salt(&cache_salt);
    let forgotten = call.state.engine.forget(&salt).await;
    let forgotten = forgotten.ok_or_else(|| ApiError::internal("the engine has ended"))?;
    Ok(Json(json!({
        "object": "cache.deleted",
        "cache_salt": cache_salt,
        "deleted_blocks": forgotten.blocks,
        "pending_tiers": forgotten.untold,
    })))
}

/// Refuses a name that has left many notes in tiers.
fn count_deletion(call: &Call) -> Result<(), ApiError> {
    let has_tiers = call.state.engine.changes_below().is_some();
    if call.caller.admin || !has_tiers {
        return Ok(());
    }
    call.state.deletions.count(&call.caller.name, call.caller.arrived).map_err(|seconds| {
        let most = call.state.limits.max_deletions;
        let message = format!(
            "nothing was deleted: this key's name has used up its {most} deletions of this hour (`limits.max_deletions`), and each \
             leaves a note in the tiers; try again in {seconds} s, or with an admin key of the same name"
        );
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_deletions", message).retry_after(seconds)
    })
}

fn document(state: &ServerState) -> Value {
    let stats = state.engine.stats();
    json!({
        "object": "cache",
        "tokens": state.engine.capacity_tokens(),
        "used_tokens": stats.used_cells,
        "evictable_tokens": stats.evictable_cells,
        "retained_tokens": stats.retained_tokens,
        "bytes_per_token": state.engine.kv_bytes().per_token,
        "bytes": stats.kv_bytes,
    })
}

/// The body of `POST /v1/cache`.
pub(crate) fn schema() -> Value {
    let tokens = json!({
        "type": "integer", "minimum": 1, "maximum": u32::MAX / 2, "description":
            "Room for so many tokens, over all requests; rounded up to whole blocks.",
    });
    object(Map::from_iter([("tokens".to_owned(), tokens)]), &["tokens"], json!({}))
}

/// The state of the cache.
pub(crate) async fn show(call: Call) -> Result<Json<Value>, ApiError> {
    admins_only(&call)?;
    Ok(Json(document(&call.state)))
}

#[derive(Deserialize)]
struct Capacity {
    tokens: u32,
}

/// Gives the cache another capacity. Running requests go on.
pub(crate) async fn resize(posted: Posted) -> Result<Json<Value>, ApiError> {
    let Posted { call, mut body } = posted;
    admins_only(&call)?;
    let state = &call.state;
    check(&mut body, &state.schemas.cache, &state.bounds.model)?;
    let Capacity { tokens } = read(&body)?;
    let before = state.engine.capacity_tokens();
    let resized = state.engine.resize(tokens, PATIENCE).await;
    let tokens = resized.map_err(|refused| {
        let message = format!("the cache keeps its {before} tokens: {refused}");
        match refused {
            ResizeError::Ended => ApiError::internal(message),
            ResizeError::Refused(_) | ResizeError::Prefix { .. } | ResizeError::Device(_) => {
                ApiError::new(StatusCode::CONFLICT, "cache_not_resized", message).about("tokens")
            }
        }
    })?;
    tracing::info!(target: "kvist::server", before, tokens, "the cache has another capacity");
    Ok(Json(document(state)))
}

fn admins_only(call: &Call) -> Result<(), ApiError> {
    if call.caller.admin {
        return Ok(());
    }
    Err(ApiError::new(
        StatusCode::FORBIDDEN,
        "admin_only",
        "`/v1/cache` needs an admin key, except to forget",
    ))
}
