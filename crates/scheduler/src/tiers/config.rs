//! The configuration of tiers.
use super::unsaved::UNSAVED_BYTES;
use serde::{Deserialize, Serialize};

/// The most tiers that a cache has below it.
pub const MAX_TIERS: usize = 4;

/// Tiers below the KV cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiers {
    /// Fastest first, at least one, at most [`MAX_TIERS`].
    pub list: Vec<Tier>,
    /// Bytes of a block as a tier stores it, over all layers.
    pub block_bytes: u64,
    /// The part of `block_bytes` of layer groups with a sliding window. Of a prompt, only what the windows cover is loaded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<WindowBytes>,
    /// When blocks are copied to the tiers.
    pub write: Write,
    /// Bytes that may be on their way from the tiers at a time. A single block is always allowed.
    pub max_load_bytes: u64,
    /// Bytes that may be on their way to the tiers at a time. What exceeds it is not copied.
    pub max_store_bytes: u64,
    /// The time to compute tokens, with which a load competes.
    pub recompute: Recompute,
    /// How long a request waits for a lookup. A load may take this much longer than four times its estimate.
    pub grace_ns: u64,
    /// Load all that a tier has, even where computing is expected to be faster. Loads are estimated as before, so a late one
    /// is given up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub always: bool,
}

/// What a layer group with a sliding window adds to the bytes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WindowBytes {
    /// The window, in tokens.
    pub tokens: u32,
    /// Bytes of a block in this group.
    pub block_bytes: u64,
}

impl WindowBytes {
    /// The most blocks that the window covers: it may begin within one.
    fn blocks(&self, block_tokens: u32) -> u64 {
        u64::from(self.tokens.div_ceil(block_tokens)) + 1
    }
}

/// One tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tier {
    /// For reports and metrics.
    pub name: String,
    /// How fast it is read, at least 1.
    pub bytes_per_s: u64,
    /// Time until the first byte of a read.
    pub latency_ns: u64,
}

/// When blocks are copied to the tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Write {
    /// As soon as they are in the prefix index. More is written; an eviction then loses nothing.
    Through,
    /// Shortly before they are evicted.
    Back {
        /// So many cells are kept free, at most a quarter of the cache: the next victims are copied and evicted when fewer
        /// are. If a step needs more at once, it evicts blocks that were not copied.
        ahead_tokens: u32,
    },
}

/// The time to compute prompt tokens, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recompute {
    /// Per token.
    pub per_token_ns: f64,
    /// Per token and position that it sees.
    pub per_pair_ns: f64,
    /// Scale both to what steps take: these are only the first guess then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub learn: bool,
}

/// Tiers that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTiers {
    /// Too few or too many.
    #[error("there are {0} tiers: give 1 to {MAX_TIERS}")]
    Count(usize),
    /// A number is out of range.
    #[error("{field} of the tiers is {got}: {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// Its value.
        got: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// The cache shares no blocks.
    #[error("tiers need a cache with a prefix index: use the paged cache, and leave prefix caching on")]
    NoIndex,
    /// No layer group keeps every token.
    #[error(
        "tiers need a model with some layers that see the whole text, without a sliding window: serve this model without tiers"
    )]
    Windows,
}

impl Tiers {
    /// Memory that the scheduler takes at most for each block of the cache to remember that a tier lacks it.
    pub const UNSAVED_BYTES: u64 = UNSAVED_BYTES;

    /// Bytes of a load of `n_tokens` tokens, whole blocks of `block_tokens`.
    pub(crate) fn load_bytes(&self, n_tokens: u32, block_tokens: u32) -> u64 {
        let n_blocks = u64::from(n_tokens / block_tokens);
        let of_windows =
            |window: &WindowBytes| window.block_bytes * n_blocks.min(window.blocks(block_tokens));
        n_blocks * self.whole_bytes() + self.windows.iter().map(of_windows).sum::<u64>()
    }

    /// How many blocks can be loaded within so many bytes.
    pub(crate) fn blocks_within(&self, bytes: u64, block_tokens: u32) -> u64 {
        let of_windows = |window: &WindowBytes| window.block_bytes * window.blocks(block_tokens);
        let of_windows: u64 = self.windows.iter().map(of_windows).sum();
        let beyond_windows = bytes.saturating_sub(of_windows) / self.whole_bytes().max(1);
        beyond_windows.max(bytes / self.block_bytes)
    }

    /// Bytes of a block in the layer groups that keep every token.
    fn whole_bytes(&self) -> u64 {
        self.block_bytes - self.windows.iter().map(|window| window.block_bytes).sum::<u64>()
    }

    pub(crate) fn check(&self) -> Result<(), BadTiers> {
        if self.list.is_empty() || self.list.len() > MAX_TIERS {
            return Err(BadTiers::Count(self.list.len()));
        }
        let at_least_1 = |field, got: u64| match got {
            0 => Err(BadTiers::OutOfRange { field, got: "0".into(), expected: "it must be at least 1" }),
            _ => Ok(()),
        };
        self.list.iter().try_for_each(|tier| at_least_1("bytes_per_s", tier.bytes_per_s))?;
        at_least_1("block_bytes", self.block_bytes)?;
        if self.windows.iter().map(|window| window.block_bytes).sum::<u64>() > self.block_bytes {
            let got = self.block_bytes.to_string();
            let expected = "the windows' part of it is larger";
            return Err(BadTiers::OutOfRange { field: "block_bytes", got, expected });
        }
        let Recompute { per_token_ns, per_pair_ns, .. } = self.recompute;
        for (field, got) in [("per_token_ns", per_token_ns), ("per_pair_ns", per_pair_ns)] {
            if !(got.is_finite() && got >= 0.0) {
                let expected = "it must be a finite number, not negative";
                return Err(BadTiers::OutOfRange { field, got: got.to_string(), expected });
            }
        }
        Ok(())
    }
}
