//! The exclusive right to change one session: its operations, and the effect of deleting the session meanwhile.
use super::{SessionInfo, SessionStore, Stamp, Timestamp};
use crate::sessions::SessionError;
use crate::sessions::history::History;
use crate::sessions::id::SessionId;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// Marks a session as claimed by a request.
pub(super) struct Busy {
    pub claim: u64,
    pub generates: bool,
    /// The state when it was claimed: what the shared store has until the claim ends.
    pub before: (History, Stamp),
    /// Dropped with the session, which makes the claim's receiver fail.
    pub _deleted: watch::Sender<()>,
}

/// The exclusive right to change one session. Dropping it releases the session.
pub struct SessionGuard {
    pub(super) store: Arc<SessionStore>,
    pub id: SessionId,
    pub(super) number: u64,
    pub history: History,
    pub salt: Arc<str>,
    pub owner: Arc<str>,
    pub(super) deleted: watch::Receiver<()>,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        let mut inner = self.store.lock();
        if inner.claimed(self.id, self.number).is_some() {
            inner.release(self.id, self.store.limits.idle);
        }
    }
}

impl SessionGuard {
    fn gone(&self) -> SessionError {
        SessionError::Deleted { id: self.id }
    }

    /// Resolves when the session is deleted, to the error that reports it.
    pub fn deleted(&self) -> impl Future<Output = SessionError> + Send + use<> {
        let (mut deleted, error) = (self.deleted.clone(), self.gone());
        async move {
            while deleted.changed().await.is_ok() {}
            error
        }
    }

    /// The session's current history; empty if the session was deleted.
    pub(crate) fn now(&self) -> History {
        let mut inner = self.store.lock();
        inner.claimed(self.id, self.number).map(|session| session.history.clone()).unwrap_or_default()
    }

    /// Replaces the session's history. Fails without a change if it would exceed the quota; a shorter history
    /// is always accepted.
    pub fn commit(&mut self, at: Timestamp, history: History) -> Result<SessionInfo, SessionError> {
        let mut inner = self.store.lock();
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let (before, after) = (session.history.charge(), history.charge());
        if after > before {
            self.store.admit(&mut inner, &self.owner, 0, after - before, Some(self.id))?;
        }
        let writer = inner.writer;
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        session.touched = at.instant;
        session.change(writer);
        session.history = history.clone();
        self.history = history;
        inner.charge(&self.owner, before, after);
        inner.changed(self.id);
        Ok(inner.info(self.id, at, &self.store.limits))
    }

    /// Appends a generated token. With the first token, `prompt` (the prompt, now computed) becomes the
    /// session's history. Fails if the session was deleted or its owner's quota is exceeded.
    pub(crate) fn push(&mut self, prompt: Option<History>, token: u32) -> Result<(), SessionError> {
        let mut inner = self.store.lock();
        let writer = inner.writer;
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let before = session.history.charge();
        if let Some(prompt) = prompt {
            session.history = prompt;
            session.change(writer);
        }
        Arc::make_mut(&mut session.history.tokens).push(token);
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
        self.store.admit(&mut inner, &self.owner, 0, 0, Some(self.id)).map_err(|error| match error {
            SessionError::TooManyTokens { tokens, max, .. } => {
                SessionError::TooManyTokens { tokens, more: 1, max }
            }
            other => other,
        })
    }

    /// Ends the generation. `last` finalizes the history. It may take long, so it runs without the store's
    /// lock; the claim keeps other requests from changing the history meanwhile.
    pub(crate) fn end(&mut self, now: Instant, last: impl FnOnce(&mut History)) {
        let there = self.store.lock().claimed(self.id, self.number).map(|session| session.history.clone());
        let Some(before) = there else { return };
        let mut history = before.clone();
        last(&mut history);
        let has_changed = history != before;
        let mut inner = self.store.lock();
        let writer = inner.writer;
        let Some(session) = inner.claimed(self.id, self.number) else { return };
        let before = session.history.charge();
        if has_changed {
            session.change(writer);
        }
        session.history = history;
        session.touched = now;
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
        inner.release(self.id, self.store.limits.idle);
    }
}
