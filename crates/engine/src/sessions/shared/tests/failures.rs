//! Damaged records, stores that are down, drop things or hang, limits and expiry.
use super::*;

/// Whatever bit is flipped, wherever an object ends: it is not found, and an older state is not continued.
#[test]
fn damaged_records_are_not_continued() {
    let runtime = runtime();
    let (a, old, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    old.find("ann", id).unwrap();
    a.append("ann", id, &[2]);
    a.shared.flush();
    let place = Place::new(&a.shared.shared.fingerprint, "ann", id);
    let stamp = a.sessions.local(Timestamp::now(), "ann", id).unwrap().stamp;
    let whole = frames.lock().clone();
    let mut random = kvist_testing::SplitMix64(3);
    for round in 0..60 {
        let (key, is_head) = match round % 2 {
            0 => (place.head(), true),
            _ => (place.state(stamp), false),
        };
        let mut bytes = whole[&key].to_bytes().to_vec();
        match random.below(3) {
            0 => bytes.truncate(random.index(bytes.len())),
            _ => {
                let at = random.index(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
        }
        *frames.lock() = whole.clone();
        frames.lock().insert(key, Frame::split(bytes.into()));
        let new = Worker::start(&runtime, &frames);
        match is_head {
            // Nothing says that there is a session.
            true => assert_eq!(new.find("ann", id).unwrap(), Found::Nowhere, "round {round}"),
            false => {
                for worker in [&new, &old] {
                    let error = worker.get("ann", id).unwrap_err();
                    assert!(matches!(error, SessionError::LostRecord { .. }), "round {round}: {error}");
                }
                assert_eq!(new.shared.counts().lost, 1);
            }
        }
        assert_eq!(new.sessions.list(Timestamp::now(), "ann").len(), 0);
        // The worker that made it goes on, and the next change is recorded.
        assert_eq!(a.tokens("ann", id), Some(vec![1, 2]));
        a.shared.flush();
    }
    a.append("ann", id, &[3]);
    a.shared.flush();
    assert_eq!(old.tokens("ann", id), Some(vec![1, 2, 3]));
}

#[test]
fn a_store_that_is_down_or_hangs_stops_no_request() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    frames.is_down.store(true, Ordering::Relaxed);
    a.append("ann", id, &[2]);
    a.shared.flush();
    assert_eq!(a.tokens("ann", id), Some(vec![1, 2]));
    assert!(matches!(b.find("ann", id), Err(SessionError::Unreachable { .. })), "it may exist elsewhere");
    assert_eq!((a.shared.counts().unanswered, b.shared.counts().unanswered), (1, 1));
    assert!(a.shared.counts().failed_writes >= 1);
    frames.is_down.store(false, Ordering::Relaxed);
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2]), "what it missed is recorded later");
    // A store that hangs is given up after the deadline.
    frames.hangs.store(true, Ordering::Relaxed);
    let store = a.shared.shared.store.clone();
    let (deadline, most_tokens) = (Duration::from_millis(1), MOST_TOKENS);
    let store = SharedStore { store, runtime: runtime.handle().clone(), deadline, most_tokens };
    let sessions = SessionStore::new(LIMITS);
    let impatient = SharedSessions::open(store, &sessions, &origin("w", "t"), 1000).unwrap();
    let id = sessions.create(Timestamp::now(), &"ann".into(), NewSession::default()).unwrap().id;
    assert_eq!(runtime.block_on(impatient.find(&"ann".into(), id)).unwrap().found, Found::Here);
    assert_eq!(impatient.counts().unanswered, 1);
}

/// Another worker's state is known to be newer, but cannot be read: the older one here is not used in its place.
#[test]
fn a_newer_state_that_cannot_be_read_is_not_skipped() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    b.find("ann", id).unwrap();
    b.append("ann", id, &[2]);
    b.shared.flush();
    let heads: Vec<BlockKey> = vec![a.shared.shared.place("ann", id).head()];
    frames.lock().retain(|key, _| heads.contains(key));
    assert!(matches!(a.find("ann", id), Err(SessionError::LostRecord { .. })));
    assert_eq!(b.tokens("ann", id), Some(vec![1, 2]));
}

static LATER_S: AtomicU64 = AtomicU64::new(0);

fn clock() -> SystemTime {
    SystemTime::now() + Duration::from_secs(LATER_S.load(Ordering::Relaxed))
}

#[test]
fn records_expire_as_sessions_do_and_notes_later() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let start = || Worker::start_as(&runtime, &frames, &origin("w", "t"), LIMITS, clock);
    let (a, b) = (start(), start());
    let [id, deleted] = [1, 2].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    a.sessions.delete(Timestamp::now(), "ann", deleted).unwrap();
    a.shared.flush();
    let idle = LIMITS.idle.as_secs();
    LATER_S.store(idle / 2, Ordering::Relaxed);
    assert_eq!(b.find("ann", id).unwrap(), Found::Here);
    LATER_S.store(idle + 60, Ordering::Relaxed);
    assert_eq!(start().find("ann", id).unwrap(), Found::Nowhere);
    assert_eq!(b.find("ann", deleted).unwrap(), Found::Deleted);
    // A worker on whose clock it still lives records it again.
    assert_eq!(b.tokens("ann", id), Some(vec![1]));
    b.shared.flush();
    assert_eq!(start().find("ann", id).unwrap(), Found::Here);
}

static USED_S: AtomicU64 = AtomicU64::new(0);

fn clock_of_use() -> SystemTime {
    SystemTime::now() + Duration::from_secs(USED_S.load(Ordering::Relaxed))
}

/// Requests that change nothing, and forks, keep a session alive in the store as they do here.
#[test]
fn a_session_that_is_used_stays_in_the_store() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let start = || Worker::start_as(&runtime, &frames, &origin("w", "t"), LIMITS, clock_of_use);
    let a = start();
    let [claimed, forked, idle] = [1, 2, 3].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    let used_s = LIMITS.idle.as_secs() / 5 * 3;
    USED_S.store(used_s, Ordering::Relaxed);
    let now = Timestamp::now();
    let later = Timestamp { instant: now.instant + Duration::from_secs(used_s), ..now };
    drop(a.sessions.claim(later, "ann", claimed, true).unwrap());
    let (_, history) = a.sessions.get(later, "ann", forked).unwrap();
    a.sessions.fork(later, "ann", forked, &history, 1, None).unwrap();
    a.shared.flush();
    USED_S.store(used_s * 2, Ordering::Relaxed);
    let b = start();
    assert_eq!([claimed, forked, idle].map(|id| b.tokens("ann", id)), [Some(vec![1]), Some(vec![2]), None]);
    assert_eq!(a.shared.counts().recorded, 3 + 2 + 1, "once again each, and the fork");
}

/// A store that has lost everything while it was away: what it had is not let go before it has it again.
#[test]
fn what_a_store_may_have_lost_is_not_let_go() {
    for fails in [true, false] {
        let runtime = runtime();
        let (a, _, frames) = two(&runtime);
        let ids = [1, 2].map(|token| a.create("ann", &[token]));
        a.shared.close();
        let limits = SessionLimits { max_sessions: 2, ..LIMITS };
        let b = Worker::start_as(&runtime, &frames, &origin("w", "t"), limits, SystemTime::now);
        ids.iter().for_each(|id| assert_eq!(b.find("ann", *id).unwrap(), Found::Here));
        // It comes back empty; or this worker only sees that one is missing.
        frames.is_down.store(fails, Ordering::Relaxed);
        frames.lock().clear();
        assert_eq!(b.find("ann", ids[0]).unwrap(), Found::Here);
        frames.is_down.store(false, Ordering::Relaxed);
        // That takes the place of one, if it is recorded again by now.
        let new = NewSession { history: History::of_tokens(vec![5]), ..NewSession::default() };
        let _ = b.sessions.create(Timestamp::now(), &"ann".into(), new.clone());
        // Epochs that grow while all are looked at have them looked at again.
        (0..3).for_each(|_| b.shared.flush());
        let c = Worker::start(&runtime, &frames);
        assert_eq!(ids.map(|id| c.tokens("ann", id)), [Some(vec![1]), Some(vec![2])], "fails: {fails}");
        // Then there is room again.
        if b.sessions.list(Timestamp::now(), "ann").iter().all(|session| ids.contains(&session.id)) {
            b.sessions.create(Timestamp::now(), &"ann".into(), new).unwrap();
        }
    }
}

/// A store that was started again may be back at an earlier moment: a worker brings it what it has, without a request for it.
#[test]
fn what_a_store_went_back_to_is_replaced() {
    let runtime = runtime();
    let (a, _, frames) = two(&runtime);
    let [changed, other] = [1, 2].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    let earlier = frames.lock().clone();
    a.append("ann", changed, &[3]);
    a.shared.flush();
    frames.is_down.store(true, Ordering::Relaxed);
    assert_eq!(a.find("ann", other).unwrap(), Found::Here);
    *frames.lock() = earlier;
    frames.is_down.store(false, Ordering::Relaxed);
    a.shared.flush();
    let b = Worker::start(&runtime, &frames);
    assert_eq!([changed, other].map(|id| b.tokens("ann", id)), [Some(vec![1, 3]), Some(vec![2])]);
    assert_eq!(frames.lock().len(), 4, "heads and states");
}

/// A store may drop what it likes: a worker that has a session records it again.
#[test]
fn what_a_store_dropped_is_recorded_again() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.flush();
    frames.lock().clear();
    assert_eq!(b.find("ann", id).unwrap(), Found::Nowhere);
    assert_eq!(a.find("ann", id).unwrap(), Found::Here);
    a.shared.flush();
    assert_eq!(b.tokens("ann", id), Some(vec![1]));
}

#[test]
fn closing_records_everything_once_more() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    a.shared.close();
    assert_eq!(b.tokens("ann", id), Some(vec![1]));
    // With a store that is down it ends as well; and a second time nothing is waited for.
    b.append("ann", id, &[2]);
    frames.is_down.store(true, Ordering::Relaxed);
    b.shared.close();
    b.shared.close();
}
