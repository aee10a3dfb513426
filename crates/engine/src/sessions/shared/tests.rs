//! The rules of shared sessions, one by one. `random` compares two workers with a simple model.
mod random;

use super::*;
use crate::saved::{CacheOrigin, Origin};
use crate::sessions::{History, NewSession, SessionGuard, SessionInfo, SessionLimits};
use kvist_model::Fingerprint;
use kvist_store::{BoxFuture, Frame, FrameStore, Framed, Usage};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::SystemTime;
use tokio::runtime::Runtime;

/// A store in memory that does what a test tells it.
#[derive(Default)]
struct Frames {
    frames: Mutex<BTreeMap<BlockKey, Frame>>,
    is_down: AtomicBool,
    /// Reads never end.
    hangs: AtomicBool,
    reads: AtomicU64,
}

impl Frames {
    fn answer(&self) -> Result<(), StoreError> {
        match self.is_down.load(Ordering::Relaxed) {
            false => Ok(()),
            true => {
                let (store, problem) = ("test".into(), "it is told to fail".into());
                Err(StoreError::Failed { store, action: "work", problem })
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<BlockKey, Frame>> {
        self.frames.lock().unwrap()
    }
}

struct Shelf(Arc<Frames>);

impl FrameStore for Shelf {
    fn name(&self) -> &str {
        "test"
    }
    fn lookup<'a>(&'a self, _: &'a [BlockKey], _: Duration) -> BoxFuture<'a, Result<usize, StoreError>> {
        unreachable!("sessions are not looked up")
    }
    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(async move {
            self.0.reads.fetch_add(1, Ordering::Relaxed);
            if self.0.hangs.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            self.0.answer()?;
            Ok(self.0.lock().get(key).cloned())
        })
    }
    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        _: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.0.answer()?;
            self.0.lock().insert(key, frame);
            Ok(())
        })
    }
    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.0.answer()?;
            self.0.lock().remove(key);
            Ok(())
        })
    }
    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// A runtime of one thread: calls of the store do not wait, so what a task does between two of them is never interleaved with another
/// task, and no two changes are recorded in the same moment.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn origin(weights: &str, tokenizer: &str) -> Origin {
    let cache = CacheOrigin { k: "f32".into(), v: "f32".into(), recent: 0, groups: vec![(None, 0)] };
    let model = Fingerprint { weights: weights.into(), tokenizer: tokenizer.into(), config: "c".into() };
    Origin { model, weights: "f32".into(), rope: "r".into(), cache }
}

const LIMITS: SessionLimits =
    SessionLimits { idle: Duration::from_secs(1 << 20), max_sessions: 1000, max_tokens: 100_000 };

/// A worker of a fleet.
struct Worker {
    sessions: Arc<SessionStore>,
    shared: SharedSessions,
    runtime: Handle,
}

impl Worker {
    fn start(runtime: &Runtime, frames: &Arc<Frames>) -> Worker {
        Worker::start_as(runtime, frames, &origin("w", "t"), LIMITS, SystemTime::now)
    }

    fn start_as(
        runtime: &Runtime,
        frames: &Arc<Frames>,
        origin: &Origin,
        limits: SessionLimits,
        clock: fn() -> SystemTime,
    ) -> Worker {
        Worker::resume(runtime, frames, origin, SessionStore::new(limits), clock)
    }

    fn resume(
        runtime: &Runtime,
        frames: &Arc<Frames>,
        origin: &Origin,
        sessions: Arc<SessionStore>,
        clock: fn() -> SystemTime,
    ) -> Worker {
        let store: Arc<dyn BlockStore> = Arc::new(Framed::over(Shelf(frames.clone())).with_clock(clock));
        // Not a criterion: a store that hangs is told to.
        let deadline = Duration::from_secs(600);
        let store = SharedStore { store, runtime: runtime.handle().clone(), deadline };
        let shared = SharedSessions::open(store, &sessions, origin, 1000).unwrap();
        Worker { sessions, shared, runtime: runtime.handle().clone() }
    }

    fn find(&self, owner: &str, id: SessionId) -> Result<Found, SessionError> {
        self.runtime.block_on(self.shared.find(&owner.into(), id))
    }

    fn create(&self, owner: &str, tokens: &[u32]) -> SessionId {
        let history = History::of_tokens(tokens.to_vec());
        let new = NewSession { salt: owner.into(), history, ..NewSession::default() };
        self.sessions.create(Timestamp::now(), &owner.into(), new).unwrap().id
    }

    /// What a request sees.
    fn get(&self, owner: &str, id: SessionId) -> Result<(SessionInfo, Vec<u32>), SessionError> {
        self.find(owner, id)?;
        let (info, history) = self.sessions.get(Timestamp::now(), owner, id)?;
        Ok((info, history.tokens.to_vec()))
    }

    fn tokens(&self, owner: &str, id: SessionId) -> Option<Vec<u32>> {
        self.get(owner, id).ok().map(|(_, tokens)| tokens)
    }

    fn claim(&self, owner: &str, id: SessionId) -> Result<SessionGuard, SessionError> {
        self.find(owner, id)?;
        self.sessions.claim(Timestamp::now(), owner, id, true)
    }

    /// Appends without asking the store before, as a request does that has asked it already.
    fn append(&self, owner: &str, id: SessionId, tokens: &[u32]) {
        let mut guard = self.sessions.claim(Timestamp::now(), owner, id, false).unwrap();
        let all = [guard.history.tokens.as_slice(), tokens].concat();
        guard.commit(Timestamp::now(), History::of_tokens(all)).unwrap();
    }
}

fn two(runtime: &Runtime) -> (Worker, Worker, Arc<Frames>) {
    let frames = Arc::new(Frames::default());
    (Worker::start(runtime, &frames), Worker::start(runtime, &frames), frames)
}

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
    a.append("ann", id, &[8]);
    a.append("ann", id, &[9]);
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
    a.shared.flush();
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
    let id = a.create("ann", &[1]);
    a.append("ann", id, &[2]);
    a.append("ann", id, &[3]);
    let (mut record, _) = a.sessions.record(Timestamp::now(), id).unwrap();
    assert_eq!(record.recorded, None);
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
    assert_eq!(a.tokens("ann", id), Some(vec![1, 2, 3, 4]), "it is not thrown away for what it was made from");
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
    let store = SharedStore { store, runtime: runtime.handle().clone(), deadline: Duration::from_millis(1) };
    let sessions = SessionStore::new(LIMITS);
    let impatient = SharedSessions::open(store, &sessions, &origin("w", "t"), 1000).unwrap();
    let id = sessions.create(Timestamp::now(), &"ann".into(), NewSession::default()).unwrap().id;
    assert_eq!(runtime.block_on(impatient.find(&"ann".into(), id)).unwrap(), Found::Here);
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

#[test]
fn limits_hold_for_sessions_of_other_workers() {
    let runtime = runtime();
    let frames = Arc::new(Frames::default());
    let a = Worker::start(&runtime, &frames);
    let ids = [40, 40, 200].map(|n| a.create("ann", &vec![1; n]));
    a.shared.flush();
    let tight = |max_sessions, max_tokens| {
        let limits = SessionLimits { max_sessions, max_tokens, ..LIMITS };
        Worker::start_as(&runtime, &frames, &origin("w", "t"), limits, SystemTime::now)
    };
    let one = tight(1, 1000);
    one.find("ann", ids[0]).unwrap();
    assert!(matches!(one.find("ann", ids[1]), Err(SessionError::TooManySessions { .. })));
    let few = tight(10, 100);
    assert!(matches!(few.find("ann", ids[2]), Err(SessionError::TooManyTokens { .. })));
    ids[..2].iter().for_each(|id| assert_eq!(few.find("ann", *id).unwrap(), Found::Here));
    a.append("ann", ids[0], &[1; 30]);
    a.shared.flush();
    assert!(matches!(few.find("ann", ids[0]), Err(SessionError::TooManyTokens { .. })), "one that grew elsewhere");
    few.sessions.audit();
    assert_eq!(few.sessions.list(Timestamp::now(), "ann").len(), 2);
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

/// A store may drop what it likes: whoever has a session records it again.
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
