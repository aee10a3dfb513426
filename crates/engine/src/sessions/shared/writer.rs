//! The task that records sessions.
use super::record::{Head, written};
use super::{Shared, TARGET, count};
use crate::sessions::store::{Due, Pending, Settled, SharedTask as Task, Stamp};
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

/// What the store did not take, or may have lost.
struct Failed {
    tasks: BTreeSet<Task>,
    /// The epoch of which it was last seen to have everything, or `everything` says that it was not.
    epoch: u64,
    everything: bool,
    pause: Duration,
    again: Instant,
}

impl Failed {
    fn is_empty(&self) -> bool {
        self.tasks.is_empty() && !self.everything
    }

    /// Notes that all sessions are to be looked at, if the epoch has changed.
    fn look(&mut self, shared: &Shared) {
        let epoch = shared.sessions.epoch();
        self.everything |= epoch != self.epoch;
        self.epoch = epoch;
    }

    /// Waits for the next change, or until it is time to try again.
    async fn wait(&self, wake: &Notify) {
        match self.is_empty() {
            true => wake.notified().await,
            false => drop(tokio::time::timeout_at(self.again, wake.notified()).await),
        }
    }
}

/// Tells what waits for the task that it has ended, however it ends.
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
    let mut failed = Failed {
        tasks: BTreeSet::new(),
        epoch: shared.sessions.epoch(),
        everything: false,
        pause: PAUSE,
        again: Instant::now(),
    };
    loop {
        failed.wait(&wake).await;
        let Pending { mut tasks, waiting, stops } = shared.sessions.take_pending();
        failed.look(&shared);
        let had_failed = !failed.is_empty();
        let tries_again = had_failed && (!waiting.is_empty() || failed.again <= Instant::now());
        if tries_again {
            tasks.append(&mut failed.tasks);
            if std::mem::take(&mut failed.everything) {
                tasks.extend(shared.sessions.unseen().into_iter().map(Task::State));
            }
        }
        failed.tasks.retain(|task| !tasks.contains(task));
        let missing = record_all(&shared, tasks).await;
        failed.look(&shared);
        if tries_again || !had_failed {
            let longer = tries_again && (!missing.is_empty() || failed.everything);
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
        self.note_written(self.store.put(key, bytes, Some(ttl)).await)
    }

    /// Records a session, if the store does not have it as it is here.
    async fn record(&self, id: SessionId) -> Result<(), StoreError> {
        loop {
            match self.sessions.due(Timestamp::now(), id) {
                Due::Nothing => return Ok(()),
                Due::Record(settled) => return self.record_state(id, *settled).await,
                Due::Check(owner, stamp) => {
                    if self.check(&owner, id, stamp).await? {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Whether the store still has a state that it had, or another one that counts. If not, it is due to be recorded.
    async fn check(&self, owner: &str, id: SessionId, stamp: Stamp) -> Result<bool, StoreError> {
        let epoch = self.sessions.epoch();
        match self.head(&self.place(owner, id)).await? {
            Some(Head::State(there)) if there == stamp || !stamp.includes(there, None) => {
                self.sessions.set_seen(id, stamp, epoch);
                Ok(true)
            }
            Some(Head::Deleted) => {
                self.sessions.forget(owner, id);
                Ok(true)
            }
            // An earlier one: the store has gone back.
            None | Some(Head::State(_)) => {
                self.sessions.set_lost(id);
                Ok(false)
            }
        }
    }

    /// Records a state of a session, unless the store has one that it was not made from.
    async fn record_state(&self, id: SessionId, settled: Settled) -> Result<(), StoreError> {
        let (stamp, touched) = (settled.stamp, settled.touched);
        let (mut epoch, mut is_expected) = (self.sessions.epoch(), settled.recorded.is_some());
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
                None => {
                    if std::mem::take(&mut is_expected) {
                        epoch = self.sessions.set_lost(id);
                    }
                    None
                }
                Some(other) => {
                    if is_written {
                        let _ = self.note(self.store.remove(&place.state(stamp)).await);
                    }
                    match settled.recorded == Some(stamp) && other != Head::Deleted {
                        // It has gone on elsewhere, and no change of this worker is dropped.
                        true => self.sessions.set_recorded(id, stamp, epoch, touched),
                        false => self.give_way(&settled.owner, id, stamp, other),
                    }
                    return Ok(());
                }
            };
            if !is_written {
                self.put(place.state(stamp), bytes.clone(), settled.left).await?;
            }
        }
        let put = self.put(place.head(), Head::State(stamp).to_bytes(), settled.left).await;
        if matches!(put, Err(StoreError::Full { .. })) && before != Some(stamp) {
            // The state took the last room, and no head names it.
            let _ = self.note(self.store.remove(&place.state(stamp)).await);
        }
        put?;
        self.sessions.set_recorded(id, stamp, epoch, touched);
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
        let put = self.put(place.head(), Head::Deleted.to_bytes(), ttl).await;
        let is_full = matches!(put, Err(StoreError::Full { .. }));
        if let (Some(Head::State(before)), true) = (before, put.is_ok() || is_full) {
            let _ = self.note(self.store.remove(&place.state(before)).await);
        }
        match is_full {
            // The state that goes makes room for the note. Until it is there, other workers find a head without a state.
            true => self.put(place.head(), Head::Deleted.to_bytes(), ttl).await,
            false => put,
        }
    }
}
