//! The configuration of tiers.
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
    /// A layer group frees blocks that left its window.
    #[error("tiers do not support models with sliding windows yet: serve this model without tiers")]
    Windows,
}

impl Tiers {
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
