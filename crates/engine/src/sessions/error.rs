//! What sessions refuse.
use super::id::SessionId;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Why an operation on a session was refused. The session is unchanged, unless the operation says otherwise.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SessionError {
    /// The owner has no such session. `id` is shortened if it is not a session id.
    #[error(
        "there is no session {id} here: it was deleted, has expired after {} s without use, belongs to another key, \
         {searched}",
        idle.as_secs_f64()
    )]
    NotFound { id: String, idle: Duration, searched: Searched },
    /// Another worker has continued the session, and what it recorded cannot be read. An older state may be here.
    #[error(
        "session {id} was continued by another worker, and its record in the shared store is damaged, or the store has \
         dropped it: send the request to that worker, or create a new session"
    )]
    LostRecord { id: SessionId },
    /// Another worker has continued the session, and its record is longer than what this one takes over.
    #[error(
        "session {id} was continued by another worker, and its record has {bytes} bytes, but this worker takes over \
         {max} at most: send the request to that worker, or raise `sessions.max_tokens` and `limits.max_body_bytes` here"
    )]
    LongRecord { id: SessionId, bytes: u64, max: u64 },
    /// The session is not here, and the shared store does not answer.
    #[error(
        "session {id} is not on this worker, and the shared store does not answer: try again, or send the request to \
         the worker that has it"
    )]
    Unreachable { id: SessionId },
    /// The shared store has not noted earlier deletions, so what waits for it would grow without a bound.
    #[error(
        "the shared store does not answer or is full, and {waiting} deletions of this key wait for it already: try \
         again when it takes them"
    )]
    DeletionsWait { waiting: usize },
    /// A session cannot be created under this id.
    #[error("session {id} exists already, or was deleted: draw another id, or omit `id`")]
    Exists { id: SessionId },
    /// The session was deleted while a guard of it existed.
    #[error("session {id} was deleted in the meantime")]
    Deleted { id: SessionId },
    /// Another guard of the session exists.
    #[error("session {id} {}: wait until it is done, fork it, or delete it", busy(*generates))]
    Busy { id: SessionId, generates: bool },
    /// The session has no siblings: it was not made by a fork.
    #[error("session {id} was not forked: it has no siblings to delete")]
    NotForked { id: SessionId },
    /// The session at `index` of the list `also` is no sibling.
    #[error("`also[{index}]` is {id}, which is not a sibling: it is not from the same fork")]
    NotASibling { index: usize, id: SessionId },
    #[error(
        "this key has {sessions} sessions, and {more} more would exceed its limit of {max}: delete some, or keep \
         one of the branches"
    )]
    TooManySessions { sessions: usize, more: usize, max: usize },
    #[error(
        "the sessions of this key have {tokens} tokens, and {more} more would exceed its limit of {max}: delete \
         some, or roll back"
    )]
    TooManyTokens { tokens: u64, more: u64, max: u64 },
    /// Messages cannot follow a history that ends inside a message.
    #[error(
        "the history ends inside a message: roll back to its beginning (`{{\"to\": {{\"message\": N}}}}`), or \
         append `text` or `tokens`"
    )]
    InsideMessage,
    /// A value that this session does not take. `param` is the name under which it was given.
    #[error("{message}")]
    Invalid { param: String, message: String },
    /// The history would be longer than a prompt may be.
    #[error("the session would have {tokens} tokens, but prompt and answer together can have at most {max}")]
    TooLong { param: String, tokens: usize, max: usize },
    /// The owner saved no session under this name.
    #[error("no session was saved as {name:?}: `POST /v1/sessions/{{id}}/save` saves one")]
    NoSuchFile { name: String },
    /// The owner saved as many sessions as are allowed.
    #[error(
        "this key has saved {max} sessions, which is its limit: save under one of their names, which replaces it"
    )]
    TooManyFiles { max: usize },
    /// The disk did not take a session.
    #[error("{name:?} cannot be saved: {problem}")]
    NotSaved { name: String, problem: String },
    /// The work was cancelled, or its time is over ([`kvist_model::halt`]).
    #[error("the work was cancelled, or took too long")]
    Halted,
    /// The model's template or tokenizer failed.
    #[error(transparent)]
    Model(Arc<crate::Error>),
}

impl From<crate::Error> for SessionError {
    fn from(error: crate::Error) -> Self {
        SessionError::Model(Arc::new(error))
    }
}

/// Where a session was looked for, as the end of the sentence that it is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Searched {
    /// In this process, which shares its sessions with no other.
    OneWorker,
    /// Also in the store that workers share.
    SharedStore,
}

impl fmt::Display for Searched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Searched::OneWorker => {
                "or lives on another worker. A session lives in one worker: behind a router, send the same \
                 `x-session-id` with all of its requests (vllm-router: `consistent_hash`), or start the workers with \
                 --sessions-store URL, or --tier-store URL --sessions-shared, and any of them continues it"
            }
            Searched::SharedStore => "or the shared store has dropped its record",
        })
    }
}

fn busy(generates: bool) -> &'static str {
    if generates { "is generating" } else { "is being changed by another request" }
}

impl SessionError {
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        SessionError::Invalid { param: param.into(), message: message.into() }
    }
}
