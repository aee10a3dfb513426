//! The newest tokens, kept in f16 beside their packed rows.
use crate::error::BackendError;

/// The newest tokens of every sequence are read as f16, although they are stored packed: a query weighs its neighbours
/// most, so their errors cost most. Positions are cut into groups of `tokens`; a query reads the keys and values of its own
/// group, up to itself, in f16, and those of all groups before as they are stored. (KIVI keeps such a residual of 32 to 128
/// tokens: Liu et al., 2024.)
///
/// Groups end at fixed positions. As long as a row is kept, what a query reads does not depend on chunks, batches or hits: a
/// sequence that goes on behind a cached prefix of whole groups finds everything it may read in the pools. Float storages
/// take no notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// Tokens of a group: a power of two, [`Recent::MOST_TOKENS`] at most. 0 turns it off.
    pub tokens: u32,
    /// Sequences whose newest tokens are kept at once; forks share the rows of what they share. With more sequences, or trees
    /// with more nodes than there are rows, the rows that were read longest ago are dropped, and read as they are stored
    /// from then on.
    pub sequences: u32,
}

impl Recent {
    /// Tokens of the longest group.
    pub const MOST_TOKENS: u32 = 64;

    /// Rows that are kept between two steps, if the cache has as many cells: a group of each sequence, and one more.
    pub fn rows(&self) -> u32 {
        self.tokens.saturating_mul(self.sequences.saturating_add(1))
    }

    /// The same with groups that blocks of `block_tokens` consist of: the largest power of two that divides a block, at most.
    pub fn within_blocks(self, block_tokens: u32) -> Self {
        let most = 1u32 << block_tokens.trailing_zeros().min(31);
        Recent { tokens: self.tokens.min(most), ..self }
    }

    /// Is `tokens` a length that there is?
    pub fn check(&self) -> Result<(), BackendError> {
        match self.tokens {
            0 => Ok(()),
            n if n.is_power_of_two() && n <= Self::MOST_TOKENS => Ok(()),
            n => Err(BackendError::Unsupported(format!(
                "{n} recent tokens in f16: take a power of two up to {}, or 0",
                Self::MOST_TOKENS
            ))),
        }
    }
}
