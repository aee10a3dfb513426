//! Time limits and a circuit breaker around a store that may hang or be down.
//!
//! A store that failed several times in a row is not asked for a pause; then one call tries it. If that call fails
//! too, the pause doubles. So a server that is down costs a few time limits once, and one per pause afterwards, and
//! is used again soon after it is back.
use crate::{BlockKey, BoxFuture, Check, Frame, FrameStore, Rank, StoreError, Usage, Watcher};
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// How long to wait for a store, and when to stop asking it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For one operation.
    pub timeout: Duration,
    /// How many failures in a row open the breaker.
    pub failures: u32,
    /// The first pause.
    pub pause: Duration,
    /// The pause doubles up to this.
    pub longest_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            timeout: Duration::from_secs(2),
            failures: 3,
            pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(30),
        }
    }
}

/// A store of frames behind time limits and a breaker. Needs a tokio runtime with its timer.
pub struct Guarded<S> {
    inner: S,
    limits: Limits,
    breaker: Breaker,
}

impl<S: FrameStore> Guarded<S> {
    pub fn new(inner: S, limits: Limits) -> Self {
        Guarded { inner, limits, breaker: Breaker::new(limits) }
    }

    pub fn inner(&self) -> &S {
        &self.inner
    }

    pub fn into_inner(self) -> S {
        self.inner
    }

    async fn call<T>(
        &self,
        action: &'static str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let store = || self.inner.name().to_owned();
        let mut pass = self.breaker.admit(now()).map_err(|closed| StoreError::Unavailable {
            store: store(),
            failures: closed.failures,
            retry_ms: u64::try_from(closed.retry_in.as_millis()).unwrap_or(u64::MAX),
        })?;
        let result = match tokio::time::timeout(self.limits.timeout, call).await {
            Ok(result) => result,
            Err(_) => {
                let limit_ms = u64::try_from(self.limits.timeout.as_millis()).unwrap_or(u64::MAX);
                Err(StoreError::TimedOut { store: store(), action, limit_ms })
            }
        };
        match result {
            // It was not asked.
            Err(StoreError::Busy { .. }) => drop(pass),
            // A store that has no room for a block has answered, and gives those that it has.
            Ok(_) | Err(StoreError::TooLarge { .. } | StoreError::Full { .. }) => pass.report(true, now()),
            Err(_) => pass.report(false, now()),
        }
        result
    }
}

/// The clock of the runtime, which tests can stop.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

impl<S: FrameStore> FrameStore for Guarded<S> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn check(&self) -> Check {
        self.inner.check()
    }

    fn is_shared(&self) -> bool {
        self.inner.is_shared()
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(self.call("look up blocks", self.inner.lookup(keys, within)))
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(self.call("read a block", self.inner.read(key)))
    }

    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let _turn = self.inner.turn(frame.body.len() as u64).await;
            self.call("write a block", self.inner.write(key, frame, ttl)).await
        })
    }

    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.call("remove a block", self.inner.delete(key)))
    }

    // The next five are quick, and no store fails at them.
    fn has(&self, key: &BlockKey) -> Option<bool> {
        self.inner.has(key)
    }

    fn keep(&self, keys: &[BlockKey], rank: Rank, until: Option<SystemTime>) -> bool {
        self.inner.keep(keys, rank, until)
    }

    fn release(&self, keys: &[BlockKey]) {
        self.inner.release(keys);
    }

    fn release_until(&self, now: SystemTime) {
        self.inner.release_until(now);
    }

    fn watch(&self, watcher: Watcher) -> bool {
        self.inner.watch(watcher)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    fn evicted(&self) -> u64 {
        self.inner.evicted()
    }

    fn damaged(&self) -> u64 {
        self.inner.damaged()
    }
}

struct Breaker {
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct State {
    /// In a row, up to now.
    failures: u32,
    /// Set while the store is not asked.
    closed: Option<Pause>,
}

#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
    /// A call tries the store now.
    trying: bool,
}

/// Why a call was not admitted.
#[derive(Debug, PartialEq, Eq)]
struct Closed {
    failures: u32,
    retry_in: Duration,
}

/// The permission for one call. Dropped without a report, as by a caller that stopped waiting, it changes nothing,
/// except that another call may try.
struct Pass<'a> {
    breaker: &'a Breaker,
    trial: bool,
}

impl Breaker {
    fn new(limits: Limits) -> Self {
        Breaker { limits, state: Mutex::new(State { failures: 0, closed: None }) }
    }

    /// No code that can panic runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self, now: Instant) -> Result<Pass<'_>, Closed> {
        let mut state = self.lock();
        let failures = state.failures;
        let trial = match &mut state.closed {
            None => false,
            Some(pause) if now >= pause.until && !pause.trying => {
                pause.trying = true;
                true
            }
            Some(pause) => {
                return Err(Closed { failures, retry_in: pause.until.saturating_duration_since(now) });
            }
        };
        Ok(Pass { breaker: self, trial })
    }
}

impl Pass<'_> {
    fn report(&mut self, success: bool, now: Instant) {
        let limits = self.breaker.limits;
        let mut state = self.breaker.lock();
        let trial = std::mem::take(&mut self.trial);
        match (success, state.closed) {
            (true, None) => state.failures = 0,
            (true, Some(_)) if trial => *state = State { failures: 0, closed: None },
            (false, None) => {
                state.failures = state.failures.saturating_add(1);
                if state.failures >= limits.failures {
                    let length = limits.pause;
                    state.closed = Some(Pause { until: now + length, length, trying: false });
                }
            }
            (false, Some(pause)) if trial => {
                state.failures = state.failures.saturating_add(1);
                let length = (pause.length * 2).min(limits.longest_pause.max(limits.pause));
                state.closed = Some(Pause { until: now + length, length, trying: false });
            }
            // A call that began before the breaker opened.
            (_, Some(_)) => {}
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.trial
            && let Some(pause) = &mut self.breaker.lock().closed
        {
            pause.trying = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        timeout: Duration::from_secs(1),
        failures: 2,
        pause: Duration::from_secs(10),
        longest_pause: Duration::from_secs(30),
    };

    /// One row per call: at which second, whether it fails, and what the breaker says.
    #[test]
    fn calls_in_order() {
        let breaker = Breaker::new(LIMITS);
        let start = Instant::now();
        let at = |second: u64| start + Duration::from_secs(second);
        let call = |second, success| -> Result<(), Closed> {
            breaker.admit(at(second))?.report(success, at(second));
            Ok(())
        };
        let closed = |failures, seconds| Err(Closed { failures, retry_in: Duration::from_secs(seconds) });
        let rows = [
            (0, false, Ok(())),
            (0, true, Ok(())), // a success in between: failures are counted in a row
            (1, false, Ok(())),
            (2, false, Ok(())), // the second one: a pause of 10 s
            (2, true, closed(2, 10)),
            (11, true, closed(2, 1)),
            (12, false, Ok(())), // the trial fails: 20 s
            (13, true, closed(3, 19)),
            (32, false, Ok(())), // 30 s, not 40
            (61, true, closed(4, 1)),
            (62, true, Ok(())), // it is back
            (62, false, Ok(())),
            (62, true, Ok(())),
        ];
        for (row, (second, success, expected)) in rows.into_iter().enumerate() {
            assert_eq!(call(second, success), expected, "row {row}");
        }
    }

    #[test]
    fn one_call_tries_and_a_dropped_one_does_not_block_the_next() {
        let breaker = Breaker::new(LIMITS);
        let start = Instant::now();
        let late = start + Duration::from_secs(10);
        let early = breaker.admit(start);
        for _ in 0..2 {
            breaker.admit(start).ok().unwrap().report(false, start);
        }
        let first = breaker.admit(late);
        assert!(first.is_ok());
        assert!(breaker.admit(late).is_err(), "one call at a time tries");
        drop(first);
        let mut second = breaker.admit(late).ok().unwrap();
        // A call from before the pause reports now: it is no trial.
        early.ok().unwrap().report(true, late);
        assert!(breaker.admit(late).is_err());
        second.report(true, late);
        assert!(breaker.admit(late).is_ok());
    }
}
