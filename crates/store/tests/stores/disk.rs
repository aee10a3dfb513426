//! The store on a disk.
use crate::reference::{self, Keeps, clock, compare};
use kvist_store::{BlockKey, BlockStore, Bytes, Disk, DiskOptions, KeyChain, Limits, StoreError};
use kvist_testing::SplitMix64;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const CAPACITY: u64 = 8 * (16 << 20);

fn options(dir: &Path) -> DiskOptions {
    // Generous, for a machine that is busy with other tests.
    let limits = Limits { timeout: Duration::from_secs(120), ..Limits::default() };
    DiskOptions { dir: dir.into(), capacity_bytes: CAPACITY, largest_block_bytes: 1 << 20, limits }
}

async fn open(dir: &Path) -> Disk {
    Disk::open(options(dir)).await.unwrap()
}

fn regions(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths.filter(|path| path.to_string_lossy().contains("foyer")).collect();
    paths.sort();
    paths
}

/// The block that every process stores under the `at`-th key.
fn block(at: usize) -> Bytes {
    let mut random = SplitMix64(at as u64);
    let length = 1 + random.index(60_000);
    (0..length).map(|_| random.next() as u8).collect::<Vec<u8>>().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn it_returns_what_the_reference_returns() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..3 {
        let dir = dir.path().join(seed.to_string());
        let store = open(&dir).await.with_clock(clock);
        assert!(compare(&store, Keeps::Some, seed, 500).await > 100);
        store.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(50);
    let store = open(dir.path()).await;
    for (at, key) in keys.iter().enumerate() {
        store.put(*key, block(at), None).await.unwrap();
    }
    assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 50);
    store.close().await.unwrap();

    let store = open(dir.path()).await;
    assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 50);
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(store.get(key).await.unwrap(), Some(block(at)), "{at}");
    }
    assert_eq!(store.usage().capacity_bytes, Some(CAPACITY));
}

/// What was removed came back when the store was opened again.
#[tokio::test(flavor = "multi_thread")]
async fn removed_blocks_stay_away_after_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(20);
    let store = open(dir.path()).await;
    for (at, key) in keys.iter().enumerate() {
        store.put(*key, block(at), None).await.unwrap();
    }
    for at in [3, 4, 5, 9] {
        store.remove(&keys[at]).await.unwrap();
    }
    store.put(keys[4], block(4), None).await.unwrap();
    let is_gone = |at: usize, restart: usize| [3, 5, 9].contains(&at) && (at != 9 || restart < 3);
    store.close().await.unwrap();
    for restart in 1..5 {
        let store = open(dir.path()).await;
        for (at, key) in keys.iter().enumerate() {
            let expected = (!is_gone(at, restart)).then(|| block(at));
            assert_eq!(store.get(key).await.unwrap(), expected, "{at}, restart {restart}");
        }
        assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 3);
        if restart == 2 {
            store.put(keys[9], block(9), None).await.unwrap();
        }
        store.close().await.unwrap();
    }
}

/// Records of the list of removals that have no later one of the same block.
fn listed(dir: &Path) -> usize {
    let mut listed = std::collections::HashMap::new();
    for record in fs::read(dir.join("kvist-store.removed")).unwrap().chunks_exact(33) {
        listed.insert(record[1..].to_vec(), record[0] == b'-');
    }
    listed.values().filter(|is_removed| **is_removed).count()
}

/// The list of what was removed grew until the store was opened again.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_removed_is_forgotten_when_all_regions_were_overwritten_and_stays_away() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(320);
    let store = open(dir.path()).await;
    // Never there: nothing to note.
    store.remove(&keys[319]).await.unwrap();
    assert_eq!(listed(dir.path()), 0);
    let write = async |keys: &[BlockKey]| {
        for key in keys {
            store.put(*key, vec![7; 1 << 20].into(), None).await.unwrap();
        }
    };
    write(&keys[..20]).await;
    for key in &keys[..20] {
        store.remove(key).await.unwrap();
    }
    assert_eq!(listed(dir.path()), 20);
    // A region less than the disk has: some may still be in its files.
    write(&keys[20..130]).await;
    assert_eq!(listed(dir.path()), 20);
    // The files, and what is buffered and half full.
    write(&keys[130..250]).await;
    assert_eq!(listed(dir.path()), 0);
    // A few that are removed late are listed.
    for key in &keys[240..250] {
        store.remove(key).await.unwrap();
    }
    assert_eq!(listed(dir.path()), 10);
    store.close().await.unwrap();
    let store = open(dir.path()).await;
    for key in keys[..20].iter().chain(&keys[240..250]) {
        assert_eq!(store.get(key).await.unwrap(), None);
    }
    assert!(store.get(&keys[239]).await.unwrap().is_some());
}

/// Regression: after a restart foyer overwrites what it finds in any order, so a block that was just written could be the first to go.
#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_blocks_go_first_also_after_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(400);
    let mut next = 0;
    // Not whole rounds of the regions.
    for n in [150, 50, 7, 120, 23] {
        let store = open(dir.path()).await;
        for key in &keys[next..next + n] {
            store.put(*key, vec![7; 1 << 20].into(), None).await.unwrap();
        }
        next += n;
        store.close().await.unwrap();
        let store = open(dir.path()).await;
        let mut here = Vec::new();
        for (at, key) in keys.iter().enumerate() {
            if store.lookup(&[*key], Duration::MAX).await.unwrap() == 1 {
                here.push(at);
            }
        }
        // A region is empty, and one may be half full.
        assert!(here.len() >= 75, "{} of {next}", here.len());
        assert_eq!(here, (next - here.len()..next).collect::<Vec<_>>());
        store.close().await.unwrap();
    }
}

/// Regression: a note of a deletion was in the regions, and could be overwritten before older blocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_note_outlives_the_blocks_of_its_salt() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(500);
    let (note, number) =
        (KeyChain::note(b"a model", "a salt"), Bytes::from_static(&[1, 2, 3, 4, 5, 6, 7, 8]));
    let block = Bytes::from(vec![7; 1 << 20]);
    let (of_salt, others) = keys.split_at(60);
    let store = open(dir.path()).await;
    for key in of_salt {
        store.put(*key, block.clone(), None).await.unwrap();
    }
    store.put(note, number.clone(), None).await.unwrap();
    let mut store = Some(store);
    // Half of the regions, all of them, and all of them again.
    for (restart, more) in [&others[..60], &others[60..180], &others[180..360]].into_iter().enumerate() {
        store.take().unwrap().close().await.unwrap();
        let store = store.insert(open(dir.path()).await);
        for key in more {
            store.put(*key, block.clone(), None).await.unwrap();
            assert_eq!(store.get(&note).await.unwrap(), Some(number.clone()), "restart {restart}");
        }
    }
    let store = store.unwrap();
    for key in of_salt {
        assert_eq!(store.lookup(&[*key], Duration::MAX).await.unwrap(), 0, "the test overwrites all of them");
    }
    assert_eq!(store.lookup(&[note], Duration::MAX).await.unwrap(), 1);
    store.remove(&note).await.unwrap();
    assert_eq!(store.get(&note).await.unwrap(), None);
}

/// Regression: foyer's numbers and its queue could have different orders, and opening a region stopped at the first number that
/// was smaller than the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn blocks_that_are_written_at_the_same_time_survive_a_restart() {
    for round in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let keys = reference::keys(320);
        let store = Arc::new(open(dir.path()).await);
        for keys in keys.chunks(64) {
            let mut puts = tokio::task::JoinSet::new();
            for &key in keys {
                let store = store.clone();
                puts.spawn(async move { store.put(key, block(1), None).await.unwrap() });
            }
            puts.join_all().await;
        }
        Arc::into_inner(store).unwrap().close().await.unwrap();
        let store = open(dir.path()).await;
        assert_eq!(store.lookup(&keys, Duration::MAX).await.unwrap(), 320, "round {round}");
        store.close().await.unwrap();
    }
}

/// Regression: a block that is read from a region that goes soon is written again, and such writes took no room in the buffer of writes.
/// It overflowed, and puts failed that had waited for their room.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn puts_have_room_while_blocks_that_are_read_are_written_again() {
    let dir = tempfile::tempdir().unwrap();
    // Of so many regions two go soon, each with as many bytes as the buffer has.
    let options = DiskOptions { capacity_bytes: 24 * (16 << 20), ..options(dir.path()) };
    let store = Arc::new(Disk::open(options).await.unwrap());
    let keys = reference::keys(460);
    let put_all = async |keys: &[BlockKey]| {
        let puts = keys.iter().map(|&key| {
            let store = store.clone();
            async move { store.put(key, vec![7; 1 << 20].into(), None).await.unwrap() }
        });
        puts.collect::<tokio::task::JoinSet<()>>().join_all().await;
    };
    put_all(&keys[..340]).await;
    // As many at a time as leave a little room.
    let reads = async {
        let mut n_read = 0;
        for from in (0..120).step_by(12) {
            for _ in 0..2 {
                let reads = keys[from..from + 48].iter().map(|&key| {
                    let store = store.clone();
                    async move { store.get(&key).await.unwrap().is_some() }
                });
                let reads: tokio::task::JoinSet<bool> = reads.collect();
                n_read += reads.join_all().await.into_iter().filter(|is_here| *is_here).count();
            }
        }
        n_read
    };
    let puts = async {
        for keys in keys[340..].chunks(12) {
            put_all(keys).await;
        }
    };
    let (n_read, ()) = tokio::join!(reads, puts);
    assert!(n_read > 100, "{n_read}");
}

/// A directory that was opened with another capacity began empty, without a word.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_stay_as_far_as_another_capacity_has_room() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(240);
    let body = |at: usize| -> Bytes { vec![at as u8; 900_000].into() };
    let open = async |regions: u64, largest_block_bytes: u64| {
        let capacity_bytes = regions * (16 << 20);
        let options = DiskOptions { capacity_bytes, largest_block_bytes, ..options(dir.path()) };
        Disk::open(options).await.unwrap()
    };
    let read = async |store: &Disk, range: std::ops::Range<usize>| {
        let mut here = Vec::new();
        for at in range {
            let found = store.get(&keys[at]).await.unwrap();
            assert!(found.is_none() || found == Some(body(at)), "{at} has changed");
            here.extend(found.map(|_| at));
        }
        here
    };
    let here = async |store: &Disk| read(store, 0..keys.len()).await;
    let put = async |store: &Disk, range: std::ops::Range<usize>| {
        for at in range {
            store.put(keys[at], body(at), None).await.unwrap();
        }
    };
    // Half of the regions.
    let store = open(8, 1 << 20).await;
    put(&store, 0..60).await;
    store.remove(&keys[7]).await.unwrap();
    store.close().await.unwrap();
    let all: Vec<usize> = (0..60).filter(|at| *at != 7).collect();

    // More regions.
    let store = open(20, 1 << 20).await;
    assert_eq!((here(&store).await, regions(dir.path()).len()), (all.clone(), 20));
    put(&store, 60..180).await;
    let all: Vec<usize> = (0..180).filter(|at| *at != 7).collect();
    assert_eq!(here(&store).await, all);
    store.close().await.unwrap();

    // Larger ones, because of larger blocks. `16 << 20` and what is stored beside a block are more than a region had.
    let store = open(24, 16 << 20).await;
    let lengths: Vec<u64> =
        regions(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).collect();
    assert!(lengths.len() == 23 && lengths.iter().all(|n| *n > 16 << 20), "{lengths:?}");
    assert_eq!(here(&store).await, all);
    store.put(BlockKey::from_bytes([1; 32]), vec![5; 16 << 20].into(), None).await.unwrap();
    assert!(store.get(&BlockKey::from_bytes([1; 32])).await.unwrap().is_some());
    store.close().await.unwrap();

    // Fewer: what is left is right, and what was removed stays away.
    let store = open(9, 1 << 20).await;
    let left = here(&store).await;
    assert_eq!(regions(dir.path()).len(), 8, "as long as they were, so one less fits");
    assert!(left.len() >= 50 && left.len() < 150 && !left.contains(&7), "{left:?}");
    put(&store, 180..240).await;
    // These first: what is read from the oldest regions is written again, in place of others.
    assert_eq!(read(&store, 180..240).await, (180..240).collect::<Vec<_>>());
    here(&store).await;
    store.close().await.unwrap();

    // So few that none of the files is of use.
    let store = open(8, 1 << 20).await;
    assert_eq!((here(&store).await, regions(dir.path()).len()), (vec![], 8));
}

/// Regression: no block was ever written again after a kill between the moment when foyer takes the last empty region and that when it has
/// emptied the next one.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_an_empty_region_is_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(200);
    let store = open(dir.path()).await;
    for key in &keys[..180] {
        store.put(*key, vec![7; 1 << 20].into(), None).await.unwrap();
    }
    store.close().await.unwrap();
    let is_empty = |path: &PathBuf| fs::read(path).unwrap()[..4096].iter().all(|byte| *byte == 0);
    let (empty, full): (Vec<PathBuf>, Vec<PathBuf>) = regions(dir.path()).into_iter().partition(is_empty);
    assert!(!empty.is_empty() && full.len() >= 5, "{empty:?} {full:?}");
    for path in empty {
        fs::copy(&full[0], path).unwrap();
    }
    let store = open(dir.path()).await;
    for key in &keys[180..] {
        store.put(*key, vec![8; 1 << 20].into(), None).await.unwrap();
        assert_eq!(store.get(key).await.unwrap(), Some(vec![8; 1 << 20].into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(200);
    let store = open(dir.path()).await;
    for key in &keys {
        store.put(*key, vec![7; 1 << 20].into(), None).await.unwrap();
    }
    let mut here = 0;
    for key in &keys {
        here += usize::from(store.get(key).await.unwrap().is_some());
    }
    assert!((10..=128).contains(&here), "{here} of 200 MiB are in 128 MiB");
    let bytes: u64 = regions(dir.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert_eq!(bytes, CAPACITY);
    let error = store.put(keys[0], vec![7; (1 << 20) + 1].into(), None).await.unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { capacity_bytes: 1_048_576, .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_opened_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = async |options: DiskOptions, parts: &[&str]| {
        let error = Disk::open(options).await.err().expect("refused").to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error} lacks one of {parts:?}");
    };
    let at = |name: &str| options(&dir.path().join(name));

    let store = open(&dir.path().join("used")).await;
    refused(at("used"), &["another process uses", "used", "Stop it"]).await;
    store.close().await.unwrap();
    open(&dir.path().join("used")).await;

    fs::create_dir(dir.path().join("photos")).unwrap();
    fs::write(dir.path().join("photos/cat.jpg"), "meow").unwrap();
    refused(at("photos"), &["photos", "not a store's", "empty directory"]).await;
    assert_eq!(fs::read_to_string(dir.path().join("photos/cat.jpg")).unwrap(), "meow");

    fs::write(dir.path().join("file"), "").unwrap();
    refused(at("file/store"), &["cannot create", "file/store"]).await;
    refused(DiskOptions { capacity_bytes: 1 << 20, ..at("small") }, &["1048576 bytes", "134217728"]).await;
    refused(
        DiskOptions { capacity_bytes: 1 << 40, largest_block_bytes: 1 << 40, ..at("large") },
        &["blocks of"],
    )
    .await;
    refused(DiskOptions { capacity_bytes: 1 << 60, ..at("huge") }, &["1152921504606846976"]).await;
    // More than any disk of today has, and what foyer could address.
    refused(DiskOptions { capacity_bytes: 1 << 40, ..at("full") }, &["full", "free"]).await;
    assert_eq!(regions(&dir.path().join("full")), [] as [PathBuf; 0]);
}

/// Bytes of the files change between two runs, and files are cut short: those blocks are gone, the others are as they were.
/// `KVIST_FLIPS=100000` changes more of them.
#[tokio::test(flavor = "multi_thread")]
async fn damaged_files_lose_blocks_and_return_none_of_them() {
    let flips = std::env::var("KVIST_FLIPS").map_or(1_500, |n| n.parse().expect("KVIST_FLIPS is a number"));
    let dir = tempfile::tempdir().unwrap();
    let keys = reference::keys(100);
    let mut random = SplitMix64(3);
    let (mut found, mut lost, mut damaged, mut flipped, mut cut, mut round) = (0, 0, 0, 0, 0, 0);
    while flipped < flips {
        round += 1;
        let store = open(dir.path()).await;
        for (at, key) in keys.iter().enumerate() {
            store.put(*key, block(at), None).await.unwrap();
        }
        store.close().await.unwrap();
        for path in regions(dir.path()) {
            let mut bytes = fs::read(&path).unwrap();
            let used = bytes.iter().rposition(|byte| *byte != 0).unwrap_or(0) + 1;
            let n = random.index(40);
            flipped += n;
            for _ in 0..n {
                bytes[random.index(used)] ^= 1 << random.below(8);
            }
            if random.below(4) == 0 {
                let from = random.index(used);
                let to = (from + random.index(1 << 20)).min(bytes.len());
                bytes[from..to].fill(0);
            }
            if random.below(5) == 0 {
                cut += 1;
                bytes.truncate(random.index(used + 1));
            }
            fs::write(&path, bytes).unwrap();
        }
        let store = open(dir.path()).await;
        // A file that was cut short has its length again, so that what is written there later is there.
        let lengths = regions(dir.path()).into_iter().map(|path| fs::metadata(path).unwrap().len());
        assert_eq!(lengths.collect::<Vec<_>>(), [16 << 20; 8], "round {round}");
        for (at, key) in keys.iter().enumerate() {
            match store.get(key).await.unwrap() {
                Some(bytes) => {
                    assert_eq!(bytes, block(at), "round {round}, block {at}");
                    found += 1;
                }
                None => lost += 1,
            }
        }
        damaged += store.counts().damaged;
        store.close().await.unwrap();
    }
    assert!(found > 50 && lost > 50 && cut > 10, "{found} found, {lost} lost, {cut} cut");
    // Others are not found at all, because what is damaged leads to them.
    assert!(damaged > 50 && damaged <= lost, "{damaged} of {lost} lost blocks failed their check");
    println!(
        "{flipped} flipped bits and {cut} cut files in {round} rounds: {found} blocks found, {lost} lost"
    );
}

const DIR: &str = "KVIST_STORE_TEST_DIR";

fn crash_keys() -> Vec<BlockKey> {
    let mut chain = KeyChain::root(b"crash", "");
    (0..1_000).map(|token| chain.next(&[token])).collect()
}

/// Not a test: the process that `a_kill_loses_no_written_block` kills. Stores blocks and prints each one's number.
#[tokio::test(flavor = "multi_thread")]
async fn child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let store = open(Path::new(&dir)).await;
    for (at, key) in crash_keys().into_iter().enumerate() {
        store.put(key, block(at), None).await.unwrap();
        println!("\nput {at}");
    }
}

/// A process that writes is killed after it has stored a random number of blocks. What it had stored is there, whole.
/// `KVIST_KILLS=1000` kills more often.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_loses_no_written_block() {
    let kills =
        std::env::var("KVIST_KILLS").map_or(3, |kills| kills.parse().expect("KVIST_KILLS is a number"));
    let mut random = SplitMix64(5);
    let keys = crash_keys();
    let dir = tempfile::tempdir().unwrap();
    for kill in 0..kills {
        let dir = dir.path().join((kill % 2).to_string());
        if kill % 20 < 2 {
            let _ = fs::remove_dir_all(&dir);
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["disk::child", "--exact", "--nocapture"])
            .env(DIR, &dir)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let after = random.index(120);
        let mut stored = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            if line.unwrap() == format!("put {stored}") {
                stored += 1;
            }
            if stored > after {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(stored > after, "the child ended by itself after {stored} blocks");
        let store = open(&dir).await;
        for (at, key) in keys.iter().enumerate() {
            match store.get(key).await.unwrap() {
                Some(bytes) => assert_eq!(bytes, block(at), "kill {kill}, block {at}"),
                None => assert!(at >= stored, "kill {kill}: block {at} of {stored} is lost"),
            }
        }
        store.close().await.unwrap();
    }
}
