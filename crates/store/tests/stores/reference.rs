//! Random operations on a store and on a plain map, compared after each one.
use kvist_store::{BlockKey, BlockStore, Bytes, KeyChain};
use kvist_testing::SplitMix64;
use std::cell::Cell;
use std::collections::HashMap;
use std::time::{Duration, SystemTime};

thread_local! {
    static NOW_MS: Cell<u64> = const { Cell::new(1_000_000) };
}

/// The time of the calling test, which only tests change.
pub fn clock() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(NOW_MS.get())
}

pub fn pass(ms: u64) {
    NOW_MS.set(NOW_MS.get() + ms);
}

pub fn keys(count: usize) -> Vec<BlockKey> {
    let mut chain = KeyChain::root(b"test", "");
    (0..count as u32).map(|token| chain.next(&[token])).collect()
}

pub fn block(random: &mut SplitMix64, longest: usize) -> Bytes {
    let length = random.index(longest + 1);
    (0..length).map(|_| random.next() as u8).collect::<Vec<u8>>().into()
}

/// What to compare: does the store have every block that was put, or may it have dropped some?
#[derive(Clone, Copy, PartialEq)]
pub enum Keeps {
    All,
    /// It may miss. What it returns has to be the newest block put under that key.
    Some,
}

/// Runs `count` operations. Returns how many gets were hits.
pub async fn compare(store: &dyn BlockStore, keeps: Keeps, seed: u64, count: usize) -> usize {
    let mut random = SplitMix64(seed);
    let keys = keys(40);
    let mut reference: HashMap<BlockKey, (Bytes, Option<SystemTime>)> = HashMap::new();
    let mut hits = 0;
    for operation in 0..count {
        let at = random.index(keys.len());
        let key = keys[at];
        let here = |key: &BlockKey| match reference.get(key) {
            Some((_, Some(expires))) if *expires <= clock() => None,
            Some((bytes, _)) => Some(bytes.clone()),
            None => None,
        };
        let context = format!("seed {seed}, operation {operation}, key {at}");
        match random.below(10) {
            0..4 => {
                let bytes = block(&mut random, 300);
                let ttl = (random.below(4) == 0).then(|| Duration::from_millis(random.below(50).into()));
                store.put(key, bytes.clone(), ttl).await.unwrap();
                reference.insert(key, (bytes, ttl.map(|ttl| clock() + ttl)));
            }
            4..8 => {
                let found = store.get(&key).await.unwrap();
                match keeps {
                    Keeps::All => assert_eq!(found, here(&key), "{context}"),
                    Keeps::Some if found.is_some() => assert_eq!(found, here(&key), "{context}"),
                    Keeps::Some => {}
                }
                hits += usize::from(found.is_some());
            }
            8 => {
                store.remove(&key).await.unwrap();
                reference.remove(&key);
                assert_eq!(store.get(&key).await.unwrap(), None, "{context}");
            }
            _ => {
                pass(random.below(10).into());
                let run = &keys[at..(at + 5).min(keys.len())];
                let found = store.lookup(run, Duration::MAX).await.unwrap();
                // A store may still count what has expired.
                let most = run.iter().take_while(|key| reference.contains_key(key)).count();
                let least = run.iter().take_while(|key| here(key).is_some()).count();
                assert!(found <= most, "{context}: {found} > {most}");
                assert!(keeps == Keeps::Some || found >= least, "{context}: {found} < {least}");
            }
        }
    }
    hits
}
