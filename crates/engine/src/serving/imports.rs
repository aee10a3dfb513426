//! K and V of a text's full blocks, into the cache, between steps.
//!
//! What is imported becomes part of the prefix index, as if a request had computed it, so the next request that begins with this text
//! hits it. A block of one layer group is `(group, number of the block in the text)`.
//!
//! An import takes the cells of all its blocks when it begins, and says which blocks they wait for: of a layer group with a sliding window
//! those alone that later queries see. The bytes come in parts, as many between two steps as the caller likes. Nothing of an import is
//! found before it ends, and it is given up before a step that could need its cells.
use super::EngineState;
use super::blocks::{TextBlocks, wait};
use crate::Error;
use kvist_cache::kinds::Visibility;
use kvist_cache::{CellRun, Content, GroupId, Loading, Moment, Occupancy, Refused, SeqId};
use kvist_device::{DeviceError, HostBlock, Transfers};
use std::collections::{BTreeMap, BTreeSet};

/// The sequences of imports, from here on down. The scheduler numbers its own from 0 on, and would need centuries to get here.
const LAST: u32 = u32::MAX;

/// Names an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImportId(SeqId);

/// The imports that have begun.
#[derive(Default)]
pub struct Imports {
    open: BTreeMap<ImportId, Import>,
    n_begun: u32,
}

struct Import {
    salt: String,
    /// Up to the end of the last block.
    tokens: Vec<u32>,
    block_tokens: u32,
    /// Number of the first block.
    first: usize,
    loading: Loading,
    missing: BTreeSet<(u16, usize)>,
}

/// An import that has begun.
#[derive(Debug, PartialEq, Eq)]
pub struct Begun {
    pub id: ImportId,
    /// The blocks that it waits for.
    pub missing: Vec<(u16, usize)>,
}

impl EngineState {
    /// Puts blocks of `tokens` into the cache, after those that it has, as far as `blocks` go without a gap. Evicts
    /// cached blocks that no request uses, if there is no other room. Returns how many tokens are cached now.
    ///
    /// The caller knows that the bytes are those of this text, under this model and these storages, and, if the engine has tiers, that
    /// this version computed them on such a device: tiers that others share may get what is computed behind them.
    ///
    /// # Errors
    /// A block is not as long as the cache's, or the device cannot copy. The cache then has what it had.
    pub fn import_blocks(
        &mut self,
        salt: &str,
        tokens: &[u32],
        block_tokens: u32,
        blocks: &TextBlocks,
    ) -> Result<usize, Error> {
        let has = blocks.keys().copied().collect();
        let Some(Begun { id, .. }) = self.begin_import(salt, tokens, block_tokens, &has)? else {
            return Ok(self.cached_tokens(salt, tokens));
        };
        self.continue_import(id, blocks)?;
        self.end_import(id)
    }

    /// Begins to import the blocks `has` of `tokens`, after those that the cache has, as far as they go without a gap and as far as the
    /// cache has room. `None` if that is no block at all.
    ///
    /// # Errors
    /// The cache refuses the text, which would be a defect.
    pub fn begin_import(
        &mut self,
        salt: &str,
        tokens: &[u32],
        block_tokens: u32,
        has: &BTreeSet<(u16, usize)>,
    ) -> Result<Option<Begun>, Error> {
        let at = Moment { now_ns: self.now_ns() };
        let whole = tokens.len() - tokens.len() % block_tokens as usize;
        let with_next: Vec<u32> = tokens[..whole].iter().copied().chain([0]).collect();
        let id = ImportId(SeqId(LAST - self.imports.n_begun % 1024));
        if self.imports.open.contains_key(&id) {
            return Ok(None); // more at a time than there are numbers
        }
        let Some(mut prefixes) = self.scheduler.cache_mut().prefixes() else { return Ok(None) };
        let hit = prefixes.open_again(id.0, salt, &Content::Tokens(&with_next), at)?.hit_tokens;
        self.imports.n_begun += 1;
        let loading = self.begin_load(id.0, (hit, whole as u32), block_tokens, has, at);
        let loading = match loading {
            Ok(Some(loading)) => loading,
            nothing => {
                self.drop_sequence(id.0)?;
                return nothing.map(|_| None);
            }
        };
        let first = (hit / block_tokens) as usize;
        let n_groups = self.scheduler.cache().n_groups() as u16;
        let of_group = |g: u16| {
            let blocks = loading.blocks(GroupId(g)).enumerate();
            blocks.filter_map(move |(i, block)| block.map(|_| (g, first + i)))
        };
        let missing: BTreeSet<(u16, usize)> = (0..n_groups).flat_map(of_group).collect();
        let tokens = tokens[..loading.positions().end as usize].to_vec();
        let begun = Begun { id, missing: missing.iter().copied().collect() };
        let import = Import { salt: salt.into(), tokens, block_tokens, first, loading, missing };
        self.imports.open.insert(id, import);
        Ok(Some(begun))
    }

    /// Copies those of `blocks` that an import waits for. Returns whether it goes on: it may have been given up.
    ///
    /// # Errors
    /// A block is not as long as the cache's, or the device cannot copy. The import is given up.
    pub fn continue_import(&mut self, id: ImportId, blocks: &TextBlocks) -> Result<bool, Error> {
        let Some(import) = self.imports.open.get_mut(&id) else { return Ok(false) };
        let mut transfers = self.executor.transfers();
        let mut copy = || {
            for (&(g, at), bytes) in blocks {
                let Some(i) = at.checked_sub(import.first).filter(|_| import.missing.remove(&(g, at))) else {
                    continue;
                };
                let block = import.loading.blocks(GroupId(g)).nth(i).flatten();
                let Some(block) = block else { continue };
                let cells = CellRun { start: block * import.block_tokens, len: import.block_tokens };
                copy_in(&mut transfers, GroupId(g), cells, bytes)?;
            }
            Ok::<(), DeviceError>(())
        };
        if let Err(error) = copy() {
            self.give_up_import(id)?;
            return Err(error.into());
        }
        Ok(true)
    }

    /// Ends an import. If all of its blocks have come they are in the cache; otherwise the cache has what it had. Returns how many tokens
    /// are cached now.
    ///
    /// # Errors
    /// The cache refuses the blocks, which would be a defect.
    pub fn end_import(&mut self, id: ImportId) -> Result<usize, Error> {
        let is_whole = self.imports.open.get(&id).is_some_and(|import| import.missing.is_empty());
        if !is_whole {
            self.give_up_import(id)?;
            return Ok(0);
        }
        let Some(Import { salt, tokens, loading, .. }) = self.imports.open.remove(&id) else { return Ok(0) };
        let at = Moment { now_ns: self.now_ns() };
        let cache = self.scheduler.cache_mut();
        let arrived = cache.arrived(loading, Ok::<(), ()>(()));
        let stored = match (arrived, cache.prefixes()) {
            (Ok(()), Some(mut prefixes)) => prefixes.store(id.0, &Content::Tokens(&tokens), at).map(drop),
            (arrived, _) => arrived,
        };
        self.drop_sequence(id.0)?;
        stored?;
        self.scheduler.note_text(&salt, &tokens);
        Ok(tokens.len())
    }

    /// Gives the cells of all imports back: blocks are about to move.
    pub(super) fn give_up_imports(&mut self) {
        while let Some((&id, _)) = self.imports.open.last_key_value() {
            if let Err(error) = self.give_up_import(id) {
                tracing::error!(target: "kvist::engine", "an import cannot be given up: {error}");
            }
        }
    }

    /// Gives the cells of an import back, if it has not ended.
    fn give_up_import(&mut self, id: ImportId) -> Result<(), Error> {
        let Some(import) = self.imports.open.remove(&id) else { return Ok(()) };
        self.scheduler.cache_mut().arrived(import.loading, Err(()))?;
        self.drop_sequence(id.0)
    }

    fn drop_sequence(&mut self, seq: SeqId) -> Result<(), Error> {
        if let Some(mut sequences) = self.scheduler.cache_mut().sequences() {
            sequences.seq_rm(seq, 0, u32::MAX)?;
        }
        Ok(())
    }

    /// Gives imports up that hold cells which the next step could need: its tokens and a block for each request, or `needed_tokens`, those
    /// of a request outside the batch that would be refused, even in the middle of its answer.
    pub(super) fn make_way(&mut self, needed_tokens: u64) {
        while let Some((&id, _)) = self.imports.open.last_key_value() {
            let config = self.scheduler.config();
            let is_short = |group: Occupancy| {
                let of_step = config
                    .max_batch_tokens
                    .saturating_add(config.max_batch.saturating_mul(group.block_tokens));
                // A layer group with a window never holds all of a request.
                let of_waiting =
                    if group.frees_out_of_window { 0 } else { needed_tokens + u64::from(group.block_tokens) };
                let needed = u64::from(of_step).max(of_waiting);
                u64::from(group.free_cells) + u64::from(group.evictable_cells) < needed
            };
            if !self.scheduler.cache().occupancy().any(is_short) {
                return;
            }
            if let Err(error) = self.give_up_import(id) {
                tracing::error!(target: "kvist::engine", "an import cannot be given up: {error}");
            }
        }
    }

    /// Takes cells for the longest run of blocks that are all there. A group with a window needs only its last ones.
    fn begin_load(
        &mut self,
        seq: SeqId,
        (start, end): (u32, u32),
        block_tokens: u32,
        has: &BTreeSet<(u16, usize)>,
        at: Moment,
    ) -> Result<Option<Loading>, Error> {
        let first = (start / block_tokens) as usize;
        let windows: Vec<Option<u32>> = (0..self.scheduler.cache().n_groups() as u16)
            .map(|g| self.scheduler.cache().window(GroupId(g)))
            .collect();
        let mut n = ((end - start) / block_tokens) as usize;
        for (g, _) in (0..).zip(&windows).filter(|(_, window)| window.is_none()) {
            n = (0..n).take_while(|i| has.contains(&(g, first + i))).count();
        }
        // Whether all is there that a window sees after so many blocks; the sinks are asked for below.
        let is_end = |n: usize| {
            let query = (first + n) as u32 * block_tokens;
            (0..).zip(&windows).all(|(g, &window)| {
                let sees = Visibility { window, sinks: 0 };
                let last_of = |i: usize| (first + i + 1) as u32 * block_tokens - 1;
                let mut seen = (0..n).rev().take_while(|&i| window.is_some() && sees.sees(query, last_of(i)));
                seen.all(|i| has.contains(&(g, first + i)))
            })
        };
        for n in (1..=n).rev().filter(|n| is_end(*n)) {
            let n_tokens = n as u32 * block_tokens;
            let cache = self.scheduler.cache_mut();
            let loading = match cache.load(seq, n_tokens) {
                Err(Refused::NoSpace { .. }) => {
                    if let Some(mut prefixes) = cache.prefixes() {
                        prefixes.evict_until_free(n_tokens, at);
                    }
                    match cache.load(seq, n_tokens) {
                        // Requests use the rest: fewer blocks may fit.
                        Err(Refused::NoSpace { .. }) => continue,
                        loading => loading?,
                    }
                }
                loading => loading?,
            };
            let has_all = (0..).zip(&windows).all(|(g, _)| {
                let mut needed = loading.blocks(GroupId(g)).enumerate();
                needed.all(|(i, block)| block.is_none() || has.contains(&(g, first + i)))
            });
            match has_all {
                true => return Ok(Some(loading)),
                false => cache.arrived(loading, Err(()))?,
            }
        }
        Ok(None)
    }
}

fn copy_in(
    transfers: &mut Transfers<'_>,
    group: GroupId,
    cells: CellRun,
    bytes: &[u8],
) -> Result<(), DeviceError> {
    let mut block = HostBlock::new(bytes.len())?;
    block.bytes_mut().copy_from_slice(bytes);
    let begun = transfers.import(group, cells, block).map_err(DeviceError::from)?;
    wait(transfers, &begun).map(drop)
}
