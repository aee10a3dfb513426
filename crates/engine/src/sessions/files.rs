//! The directory of a server's sessions.
//!
//! ```text
//! kvist-sessions.lock        held while a process uses the directory
//! origin.json                what all of its K and V depend on
//! sessions/sess-….json       a session: its tokens, messages, owner, parent
//! saved/HASH/NAME.json       a session that its owner saved by name; HASH is that of the owner
//! blocks/12/1234….kvb        K and V of a block in a frame, under its content key: sessions that share it share the file
//! ```
//!
//! Every file is written beside its name and renamed, those of sessions after a sync: whatever happens, the name has
//! the old content or the new one. A session's file says nothing about blocks, because their keys follow from its tokens; a block that is
//! missing or damaged is computed again.
use super::store::SessionRecord;
use super::{History, SessionId};
use crate::Error;
use crate::saved::Origin;
use kvist_model::hash;
use kvist_store::{BlockKey, Bytes, Check, Frame, KeyChain, Opened};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

#[cfg(test)]
mod tests;

const FORMAT: &str = "kvist-server-session";
const VERSION: u64 = 1;
const PARTIAL: &str = ".partial";

/// The first line of a session's file.
#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    version: u64,
    /// Of the second line.
    blake3: String,
}

/// Who needs a block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Session(SessionId),
    Saved(PathBuf),
}

#[derive(Default)]
struct Blocks {
    /// How many holders need a block, and whether its file is there.
    known: HashMap<BlockKey, (usize, bool)>,
    held: HashMap<Holder, Vec<BlockKey>>,
}

pub(super) struct SessionFiles {
    dir: PathBuf,
    /// What the keys of blocks depend on besides tokens, layer group and salt.
    fingerprint: Vec<u8>,
    block_tokens: usize,
    n_groups: u16,
    blocks: Mutex<Blocks>,
    partials: AtomicU64,
    lock: File,
}

/// A session that an earlier process left.
pub(super) type Found = (SessionRecord, History);

impl SessionFiles {
    /// Opens or creates a directory, and reads its sessions. Removes the blocks that none of them needs, and those that another version
    /// of kvist or device has computed (they have another `fingerprint`): a text is not continued from K and V that this process would
    /// not have computed, and none get into a tier. A session whose file is damaged is left out, and its file renamed.
    pub fn open(
        dir: &Path,
        (origin, fingerprint): (&Origin, Vec<u8>),
        (block_tokens, n_groups): (u32, u16),
        vocab: usize,
    ) -> Result<(Self, Vec<Found>), Error> {
        let write = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Write { path, source }
        };
        let lock_path = dir.join("kvist-sessions.lock");
        if fs::metadata(dir).is_ok_and(|found| !found.is_dir()) {
            let what = "is not a directory: give one of another name, which is created";
            return Err(Error::Usage(format!("{} {what}", dir.display())));
        }
        create_private_dir(dir).map_err(write(dir))?;
        let mut entries = fs::read_dir(dir).map_err(write(dir))?;
        if !lock_path.exists() && entries.next().is_some() {
            let what =
                format!("{} contains other files: give an empty directory for sessions", dir.display());
            return Err(Error::Usage(what));
        }
        let lock = options().truncate(false).open(&lock_path).map_err(write(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let what = format!(
                    "another process uses the sessions in {}: stop it, or give another directory",
                    dir.display()
                );
                return Err(Error::Usage(what));
            }
            Err(TryLockError::Error(source)) => return Err(Error::Write { path: lock_path, source }),
        }
        for name in ["sessions", "saved", "blocks"] {
            create_private_dir(&dir.join(name)).map_err(write(dir))?;
        }
        let json = serde_json::to_string(origin).map_err(|error| Error::Usage(error.to_string()))?;
        let files = SessionFiles {
            dir: dir.to_path_buf(),
            fingerprint,
            block_tokens: block_tokens.max(1) as usize,
            n_groups,
            blocks: Mutex::default(),
            partials: AtomicU64::new(0),
            lock,
        };
        let found = files.read_all(vocab)?;
        files.check_origin(origin, &json, found.is_empty())?;
        files.remove_unneeded().map_err(write(dir))?;
        let sessions = found.into_iter().filter_map(|(holder, found)| match holder {
            Holder::Session(_) => Some(found),
            Holder::Saved(_) => None,
        });
        Ok((files, sessions.collect()))
    }

    /// Lets another process have the directory.
    pub fn release(&self) {
        // It is released when the file is closed, too.
        let _ = self.lock.unlock();
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sessions of another model cannot be continued, and a directory has those of one model.
    fn check_origin(&self, now: &Origin, json: &str, is_empty: bool) -> Result<(), Error> {
        let path = self.dir.join("origin.json");
        if !is_empty {
            let text =
                fs::read_to_string(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
            let bad = |error: serde_json::Error| Error::Malformed {
                file: path.display().to_string(),
                what: error.to_string(),
            };
            return serde_json::from_str::<Origin>(&text)
                .map_err(bad)?
                .check(&path.display().to_string(), now);
        }
        self.replace(&path, &[json.as_bytes()], true).map_err(|source| Error::Write { path, source })
    }

    /// All sessions, saved ones included, with what they hold.
    fn read_all(&self, vocab: usize) -> Result<Vec<(Holder, Found)>, Error> {
        let mut found = Vec::new();
        let mut folders = vec![self.dir.join("sessions")];
        let read = |path: &Path, source: io::Error| Error::Read { path: path.to_path_buf(), source };
        folders.extend(paths(&self.dir.join("saved")).map_err(|error| read(&self.dir, error))?);
        for path in folders.iter().flat_map(|folder| paths(folder).unwrap_or_default()) {
            if path.to_string_lossy().ends_with(PARTIAL) {
                let _ = fs::remove_file(&path);
            }
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let (record, history) = match self.read_record(&path, vocab) {
                Ok(Some(read)) => read,
                Ok(None) => {
                    let aside = path.with_extension("damaged");
                    tracing::error!(target: "kvist::server", "{} is damaged: renamed to {}", path.display(), aside.display());
                    let _ = fs::rename(&path, aside);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let holder = match path.starts_with(&folders[0]) {
                true => match SessionId::parse(&record.id) {
                    Some(id) if path == self.session_path(id) => Holder::Session(id),
                    _ => continue,
                },
                false => Holder::Saved(path),
            };
            self.hold(holder.clone(), &record.salt, &history.tokens);
            found.push((holder, (record, history)));
        }
        Ok(found)
    }

    /// `None` if the file is not as it was written.
    fn read_record(&self, path: &Path, vocab: usize) -> Result<Option<Found>, Error> {
        let bytes = fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
        let Some((head, body)) = std::str::from_utf8(&bytes).ok().and_then(|text| text.split_once('\n'))
        else {
            return Ok(None);
        };
        let Ok(head) = serde_json::from_str::<Head>(head) else { return Ok(None) };
        if head.format == FORMAT && head.version > VERSION {
            let what = format!(
                "a session of format {}, and this kvist reads {VERSION}: use a newer kvist",
                head.version
            );
            return Err(Error::Malformed { file: path.display().to_string(), what });
        }
        if head.format != FORMAT || head.blake3 != hash(&[body.as_bytes()]) {
            return Ok(None);
        }
        let Ok(mut record) = serde_json::from_str::<SessionRecord>(body) else { return Ok(None) };
        let history = std::mem::take(&mut record.history).restore(vocab);
        Ok(history.map(|history| (record, history)))
    }

    fn session_path(&self, id: SessionId) -> PathBuf {
        self.dir.join("sessions").join(format!("{id}.json"))
    }

    fn saved_path(&self, owner: &str, name: &str) -> PathBuf {
        self.dir.join("saved").join(&hash(&[owner.as_bytes()])[..32]).join(format!("{name}.json"))
    }

    /// Writes a session, in place of its older state.
    pub fn write(&self, id: SessionId, record: &SessionRecord) -> io::Result<()> {
        self.write_record(&self.session_path(id), record)?;
        self.hold(Holder::Session(id), &record.salt, &record.history.tokens);
        Ok(())
    }

    /// Whether a session has a file.
    pub fn has(&self, id: SessionId) -> bool {
        self.session_path(id).exists()
    }

    /// Writes a session under a name of its owner, in place of what was there. Refuses more than `most` names.
    pub fn save(&self, name: &str, record: &SessionRecord, most: usize) -> io::Result<bool> {
        let path = self.saved_path(&record.owner, name);
        let folder = path.parent().unwrap_or(&self.dir);
        create_private_dir(folder)?;
        if !path.exists() && paths(folder)?.len() >= most {
            return Ok(false);
        }
        self.write_record(&path, record)?;
        self.hold(Holder::Saved(path), &record.salt, &record.history.tokens);
        Ok(true)
    }

    /// The session that `owner` saved under a name; `None` if there is none.
    pub fn load(&self, owner: &str, name: &str, vocab: usize) -> Result<Option<Found>, Error> {
        let path = self.saved_path(owner, name);
        match self.read_record(&path, vocab) {
            Ok(Some((record, history))) if record.owner == owner => Ok(Some((record, history))),
            Ok(_) => {
                let what = "the file is torn or has changed since it was saved".into();
                Err(Error::Malformed { file: name.into(), what })
            }
            Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write_record(&self, path: &Path, record: &SessionRecord) -> io::Result<()> {
        let body = serde_json::to_string(record)?;
        let head = Head { format: FORMAT.into(), version: VERSION, blake3: hash(&[body.as_bytes()]) };
        self.replace(path, &[serde_json::to_string(&head)?.as_bytes(), b"\n", body.as_bytes()], true)
    }

    /// Removes a session, and the blocks that nothing else needs.
    pub fn remove(&self, id: SessionId) -> io::Result<()> {
        let removed = match fs::remove_file(self.session_path(id)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        self.hold_keys(Holder::Session(id), Vec::new());
        removed
    }

    /// The keys of a text's full blocks, by layer group.
    pub fn keys(&self, salt: &str, tokens: &[u32]) -> Vec<Vec<BlockKey>> {
        let of_group = |group: u16| [&self.fingerprint[..], &group.to_le_bytes()].concat();
        let chain = |group| KeyChain::root(&of_group(group), salt);
        (0..self.n_groups).map(|group| chain(group).keys(tokens, self.block_tokens)).collect()
    }

    fn hold(&self, holder: Holder, salt: &str, tokens: &[u32]) {
        self.hold_keys(holder, self.keys(salt, tokens).concat());
    }

    fn hold_keys(&self, holder: Holder, keys: Vec<BlockKey>) {
        let mut gone = Vec::new();
        let mut blocks = self.blocks();
        for key in &keys {
            blocks.known.entry(*key).or_default().0 += 1;
        }
        let old = match keys.is_empty() {
            true => blocks.held.remove(&holder),
            false => blocks.held.insert(holder, keys),
        };
        for key in old.into_iter().flatten() {
            if let Some((holders, is_here)) = blocks.known.get_mut(&key) {
                *holders -= 1;
                if *holders == 0 {
                    if *is_here {
                        gone.push(key);
                    }
                    blocks.known.remove(&key);
                }
            }
        }
        for key in gone {
            // A file that stays is removed at the next start.
            let _ = fs::remove_file(self.block_path(&key));
        }
    }

    pub fn has_block(&self, key: &BlockKey) -> bool {
        self.blocks().known.get(key).is_some_and(|(_, is_here)| *is_here)
    }

    fn block_path(&self, key: &BlockKey) -> PathBuf {
        let name = key.to_string();
        self.dir.join("blocks").join(&name[..2]).join(format!("{name}.kvb"))
    }

    /// Stores a block that a session needs.
    pub fn put_block(&self, key: &BlockKey, bytes: Vec<u8>) -> io::Result<()> {
        let path = self.block_path(key);
        create_private_dir(path.parent().unwrap_or(&self.dir))?;
        let frame = Frame::new(key, bytes.into(), None, Check::Blake3);
        // Not synced: a block that a crash of the machine tears is noticed, and computed again.
        self.replace(&path, &[&frame.head, &frame.body], false)?;
        match self.blocks().known.get_mut(key) {
            Some((_, is_here)) => *is_here = true,
            // Its last session went meanwhile.
            None => fs::remove_file(&path)?,
        }
        Ok(())
    }

    /// The bytes of a block, if they are those that were stored. A damaged file is removed.
    pub fn block(&self, key: &BlockKey) -> Option<Bytes> {
        let path = self.block_path(key);
        let opened = fs::read(&path)
            .map(|bytes| Frame::split(bytes.into()).open(key, SystemTime::now(), Check::Blake3));
        if let Ok(Ok(Opened::Block(bytes))) = opened {
            return Some(bytes);
        }
        tracing::warn!(target: "kvist::server", "{} is damaged or missing: its tokens are computed again", path.display());
        let _ = fs::remove_file(&path);
        if let Some((_, is_here)) = self.blocks().known.get_mut(key) {
            *is_here = false;
        }
        None
    }

    /// Compares the files of blocks with those that sessions need.
    fn remove_unneeded(&self) -> io::Result<()> {
        let mut blocks = self.blocks();
        for folder in paths(&self.dir.join("blocks"))? {
            for path in paths(&folder)? {
                let key = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".kvb"));
                match key.and_then(parse_key).and_then(|key| blocks.known.get_mut(&key)) {
                    Some((_, is_here)) => *is_here = true,
                    None => fs::remove_file(&path)?,
                }
            }
        }
        Ok(())
    }

    fn replace(&self, path: &Path, parts: &[&[u8]], sync: bool) -> io::Result<()> {
        let number = self.partials.fetch_add(1, Ordering::Relaxed);
        let partial = PathBuf::from(format!("{}.{number}{PARTIAL}", path.display()));
        let write = || {
            let mut file = options().truncate(true).open(&partial)?;
            parts.iter().try_for_each(|part| file.write_all(part))?;
            if sync {
                file.sync_all()?;
            }
            fs::rename(&partial, path)?;
            // The name is on disk only when the folder is; not every system can sync one.
            if sync && let Some(Ok(folder)) = path.parent().map(File::open) {
                let _ = folder.sync_all();
            }
            Ok(())
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&partial);
        })
    }
}

/// Sessions are the private texts of their users.
fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

fn create_private_dir(dir: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(dir)
}

fn paths(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn parse_key(text: &str) -> Option<BlockKey> {
    let mut bytes = [0; 32];
    let digits = text.as_bytes().chunks_exact(2);
    if text.len() != 64 || !text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(digits) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(BlockKey::from_bytes(bytes))
}
