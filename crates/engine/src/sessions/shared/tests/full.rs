//! A store that has no room and evicts nothing: it refuses what is written, and still says what it has.
use super::*;

fn n_objects(frames: &Frames) -> u64 {
    frames.lock().len() as u64
}

/// A refused write counted as a failure, after which the store may have lost anything: so nothing made room for other sessions.
#[test]
fn a_full_store_is_read_as_before() {
    for more in [0, 1] {
        let runtime = runtime();
        let frames = Arc::new(Frames::default());
        let a = Worker::start(&runtime, &frames);
        let ids = [1, 2, 3].map(|token| a.create("ann", &[token]));
        a.shared.flush();
        let limits = SessionLimits { max_sessions: 3, ..LIMITS };
        let b = Worker::start_as(&runtime, &frames, &origin("w", "t"), limits, SystemTime::now);
        ids[..2].iter().for_each(|id| assert_eq!(b.find("ann", *id).unwrap(), Found::Here));
        // Also with room for the state of a session, but not for its head.
        let before = n_objects(&frames);
        frames.most.store(before + more, Ordering::Relaxed);
        let epoch = b.sessions.epoch();
        let own = b.create("ann", &[7]);
        b.shared.flush();
        assert!(b.shared.counts().failed_writes > 0);
        assert_eq!(n_objects(&frames), before, "a state without a head is removed");
        assert_eq!(b.sessions.epoch(), epoch);
        assert_eq!(b.tokens("ann", ids[2]), Some(vec![3]), "in the place of one that the store has");
        assert_eq!(b.shared.counts().unanswered, 0);
        // What others have recorded is still compared.
        frames.most.store(0, Ordering::Relaxed);
        a.append("ann", ids[2], &[4]);
        a.shared.flush();
        frames.most.store(1, Ordering::Relaxed);
        assert_eq!(b.tokens("ann", ids[2]), Some(vec![3, 4]));
        frames.most.store(0, Ordering::Relaxed);
        b.shared.flush();
        assert_eq!(a.tokens("ann", own), Some(vec![7]), "recorded when there is room");
        b.sessions.audit();
    }
}

/// A state that the store has under its head is not removed when it has no room to record it again.
#[test]
fn a_full_store_keeps_what_it_has() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    let before = frames.lock().clone();
    frames.most.store(1, Ordering::Relaxed);
    a.append("ann", id, &[2]);
    a.shared.flush();
    assert_eq!(*frames.lock(), before);
    assert_eq!(b.tokens("ann", id), Some(vec![1]), "the last recorded state");
    assert_eq!(a.tokens("ann", id), Some(vec![1, 2]));
    // The clock goes on: the same state is to be recorded again, and is there already.
    frames.most.store(0, Ordering::Relaxed);
    a.shared.flush();
    frames.most.store(3, Ordering::Relaxed);
    let now = Timestamp::now();
    let later = Timestamp { instant: now.instant + LIMITS.idle / 5 * 3, ..now };
    drop(a.sessions.claim(later, "ann", id, true).unwrap());
    a.shared.flush();
    assert_eq!(Worker::start(&runtime, &frames).tokens("ann", id), Some(vec![1, 2]));
}

/// Clients that delete are the way out of a full store.
#[test]
fn a_deletion_makes_its_own_room() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let ids = [1, 2].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    frames.most.store(n_objects(&frames), Ordering::Relaxed);
    a.delete("ann", ids[0]).unwrap();
    a.shared.flush();
    assert_eq!(b.find("ann", ids[0]).unwrap(), Found::Deleted);
    assert_eq!(b.tokens("ann", ids[1]), Some(vec![2]));
    // One that was never recorded leaves no state: its note waits.
    let never = a.create("ann", &[3]);
    frames.most.store(1, Ordering::Relaxed);
    a.delete("ann", never).unwrap();
    a.shared.flush();
    assert_eq!(a.find("ann", never).unwrap(), Found::Deleted);
    frames.most.store(0, Ordering::Relaxed);
    a.shared.flush();
    assert_eq!(b.find("ann", never).unwrap(), Found::Deleted);
}

/// Other users of the store may have opened the breaker, so the first refusal counts; the next ones tell nothing new.
#[test]
fn a_store_that_is_not_asked_has_failed_once() {
    let runtime = runtime();
    let (a, _, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    let epoch = a.sessions.epoch();
    for round in 1..=2 {
        frames.is_not_asked.store(true, Ordering::Relaxed);
        (0..3).for_each(|_| assert_eq!(a.find("ann", id).unwrap(), Found::Here));
        assert_eq!(a.sessions.epoch(), epoch + round);
        frames.is_not_asked.store(false, Ordering::Relaxed);
        assert_eq!(a.find("ann", id).unwrap(), Found::Here);
    }
    assert_eq!(a.shared.counts().unanswered, 6);
}
