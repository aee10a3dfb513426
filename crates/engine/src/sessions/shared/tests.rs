//! Workers over a store in memory. `rules` has what is promised, one by one, `failures` what goes wrong, `full` a store without room,
//! `limits` quotas and what is bounded, and `random` compares two workers with a simple model.
mod failures;
mod full;
mod limits;
mod random;
mod rules;

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
    /// It is down, and a breaker says so.
    is_not_asked: AtomicBool,
    /// Nothing is written while it has so many objects, as by a Redis that evicts nothing; 0 for any number.
    most: AtomicU64,
    /// Reads never end.
    hangs: AtomicBool,
    reads: AtomicU64,
    /// Reads of these objects wait until the value is true, and are counted.
    gate: Mutex<Option<(Vec<BlockKey>, watch::Receiver<bool>)>>,
    gated_reads: AtomicU64,
}

impl Frames {
    fn answer(&self) -> Result<(), StoreError> {
        if self.is_not_asked.load(Ordering::Relaxed) {
            return Err(StoreError::Unavailable { store: "test".into(), failures: 3, retry_ms: 1 });
        }
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
            let gate = self.0.gate.lock().unwrap().clone();
            if let Some((_, mut is_open)) = gate.filter(|(gated, _)| gated.contains(key)) {
                self.0.gated_reads.fetch_add(1, Ordering::Relaxed);
                is_open.wait_for(|is_open| *is_open).await.unwrap();
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
            let (mut frames, most) = (self.0.lock(), self.0.most.load(Ordering::Relaxed));
            if most > 0 && frames.len() as u64 >= most {
                let (store, problem) = ("test".into(), "it has no room".into());
                return Err(StoreError::Full { store, action: "write", problem });
            }
            frames.insert(key, frame);
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
    let cache =
        CacheOrigin { k: "f32".into(), v: "f32".into(), recent: 0, groups: vec![(None, 0)], channels: None };
    let model = Fingerprint { weights: weights.into(), tokenizer: tokenizer.into(), config: "c".into() };
    Origin { model, weights: "f32".into(), rope: "r".into(), cache }
}

const LIMITS: SessionLimits =
    SessionLimits { idle: Duration::from_secs(1 << 20), max_sessions: 1000, max_tokens: 100_000 };

/// A session that counts as more is not taken over.
const MOST_TOKENS: u64 = 1000;

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
        let most_tokens = MOST_TOKENS;
        let store = SharedStore { store, runtime: runtime.handle().clone(), deadline, most_tokens };
        let shared = SharedSessions::open(store, &sessions, origin, 1000).unwrap();
        Worker { sessions, shared, runtime: runtime.handle().clone() }
    }

    fn arrive(&self, owner: &str, id: SessionId) -> Result<Arrival, SessionError> {
        self.runtime.block_on(self.shared.find(&owner.into(), id))
    }

    fn find(&self, owner: &str, id: SessionId) -> Result<Found, SessionError> {
        self.arrive(owner, id).map(|arrival| arrival.found)
    }

    fn delete(&self, owner: &str, id: SessionId) -> Result<(), SessionError> {
        self.runtime.block_on(self.shared.delete(&owner.into(), id))
    }

    fn create(&self, owner: &str, tokens: &[u32]) -> SessionId {
        let history = History::of_tokens(tokens.to_vec());
        let new = NewSession { salt: owner.into(), history, ..NewSession::default() };
        self.sessions.create(Timestamp::now(), &owner.into(), new).unwrap().id
    }

    /// What a request sees.
    fn get(&self, owner: &str, id: SessionId) -> Result<(SessionInfo, Vec<u32>), SessionError> {
        let _arrival = self.arrive(owner, id)?;
        let (info, history) = self.sessions.get(Timestamp::now(), owner, id)?;
        Ok((info, history.tokens.to_vec()))
    }

    fn tokens(&self, owner: &str, id: SessionId) -> Option<Vec<u32>> {
        self.get(owner, id).ok().map(|(_, tokens)| tokens)
    }

    fn claim(&self, owner: &str, id: SessionId) -> Result<SessionGuard, SessionError> {
        let _arrival = self.arrive(owner, id)?;
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
