//! A store that fails, hangs, and returns parts: the caller gets an error or a miss, never a wrong block.
use crate::reference::{self, block, clock};
use kvist_store::{
    BlockKey, BlockStore, BoxFuture, Frame, FrameStore, Framed, Guarded, Limits, Ram, Rank, StoreError, Turn,
    Usage,
};
use kvist_testing::SplitMix64;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A store in RAM in front of which something goes wrong, at random.
struct Faulty {
    ram: Ram,
    random: Mutex<SplitMix64>,
    /// In so many of 100 calls each.
    errors: u32,
    hangs: u32,
    short: u32,
}

enum Fault {
    None,
    Error,
    Hang,
    Short(usize),
}

impl Faulty {
    fn new(seed: u64, errors: u32, hangs: u32, short: u32) -> Self {
        Faulty { ram: Ram::new(1 << 20), random: Mutex::new(SplitMix64(seed)), errors, hangs, short }
    }

    fn draw(&self) -> Fault {
        let mut random = self.random.lock().unwrap();
        match random.below(100) {
            n if n < self.errors => Fault::Error,
            n if n < self.errors + self.hangs => Fault::Hang,
            n if n < self.errors + self.hangs + self.short => Fault::Short(random.index(400)),
            _ => Fault::None,
        }
    }

    async fn meet(&self) -> Result<Option<usize>, StoreError> {
        match self.draw() {
            Fault::None => Ok(None),
            Fault::Short(bytes) => Ok(Some(bytes)),
            Fault::Error => Err(StoreError::Failed {
                store: "faulty".into(),
                action: "do it",
                problem: "injected".into(),
            }),
            Fault::Hang => std::future::pending().await,
        }
    }
}

fn shortened(frame: &Frame, bytes: Option<usize>) -> Frame {
    let all = frame.to_bytes();
    Frame::split(all.slice(..bytes.unwrap_or(all.len()).min(all.len())))
}

impl FrameStore for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        Box::pin(async move {
            self.meet().await?;
            self.ram.frames().lookup(keys, within).await
        })
    }

    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        Box::pin(async {
            let short = self.meet().await?;
            Ok(self.ram.frames().read(key).await?.map(|frame| shortened(&frame, short)))
        })
    }

    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let short = self.meet().await?;
            self.ram.frames().write(key, shortened(&frame, short), ttl).await
        })
    }

    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async {
            self.meet().await?;
            self.ram.frames().delete(key).await
        })
    }

    fn usage(&self) -> Usage {
        self.ram.usage()
    }
}

/// No pause, so that every call reaches the store.
const EAGER: Limits = Limits {
    timeout: Duration::from_secs(2),
    failures: 3,
    pause: Duration::ZERO,
    longest_pause: Duration::ZERO,
};

#[tokio::test(start_paused = true)]
async fn a_failing_store_never_returns_a_wrong_block() {
    let keys = reference::keys(20);
    for seed in 0..20 {
        let store = Framed::over(Guarded::new(Faulty::new(seed, 15, 5, 15), EAGER));
        let mut random = SplitMix64(seed + 1_000);
        // Every block that may be there: after a failed put, the old one or the new one.
        let mut possible: HashMap<BlockKey, Vec<_>> = HashMap::new();
        let (mut hits, mut failures) = (0, 0);
        for operation in 0..1_000 {
            let key = random.pick(&keys);
            let blocks = possible.entry(key).or_default();
            match random.below(3) {
                0 => {
                    let block = block(&mut random, 300);
                    match store.put(key, block.clone(), None).await {
                        Ok(()) => *blocks = vec![block],
                        Err(_) => {
                            failures += 1;
                            blocks.push(block);
                        }
                    }
                }
                1 => match store.get(&key).await {
                    Ok(Some(found)) => {
                        hits += 1;
                        assert!(blocks.contains(&found), "seed {seed}, operation {operation}");
                    }
                    Ok(None) => {}
                    Err(_) => failures += 1,
                },
                _ => match store.remove(&key).await {
                    Ok(()) => blocks.clear(),
                    Err(_) => failures += 1,
                },
            }
        }
        let counts = store.counts();
        assert!(
            hits > 50 && failures > 50 && counts.damaged > 10,
            "{hits} hits, {failures} failures, {counts:?}"
        );
        assert!(counts.errors >= failures, "{failures}, {counts:?}");
    }
}

/// A store that hangs costs its time limit three times, then nothing until the pause is over.
#[tokio::test(start_paused = true)]
async fn a_hanging_store_is_asked_no_more() {
    let keys = reference::keys(1);
    let limits = Limits { pause: Duration::from_secs(10), longest_pause: Duration::from_secs(60), ..EAGER };
    let store = Framed::over(Guarded::new(Faulty::new(1, 0, 100, 0), limits));
    let start = tokio::time::Instant::now();
    for call in 0..100 {
        let error = store.get(&keys[0]).await.unwrap_err();
        match call < 3 {
            true => assert!(matches!(error, StoreError::TimedOut { limit_ms: 2_000, .. }), "{error}"),
            false => assert!(matches!(error, StoreError::Unavailable { failures: 3, .. }), "{error}"),
        }
    }
    assert_eq!(start.elapsed(), Duration::from_secs(6));
    tokio::time::advance(Duration::from_secs(10)).await;
    let error = store.get(&keys[0]).await.unwrap_err();
    assert!(matches!(error, StoreError::TimedOut { .. }), "one call tries again: {error}");
    assert_eq!(store.counts().errors, 101);
}

/// What is kept and watched does not stop at the guard.
#[tokio::test]
async fn a_guarded_store_keeps_and_tells() {
    let keys = reference::keys(12);
    let store =
        Framed::over(Guarded::new(Ram::new(2_800).into_frames(), Limits::default())).with_clock(clock);
    let told = Arc::new(Mutex::new(Vec::new()));
    let hear = told.clone();
    assert!(store.watch(Box::new(move |key, is_here| hear.lock().unwrap().push((*key, is_here)))));
    // Room for four.
    let write = async |keys: &[BlockKey]| {
        for key in keys {
            store.put(*key, vec![7; 100].into(), None).await.unwrap();
        }
    };
    let has = |key: BlockKey| store.has(&key).unwrap();
    write(&keys[..2]).await;
    assert_eq!(*told.lock().unwrap(), [(keys[0], true), (keys[1], true)]);
    assert!(store.keep(&keys[..1], Rank::default(), Duration::MAX));
    assert!(store.keep(&keys[1..2], Rank::default(), Duration::from_millis(10)));
    write(&keys[2..6]).await;
    assert!(has(keys[0]) && has(keys[1]));
    reference::pass(10);
    write(&keys[6..9]).await;
    assert!(has(keys[0]) && !has(keys[1]));
    store.release(&keys[..1]);
    write(&keys[9..]).await;
    assert!(!has(keys[0]));
}

/// A store that writes one block at a time, which takes a second.
struct OneByOne {
    ram: Ram,
    turns: Arc<tokio::sync::Semaphore>,
}

impl FrameStore for OneByOne {
    fn name(&self) -> &str {
        "one by one"
    }
    fn lookup<'a>(
        &'a self,
        keys: &'a [BlockKey],
        within: Duration,
    ) -> BoxFuture<'a, Result<usize, StoreError>> {
        self.ram.frames().lookup(keys, within)
    }
    fn read<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<Option<Frame>, StoreError>> {
        self.ram.frames().read(key)
    }
    fn turn<'a>(&'a self, _: u64) -> BoxFuture<'a, Turn> {
        let turn = self.turns.clone().acquire_owned();
        Box::pin(async move { Turn(turn.await.ok().map(|turn| Box::new(turn) as Box<dyn Send>)) })
    }
    fn write<'a>(
        &'a self,
        key: BlockKey,
        frame: Frame,
        ttl: Option<Duration>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.ram.frames().write(key, frame, ttl).await
        })
    }
    fn delete<'a>(&'a self, key: &'a BlockKey) -> BoxFuture<'a, Result<(), StoreError>> {
        self.ram.frames().delete(key)
    }
    fn usage(&self) -> Usage {
        self.ram.frames().usage()
    }
}

/// Regression: the time that a write waited in the queue before a slow disk counted as the disk's, and a disk with a long queue was not
/// asked any more.
#[tokio::test(start_paused = true)]
async fn a_queue_of_writes_is_no_failure() {
    let limits = Limits { timeout: Duration::from_secs(2), failures: 1, ..Limits::default() };
    let slow = OneByOne { ram: Ram::new(1 << 20), turns: Arc::new(tokio::sync::Semaphore::new(1)) };
    let store = Arc::new(Framed::over(Guarded::new(slow, limits)));
    let keys = reference::keys(20);
    let puts = keys.iter().map(|&key| {
        let store = store.clone();
        async move { store.put(key, vec![7; 100].into(), None).await }
    });
    let puts: tokio::task::JoinSet<Result<(), StoreError>> = puts.collect();
    assert!(puts.join_all().await.iter().all(Result::is_ok));
    assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 20);
}
