//! Which state of a session counts, and who finds it.
use super::*;
use crate::sessions::store::SessionRecord;
use std::collections::BTreeSet;
use std::sync::mpsc::{Sender, channel};

#[test]
fn another_worker_continues_a_session_and_the_first_one_that() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1, 2, 3]);
    a.shared.flush();
    let (info, tokens) = b.get("ann", id).unwrap();
    assert_eq!((tokens, info.id), (vec![1, 2, 3], id));
    let (_, of_a) = a.get("ann", id).unwrap();
    assert_eq!(of_a, [1, 2, 3]);
    b.append("ann", id, &[4]);
    b.shared.flush();
    assert_eq!(a.tokens("ann", id), Some(vec![1, 2, 3, 4]));
    a.append("ann", id, &[5]);
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2, 3, 4, 5]));
    assert_eq!(frames.lock().len(), 2, "a head and a state: older states are removed");
    let (a, b) = (a.shared.counts(), b.shared.counts());
    assert_eq!((a.adopted, b.adopted, a.conflicts + b.conflicts), (1, 2, 0));
    assert_eq!((a.recorded, b.recorded), (2, 1));
}

/// Nothing of a session is read but its head, unless another worker has changed it.
#[test]
fn a_request_reads_once() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1, 2, 3]);
    a.shared.flush();
    let reads = |worker: &Worker| {
        let before = frames.reads.load(Ordering::Relaxed);
        worker.find("ann", id).unwrap();
        frames.reads.load(Ordering::Relaxed) - before
    };
    assert_eq!([reads(&a), reads(&b), reads(&b), reads(&a)], [1, 2, 1, 1]);
    let _guard = a.claim("ann", id).unwrap();
    assert_eq!(reads(&a), 0, "a session that is being changed is not taken over");
}

/// Nothing is recorded until what this returns is dropped: the thread that records is busy.
fn occupied(runtime: &Runtime) -> Sender<()> {
    let (started, has_started) = channel();
    let (go_on, wait) = channel();
    runtime.spawn(async move {
        started.send(()).unwrap();
        let _ = wait.recv(); // an error when the other end is dropped
    });
    has_started.recv().unwrap();
    go_on
}

/// The rule for changes at the same time: the one that is recorded first counts, for both.
#[test]
fn of_two_changes_the_first_one_recorded_counts() {
    let runtime = runtime();
    let (a, b, _) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    b.find("ann", id).unwrap();
    // Both have asked the store; now both change the session.
    b.append("ann", id, &[7]);
    b.shared.flush();
    // Both are recorded as one.
    let busy = occupied(&runtime);
    a.append("ann", id, &[8]);
    a.append("ann", id, &[9]);
    drop(busy);
    a.shared.flush();
    assert_eq!((a.shared.counts().conflicts, b.shared.counts().conflicts), (1, 0));
    for worker in [&a, &b, &a] {
        assert_eq!(worker.tokens("ann", id), Some(vec![1, 7]));
    }
    // It goes on from there.
    a.append("ann", id, &[10]);
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 7, 10]));
    assert_eq!(a.shared.counts().conflicts, 1);
}

/// A worker is killed while it generates: another one has the state before.
#[test]
fn while_a_session_generates_the_store_has_the_state_before() {
    let runtime = runtime();
    let (a, b, _) = two(&runtime);
    let id = a.create("ann", &[1, 2]);
    // Not recorded yet when the generation begins.
    let mut guard = a.claim("ann", id).unwrap();
    let prompt = History::of_tokens(vec![1, 2, 3]);
    guard.push(Some(prompt), 4).unwrap();
    guard.push(None, 5).unwrap();
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2]));
    assert_eq!(a.tokens("ann", id), Some(vec![1, 2, 3, 4, 5]), "a reader sees it grow");
    // The connection was cut, and the worker lives.
    drop(guard);
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2, 3, 4, 5]));
}

/// The client was sent to another worker in mid-answer. What the first one still generated is dropped.
#[test]
fn an_answer_that_was_given_up_does_not_replace_the_next_one() {
    let runtime = runtime();
    let (a, b, _) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    let mut guard = a.claim("ann", id).unwrap();
    guard.push(Some(History::of_tokens(vec![1])), 2).unwrap();
    b.find("ann", id).unwrap();
    b.append("ann", id, &[3]);
    b.shared.flush();
    guard.end(std::time::Instant::now(), |_| ());
    a.shared.flush();
    assert_eq!((a.tokens("ann", id), b.tokens("ann", id)), (Some(vec![1, 3]), Some(vec![1, 3])));
}

/// A claim that changes nothing is not recorded: it would only collide with others.
#[test]
fn a_request_that_changes_nothing_records_nothing() {
    let runtime = runtime();
    let (a, _, _) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    drop(a.claim("ann", id).unwrap());
    let mut guard = a.claim("ann", id).unwrap();
    guard.end(std::time::Instant::now(), |_| ());
    drop(guard);
    a.shared.flush();
    assert_eq!(a.shared.counts().recorded, 1);
}

#[test]
fn a_deleted_session_stays_deleted_everywhere() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    b.find("ann", id).unwrap();
    // The store still has it when it is asked for again.
    frames.is_down.store(true, Ordering::Relaxed);
    a.sessions.delete(Timestamp::now(), "ann", id).unwrap();
    a.shared.flush();
    frames.is_down.store(false, Ordering::Relaxed);
    assert!(a.shared.counts().failed_writes > 0);
    assert_eq!(a.find("ann", id).unwrap(), Found::Deleted);
    assert_eq!(a.tokens("ann", id), None);
    // A change of another worker does not bring it back.
    b.append("ann", id, &[2]);
    b.shared.flush();
    a.shared.flush();
    assert_eq!(b.find("ann", id).unwrap(), Found::Deleted);
    b.shared.flush();
    assert_eq!((a.tokens("ann", id), b.tokens("ann", id)), (None, None));
    assert_eq!(frames.lock().len(), 1, "the note alone is left");
}

/// A session that has expired on one worker is another one's still, changed or not.
#[test]
fn a_session_expires_on_one_worker_alone() {
    let runtime = runtime();
    let (one, other, _) = two(&runtime);
    let (read, changed) = (one.create("ann", &[1]), one.create("ann", &[2]));
    one.shared.flush();
    assert_eq!(other.tokens("ann", read), Some(vec![1]));
    assert_eq!(other.tokens("ann", changed), Some(vec![2]));
    other.append("ann", changed, &[3]);
    other.shared.flush();
    let now = Timestamp::now();
    let later = Timestamp { instant: now.instant + LIMITS.idle * 2, ..now };
    assert!(one.sessions.get(later, "ann", read).is_err());
    one.shared.flush();
    for worker in [&other, &one] {
        assert_eq!(worker.tokens("ann", read), Some(vec![1]));
        assert_eq!(worker.tokens("ann", changed), Some(vec![2, 3]));
    }
}

/// What a worker has made counts there also after its restart; what it had taken over makes room then too.
#[test]
fn a_restart_is_no_new_quota() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let own = a.create("ann", &[1]);
    let (other, third) = (b.create("ann", &[2]), b.create("ann", &[3]));
    a.shared.flush();
    b.shared.flush();
    assert_eq!(a.find("ann", other).unwrap(), Found::Here);
    let kept = [own, other].map(|id| {
        let (record, _) = a.sessions.record(Timestamp::now(), id).unwrap();
        let mut record: SessionRecord =
            serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        let history = std::mem::take(&mut record.history).restore(1000).unwrap();
        (record, history)
    });
    let sessions = SessionStore::new(SessionLimits { max_sessions: 2, ..LIMITS });
    sessions.restore(Timestamp::now(), kept.into());
    let a = Worker::resume(&runtime, &frames, &origin("w", "t"), sessions, SystemTime::now);
    a.shared.flush();
    let listed = || -> BTreeSet<SessionId> {
        a.sessions.list(Timestamp::now(), "ann").iter().map(|session| session.id).collect()
    };
    assert_eq!(a.find("ann", third).unwrap(), Found::Here);
    assert_eq!(listed(), BTreeSet::from([own, third]));
    a.append("ann", third, &[4]);
    a.shared.flush();
    assert!(matches!(a.find("ann", other), Err(SessionError::TooManySessions { .. })));
    assert_eq!(listed(), BTreeSet::from([own, third]));
}

/// A state that was recorded in the moment of a deletion was there for good.
#[test]
fn a_deletion_is_looked_at_again() {
    let runtime = runtime();
    let (one, other, _) = two(&runtime);
    let id = one.create("ann", &[1]);
    one.shared.flush();
    one.sessions.delete(Timestamp::now(), "ann", id).unwrap();
    one.shared.flush();
    let shared = &other.shared.shared;
    let place = shared.place("ann", id);
    let head = Head::State(Stamp { version: 9, writer: 9 });
    runtime.block_on(shared.store.put(place.head(), head.to_bytes(), None)).unwrap();
    runtime.block_on(one.shared.shared.note_deletion_again("ann", id));
    assert_eq!(one.find("ann", id).unwrap(), Found::Deleted);
}

/// A worker comes back with its directory: it has older states than the store, and newer ones that it could not record.
#[test]
fn a_worker_that_was_away_goes_on_from_the_newest_state() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let ids = [1, 2, 3, 4].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    // The first is continued by the other worker, the second here, the third deleted there, the fourth changed by both.
    frames.is_down.store(true, Ordering::Relaxed);
    a.append("ann", ids[1], &[20]);
    a.append("ann", ids[3], &[40]);
    // Not `flush`: that would try again a second later, when the store is back.
    a.shared.close();
    let kept = ids.map(|id| {
        let (mut record, _) = a.sessions.record(Timestamp::now(), id).unwrap();
        let text = serde_json::to_string(&record).unwrap();
        record = serde_json::from_str(&text).unwrap();
        let history = std::mem::take(&mut record.history).restore(1000).unwrap();
        (record, history)
    });
    frames.is_down.store(false, Ordering::Relaxed);
    let Worker { sessions, shared, .. } = a;
    drop((sessions, shared));
    ids.iter().for_each(|id| assert_eq!(b.find("ann", *id).unwrap(), Found::Here));
    b.append("ann", ids[0], &[10]);
    b.append("ann", ids[3], &[41]);
    b.sessions.delete(Timestamp::now(), "ann", ids[2]).unwrap();
    b.shared.flush();

    let sessions = SessionStore::new(LIMITS);
    sessions.restore(Timestamp::now(), kept.into());
    let a = Worker::resume(&runtime, &frames, &origin("w", "t"), sessions, SystemTime::now);
    a.shared.flush();
    let expected = [Some(vec![1, 10]), Some(vec![2, 20]), None, Some(vec![4, 41])];
    for worker in [&a, &b] {
        assert_eq!(ids.map(|id| worker.tokens("ann", id)), expected);
    }
    assert_eq!(a.shared.counts().conflicts, 1, "its own change of the fourth");
}

/// The process died between recording a state and noting that in its directory.
#[test]
fn a_directory_may_be_ahead_of_what_it_knows_of_the_store() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let busy = occupied(&runtime);
    let id = a.create("ann", &[1]);
    a.append("ann", id, &[2]);
    a.append("ann", id, &[3]);
    let (mut record, _) = a.sessions.record(Timestamp::now(), id).unwrap();
    assert_eq!(record.recorded, None);
    drop(busy);
    a.shared.flush();
    let history = std::mem::take(&mut record.history).restore(1000).unwrap();
    // One more change, which the store never gets.
    let mut newer = history.clone();
    Arc::make_mut(&mut newer.tokens).push(4);
    let stamp = record.stamp.unwrap();
    record.stamp = Some(Stamp { version: stamp.version + 1, ..stamp });
    let sessions = SessionStore::new(LIMITS);
    sessions.restore(Timestamp::now(), vec![(record, newer)]);
    let a = Worker::resume(&runtime, &frames, &origin("w", "t"), sessions, SystemTime::now);
    assert_eq!(
        a.tokens("ann", id),
        Some(vec![1, 2, 3, 4]),
        "it is not thrown away for what it was made from"
    );
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2, 3, 4]));
}

#[test]
fn forks_meet_their_parents_and_siblings() {
    let runtime = runtime();
    let (a, b, _) = two(&runtime);
    let trunk = a.create("ann", &[1, 2]);
    let (_, history) = a.sessions.get(Timestamp::now(), "ann", trunk).unwrap();
    let forks = a.sessions.fork(Timestamp::now(), "ann", trunk, &history, 3, None).unwrap();
    let forks: Vec<SessionId> = forks.iter().map(|fork| fork.id).collect();
    // Another tree on the other worker: its forks are no siblings of these.
    let other = b.create("ann", &[1, 2]);
    let strangers = b.sessions.fork(Timestamp::now(), "ann", other, &history, 2, None).unwrap();
    a.shared.flush();
    b.shared.flush();
    for fork in &forks {
        assert_eq!(b.get("ann", *fork).unwrap().0.parent, Some(trunk), "the parent is not here yet");
        b.sessions.audit();
    }
    let (info, _) = b.get("ann", trunk).unwrap();
    let mut expected = forks.clone();
    expected.sort_unstable();
    assert_eq!(info.children, expected);
    assert_eq!(b.get("ann", forks[0]).unwrap().0.shared_tokens, 2);
    b.sessions.audit();
    let mut deleted = b.sessions.keep(Timestamp::now(), "ann", forks[0], &[]).unwrap();
    deleted.sort_unstable();
    assert_eq!(deleted, expected.into_iter().filter(|fork| *fork != forks[0]).collect::<Vec<_>>());
    assert!(strangers.iter().all(|stranger| b.tokens("ann", stranger.id).is_some()));
    b.shared.flush();
    assert_eq!(forks.iter().filter(|fork| a.tokens("ann", **fork).is_some()).count(), 1);
    a.sessions.audit();
}

#[test]
fn other_owners_and_other_models_find_nothing() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    assert_eq!(b.find("bob", id).unwrap(), Found::Nowhere);
    assert_eq!(a.find("bob", id).unwrap(), Found::Nowhere);
    assert!(matches!(b.get("bob", id), Err(SessionError::NotFound { .. })));
    for other in [origin("v", "t"), origin("w", "u")] {
        let worker = Worker::start_as(&runtime, &frames, &other, LIMITS, SystemTime::now);
        assert_eq!(worker.find("ann", id).unwrap(), Found::Nowhere);
    }
    // Two owners may have drawn the same id: each has its own session, on a worker of its own.
    let new = || NewSession { history: History::of_tokens(vec![9]), ..NewSession::default() };
    b.sessions.create_as(Timestamp::now(), &"bob".into(), Some(id), new()).unwrap();
    b.shared.flush();
    assert_eq!((a.tokens("ann", id), b.tokens("bob", id)), (Some(vec![1]), Some(vec![9])));
    assert_eq!(b.tokens("ann", id), None);
    assert_eq!(b.tokens("bob", id), Some(vec![9]));
}
