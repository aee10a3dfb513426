//! What the shared store of sessions asks of the sessions here.
use super::inner::{Inner, Seen, Session};
use super::{SessionRecord, SessionStore, Stamp, Timestamp};
use crate::sessions::history::SavedHistory;
use crate::sessions::{History, SessionError, SessionId};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// Deletions of one owner that may wait for the store. Then it takes no more.
pub(in crate::sessions) const MOST_DELETIONS: usize = 4096;

/// Something that the shared store has to learn.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::sessions) enum SharedTask {
    /// A client has deleted a session.
    Deletion(Arc<str>, SessionId),
    /// A session may have changed, or was used.
    State(SessionId),
}

/// What the task that records sessions has to do. It is bounded by the sessions, however often they change, and by [`MOST_DELETIONS`].
#[derive(Default)]
pub(in crate::sessions) struct Pending {
    pub tasks: BTreeSet<SharedTask>,
    /// Whom to tell when everything before was tried.
    pub waiting: Vec<Sender<()>>,
    /// Record no more after that.
    pub stops: bool,
}

/// The way from the sessions to the task that records them.
pub(super) struct Outbox {
    pending: Pending,
    wake: Arc<Notify>,
    /// Whether the task runs.
    is_open: bool,
}

impl Outbox {
    pub fn add(&mut self, task: SharedTask) {
        if self.is_open {
            self.pending.tasks.insert(task);
            self.wake.notify_one();
        }
    }

    /// A session that is gone has no state to record.
    pub fn forget(&mut self, id: SessionId) {
        self.pending.tasks.remove(&SharedTask::State(id));
    }
}

/// A request is about to use a session, which is therefore not let go.
pub(in crate::sessions) struct Expected {
    store: Arc<SessionStore>,
    id: SessionId,
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut inner = self.store.lock();
        if let Some(n) = inner.expected.get_mut(&self.id) {
            *n -= 1;
            if *n == 0 {
                inner.expected.remove(&self.id);
            }
        }
    }
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
    /// When it was last used.
    pub touched: Instant,
    /// How long it still lives without use.
    pub left: Duration,
}

/// What the task that records sessions has to do about one.
pub(in crate::sessions) enum Due {
    /// It is gone, or the store has it.
    Nothing,
    /// To look whether the store still has this state: it had it in an earlier epoch.
    Check(Arc<str>, Stamp),
    Record(Box<Settled>),
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
    /// Collects changes from now on, first all sessions that are here, and wakes the task that records them. Called once.
    pub(in crate::sessions) fn share(&self) -> Arc<Notify> {
        let wake = Arc::new(Notify::new());
        let mut inner = self.lock();
        let tasks = inner.sessions.keys().map(|id| SharedTask::State(*id)).collect();
        let pending = Pending { tasks, ..Pending::default() };
        wake.notify_one();
        inner.outbox = Some(Outbox { pending, wake: wake.clone(), is_open: true });
        self.is_shared.store(true, Ordering::Relaxed);
        wake
    }

    #[cfg(test)]
    pub(in crate::sessions) fn n_pending(&self) -> usize {
        self.lock().outbox.as_ref().map_or(0, |outbox| outbox.pending.tasks.len())
    }

    /// Takes what there is to record.
    pub(in crate::sessions) fn take_pending(&self) -> Pending {
        self.lock().outbox.as_mut().map(|outbox| std::mem::take(&mut outbox.pending)).unwrap_or_default()
    }

    /// Replies when everything so far was tried; at once if nothing is recorded any more. `stops`: record no more after that.
    pub(in crate::sessions) fn await_pending(&self, reply: Sender<()>, stops: bool) {
        if let Some(outbox) = self.lock().outbox.as_mut().filter(|outbox| outbox.is_open) {
            outbox.pending.waiting.push(reply);
            outbox.pending.stops |= stops;
            outbox.wake.notify_one();
        }
    }

    /// Nothing is recorded any more.
    pub(in crate::sessions) fn end_sharing(&self) {
        if let Some(outbox) = &mut self.lock().outbox {
            outbox.is_open = false;
            outbox.pending = Pending::default();
        }
    }

    /// Keeps a session from being let go while a request is about to use it. It need not be here yet.
    pub(in crate::sessions) fn expect(self: &Arc<Self>, id: SessionId) -> Expected {
        *self.lock().expected.entry(id).or_default() += 1;
        Expected { store: self.clone(), id }
    }

    /// Adds something to record.
    pub(in crate::sessions) fn tell_shared(&self, task: SharedTask) {
        self.lock().tell_shared(|| task);
    }

    /// What is here of an owner's session.
    pub(in crate::sessions) fn local(&self, at: Timestamp, owner: &str, id: SessionId) -> Option<Local> {
        let inner = self.at(at);
        let session = inner.sessions.get(&id).filter(|session| &*session.owner == owner)?;
        Some(Local { stamp: session.stamp, recorded: session.recorded, is_busy: session.busy.is_some() })
    }

    /// What is to be recorded of a session: while a request changes it, the state before.
    pub(in crate::sessions) fn due(&self, at: Timestamp, id: SessionId) -> Due {
        let inner = self.at(at);
        let Some(session) = inner.sessions.get(&id) else { return Due::Nothing };
        let (history, stamp) = match &session.busy {
            Some(busy) => busy.before.clone(),
            None => (session.history.clone(), session.stamp),
        };
        if session.recorded == Some(stamp) && session.lives_in_store(self.limits.idle) {
            return match session.seen.is_some_and(|seen| seen.epoch == inner.epoch) {
                true => Due::Nothing,
                false => Due::Check(session.owner.clone(), stamp),
            };
        }
        let idle = match session.busy {
            Some(_) => Duration::ZERO,
            None => at.instant.saturating_duration_since(session.touched),
        };
        let mut settled = Settled {
            owner: session.owner.clone(),
            record: SessionRecord::without_history(id, session, at),
            stamp,
            recorded: session.recorded,
            touched: session.touched,
            left: self.limits.idle.saturating_sub(idle),
        };
        // A long history is copied without the lock.
        drop(inner);
        settled.record.history = SavedHistory::from(&history);
        (settled.record.stamp, settled.record.adopted) = (Some(stamp), false);
        Due::Record(Box::new(settled))
    }

    /// Grows with every [`store_failed`](Self::store_failed).
    pub(in crate::sessions) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// The shared store has failed, or does not have what it had, so that it may have lost anything: the task that records sessions looks.
    /// Returns the new epoch.
    pub(in crate::sessions) fn store_failed(&self) -> u64 {
        let mut inner = self.lock();
        inner.epoch += 1;
        if let Some(outbox) = &inner.outbox {
            outbox.wake.notify_one();
        }
        inner.epoch
    }

    /// The sessions that the store was not seen to have in this epoch.
    pub(in crate::sessions) fn unseen(&self) -> Vec<SessionId> {
        let inner = self.lock();
        let is_seen = |session: &Session| session.seen.is_some_and(|seen| seen.epoch == inner.epoch);
        inner.sessions.iter().filter(|(_, session)| !is_seen(session)).map(|(id, _)| *id).collect()
    }

    /// The store has this state of a session, which was last used at `touched`. `epoch`: from before it was asked.
    pub(in crate::sessions) fn set_recorded(
        &self,
        id: SessionId,
        stamp: Stamp,
        epoch: u64,
        touched: Instant,
    ) {
        if let Some(session) = self.lock().sessions.get_mut(&id) {
            (session.recorded, session.seen) = (Some(stamp), Some(Seen { epoch, touched }));
        }
    }

    /// The store still had the state that it is known to have, or another worker's newer one. `epoch`: from before it was asked.
    pub(in crate::sessions) fn set_seen(&self, id: SessionId, stamp: Stamp, epoch: u64) {
        if let Some(session) = self.lock().sessions.get_mut(&id)
            && session.recorded == Some(stamp)
            && let Some(seen) = &mut session.seen
        {
            seen.epoch = epoch;
        }
    }

    /// The store does not have the state that it had, so that it is to be recorded again. Returns the new epoch.
    pub(in crate::sessions) fn set_lost(&self, id: SessionId) -> u64 {
        if let Some(session) = self.lock().sessions.get_mut(&id) {
            session.seen = None;
        }
        self.store_failed()
    }

    /// Whether a session was deleted here, and the shared store has no note of it yet.
    pub(in crate::sessions) fn is_deleting(&self, owner: &Arc<str>, id: SessionId) -> bool {
        self.lock().deleting.contains(&(owner.clone(), id))
    }

    /// The shared store has noted that a session was deleted here.
    pub(in crate::sessions) fn deletion_noted(&self, owner: &Arc<str>, id: SessionId) {
        self.lock().deleting.remove(&(owner.clone(), id));
    }

    /// Deletes a session, whatever this worker has of it. Only for one that the store has.
    ///
    /// # Errors
    /// Too many deletions wait for the store. Then nothing changes.
    pub(in crate::sessions) fn delete_shared(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        id: SessionId,
    ) -> Result<(), SessionError> {
        let mut inner = self.at(at);
        inner.may_delete(owner)?;
        match inner.sessions.get(&id) {
            Some(session) if session.owner != *owner => return Err(self.not_found(&id)),
            Some(_) => inner.delete(id),
            None => inner.delete_elsewhere(owner.clone(), id),
        }
        Ok(())
    }

    /// Removes a session that another worker has deleted.
    pub(in crate::sessions) fn forget(&self, owner: &str, id: SessionId) {
        let mut inner = self.lock();
        if inner.sessions.get(&id).is_some_and(|session| &*session.owner == owner) {
            inner.remove(id);
        }
    }

    /// Takes over the state `stamp` of a session, which another worker has recorded: adds the session, or replaces what is here. `epoch`:
    /// from before the store was asked.
    ///
    /// # Errors
    /// The owner's limits are reached, the session has expired, or its id is another owner's here. Then nothing changes.
    pub(in crate::sessions) fn adopt(
        &self,
        at: Timestamp,
        owner: &Arc<str>,
        id: SessionId,
        (stamp, epoch): (Stamp, u64),
        (mut record, history): (SessionRecord, History),
    ) -> Result<Adopted, SessionError> {
        (record.stamp, record.recorded) = (Some(stamp), Some(stamp));
        let mut inner = self.at(at);
        record.adopted = stamp.writer != inner.writer;
        let seen = Some(Seen { epoch, touched: record.touched(at) });
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
                    self.admit(&mut inner, owner, 0, charge - before, Some(id))?;
                }
                let new = Session::from_record(record, history, at, inner.writer);
                inner.replace(id, Session { owner: owner.clone(), made: made.max(new.made), seen, ..new });
                inner.charge(owner, before, charge);
            }
            None => {
                self.admit(&mut inner, owner, 1, charge, None)?;
                let new = Session::from_record(record, history, at, inner.writer);
                inner.add_as(id, Session { owner: owner.clone(), seen, ..new }, self.limits.idle);
            }
        }
        inner.link_absent(owner, id);
        inner.changed(id);
        Ok(Adopted::Yes)
    }
}

impl Session {
    /// Whether the state that was recorded last lives about as long as the session does here.
    fn lives_in_store(&self, idle: Duration) -> bool {
        // Uses that change nothing are recorded now and then.
        self.seen.is_some_and(|seen| self.touched.saturating_duration_since(seen.touched) < idle / 2)
    }
}

impl Inner {
    /// Fails if the deletions of this owner that wait for the shared store are too many for more.
    pub(super) fn may_delete(&self, owner: &str) -> Result<(), SessionError> {
        // Few: a store that answers has noted them in milliseconds.
        let owner: Arc<str> = owner.into();
        let of_owner = (owner.clone(), SessionId(0))..=(owner, SessionId(u128::MAX));
        let waiting = self.deleting.range(of_owner).count();
        match waiting < MOST_DELETIONS {
            true => Ok(()),
            false => Err(SessionError::DeletionsWait { waiting }),
        }
    }

    /// Notes the deletion of a session that is not here, for the shared store and until it has noted it.
    pub(super) fn delete_elsewhere(&mut self, owner: Arc<str>, id: SessionId) {
        if self.outbox.is_some() {
            self.deleting.insert((owner.clone(), id));
            self.tell_shared(|| SharedTask::Deletion(owner, id));
        }
    }

    /// Lets sessions of an owner go until at most so many, with at most this charge, are left: those that were taken over from other workers
    /// and that the store was seen to have since it last failed, so that they come back when they are asked for; the one used longest ago first. Not `used`, and not what a
    /// request changes or is about to use. Returns whether that is enough; if not, none is let go.
    ///
    /// Sessions that were last changed here stay, although the store may have them: otherwise an owner could fill it beyond every limit.
    pub(super) fn let_go_down_to(
        &mut self,
        owner: &str,
        (sessions, charge): (usize, u64),
        used: Option<SessionId>,
        idle: Duration,
    ) -> bool {
        let Some(own) = self.owned.get(owner) else { return true };
        let (mut n_left, mut charge_left) = (own.ids.len(), own.charge);
        if n_left <= sessions && charge_left <= charge {
            return true;
        }
        if self.outbox.is_none() {
            return false;
        }
        let is_spare = |id: &SessionId, session: &Session| {
            session.adopted
                && session.recorded == Some(session.stamp)
                && session.seen.is_some_and(|seen| seen.epoch == self.epoch)
                && session.lives_in_store(idle)
                && session.busy.is_none()
                && Some(*id) != used
                && !self.expected.contains_key(id)
        };
        let of_owner = own.ids.iter().filter_map(|id| self.sessions.get(id).map(|session| (*id, session)));
        let mut spare: Vec<_> = of_owner
            .filter(|(id, session)| is_spare(id, session))
            .map(|(id, session)| (session.touched, id, session.history.charge()))
            .collect();
        spare.sort_unstable_by_key(|(touched, id, _)| (*touched, *id));
        let mut gone = Vec::new();
        for (_, id, its_charge) in spare {
            if n_left <= sessions && charge_left <= charge {
                break;
            }
            gone.push(id);
            (n_left, charge_left) = (n_left - 1, charge_left - its_charge);
        }
        let is_enough = n_left <= sessions && charge_left <= charge;
        if is_enough {
            gone.into_iter().for_each(|id| self.let_go(id));
        }
        is_enough
    }

    /// Removes a session that other workers have. Its forks stay its forks.
    fn let_go(&mut self, id: SessionId) {
        let children = self.sessions.get_mut(&id).map(|session| std::mem::take(&mut session.children));
        for child in children.unwrap_or_default() {
            if let Some(child) = self.sessions.get_mut(&child) {
                (child.parent, child.absent_parent) = (None, Some(id));
            }
        }
        self.remove(id);
    }

    /// Puts another state of a session in the place of what is here. Its parent is that of the state; [`link_absent`](Self::link_absent)
    /// looks for it.
    fn replace(&mut self, id: SessionId, new: Session) {
        let parent = self.sessions.get(&id).and_then(|session| session.parent);
        if let Some(parent) = parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.remove(&id);
        }
        if let Some(old) = self.sessions.get_mut(&id) {
            let (children, scheduled) = (std::mem::take(&mut old.children), old.scheduled);
            // Its expiry is scheduled for no later than this.
            let touched = old.touched.max(new.touched);
            *old = Session { children, scheduled, touched, ..new };
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
