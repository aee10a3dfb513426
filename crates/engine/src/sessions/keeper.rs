//! Keeps sessions in a directory, so that they survive a restart of the process.
//!
//! A thread writes every session after each change: its history first, then those of its blocks that the prefix index
//! has and no file has yet. While a session generates, its file has the state before. Answers never wait for the disk;
//! [`SessionKeeper::flush`] does. A disk that fails costs a line in the log, and what it did not take.
//!
//! Before a session continues, [`SessionKeeper::warm`] puts the blocks that the cache lacks back into it.
use super::files::SessionFiles;
use super::store::{Change, SessionRecord};
use super::{SessionError, SessionId, SessionInfo, SessionStore, Timestamp};
use crate::Error;
use crate::executor::PagedConfig;
use crate::saved::Origin;
use crate::serving::{Begun, Engine, TextBlocks, fingerprint};
use kvist_store::BlockKey;
use std::collections::BTreeSet;
use std::iter::Peekable;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Bytes that are copied between two steps: a copy of so many takes a few milliseconds.
const COPY_BYTES: usize = 16 << 20;
const TARGET: &str = "kvist::server";

/// Sessions in a directory.
pub struct SessionKeeper {
    kept: Arc<Kept>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Kept {
    engine: Engine,
    store: Arc<SessionStore>,
    files: SessionFiles,
    block_tokens: u32,
    /// Some layers see a window: their blocks are of use only together.
    has_windows: bool,
}

/// What was saved of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptSession {
    pub n_tokens: usize,
    /// How many tokens' K and V are in files.
    pub stored_tokens: usize,
}

impl SessionKeeper {
    /// Opens or creates a directory, adds the sessions in it to `store`, and saves all changes from now on. `paged` is
    /// the engine's cache, and `numerics` that of its [device](kvist_device::Footprint::numerics), and whatever else its K and V depend
    /// on to the last bit: K and V of a directory that was used with others are computed again.
    ///
    /// # Errors
    /// The directory cannot be written to, has other files, belongs to another process, or its sessions were saved with
    /// another model or other storages; the engine has no prefix index.
    pub fn open(
        dir: &Path,
        engine: &Engine,
        store: &Arc<SessionStore>,
        (origin, numerics): (&Origin, &str),
        paged: &PagedConfig,
    ) -> Result<Self, Error> {
        if paged.prefix.is_none() {
            return Err(Error::Usage("sessions can be kept only in a cache with a prefix index".into()));
        }
        let model = engine.model().config();
        let groups = paged.cache.groups(model);
        let shape = (paged.block_tokens, u16::try_from(groups.len()).unwrap_or(u16::MAX));
        // Blocks in another order of channels are not found, as those of another machine are not.
        let computed = origin.in_cache(engine.model(), paged.cache.k)?;
        let fingerprint = fingerprint(&computed, paged.block_tokens, numerics)?;
        let (files, found) = SessionFiles::open(dir, (origin, fingerprint), shape, model.vocab)?;
        if !found.is_empty() {
            tracing::info!(target: TARGET, "{} sessions of an earlier run are in {}", found.len(), dir.display());
        }
        // First the channel, so that sessions that have expired meanwhile are removed from the directory.
        let changes = store.changes();
        store.restore(Timestamp::now(), found);
        let kept = Arc::new(Kept {
            engine: engine.clone(),
            store: store.clone(),
            files,
            block_tokens: paged.block_tokens,
            has_windows: groups.iter().any(|group| group.visibility.window.is_some()),
        });
        let thread = std::thread::Builder::new().name("kvist-sessions".into()).spawn({
            let kept = kept.clone();
            move || kept.run(&changes)
        });
        let thread =
            thread.map_err(|error| Error::Usage(format!("cannot start the thread of sessions: {error}")))?;
        Ok(SessionKeeper { kept, thread: Mutex::new(Some(thread)) })
    }

    /// Waits until everything before this call is written. Blocks this thread.
    pub fn flush(&self) {
        let (sender, done) = channel();
        self.kept.store.tell(Change::Flush(sender));
        // If the thread has ended, nothing is left to wait for.
        let _ = done.recv();
    }

    /// Writes everything, and stops. Later changes are lost. Blocks this thread.
    pub fn close(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            self.kept.store.tell(Change::Stop);
            let _ = thread.join();
            self.kept.files.release();
        }
    }

    /// Puts the blocks of `tokens` that files have and the cache lacks into the cache. Blocks this thread, and the
    /// engine between steps for some milliseconds at a time. Without a file it only asks the engine.
    pub fn warm(&self, salt: &str, tokens: &[u32]) {
        if let Err(error) = self.kept.warm(salt, tokens) {
            tracing::warn!(target: TARGET, "blocks of a session cannot be restored: {error}");
        }
    }

    /// Saves a session as it is now under a name of its owner, in place of what was there.
    ///
    /// # Errors
    /// There is no such session, it is generating, the owner has `most` names already, or the disk failed.
    pub fn save(
        &self,
        owner: &str,
        id: SessionId,
        name: &str,
        most: usize,
    ) -> Result<KeptSession, SessionError> {
        let at = Timestamp::now();
        let (info, _) = self.kept.store.get(at, owner, id)?;
        let record = match self.kept.store.record(at, id) {
            Some((record, true)) => record,
            Some((_, false)) => return Err(SessionError::Busy { id, generates: info.running }),
            None => return Err(SessionError::Deleted { id }),
        };
        let failed =
            |error: std::io::Error| SessionError::NotSaved { name: name.into(), problem: error.to_string() };
        if !self.kept.files.save(name, &record, most).map_err(failed)? {
            return Err(SessionError::TooManyFiles { max: most });
        }
        self.kept.save_blocks(&record);
        // The session itself is in its own file then, too.
        self.flush();
        let n_tokens = record.history.tokens.len();
        Ok(KeptSession { n_tokens, stored_tokens: self.kept.stored_tokens(&record) })
    }

    /// Makes a session of what `owner` saved under a name.
    ///
    /// # Errors
    /// There is no such name, its file has changed, or the owner's limits are reached.
    pub fn load(&self, owner: &Arc<str>, name: &str) -> Result<(SessionInfo, KeptSession), SessionError> {
        let vocab = self.kept.engine.model().config().vocab;
        let found = self.kept.files.load(owner, name, vocab)?;
        let Some((record, history)) = found else {
            return Err(SessionError::NoSuchFile { name: name.into() });
        };
        let stored_tokens = self.kept.stored(&record.salt, &history.tokens);
        let kept = KeptSession { n_tokens: history.tokens.len(), stored_tokens };
        Ok((self.kept.store.create_from(Timestamp::now(), owner, record, history)?, kept))
    }
}

impl Drop for SessionKeeper {
    fn drop(&mut self) {
        self.close();
    }
}

impl Kept {
    fn run(&self, changes: &Receiver<Change>) {
        while let Ok(first) = changes.recv() {
            // Many changes of a session are written once.
            let (mut ids, mut waiting, mut stops) = (BTreeSet::new(), Vec::new(), false);
            for change in std::iter::once(first).chain(changes.try_iter()) {
                match change {
                    Change::Session(id) => drop(ids.insert(id)),
                    Change::Flush(reply) => waiting.push(reply),
                    Change::Stop => stops = true,
                }
            }
            ids.into_iter().for_each(|id| self.write(id));
            for reply in waiting {
                let _ = reply.send(());
            }
            if stops {
                return;
            }
        }
    }

    fn write(&self, id: SessionId) {
        let record = match self.store.record(Timestamp::now(), id) {
            // The file keeps the state before: the end of what the session does is another change.
            Some((_, false)) if self.files.has(id) => return,
            Some((record, _)) => Some(record),
            None => None,
        };
        let written = match &record {
            Some(record) => self.files.write(id, record),
            None => self.files.remove(id),
        };
        if let Err(error) = written {
            tracing::error!(target: TARGET, "session {id} cannot be saved, and a restart would lose its last change: {error}");
        }
        // The K and V of an answer are complete when it ends.
        if let Some(record) = record.filter(|_| self.store.is_idle(id)) {
            self.save_blocks(&record);
        }
    }

    /// Writes the blocks that the cache has and files lack.
    fn save_blocks(&self, record: &SessionRecord) {
        let tokens = &record.history.tokens;
        let keys = self.files.keys(&record.salt, tokens);
        let missing = |g: usize| keys[g].iter().enumerate().filter(|(_, key)| !self.files.has_block(key));
        let mut wanted: BTreeSet<(u16, usize)> =
            (0..keys.len()).flat_map(|g| missing(g).map(move |(i, _)| (g as u16, i))).collect();
        while !wanted.is_empty() {
            let (salt, text, asked) = (record.salt.clone(), tokens.clone(), wanted.clone());
            let block_tokens = self.block_tokens;
            let copied = self.engine.blocking_inspect(move |state| {
                state.export_blocks(&salt, &text, block_tokens, &asked, COPY_BYTES)
            });
            let blocks = match copied {
                Some(Ok(blocks)) if !blocks.is_empty() => blocks,
                Some(Err(error)) => {
                    return tracing::error!(target: TARGET, "K and V of session {} cannot be saved: {error}", record.id);
                }
                // The cache has no more of them, or the engine has ended.
                _ => return,
            };
            for (at, bytes) in blocks {
                wanted.remove(&at);
                if let Err(error) = self.files.put_block(&keys[usize::from(at.0)][at.1], bytes) {
                    return tracing::error!(target: TARGET, "K and V of session {} cannot be saved: {error}", record.id);
                }
            }
        }
    }

    fn stored_tokens(&self, record: &SessionRecord) -> usize {
        self.stored(&record.salt, &record.history.tokens)
    }

    /// How many tokens, from the first on, have K and V in files, in the layer group that has the most.
    fn stored(&self, salt: &str, tokens: &[u32]) -> usize {
        let keys = self.files.keys(salt, tokens);
        let here = |group: &Vec<_>| group.iter().take_while(|key| self.files.has_block(key)).count();
        keys.iter().map(here).max().unwrap_or(0) * self.block_tokens as usize
    }

    fn warm(&self, salt: &str, tokens: &[u32]) -> Result<(), Error> {
        let block_tokens = self.block_tokens;
        let inspect_cached = || {
            let (salt, tokens) = (salt.to_owned(), tokens.to_vec());
            self.engine.blocking_inspect(move |state| state.cached_tokens(&salt, &tokens))
        };
        let keys = self.files.keys(salt, tokens);
        let is_here =
            |at: usize| keys.iter().any(|group| group.get(at).is_some_and(|key| self.files.has_block(key)));
        let Some(mut cached) = inspect_cached() else { return Ok(()) };
        if self.has_windows {
            // A damaged file is removed, and then fewer blocks may do.
            while self.warm_at_once(salt, tokens, &keys)? {}
            return Ok(());
        }
        loop {
            let first = cached / block_tokens as usize;
            if !is_here(first) {
                return Ok(());
            }
            let from = (first..keys.iter().map(Vec::len).max().unwrap_or(0))
                .flat_map(|at| (0..keys.len()).map(move |g| (g as u16, at)));
            let blocks = self.read(&keys, &mut from.peekable());
            let (salt, text) = (salt.to_owned(), tokens.to_vec());
            let imported = self
                .engine
                .blocking_inspect(move |state| state.import_blocks(&salt, &text, block_tokens, &blocks));
            match imported.transpose()? {
                Some(now) if now > cached => cached = now,
                _ => return Ok(()),
            }
        }
    }

    /// The same where blocks are of use only together: layers with windows have some of them only. They are read and copied in parts all
    /// the same, and found when all are there. Returns whether a file was damaged, so that nothing was restored.
    fn warm_at_once(&self, salt: &str, tokens: &[u32], keys: &[Vec<BlockKey>]) -> Result<bool, Error> {
        let here = |g: usize| keys[g].iter().enumerate().filter(|(_, key)| self.files.has_block(key));
        let has: BTreeSet<(u16, usize)> =
            (0..keys.len()).flat_map(|g| here(g).map(move |(at, _)| (g as u16, at))).collect();
        if has.is_empty() {
            return Ok(false);
        }
        let (salt, text, block_tokens) = (salt.to_owned(), tokens.to_vec(), self.block_tokens);
        let begun =
            self.engine.blocking_inspect(move |state| state.begin_import(&salt, &text, block_tokens, &has));
        let Some(Begun { id, missing }) = begun.transpose()?.flatten() else { return Ok(false) };
        let asked = missing.clone();
        let mut missing = missing.into_iter().peekable();
        while missing.peek().is_some() {
            let blocks = self.read(keys, &mut missing);
            let goes_on = self.engine.blocking_inspect(move |state| state.continue_import(id, &blocks));
            if goes_on.transpose()? != Some(true) {
                return Ok(false);
            }
        }
        // If a block is missing, this gives the cells back.
        self.engine.blocking_inspect(move |state| state.end_import(id)).transpose()?;
        Ok(asked.iter().any(|&(g, at)| !self.files.has_block(&keys[usize::from(g)][at])))
    }

    /// Reads the next of these blocks that files have, about [`COPY_BYTES`] of them.
    fn read(
        &self,
        keys: &[Vec<BlockKey>],
        wanted: &mut Peekable<impl Iterator<Item = (u16, usize)>>,
    ) -> TextBlocks {
        let (mut blocks, mut bytes) = (TextBlocks::new(), 0);
        while let Some((g, at)) = wanted.next_if(|_| bytes < COPY_BYTES) {
            let key = keys.get(usize::from(g)).and_then(|group| group.get(at));
            let Some(key) = key.filter(|key| self.files.has_block(key)) else { continue };
            if let Some(block) = self.files.block(key) {
                bytes += block.len();
                blocks.insert((g, at), block.to_vec());
            }
        }
        blocks
    }
}
