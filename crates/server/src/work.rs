//! Memory limits for the preparation of requests: chat template renderings and tokenizations. (Memory for the JSON
//! documents is limited in `body.rs`.)
//!
//! All renderings and tokenizations together take at most [`work_bytes`] plus [`RESERVE_BYTES`], because each reserves
//! its upper bound before it begins. A request that waits for memory occupies no thread, and loses its place in line
//! when it ends. A key name that has taken all of the common memory leaves the reserve to other names. Work that could
//! never fit is refused.
//!
//! The bound of a rendering or tokenization is known only on the blocking thread that is about to begin it. If there is
//! not enough memory at that moment, the work ends, its thread is free for other requests, and the request waits,
//! oldest first. Then the work starts over with that memory reserved ([`Work::run`]).
use crate::body::{self, BytePool, Leave, SMALL_BYTES, Wanted, bodies_bytes};
use crate::config::ServerConfig;
use crate::error::ApiError;
use kvist_model::halt::{self, Halt};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A request that is not ready (parsed, rendered, tokenized) within this time is refused.
pub(crate) const PREPARATION: Duration = Duration::from_secs(30);

/// Upper bound of the memory for rendering an empty conversation, and for each byte of a conversation, in bytes. The
/// same figures as in [`Conversation::rendering_bytes`](kvist_model::template::Conversation::rendering_bytes).
const RENDERING_BYTES: usize = 32 << 20;
const RENDERING_FACTOR: usize = 16;

/// Bytes for all renderings and tokenizations at one time: enough for one body of the largest size, even if it is a
/// single text.
pub(crate) fn work_bytes(max_body_bytes: usize) -> usize {
    max_body_bytes.saturating_mul(RENDERING_FACTOR).saturating_add(RENDERING_BYTES)
}

/// Bytes in addition, reserved for conversations and texts up to [`SMALL_BYTES`].
const RESERVE_BYTES: usize = RENDERING_BYTES + SMALL_BYTES * RENDERING_FACTOR;

/// Memory for finishing an answer that a stop string cut inside a token, in bytes: the rest of that token is tokenized.
pub(crate) const SETTLING_BYTES: usize = 1 << 20;

/// Threads that prepare requests.
pub(crate) const THREADS: usize = 8;

/// Upper bound of the memory that all requests of a server take besides the model, in bytes, for a model of this
/// context length. It covers bodies and their documents, renderings, tokenizations, and the text that each thread may
/// hold besides. Prompts of prepared requests then occupy the queue, and later the batch. The sizes of lanes,
/// semaphores, queue and batch enforce the bound.
pub fn request_bytes(config: &ServerConfig, model_context: u32) -> u64 {
    let most = config.limits.max_body_bytes;
    let texts = most.saturating_mul(THREADS);
    let work = work_bytes(most).saturating_add(RESERVE_BYTES);
    let ready = bodies_bytes(most).saturating_add(work).saturating_add(texts);
    let tokens = u64::from(model_context.min(config.cache_tokens(model_context)));
    let prompt = tokens.saturating_mul(size_of::<u32>() as u64);
    let queue = prompt.saturating_mul(config.queue_places() as u64);
    // The scheduler keeps a copy to which it appends the answer. The copy grows by an eighth.
    let batch = prompt.saturating_mul(2).saturating_add(prompt / 8 + 64);
    let batch = batch.saturating_mul(u64::from(config.scheduler.max_batch));
    (ready as u64).saturating_add(queue).saturating_add(batch)
}

/// A semaphore hands out at most 2³² permits at a time, so one permit stands for this many bytes.
const UNIT: usize = 1 << 10;

fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT)
}

pub(crate) struct Work {
    /// Memory for all names. A request first waits in the line of its own name, so the requests of one name together
    /// never ask for more than exists, and the names take turns.
    common: BytePool,
    units: usize,
    /// Memory for small work of names that hold none of the common memory.
    reserve: BytePool,
    /// Units of common memory that each name holds. Empty if there is only one name.
    held: BTreeMap<Arc<str>, watch::Sender<usize>>,
}

/// Reserved memory. Dropping it frees it.
pub(crate) struct Room {
    _leave: Leave,
    /// The counter of common memory of the name, and the units of this reservation in it.
    of: Option<(watch::Sender<usize>, usize)>,
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some((held, units)) = &self.of {
            held.send_modify(|held| *held -= units);
        }
    }
}

/// Memory reserved for one piece of work on this thread. Dropping it frees it.
pub(crate) struct Taken {
    /// `None` if the memory was lent by the run.
    _room: Option<Room>,
    lent: usize,
    /// Not `Send`: lent memory returns to the run of the thread that took it.
    _here: PhantomData<*const ()>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        RUN.with_borrow_mut(|run| run.iter_mut().for_each(|run| run.left += self.lent));
    }
}

thread_local! {
    static RUN: RefCell<Option<Run>> = const { RefCell::new(None) };
}

/// The work that runs on this thread.
struct Run {
    name: Arc<str>,
    /// Bytes of the run's reservation that are not lent out.
    left: usize,
    /// Bytes that the work asked for and that were not available.
    wants: Option<usize>,
    halt: Halt,
}

/// Outcome of one attempt.
enum Ran<T, W> {
    Done(Result<T, ApiError>),
    /// The work must run again, with this many bytes reserved first.
    Again(usize, W),
}

/// Work that may start over, and the permit for its document. The fields drop in this order.
struct Begun<F> {
    work: F,
    _document: Option<Leave>,
    until: Option<Instant>,
}

impl Work {
    /// `names` are the key names of all callers.
    pub fn new(max_body_bytes: usize, names: &[Arc<str>]) -> Self {
        let all = units(work_bytes(max_body_bytes)).min(u32::MAX as usize);
        let reserve = units(RESERVE_BYTES);
        let held = names.iter().filter(|_| names.len() > 1);
        let held = held.map(|name| (name.clone(), watch::Sender::new(0)));
        Work {
            common: BytePool::new(all, all, names),
            units: all,
            reserve: BytePool::new(reserve, reserve, names),
            held: held.collect(),
        }
    }

    /// Largest reservation that can be granted, in bytes.
    pub fn bytes(&self) -> usize {
        self.units * UNIT
    }

    fn common(&self, name: &str, units: usize, leave: Leave) -> Room {
        let of = self.held.get(name).map(|held| (held.clone(), units));
        if let Some((held, units)) = &of {
            held.send_modify(|held| *held += units);
        }
        Room { _leave: leave, of }
    }

    /// Returns whether this name may use the reserve: only for small work, and only if it holds no common memory.
    fn may_use_reserve(&self, name: &str, units: usize) -> bool {
        units * UNIT <= RESERVE_BYTES && self.held.get(name).is_none_or(|held| *held.borrow() == 0)
    }

    /// `None` if there is not enough memory now, or other requests wait for it.
    fn try_room(&self, name: &str, bytes: usize) -> Option<Room> {
        let units = units(bytes);
        if let Some(leave) = self.common.try_take(name, units) {
            return Some(self.common(name, units, leave));
        }
        let leave = self.may_use_reserve(name, units).then(|| self.reserve.try_take(name, units)).flatten();
        leave.map(|leave| Room { _leave: leave, of: None })
    }

    /// Wait for memory, oldest request first. `None` if that much can never be granted.
    pub async fn room(&self, name: &str, bytes: usize) -> Option<Room> {
        let units = units(bytes);
        let common = async { Some(self.common(name, units, self.common.take(name, units).await?)) };
        if units * UNIT > RESERVE_BYTES {
            return common.await;
        }
        let reserve = async {
            loop {
                if let Some(held) = self.held.get(name) {
                    // `held` is also a sender, so the channel stays open.
                    let _ = held.subscribe().wait_for(|held| *held == 0).await;
                }
                let leave = self.reserve.take(name, units).await?;
                // The name may have taken common memory meanwhile.
                if self.may_use_reserve(name, units) {
                    return Some(Room { _leave: leave, of: None });
                }
            }
        };
        tokio::select! {
            biased;
            room = common => room,
            room = reserve => room,
        }
    }

    /// Reserve memory for work on this thread, inside [`Work::run`] or [`with`]. If there is not enough, this attempt
    /// ends: [`Work::run`] starts the work again when there is.
    pub fn take(&self, bytes: usize, param: &str) -> Result<Taken, ApiError> {
        if bytes > self.bytes() {
            let message = format!(
                "to make this ready takes up to {bytes} bytes of memory; the server has {} for such work: shorten it",
                self.bytes()
            );
            return Err(ApiError::invalid(param, message));
        }
        halt::check().map_err(|_| halted())?;
        RUN.with_borrow_mut(|run| {
            let run = run.as_mut().ok_or_else(halted)?;
            if bytes <= run.left {
                run.left -= bytes;
                return Ok(Taken { _room: None, lent: bytes, _here: PhantomData });
            }
            match self.try_room(&run.name, bytes) {
                Some(room) => Ok(Taken { _room: Some(room), lent: 0, _here: PhantomData }),
                None => {
                    run.wants = Some(bytes);
                    // Some callers treat an error as a result and would continue, so cancel the run.
                    run.halt.cancel();
                    Err(halted())
                }
            }
        })
    }

    /// Like [`blocking`](body::blocking), for work that reserves memory. The work starts over whenever memory was
    /// missing, so it must have no side effects before its last reservation.
    pub async fn run<T: Send + 'static>(
        &self,
        name: &Arc<str>,
        work: impl FnMut() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_within(PREPARATION, name, work).await
    }

    async fn run_within<T: Send + 'static>(
        &self,
        within: Duration,
        name: &Arc<str>,
        work: impl FnMut() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut begun = Begun { work, _document: body::take_document(), until: None };
        let mut room: Option<(Room, usize)> = None;
        loop {
            let halt = Halt::default();
            // A handler is dropped when its client disconnects.
            let _wanted = Wanted(halt.clone());
            let name_of_run = name.clone();
            let ran = tokio::task::spawn_blocking(move || {
                // The wait for the first thread does not count.
                let until = *begun.until.get_or_insert_with(|| Instant::now() + within);
                if halt.is_over() {
                    return Ran::Done(Err(halted()));
                }
                let left = room.as_ref().map_or(0, |(_, bytes)| *bytes);
                let (done, wants) = during(name_of_run, left, &halt.until(until), &mut begun.work);
                drop(room);
                match (done, wants) {
                    (Err(_), Some(bytes)) => Ran::Again(bytes, begun),
                    (done, _) => Ran::Done(done),
                }
            });
            let ran = ran.await.map_err(|_| ApiError::internal("a request could not be prepared"))?;
            let bytes = match ran {
                Ran::Done(done) => return done,
                Ran::Again(bytes, again) => {
                    begun = again;
                    bytes
                }
            };
            let until = begun.until.unwrap_or_else(Instant::now);
            let waited = tokio::time::timeout_at(until.into(), self.room(name, bytes)).await;
            room = Some((waited.ok().flatten().ok_or_else(halted)?, bytes));
        }
    }
}

/// Run `work`; returns its result, and the bytes that it could not reserve.
fn during<T>(name: Arc<str>, left: usize, halt: &Halt, work: impl FnOnce() -> T) -> (T, Option<usize>) {
    struct Before(Option<Run>);
    impl Drop for Before {
        fn drop(&mut self) {
            RUN.set(self.0.take());
        }
    }
    let run = Run { name, left, wants: None, halt: halt.clone() };
    let _before = Before(RUN.replace(Some(run)));
    let done = halt.during(work);
    (done, RUN.with_borrow(|run| run.as_ref().and_then(|run| run.wants)))
}

/// Run work on this thread that cannot start over, with `bytes` already reserved as `room`. The memory is freed
/// afterwards.
pub(crate) fn with<T>(name: Arc<str>, room: Option<Room>, bytes: usize, work: impl FnOnce() -> T) -> T {
    let done = during(name, bytes, &Halt::default(), work).0;
    drop(room);
    done
}

/// The error if the client has disconnected or the request took too long to prepare.
pub(crate) fn halted() -> ApiError {
    let message = format!(
        "the request was not ready within {} s: shorten it, or try again when the server is less busy",
        PREPARATION.as_secs()
    );
    ApiError { message, ..ApiError::deadline() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_model::template::Conversation;
    use std::pin::{Pin, pin};
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::{Context, Poll, Waker};
    use tokio::sync::mpsc::unbounded_channel;

    const MAX_BODY: usize = 4 << 20;

    fn names(n: usize) -> Vec<Arc<str>> {
        (0..n).map(|i| format!("name-{i}").into()).collect()
    }

    fn poll<F: Future>(future: &mut Pin<&mut F>) -> Poll<F::Output> {
        future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    /// A runtime with one blocking thread.
    fn runtime() -> tokio::runtime::Runtime {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        runtime.worker_threads(2).max_blocking_threads(1).enable_all().build().unwrap()
    }

    /// Returns whether everything can be reserved and no name counts as holding memory.
    fn is_free(work: &Work, name: &str) -> bool {
        let room = work.common.try_take(name, work.units);
        let reserve = work.reserve.try_take(name, units(RESERVE_BYTES));
        room.is_some() && reserve.is_some() && work.held.values().all(|held| *held.borrow() == 0)
    }

    /// The reserved memory must match what a rendering may take.
    #[test]
    fn the_largest_conversation_has_room() {
        let kwargs = serde_json::Map::new();
        for bytes in [0, 1000, MAX_BODY] {
            let messages = [serde_json::json!({"role": "user", "content": "a".repeat(bytes)})];
            let conversation = Conversation {
                messages: &messages,
                tools: &[],
                add_generation_prompt: true,
                kwargs: &kwargs,
            };
            let rendering = conversation.rendering_bytes();
            assert!(
                rendering >= work_bytes(bytes) && rendering < work_bytes(bytes + 1000),
                "{bytes}: {rendering}"
            );
        }
    }

    /// Regression: requests that waited for memory held the threads, so requests that needed none waited behind them.
    #[test]
    fn a_request_that_waits_for_room_holds_no_thread() {
        let names = names(2);
        let (a, b) = (names[0].clone(), names[1].clone());
        let work = Arc::new(Work::new(MAX_BODY, &names));
        runtime().block_on(async {
            let held = work.try_room(&a, work.bytes()).unwrap();
            let (tell, mut began) = unbounded_channel();
            let run = |name: &Arc<str>, bytes: usize| {
                let (work, name, tell) = (work.clone(), name.clone(), tell.clone());
                tokio::spawn(async move {
                    let own = work.clone();
                    let done = own.run(&name, move || {
                        let _ = tell.send(());
                        work.take(bytes, "messages").map(|_| bytes)
                    });
                    done.await.map_err(|error| error.code)
                })
            };
            let waiting: Vec<_> = (0..3 * THREADS).map(|_| run(&a, work.bytes())).collect();
            // All have run once.
            for _ in 0..waiting.len() {
                began.recv().await.unwrap();
            }
            // A small request of another name passes, and so does one that needs no memory.
            assert_eq!(run(&b, RENDERING_BYTES).await.unwrap(), Ok(RENDERING_BYTES));
            assert_eq!(run(&a, 0).await.unwrap(), Ok(0));
            assert!(waiting.iter().all(|run| !run.is_finished()));
            drop(held);
            for waiting in waiting {
                assert_eq!(waiting.await.unwrap(), Ok(work.bytes()));
            }
            assert!(is_free(&work, &b));
            // A request that can never fit does not wait.
            assert_eq!(run(&a, work.bytes() + 1).await.unwrap(), Err("invalid_value"));
        });
    }

    #[test]
    fn a_name_that_has_all_the_room_leaves_the_reserve() {
        for n in [1, 2, 3] {
            let names = names(n);
            let work = Work::new(MAX_BODY, &names);
            let all = work.try_room(&names[0], work.bytes()).unwrap();
            let reserve = |name: &Arc<str>| work.try_room(name, RESERVE_BYTES);
            // A single name uses the reserve for its own small requests.
            assert_eq!(reserve(&names[0]).is_some(), n == 1);
            for name in &names[1..] {
                assert!(work.try_room(name, RESERVE_BYTES + 1).is_none());
                let room = reserve(name);
                assert!(room.is_some() && reserve(name).is_none());
            }
            drop(all);
            assert!(is_free(&work, &names[0]));
        }
    }

    /// Regression: large requests of one name stood in line before those of all other names.
    #[tokio::test]
    async fn names_have_the_room_in_turn() {
        let names = names(2);
        let work = Work::new(MAX_BODY, &names);
        let most = work.bytes();
        let held = work.try_room(&names[0], most).unwrap();
        let mut first = pin!(work.room(&names[0], most));
        let mut second = pin!(work.room(&names[0], most));
        let mut other = pin!(work.room(&names[1], most));
        assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
        assert!(poll(&mut other).is_pending());
        drop(held);
        // The name that had the memory waits in its own line, and is behind the other name again.
        let now = poll(&mut other);
        assert!(now.is_ready() && poll(&mut first).is_pending() && poll(&mut second).is_pending());
        drop(now);
        assert!(poll(&mut first).is_ready());
    }

    /// Regression: whether a small request may use the reserve was checked only once, when it began to wait.
    #[tokio::test]
    async fn a_small_request_has_the_reserve_when_its_name_has_nothing_else() {
        let names = names(2);
        let work = Work::new(MAX_BODY, &names);
        let most = work.bytes();
        let held = work.try_room(&names[0], most).unwrap();
        let mut other = pin!(work.room(&names[1], most));
        let mut small = pin!(work.room(&names[0], UNIT));
        assert!(poll(&mut other).is_pending() && poll(&mut small).is_pending());
        drop(held);
        let Poll::Ready(Some(all)) = poll(&mut other) else { panic!("it is its turn") };
        let Poll::Ready(Some(room)) = poll(&mut small) else { panic!("the reserve is free") };
        assert!(room.of.is_none());
        drop((all, room));
        // While a name holds common memory, it may not use the reserve.
        let _held = [0, 1].map(|i| work.try_room(&names[i], most / 2).unwrap());
        let mut small = pin!(work.room(&names[0], UNIT));
        assert!(poll(&mut small).is_pending());
        assert!(work.try_room(&names[0], UNIT).is_none());
    }

    /// Settling a session reserves its memory beforehand, and does not start over.
    #[test]
    fn work_that_is_not_begun_again_has_its_room_in_hand() {
        let names = names(1);
        let work = Work::new(MAX_BODY, &names);
        let all = work.bytes();
        let room = work.try_room(&names[0], all);
        let reserve = work.reserve.try_take(&names[0], units(RESERVE_BYTES));
        assert!(room.is_some() && reserve.is_some());
        let twice = with(names[0].clone(), room, all, || {
            let first = work.take(all, "session").map(drop).is_ok();
            // Memory that was given back is available again, and no more than that.
            let taken = work.take(all, "session");
            (first, taken.is_ok(), work.take(1, "session").is_err())
        });
        assert_eq!(twice, (true, true, true));
        drop(reserve);
        assert!(is_free(&work, &names[0]));
        // Without a reservation the work takes what is free, and fails if nothing is.
        assert!(with(names[0].clone(), None, 0, || work.take(all, "session").is_ok()));
        let _held = work.try_room(&names[0], all);
        assert!(with(names[0].clone(), None, 0, || work.take(all, "session").is_err()));
    }

    #[tokio::test]
    async fn a_client_that_leaves_gives_its_place_back() {
        let names = names(1);
        let work = Work::new(MAX_BODY, &names);
        let most = work.bytes();
        let held = work.try_room(&names[0], most / 2).unwrap();
        {
            // It already holds the half that was free.
            let mut waiting = pin!(work.room(&names[0], most));
            assert!(poll(&mut waiting).is_pending());
            let mut small = pin!(work.room(&names[0], UNIT));
            assert!(poll(&mut small).is_ready(), "the reserve is no part of that");
        }
        assert!(work.try_room(&names[0], most / 2).is_some());
        drop(held);
        assert!(is_free(&work, &names[0]));
    }

    #[test]
    fn waiting_has_its_time() {
        let names = names(1);
        let work = Arc::new(Work::new(MAX_BODY, &names));
        runtime().block_on(async {
            let held = work.try_room(&names[0], work.bytes()).unwrap();
            let own = work.clone();
            let most = work.bytes();
            let late = work.run_within(Duration::from_millis(20), &names[0], move || {
                own.take(most, "messages").map(|_| ())
            });
            assert_eq!(late.await.unwrap_err().code, ApiError::deadline().code);
            drop(held);
            assert!(is_free(&work, &names[0]));
        });
    }

    /// Regression: eight concurrent renderings, each within its own limit, killed the process. Together they had no
    /// limit.
    #[test]
    fn all_work_together_has_its_bound() {
        let names = names(3);
        let work = Arc::new(Work::new(MAX_BODY, &names));
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).max_blocking_threads(THREADS).enable_all().build().unwrap();
        let (now, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        runtime.block_on(async {
            let run = |i: usize| {
                let (work, now, peak, name) = (work.clone(), now.clone(), peak.clone(), names[i % 3].clone());
                tokio::spawn(async move {
                    let own = work.clone();
                    // A rendering, and then a tokenization that takes more or less memory.
                    let pieces = [RENDERING_BYTES + i * 99_991, (i % 7) * (9 << 20) + 1];
                    let done = own.run(&name, move || {
                        for bytes in pieces {
                            let taken = work.take(bytes, "messages")?;
                            peak.fetch_max(now.fetch_add(bytes, SeqCst) + bytes, SeqCst);
                            std::thread::yield_now();
                            now.fetch_sub(bytes, SeqCst);
                            drop(taken);
                        }
                        Ok(())
                    });
                    done.await.is_ok()
                })
            };
            let runs: Vec<_> = (0..200).map(run).collect();
            for run in runs {
                assert!(run.await.unwrap());
            }
        });
        let peak = peak.load(SeqCst);
        assert!(peak <= work_bytes(MAX_BODY) + RESERVE_BYTES, "{peak}");
        assert!(is_free(&work, &names[0]));
    }
}
