//! K and V of a text's full blocks, out of the cache, between two steps. A block of one layer group is `(group, number of the block in
//! the text)`.
use super::EngineState;
use crate::Error;
use kvist_cache::{BlockId, CellRun, Content, GroupId};
use kvist_device::{DeviceError, HostBlock, Transfer, Transfers};
use std::collections::{BTreeMap, BTreeSet};

/// The bytes of blocks, by layer group and number in the text.
pub type TextBlocks = BTreeMap<(u16, usize), Vec<u8>>;

/// Waits until a copy has ended.
///
/// # Errors
/// The device failed.
pub(super) fn wait(transfers: &mut Transfers<'_>, begun: &Transfer) -> Result<HostBlock, DeviceError> {
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
}

fn copy_out(transfers: &mut Transfers<'_>, group: GroupId, cells: CellRun) -> Result<HostBlock, Error> {
    let bytes = transfers.block_bytes(group, cells.len).unwrap_or(0);
    let block = HostBlock::new(bytes)?;
    let begun = transfers.export(group, cells, block).map_err(DeviceError::from)?;
    Ok(wait(transfers, &begun)?)
}
