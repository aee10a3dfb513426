//! The small entries of a disk store, in a file of their own beside the regions.
//!
//! A note of a deletion has a few bytes, and has to outlive the blocks that it hides. In the regions it would not: foyer overwrites those
//! that it finds at a restart in any order, so a note may go before blocks that are older. Here it stays, up to [`MOST`] entries.
//!
//! The file is a list of records, each of what was put or removed under a key. Every record is synced before the call returns. One
//! that was cut short by a crash is the last one, and is dropped. The entries are also in memory; their frames are checked by those
//! that read them, so a damaged entry is a miss.
use crate::{BlockKey, Bytes, Frame};
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

const NAME: &str = "kvist-store.small";

/// Then what was put longest ago goes. As much as a key's name may delete in 64 hours of a server with its default limits; about
/// 21 MB in memory.
const MOST: usize = 1 << 16;

/// That it takes in memory, at most: the frame, its allocation and both maps.
pub(crate) const MOST_BYTES: u64 = 360 * MOST as u64;

/// The longest block that counts as small.
const BODY_BYTES: usize = 16;
const FRAME_BYTES: usize = Frame::HEAD_BYTES + BODY_BYTES;

/// The length of the frame, the key, and the frame with zeros behind it.
const RECORD_BYTES: usize = 1 + 32 + FRAME_BYTES;
/// In place of a length.
const REMOVED: u8 = u8::MAX;

pub(crate) struct Small {
    dir: PathBuf,
    /// Held while the file is written and synced.
    file: Mutex<Records>,
    /// Held for a moment only: lookups need it.
    entries: Mutex<Entries>,
}

struct Records {
    file: File,
    n: usize,
}

#[derive(Default)]
struct Entries {
    most: usize,
    /// The frames, and when each was put.
    frames: HashMap<BlockKey, (u64, Bytes)>,
    /// The keys in the order in which they were put.
    order: BTreeMap<u64, BlockKey>,
    n_puts: u64,
}

impl Entries {
    fn put(&mut self, key: BlockKey, frame: Bytes) {
        self.remove(&key);
        self.n_puts += 1;
        self.frames.insert(key, (self.n_puts, frame));
        self.order.insert(self.n_puts, key);
        if self.frames.len() > self.most
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.frames.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &BlockKey) {
        if let Some((at, _)) = self.frames.remove(key) {
            self.order.remove(&at);
        }
    }

    fn replay(&mut self, bytes: &[u8]) {
        for record in bytes.chunks_exact(RECORD_BYTES) {
            let mut key = [0; 32];
            key.copy_from_slice(&record[1..33]);
            let key = BlockKey::from_bytes(key);
            match record[0] {
                REMOVED => self.remove(&key),
                length => {
                    // Another length is damage.
                    if let Some(frame) = record[33..].get(..length.into()) {
                        self.put(key, Bytes::copy_from_slice(frame));
                    }
                }
            }
        }
    }

    /// A list of what is here, oldest first.
    fn records(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.frames.len() * RECORD_BYTES);
        let frames = self.order.values().filter_map(|key| Some((key, &self.frames.get(key)?.1)));
        frames.for_each(|(key, frame)| bytes.extend(record(frame.len() as u8, key, frame)));
        bytes
    }
}

fn record(length: u8, key: &BlockKey, frame: &[u8]) -> [u8; RECORD_BYTES] {
    let mut record = [0; RECORD_BYTES];
    record[0] = length;
    record[1..33].copy_from_slice(key.as_bytes());
    record[33..33 + frame.len()].copy_from_slice(frame);
    record
}

impl Small {
    pub fn open(dir: &Path) -> io::Result<Small> {
        Self::with(dir, MOST)
    }

    fn with(dir: &Path, most: usize) -> io::Result<Small> {
        let bytes = match fs::read(dir.join(NAME)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        let mut entries = Entries { most, ..Entries::default() };
        entries.replay(&bytes);
        let file = Mutex::new(rewrite(dir, &entries.records())?);
        Ok(Small { dir: dir.into(), file, entries: Mutex::new(entries) })
    }

    /// Whether a frame belongs here.
    pub fn is_for(frame: &Frame) -> bool {
        frame.len() <= FRAME_BYTES
    }

    /// No method leaves the entries half changed, so a panic elsewhere does no harm.
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn has(&self, key: &BlockKey) -> bool {
        self.entries().frames.contains_key(key)
    }

    pub fn get(&self, key: &BlockKey) -> Option<Frame> {
        self.entries().frames.get(key).map(|(_, frame)| Frame::split(frame.clone()))
    }

    /// Puts a frame that [belongs here](Self::is_for). Blocks until it is on the disk.
    ///
    /// # Errors
    /// The file cannot be written. Then what was here is here. So for `remove`.
    pub fn put(&self, key: BlockKey, frame: &Frame) -> io::Result<()> {
        let frame = frame.to_bytes();
        let length = u8::try_from(frame.len()).map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
        self.write(&record(length, &key, &frame), |entries| entries.put(key, frame))
    }

    /// The same for a removal.
    pub fn remove(&self, key: &BlockKey) -> io::Result<()> {
        self.write(&record(REMOVED, key, &[]), |entries| entries.remove(key))
    }

    fn write(&self, record: &[u8], change: impl FnOnce(&mut Entries)) -> io::Result<()> {
        let mut list = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let shorter = {
            let entries = self.entries();
            // Most of the records have no effect any more.
            (list.n > 1024 + 2 * entries.frames.len()).then(|| entries.records())
        };
        if let Some(records) = shorter {
            *list = rewrite(&self.dir, &records)?;
        }
        // A record that was cut short by a full disk is overwritten.
        let at = (list.n * RECORD_BYTES) as u64;
        list.file.seek(SeekFrom::Start(at))?;
        list.file.write_all(record)?;
        list.file.sync_data()?;
        list.n += 1;
        change(&mut self.entries());
        Ok(())
    }
}

/// Writes a list of these records alone; the file has the old or the new one.
fn rewrite(dir: &Path, records: &[u8]) -> io::Result<Records> {
    let new = dir.join("kvist-store.small.new");
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).open(&new)?;
    file.write_all(records)?;
    file.sync_all()?;
    fs::rename(&new, dir.join(NAME))?;
    // The name, too.
    #[cfg(unix)]
    File::open(dir)?.sync_all()?;
    Ok(Records { file, n: records.len() / RECORD_BYTES })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_testing::SplitMix64;

    fn key(byte: usize) -> BlockKey {
        BlockKey::from_bytes([byte as u8; 32])
    }

    fn frame(number: u64) -> Frame {
        let length = FRAME_BYTES - number as usize % 20;
        Frame::split((0..length).map(|at| (number >> (at % 8)) as u8).collect::<Vec<u8>>().into())
    }

    /// Against a plain list, over restarts: the oldest go when there are too many, and the file does not grow with what has no effect.
    #[test]
    fn it_is_the_list_of_what_was_put_last() {
        let dir = tempfile::tempdir().unwrap();
        let (mut random, mut plain) = (SplitMix64(1), Vec::<(BlockKey, Frame)>::new());
        let (mut small, mut n_dropped) = (Small::with(dir.path(), 50).unwrap(), 0);
        for operation in 0..2_500_u64 {
            let key = key(random.index(80));
            plain.retain(|(other, _)| *other != key);
            match random.below(4) {
                0 => small.remove(&key).unwrap(),
                _ => {
                    small.put(key, &frame(operation)).unwrap();
                    plain.push((key, frame(operation)));
                }
            }
            if plain.len() > 50 {
                plain.remove(0);
                n_dropped += 1;
            }
            if operation % 500 == 499 {
                let bytes = fs::metadata(dir.path().join(NAME)).unwrap().len();
                assert!(bytes <= (1024 + 2 * 50 + 2) * RECORD_BYTES as u64, "{bytes} bytes");
                small = Small::with(dir.path(), 50).unwrap();
            }
            assert_eq!(small.entries().frames.len(), plain.len());
            plain.iter().for_each(|(key, frame)| assert_eq!(small.get(key).as_ref(), Some(frame)));
        }
        assert!(n_dropped > 100, "{n_dropped}");
    }

    #[test]
    fn the_bound_holds_for_what_is_allocated() {
        let mut kept = None;
        let allocated = allocation_counter::measure(|| {
            let mut entries = Entries { most: MOST, ..Entries::default() };
            for number in 0..MOST as u64 + 100 {
                let frame = Bytes::from(vec![number as u8; FRAME_BYTES]);
                entries.put(BlockKey::of_object("note", &[&number.to_le_bytes()]), frame);
            }
            kept = Some(entries);
        });
        let bytes = allocated.bytes_current as u64;
        assert!((MOST_BYTES / 3..MOST_BYTES).contains(&bytes), "{bytes}");
        drop(kept);
    }

    #[test]
    fn a_torn_record_is_dropped_and_damage_harms_no_other_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(NAME);
        let small = Small::open(dir.path()).unwrap();
        (0..4).for_each(|i| small.put(key(i), &frame(i as u64)).unwrap());
        let whole = fs::read(&path).unwrap();
        for cut in (0..=whole.len()).step_by(7).chain([whole.len()]) {
            fs::write(&path, &whole[..cut]).unwrap();
            let small = Small::open(dir.path()).unwrap();
            assert_eq!(small.entries().frames.len(), cut / RECORD_BYTES);
        }
        for at in (0..whole.len()).step_by(3) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x80;
            fs::write(&path, &damaged).unwrap();
            let small = Small::open(dir.path()).unwrap();
            for i in (0..4).filter(|i| *i != at / RECORD_BYTES) {
                assert_eq!(small.get(&key(i)), Some(frame(i as u64)), "{at}");
            }
        }
    }
}
