//! The task that records sessions.
use super::record::{Head, written};
use super::{Shared, TARGET, count};
use crate::sessions::store::{Pending, SharedTask as Task, Stamp};
use crate::sessions::{SessionId, Timestamp};
use kvist_store::{BlockKey, Bytes, StoreError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Sessions that are recorded at a time.
const TOGETHER: usize = 8;

/// What a store did not take is tried again after such a pause, which doubles up to the longest one.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Two workers that record at the same time are done by then.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// What the store did not take.
struct Failed {
    tasks: BTreeSet<Task>,
    pause: Duration,
    again: Instant,
}

impl Failed {
    /// Waits for the next change, or until it is time to try again.
    async fn wait(&self, wake: &Notify) {
        match self.tasks.is_empty() {
            true => wake.notified().await,
            false => drop(tokio::time::timeout_at(self.again, wake.notified()).await),
        }
    }
}

/// Whoever waits for the task learns that it has ended, however it ends.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.sessions.end_sharing();
    }
}

/// Records what there is to record, until it is told to stop. Many changes of a session are recorded once, and the states of one session one
/// after the other; a session that was deleted or has expired has no state to record.
pub(super) async fn run(shared: Arc<Shared>, wake: Arc<Notify>) {
    let _ending = Ending(&shared);
    let mut failed = Failed { tasks: BTreeSet::new(), pause: PAUSE, again: Instant::now() };
    loop {
        failed.wait(&wake).await;
        let Pending { mut tasks, waiting, stops } = shared.sessions.take_pending();
        let had_failed = !failed.tasks.is_empty();
        let tries_again = had_failed && (!waiting.is_empty() || failed.again <= Instant::now());
        if tries_again {
            tasks.append(&mut failed.tasks);
        }
        failed.tasks.retain(|task| !tasks.contains(task));
        let missing = record_all(&shared, tasks).await;
        if tries_again || !had_failed {
            let longer = tries_again && !missing.is_empty();
            failed.pause = if longer { (failed.pause * 2).min(LONGEST_PAUSE) } else { PAUSE };
            failed.again = Instant::now() + failed.pause;
        }
        failed.tasks.extend(missing);
        for reply in waiting {
            let _ = reply.send(());
        }
        if stops {
            if !failed.tasks.is_empty() {
                let n = failed.tasks.len();
                tracing::error!(target: TARGET, "the shared store does not have the last changes of {n} sessions");
            }
            return;
        }
    }
}

/// Returns what the store did not take.
async fn record_all(shared: &Arc<Shared>, tasks: BTreeSet<Task>) -> BTreeSet<Task> {
    let (mut running, mut failed) = (JoinSet::new(), BTreeSet::new());
    let mut note = |done: Result<(Task, Result<(), StoreError>), tokio::task::JoinError>| {
        if let Ok((task, Err(_))) = done {
            count(&shared.counters.failed_writes);
            failed.insert(task);
        }
    };
    for task in tasks {
        if running.len() >= TOGETHER
            && let Some(done) = running.join_next().await
        {
            note(done);
        }
        let shared = shared.clone();
        running.spawn(async move {
            let done = match &task {
                Task::State(id) => shared.record(*id).await,
                Task::Deletion(owner, id) => shared.record_deletion(owner, *id).await,
                Task::Expiry(owner, id, recorded) => shared.remove_expired(owner, *id, *recorded).await,
            };
            (task, done)
        });
    }
    while let Some(done) = running.join_next().await {
        note(done);
    }
    failed
}

impl Shared {
    async fn put(&self, key: BlockKey, bytes: Bytes, ttl: Duration) -> Result<(), StoreError> {
        self.note(self.store.put(key, bytes, Some(ttl)).await)
    }

    /// Records the state of a session, unless the store has one that it was not made from.
    async fn record(&self, id: SessionId) -> Result<(), StoreError> {
        let Some(settled) = self.sessions.settled(Timestamp::now(), id) else { return Ok(()) };
        let stamp = settled.stamp;
        if settled.recorded == Some(stamp) {
            return Ok(());
        }
        let place = self.place(&settled.owner, id);
        let record = settled.record;
        // A long history takes many milliseconds.
        let bytes = match tokio::task::spawn_blocking(move || written(&record)).await {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(error)) => {
                tracing::error!(target: TARGET, "session {id} cannot be recorded: {error}");
                return Ok(());
            }
            // The runtime ends.
            Err(_) => return Ok(()),
        };
        // A state that takes long to write is written first: what the head was and what it becomes are to be close together.
        let mut before = None;
        for is_written in [false, true] {
            before = match self.head(&place).await? {
                Some(Head::State(there)) if stamp.includes(there, settled.recorded) => Some(there),
                None => None,
                Some(other) => {
                    if is_written {
                        let _ = self.note(self.store.remove(&place.state(stamp)).await);
                    }
                    self.give_way(&settled.owner, id, stamp, other);
                    return Ok(());
                }
            };
            if !is_written {
                self.put(place.state(stamp), bytes.clone(), settled.left).await?;
            }
        }
        self.put(place.head(), Head::State(stamp).to_bytes(), settled.left).await?;
        self.sessions.set_recorded(id, Some(stamp));
        count(&self.counters.recorded);
        if let Some(before) = before.filter(|before| *before != stamp) {
            // One that stays expires.
            let _ = self.note(self.store.remove(&place.state(before)).await);
        }
        Ok(())
    }

    /// The store has another head than a state of this worker was made from.
    fn give_way(&self, owner: &str, id: SessionId, stamp: Stamp, other: Head) {
        match other {
            Head::Deleted => self.sessions.forget(owner, id),
            Head::State(there) => {
                count(&self.counters.conflicts);
                tracing::warn!(
                    target: TARGET,
                    "session {id}: another worker has recorded version {} meanwhile; version {} of this one is dropped",
                    there.version,
                    stamp.version
                );
            }
        }
    }

    /// Notes that a session was deleted, for workers that still have it. Again after a while, if another worker has recorded it in
    /// the same moment.
    async fn record_deletion(self: &Arc<Self>, owner: &Arc<str>, id: SessionId) -> Result<(), StoreError> {
        self.note_deletion(owner, id).await?;
        self.sessions.deletion_noted(owner, id);
        let (shared, owner) = (self.clone(), owner.clone());
        tokio::spawn(async move {
            tokio::time::sleep(LOOK_AGAIN).await;
            shared.note_deletion_again(&owner, id).await;
        });
        Ok(())
    }

    /// Notes a deletion again, if the store has a state.
    pub(super) async fn note_deletion_again(&self, owner: &str, id: SessionId) {
        if let Ok(Some(Head::State(_))) = self.head(&self.place(owner, id)).await {
            let _ = self.note_deletion(owner, id).await;
        }
    }

    async fn note_deletion(&self, owner: &str, id: SessionId) -> Result<(), StoreError> {
        let place = self.place(owner, id);
        let before = self.head(&place).await?;
        // What another worker has of it expires sooner, also if its clock is somewhat behind.
        let ttl = self.sessions.limits().idle.saturating_mul(2);
        self.put(place.head(), Head::Deleted.to_bytes(), ttl).await?;
        if let Some(Head::State(before)) = before {
            let _ = self.note(self.store.remove(&place.state(before)).await);
        }
        Ok(())
    }

    /// Removes a session that has expired here, if no other worker has made a newer state of it. One that another worker still uses in
    /// this state is recorded again there.
    async fn remove_expired(&self, owner: &str, id: SessionId, recorded: Stamp) -> Result<(), StoreError> {
        let place = self.place(owner, id);
        if self.head(&place).await? == Some(Head::State(recorded)) {
            self.note(self.store.remove(&place.head()).await)?;
            self.note(self.store.remove(&place.state(recorded)).await)?;
        }
        Ok(())
    }
}
