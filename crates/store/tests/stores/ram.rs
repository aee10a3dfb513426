//! The store in RAM.
use crate::reference::{self, Keeps, block, clock, compare};
use kvist_store::{BlockKey, BlockStore, Bytes, Frame, Keep, Ram, Rank, StoreError, Usage};
use kvist_testing::SplitMix64;
use pollster::block_on;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

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

/// A lookup as the store should do it, in a plain list in order of use: the first keys that are there become the last ones, in reverse.
fn look_up<T: Clone>(list: &mut Vec<T>, keys: &[BlockKey], key_of: impl Fn(&T) -> BlockKey) -> usize {
    let at = |list: &[T], key| list.iter().position(|one| key_of(one) == key);
    let n = keys.iter().take_while(|key| at(list, **key).is_some()).count();
    for key in keys[..n].iter().rev() {
        let one = at(list, *key).map(|at| list.remove(at));
        list.extend(one);
    }
    n
}

fn few(random: &mut SplitMix64, keys: &[BlockKey], n: u32) -> Vec<BlockKey> {
    (0..random.below(n)).map(|_| random.pick(keys)).collect()
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
            let what = random.below(3);
            if what == 0 {
                let wanted = few(&mut random, &keys, 5);
                let n = look_up(&mut list, &wanted, |(key, _)| *key);
                assert_eq!(block_on(store.lookup(&wanted, Duration::MAX)).unwrap(), n);
            } else if what == 1 {
                let block = block(&mut random, 1_000);
                at.map(|at| list.remove(at));
                list.push((key, block.clone()));
                while bytes(&list) > capacity {
                    list.remove(0);
                    evicted += 1;
                }
                block_on(store.put(key, block, None)).unwrap();
            } else {
                let expected = at.map(|at| list[at].1.clone());
                assert_eq!(block_on(store.get(&key)).unwrap(), expected, "{seed} {operation}");
                assert_eq!(store.has(&key), Some(at.is_some()));
            }
            let entries = Some(list.len() as u64);
            let usage = Usage { bytes: Some(bytes(&list)), capacity_bytes: Some(capacity), entries };
            assert_eq!(store.usage(), usage, "seed {seed}, operation {operation}");
            assert_eq!(store.counts().evicted, evicted);
        }
    }
}

/// What a block is kept for, and until when.
type Kept = Option<(Rank, SystemTime)>;

/// Blocks of a plain list, in order of use, with their lengths.
#[derive(Default)]
struct Plain {
    list: Vec<(BlockKey, u64, Kept)>,
    evicted: Vec<BlockKey>,
}

impl Plain {
    fn bytes(&self, only_kept: bool) -> u64 {
        let of = |(_, bytes, keep): &(BlockKey, u64, Kept)| match keep {
            None if only_kept => 0,
            _ => ENTRY + bytes,
        };
        self.list.iter().map(of).sum()
    }

    fn release_until(&mut self, now: SystemTime) {
        let keeps = self.list.iter_mut().map(|(.., keep)| keep);
        keeps.for_each(|keep| *keep = keep.filter(|(_, until)| *until > now));
    }

    fn make_room(&mut self, bytes: u64, capacity: u64) {
        while self.bytes(false) + bytes > capacity {
            let rank = |&i: &usize| (self.list[i].2.map(|(rank, _)| rank), i);
            let next = (0..self.list.len()).min_by_key(rank).unwrap();
            self.evicted.push(self.list.remove(next).0);
        }
    }

    /// Returns how many blocks are kept no longer.
    fn keep_half(&mut self, capacity: u64) -> usize {
        let mut n_released = 0;
        while self.bytes(true) > capacity / 2 {
            let smallest = self.list.iter().filter_map(|(.., keep)| *keep).map(|(rank, _)| rank).min();
            let first = self.list.iter().position(|(.., keep)| keep.map(|(rank, _)| rank) == smallest);
            self.list[first.unwrap()].2 = None;
            n_released += 1;
        }
        n_released
    }
}

/// Kept blocks go last, the smallest rank first, and no more than half of the store is kept: against a plain list.
#[test]
fn it_evicts_what_is_kept_last() {
    let keys = reference::keys(40);
    let (mut n_kept, mut n_released, mut n_evicted) = (0, 0, 0);
    for seed in 0..20 {
        let mut random = SplitMix64(seed);
        let capacity = 12_000;
        let store = Ram::new(capacity).with_clock(clock);
        let mut plain = Plain::default();
        for operation in 0..2_000 {
            let key = random.pick(&keys);
            let at = plain.list.iter().position(|(other, ..)| *other == key);
            match random.below(12) {
                0..5 => {
                    let block = block(&mut random, 1_000);
                    plain.release_until(clock());
                    let keep = at.and_then(|at| plain.list.remove(at).2);
                    plain.make_room(ENTRY + block.len() as u64, capacity);
                    plain.list.push((key, block.len() as u64, keep));
                    n_released += plain.keep_half(capacity);
                    block_on(store.put(key, block, None)).unwrap();
                }
                5 => assert_eq!(block_on(store.get(&key)).unwrap().is_some(), at.is_some()),
                6..8 => {
                    let wanted = few(&mut random, &keys, 4);
                    let n = look_up(&mut plain.list, &wanted, |(key, ..)| *key);
                    assert_eq!(block_on(store.lookup(&wanted, Duration::MAX)).unwrap(), n);
                }
                8 => {
                    at.map(|at| plain.list.remove(at));
                    block_on(store.remove(&key)).unwrap();
                }
                9 if random.below(8) == 0 => {
                    let few: Vec<BlockKey> = (0..5).map(|_| random.pick(&keys)).collect();
                    let of = plain.list.iter_mut().filter(|(key, ..)| few.contains(key));
                    of.for_each(|(.., keep)| *keep = None);
                    store.release(&few);
                }
                9 => reference::pass(random.below(20).into()),
                _ => {
                    let few: Vec<BlockKey> = (0..5).map(|_| random.pick(&keys)).collect();
                    let rank = Rank { pin: random.below(4) == 0, priority: random.below(3) as u8 };
                    let within = match random.below(8) {
                        0 => Duration::MAX,
                        _ => Duration::from_millis(random.below(200).into()),
                    };
                    let for_ever = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 40);
                    let until = clock().checked_add(within).unwrap_or(for_ever);
                    plain.release_until(clock());
                    for key in few.iter().rev() {
                        look_up(&mut plain.list, &[*key], |(key, ..)| *key);
                    }
                    for (key, _, keep) in &mut plain.list {
                        if few.contains(key) {
                            *keep = (*keep).max(Some((rank, until)));
                            n_kept += 1;
                        }
                    }
                    n_released += plain.keep_half(capacity);
                    assert!(store.keep(&few, rank, within));
                }
            }
            let is_here = |key: &&BlockKey| store.has(key) == Some(true);
            let here: BTreeSet<BlockKey> = keys.iter().filter(is_here).copied().collect();
            let expected: BTreeSet<BlockKey> = plain.list.iter().map(|(key, ..)| *key).collect();
            assert_eq!(here, expected, "seed {seed}, operation {operation}");
            assert_eq!(store.usage().bytes, Some(plain.bytes(false)));
            assert_eq!(store.counts().evicted, plain.evicted.len() as u64);
        }
        n_evicted += plain.evicted.len();
    }
    let counts = (n_kept, n_released, n_evicted);
    assert!(n_kept > 5_000 && n_released > 500 && n_evicted > 2_000, "{counts:?}");
}

/// Regression: when more than half was kept, kept blocks went before all others, and the beginning of a text first.
#[test]
fn the_beginning_of_a_text_stays_when_more_than_half_is_kept() {
    let keys = reference::keys(30);
    let store = Ram::new(10 * (ENTRY + 100));
    let write = |keys: &[BlockKey]| {
        keys.iter().for_each(|key| block_on(store.put(*key, vec![7; 100].into(), None)).unwrap());
    };
    write(&keys[..8]);
    store.keep(&keys[..8], Rank::default(), Duration::MAX);
    write(&keys[8..28]);
    assert_eq!(block_on(store.lookup(&keys[..8], Duration::MAX)).unwrap(), 5);
    // A higher rank takes the place of a smaller one, from its end.
    store.keep(&keys[26..28], Rank { pin: true, priority: 0 }, Duration::MAX);
    write(&keys[28..30]);
    write(&keys[10..20]);
    assert_eq!(block_on(store.lookup(&keys[..8], Duration::MAX)).unwrap(), 3);
    assert_eq!(block_on(store.lookup(&keys[26..28], Duration::MAX)).unwrap(), 2);
}

/// Regression: a lookup was no use, and the reads after it left a text's end as what was used last. So of a prompt that the cache
/// itself answered from its beginning went first.
#[test]
fn what_is_looked_up_stays_and_its_beginning_longest() {
    let keys = reference::keys(12);
    let store = Ram::new(6 * (ENTRY + 100));
    let write = |keys: &[BlockKey]| {
        keys.iter().for_each(|key| block_on(store.put(*key, vec![7; 100].into(), None)).unwrap());
    };
    write(&keys[..6]);
    assert_eq!(block_on(store.lookup(&keys[..3], Duration::MAX)).unwrap(), 3);
    keys[..3].iter().for_each(|key| assert!(block_on(store.get(key)).unwrap().is_some()));
    let here = || keys[..6].iter().map(|key| store.has(key).unwrap()).collect::<Vec<_>>();
    write(&keys[6..9]);
    assert_eq!(here(), [true, true, true, false, false, false]);
    write(&keys[9..10]);
    assert_eq!(here(), [true, true, false, false, false, false]);
}

/// The rank comes before the end, and never is the latest end.
#[test]
fn of_two_reasons_to_keep_a_block_the_larger_counts() {
    let ranks = [(false, 0), (false, 3), (true, 0)].map(|(pin, priority)| Rank { pin, priority });
    let keeps = ranks.iter().flat_map(|&rank| [Some(1), Some(9), None].map(|until| Keep { rank, until }));
    assert!(keeps.collect::<Vec<_>>().is_sorted_by(|a, b| a < b));
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
            store.keep(&keys, Rank::default(), Duration::from_secs(3600));
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
                let is_here = |key: &&BlockKey| store.has(key) == Some(true);
                let here: BTreeSet<BlockKey> = keys.iter().filter(is_here).copied().collect();
                assert_eq!(*known.lock().unwrap(), here, "seed {seed}, operation {operation}");
            }
        }
        assert!(store.counts().evicted > 100 && store.counts().expired > 0);
    }
}
