//! The newest tokens, kept in f16 beside their packed rows.
use crate::error::BackendError;

/// The newest tokens of every sequence are read as f16, although they are stored packed: a query weighs its neighbours
/// most, so their errors cost most. Positions are cut into groups of `tokens`; a query reads the keys and values of its own
/// group, up to itself, in f16, and those of all groups before as they are stored. (KIVI keeps such a residual of 32 to 128
/// tokens: Liu et al., 2024.)
///
/// Groups end at fixed positions, so what a query reads does not depend on chunks, batches or hits: a sequence that goes on
/// behind a cached prefix of whole groups finds everything it may read in the pools. Float storages take no notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recent {
    /// Tokens of a group: a power of two, [`Recent::MOST_TOKENS`] at most. 0 turns it off.
    pub tokens: u32,
    /// Sequences whose newest tokens are kept at once. With more of them the least recently used rows are dropped, and
    /// read as they are stored from then on.
    pub sequences: u32,
}

impl Recent {
    /// Tokens of the longest group.
    pub const MOST_TOKENS: u32 = 64;

    /// Rows that are kept between two steps: those of started groups, and of one that was just filled.
    pub fn rows(&self) -> u32 {
        self.tokens.saturating_mul(self.sequences.saturating_add(1))
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
