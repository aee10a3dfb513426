use super::super::find::{Found, Lookup, find};
use super::super::parts::BlockParts;
use super::super::test_store::{TestStore, stores};
use super::super::{Report, writes};
use super::untold::{LONGEST_PAUSE, MOST, PAUSE};
use super::*;
use crate::serving::thread::Command;
use kvist_cache::kinds::Visibility;
use kvist_scheduler::RequestId;
use kvist_store::{BlockStore, KeyChain};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Handle;

const MODEL: &[u8] = b"a model";
const BLOCKS: usize = 5;

fn note(salt: &str) -> BlockKey {
    KeyChain::note(MODEL, salt)
}

/// A text of `BLOCKS` blocks of a token, as a process with these stores names them.
fn keys(stores: &Stores, salt: &str) -> Vec<BlockKey> {
    let tokens: Vec<u32> = (0..BLOCKS as u32).collect();
    KeyChain::root_of(MODEL, salt, stores.generation(&note(salt))).keys(&tokens, 1)
}

/// Tells all tiers, and waits until they know.
async fn tell(stores: &Arc<Stores>, salt: &str, generation: u64) {
    stores.tell(&Handle::current(), note(salt), generation);
    assert!(stores.untold(&note(salt), Duration::from_secs(60)).await.is_empty());
}

async fn write(stores: &Arc<Stores>, salt: &str) {
    for key in keys(stores, salt) {
        for tier in (0..stores.n()).filter(|&tier| stores.lacks(tier, &key, 1)) {
            let writing = stores.may_write(tier, key, 1).expect("nothing is being written");
            writes::put(writing, Bytes::from_static(b"K")).await;
        }
    }
}

async fn found(stores: &Arc<Stores>, salt: &str) -> Found {
    let whole = [Visibility { window: None, sinks: 0 }];
    let lookup = Lookup {
        request: RequestId(0),
        tokens: (0..BLOCKS as u32).collect(),
        fingerprint: MODEL.into(),
        salt: salt.into(),
        block_parts: Arc::new(BlockParts::new(1, &whole, |_| 1)),
        n_tokens: BLOCKS as u32,
        hit_tokens: 0,
    };
    let (reports, inbox) = std::sync::mpsc::channel();
    find(stores.clone(), lookup, reports).await;
    match inbox.recv() {
        Ok(Command::Tier(Report::Found { found, .. })) => found,
        _ => panic!("expected what was found"),
    }
}

/// The blocks that are found.
async fn n_found(stores: &Arc<Stores>, salt: &str) -> u32 {
    found(stores, salt).await.runs.last().map_or(0, |run| run.until)
}

/// Blocks that only a tier had were hits again after their salt had been deleted.
#[tokio::test(start_paused = true)]
async fn what_was_forgotten_is_not_found_and_what_comes_later_is() {
    let stores = stores([TestStore::new(1000), TestStore::new(1000)]);
    for salt in ["a", "b"] {
        write(&stores, salt).await;
        assert_eq!(n_found(&stores, salt).await, 5);
    }
    let generation = stores.next_generation(note("a"));
    assert_eq!((n_found(&stores, "a").await, n_found(&stores, "b").await), (0, 5));
    tell(&stores, "a", generation).await;
    write(&stores, "a").await;
    assert_eq!(n_found(&stores, "a").await, 5);
    assert_eq!(found(&stores, "a").await.generation, generation);
    assert!(stores.next_generation(note("a")) > generation, "however soon it is forgotten again");
}

/// Another process learns of it from the store that they share: at once if it has not read the note before, and soon if it has.
#[tokio::test(start_paused = true)]
async fn other_processes_and_later_ones_read_the_note() {
    let shared = TestStore::new(1000);
    let [one, other] = [0, 1].map(|_| stores([TestStore::new(1000), shared.clone()]));
    write(&one, "a").await;
    assert_eq!(n_found(&other, "a").await, 5);
    let generation = one.next_generation(note("a"));
    tell(&one, "a", generation).await;
    let later = stores([shared.clone()]);
    assert_eq!((n_found(&later, "a").await, n_found(&later, "b").await), (0, 0));
    tokio::time::sleep(READ_AGAIN).await;
    assert_eq!((n_found(&other, "a").await, other.generation(&note("a"))), (0, generation));
    write(&other, "a").await;
    assert_eq!(n_found(&one, "a").await, 5);
}

/// What a process had in a tier of its own was found there for ever after another one had deleted it: it never read the note of the
/// store that they share.
#[tokio::test(start_paused = true)]
async fn a_tier_of_ones_own_forgets_too() {
    let shared = TestStore::new(1000);
    let [one, other] = [0, 1].map(|_| stores([TestStore::new(1000), shared.clone()]));
    write(&one, "a").await;
    write(&other, "a").await;
    assert_eq!((n_found(&one, "a").await, n_found(&other, "a").await), (5, 5));
    let generation = one.next_generation(note("a"));
    tell(&one, "a", generation).await;
    tokio::time::sleep(READ_AGAIN).await;
    assert_eq!(n_found(&other, "a").await, 0);
    // The shared store hangs: what is in the own tier is found, and not every request waits for it.
    write(&other, "b").await;
    tokio::time::sleep(READ_AGAIN).await;
    shared.lookups_hang.store(true, Relaxed);
    let began = Instant::now();
    assert_eq!(n_found(&other, "b").await, 5);
    let first = began.elapsed();
    assert_eq!(n_found(&other, "b").await, 5);
    assert!(first > Duration::ZERO && began.elapsed() == first, "{first:?}");
}

/// A salt that a tier has not been told of is not forgotten here, however many others are used meanwhile.
#[tokio::test(start_paused = true)]
async fn an_engine_remembers_what_it_could_not_tell() {
    let slow = TestStore::new(1000);
    let one = stores([slow.clone()]);
    write(&one, "a").await;
    slow.is_down.store(true, Relaxed);
    let generation = one.next_generation(note("a"));
    one.tell(&Handle::current(), note("a"), generation);
    tokio::time::sleep(PAUSE * 10).await;
    for i in 0..(1 << 16) + 1 {
        one.next_generation(note(&i.to_string()));
    }
    assert_eq!(one.generation(&note("a")), 0);
    // It is back, and its turn has not come.
    slow.is_down.store(false, Relaxed);
    assert_eq!((n_found(&one, "a").await, one.generation(&note("a"))), (0, generation));
}

/// A deletion by a process whose clock was behind hid nothing from one whose clock was ahead.
#[tokio::test(start_paused = true)]
async fn clocks_that_differ_do_no_harm() {
    let shared = TestStore::new(1000);
    let [ahead, behind] = [0, 1].map(|_| stores([shared.clone()]));
    let future = ahead.begin_after(note("a"), u64::MAX / 2);
    tell(&ahead, "a", future).await;
    write(&ahead, "a").await;
    // It has not read the note.
    let begun = behind.next_generation(note("a"));
    assert!(begun < future);
    tell(&behind, "a", begun).await;
    tokio::time::sleep(READ_AGAIN).await;
    assert_eq!((n_found(&ahead, "a").await, n_found(&behind, "a").await), (0, 0));
    assert_eq!(ahead.generation(&note("a")), behind.generation(&note("a")));
    write(&behind, "a").await;
    assert_eq!(n_found(&ahead, "a").await, 5);
}

/// Processes that knew a note went on with it after the store had lost it, and later ones shared nothing with them.
#[tokio::test(start_paused = true)]
async fn a_note_that_is_lost_is_written_again() {
    let shared = TestStore::new(1000);
    let old = stores([shared.clone()]);
    let generation = old.next_generation(note("a"));
    tell(&old, "a", generation).await;
    write(&old, "a").await;
    shared.remove(&note("a")).await.unwrap();
    tokio::time::sleep(READ_AGAIN).await;
    assert_eq!(n_found(&old, "a").await, 5);
    while !shared.has(note("a")) {
        tokio::task::yield_now().await;
    }
    assert_eq!(n_found(&stores([shared.clone()]), "a").await, 5);
}

/// When a tier takes all of the time, those after it are not asked, and are not counted as late.
#[tokio::test(start_paused = true)]
async fn a_tier_that_was_not_asked_has_not_failed() {
    let (hangs, works) = (TestStore::new(1000), TestStore::new(1000));
    let both = stores([hangs.clone(), works.clone()]);
    hangs.lookups_hang.store(true, Relaxed);
    assert_eq!(n_found(&both, "a").await, 0);
    let errors: Vec<u64> = both.stats().iter().map(|store| store.errors).collect();
    assert!(errors[0] > 0 && errors[1] == 0, "{errors:?}");
}

/// A deletion while a store was down was lost.
#[tokio::test(start_paused = true)]
async fn a_note_is_written_when_the_store_is_back() {
    let (fast, slow) = (TestStore::new(1000), TestStore::new(1000));
    let both = stores([fast.clone(), slow.clone()]);
    write(&both, "a").await;
    slow.is_down.store(true, Relaxed);
    let generation = both.next_generation(note("a"));
    both.tell(&Handle::current(), note("a"), generation);
    assert_eq!(both.untold(&note("a"), Duration::from_secs(100)).await, ["test"]);
    assert!(fast.has(note("a")) && !slow.has(note("a")));
    slow.is_down.store(false, Relaxed);
    assert!(both.untold(&note("a"), LONGEST_PAUSE).await.is_empty());
    assert!(slow.has(note("a")));
    assert_eq!(n_found(&stores([slow.clone()]), "a").await, 0);
}

/// Every deletion while a store was down was a task that asked it again and again.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_is_asked_as_seldom_after_many_deletions_as_after_one() {
    let slow = TestStore::new(100_000);
    let one = stores([slow.clone()]);
    slow.is_down.store(true, Relaxed);
    let salts: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
    let mut latest = 0;
    for salt in salts.iter().chain(&salts) {
        latest = one.next_generation(note(salt));
        one.tell(&Handle::current(), note(salt), latest);
    }
    tokio::time::sleep(PAUSE * 8).await;
    let asked = one.stats()[0].errors;
    assert!((2..=5).contains(&asked), "{asked}");
    slow.is_down.store(false, Relaxed);
    tokio::time::sleep(LONGEST_PAUSE).await;
    for salt in &salts {
        assert!(one.untold(&note(salt), Duration::ZERO).await.is_empty());
        assert!(slow.has(note(salt)));
    }
    let noted = slow.ram.get(&note("999")).await.unwrap();
    assert_eq!(number(&noted), latest, "the later of two generations");
    assert_eq!(slow.puts.load(Relaxed), 1000, "each salt once");
    assert_eq!(Arc::weak_count(&one), 0, "what wrote the notes has ended, and nothing of it is left");
    // It ends with the engine.
    slow.is_down.store(true, Relaxed);
    one.tell(&Handle::current(), note("a"), one.next_generation(note("a")));
    tokio::task::yield_now().await;
    let engine = Arc::downgrade(&one);
    drop(one);
    tokio::time::sleep(LONGEST_PAUSE * 2).await;
    assert!(engine.upgrade().is_none() && !slow.has(note("a")));
    assert_eq!(Arc::strong_count(&slow), 1);
}

/// A store that is down for ever takes a bounded memory.
#[tokio::test(start_paused = true)]
async fn few_notes_wait() {
    let slow = TestStore::new(1000);
    let one = stores([slow.clone()]);
    slow.is_down.store(true, Relaxed);
    let keys = KeyChain::root(b"notes", "").keys(&(0..MOST as u32 + 1).collect::<Vec<_>>(), 1);
    keys.iter().for_each(|&key| one.tell(&Handle::current(), key, 1));
    assert_eq!(one.untold(&keys[MOST - 1], Duration::ZERO).await, ["test"]);
    assert_eq!(one.untold(&keys[MOST], Duration::ZERO).await, ["test"], "dropped, with a line in the log");
}

/// A tier that does not say what was forgotten is not asked for blocks, and does not keep others from answering.
#[tokio::test(start_paused = true)]
async fn without_the_note_of_a_tier_its_blocks_are_not_used() {
    let (fast, slow) = (TestStore::new(1000), TestStore::new(1000));
    let both = stores([fast.clone(), slow.clone()]);
    write(&both, "a").await;
    for key in &keys(&both, "a")[2..] {
        fast.remove(key).await.unwrap();
    }
    // The note is there and cannot be read.
    slow.put(note("a"), Bytes::copy_from_slice(&9u64.to_le_bytes()), None).await.unwrap();
    slow.reads_hang.store(true, Relaxed);
    assert_eq!(n_found(&both, "a").await, 2, "of the fast one");
    slow.reads_hang.store(false, Relaxed);
    tokio::time::sleep(ASK_AGAIN).await;
    assert_eq!((n_found(&both, "a").await, both.generation(&note("a"))), (0, 9));
    // Something else under its key is no note.
    slow.put(note("b"), Bytes::from_static(b"a block"), None).await.unwrap();
    write(&both, "b").await;
    assert_eq!((n_found(&both, "b").await, both.generation(&note("b"))), (5, 0));
}
