use super::*;
use crate::serving::tiers::test_store::{TestStore, config, keys, stores};

const BLOCK: usize = 100;

fn block() -> Bytes {
    Bytes::from(vec![7; BLOCK])
}

/// What was loaded was kept until it was copied to faster tiers, however much it was.
#[tokio::test]
async fn copies_to_faster_tiers_are_bounded() {
    let (fast, slow) = (TestStore::new(0), TestStore::new(1000));
    let stores = stores([fast.clone(), slow.clone()]);
    let wanted: Vec<Wanted> = keys(10).into_iter().map(|key| Wanted { tier: 1, key, bytes: BLOCK }).collect();
    for one in &wanted {
        slow.put(one.key, block(), None).await.unwrap();
    }
    let (reports, inbox) = std::sync::mpsc::channel();
    let load = Fetch { id: TransferId(0), wanted };
    let load = tokio::spawn(fetch(stores.clone(), load, reports));
    let report = tokio::task::spawn_blocking(move || {
        let ended = |command: &Command| matches!(command, Command::Tier(Report::Fetched { .. }));
        inbox.iter().any(|command| ended(&command))
    });
    assert!(report.await.unwrap());
    // The load has ended, and the copies wait for their store.
    assert_eq!(stores.bytes_being_written(), 300);
    assert!(stores.may_write(51).is_none() && stores.may_write(50).is_some());
    fast.writes.add_permits(1000);
    load.await.unwrap();
    assert_eq!((fast.puts.load(Relaxed), stores.bytes_being_written()), (3, 0));
}

/// Copies that are given up do not count for ever.
#[tokio::test]
async fn a_copy_that_is_dropped_makes_room() {
    let stores = stores([TestStore::new(0), TestStore::new(0)]);
    let writing = stores.may_write(300).unwrap();
    let task = tokio::spawn(put(stores.clone(), keys(1)[0], Bytes::from(vec![7; 300]), writing));
    tokio::task::yield_now().await;
    task.abort();
    assert!(task.await.is_err());
    assert_eq!(stores.bytes_being_written(), 0);
}

/// A block that one of two tiers had accepted counted as written, and the other one never got it.
#[tokio::test]
async fn a_tier_that_failed_gets_the_block_later() {
    let (fast, slow) = (TestStore::new(1000), TestStore::new(1000));
    let two = stores([fast.clone(), slow.clone()]);
    let key = keys(1)[0];
    let write = async || {
        let writing = two.may_write(BLOCK as u64).unwrap();
        put(two.clone(), key, block(), writing).await;
        (fast.puts.load(Relaxed), slow.puts.load(Relaxed))
    };
    slow.is_down.store(true, Relaxed);
    assert_eq!((write().await, two.has_written(&key)), ((1, 1), false));
    slow.is_down.store(false, Relaxed);
    assert_eq!((write().await, two.has_written(&key)), ((1, 2), true), "the other one has it");
    // One that has lost it gets it again, and a block that is too large is not tried again.
    fast.remove(&key).await.unwrap();
    assert_eq!(two.get(Wanted { tier: 0, key, bytes: BLOCK }).await, None);
    assert_eq!((write().await, two.has_written(&key)), ((2, 2), true));
    let large = keys(2)[1];
    let two = stores([TestStore::new(1000), TestStore::new(1000)]);
    two.put(0, large, &Bytes::from(vec![7; 2 << 20])).await;
    assert!(two.has(&large, 0) && !two.has_written(&large));
    two.forget(&large);
    assert!(!two.has(&large, 0));
}

/// Reads that hang were given up with their loads, so their store never counted as one that fails.
#[tokio::test]
async fn reads_that_hang_are_errors_though_their_load_is_given_up() {
    let store = TestStore::new(0);
    store.reads_hang.store(true, Relaxed);
    let mut stores = Stores::new(&config([store]));
    stores.longest_read = Duration::from_millis(50);
    let stores = Arc::new(stores);
    let (reports, _inbox) = std::sync::mpsc::channel();
    {
        let wanted = keys(20).into_iter().map(|key| Wanted { tier: 0, key, bytes: BLOCK }).collect();
        let load = Fetch { id: TransferId(0), wanted };
        let load = tokio::spawn(fetch(stores.clone(), load, reports.clone()));
        tokio::task::yield_now().await;
        load.abort();
        assert!(load.await.is_err());
    }
    // The reads that go on end with an error, which a slow machine may see before the load is given up.
    while stores.stats()[0].errors < STRAGGLERS as u64
        || stores.list[0].stragglers.available_permits() < STRAGGLERS
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
