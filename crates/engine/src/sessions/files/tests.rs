//! Damage of a directory of sessions: nothing of it is believed.
use super::super::history::SavedHistory;
use super::super::store::Timestamp;
use super::super::{SessionLimits, SessionStore};
use super::*;
use kvist_testing::SplitMix64;
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

const SHAPE: (u32, u16) = (4, 2);
const VOCAB: usize = 1_000;

fn origin() -> Origin {
    serde_json::from_value(json!({
        "model": {"weights": "0a1b2c3d4e5f", "tokenizer": "1b2c3d4e5f6a", "config": "2c3d4e5f6a7b"},
        "weights": "f32",
        "rope": "3d4e5f6a7b8c",
        "cache": {"k": "q8", "v": "q4", "recent": 8, "groups": [[null, 0], [64, 4]]},
    }))
    .unwrap()
}

fn open(dir: &Path) -> Result<(SessionFiles, Vec<Found>), Error> {
    SessionFiles::open(dir, (&origin(), b"fingerprint".to_vec()), SHAPE, VOCAB)
}

fn record(id: u128, parent: Option<u128>, tokens: &[u32]) -> SessionRecord {
    SessionRecord {
        id: SessionId(id).to_string(),
        owner: "me".into(),
        name: Some(format!("talk {id}")),
        cache_salt: None,
        salt: "me".into(),
        created_s: 1,
        touched_s: Timestamp::now().unix_s,
        parent: parent.map(|id| SessionId(id).to_string()),
        fork: Some(1),
        stamp: None,
        recorded: None,
        adopted: false,
        history: SavedHistory::from(&History::of_tokens(tokens.to_vec())),
    }
}

/// Every file below a directory, and its bytes.
fn read(dir: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for path in paths(dir).unwrap() {
        match path.is_dir() {
            true => read(&path, into),
            false => drop(into.insert(path.clone(), fs::read(&path).unwrap())),
        }
    }
}

/// Makes the directory what it was.
fn restore(dir: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) {
    let mut now = BTreeMap::new();
    read(dir, &mut now);
    now.keys().filter(|path| !files.contains_key(*path)).for_each(|path| fs::remove_file(path).unwrap());
    for (path, bytes) in files.iter().filter(|(path, bytes)| now.get(*path) != Some(bytes)) {
        fs::write(path, bytes).unwrap();
    }
}

/// What a round may find besides the old state.
#[derive(Default)]
struct Counts {
    set_aside: usize,
    refused: usize,
    blocks_lost: usize,
    unharmed: usize,
}

/// A bit of a file changes, or its end is missing: a session is as it was or set aside, a block is as it was or not there, and what is
/// about all of them is refused by name. Everything else is as it was. `KVIST_FLIPS=100000` changes more.
#[test]
fn damaged_files_are_set_aside_and_change_no_token() {
    let flips = std::env::var("KVIST_FLIPS").map_or(300, |n| n.parse().expect("KVIST_FLIPS is a number"));
    let (folder, mut random) = (tempfile::tempdir().unwrap(), SplitMix64(21));
    let dir = folder.path();
    let first: Vec<u32> = (0..18).map(|i| i * 37 % VOCAB as u32).collect();
    let forked = [&first[..9], &[7, 8, 9, 10, 11, 12]].concat();
    let texts: [(u128, Option<u128>, &[u32]); 3] =
        [(1, None, &first), (2, Some(1), &forked), (3, None, &[5; 13])];

    let (files, found) = open(dir).unwrap();
    assert!(found.is_empty());
    let (mut blocks, mut written) = (BTreeMap::new(), BTreeMap::new());
    for (id, parent, tokens) in texts {
        let record = record(id, parent, tokens);
        files.write(SessionId(id), &record).unwrap();
        for key in files.keys("me", tokens).concat() {
            let bytes: Vec<u8> = (0..100 + random.index(200)).map(|_| random.next() as u8).collect();
            if let Entry::Vacant(new) = blocks.entry(key.to_string()) {
                files.put_block(&key, bytes.clone()).unwrap();
                new.insert((key, bytes));
            }
        }
        written.insert(record.id.clone(), serde_json::to_string(&record).unwrap());
    }
    let saved = record(4, None, &first);
    assert!(files.save("kept", &saved, 9).unwrap());
    let saved = serde_json::to_string(&saved).unwrap();
    drop(files);

    let mut whole = BTreeMap::new();
    read(dir, &mut whole);
    let names: Vec<&PathBuf> =
        whole.iter().filter(|(_, bytes)| !bytes.is_empty()).map(|(at, _)| at).collect();
    // origin.json, 3 sessions, one that was saved, and blocks of two groups; two sessions share two of each.
    assert_eq!((names.len(), blocks.len()), (5 + 16, 16));
    let mut counts = Counts::default();
    for round in 0..flips {
        restore(dir, &whole);
        // Half of the damage is in blocks, of which there are more.
        let is_block = |path: &&&PathBuf| path.extension().is_some_and(|extension| extension == "kvb");
        let wants_block = random.below(2) == 0;
        let of_kind: Vec<&&PathBuf> = names.iter().filter(|path| is_block(path) == wants_block).collect();
        let path: &Path = of_kind[random.index(of_kind.len())];
        let mut bytes = whole[path].clone();
        match random.below(4) {
            0 => bytes.truncate(random.index(bytes.len())),
            _ => {
                let at = random.index(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
        }
        fs::write(path, &bytes).unwrap();
        let what = format!("round {round}, {}: {:?}", path.display(), String::from_utf8_lossy(&bytes));
        check(dir, path, &blocks, (&written, &saved), &mut counts, &what);
    }
    println!(
        "{flips} damaged files: {} sessions set aside, {} directories refused, {} blocks lost, {} as before",
        counts.set_aside, counts.refused, counts.blocks_lost, counts.unharmed
    );
    assert!(counts.set_aside > flips / 6 && counts.refused > flips / 60 && counts.blocks_lost > flips / 6);

    restore(dir, &whole);
    let (files, found) = open(dir).unwrap();
    assert_eq!(found.len(), 3);
    assert!(blocks.values().all(|(key, bytes)| files.block(key).as_deref() == Some(&bytes[..])));
}

/// Opens a directory of which the file at `damaged` is not as it was written.
fn check(
    dir: &Path,
    damaged: &Path,
    blocks: &BTreeMap<String, (BlockKey, Vec<u8>)>,
    (written, saved): (&BTreeMap<String, String>, &str),
    counts: &mut Counts,
    what: &str,
) {
    let bytes = fs::read(damaged).unwrap();
    let (files, found) = match open(dir) {
        Ok(opened) => opened,
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains(&damaged.display().to_string()), "{what}: {error} names no file");
            // The version of a session's file may have become a newer one.
            assert!(
                damaged.ends_with("origin.json") || error.contains("use a newer kvist"),
                "{what}: {error}"
            );
            assert_eq!(fs::read(damaged).unwrap(), bytes, "{what}: a refusal changes nothing");
            counts.refused += 1;
            return;
        }
    };
    assert!(!damaged.ends_with("origin.json"), "{what}: another model's");
    let aside = damaged.with_extension("damaged");
    let is_aside = aside.exists();
    if is_aside {
        assert!(!damaged.exists() && fs::read(&aside).unwrap() == bytes, "{what}");
        counts.set_aside += 1;
    }
    // Sessions that are here are as they were written, and all are here but the one that was set aside.
    let as_written = |(mut record, history): Found| {
        record.history = SavedHistory::from(&history);
        (record.id.clone(), serde_json::to_string(&record).unwrap())
    };
    let mut expected = written.clone();
    expected.retain(|id, _| !(is_aside && damaged.ends_with(format!("{id}.json"))));
    let mut here = BTreeMap::new();
    let limits = SessionLimits { idle: Duration::from_secs(1 << 30), max_sessions: 99, max_tokens: 1 << 20 };
    let store = SessionStore::new(limits);
    for (record, history) in found {
        let (id, text) = as_written((record, history.clone()));
        store.restore(Timestamp::now(), vec![(serde_json::from_str(&text).unwrap(), history)]);
        here.insert(id, text);
    }
    assert_eq!(here, expected, "{what}");
    for (id, text) in &expected {
        let (record, _) = store.record(Timestamp::now(), SessionId::parse(id).unwrap()).expect(what);
        let before: SessionRecord = serde_json::from_str(text).unwrap();
        assert_eq!(record.history.tokens, before.history.tokens, "{what}");
    }
    match files.load("me", "kept", VOCAB).unwrap() {
        Some(found) => assert_eq!(as_written(found).1, saved, "{what}"),
        None => assert!(is_aside && damaged.ends_with("kept.json"), "{what}"),
    }
    let mut n_lost = 0;
    for (name, (key, before)) in blocks {
        // What only a session needed that was set aside has gone with it.
        let is_needed = files.has_block(key);
        match files.block(key) {
            Some(block) => assert_eq!(&block[..], before, "{what}"),
            None if damaged.ends_with(format!("{name}.kvb")) => {
                assert!(!damaged.exists(), "{what}: a damaged block stays");
                n_lost += 1;
            }
            None => assert!(is_aside && !is_needed, "{what}: the block {name} is gone"),
        }
    }
    counts.blocks_lost += n_lost;
    counts.unharmed += usize::from(n_lost == 0 && !is_aside);
}
