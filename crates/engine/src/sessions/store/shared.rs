//! What the shared store of sessions asks of the sessions here.
use super::inner::{Inner, Session};
use super::{SessionRecord, SessionStore, Stamp, Timestamp};
use crate::sessions::history::SavedHistory;
use crate::sessions::{History, SessionError, SessionId};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// What the task that records sessions is told.
pub(in crate::sessions) enum SharedChange {
    /// A session may have changed, or is gone.
    Session(SessionId),
    /// A client has deleted a session.
    Deleted { owner: Arc<str>, id: SessionId },
    /// A session has expired here, which the store has in this state as far as this process knows.
    Expired { owner: Arc<str>, id: SessionId, recorded: Stamp },
    /// Reply when everything before was tried.
    Flush(Sender<()>),
    /// The same, and record no more.
    Stop(Sender<()>),
}

/// A session of this process.
#[derive(Clone, Copy, Debug)]
pub(in crate::sessions) struct Local {
    pub stamp: Stamp,
    pub recorded: Option<Stamp>,
    pub is_busy: bool,
}

/// A session between two changes, as it is recorded.
pub(in crate::sessions) struct Settled {
    pub owner: Arc<str>,
    pub record: SessionRecord,
    pub stamp: Stamp,
    pub recorded: Option<Stamp>,
    /// How long it still lives without use.
    pub left: Duration,
}

/// Whether a session was taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sessions) enum Adopted {
    Yes,
    /// What is here includes the record already, or a request of this worker is changing it.
    No,
    /// It was deleted here.
    Deleted,
}

impl SessionStore {
    /// Reports changes from now on, first all sessions that are here. Called once.
    pub(in crate::sessions) fn share(&self) -> UnboundedReceiver<SharedChange> {
        let (sender, changes) = unbounded_channel();
        let mut inner = self.lock();
        inner.shared = Some(sender);
        self.is_shared.store(true, Ordering::Relaxed);
        inner.sessions.keys().for_each(|id| inner.tell_shared(|| SharedChange::Session(*id)));
        changes
    }

    /// Sends a message after all changes so far.
    pub(in crate::sessions) fn tell_shared(&self, change: SharedChange) {
        self.lock().tell_shared(|| change);
    }

    /// What is here of an owner's session.
    pub(in crate::sessions) fn local(&self, at: Timestamp, owner: &str, id: SessionId) -> Option<Local> {
        let inner = self.at(at);
        let session = inner.sessions.get(&id).filter(|session| &*session.owner == owner)?;
        Some(Local { stamp: session.stamp, recorded: session.recorded, is_busy: session.busy.is_some() })
    }

    /// A session as it is to be recorded: while a request changes it, as it was before. `None` if it is gone.
    pub(in crate::sessions) fn settled(&self, at: Timestamp, id: SessionId) -> Option<Settled> {
        let inner = self.at(at);
        let session = inner.sessions.get(&id)?;
        let (history, stamp) = match &session.busy {
            Some(busy) => busy.before.clone(),
            None => (session.history.clone(), session.stamp),
        };
        let idle = match session.busy {
            Some(_) => Duration::ZERO,
            None => at.instant.saturating_duration_since(session.touched),
        };
        let mut settled = Settled {
            owner: session.owner.clone(),
            record: SessionRecord::without_history(id, session, at),
            stamp,
            recorded: session.recorded,
            left: self.limits.idle.saturating_sub(idle),
        };
        // A long history is copied without the lock.
        drop(inner);
        settled.record.history = SavedHistory::from(&history);
        settled.record.stamp = Some(stamp);
        Some(settled)
    }

    /// Notes which state the shared store has; `None` if it has lost it.
    pub(in crate::sessions) fn set_recorded(&self, id: SessionId, recorded: Option<Stamp>) {
        if let Some(session) = self.lock().sessions.get_mut(&id) {
            session.recorded = recorded;
        }
    }

    /// Whether a session was deleted here, and the shared store has no note of it yet.
    pub(in crate::sessions) fn is_deleting(&self, owner: &Arc<str>, id: SessionId) -> bool {
        self.lock().deleting.contains(&(owner.clone(), id))
    }

    /// The shared store has noted that a session was deleted here.
    pub(in crate::sessions) fn deletion_noted(&self, owner: &Arc<str>, id: SessionId) {
        self.lock().deleting.remove(&(owner.clone(), id));
    }

    /// Removes a session that another worker has deleted.
    pub(in crate::sessions) fn forget(&self, owner: &str, id: SessionId) {
        let mut inner = self.lock();
        if inner.sessions.get(&id).is_some_and(|session| &*session.owner == owner) {
            inner.remove(id);
        }
    }

    /// Takes over the state `stamp` of a session, which another worker has recorded: adds the session, or replaces what is here.
    ///
    /// # Errors
    /// The owner's limits are reached, the session has expired, or its id is another owner's here. Then nothing changes.
    pub(in crate::sessions) fn adopt(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        id: SessionId,
        stamp: Stamp,
        (mut record, history): (SessionRecord, History),
    ) -> Result<Adopted, SessionError> {
        (record.stamp, record.recorded) = (Some(stamp), Some(stamp));
        let mut inner = self.at(at);
        if inner.deleting.contains(&(owner.clone(), id)) {
            return Ok(Adopted::Deleted);
        }
        if at.instant.saturating_duration_since(record.touched(at)) >= self.limits.idle {
            return Err(self.not_found(&id));
        }
        let charge = history.charge();
        match inner.sessions.get(&id) {
            Some(session) if session.owner != *owner => return Err(self.not_found(&id)),
            Some(session) if session.busy.is_some() => return Ok(Adopted::No),
            Some(session) if session.stamp.includes(stamp, session.recorded) => return Ok(Adopted::No),
            Some(session) => {
                let (before, made) = (session.history.charge(), session.made);
                if charge > before {
                    let tokens = inner.owned.get(owner).map_or(0, |own| own.charge);
                    self.admit_tokens(tokens, charge - before)?;
                }
                let new = Session::from_record(record, history, at, inner.writer);
                inner.replace(id, Session { owner: owner.clone(), made: made.max(new.made), ..new });
                inner.charge(owner, before, charge);
            }
            None => {
                self.admit(&inner, owner, 1, charge)?;
                let new = Session::from_record(record, history, at, inner.writer);
                inner.add_as(id, Session { owner: owner.clone(), ..new }, self.limits.idle);
            }
        }
        inner.link_absent(owner, id);
        inner.changed(id);
        Ok(Adopted::Yes)
    }
}

impl Inner {
    /// Puts another state of a session in the place of what is here. Its parent is that of the state; [`link_absent`](Self::link_absent)
    /// looks for it.
    fn replace(&mut self, id: SessionId, new: Session) {
        let parent = self.sessions.get(&id).and_then(|session| session.parent);
        if let Some(parent) = parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.remove(&id);
        }
        if let Some(old) = self.sessions.get_mut(&id) {
            let (children, is_scheduled) = (std::mem::take(&mut old.children), old.is_scheduled);
            // Its expiry is scheduled for no later than this.
            let touched = old.touched.max(new.touched);
            *old = Session { children, is_scheduled, touched, ..new };
        }
    }

    /// Connects a session with its parent and its forks that came from other workers, as far as they are here.
    fn link_absent(&mut self, owner: &Arc<str>, id: SessionId) {
        let own = self.owned.get(owner).into_iter().flat_map(|own| &own.ids).copied();
        let forks = own.filter(|fork| self.sessions.get(fork).is_some_and(|f| f.absent_parent == Some(id)));
        let forks: Vec<SessionId> = forks.collect();
        let parent = self.sessions.get(&id).and_then(|session| session.absent_parent);
        forks.into_iter().for_each(|fork| self.link(fork, id));
        if let Some(parent) = parent {
            self.link(id, parent);
        }
    }
}
