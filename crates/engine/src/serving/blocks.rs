//! K and V of a text's full blocks: out of the cache, and into it, between two steps.
//!
//! What is imported becomes part of the prefix index, as if a request had computed it, so the next request that
//! begins with this text hits it. A block of one layer group is `(group, number of the block in the text)`.
use super::EngineState;
use crate::Error;
use kvist_cache::{BlockId, CellRun, Content, GroupId, Loading, Moment, Refused, SeqId};
use kvist_device::{DeviceError, HostBlock, Transfer, Transfers};
use std::collections::{BTreeMap, BTreeSet};

/// The bytes of blocks, by layer group and number in the text.
pub type TextBlocks = BTreeMap<(u16, usize), Vec<u8>>;

/// The scheduler numbers its sequences from 0 on, and would need centuries to get here.
const IMPORTED: SeqId = SeqId(u32::MAX);

fn wait(transfers: &mut Transfers<'_>, begun: &Transfer) -> Result<HostBlock, DeviceError> {
    loop {
        if let Some(done) = transfers.finished(begun) {
            return done;
        }
        std::thread::yield_now();
    }
}

impl EngineState {
    /// How many tokens of `tokens` the prefix index has.
    pub fn cached_tokens(&self, salt: &str, tokens: &[u32]) -> usize {
        // A hit leaves at least one token to compute: this one is not part of the text.
        let with_next: Vec<u32> = tokens.iter().copied().chain([0]).collect();
        self.scheduler.cache().lookup(salt, &Content::Tokens(&with_next)).hit_tokens as usize
    }

    /// Copies those of `wanted` that the prefix index has, up to about `most_bytes`. Returns an empty map if it has
    /// none of them.
    ///
    /// # Errors
    /// The device cannot copy.
    pub fn export_blocks(
        &mut self,
        salt: &str,
        tokens: &[u32],
        block_tokens: u32,
        wanted: &BTreeSet<(u16, usize)>,
        most_bytes: usize,
    ) -> Result<TextBlocks, Error> {
        let with_next: Vec<u32> = tokens.iter().copied().chain([0]).collect();
        let (mut copied, mut bytes) = (TextBlocks::new(), 0);
        let n_groups = self.scheduler.cache().n_groups();
        let tables: Vec<_> = (0..n_groups)
            .map(|g| {
                let content = Content::Tokens(&with_next);
                self.scheduler.cache().lookup_blocks(GroupId(g as u16), salt, &content)
            })
            .collect();
        for &(g, at) in wanted {
            let Some(Some(block)) = tables.get(usize::from(g)).and_then(|table| table.get(at)).copied()
            else {
                continue;
            };
            let group = GroupId(g);
            let pin = self.scheduler.cache_mut().pin(&[BlockId { group, block }])?;
            let cells = CellRun { start: block * block_tokens, len: block_tokens };
            let block = copy_out(&mut self.executor.transfers(), group, cells);
            self.scheduler.cache_mut().unpin(pin);
            let block = block?.bytes().to_vec();
            bytes += block.len();
            copied.insert((g, at), block);
            if bytes >= most_bytes {
                break;
            }
        }
        Ok(copied)
    }

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
        let at = Moment { now_ns: self.now_ns() };
        let whole = tokens.len() - tokens.len() % block_tokens as usize;
        let with_next: Vec<u32> = tokens[..whole].iter().copied().chain([0]).collect();
        let Some(mut prefixes) = self.scheduler.cache_mut().prefixes() else { return Ok(0) };
        let hit = prefixes.open_again(IMPORTED, salt, &Content::Tokens(&with_next), at)?.hit_tokens;
        let placed = self.place(hit, whole as u32, block_tokens, blocks, at);
        let cache = self.scheduler.cache_mut();
        let stored = match (&placed, cache.prefixes()) {
            (Ok(until), Some(mut prefixes)) => {
                let content = Content::Tokens(&tokens[..*until as usize]);
                prefixes.store(IMPORTED, &content, at).map(drop)
            }
            _ => Ok(()),
        };
        if let Some(mut sequences) = cache.sequences() {
            sequences.seq_rm(IMPORTED, 0, u32::MAX)?;
        }
        stored?;
        let until = placed? as usize;
        self.scheduler.note_text(salt, &tokens[..until]);
        Ok(until)
    }

    /// Extends the sequence from `start` as far towards `end` as there are blocks. Returns its new length.
    fn place(
        &mut self,
        start: u32,
        end: u32,
        block_tokens: u32,
        blocks: &TextBlocks,
        at: Moment,
    ) -> Result<u32, Error> {
        let first = (start / block_tokens) as usize;
        let Some((loading, end)) = self.begin_load(start, end, block_tokens, blocks, at)? else {
            return Ok(start);
        };
        let n_groups = self.scheduler.cache().n_groups();
        let mut transfers = self.executor.transfers();
        let mut copy = || {
            for g in 0..n_groups as u16 {
                for (i, block) in loading.blocks(GroupId(g)).enumerate() {
                    let Some((block, bytes)) = block.zip(blocks.get(&(g, first + i))) else { continue };
                    let cells = CellRun { start: block * block_tokens, len: block_tokens };
                    copy_in(&mut transfers, GroupId(g), cells, bytes)?;
                }
            }
            Ok::<(), DeviceError>(())
        };
        let copied = copy();
        let failed = copied.is_err();
        self.scheduler.cache_mut().arrived(loading, if failed { Err(()) } else { Ok(()) })?;
        copied?;
        Ok(end)
    }

    /// Takes cells for the longest run of blocks that are all there. A group with a window needs only its last ones.
    fn begin_load(
        &mut self,
        start: u32,
        end: u32,
        block_tokens: u32,
        blocks: &TextBlocks,
        at: Moment,
    ) -> Result<Option<(Loading, u32)>, Error> {
        let first = (start / block_tokens) as usize;
        let n_groups = self.scheduler.cache().n_groups() as u16;
        let mut n = ((end - start) / block_tokens) as usize;
        for g in (0..n_groups).filter(|g| self.scheduler.cache().window(GroupId(*g)).is_none()) {
            n = (0..n).take_while(|i| blocks.contains_key(&(g, first + i))).count();
        }
        for n in (1..=n).rev() {
            let n_tokens = n as u32 * block_tokens;
            let cache = self.scheduler.cache_mut();
            let loading = match cache.load(IMPORTED, n_tokens) {
                Err(Refused::NoSpace { .. }) => {
                    if let Some(mut prefixes) = cache.prefixes() {
                        prefixes.evict_until_free(n_tokens, at);
                    }
                    match cache.load(IMPORTED, n_tokens) {
                        // Requests use the rest: fewer blocks may fit.
                        Err(Refused::NoSpace { .. }) => continue,
                        loading => loading?,
                    }
                }
                loading => loading?,
            };
            let has_all = (0..n_groups).all(|g| {
                let mut needed = loading.blocks(GroupId(g)).enumerate();
                needed.all(|(i, block)| block.is_none() || blocks.contains_key(&(g, first + i)))
            });
            match has_all {
                true => return Ok(Some((loading, start + n_tokens))),
                false => cache.arrived(loading, Err(()))?,
            }
        }
        Ok(None)
    }
}

fn copy_out(transfers: &mut Transfers<'_>, group: GroupId, cells: CellRun) -> Result<HostBlock, Error> {
    let bytes = transfers.block_bytes(group, cells.len).unwrap_or(0);
    let block = HostBlock::new(bytes)?;
    let begun = transfers.export(group, cells, block).map_err(DeviceError::from)?;
    Ok(wait(transfers, &begun)?)
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
