//! All sessions of an engine: owner, parent, state and expiry time.
//!
//! A session consists of integers and text; it uses no KV cache blocks. Only one request at a time may change
//! a session: it owns the session's [`SessionGuard`] while it changes the history or generates. Forks and reads need
//! no guard. A session is visible only to its owner; for others it does not exist.
//!
//! Quota usage is updated incrementally as histories change, token by token during generation; `Inner::audit`
//! recomputes it in tests. An operation touches sessions of other owners only to remove expired ones.
mod guard;
mod inner;
mod saved;
mod shared;
mod stamp;
#[cfg(test)]
mod tests;

use super::history::History;
use super::id::SessionId;
use super::{Searched, SessionError, SessionLimits};
use guard::Busy;
pub use guard::SessionGuard;
pub(super) use inner::Change;
use inner::{Inner, Session};
pub(super) use saved::SessionRecord;
#[cfg(test)]
pub(super) use shared::MOST_DELETIONS;
pub(super) use shared::{Adopted, Due, Expected, Pending, Settled, SharedTask};
pub(super) use stamp::Stamp;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;

/// A time on both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Timestamp {
    pub instant: Instant,
    /// Seconds since 1970.
    pub unix_s: u64,
}

impl Timestamp {
    /// The current time.
    pub fn now() -> Self {
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Timestamp { instant: Instant::now(), unix_s }
    }
}

/// The initial state of a session.
#[derive(Clone, Debug, Default)]
pub struct NewSession {
    pub name: Option<String>,
    /// The owner's name for the salt. It is reported, and has no other effect.
    pub cache_salt: Option<String>,
    /// Salt of the prefix cache: only sessions and jobs with the same salt share cached prefixes.
    pub salt: Arc<str>,
    pub history: History,
}

/// A session, as reported to its owner.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    pub id: SessionId,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    pub created_s: u64,
    pub expires_s: u64,
    pub n_tokens: usize,
    pub n_messages: Option<usize>,
    pub parent: Option<SessionId>,
    /// Length of the token prefix that it shares with its parent.
    pub shared_tokens: usize,
    pub children: Vec<SessionId>,
    pub running: bool,
}

/// A session as the live view shows it, with the tokens and salt needed to find its blocks. The live view may
/// show sessions of all owners.
pub struct SessionTokens {
    pub id: SessionId,
    pub parent: Option<SessionId>,
    pub running: bool,
    pub tokens: Arc<Vec<u32>>,
    pub salt: Arc<str>,
}

/// All sessions, in memory.
pub struct SessionStore {
    inner: Mutex<Inner>,
    limits: SessionLimits,
    /// Other workers may have sessions that are not here.
    is_shared: AtomicBool,
}

impl SessionStore {
    /// A store without sessions.
    pub fn new(limits: SessionLimits) -> Arc<Self> {
        Arc::new(SessionStore { inner: Mutex::default(), limits, is_shared: AtomicBool::new(false) })
    }

    pub(super) fn limits(&self) -> SessionLimits {
        self.limits
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    /// Locks the store and removes expired sessions.
    fn at(&self, at: Timestamp) -> MutexGuard<'_, Inner> {
        let mut inner = self.lock();
        let idle = self.limits.idle;
        while let Some((expiry, id)) =
            inner.expiries.first().copied().filter(|(expiry, _)| *expiry <= at.instant)
        {
            inner.expiries.remove(&(expiry, id));
            #[cfg(test)]
            {
                inner.n_checked += 1;
            }
            let Some(session) = inner.sessions.get_mut(&id) else { continue };
            session.scheduled = None;
            if session.busy.is_some() {
                continue; // `release` schedules it again
            }
            match idle.checked_sub(at.instant.saturating_duration_since(session.touched)) {
                // Only here: another worker may use it. What the store has of it expires by itself.
                None | Some(Duration::ZERO) => inner.remove(id),
                Some(_) => inner.wait(id, idle),
            }
        }
        inner
    }

    fn not_found(&self, id: &dyn fmt::Display) -> SessionError {
        let searched = match self.is_shared.load(Ordering::Relaxed) {
            true => Searched::SharedStore,
            false => Searched::OneWorker,
        };
        SessionError::NotFound { id: id.to_string(), idle: self.limits.idle, searched }
    }

    fn session<'a>(
        &self,
        inner: &'a mut Inner,
        owner: &str,
        id: SessionId,
    ) -> Result<&'a mut Session, SessionError> {
        let session = inner.sessions.get_mut(&id).filter(|session| &*session.owner == owner);
        session.ok_or_else(|| self.not_found(&id))
    }

    /// Parses an id, as its `Display` writes it.
    pub fn id(&self, text: &str) -> Result<SessionId, SessionError> {
        let shown: String = text.chars().take(64).collect();
        SessionId::parse(text).ok_or_else(|| self.not_found(&shown))
    }

    /// Makes sure that `n` more sessions, and `more` charge in all, are within the quota. If they are not, sessions that other workers have
    /// are let go first, but for `used`. Fails without a change if that is not enough.
    fn admit(
        &self,
        inner: &mut Inner,
        owner: &str,
        n: usize,
        more: u64,
        used: Option<SessionId>,
    ) -> Result<(), SessionError> {
        let SessionLimits { max_sessions, max_tokens, idle } = self.limits;
        let (sessions, tokens) = inner.owned.get(owner).map_or((0, 0), |own| (own.ids.len(), own.charge));
        // A call that creates none is not refused for their number: a limit may be lower than before a restart.
        let most_sessions = if n == 0 { Some(usize::MAX) } else { max_sessions.checked_sub(n) };
        let has_room = match (most_sessions, max_tokens.checked_sub(more)) {
            (Some(sessions), Some(tokens)) => inner.let_go_down_to(owner, (sessions, tokens), used, idle),
            _ => false,
        };
        match has_room {
            true => Ok(()),
            false if n > 0 && sessions.saturating_add(n) > max_sessions => {
                Err(SessionError::TooManySessions { sessions, more: n, max: max_sessions })
            }
            false => Err(self.too_long(tokens, more)),
        }
    }

    fn too_long(&self, tokens: u64, more: u64) -> SessionError {
        SessionError::TooManyTokens { tokens, more, max: self.limits.max_tokens }
    }

    /// Adds a session under an id that is drawn. Fails without a change if the owner's limits are reached.
    pub fn create(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        draft: NewSession,
    ) -> Result<SessionInfo, SessionError> {
        self.create_as(at, owner, None, draft)
    }

    /// The same under an id that the client has drawn, if there is one. Fails also if it is taken.
    pub fn create_as(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        id: Option<SessionId>,
        draft: NewSession,
    ) -> Result<SessionInfo, SessionError> {
        let mut inner = self.at(at);
        if let Some(id) = id.filter(|id| inner.sessions.contains_key(id)) {
            return Err(SessionError::Exists { id });
        }
        self.admit(&mut inner, owner, 1, draft.history.charge(), None)?;
        let session = Session {
            owner: owner.clone(),
            name: draft.name,
            cache_salt: draft.cache_salt,
            salt: draft.salt,
            created_s: at.unix_s,
            touched: at.instant,
            history: draft.history,
            parent: None,
            absent_parent: None,
            children: BTreeSet::new(),
            fork: None,
            stamp: Stamp::first(inner.writer),
            made: 1,
            recorded: None,
            seen: None,
            adopted: false,
            busy: None,
            scheduled: None,
        };
        let id = inner.add(id, session, self.limits.idle);
        Ok(inner.info(id, at, &self.limits))
    }

    /// Returns a snapshot of the session.
    pub fn get(
        &self,
        at: Timestamp,
        owner: &str,
        id: SessionId,
    ) -> Result<(SessionInfo, History), SessionError> {
        let mut inner = self.at(at);
        let history = self.session(&mut inner, owner, id)?.history.clone();
        Ok((inner.info(id, at, &self.limits), history))
    }

    /// The owner's sessions by creation time, with a resolution of seconds, then by id.
    pub fn list(&self, at: Timestamp, owner: &str) -> Vec<SessionInfo> {
        let inner = self.at(at);
        let own = inner.owned.get(owner).into_iter().flat_map(|own| &own.ids);
        let mut seen: Vec<SessionInfo> = own.map(|id| inner.info(*id, at, &self.limits)).collect();
        seen.sort_by_key(|one| (one.created_s, one.id));
        seen
    }

    /// The `max` most recently used sessions of all owners, ordered by creation, and how many more there are.
    /// Only for callers that may see all owners' data.
    pub fn recent(&self, now: Instant, max: usize) -> (Vec<SessionTokens>, usize) {
        let inner = self.at(Timestamp { instant: now, unix_s: 0 });
        let mut last: Vec<_> = inner.sessions.iter().map(|(id, session)| (session.touched, *id)).collect();
        last.sort_unstable_by(|a, b| b.cmp(a));
        let more = last.len().saturating_sub(max);
        last.truncate(max);
        let mut recent: Vec<_> = last
            .into_iter()
            .filter_map(|(_, id)| inner.sessions.get(&id).map(|session| (id, session)))
            .map(|(id, session)| {
                let session_tokens = SessionTokens {
                    id,
                    parent: session.parent,
                    running: session.busy.as_ref().is_some_and(|busy| busy.generates),
                    tokens: session.history.tokens.clone(),
                    salt: session.salt.clone(),
                };
                ((session.created_s, session.fork, id), session_tokens)
            })
            .collect();
        recent.sort_by_key(|(made, _)| *made);
        (recent.into_iter().map(|(_, session_tokens)| session_tokens).collect(), more)
    }

    /// Creates `n` sessions with `history`, a prefix of the history of `id`.
    pub fn fork(
        &self,
        at: Timestamp,
        owner: &str,
        id: SessionId,
        history: &History,
        n: usize,
        name: Option<&str>,
    ) -> Result<Vec<SessionInfo>, SessionError> {
        let mut inner = self.at(at);
        let parent = self.session(&mut inner, owner, id)?;
        parent.touched = at.instant;
        // Its state in the store is to expire later.
        inner.tell_shared(|| SharedTask::State(id));
        let parent = self.session(&mut inner, owner, id)?;
        let (owner, salt, cache_salt) =
            (parent.owner.clone(), parent.salt.clone(), parent.cache_salt.clone());
        self.admit(&mut inner, &owner, n, history.charge().saturating_mul(n as u64), Some(id))?;
        let (fork, writer) = (inner.number(), inner.writer);
        let one = |_| Session {
            owner: owner.clone(),
            name: name.map(str::to_string),
            cache_salt: cache_salt.clone(),
            salt: salt.clone(),
            created_s: at.unix_s,
            touched: at.instant,
            history: history.clone(),
            parent: Some(id),
            absent_parent: None,
            children: BTreeSet::new(),
            fork: Some(fork),
            stamp: Stamp::first(writer),
            made: 1,
            recorded: None,
            seen: None,
            adopted: false,
            busy: None,
            scheduled: None,
        };
        let forked: Vec<Session> = (0..n).map(one).collect();
        let ids: Vec<SessionId> =
            forked.into_iter().map(|session| inner.add(None, session, self.limits.idle)).collect();
        Ok(ids.into_iter().map(|id| inner.info(id, at, &self.limits)).collect())
    }

    /// Deletes a session. Its forks become forks of its parent.
    pub fn delete(&self, at: Timestamp, owner: &str, id: SessionId) -> Result<(), SessionError> {
        let mut inner = self.at(at);
        self.session(&mut inner, owner, id)?;
        inner.may_delete(owner)?;
        inner.delete(id);
        Ok(())
    }

    /// Deletes the session's siblings (the other sessions of the same fork call) that are not in `also`, with
    /// all their descendants. Returns the deleted ids.
    pub fn keep(
        &self,
        at: Timestamp,
        owner: &str,
        id: SessionId,
        also: &[SessionId],
    ) -> Result<Vec<SessionId>, SessionError> {
        let mut inner = self.at(at);
        let fork = self.session(&mut inner, owner, id)?.fork;
        let Some(fork) = fork else {
            return Err(SessionError::NotForked { id });
        };
        let sibling = |inner: &Inner, id: &SessionId| {
            inner.sessions.get(id).is_some_and(|s| &*s.owner == owner && s.fork == Some(fork))
        };
        for (i, id) in also.iter().enumerate() {
            if !sibling(&inner, id) {
                return Err(SessionError::NotASibling { index: i, id: *id });
            }
        }
        inner.may_delete(owner)?;
        let own = inner.owned.get(owner).into_iter().flat_map(|own| &own.ids);
        let mut losers: Vec<SessionId> = own.copied().collect();
        losers.retain(|other| *other != id && !also.contains(other) && sibling(&inner, other));
        // Add their descendants, one level at a time.
        let mut level = losers.clone();
        while !level.is_empty() {
            let below = level.iter().filter_map(|id| inner.sessions.get(id)).flat_map(|s| &s.children);
            level = below.copied().collect();
            losers.extend(&level);
        }
        losers.iter().for_each(|id| inner.delete(*id));
        self.session(&mut inner, owner, id)?.touched = at.instant;
        inner.tell_shared(|| SharedTask::State(id));
        Ok(losers)
    }

    /// Takes the exclusive right to change the session. `generates`: a generation continues it. Fails while another
    /// guard of the session exists.
    pub fn claim(
        self: &Arc<Self>,
        at: Timestamp,
        owner: &str,
        id: SessionId,
        generates: bool,
    ) -> Result<SessionGuard, SessionError> {
        let mut inner = self.at(at);
        let number = inner.number();
        let session = self.session(&mut inner, owner, id)?;
        if let Some(busy) = &session.busy {
            return Err(SessionError::Busy { id, generates: busy.generates });
        }
        let (sender, deleted) = watch::channel(());
        let before = (session.history.clone(), session.stamp);
        session.busy = Some(Busy { claim: number, generates, before, _deleted: sender });
        session.touched = at.instant;
        let (history, salt, owner) = (session.history.clone(), session.salt.clone(), session.owner.clone());
        inner.tell_shared(|| SharedTask::State(id));
        Ok(SessionGuard { store: self.clone(), id, number, history, salt, owner, deleted })
    }

    #[cfg(test)]
    pub fn audit(&self) {
        self.lock().audit(self.limits.idle);
    }
}
