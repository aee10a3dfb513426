use super::*;
use crate::serving::thread::Command;
use crate::serving::tiers::Report;
use crate::serving::tiers::task::{Fetch, fetch};
use crate::serving::tiers::test_store::{TestStore, config, keys, stores};
use kvist_scheduler::TransferId;
use kvist_store::BlockStore;

const BLOCK: usize = 100;

fn block() -> Bytes {
    Bytes::from(vec![7; BLOCK])
}

/// Writes a block to the tiers that lack it, one after the other.
async fn write(stores: &Arc<Stores>, key: BlockKey) {
    for tier in (0..stores.n()).filter(|&tier| stores.lacks(tier, &key, BLOCK as u64)) {
        put(stores.may_write(tier, key, BLOCK as u64).unwrap(), block()).await;
    }
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
    let other = keys(11)[10];
    assert!(stores.may_write(0, other, 51).is_none() && stores.may_write(0, other, 50).is_some());
    fast.writes.add_permits(1000);
    load.await.unwrap();
    assert_eq!((fast.puts.load(Relaxed), stores.bytes_being_written()), (3, 0));
    let is_there = keys(10).into_iter().map(|key| fast.has(key));
    assert_eq!(is_there.collect::<Vec<_>>(), [[true; 3].as_slice(), &[false; 7]].concat());
}

/// Copies that are given up do not count for ever.
#[tokio::test]
async fn a_copy_that_is_dropped_makes_room() {
    let (stores, key) = (stores([TestStore::new(0), TestStore::new(0)]), keys(1)[0]);
    let task = tokio::spawn(put(stores.may_write(1, key, 300).unwrap(), Bytes::from(vec![7; 300])));
    tokio::task::yield_now().await;
    assert!(stores.writes.has(&key, 1) && !stores.writes.has(&key, 0) && !stores.lacks(1, &key, 300));
    task.abort();
    assert!(task.await.is_err());
    assert!(stores.bytes_being_written() == 0 && stores.lacks(1, &key, 300));
}

/// A block that one of two tiers had accepted counted as written, and the other one never got it.
#[tokio::test]
async fn a_tier_that_failed_gets_the_block_later() {
    let (fast, slow) = (TestStore::new(1000), TestStore::new(1000));
    let two = stores([fast.clone(), slow.clone()]);
    let key = keys(1)[0];
    let write = async || {
        write(&two, key).await;
        (fast.puts.load(Relaxed), slow.puts.load(Relaxed))
    };
    let lack = || [0, 1].map(|tier| two.lacks(tier, &key, BLOCK as u64));
    slow.is_down.store(true, Relaxed);
    assert!(put(two.may_write(1, keys(2)[1], 1).unwrap(), block()).await, "another attempt may be of use");
    slow.puts.store(0, Relaxed);
    assert_eq!((write().await, lack()), ((1, 1), [false, true]));
    slow.is_down.store(false, Relaxed);
    assert_eq!((write().await, lack()), ((1, 2), [false, false]), "the other one has it");
    // One that has lost it gets it again, and a block that is too large is not tried again.
    fast.remove(&key).await.unwrap();
    assert_eq!(two.get(Wanted { tier: 0, key, bytes: BLOCK }).await, None);
    assert_eq!((write().await, lack()), ((2, 2), [false, false]));
    let (large, length) = (keys(2)[1], 2 << 20);
    assert!(!two.put(0, large, Bytes::from(vec![7; length])).await, "another attempt is of no use");
    assert!(!two.lacks(0, &large, length as u64) && two.lacks(1, &large, length as u64));
    assert!(two.lacks(0, &large, length as u64 - 1));
}

/// Regression: what a tier had dropped by itself counted as written, so it was never written there again.
#[tokio::test]
async fn a_tier_that_says_what_it_has_is_believed() {
    let store = TestStore::new(1000);
    let (stores, key) = (stores([store.clone()]), keys(1)[0]);
    write(&stores, key).await;
    assert!(!stores.lacks(0, &key, BLOCK as u64));
    store.says_what_it_has.store(true, Relaxed);
    store.ram.remove(&key).await.unwrap();
    assert!(stores.lacks(0, &key, BLOCK as u64));
    // What an earlier process has written is not written again.
    let other = keys(2)[1];
    store.ram.put(other, block(), None).await.unwrap();
    assert!(!stores.lacks(0, &other, BLOCK as u64));
}

/// Regression: tiers were written one after the other, under one bound. A slow one took all of it, and blocks were lost for the others
/// too. A block that was lost hid those after it, which were written all the same.
#[tokio::test]
async fn a_slow_tier_loses_its_own_blocks_from_the_first_gap_on() {
    let (fast, slow) = (TestStore::new(1000), TestStore::new(0));
    let (two, keys) = (stores([fast.clone(), slow.clone()]), keys(9));
    let at = |i: usize| Some(InText { block: keys[i], parent: i.checked_sub(1).map(|before| keys[before]) });
    let mut waiting = Vec::new();
    let mut write = async |i: usize| {
        let tiers = (0..2).filter(|&tier| two.lacks(tier, &keys[i], BLOCK as u64));
        for writing in two.may_write_to(tiers, keys[i], BLOCK as u64, at(i)) {
            match writing.tier {
                0 => assert!(!put(writing, block()).await),
                _ => waiting.push(tokio::spawn(put(writing, block()))),
            }
        }
    };
    for i in 0..6 {
        write(i).await;
    }
    assert!(keys[..6].iter().all(|key| fast.has(*key)));
    assert_eq!([0, 1].map(|tier| two.writes.n_dropped(tier)), [0, 3]);
    slow.writes.add_permits(1000);
    for put in waiting.drain(..) {
        put.await.unwrap();
    }
    // There is room now, but the next block of this text would not be found.
    let write = async |i: usize, at: Option<InText>| {
        let tiers = (0..2).filter(|&tier| two.lacks(tier, &keys[i], BLOCK as u64));
        for writing in two.may_write_to(tiers, keys[i], BLOCK as u64, at) {
            put(writing, block()).await;
        }
    };
    write(6, at(6)).await;
    assert_eq!([0, 1].map(|tier| two.writes.n_dropped(tier)), [0, 4]);
    // The first block of another text, and a victim of eviction.
    write(7, Some(InText { block: keys[7], parent: None })).await;
    write(5, None).await;
    let here = || keys.iter().map(|key| slow.has(*key)).collect::<Vec<_>>();
    assert_eq!(here(), [true, true, true, false, false, true, false, true, false]);
    // When the gap is closed, what follows is of use.
    for i in 3..7 {
        write(i, at(i)).await;
    }
    assert_eq!(here(), [true, true, true, true, true, true, true, true, false]);
    assert_eq!(two.stats().iter().map(|one| one.unwritten_blocks).collect::<Vec<_>>(), [0, 4]);
}

/// Writes that wait for a slow store, against what an allocator counts.
#[test]
fn the_bound_of_writes_holds() {
    const N: usize = 1000;
    let (runtime, store, keys) = (
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        TestStore::new(0),
        keys(N as u32),
    );
    let mut config = config([store.clone()]);
    config.max_bytes_in_flight = (N * BLOCK) as u64;
    let (stores, bytes) = (Arc::new(Stores::new(&config)), block());
    let allocated = allocation_counter::measure(|| {
        runtime.block_on(async {
            for &key in &keys {
                tokio::spawn(put(stores.may_write(0, key, BLOCK as u64).unwrap(), bytes.clone()));
            }
            tokio::task::yield_now().await;
        });
    });
    assert_eq!(stores.bytes_being_written(), config.max_bytes_in_flight);
    assert!(stores.may_write(0, keys[0], 1).is_none());
    let (bound, measured) = (N as u64 * WRITE_BYTES, allocated.bytes_current as u64);
    assert!((bound / 16..bound).contains(&measured), "{measured} of {bound}");
}
