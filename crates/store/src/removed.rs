//! The blocks of a disk store that were removed and are still in its files, so that they stay removed when it is opened again.
//!
//! foyer finds every block again that a region has, also those that were deleted; its own log of deletions is not used, because after a
//! restart it begins at the wrong page. This is a list beside the regions: a record for each removal, and one for each block that was
//! written again or is in no region any more. A record that was cut short by a crash is the last one, and is dropped. Nothing is synced,
//! as in the regions.
//!
//! Regions are overwritten in turn. So a removed block is in none of them when all regions have been written to since, and leaves the
//! list: it has no more blocks than the regions.
use crate::BlockKey;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const NAME: &str = "kvist-store.removed";
/// What happened, and the key.
const RECORD_BYTES: usize = 1 + 32;
const REMOVED: u8 = b'-';
/// Or overwritten.
const WRITTEN: u8 = b'+';

pub(crate) struct Removed {
    path: PathBuf,
    /// When so many bytes have been written, all regions have been written to.
    cycle_bytes: u64,
    list: Mutex<List>,
}

struct List {
    /// Each with the bytes that had been written when it was removed.
    keys: HashMap<BlockKey, u64>,
    /// The same in the order of removals, and keys that have left the list since.
    order: VecDeque<(u64, BlockKey)>,
    written_bytes: u64,
    file: File,
    n_records: u64,
}

impl Removed {
    /// Reads the list, without the blocks for which `is_here` is false: they are gone for good.
    pub fn open(dir: &Path, cycle_bytes: u64, is_here: impl Fn(&BlockKey) -> bool) -> io::Result<Removed> {
        let path = dir.join(NAME);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let keys: HashMap<BlockKey, u64> =
            replay(&bytes).into_iter().filter(is_here).map(|key| (key, 0)).collect();
        let order = keys.keys().map(|key| (0, *key)).collect();
        let (file, n_records) = rewrite(&path, keys.keys())?;
        let list = List { keys, order, written_bytes: 0, file, n_records };
        Ok(Removed { path, cycle_bytes, list: Mutex::new(list) })
    }

    /// A list may lack the last record after a panic elsewhere, and is whole otherwise.
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn keys(&self) -> Vec<BlockKey> {
        self.lock().keys.keys().copied().collect()
    }

    pub fn has(&self, key: &BlockKey) -> bool {
        self.lock().keys.contains_key(key)
    }

    pub fn remove(&self, key: &BlockKey) -> io::Result<()> {
        let mut list = self.lock();
        let at = list.written_bytes;
        if let Some(before) = list.keys.insert(*key, at) {
            // It is removed while it is written again: its bytes are younger than the first removal.
            if before < at {
                list.order.push_back((at, *key));
            }
            return Ok(());
        }
        let noted = self.note(&mut list, REMOVED, key);
        match noted {
            Ok(()) => list.order.push_back((at, *key)),
            Err(_) => drop(list.keys.remove(key)), // so that the next call tries again
        }
        noted
    }

    /// A block was written, maybe again.
    pub fn written(&self, key: &BlockKey) -> io::Result<()> {
        let mut list = self.lock();
        match list.keys.remove(key) {
            Some(_) => self.note(&mut list, WRITTEN, key),
            None => Ok(()),
        }
    }

    /// So many more bytes have been written to the regions. Forgets what was overwritten by them.
    pub fn wrote(&self, bytes: u64) -> io::Result<()> {
        let mut list = self.lock();
        list.written_bytes += bytes;
        while let Some((at, key)) = list.order.front().copied() {
            let is_listed = list.keys.get(&key) == Some(&at);
            if is_listed && list.written_bytes - at < self.cycle_bytes {
                break;
            }
            list.order.pop_front();
            if is_listed {
                list.keys.remove(&key);
                self.note(&mut list, WRITTEN, &key)?;
            }
        }
        Ok(())
    }

    fn note(&self, list: &mut List, what: u8, key: &BlockKey) -> io::Result<()> {
        // Most of the records have no effect any more.
        if list.n_records > 1024 + 2 * list.keys.len() as u64 {
            (list.file, list.n_records) = rewrite(&self.path, list.keys.keys())?;
            return Ok(());
        }
        let mut record = [what; RECORD_BYTES];
        record[1..].copy_from_slice(key.as_bytes());
        // A record that was cut short by a full disk is overwritten.
        list.file.seek(SeekFrom::Start(list.n_records * RECORD_BYTES as u64))?;
        list.file.write_all(&record)?;
        list.n_records += 1;
        Ok(())
    }
}

fn replay(bytes: &[u8]) -> HashSet<BlockKey> {
    let mut keys = HashSet::new();
    for record in bytes.chunks_exact(RECORD_BYTES) {
        let mut key = [0; 32];
        key.copy_from_slice(&record[1..]);
        match record[0] {
            REMOVED => drop(keys.insert(BlockKey::from_bytes(key))),
            WRITTEN => drop(keys.remove(&BlockKey::from_bytes(key))),
            // Damage: of a disk, because whole records alone are written.
            _ => {}
        }
    }
    keys
}

/// Writes a list of these keys alone; the file has the old or the new one.
fn rewrite<'a>(path: &Path, keys: impl ExactSizeIterator<Item = &'a BlockKey>) -> io::Result<(File, u64)> {
    let new = path.with_extension("new");
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(&new)?;
    let n_records = keys.len() as u64;
    let mut bytes = Vec::with_capacity(keys.len() * RECORD_BYTES);
    for key in keys {
        bytes.push(REMOVED);
        bytes.extend(key.as_bytes());
    }
    file.write_all(&bytes)?;
    // Otherwise a crash of the machine could leave an empty list in the place of the old one.
    file.sync_all()?;
    fs::rename(&new, path)?;
    Ok((file, n_records))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    fn key(byte: usize) -> BlockKey {
        BlockKey::from_bytes([byte as u8; 32])
    }

    /// Against a plain set, over many restarts; the list does not grow with what has no effect.
    #[test]
    fn it_is_the_set_of_what_was_removed_last() {
        let dir = tempfile::tempdir().unwrap();
        let (mut random, mut expected) = (SplitMix64(1), HashSet::new());
        let mut list = Removed::open(dir.path(), u64::MAX, |_| true).unwrap();
        for operation in 0..20_000 {
            let key = key(random.index(200));
            match random.below(2) {
                0 => {
                    list.remove(&key).unwrap();
                    expected.insert(key);
                }
                _ => {
                    list.written(&key).unwrap();
                    expected.remove(&key);
                }
            }
            assert_eq!(list.has(&key), expected.contains(&key));
            if operation % 1_000 == 999 {
                let bytes = fs::metadata(dir.path().join(NAME)).unwrap().len();
                assert!(bytes <= (1024 + 2 * 200 + 1) * RECORD_BYTES as u64, "{bytes} bytes");
                list = Removed::open(dir.path(), u64::MAX, |_| true).unwrap();
                assert_eq!(list.keys().into_iter().collect::<HashSet<_>>(), expected);
            }
        }
        let few = Removed::open(dir.path(), u64::MAX, |key| key.as_bytes()[0] < 10).unwrap();
        assert!(few.keys().iter().all(|key| key.as_bytes()[0] < 10));
        assert_eq!(
            fs::metadata(dir.path().join(NAME)).unwrap().len(),
            (few.keys().len() * RECORD_BYTES) as u64
        );
    }

    /// Against a plain list of removals with the bytes at that time, over restarts, after which a removal counts as new.
    #[test]
    fn what_was_overwritten_leaves_the_list() {
        const CYCLE: u64 = 1_000;
        let dir = tempfile::tempdir().unwrap();
        let (mut random, mut expected) = (SplitMix64(2), HashMap::new());
        let (mut list, mut written, mut forgotten) =
            (Removed::open(dir.path(), CYCLE, |_| true).unwrap(), 0, 0);
        for operation in 0..50_000 {
            let key = key(random.index(250));
            match random.below(4) {
                0 => {
                    list.remove(&key).unwrap();
                    expected.insert(key, written);
                }
                1 => {
                    list.written(&key).unwrap();
                    expected.remove(&key);
                }
                _ => {
                    let bytes = random.below(20).into();
                    list.wrote(bytes).unwrap();
                    written += bytes;
                    let before = expected.len();
                    expected.retain(|_, at| written - *at < CYCLE);
                    forgotten += before - expected.len();
                }
            }
            assert_eq!(list.keys().into_iter().collect::<HashSet<_>>(), expected.keys().copied().collect());
            if operation % 5_000 == 4_999 {
                list = Removed::open(dir.path(), CYCLE, |_| true).unwrap();
                expected.values_mut().for_each(|at| *at = written);
                assert_eq!(
                    list.keys().into_iter().collect::<HashSet<_>>(),
                    expected.keys().copied().collect(),
                    "the file says the same"
                );
            }
        }
        assert!(forgotten > 1_000, "{forgotten}");
        let before = list.lock().order.len();
        (0..1_000).for_each(|_| list.remove(&key(0)).unwrap());
        assert!(list.lock().order.len() <= before + 1, "the same removal again takes no room");
    }

    #[test]
    fn a_torn_record_is_dropped_and_damage_harms_no_other_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let list = Removed::open(dir.path(), u64::MAX, |_| true).unwrap();
        (0..10).for_each(|byte| list.remove(&key(byte)).unwrap());
        let whole = fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(
                Removed::open(dir.path(), u64::MAX, |_| true).unwrap().keys().len(),
                cut / RECORD_BYTES
            );
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            fs::write(&path, &damaged).unwrap();
            let list = Removed::open(dir.path(), u64::MAX, |_| true).unwrap();
            assert!((0..10).filter(|byte| *byte != at / RECORD_BYTES).all(|byte| list.has(&key(byte))));
        }
    }
}
