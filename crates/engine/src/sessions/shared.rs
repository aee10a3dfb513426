//! Sessions in a store that several workers share: a session whose worker is gone is continued by another one.
//!
//! A task records every session after each change, beside the requests: creations, appended text, answers, forks, rollbacks,
//! deletions. While a session generates, the store has the state before. Before a request uses a session,
//! [`SharedSessions::find`] compares the state here with the newest one in the store, which is one small read, and takes that over
//! if another worker made it. So a worker that was away does not go on with what it remembers.
//!
//! **Two workers that change a session at the same time**: a change is recorded only if the store still has the state that it was made
//! from. The worker that comes second drops its change, counts and logs it, and takes over the first one's at the next request. A
//! deletion always counts. The store cannot compare and write in one step: of two changes that are recorded in the same moment, the
//! last one written counts, for both workers.
//!
//! **A store may lose what it had**, as a Redis without a disk that was started again. The *epoch* of a process grows when a call fails and
//! when a session is missing that was recorded: then the task looks whether the store has the sessions, and records those that it
//! lacks. Only what was seen there in the current epoch makes room for other sessions.
//!
//! **Use without a change** keeps a session alive in the store too: it is recorded again when half of its time there is over. A session
//! that expires here is not removed from the store, because another worker may use it.
//!
//! **A store without room** still answers. What it has is read and compared as before, changes are recorded when it has room again, and
//! the epoch stays, because nothing was lost.
//!
//! A store that does not answer within the time limit is not waited for: what is here is used, and the changes are recorded later.
//! A session that is not here cannot be continued then.
mod record;
#[cfg(test)]
mod tests;
mod turns;
mod writer;

use super::store::{Adopted, Expected, SharedTask, Stamp};
use super::{SessionError, SessionId, SessionStore, Timestamp};
use crate::Error;
use crate::saved::Origin;
use kvist_store::{BlockKey, BlockStore, Bytes, StoreError};
use record::{Head, Place};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::watch;
use turns::Turns;
pub use turns::taking_over_bytes;

const TARGET: &str = "kvist::server";

/// A store for sessions.
#[derive(Clone)]
pub struct SharedStore {
    pub store: Arc<dyn BlockStore>,
    /// Where its tasks run. A store that was opened on a runtime needs that one.
    pub runtime: Handle,
    /// How long a request waits to learn whether another worker has continued a session.
    pub deadline: Duration,
    /// A session that counts as more tokens is not taken over: this bounds the memory for it ([`taking_over_bytes`]).
    pub most_tokens: u64,
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, deadline, most_tokens, .. } = self;
        let mut shown = f.debug_struct("SharedStore");
        shown
            .field("store", &store.name())
            .field("deadline", deadline)
            .field("most_tokens", most_tokens)
            .finish()
    }
}

/// Sessions in a store that several workers share.
pub struct SharedSessions {
    shared: Arc<Shared>,
    runtime: Handle,
}

/// What the task and requests have in common.
struct Shared {
    store: Arc<dyn BlockStore>,
    deadline: Duration,
    most_tokens: u64,
    sessions: Arc<SessionStore>,
    fingerprint: Vec<u8>,
    vocab: usize,
    counters: Counters,
    /// Bounds the memory for states that are being read.
    turns: Turns,
    /// States that are being read, so that many requests for a session read one state once.
    reading: Mutex<BTreeMap<StateKey, watch::Receiver<Option<StateRead>>>>,
    /// Whether the last call of the store failed, for the log.
    is_failing: AtomicBool,
    /// Whether it had no room for what was written last, for the log.
    is_full: AtomicBool,
}

/// Whether a session is anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is in this process, in its newest state as far as the store could be asked. It may have been taken over just now.
    Here,
    /// Neither here nor in the store.
    Nowhere,
    /// Its owner has deleted it.
    Deleted,
}

/// What a request found. While it has this, the session is not let go to make room for another one.
pub struct Arrival {
    pub found: Found,
    _expected: Expected,
}

/// A state of an owner's session.
type StateKey = (Arc<str>, SessionId, Stamp);

/// What came of reading a state.
#[derive(Clone)]
enum StateRead {
    Done(Adopted),
    /// It is not taken over.
    Refused(SessionError),
    /// The store does not have it.
    Missing,
    Damaged,
    /// The store does not answer.
    Unanswered,
}

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SharedSessionCounts {
    /// States that other workers made and this one took over.
    pub adopted: u64,
    /// States that were recorded.
    pub recorded: u64,
    /// States and deletions that the store did not take. They are tried again.
    pub failed_writes: u64,
    /// Requests that used what was here, or were refused, because the store did not answer in time.
    pub unanswered: u64,
    /// Changes that were dropped, because another worker's was recorded first.
    pub conflicts: u64,
    /// States that the store named but did not have: damaged, or dropped.
    pub lost: u64,
}

#[derive(Default)]
struct Counters {
    adopted: AtomicU64,
    recorded: AtomicU64,
    failed_writes: AtomicU64,
    unanswered: AtomicU64,
    conflicts: AtomicU64,
    lost: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Whether an error says nothing about what the store has: it has no room for more, or was not asked because others ask it.
fn has_what_it_had(error: &StoreError) -> bool {
    matches!(error, StoreError::Full { .. } | StoreError::TooLarge { .. } | StoreError::Busy { .. })
}

impl SharedSessions {
    /// Shares the sessions of `sessions` from now on, those that are there included. `origin` is what they depend on, as for
    /// [`SessionKeeper`](super::SessionKeeper): workers with another one share nothing. Tokens are below `vocab`.
    ///
    /// # Errors
    /// The origin cannot be written as JSON, which would be a defect.
    pub fn open(
        store: SharedStore,
        sessions: &Arc<SessionStore>,
        origin: &Origin,
        vocab: usize,
    ) -> Result<Self, Error> {
        let fingerprint =
            serde_json::to_vec(origin).map_err(|error| Error::Usage(format!("shared sessions: {error}")))?;
        let SharedStore { store, runtime, deadline, most_tokens } = store;
        let shared = Arc::new(Shared {
            store,
            deadline,
            most_tokens,
            sessions: sessions.clone(),
            fingerprint,
            vocab,
            counters: Counters::default(),
            turns: Turns::new(),
            reading: Mutex::default(),
            is_failing: AtomicBool::new(false),
            is_full: AtomicBool::new(false),
        });
        runtime.spawn(writer::run(shared.clone(), sessions.share()));
        Ok(SharedSessions { shared, runtime })
    }

    /// Makes sure that the newest state of a session is here, before it is used. Reads a few bytes from the store, at most; and a whole
    /// state, if another worker has made one.
    ///
    /// # Errors
    /// Another worker has made a newer state, and the store does not give it: then an older one that is here must not be used. Or the
    /// session is not here, and the store does not answer, or the owner's limits leave no room for it.
    pub async fn find(&self, owner: &Arc<str>, id: SessionId) -> Result<Arrival, SessionError> {
        let (shared, owner) = (self.shared.clone(), owner.clone());
        let _expected = shared.sessions.expect(id);
        // On the store's own runtime; it also goes on if the client disconnects.
        let found = self.runtime.spawn(async move { shared.find(&owner, id).await });
        let found = found.await.unwrap_or(Err(SessionError::Unreachable { id }))?;
        Ok(Arrival { found, _expected })
    }

    /// Whether a session can be created under this id: neither this process nor the store knows it. If the store does not answer, it
    /// is taken to be free. Reads a few bytes at most.
    pub async fn is_free(&self, owner: &Arc<str>, id: SessionId) -> bool {
        let (shared, owner) = (self.shared.clone(), owner.clone());
        let known = self.runtime.spawn(async move { shared.knows(&owner, id).await });
        !known.await.unwrap_or(false)
    }

    /// Deletes a session, wherever it is: also if the owner's limits leave no room for it here, or its record is damaged.
    ///
    /// # Errors
    /// There is none, it is not here and the store does not answer, or too many deletions wait for the store. Then nothing changes.
    pub async fn delete(&self, owner: &Arc<str>, id: SessionId) -> Result<(), SessionError> {
        let sessions = &self.shared.sessions;
        match self.find(owner, id).await {
            // Its forks become those of its parent.
            Ok(_arrival) => sessions.delete(Timestamp::now(), owner, id),
            Err(
                SessionError::TooManySessions { .. }
                | SessionError::TooManyTokens { .. }
                | SessionError::LostRecord { .. }
                | SessionError::LongRecord { .. },
            ) => sessions.delete_shared(Timestamp::now(), owner, id),
            Err(error) => Err(error),
        }
    }

    /// Waits until everything before this call was tried to be recorded. Blocks this thread.
    pub fn flush(&self) {
        self.wait(false);
    }

    /// Records everything, once, and stops. Later changes are not recorded. Blocks this thread.
    pub fn close(&self) {
        self.wait(true);
    }

    fn wait(&self, stops: bool) {
        let (sender, done) = channel();
        self.shared.sessions.await_pending(sender, stops);
        // If the task has ended, nothing is left to wait for.
        let _ = done.recv();
    }

    pub fn counts(&self) -> SharedSessionCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        SharedSessionCounts {
            adopted: read(&counters.adopted),
            recorded: read(&counters.recorded),
            failed_writes: read(&counters.failed_writes),
            unanswered: read(&counters.unanswered),
            conflicts: read(&counters.conflicts),
            lost: read(&counters.lost),
        }
    }
}

impl Shared {
    fn place(&self, owner: &str, id: SessionId) -> Place {
        Place::new(&self.fingerprint, owner, id)
    }

    /// Logs when the store begins to fail, and when it answers again. After a failure it may have lost anything.
    fn note<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match &result {
            Ok(_) => {
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!(target: TARGET, "the shared store answers again: sessions are recorded");
                }
            }
            Err(error) if has_what_it_had(error) => {}
            Err(error) => {
                let was_failing = self.is_failing.swap(true, Ordering::Relaxed);
                if !was_failing {
                    tracing::warn!(
                        target: TARGET,
                        "{error}: sessions go on with what this worker has, and are recorded when the store answers again"
                    );
                }
                // While it is not asked nothing is seen there. But those who saw it fail may have been other users of the same store.
                if !was_failing || !matches!(error, StoreError::Unavailable { .. }) {
                    self.sessions.store_failed();
                }
            }
        }
        result
    }

    /// Logs also when the store has no room, and when it has.
    fn note_written(&self, result: Result<(), StoreError>) -> Result<(), StoreError> {
        match &result {
            Ok(()) if self.is_full.swap(false, Ordering::Relaxed) => {
                tracing::info!(target: TARGET, "the shared store has room again: sessions are recorded");
            }
            Err(error) if has_what_it_had(error) && !self.is_full.swap(true, Ordering::Relaxed) => {
                tracing::warn!(
                    target: TARGET,
                    "{error}: sessions are used and found as before; their changes are recorded when the store has room"
                );
            }
            _ => {}
        }
        self.note(result)
    }

    async fn get(&self, key: BlockKey) -> Result<Option<Bytes>, StoreError> {
        self.note(self.store.get(&key).await)
    }

    async fn head(&self, place: &Place) -> Result<Option<Head>, StoreError> {
        Ok(self.get(place.head()).await?.and_then(|bytes| Head::parse(&bytes)))
    }

    /// The head, if the store gives it in time.
    async fn head_in_time(self: &Arc<Self>, place: &Place) -> Option<Option<Head>> {
        let (shared, place) = (self.clone(), place.clone());
        // Goes on when this waits no longer: its time limit tells the store that it hangs.
        let read = tokio::spawn(async move { shared.head(&place).await });
        match tokio::time::timeout(self.deadline, read).await {
            Ok(read) => read.ok()?.ok(),
            // It is counted. Whether the store fails is logged when the read ends.
            Err(_) => None,
        }
    }

    /// Whether the session is here or in the store, or was deleted.
    async fn knows(self: &Arc<Self>, owner: &Arc<str>, id: SessionId) -> bool {
        let is_here = self.sessions.local(Timestamp::now(), owner, id).is_some();
        if is_here || self.sessions.is_deleting(owner, id) {
            return true;
        }
        let head = self.head_in_time(&self.place(owner, id)).await;
        if head.is_none() {
            count(&self.counters.unanswered);
        }
        head.flatten().is_some()
    }

    /// Reads a state and takes it over. Of several requests for it the first one does; the others wait for what comes of it.
    async fn take_over(self: &Arc<Self>, owner: &Arc<str>, id: SessionId, stamp: Stamp) -> StateRead {
        let key = (owner.clone(), id, stamp);
        let mut read = {
            let mut reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
            let of_another = reading.get(&key).cloned();
            of_another.unwrap_or_else(|| {
                let (sender, read) = watch::channel(None);
                reading.insert(key.clone(), read.clone());
                let (shared, owner) = (self.clone(), owner.clone());
                tokio::spawn(async move {
                    // Removed also if this task is ended.
                    let entry = Reading { shared: &shared, key };
                    let read = shared.read_and_adopt(&owner, id, stamp).await;
                    // Before the others learn of it: a request that comes later reads anew.
                    drop(entry);
                    sender.send_replace(Some(read));
                });
                read
            })
        };
        let read = read.wait_for(Option::is_some).await.map(|read| (*read).clone());
        read.ok().flatten().unwrap_or(StateRead::Unanswered)
    }

    async fn read_and_adopt(&self, owner: &Arc<str>, id: SessionId, stamp: Stamp) -> StateRead {
        let _turn = self.turns.take(owner).await;
        let epoch = self.sessions.epoch();
        let here = self.sessions.local(Timestamp::now(), owner, id);
        if here.is_some_and(|here| here.stamp.includes(stamp, here.recorded)) {
            // Another request has taken it over since this one has read the head.
            return StateRead::Done(Adopted::No);
        }
        let place = self.place(owner, id);
        let bytes = match self.get(place.state(stamp)).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return StateRead::Missing,
            Err(_) => return StateRead::Unanswered,
        };
        let max = turns::most_record_bytes(self.most_tokens);
        if bytes.len() as u64 > max {
            return StateRead::Refused(SessionError::LongRecord { id, bytes: bytes.len() as u64, max });
        }
        let vocab = self.vocab;
        // A long history takes many milliseconds.
        let read = tokio::task::spawn_blocking(move || place.read(&bytes, vocab));
        let Some(found) = read.await.ok().flatten() else { return StateRead::Damaged };
        match self.sessions.adopt(Timestamp::now(), owner, id, (stamp, epoch), found) {
            Ok(adopted) => {
                if adopted == Adopted::Yes {
                    count(&self.counters.adopted);
                    let Stamp { version, .. } = stamp;
                    tracing::info!(target: TARGET, "session {id} is continued here, from version {version} of another worker");
                }
                StateRead::Done(adopted)
            }
            Err(error) => StateRead::Refused(error),
        }
    }

    async fn find(self: &Arc<Self>, owner: &Arc<str>, id: SessionId) -> Result<Found, SessionError> {
        let place = self.place(owner, id);
        // A state is removed after another one was recorded, so the second head names one that is there.
        for _ in 0..2 {
            let here = self.sessions.local(Timestamp::now(), owner, id);
            if here.is_some_and(|here| here.is_busy) {
                return Ok(Found::Here);
            }
            if self.sessions.is_deleting(owner, id) {
                return Ok(Found::Deleted);
            }
            let epoch = self.sessions.epoch();
            let Some(head) = self.head_in_time(&place).await else {
                count(&self.counters.unanswered);
                return here.map(|_| Found::Here).ok_or(SessionError::Unreachable { id });
            };
            let stamp = match (head, here) {
                (None, None) => return Ok(Found::Nowhere),
                (None, Some(here)) => {
                    if here.recorded.is_some() {
                        // The store has dropped it.
                        self.sessions.set_lost(id);
                        self.sessions.tell_shared(SharedTask::State(id));
                    }
                    return Ok(Found::Here);
                }
                (Some(Head::Deleted), _) => {
                    self.sessions.forget(owner, id);
                    return Ok(Found::Deleted);
                }
                (Some(Head::State(stamp)), Some(here)) if here.stamp.includes(stamp, here.recorded) => {
                    self.sessions.set_seen(id, stamp, epoch);
                    return Ok(Found::Here);
                }
                (Some(Head::State(stamp)), _) => stamp,
            };
            return match self.take_over(owner, id, stamp).await {
                StateRead::Done(Adopted::Deleted) => Ok(Found::Deleted),
                StateRead::Done(Adopted::No | Adopted::Yes) => Ok(Found::Here),
                StateRead::Refused(error) => Err(error),
                StateRead::Missing => continue,
                StateRead::Damaged => break,
                StateRead::Unanswered => {
                    count(&self.counters.unanswered);
                    Err(SessionError::Unreachable { id })
                }
            };
        }
        count(&self.counters.lost);
        tracing::warn!(target: TARGET, "session {id}: its record in the shared store is damaged or gone");
        Err(SessionError::LostRecord { id })
    }
}

/// The entry of a state that is being read.
struct Reading<'a> {
    shared: &'a Shared,
    key: StateKey,
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.shared.reading.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}
