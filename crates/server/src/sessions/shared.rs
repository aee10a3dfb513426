//! Sessions of other workers: before a request uses one, its newest state is taken over from the shared store.
use crate::auth::Caller;
use crate::error::ApiError;
use crate::state::ServerState;
use kvist_engine::sessions::{Found, SessionError, SessionId};

/// Looks for the session `id` of the caller. Without a shared store, and for what is no id, nothing is done: the request itself finds
/// what is here.
///
/// # Errors
/// As [`SharedSessions::find`](kvist_engine::sessions::SharedSessions::find).
pub(super) async fn arrive(state: &ServerState, caller: &Caller, id: &str) -> Result<(), ApiError> {
    if let (Some(shared), Some(id)) = (state.shared_sessions.get(), SessionId::parse(id)) {
        shared.find(&caller.name, id).await?;
    }
    Ok(())
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
    match shared.find(&caller.name, id).await {
        Ok(Found::Nowhere) | Err(SessionError::Unreachable { .. }) => Ok(()),
        Ok(Found::Here | Found::Deleted) | Err(_) => Err(SessionError::Exists { id }.into()),
    }
}
