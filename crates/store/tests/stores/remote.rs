//! Stores on servers: a folder, Redis if it is installed, and a server that speaks as much of S3 as is needed.
//! `KVIST_REQUIRE_REDIS=1` makes a missing Redis an error.
use crate::reference::{self, Keeps, clock, compare, pass};
use kvist_store::{BlockStore, Bytes, Limits, Remote, StoreError};
use kvist_testing::SplitMix64;
use kvist_testing::servers::{Redis, S3};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

/// Generous, for a machine that is busy with other tests; and no pause, so that no test has to wait for its end.
const PATIENT: Limits = Limits {
    timeout: Duration::from_secs(60),
    failures: 3,
    pause: Duration::ZERO,
    longest_pause: Duration::ZERO,
};

fn folder(dir: &Path) -> Remote {
    Remote::open(&format!("fs://{}", dir.display()), PATIENT).unwrap()
}

#[tokio::test]
async fn a_folder_keeps_what_the_reference_keeps() {
    for seed in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        assert!(compare(&folder(dir.path()).with_clock(clock), Keeps::All, seed, 1_000).await > 200);
    }
}

/// Two processes share a folder: what one stores, the other has.
#[tokio::test]
async fn a_folder_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(100);
    let (one, other) = (folder(dir.path()), folder(dir.path()));
    for key in &keys[..70] {
        one.put(*key, Bytes::copy_from_slice(key.as_bytes()), None).await.unwrap();
    }
    assert_eq!(other.lookup(&keys, Duration::MAX).await.unwrap(), 70);
    assert_eq!(other.lookup(&keys[40..], Duration::MAX).await.unwrap(), 30);
    assert_eq!(other.get(&keys[3]).await.unwrap().as_deref(), Some(&keys[3].as_bytes()[..]));
    other.remove(&keys[3]).await.unwrap();
    assert_eq!(one.lookup(&keys, Duration::MAX).await.unwrap(), 3);
    other.remove(&keys[3]).await.unwrap();
}

#[tokio::test]
async fn damaged_files_are_misses_and_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let mut random = SplitMix64(11);
    let keys = reference::keys(20);
    let store = folder(dir.path());
    for round in 0..50 {
        let block = reference::block(&mut random, 2_000);
        let key = random.pick(&keys);
        store.put(key, block.clone(), None).await.unwrap();
        let path = dir.path().join(&key.to_string()[..2]).join(key.to_string());
        let mut bytes = fs::read(&path).unwrap();
        match random.below(2) {
            0 => bytes[random.index(block.len() + 88)] ^= 1 << random.below(8),
            _ => bytes.truncate(random.index(block.len() + 88)),
        }
        fs::write(&path, bytes).unwrap();
        assert_eq!(store.get(&key).await.unwrap(), None, "round {round}");
        assert!(!path.exists(), "round {round}");
    }
    assert_eq!(store.counts().damaged, 50);
}

/// A worker that found an expired frame removed what was under its key by then: what another one had put meanwhile.
#[tokio::test]
async fn what_has_expired_in_a_shared_store_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let key = reference::keys(1)[0];
    let store = folder(dir.path()).with_clock(clock);
    store.put(key, Bytes::from_static(b"old"), Some(Duration::from_millis(5))).await.unwrap();
    pass(5);
    assert_eq!(store.get(&key).await.unwrap(), None);
    assert!(dir.path().join(&key.to_string()[..2]).join(key.to_string()).exists());
    assert_eq!((store.counts().expired, store.counts().misses, store.counts().damaged), (1, 1, 0));
}

/// The files that are being written.
fn unfinished(dir: &Path) -> usize {
    fs::read_dir(dir.join(".unfinished")).map_or(0, |files| files.count())
}

/// A write that fails, or whose time is over, left its file for ever.
#[tokio::test]
async fn a_write_that_does_not_end_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = folder(dir.path());
    let keys = reference::keys(200);
    // A folder is where the block should be.
    fs::create_dir_all(dir.path().join(&keys[0].to_string()[..2]).join(keys[0].to_string()).join("x"))
        .unwrap();
    store.put(keys[0], Bytes::from_static(b"block"), None).await.unwrap_err();
    assert_eq!(unfinished(dir.path()), 0);

    // Dropped as soon as the file is there. A write that ends before that is looked at is another one's turn.
    let bytes = Bytes::from(vec![7; 8 << 20]);
    let mut dropped = 0;
    for key in &keys[1..] {
        let mut put = store.put(*key, bytes.clone(), None);
        let ended = std::future::poll_fn(|context| match put.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(true),
            Poll::Pending if unfinished(dir.path()) > 0 => Poll::Ready(false),
            Poll::Pending => Poll::Pending,
        });
        if !ended.await {
            dropped += 1;
            break;
        }
    }
    assert_eq!(dropped, 1);
    let until = Instant::now() + Duration::from_secs(60);
    while unfinished(dir.path()) > 0 {
        assert!(Instant::now() < until, "the file stays");
        tokio::task::yield_now().await;
    }
    // And the store still works.
    store.put(keys[1], Bytes::from_static(b"block"), None).await.unwrap();
    assert_eq!(unfinished(dir.path()), 0);
}

/// What processes that are gone have left is removed when the folder is opened.
#[tokio::test]
async fn old_unfinished_files_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(".unfinished")).unwrap();
    for (name, age_s) in [("old", 4000), ("young", 60)] {
        let file = fs::File::create(dir.path().join(".unfinished").join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
    }
    drop(folder(dir.path()));
    assert!(!dir.path().join(".unfinished/old").exists() && dir.path().join(".unfinished/young").exists());
}

#[tokio::test]
async fn what_cannot_be_opened_is_refused_without_its_password() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let under_file = format!("fs://{}/x", file.display());
    // A relative folder would be one below the root.
    let (relative, port) = ("fs://relative/path", "redis://me:hunter2@localhost:99999/x");
    let others = ["", "redis", "ftp://me:hunter2@host/x", "s3://", "fs://", "rediss://me:hunter2@host"];
    // What opendal would ignore.
    let unknown = [
        "redis://host/x?tls=hunter2",
        "s3://bucket?reigon=hunter2",
        "fs:///path?mode=hunter2",
        "redis://me:1?hunter2@host/x",
    ];
    // What opendal would panic at, and what would make every write fail.
    let useless = [
        "redis://me:hunter2@host/x?connection_pool_max_size=0",
        "redis://me:hunter2@host/x?default_ttl=500ms",
        "redis://me:hunter2@host/x?default_ttl=0s",
    ];
    Remote::check("redis://host/x?default_ttl=1s&connection_pool_max_size=1").unwrap();
    for url in others.into_iter().chain(unknown).chain(useless).chain([relative, port, &under_file]) {
        assert_eq!(Remote::check(url).is_ok(), url == under_file, "{url}");
        match Remote::open(url, PATIENT) {
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, StoreError::Open { .. }), "{url}: {text}");
                assert!(!text.contains("hunter2"), "{url}: {text}");
            }
            // A folder is created by the first put.
            Ok(store) if url == under_file => {
                store.put(reference::keys(1)[0], Bytes::new(), None).await.unwrap_err();
            }
            Ok(_) => panic!("{url} was opened"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_keeps_what_the_reference_keeps() {
    let Some(redis) = Redis::new() else { return };
    for seed in 0..3 {
        // Two prefixes of one server are two stores.
        let store = Remote::open(&redis.url(&format!("store-{seed}")), PATIENT).unwrap().with_clock(clock);
        assert!(compare(&store, Keeps::All, seed, 500).await > 100);
    }
    let wrong = Remote::open(&format!("redis://:wrong@{}", redis.address()), PATIENT).unwrap();
    let error = wrong.get(&reference::keys(1)[0]).await.unwrap_err().to_string();
    assert!(error.contains("redis") && !error.contains("wrong@"), "{error}");
}

/// A server that dies is an error, and then is not asked; when it is back, it is used again.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_redis_fails_and_comes_back() {
    let Some(redis) = Redis::new() else { return };
    let key = reference::keys(1)[0];
    let url = redis.url("");
    let store = Remote::open(&url, PATIENT).unwrap();
    let pausing =
        Limits { pause: Duration::from_secs(3600), longest_pause: Duration::from_secs(3600), ..PATIENT };
    let cautious = Remote::open(&url, pausing).unwrap();
    store.put(key, "K and V".into(), None).await.unwrap();
    assert_eq!(cautious.get(&key).await.unwrap().as_deref(), Some(&b"K and V"[..]));
    let port = redis.kill();
    // This call and the first three of `cautious` wait for a connection, for seconds. Then `cautious` does not try.
    store.get(&key).await.unwrap_err();
    for call in 0..6 {
        let error = cautious.get(&key).await.unwrap_err();
        assert_eq!(matches!(error, StoreError::Unavailable { .. }), call >= 3, "call {call}: {error}");
    }
    let Some(_redis) = Redis::again(port) else { return };
    // The client may find out with its first call that its old connection is gone.
    let mut back = store.put(key, "again".into(), None).await;
    for _ in 0..20 {
        if back.is_ok() {
            break;
        }
        back = store.put(key, "again".into(), None).await;
    }
    back.unwrap();
    assert_eq!(store.get(&key).await.unwrap().as_deref(), Some(&b"again"[..]));
}

/// A server without room refused three writes, and then was not even asked for what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_redis_still_answers() {
    let Some(redis) = Redis::new() else { return };
    let hour = Duration::from_secs(3600);
    let limits = Limits { pause: hour, longest_pause: hour, ..PATIENT };
    let store = Remote::open(&redis.url(""), limits).unwrap();
    let keys = reference::keys(2);
    store.put(keys[0], "K and V".into(), None).await.unwrap();
    redis.bound(1);
    for _ in 0..10 {
        let error = store.put(keys[1], "more".into(), None).await.unwrap_err();
        assert!(matches!(error, StoreError::Full { .. }), "{error}");
    }
    assert_eq!(store.get(&keys[0]).await.unwrap().as_deref(), Some(&b"K and V"[..]));
    assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 1);
    store.remove(&keys[0]).await.unwrap();
    redis.bound(0);
    store.put(keys[1], "more".into(), None).await.unwrap();
    assert_eq!(store.get(&keys[1]).await.unwrap().as_deref(), Some(&b"more"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn s3_keeps_what_the_reference_keeps() {
    let server = Arc::new(S3::default());
    let store = Remote::open(&server.start(), PATIENT).unwrap().with_clock(clock);
    assert!(compare(&store, Keeps::All, 1, 500).await > 100);
    assert!(server.requests.load(Ordering::SeqCst) > 500);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_s3_that_fails_and_cuts_answers_returns_no_wrong_block() {
    let server = Arc::new(S3::default());
    let store = Remote::open(&server.start(), PATIENT).unwrap();
    let mut random = SplitMix64(1);
    let keys = reference::keys(20);
    let blocks: Vec<Bytes> = keys.iter().map(|_| reference::block(&mut random, 5_000)).collect();
    for (key, block) in keys.iter().zip(&blocks) {
        store.put(*key, block.clone(), None).await.unwrap();
    }
    server.error_every.store(7, Ordering::SeqCst);
    server.short_every.store(5, Ordering::SeqCst);
    let (mut hits, mut failures) = (0, 0);
    for _ in 0..300 {
        let at = random.index(keys.len());
        match store.get(&keys[at]).await {
            Ok(Some(block)) => {
                assert_eq!(block, blocks[at]);
                hits += 1;
            }
            Ok(None) => {}
            Err(_) => failures += 1,
        }
    }
    assert!(hits > 100 && failures > 30, "{hits} hits, {failures} failures");
}

/// A prompt of 8,192 tokens has 512 blocks. Looked up 32 at a time, over 30 ms per answer, it was never found in time.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_is_looked_up_in_few_round_trips() {
    let keys = reference::keys(512);
    for missing in [512, 300, 9] {
        // Of its own: requests that an earlier lookup gave up may arrive late, and would be counted.
        let server = Arc::new(S3::default());
        let store = Remote::open(&server.start(), PATIENT).unwrap();
        for key in keys.iter().filter(|key| Some(*key) != keys.get(missing)) {
            store.put(*key, Bytes::from_static(b"K and V"), None).await.unwrap();
        }
        server.hold_heads(8, 96);
        assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), missing);
    }
}
