//! `DELETE /v1/cache`
use crate::error::ApiError;
use crate::extract::Call;
use axum::Json;
use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use serde::Deserialize;
use serde_json::{Value, json};

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
    let salt = call.caller.salt(&cache_salt);
    let blocks = call.state.engine.forget(&salt).await;
    let blocks = blocks.ok_or_else(|| ApiError::internal("the engine has ended"))?;
    Ok(Json(json!({"object": "cache.deleted", "cache_salt": cache_salt, "deleted_blocks": blocks})))
}
