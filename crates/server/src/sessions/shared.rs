//! Sessions of other workers: before a request uses one, its newest state is taken over from the shared store.
use crate::auth::Caller;
use crate::error::ApiError;
use crate::state::ServerState;
use kvist_engine::sessions::{Arrival, SessionError, SessionId, Timestamp};

/// Looks for the session `id` of the caller. Without a shared store, and for what is no id, nothing is done: the request itself finds
/// what is here. Hold what it returns until the session has been used.
///
/// # Errors
/// As [`SharedSessions::find`](kvist_engine::sessions::SharedSessions::find).
pub(super) async fn arrive(
    state: &ServerState,
    caller: &Caller,
    id: &str,
) -> Result<Option<Arrival>, ApiError> {
    match (state.shared_sessions.get(), SessionId::parse(id)) {
        (Some(shared), Some(id)) => Ok(Some(shared.find(&caller.name, id).await?)),
        _ => Ok(None),
    }
}

/// Deletes a session of the caller, wherever it is.
///
/// # Errors
/// As [`SharedSessions::delete`](kvist_engine::sessions::SharedSessions::delete).
pub(super) async fn remove(state: &ServerState, caller: &Caller, id: &str) -> Result<SessionId, ApiError> {
    let id = state.sessions.id(id)?;
    match state.shared_sessions.get() {
        Some(shared) => shared.delete(&caller.name, id).await?,
        None => state.sessions.delete(Timestamp::now(), &caller.name, id)?,
    }
    Ok(id)
}

/// Refuses to create a session under an id that another worker has recorded. If the store does not answer, the id is taken to be free.
pub(super) async fn refuse_known(
    state: &ServerState,
    caller: &Caller,
    id: Option<&str>,
) -> Result<(), ApiError> {
    let (Some(shared), Some(id)) = (state.shared_sessions.get(), id.and_then(SessionId::parse)) else {
        return Ok(());
    };
    match shared.is_free(&caller.name, id).await {
        true => Ok(()),
        false => Err(SessionError::Exists { id }.into()),
    }
}
