//! The newest tokens, kept in f16 in addition to their quantised rows.
mod plan;
mod slots;

use crate::error::DeviceError;
use crate::layout::Values;
use crate::pools::PoolSpec;
use crate::storage::Storage;
use kvist_cache::GroupId;
pub use plan::{RecentPlan, RecentRead, RecentReads};

/// Makes queries read the newest tokens of every sequence as f16, although they are also stored quantised. A query
/// gives its nearest tokens the largest weights, so errors there cost most. Positions are divided into groups of
/// `tokens`. A query reads the keys and values of its own group, up to itself, in f16, and all earlier groups as they
/// are stored. (KIVI keeps such a residual of 32 to 128 tokens: Liu et al., 2024.)
///
/// Groups end at fixed positions. As long as a row is kept, what a query reads does not depend on chunks, batches or
/// prefix hits: a sequence that continues after a cached prefix of whole groups finds everything it may read in the
/// pools. Float storages ignore this setting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// Tokens per group: a power of two, at most [`Recent::MAX_TOKENS`]. 0 turns it off.
    pub tokens: u32,
    /// Number of sequences whose newest tokens are kept at the same time; forks share the rows of shared tokens. With
    /// more sequences, or draft trees with more nodes than there are rows, the least recently read rows are dropped
    /// and from then on read as they are stored.
    pub sequences: u32,
}

impl Recent {
    /// The same for a cache of these storages: turned off if neither is packed.
    pub fn of_storages(self, k: Storage, v: Storage) -> Self {
        let packed = k.dtype.is_quantised() || v.dtype.is_quantised();
        Recent { tokens: if packed { self.tokens } else { 0 }, ..self }
    }

    /// Maximum tokens per group.
    pub const MAX_TOKENS: u32 = 64;

    /// Rows that are kept between two steps, if the cache has that many cells: one group per sequence, plus one
    /// group.
    pub fn rows(&self) -> u32 {
        self.tokens.saturating_mul(self.sequences.saturating_add(1))
    }

    /// The same setting with groups that divide blocks of `block_tokens`: at most the largest power of two that
    /// divides a block.
    pub fn within_blocks(self, block_tokens: u32) -> Self {
        let max = 1u32 << block_tokens.trailing_zeros().min(31);
        Recent { tokens: self.tokens.min(max), ..self }
    }

    /// Checks that `tokens` is a valid group length.
    pub fn check(&self) -> Result<(), DeviceError> {
        match self.tokens {
            0 => Ok(()),
            n if n.is_power_of_two() && n <= Self::MAX_TOKENS => Ok(()),
            n => Err(DeviceError::Unsupported(format!(
                "{n} recent tokens in f16: use a power of two up to {}, or 0",
                Self::MAX_TOKENS
            ))),
        }
    }
}

/// A token in a cache: where it is stored, and where it stands in its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CellPosition {
    pub cell: u32,
    pub position: u32,
}

impl PoolSpec {
    /// Bytes of a token's f16 rows in a layer group, as [`Pools::read_recent`](crate::Pools::read_recent) has them: 0 if both
    /// sides are floats. `None` if there is no such group, or on overflow.
    pub fn recent_row_bytes(&self, group: GroupId) -> Option<usize> {
        if usize::from(group.0) >= self.layout.n_groups() {
            return None;
        }
        let packed =
            |storage: Storage, dim: u32| if storage.dtype.is_quantised() { u64::from(dim) } else { 0 };
        let mut elements = 0u64;
        for (_, layer) in self.layout.owners().filter(|(_, layer)| layer.group == group) {
            let values = if layer.values == Values::Stored { packed(self.v, layer.v_dim) } else { 0 };
            let head = packed(self.k, layer.k_dim) + values;
            elements = elements.checked_add(u64::from(layer.n_kv_heads).checked_mul(head)?)?;
        }
        usize::try_from(elements.checked_mul(2)?).ok()
    }

    /// Checks the f16 rows of a token, of `len` bytes, in a cell below `end`.
    ///
    /// # Errors
    /// There is no such group or cell, or the rows have another length.
    pub fn check_recent(&self, group: GroupId, cell: u32, end: u32, len: usize) -> Result<(), DeviceError> {
        let n_groups = self.layout.n_groups();
        if usize::from(group.0) >= n_groups {
            let index = group.0.into();
            return Err(DeviceError::OutOfRange { what: "layer group", index, len: n_groups });
        }
        if cell >= end {
            return Err(DeviceError::OutOfRange { what: "cell", index: cell as usize, len: end as usize });
        }
        match self.recent_row_bytes(group) {
            Some(expected) if expected == len => Ok(()),
            expected => Err(DeviceError::BlockSize { expected: expected.unwrap_or(usize::MAX), got: len }),
        }
    }
}
