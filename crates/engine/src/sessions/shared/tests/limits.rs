//! Quotas of a worker that takes over sessions, one read for many requests, and bounds of what waits for the store.
use super::*;
use crate::sessions::store::MOST_DELETIONS;
use kvist_testing::SplitMix64;

fn tight(runtime: &Runtime, frames: &Arc<Frames>, (max_sessions, max_tokens): (usize, u64)) -> Worker {
    let limits = SessionLimits { max_sessions, max_tokens, ..LIMITS };
    Worker::start_as(runtime, frames, &origin("w", "t"), limits, SystemTime::now)
}

fn is_full<T>(result: Result<T, SessionError>) -> bool {
    matches!(result, Err(SessionError::TooManySessions { .. } | SessionError::TooManyTokens { .. }))
}

/// Sessions that a worker only took over make room for others, and come back when they are asked for.
#[test]
fn sessions_of_other_workers_make_room() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let ids = [40, 40, 200].map(|n| a.create("ann", &vec![1; n]));
    a.shared.flush();
    let one = tight(&runtime, &frames, (1, 1000));
    for id in [ids[0], ids[1], ids[0], ids[2]] {
        assert!(one.tokens("ann", id).is_some());
        assert_eq!(one.sessions.list(Timestamp::now(), "ann").len(), 1);
        one.sessions.audit();
    }
    // A session of its own is created in their place.
    let own = one.create("ann", &[7]);
    one.shared.flush();
    // That one stays, wherever it is recorded: it is counted here alone.
    assert!(is_full(one.find("ann", ids[0])));
    assert_eq!(one.tokens("ann", own), Some(vec![7]));

    let few = tight(&runtime, &frames, (10, 100));
    ids[..2].iter().for_each(|id| assert_eq!(few.find("ann", *id).unwrap(), Found::Here));
    assert!(is_full(few.find("ann", ids[2])), "larger than the quota");
    assert_eq!(few.sessions.list(Timestamp::now(), "ann").len(), 2, "then none is let go");
    // It grew elsewhere, and the other one makes room.
    a.append("ann", ids[0], &[1; 30]);
    a.shared.flush();
    assert_eq!(few.tokens("ann", ids[0]).unwrap().len(), 70);
    assert_eq!(few.sessions.list(Timestamp::now(), "ann").len(), 1);
    a.append("ann", ids[0], &[1; 31]);
    a.shared.flush();
    assert!(is_full(few.find("ann", ids[0])), "101 tokens");
    few.sessions.audit();
    // Another owner's sessions are no room for this one.
    let bobs = a.create("bob", &[1; 50]);
    a.shared.flush();
    assert_eq!(few.find("bob", bobs).unwrap(), Found::Here);
    assert!(is_full(few.find("ann", ids[0])));
    assert_eq!(few.sessions.list(Timestamp::now(), "bob").len(), 1);
}

/// What a worker has changed counts there, so that an owner cannot fill the store by letting it go.
#[test]
fn what_was_changed_here_counts_here() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let ids = [1, 2, 3].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    let two = tight(&runtime, &frames, (2, 1000));
    for id in &ids[..2] {
        two.find("ann", *id).unwrap();
        two.append("ann", *id, &[9]);
    }
    two.shared.flush();
    assert!(is_full(two.find("ann", ids[2])));
    let new = NewSession { history: History::of_tokens(vec![5]), ..NewSession::default() };
    assert!(is_full(two.sessions.create(Timestamp::now(), &"ann".into(), new)));
    // What grows while it generates makes room too, and ends at the quota.
    let small = tight(&runtime, &frames, (10, 50));
    let spare = a.create("ann", &[1; 20]);
    a.shared.flush();
    let own = small.create("ann", &[1; 20]);
    small.shared.flush();
    small.find("ann", spare).unwrap();
    let mut guard = small.claim("ann", own).unwrap();
    let mut prompt = Some(History::of_tokens(vec![1; 20]));
    for token in 0..30 {
        guard.push(prompt.take(), token).unwrap();
    }
    assert_eq!(small.sessions.list(Timestamp::now(), "ann").len(), 1);
    let full = guard.push(None, 99);
    assert!(matches!(full, Err(SessionError::TooManyTokens { tokens: 51, more: 1, max: 50 })), "{full:?}");
}

/// It has expired on the worker that made it, and comes back from the store: it is that worker's still.
#[test]
fn what_comes_back_to_its_worker_counts_there() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let one = tight(&runtime, &frames, (1, 1000));
    let id = one.create("ann", &[1]);
    one.shared.flush();
    let now = Timestamp::now();
    let later = Timestamp { instant: now.instant + LIMITS.idle * 2, ..now };
    assert!(one.sessions.get(later, "ann", id).is_err());
    assert_eq!(one.tokens("ann", id), Some(vec![1]));
    let new = NewSession { history: History::of_tokens(vec![5]), ..NewSession::default() };
    assert!(is_full(one.sessions.create(Timestamp::now(), &"ann".into(), new)));
}

/// Between its arrival and its use a session is not let go, however many others arrive.
#[test]
fn a_session_that_a_request_is_about_to_use_stays() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let ids = [1, 2, 3].map(|token| a.create("ann", &[token]));
    a.shared.flush();
    let two = tight(&runtime, &frames, (2, 1000));
    let arrivals = [0, 1].map(|at| two.arrive("ann", ids[at]).unwrap());
    assert!(is_full(two.find("ann", ids[2])));
    let [first, _second] = arrivals;
    let again = two.arrive("ann", ids[0]).unwrap();
    drop(first);
    assert!(is_full(two.find("ann", ids[2])), "another request uses it");
    drop(again);
    two.find("ann", ids[2]).unwrap();
    let listed: Vec<SessionId> = two.sessions.list(Timestamp::now(), "ann").iter().map(|s| s.id).collect();
    assert!(listed.contains(&ids[1]) && listed.contains(&ids[2]), "{listed:?}");
    two.sessions.audit();
}

/// A fork that stays knows its parent, which was let go, and finds it again.
#[test]
fn a_parent_that_was_let_go_is_still_the_parent() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let trunk = a.create("ann", &[1, 2]);
    let (_, history) = a.sessions.get(Timestamp::now(), "ann", trunk).unwrap();
    let fork = a.sessions.fork(Timestamp::now(), "ann", trunk, &history, 1, None).unwrap()[0].id;
    let other = a.create("ann", &[3]);
    a.shared.flush();
    let two = tight(&runtime, &frames, (2, 1000));
    two.find("ann", trunk).unwrap();
    two.find("ann", fork).unwrap();
    two.append("ann", fork, &[4]);
    assert_eq!(two.get("ann", trunk).unwrap().0.children, [fork]);
    two.find("ann", other).unwrap();
    two.sessions.audit();
    assert_eq!(two.get("ann", fork).unwrap().0.parent, Some(trunk));
    assert_eq!(two.get("ann", trunk).unwrap().0.children, [fork], "in the place of the other one");
    two.sessions.audit();
    // A fork of a session that was taken over does not push its parent out.
    two.delete("ann", fork).unwrap();
    let one = tight(&runtime, &frames, (1, 1000));
    one.find("ann", trunk).unwrap();
    assert!(is_full(one.sessions.fork(Timestamp::now(), "ann", trunk, &history, 1, None)));
    one.sessions.audit();
}

/// Deleting is how one gets below a quota: it works also for what there is no room for, and for what is damaged.
#[test]
fn a_deletion_needs_no_room() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let ids = [10, 20, 30].map(|n| a.create("ann", &vec![1; n]));
    a.shared.flush();
    let full = tight(&runtime, &frames, (1, 25));
    full.create("ann", &[1]);
    full.shared.flush();
    // Too many sessions; too many tokens.
    for id in [ids[0], ids[2]] {
        assert!(is_full(full.find("ann", id)));
        full.delete("ann", id).unwrap();
        full.shared.flush();
        assert_eq!(a.find("ann", id).unwrap(), Found::Deleted);
        assert!(matches!(full.delete("ann", id), Err(SessionError::NotFound { .. })), "only once");
    }
    let stamp = a.sessions.local(Timestamp::now(), "ann", ids[1]).unwrap().stamp;
    let state = a.shared.shared.place("ann", ids[1]).state(stamp);
    frames.lock().remove(&state);
    assert!(matches!(full.find("ann", ids[1]), Err(SessionError::LostRecord { .. })));
    full.delete("ann", ids[1]).unwrap();
    full.shared.flush();
    assert_eq!(a.tokens("ann", ids[1]), None);
    assert!(matches!(full.delete("ann", SessionId(1)), Err(SessionError::NotFound { .. })));
    let bobs = a.create("bob", &[1]);
    a.shared.flush();
    assert!(matches!(full.delete("ann", bobs), Err(SessionError::NotFound { .. })), "another one's");
    assert_eq!(a.tokens("bob", bobs), Some(vec![1]));
}

/// A worker with room for three sessions reads all that another one has, and its requests overlap: it finds what the other one has, or
/// is full only because of requests that run.
#[test]
fn a_worker_with_little_room_reads_everything() {
    let runtime = runtime();
    for seed in 0..20 {
        let mut draw = SplitMix64(7000 + seed);
        let frames = Arc::new(Frames::default());
        let (a, b) = (Worker::start(&runtime, &frames), tight(&runtime, &frames, (3, 200)));
        let mut model: BTreeMap<SessionId, Vec<u32>> = BTreeMap::new();
        let mut running: Vec<Arrival> = Vec::new();
        for step in 0..200 {
            let what = format!("seed {seed}, step {step}");
            let picked = model.keys().nth(draw.index(model.len().max(1))).copied();
            match (draw.below(8), picked) {
                (0, _) | (_, None) => {
                    let tokens: Vec<u32> = (0..draw.below(60)).collect();
                    model.insert(a.create("ann", &tokens), tokens);
                }
                (1, Some(id)) => {
                    a.append("ann", id, &[step]);
                    model.get_mut(&id).unwrap().push(step);
                }
                (2, Some(id)) if model.len() > 3 => {
                    b.delete("ann", id).unwrap_or_else(|error| panic!("{what}: {error}"));
                    b.shared.flush();
                    assert_eq!(a.find("ann", id).unwrap(), Found::Deleted, "{what}");
                    model.remove(&id);
                }
                (3, Some(_)) if !running.is_empty() => drop(running.swap_remove(draw.index(running.len()))),
                (_, Some(id)) => match b.get("ann", id) {
                    Ok((_, tokens)) => {
                        assert_eq!(tokens, model[&id], "{what}");
                        if draw.below(3) == 0 {
                            running.extend(b.arrive("ann", id));
                        }
                    }
                    Err(error) => {
                        assert!(is_full::<()>(Err(error)) && !running.is_empty(), "{what}");
                        running.clear();
                        assert_eq!(b.tokens("ann", id).as_ref(), Some(&model[&id]), "{what}");
                    }
                },
            }
            a.shared.flush();
            let listed = b.sessions.list(Timestamp::now(), "ann");
            assert!(listed.len() <= 3, "{what}");
            a.sessions.audit();
            b.sessions.audit();
        }
        assert!(b.shared.counts().adopted > model.len() as u64, "seed {seed}: some came back");
    }
}

/// Ten requests for a session that is not here read its state once, and all of them learn what came of it.
#[test]
fn many_requests_read_a_state_once() {
    for fails in [false, true] {
        let runtime = runtime();
        let (a, b, frames) = two(&runtime);
        let id = a.create("ann", &[1, 2]);
        a.shared.flush();
        let stamp = a.sessions.local(Timestamp::now(), "ann", id).unwrap().stamp;
        let (opener, gate) = watch::channel(false);
        *frames.gate.lock().unwrap() = Some((vec![a.shared.shared.place("ann", id).state(stamp)], gate));
        let shared = Arc::new(b.shared);
        let requests: Vec<_> = (0..10)
            .map(|_| {
                let shared = shared.clone();
                runtime
                    .spawn(async move { shared.find(&"ann".into(), id).await.map(|arrival| arrival.found) })
            })
            .collect();
        // Some may come after the state was read: then they find it here.
        while frames.gated_reads.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        frames.is_down.store(fails, Ordering::Relaxed);
        opener.send_replace(true);
        for request in requests {
            let found = runtime.block_on(request).unwrap();
            match fails {
                false => assert_eq!(found.unwrap(), Found::Here),
                true => assert!(matches!(found, Err(SessionError::Unreachable { .. }))),
            }
        }
        // One that comes after the failure tries again.
        let reads = frames.gated_reads.load(Ordering::Relaxed);
        assert!(fails || reads == 1, "{reads} reads");
        let counts = shared.counts();
        assert_eq!((counts.adopted, counts.unanswered), if fails { (0, 10) } else { (1, 0) });
        assert!(shared.shared.reading.lock().unwrap().is_empty());
    }
}

/// However many sessions are asked for, few states are in memory at a time, and one owner leaves a place to the others.
#[test]
fn few_states_are_read_at_a_time() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let mut sessions: Vec<(&str, SessionId)> =
        (0..20).map(|token| ("ann", a.create("ann", &[token]))).collect();
    sessions.push(("bob", a.create("bob", &[1])));
    a.shared.flush();
    let state = |(owner, id): (&str, SessionId)| {
        let stamp = a.sessions.local(Timestamp::now(), owner, id).unwrap().stamp;
        a.shared.shared.place(owner, id).state(stamp)
    };
    let (opener, gate) = watch::channel(false);
    *frames.gate.lock().unwrap() = Some((sessions.iter().map(|session| state(*session)).collect(), gate));
    let shared = Arc::new(b.shared);
    let before = frames.reads.load(Ordering::Relaxed);
    let requests: Vec<_> = sessions
        .iter()
        .map(|(owner, id)| {
            let (shared, owner, id) = (shared.clone(), Arc::from(*owner), *id);
            runtime.spawn(async move { shared.find(&owner, id).await.map(|arrival| arrival.found) })
        })
        .collect();
    // All heads, three states of ann's, and bob's.
    let expected = sessions.len() as u64 + 4;
    while frames.reads.load(Ordering::Relaxed) < before + expected {
        std::thread::yield_now();
    }
    // The one thread of the runtime has then done all that it can do without the gate.
    for _ in 0..100 {
        runtime.block_on(runtime.spawn(tokio::task::yield_now())).unwrap();
    }
    assert_eq!(frames.reads.load(Ordering::Relaxed) - before, expected);
    assert_eq!(frames.gated_reads.load(Ordering::Relaxed), 4);
    opener.send_replace(true);
    for request in requests {
        assert_eq!(runtime.block_on(request).unwrap().unwrap(), Found::Here);
    }
    assert_eq!(shared.counts().adopted, 21);
}

/// A record that is longer than what memory was set aside for is not parsed; it can be deleted.
#[test]
fn a_long_record_is_not_taken_over() {
    let runtime = runtime();
    let (a, b, _) = two(&runtime);
    // Four characters each, in a record that may have forty.
    let [short, long] = [9_000, 11_000].map(|n| a.create("ann", &vec![999; n]));
    a.shared.flush();
    assert_eq!(b.tokens("ann", short).map(|tokens| tokens.len()), Some(9_000));
    let error = b.find("ann", long).unwrap_err();
    assert!(matches!(error, SessionError::LongRecord { max: 40_000, .. }), "{error}");
    assert!(error.to_string().contains("max_tokens"));
    b.delete("ann", long).unwrap();
    b.shared.flush();
    assert_eq!(a.find("ann", long).unwrap(), Found::Deleted);
}

/// A client that draws an id reads no state to learn that it is taken.
#[test]
fn a_creation_reads_no_state() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let id = a.create("ann", &[1]);
    let deleted = a.create("ann", &[1]);
    a.shared.flush();
    let is_free =
        |worker: &Worker, owner: &str, id| runtime.block_on(worker.shared.is_free(&owner.into(), id));
    let reads = frames.reads.load(Ordering::Relaxed);
    assert!(!is_free(&b, "ann", id) && is_free(&b, "bob", id));
    assert_eq!(frames.reads.load(Ordering::Relaxed) - reads, 2);
    assert!(b.sessions.list(Timestamp::now(), "ann").is_empty());
    a.delete("ann", deleted).unwrap();
    assert!(!is_free(&a, "ann", deleted));
    a.shared.flush();
    assert!(!is_free(&b, "ann", deleted));
    frames.is_down.store(true, Ordering::Relaxed);
    assert!(is_free(&b, "ann", id) && !is_free(&a, "ann", id));
    assert_eq!(b.shared.counts().unanswered, 1);
}

/// While the store is down, what waits for it is bounded by the sessions and by the number of deletions.
#[test]
fn what_waits_for_the_store_is_bounded() {
    let runtime = runtime();
    let (a, b, frames) = two(&runtime);
    let kept = a.create("ann", &[1]);
    a.shared.flush();
    frames.is_down.store(true, Ordering::Relaxed);
    // However often a session changes, it waits once.
    (0..1000).for_each(|token| a.append("ann", kept, &[token % 1000]));
    assert!(a.sessions.n_pending() <= 1);
    let mut n_deleted = 0;
    let refused = loop {
        let id = a.create("ann", &[1]);
        match a.sessions.delete(Timestamp::now(), "ann", id) {
            Ok(()) => n_deleted += 1,
            Err(error) => break error,
        }
        assert!(n_deleted <= MOST_DELETIONS, "there is no bound");
    };
    assert_eq!(n_deleted, MOST_DELETIONS);
    assert!(matches!(refused, SessionError::DeletionsWait { waiting: MOST_DELETIONS }), "{refused}");
    // Other owners are not refused for it.
    let bobs = a.create("bob", &[1]);
    a.sessions.delete(Timestamp::now(), "bob", bobs).unwrap();
    assert!(a.sessions.n_pending() <= MOST_DELETIONS + 3);
    frames.is_down.store(false, Ordering::Relaxed);
    a.shared.flush();
    assert_eq!(a.sessions.n_pending(), 0);
    a.delete("ann", kept).unwrap();
    a.shared.flush();
    assert_eq!(b.find("ann", kept).unwrap(), Found::Deleted);
}
