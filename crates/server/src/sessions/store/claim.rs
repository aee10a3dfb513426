//! The right to change one session: what may be done with it, and what becomes of the session when it goes.
use super::{Moment, Seen, SessionId, Store};
use crate::error::ApiError;
use crate::sessions::history::History;
use axum::http::StatusCode;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// A request changes it.
pub(super) struct Busy {
    pub claim: u64,
    pub generates: bool,
    /// It goes with the session: then the claim's receiver fails.
    pub _held: watch::Sender<()>,
}

/// The right to change one session, until it is dropped.
pub(crate) struct Claim {
    pub(super) store: Arc<Store>,
    pub id: SessionId,
    pub(super) number: u64,
    pub history: History,
    pub salt: Arc<str>,
    pub owner: Arc<str>,
    pub(super) deleted: watch::Receiver<()>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut inner = self.store.lock();
        if inner.claimed(self.id, self.number).is_some() {
            inner.release(self.id, self.store.quota.idle());
        }
    }
}

impl Claim {
    fn gone(&self) -> ApiError {
        let message = format!("session {} was deleted meanwhile", self.id);
        ApiError::new(StatusCode::NOT_FOUND, "session_not_found", message)
    }

    /// Resolves when the session is deleted, to what its user is told.
    pub fn deleted(&self) -> impl Future<Output = ApiError> + Send + use<> {
        let (mut deleted, error) = (self.deleted.clone(), self.gone());
        async move {
            while deleted.changed().await.is_ok() {}
            error
        }
    }

    /// The session's history as it is now; empty if the session is gone.
    pub fn now(&self) -> History {
        let mut inner = self.store.lock();
        inner.claimed(self.id, self.number).map(|session| session.history.clone()).unwrap_or_default()
    }

    /// Make it the session's history. Refused, with nothing changed, beyond the quota; becoming shorter never is.
    pub fn commit(&mut self, at: Moment, history: History) -> Result<Seen, ApiError> {
        let mut inner = self.store.lock();
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let (before, after) = (session.history.charge(), history.charge());
        if after > before {
            let tokens = inner.owned.get(&self.owner).map_or(0, |own| own.charge);
            self.store.admit_tokens(tokens, after - before)?;
        }
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        session.computed = session.computed.min(session.history.in_common(&history));
        session.touched = at.instant;
        session.history = history.clone();
        self.history = history;
        inner.charge(&self.owner, before, after);
        Ok(inner.see(self.id, at, &self.store.quota))
    }

    /// A generated token. The first one makes `began`, its prompt, the session's history: it has been computed.
    /// Refused when the session is gone, or its owner's quota is full.
    pub fn push(&mut self, began: Option<History>, token: u32) -> Result<(), ApiError> {
        let mut inner = self.store.lock();
        let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
        let before = session.history.charge();
        let is_first = began.is_some();
        if let Some(began) = began {
            session.history = began;
        }
        Arc::make_mut(&mut session.history.tokens).push(token);
        session.computed = session.history.tokens.len() - 1;
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
        if is_first {
            // What waits for it goes on.
            inner.ahead.done(&self.salt, self.id);
        }
        let tokens = inner.owned.get(&self.owner).map_or(0, |own| own.charge);
        if tokens > self.store.quota.max_tokens {
            return Err(self.store.too_long(tokens, 1));
        }
        Ok(())
    }

    /// Its generation has ended, or will not go on: `last` settles the history. It may take a while, without
    /// the store's lock: no other may change the history meanwhile.
    pub fn end(&mut self, now: Instant, last: impl FnOnce(&mut History)) {
        let there = self.store.lock().claimed(self.id, self.number).map(|session| session.history.clone());
        let Some(mut history) = there else { return };
        last(&mut history);
        let mut inner = self.store.lock();
        let Some(session) = inner.claimed(self.id, self.number) else { return };
        let before = session.history.charge();
        session.history = history;
        let n_tokens = session.history.tokens.len();
        session.computed = session.computed.min(n_tokens);
        session.touched = now;
        let after = session.history.charge();
        inner.charge(&self.owner, before, after);
        inner.release(self.id, self.store.quota.idle());
    }

    /// Say that `prompt` is about to be computed, unless a generation of the same salt computes more of it right now than
    /// ever was: then a receiver that fails when that one has its first token, or has ended.
    ///
    /// So branches of a trunk that was never computed, all set going at once, compute it once: one goes ahead, the
    /// others find it in the cache. Each wait is for a longer beginning than the one before, so it ends.
    pub fn announce(&self, prompt: &Arc<[u32]>) -> Result<Option<watch::Receiver<()>>, ApiError> {
        let block = self.store.block_tokens;
        let mut inner = self.store.lock();
        let computed = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?.computed;
        if let Some((found, receiver)) = inner.ahead.best(&self.salt, prompt, computed, block) {
            let session = inner.claimed(self.id, self.number).ok_or_else(|| self.gone())?;
            session.computed = found;
            return Ok(Some(receiver));
        }
        inner.ahead.begin(&self.salt, self.id, prompt.clone());
        Ok(None)
    }
}
