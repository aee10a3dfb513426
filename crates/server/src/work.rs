//! Memory limits for the preparation of requests: chat template renderings and tokenizations. (Memory for the JSON
//! documents is limited in `bodies.rs`.)
//!
//! All renderings and tokenizations together take at most [`work_bytes`] plus [`RESERVE_BYTES`], because each reserves
//! its upper bound before it begins. A request that waits for memory occupies no thread, and loses its place in line
//! when it ends. A key name that has taken all of the common memory leaves the reserve to other names. Work that could
//! never fit is refused.
//!
//! The bound of a rendering or tokenization is known only on the blocking thread that is about to begin it. If there is
//! not enough memory at that moment, the work ends, its thread is free for other requests, and the request waits,
//! oldest first. Then the work starts over with that memory reserved ([`WorkMemory::run`]).
use crate::blocking::{CancelOnDrop, take_document};
use crate::bodies::{SMALL_BYTES, bodies_bytes};
use crate::config::ServerConfig;
use crate::error::{ApiError, PREPARATION_TIME};
use crate::kv_events::kept_event_bytes;
use crate::memory::{BytePool, Permit};
use kvist_engine::serving::TierConfig;
use kvist_engine::sessions::taking_over_bytes;
use kvist_engine::speculate::SuffixConfig;
use kvist_model::halt::{self, Halt};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

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

/// Bytes that speculation keeps for a token of a running request or of a finished answer: copies, and the index of
/// repetitions while its tables grow.
const DRAFTING_BYTES: u64 = 80;

/// Threads that prepare requests.
pub(crate) const THREADS: usize = 8;

/// Upper bound of the memory that all requests of a server take besides the model, in bytes, for a model of this
/// context length. It covers bodies and their documents, renderings, tokenizations, and the text that each thread may
/// use in addition. Prompts of prepared requests then occupy the queue, and later the batch, with what drafters keep of
/// them and of finished answers, and with what the tiers have of them. Sessions of other workers are read whole before they are taken
/// over. Events for routers are kept for a while. The sizes of pools, semaphores, queue and batch enforce the bound.
pub fn request_bytes(config: &ServerConfig, model_context: u32) -> u64 {
    let max = config.limits.max_body_bytes;
    let texts = max.saturating_mul(THREADS);
    let work = work_bytes(max).saturating_add(RESERVE_BYTES);
    let ready = bodies_bytes(max).saturating_add(work).saturating_add(texts);
    let tokens = u64::from(config.text_tokens(model_context));
    let prompt = tokens.saturating_mul(size_of::<u32>() as u64);
    let queue = prompt.saturating_mul(config.queue_places() as u64);
    // The scheduler keeps a copy to which it appends the answer. The copy grows by an eighth.
    let batch = prompt.saturating_mul(2).saturating_add(prompt / 8 + 64);
    let batch = batch.saturating_mul(u64::from(config.scheduler.max_batch));
    let drafted = u64::from(config.scheduler.max_batch).saturating_mul(tokens);
    let drafted =
        drafted.saturating_add(SuffixConfig::default().max_tokens as u64).saturating_mul(DRAFTING_BYTES);
    let drafted = if config.speculation.is_on() { drafted } else { 0 };
    let shares_sessions = config.sessions.shared_store(&config.tiers).is_some();
    let taken_over =
        if shares_sessions { taking_over_bytes(config.most_taken_over(model_context)) } else { 0 };
    let waiting = (ready as u64).saturating_add(queue).saturating_add(taken_over);
    let n_tiers = config.tiers.n_tiers();
    let of_tiers = TierConfig::request_bytes(n_tiers, tokens, config.cache.block_tokens);
    let n_requests = (config.queue_places() as u64).saturating_add(u64::from(config.scheduler.max_batch));
    let of_tiers = if n_tiers > 0 { of_tiers.saturating_mul(n_requests) } else { 0 };
    let n_blocks = config.cache_tokens(model_context) / config.cache.block_tokens.max(1);
    let events = if config.kv_events.endpoint.is_some() { kept_event_bytes(n_blocks.into()) } else { 0 };
    [waiting, batch, drafted, of_tiers, events].into_iter().fold(0, u64::saturating_add)
}

/// Work is counted in units of this many bytes.
const UNIT: usize = 1 << 10;

fn units(bytes: usize) -> usize {
    bytes.div_ceil(UNIT)
}

/// Memory for rendering and tokenizing, shared by all requests.
pub(crate) struct WorkMemory {
    /// Memory for all names. A request first waits in the line of its own name, so the requests of one name together
    /// never ask for more than exists, and the names take turns.
    common: BytePool,
    units: usize,
    /// Memory for small work of names that use none of the common memory.
    reserve: BytePool,
    /// Units of common memory that each name uses. Empty if there is only one name.
    taken: BTreeMap<Arc<str>, watch::Sender<usize>>,
}

/// Reserved memory. Dropping it frees it.
pub(crate) struct WorkPermit {
    _permit: Permit,
    /// The name's counter of common memory, and the units of this reservation in it.
    of: Option<(watch::Sender<usize>, usize)>,
}

impl Drop for WorkPermit {
    fn drop(&mut self) {
        if let Some((taken, units)) = &self.of {
            taken.send_modify(|taken| *taken -= units);
        }
    }
}

/// Memory reserved for one piece of work on this thread. Dropping it frees it.
pub(crate) struct ReservedMemory {
    /// `None` if the memory was lent by the run.
    _permit: Option<WorkPermit>,
    lent: usize,
    /// Not `Send`: lent memory returns to the run of the thread that took it.
    _here: PhantomData<*const ()>,
}

impl Drop for ReservedMemory {
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
enum Attempt<T, W> {
    Done(Result<T, ApiError>),
    /// The work must run again, with this many bytes reserved first.
    Again(usize, W),
}

/// Work that may start over, and the permit for its document. The fields drop in this order.
struct Restartable<F> {
    work: F,
    _document: Option<Permit>,
    until: Option<Instant>,
}

impl WorkMemory {
    /// `names` are the key names of all callers.
    pub fn new(max_body_bytes: usize, names: &[Arc<str>]) -> Self {
        let all = units(work_bytes(max_body_bytes)).min(u32::MAX as usize);
        let reserve = units(RESERVE_BYTES);
        let taken = names.iter().filter(|_| names.len() > 1);
        let taken = taken.map(|name| (name.clone(), watch::Sender::new(0)));
        WorkMemory {
            common: BytePool::new(all, all, names),
            units: all,
            reserve: BytePool::new(reserve, reserve, names),
            taken: taken.collect(),
        }
    }

    /// Largest reservation that can be granted, in bytes.
    pub fn bytes(&self) -> usize {
        self.units * UNIT
    }

    fn common_permit(&self, name: &str, units: usize, permit: Permit) -> WorkPermit {
        let of = self.taken.get(name).map(|taken| (taken.clone(), units));
        if let Some((taken, units)) = &of {
            taken.send_modify(|taken| *taken += units);
        }
        WorkPermit { _permit: permit, of }
    }

    /// Returns whether this name may use the reserve: only for small work, and only if it uses no common memory.
    fn may_use_reserve(&self, name: &str, units: usize) -> bool {
        units * UNIT <= RESERVE_BYTES && self.taken.get(name).is_none_or(|taken| *taken.borrow() == 0)
    }

    /// `None` if there is not enough memory now, or other requests wait for it.
    fn try_permit(&self, name: &str, bytes: usize) -> Option<WorkPermit> {
        let units = units(bytes);
        if let Some(permit) = self.common.try_take(name, units) {
            return Some(self.common_permit(name, units, permit));
        }
        let permit = self.may_use_reserve(name, units).then(|| self.reserve.try_take(name, units)).flatten();
        permit.map(|permit| WorkPermit { _permit: permit, of: None })
    }

    /// Wait for memory, oldest request first. `None` if that much can never be granted.
    pub async fn permit(&self, name: &str, bytes: usize) -> Option<WorkPermit> {
        let units = units(bytes);
        let common = async { Some(self.common_permit(name, units, self.common.take(name, units).await?)) };
        if units * UNIT > RESERVE_BYTES {
            return common.await;
        }
        let reserve = async {
            loop {
                if let Some(taken) = self.taken.get(name) {
                    // `taken` is also a sender, so the channel stays open.
                    let _ = taken.subscribe().wait_for(|taken| *taken == 0).await;
                }
                let permit = self.reserve.take(name, units).await?;
                // The name may have taken common memory meanwhile.
                if self.may_use_reserve(name, units) {
                    return Some(WorkPermit { _permit: permit, of: None });
                }
            }
        };
        tokio::select! {
            biased;
            permit = common => permit,
            permit = reserve => permit,
        }
    }

    /// Reserve memory for work on this thread, inside [`WorkMemory::run`] or [`with`]. If there is not enough, this
    /// attempt ends: [`WorkMemory::run`] starts the work again when there is.
    pub fn take(&self, bytes: usize, param: &str) -> Result<ReservedMemory, ApiError> {
        if bytes > self.bytes() {
            let message = format!(
                "preparing this takes up to {bytes} bytes of memory, but the server has only {} for such work: \
                 shorten it",
                self.bytes()
            );
            return Err(ApiError::invalid(param, message));
        }
        halt::check().map_err(|_| ApiError::not_ready_in_time())?;
        RUN.with_borrow_mut(|run| {
            let run = run.as_mut().ok_or_else(ApiError::not_ready_in_time)?;
            if bytes <= run.left {
                run.left -= bytes;
                return Ok(ReservedMemory { _permit: None, lent: bytes, _here: PhantomData });
            }
            match self.try_permit(&run.name, bytes) {
                Some(permit) => Ok(ReservedMemory { _permit: Some(permit), lent: 0, _here: PhantomData }),
                None => {
                    run.wants = Some(bytes);
                    // Some callers treat an error as a result and would continue, so cancel the run.
                    run.halt.cancel();
                    Err(ApiError::not_ready_in_time())
                }
            }
        })
    }

    /// Like [`blocking`](crate::blocking::blocking), for work that reserves memory. The work starts over whenever
    /// memory was missing, so it must have no side effects before its last reservation.
    pub async fn run<T: Send + 'static>(
        &self,
        name: &Arc<str>,
        work: impl FnMut() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.run_within(PREPARATION_TIME, name, work).await
    }

    async fn run_within<T: Send + 'static>(
        &self,
        within: Duration,
        name: &Arc<str>,
        work: impl FnMut() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let mut restartable = Restartable { work, _document: take_document(), until: None };
        let mut permit: Option<(WorkPermit, usize)> = None;
        loop {
            let halt = Halt::default();
            // A handler is dropped when its client disconnects.
            let _cancel = CancelOnDrop(halt.clone());
            let name_of_run = name.clone();
            let ran = tokio::task::spawn_blocking(move || {
                // The wait for the first thread does not count.
                let until = *restartable.until.get_or_insert_with(|| Instant::now() + within);
                if halt.is_over() {
                    return Attempt::Done(Err(ApiError::not_ready_in_time()));
                }
                let left = permit.as_ref().map_or(0, |(_, bytes)| *bytes);
                let (done, wants) = run_attempt(name_of_run, left, &halt.until(until), &mut restartable.work);
                drop(permit);
                match (done, wants) {
                    (Err(_), Some(bytes)) => Attempt::Again(bytes, restartable),
                    (done, _) => Attempt::Done(done),
                }
            });
            let ran = ran.await.map_err(|_| ApiError::internal("a request could not be prepared"))?;
            let bytes = match ran {
                Attempt::Done(done) => return done,
                Attempt::Again(bytes, again) => {
                    restartable = again;
                    bytes
                }
            };
            let until = restartable.until.unwrap_or_else(Instant::now);
            let waited = tokio::time::timeout_at(until.into(), self.permit(name, bytes)).await;
            permit = Some((waited.ok().flatten().ok_or_else(ApiError::not_ready_in_time)?, bytes));
        }
    }
}

/// Run `work`; returns its result, and the bytes that it could not reserve.
fn run_attempt<T>(name: Arc<str>, left: usize, halt: &Halt, work: impl FnOnce() -> T) -> (T, Option<usize>) {
    struct Before(Option<Run>);
    impl Drop for Before {
        fn drop(&mut self) {
            RUN.set(self.0.take());
        }
    }
    let run = Run { name, left, wants: None, halt: halt.clone() };
    let _before = Before(RUN.replace(Some(run)));
    let done = halt.run(work);
    (done, RUN.with_borrow(|run| run.as_ref().and_then(|run| run.wants)))
}

/// Run work on this thread that cannot start over, with `bytes` already reserved as `permit`. The memory is freed
/// afterwards.
pub(crate) fn with<T>(
    name: Arc<str>,
    permit: Option<WorkPermit>,
    bytes: usize,
    work: impl FnOnce() -> T,
) -> T {
    let done = run_attempt(name, bytes, &Halt::default(), work).0;
    drop(permit);
    done
}

#[cfg(test)]
mod tests;
