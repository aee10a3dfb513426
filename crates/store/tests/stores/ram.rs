//! The store in RAM.
use crate::reference::{self, Keeps, block, clock, compare};
use kvist_store::{BlockKey, BlockStore, Bytes, Frame, Ram, StoreError, Usage};
use kvist_testing::SplitMix64;
use pollster::block_on;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ENTRY: u64 = 512 + Frame::HEAD_BYTES as u64;

#[test]
fn with_room_it_keeps_what_the_reference_keeps() {
    for seed in 0..8 {
        let store = Ram::new(1 << 20).with_clock(clock);
        assert!(block_on(compare(&store, Keeps::All, seed, 5_000)) > 1_000);
    }
}

#[test]
fn without_room_it_drops_but_never_lies() {
    for seed in 0..8 {
        let store = Ram::new(10_000).with_clock(clock);
        assert!(block_on(compare(&store, Keeps::Some, seed, 5_000)) > 100);
        assert!(store.counts().evicted > 100);
    }
}

/// The same operations on a list in order of use, oldest first.
#[test]
fn it_evicts_the_least_recently_used() {
    let keys = reference::keys(30);
    for seed in 0..10 {
        let mut random = SplitMix64(seed);
        let capacity = 9_000;
        let store = Ram::new(capacity);
        let mut list: Vec<(BlockKey, Bytes)> = Vec::new();
        let bytes = |list: &[(BlockKey, Bytes)]| {
            list.iter().map(|(_, block)| ENTRY + block.len() as u64).sum::<u64>()
        };
        let mut evicted = 0;
        for operation in 0..2_000 {
            let key = random.pick(&keys);
            let at = list.iter().position(|(other, _)| *other == key);
            if random.below(2) == 0 {
                let block = block(&mut random, 1_000);
                at.map(|at| list.remove(at));
                list.push((key, block.clone()));
                while bytes(&list) > capacity {
                    list.remove(0);
                    evicted += 1;
                }
                block_on(store.put(key, block, None)).unwrap();
            } else {
                let expected = at.map(|at| list.remove(at));
                list.extend(expected.clone());
                assert_eq!(
                    block_on(store.get(&key)).unwrap(),
                    expected.map(|(_, block)| block),
                    "{seed} {operation}"
                );
            }
            let entries = Some(list.len() as u64);
            let usage = Usage { bytes: Some(bytes(&list)), capacity_bytes: Some(capacity), entries };
            assert_eq!(store.usage(), usage, "seed {seed}, operation {operation}");
            assert_eq!(store.counts().evicted, evicted);
        }
    }
}

#[test]
fn a_block_larger_than_the_store_is_refused_and_evicts_nothing() {
    let keys = reference::keys(2);
    let store = Ram::new(2_000);
    block_on(store.put(keys[0], vec![1; 100].into(), None)).unwrap();
    let error = block_on(store.put(keys[1], vec![2; 2_000].into(), None)).unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { bytes: 2_600, capacity_bytes: 2_000, .. }), "{error}");
    assert_eq!(store.counts().errors, 1);
    assert!(block_on(store.get(&keys[0])).unwrap().is_some());
}

/// What `usage` says is never less than what is allocated.
#[test]
fn the_bound_holds_for_what_is_allocated() {
    let keys = reference::keys(3_000);
    for body in [0, 1, 100, 5_000] {
        let mut kept = None;
        let allocated = allocation_counter::measure(|| {
            let store = Ram::new(1 << 30);
            for key in &keys {
                block_on(store.put(*key, vec![0; body].into(), None)).unwrap();
                block_on(store.get(key)).unwrap();
            }
            kept = Some(store);
        });
        let counted = kept.unwrap().usage().bytes.unwrap();
        assert!(allocated.bytes_current as u64 <= counted, "{body}: {} > {counted}", allocated.bytes_current);
    }
}

#[test]
fn what_happens_is_counted() {
    let keys = reference::keys(2);
    let store = Ram::new(1 << 20).with_clock(clock);
    block_on(store.put(keys[0], vec![1; 10].into(), None)).unwrap();
    block_on(store.put(keys[1], vec![1; 5].into(), Some(Duration::from_millis(3)))).unwrap();
    assert!(block_on(store.get(&keys[0])).unwrap().is_some());
    reference::pass(3);
    assert!(block_on(store.get(&keys[1])).unwrap().is_none());
    assert!(block_on(store.get(&keys[1])).unwrap().is_none());
    let counts = store.counts();
    assert_eq!((counts.hits, counts.hit_bytes, counts.misses, counts.expired), (1, 10, 2, 1));
    assert_eq!((counts.puts, counts.put_bytes, counts.damaged, counts.errors), (2, 15, 0, 0));
    assert_eq!(store.usage().entries, Some(1), "an expired block is removed");
}

/// A watcher knows what is here, also if others watched before, and blocks were there.
#[test]
fn a_watcher_knows_what_is_here() {
    let keys = reference::keys(30);
    for seed in 0..10 {
        let mut random = SplitMix64(seed);
        let store = Ram::new(9_000).with_clock(clock);
        let known = Arc::new(Mutex::new(BTreeSet::new()));
        for operation in 0..2_000 {
            let key = random.pick(&keys);
            match random.below(10) {
                0..5 => {
                    let ttl = (random.below(4) == 0).then_some(Duration::from_millis(2));
                    block_on(store.put(key, block(&mut random, 1_000), ttl)).unwrap();
                }
                5..8 => drop(block_on(store.get(&key)).unwrap()),
                8 => block_on(store.remove(&key)).unwrap(),
                _ => reference::pass(1),
            }
            if operation % 500 == 300 {
                known.lock().unwrap().clear();
                let known = known.clone();
                let watcher = move |key: &BlockKey, is_here: bool| {
                    let mut known = known.lock().unwrap();
                    match is_here {
                        true => drop(known.insert(*key)), // a block that is put again is told again
                        false => assert!(known.remove(key), "only what is here goes"),
                    }
                };
                assert!(store.watch(Box::new(watcher)));
            }
            if operation >= 300 {
                let is_here = |key: &&BlockKey| {
                    block_on(store.lookup(std::slice::from_ref(*key), Duration::MAX)).unwrap() == 1
                };
                let here: BTreeSet<BlockKey> = keys.iter().filter(is_here).copied().collect();
                assert_eq!(*known.lock().unwrap(), here, "seed {seed}, operation {operation}");
            }
        }
        assert!(store.counts().evicted > 100 && store.counts().expired > 0);
    }
}
