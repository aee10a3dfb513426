//! Sessions as they are stored in files.
use super::inner::{Change, Session};
use super::{SessionInfo, SessionStore, Stamp, Timestamp};
use crate::sessions::history::SavedHistory;
use crate::sessions::{History, SessionError, SessionId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Everything of a session that outlives the process.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::sessions) struct SessionRecord {
    pub id: String,
    pub owner: String,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    pub salt: String,
    pub created_s: u64,
    /// When it was last changed, forked or generated in.
    pub touched_s: u64,
    pub parent: Option<String>,
    pub fork: Option<u64>,
    /// The last change; `None` in files of older versions.
    #[serde(default)]
    pub stamp: Option<Stamp>,
    /// The state that a shared store had, as far as this process knew.
    #[serde(default)]
    pub recorded: Option<Stamp>,
    /// It was taken over from another worker, and not changed since. Only in files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    pub history: SavedHistory,
}

impl SessionRecord {
    /// Everything but the history.
    pub(super) fn without_history(id: SessionId, session: &Session, at: Timestamp) -> Self {
        let idle = at.instant.saturating_duration_since(session.touched);
        SessionRecord {
            id: id.to_string(),
            owner: session.owner.to_string(),
            name: session.name.clone(),
            cache_salt: session.cache_salt.clone(),
            salt: session.salt.to_string(),
            created_s: session.created_s,
            touched_s: at.unix_s.saturating_sub(idle.as_secs()),
            parent: session.parent.or(session.absent_parent).map(|id| id.to_string()),
            fork: session.fork,
            stamp: Some(session.stamp),
            recorded: session.recorded,
            adopted: session.adopted,
            history: SavedHistory::default(),
        }
    }

    /// When it was last used, on this process's clock. The clock of a machine that has just started may not reach back so far.
    pub(super) fn touched(&self, at: Timestamp) -> Instant {
        let idle = Duration::from_secs(at.unix_s.saturating_sub(self.touched_s));
        at.instant.checked_sub(idle).unwrap_or(at.instant)
    }
}

impl Session {
    /// A session with the content of a record, without a parent. A parent that another worker may have is noted.
    pub(super) fn from_record(record: SessionRecord, history: History, at: Timestamp, writer: u64) -> Self {
        let stamp = record.stamp.unwrap_or(Stamp::first(writer));
        let touched = record.touched(at);
        let is_shared = record.recorded.is_some();
        Session {
            absent_parent: record.parent.as_deref().and_then(SessionId::parse).filter(|_| is_shared),
            owner: record.owner.into(),
            name: record.name,
            cache_salt: record.cache_salt,
            salt: record.salt.into(),
            created_s: record.created_s,
            touched,
            history,
            parent: None,
            children: BTreeSet::new(),
            fork: record.fork,
            made: stamp.version,
            stamp,
            recorded: record.recorded,
            seen: None,
            adopted: record.adopted,
            busy: None,
            scheduled: None,
        }
    }
}

impl SessionStore {
    /// Reports every change from now on. Called once.
    pub(in crate::sessions) fn changes(&self) -> Receiver<Change> {
        let (sender, changes) = channel();
        self.lock().changes = Some(sender);
        changes
    }

    /// Sends a message after all changes so far.
    pub(in crate::sessions) fn tell(&self, change: Change) {
        if let Some(changes) = &self.lock().changes {
            let _ = changes.send(change);
        }
    }

    /// A session as it is now, of any owner, and whether it is idle: if not, it may have a part of an answer. `None` if it is gone.
    pub(in crate::sessions) fn record(&self, at: Timestamp, id: SessionId) -> Option<(SessionRecord, bool)> {
        let inner = self.at(at);
        let session = inner.sessions.get(&id)?;
        let history = session.history.clone();
        let mut record = SessionRecord::without_history(id, session, at);
        let is_idle = session.busy.is_none();
        // A long history is copied without the lock.
        drop(inner);
        record.history = SavedHistory::from(&history);
        Some((record, is_idle))
    }

    /// Adds sessions that an earlier process had, with their ids, parents and times. Those whose time is over are
    /// removed at once. A parent that is missing is left out, unless another worker may have it.
    pub(in crate::sessions) fn restore(&self, at: Timestamp, records: Vec<(SessionRecord, History)>) {
        let mut inner = self.lock();
        let mut parents = Vec::new();
        for (record, history) in records {
            let Some(id) = SessionId::parse(&record.id) else { continue };
            if inner.sessions.contains_key(&id) {
                continue;
            }
            if let Some(parent) = record.parent.as_deref().and_then(SessionId::parse) {
                parents.push((id, parent));
            }
            let writer = inner.writer;
            let session = Session::from_record(record, history, at, writer);
            inner.add_as(id, session, self.limits.idle);
        }
        for (id, parent) in parents {
            inner.link(id, parent);
        }
        drop(inner);
        drop(self.at(at));
    }

    /// Adds a session of `owner` with the content of a record, under a new id.
    pub(in crate::sessions) fn create_from(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        record: SessionRecord,
        history: History,
    ) -> Result<SessionInfo, SessionError> {
        let SessionRecord { name, cache_salt, salt, .. } = record;
        self.create(at, owner, super::NewSession { name, cache_salt, salt: salt.into(), history })
    }

    /// Whether nothing changes the session at this moment.
    pub(in crate::sessions) fn is_idle(&self, id: SessionId) -> bool {
        self.lock().sessions.get(&id).is_some_and(|session| session.busy.is_none())
    }
}
