//! Sessions in files: `POST /v1/sessions/{id}/save` and `POST /v1/sessions/load`.
//!
//! Each owner has a folder of its own in the server's directory of sessions. A client names a file in it, and no path.
use super::fields::FileFields;
use super::shared::arrive;
use super::verbs::document_of;
use crate::blocking::blocking;
use crate::error::ApiError;
use crate::extract::{Call, Path, Posted};
use crate::openai::fields::{check, read};
use crate::state::ServerState;
use axum::Json;
use kvist_engine::sessions::SessionKeeper;
use serde_json::{Value, json};

fn keeper(state: &ServerState) -> Result<&SessionKeeper, ApiError> {
    state.keeper.get().ok_or_else(|| {
        let message = "this server keeps sessions in memory alone: start it with `--sessions-dir DIR`";
        ApiError::unsupported("file", message)
    })
}

pub(crate) async fn save(Path(id): Path<String>, posted: Posted) -> Result<Json<Value>, ApiError> {
    let Posted { call: Call { state, caller }, mut body } = posted;
    let _arrival = arrive(&state, &caller, &id).await?;
    blocking(move || {
        let id = state.sessions.id(&id)?;
        check(&mut body, &state.schemas.sessions.save, &state.bounds.model)?;
        let FileFields { file } = read(&body)?;
        let saved = keeper(&state)?.save(&caller.name, id, &file, state.max_session_files)?;
        Ok(Json(json!({
            "id": id.to_string(), "object": "session.saved", "file": file, "n_tokens": saved.n_tokens,
            "stored_tokens": saved.stored_tokens,
        })))
    })
    .await
}

pub(crate) async fn load(posted: Posted) -> Result<Json<Value>, ApiError> {
    let Posted { call: Call { state, caller }, mut body } = posted;
    blocking(move || {
        check(&mut body, &state.schemas.sessions.load, &state.bounds.model)?;
        let FileFields { file } = read(&body)?;
        let (info, kept) = keeper(&state)?.load(&caller.name, &file)?;
        let mut document = document_of(&info);
        document["stored_tokens"] = kept.stored_tokens.into();
        Ok(Json(document))
    })
    .await
}
