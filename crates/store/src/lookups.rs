//! How many of the blocks of a prompt a server has, in few round trips and in bounded time.
//!
//! A server answers after some tens of milliseconds, and a long prompt has hundreds of blocks, so they are asked for at the same time;
//! but each takes a connection, so all lookups share a number of turns. A lookup ends after a while with what it has found by then: a
//! part of a prompt is of use, and a server that answers is not down, however slow many long prompts make it. The caller says how long
//! it waits for a part; whether the server is down is found out in a time that does not depend on that.
use crate::{BlockKey, StoreError};
use futures_util::StreamExt;
use futures_util::stream::iter;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

/// So many keys are looked up first: most prompts are not here.
const FIRST: usize = 8;
/// So many keys are looked up at a time, over all lookups.
const AT_ONCE: usize = 128;

/// The lookups of a store.
pub(crate) struct Lookups {
    store: &'static str,
    turns: Semaphore,
    /// How long a lookup waits for its first turn, and then for answers.
    patience: Duration,
}

/// When a lookup ends.
#[derive(Clone, Copy)]
struct Times {
    /// If it has found something.
    enough: Instant,
    last: Instant,
}

impl Lookups {
    pub fn new(store: &'static str, patience: Duration) -> Lookups {
        Lookups { store, turns: Semaphore::new(AT_ONCE), patience }
    }

    /// How many of `keys`, from the first on, exist, as far as was answered in time: `within` this time, if that is any, and otherwise
    /// in the time that the server is given.
    ///
    /// # Errors
    /// The server has failed, or has answered nothing ([`TimedOut`](StoreError::TimedOut)); or it was not asked, because other lookups
    /// took all turns ([`Busy`](StoreError::Busy)).
    pub async fn count<F: Future<Output = Result<bool, StoreError>>>(
        &self,
        keys: &[BlockKey],
        within: Duration,
        exists: impl Fn(BlockKey) -> F,
    ) -> Result<usize, StoreError> {
        if keys.is_empty() {
            return Ok(0);
        }
        let enough = Instant::now() + within.min(2 * self.patience);
        // To wait for a turn says nothing about the server.
        let Ok(turn) = timeout(self.patience, self.turns.acquire()).await else {
            return Err(StoreError::Busy { store: self.store.into(), lookups: AT_ONCE });
        };
        // The first key takes it.
        let turn = Mutex::new(turn.ok());
        let times = Times { enough, last: Instant::now() + self.patience };
        let (first, rest) = keys.split_at(keys.len().min(FIRST));
        let (mut here, answered) = (0, AtomicBool::new(false));
        for part in [first, rest] {
            let is_whole = self.count_until(part, times, &turn, &answered, &mut here, &exists).await?;
            if !is_whole || here > 0 && Instant::now() >= times.enough {
                break;
            }
        }
        match here == 0 && !answered.load(Relaxed) {
            false => Ok(here),
            true => Err(StoreError::TimedOut {
                store: self.store.into(),
                action: "look up blocks",
                limit_ms: u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    /// Counts on, in order. Returns whether all of `keys` exist.
    async fn count_until<F: Future<Output = Result<bool, StoreError>>>(
        &self,
        keys: &[BlockKey],
        times: Times,
        turn: &Mutex<Option<SemaphorePermit<'_>>>,
        answered: &AtomicBool,
        here: &mut usize,
        exists: &impl Fn(BlockKey) -> F,
    ) -> Result<bool, StoreError> {
        let ask = |key: BlockKey| async move {
            let turn = turn.lock().unwrap_or_else(PoisonError::into_inner).take();
            let _turn = match turn {
                Some(turn) => Some(turn),
                // The semaphore is never closed.
                None => self.turns.acquire().await.ok(),
            };
            let exists = exists(key).await;
            answered.store(true, Relaxed);
            exists
        };
        // In order, because what comes after the first missing block is of no use. It is not waited for either.
        let mut found = std::pin::pin!(iter(keys.iter().copied()).map(ask).buffered(AT_ONCE));
        loop {
            let until = if *here > 0 { times.enough.min(times.last) } else { times.last };
            match timeout_at(until, found.next()).await {
                Ok(Some(exists)) => match exists? {
                    true => *here += 1,
                    false => return Ok(false),
                },
                Ok(None) => return Ok(true),
                Err(_) => return Ok(false),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KeyChain;
    use std::collections::HashSet;
    use std::sync::Arc;
    use tokio::time::sleep;

    const PATIENCE: Duration = Duration::from_secs(1);

    fn keys(n: u32) -> Vec<BlockKey> {
        KeyChain::root(b"a model", "").keys(&(0..n).collect::<Vec<_>>(), 1)
    }

    /// A server that takes `each` to answer, and has the first `n` of `keys`.
    async fn count(
        lookups: &Lookups,
        keys: &[BlockKey],
        n: usize,
        each: Duration,
    ) -> Result<usize, StoreError> {
        count_within(lookups, keys, Duration::MAX, n, each).await
    }

    async fn count_within(
        lookups: &Lookups,
        keys: &[BlockKey],
        within: Duration,
        n: usize,
        each: Duration,
    ) -> Result<usize, StoreError> {
        let has: HashSet<BlockKey> = keys[..n].iter().copied().collect();
        let exists = |key| {
            let here = has.contains(&key);
            async move {
                sleep(each).await;
                Ok(here)
            }
        };
        lookups.count(keys, within, exists).await
    }

    /// Against a count, one by one.
    #[tokio::test(start_paused = true)]
    async fn all_that_exist_are_counted() {
        let lookups = Lookups::new("s3", PATIENCE);
        for total in [0, 1, 7, 8, 9, 127, 128, 129, 136, 137, 512] {
            let keys = keys(total);
            for n in [0, 1, 7, 8, 9, 135, 136, 137, 300, 512] {
                let n = n.min(keys.len());
                assert_eq!(count(&lookups, &keys, n, Duration::from_millis(30)).await.unwrap(), n);
            }
        }
    }

    /// A long prompt on a slow server ended after two seconds with an error, and three of them made the store one that is down.
    #[tokio::test(start_paused = true)]
    async fn a_slow_server_is_asked_for_a_while_and_what_was_found_counts() {
        let (lookups, keys) = (Lookups::new("s3", PATIENCE), keys(512));
        let began = Instant::now();
        // Eight answers after 400 ms, 128 more after 800 ms; the next ones would come after 1,200 ms.
        let here = count(&lookups, &keys, 512, Duration::from_millis(400)).await.unwrap();
        assert_eq!((here, began.elapsed()), (8 + AT_ONCE, PATIENCE));
    }

    /// A request waits for a quarter of a second, and a server that took longer for all blocks of a prompt gave it none.
    #[tokio::test(start_paused = true)]
    async fn a_caller_with_less_time_gets_what_was_found_by_then() {
        let (lookups, keys, within) = (Lookups::new("s3", PATIENCE), keys(512), Duration::from_millis(250));
        for (each_ms, n, expected, took_ms) in [
            (100, 512, 8 + AT_ONCE, 250), // of 512 that would take 500 ms
            (100, 8 + 3, 8 + 3, 200),     // the first that is missing ends it
            (300, 512, 8, 300),           // nothing was found in time: it ends as soon as there is something
            (300, 0, 0, 300),
        ] {
            let began = Instant::now();
            let here =
                count_within(&lookups, &keys, within, n, Duration::from_millis(each_ms)).await.unwrap();
            assert_eq!((here, began.elapsed()), (expected, Duration::from_millis(took_ms)));
        }
        // Less time makes no failure of a server that answers later, and hides none of one that does not.
        let slow = count_within(&lookups, &keys, Duration::ZERO, 8, Duration::from_millis(900)).await;
        assert_eq!(slow.unwrap(), 8);
        let down = lookups.count(&keys, Duration::ZERO, |_| std::future::pending()).await;
        assert!(matches!(down, Err(StoreError::TimedOut { limit_ms: 1000, .. })));
    }

    /// Many long prompts at the same time: each ends in time, with a part or as one that was not asked, and none as a failure.
    #[tokio::test(start_paused = true)]
    async fn waiting_for_other_lookups_is_no_failure_of_the_server() {
        let (lookups, keys) = (Arc::new(Lookups::new("s3", PATIENCE)), keys(512));
        let began = Instant::now();
        let tasks = (0..20).map(|_| {
            let (lookups, keys) = (lookups.clone(), keys.clone());
            tokio::spawn(async move { count(&lookups, &keys, 512, Duration::from_millis(300)).await })
        });
        let (mut found, mut busy) = (0, 0);
        for task in tasks.collect::<Vec<_>>() {
            match task.await.unwrap() {
                Ok(here) => found += here,
                Err(StoreError::Busy { .. }) => busy += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(found >= AT_ONCE && began.elapsed() <= 2 * PATIENCE, "{found} found, {busy} busy");
        // All turns are free again.
        assert_eq!(count(&lookups, &keys, 300, Duration::from_millis(30)).await.unwrap(), 300);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_nothing_has_failed() {
        let (lookups, keys) = (Arc::new(Lookups::new("s3", PATIENCE)), keys(512));
        let error = count(&lookups, &keys, 512, Duration::from_secs(3600)).await.unwrap_err();
        assert!(matches!(error, StoreError::TimedOut { limit_ms: 1000, .. }), "{error}");
        // Behind lookups that take all turns and get no answer, another one is not even asked.
        let hanging = (0..AT_ONCE / FIRST).map(|_| {
            let (lookups, keys) = (lookups.clone(), keys.clone());
            tokio::spawn(async move { lookups.count(&keys, Duration::MAX, |_| std::future::pending()).await })
        });
        let hanging: Vec<_> = hanging.collect();
        tokio::task::yield_now().await;
        sleep(Duration::from_millis(1)).await;
        let last = lookups.count(&keys, Duration::MAX, |_| std::future::pending());
        let last = tokio::time::timeout(Duration::from_millis(500), last).await;
        assert!(last.is_err(), "it waits for a turn");
        for task in hanging {
            assert!(matches!(task.await.unwrap(), Err(StoreError::TimedOut { .. })));
        }
    }
}
