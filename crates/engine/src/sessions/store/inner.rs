//! The state behind the store's lock: all sessions of all owners, their quota usage and expiry.
use super::guard::Busy;
use super::shared::{Outbox, SharedTask};
use super::{SessionInfo, Stamp, Timestamp};
use crate::random::random_seed;
use crate::sessions::SessionLimits;
use crate::sessions::history::History;
use crate::sessions::id::SessionId;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

pub(super) struct Session {
    pub owner: Arc<str>,
    pub name: Option<String>,
    pub cache_salt: Option<String>,
    pub salt: Arc<str>,
    pub created_s: u64,
    /// When it was created, and last changed or forked.
    pub touched: Instant,
    pub history: History,
    pub parent: Option<SessionId>,
    /// The parent, if this process does not have it: another worker may.
    pub absent_parent: Option<SessionId>,
    pub children: BTreeSet<SessionId>,
    /// The fork call that created it. Siblings have the same number.
    pub fork: Option<u64>,
    /// The last change.
    pub stamp: Stamp,
    /// The largest version that this process has made of the session, so that it makes none twice.
    pub made: u64,
    /// The state that the shared store has, as far as this process knows.
    pub recorded: Option<Stamp>,
    /// When that was so; `None` if it is to be recorded again: an earlier process has noted it, or the store has lost it.
    pub seen: Option<Seen>,
    /// It was taken over from another worker, and not changed here since.
    pub adopted: bool,
    pub busy: Option<Busy>,
    /// The time of its entry in [`Inner::expiries`]. `None` only while a claim outlasts the session's expiry time.
    pub scheduled: Option<Instant>,
}

impl Session {
    /// Notes that process `writer` has changed it.
    pub fn change(&mut self, writer: u64) {
        self.made = self.stamp.version.max(self.made).saturating_add(1);
        self.stamp = Stamp { version: self.made, writer };
        self.adopted = false;
    }
}

/// What this process knows of a state in the shared store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The [epoch](Inner::epoch) in which the store had it.
    pub epoch: u64,
    /// When the session was last used, as the store has it: the state expires by that.
    pub touched: Instant,
}

pub(super) struct Inner {
    /// The number of this process, in stamps. Drawn at random.
    pub writer: u64,
    pub sessions: BTreeMap<SessionId, Session>,
    /// Only owners that have sessions.
    pub owned: BTreeMap<Arc<str>, Owned>,
    /// When to check each session for expiry: at its expiry time or earlier.
    pub expiries: BTreeSet<(Instant, SessionId)>,
    /// Number of sessions checked for expiry.
    #[cfg(test)]
    pub n_checked: usize,
    /// The last number given to a claim or a fork call. The first one is drawn at random, because forks of several processes meet in a
    /// shared store: equal numbers would make them siblings.
    pub next: u64,
    /// Where to report sessions that have changed or are gone.
    pub changes: Option<Sender<Change>>,
    /// What a shared store has to learn, if there is one.
    pub outbox: Option<Outbox>,
    /// Grows when the shared store fails, or does not have what it had: it may have lost anything then.
    pub epoch: u64,
    /// Sessions that requests are about to use, and how many: they are not let go.
    pub expected: BTreeMap<SessionId, usize>,
    /// Deleted sessions of which the shared store has no note yet: what it still has of them is not taken over.
    pub deleting: BTreeSet<(Arc<str>, SessionId)>,
}

impl Default for Inner {
    fn default() -> Self {
        Inner {
            writer: random_seed(),
            sessions: BTreeMap::new(),
            owned: BTreeMap::new(),
            expiries: BTreeSet::new(),
            #[cfg(test)]
            n_checked: 0,
            next: random_seed() >> 1,
            changes: None,
            outbox: None,
            epoch: 0,
            expected: BTreeMap::new(),
            deleting: BTreeSet::new(),
        }
    }
}

/// What the thread that saves sessions is told.
pub(in crate::sessions) enum Change {
    Session(SessionId),
    /// Reply when everything before is written.
    Flush(Sender<()>),
    Stop,
}

/// An owner's sessions and their total charge against the quota.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Owned {
    pub ids: BTreeSet<SessionId>,
    pub charge: u64,
}

impl Inner {
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn claimed(&mut self, id: SessionId, number: u64) -> Option<&mut Session> {
        let owned = |session: &&mut Session| session.busy.as_ref().is_some_and(|busy| busy.claim == number);
        self.sessions.get_mut(&id).filter(owned)
    }

    /// Reports that a session has changed.
    pub fn changed(&mut self, id: SessionId) {
        self.tell_keeper(id);
        self.tell_shared(|| SharedTask::State(id));
    }

    /// Reports to the thread that saves sessions, if there is one.
    fn tell_keeper(&self, id: SessionId) {
        if let Some(changes) = &self.changes {
            // Without a receiver, the server is shutting down.
            let _ = changes.send(Change::Session(id));
        }
    }

    /// Reports to the shared store, if there is one.
    pub fn tell_shared(&mut self, task: impl FnOnce() -> SharedTask) {
        if let Some(outbox) = &mut self.outbox {
            outbox.add(task());
        }
    }

    /// Ends the claim on a session.
    pub fn release(&mut self, id: SessionId, idle: Duration) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.busy = None;
        self.changed(id);
        self.wait(id, idle);
    }

    /// Schedules the expiry check of a session.
    pub fn wait(&mut self, id: SessionId, idle: Duration) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        // A time beyond the clock's range means that it never expires.
        if let Some(expiry) = session.touched.checked_add(idle)
            && session.scheduled.is_none()
        {
            session.scheduled = Some(expiry);
            self.expiries.insert((expiry, id));
        }
    }

    /// Adds a session, under this id or one that is drawn.
    pub fn add(&mut self, id: Option<SessionId>, session: Session, idle: Duration) -> SessionId {
        let mut id = id.unwrap_or_else(SessionId::draw);
        while self.sessions.contains_key(&id) {
            id = SessionId::draw();
        }
        self.add_as(id, session, idle);
        self.changed(id);
        id
    }

    /// Adds a session under an id that no other has.
    pub fn add_as(&mut self, id: SessionId, session: Session, idle: Duration) {
        if let Some(parent) = session.parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.insert(id);
        }
        let own = self.owned.entry(session.owner.clone()).or_default();
        own.ids.insert(id);
        own.charge += session.history.charge();
        self.sessions.insert(id, session);
        self.wait(id, idle);
    }

    /// Removes a session for good, on every worker that shares it.
    pub fn delete(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get(&id) {
            let owner = session.owner.clone();
            self.delete_elsewhere(owner, id);
        }
        self.remove(id);
    }

    /// Removes a session from this process. Its forks become forks of its parent, which is no change of theirs that other workers have
    /// to learn: an expiry is not, and a deletion they see themselves.
    pub fn remove(&mut self, id: SessionId) {
        let Some(gone) = self.sessions.remove(&id) else { return };
        if let Some(expiry) = gone.scheduled {
            self.expiries.remove(&(expiry, id));
        }
        self.tell_keeper(id);
        if let Some(outbox) = &mut self.outbox {
            outbox.forget(id);
        }
        for child in &gone.children {
            if let Some(child) = self.sessions.get_mut(child) {
                child.parent = gone.parent;
                child.absent_parent = gone.absent_parent;
            }
        }
        // Their parent is another one now.
        gone.children.iter().for_each(|child| self.changed(*child));
        if let Some(parent) = gone.parent.and_then(|parent| self.sessions.get_mut(&parent)) {
            parent.children.remove(&id);
            parent.children.extend(&gone.children);
        }
        if let Some(own) = self.owned.get_mut(&gone.owner) {
            own.ids.remove(&id);
            own.charge -= gone.history.charge();
            if own.ids.is_empty() {
                self.owned.remove(&gone.owner);
            }
        }
    }

    /// Makes `parent` the parent of a session, unless it is missing, another owner's, or a descendant of it.
    pub fn link(&mut self, id: SessionId, parent: SessionId) {
        let owner = |id: &SessionId| self.sessions.get(id).map(|session| session.owner.clone());
        if owner(&id).is_none() || owner(&id) != owner(&parent) {
            return;
        }
        // Records of different moments could name each other.
        let mut above = Some(parent);
        while let Some(ancestor) = above.filter(|ancestor| *ancestor != id) {
            above = self.sessions.get(&ancestor).and_then(|session| session.parent);
        }
        if above.is_some() {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&id) {
            (session.parent, session.absent_parent) = (Some(parent), None);
        }
        if let Some(session) = self.sessions.get_mut(&parent) {
            session.children.insert(id);
        }
    }

    pub fn charge(&mut self, owner: &Arc<str>, before: u64, after: u64) {
        if let Some(own) = self.owned.get_mut(owner) {
            own.charge = own.charge - before + after;
        }
    }

    pub fn info(&self, id: SessionId, at: Timestamp, limits: &SessionLimits) -> SessionInfo {
        let session = &self.sessions[&id];
        let idle = at.instant.saturating_duration_since(session.touched);
        let left = if session.busy.is_some() { limits.idle } else { limits.idle.saturating_sub(idle) };
        let parent = session.parent.and_then(|parent| self.sessions.get(&parent));
        SessionInfo {
            id,
            name: session.name.clone(),
            cache_salt: session.cache_salt.clone(),
            created_s: session.created_s,
            expires_s: at.unix_s + left.saturating_add(Duration::from_millis(999)).as_secs(),
            n_tokens: session.history.tokens.len(),
            n_messages: session.history.n_messages(),
            parent: session.parent.or(session.absent_parent),
            shared_tokens: parent.map_or(0, |parent| parent.history.in_common(&session.history)),
            children: session.children.iter().copied().collect(),
            running: session.busy.as_ref().is_some_and(|busy| busy.generates),
        }
    }

    /// Recomputes the quota usage, and checks parents, children, expiry entries and prompts in prefill.
    #[cfg(test)]
    pub fn audit(&self, idle: Duration) {
        let mut owned: BTreeMap<Arc<str>, Owned> = BTreeMap::new();
        for (id, session) in &self.sessions {
            let own = owned.entry(session.owner.clone()).or_default();
            own.ids.insert(*id);
            own.charge += session.history.charge();
            let expiries: Vec<Instant> =
                self.expiries.iter().filter(|(_, of)| of == id).map(|(expiry, _)| *expiry).collect();
            assert_eq!(expiries, Vec::from_iter(session.scheduled), "the expiry of {id}");
            assert!(session.scheduled.is_some() || session.busy.is_some(), "{id} never expires");
            assert!(expiries.iter().all(|expiry| *expiry <= session.touched + idle), "{id} expires late");
            let forked = self.sessions.iter().filter(|(_, other)| other.parent == Some(*id));
            let children: BTreeSet<SessionId> = forked.map(|(id, _)| *id).collect();
            assert_eq!(children, session.children, "the children of {id}");
            let mut above = session.parent;
            let mut steps = 0;
            while let Some(parent) = above {
                let parent =
                    self.sessions.get(&parent).unwrap_or_else(|| panic!("{id} has a parent that is gone"));
                assert_eq!(parent.owner, session.owner, "{id} was forked from another owner's");
                above = parent.parent;
                steps += 1;
                assert!(steps <= self.sessions.len(), "{id} is its own ancestor");
            }
        }
        assert_eq!(owned, self.owned);
        assert!(
            self.expiries.iter().all(|(_, id)| self.sessions.contains_key(id)),
            "the expiry of one that is gone"
        );
    }
}
