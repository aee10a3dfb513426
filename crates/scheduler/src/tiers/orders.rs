//! What the scheduler asks of the driver of the tiers.
use crate::request::RequestId;
use crate::retain::Retention;
use kvist_cache::{CachedBlock, GroupId, Prompt, SeqId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Names a load or a copy. Unique in a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TransferId(pub u64);

impl std::fmt::Display for TransferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Consecutive blocks of a prompt that are in the same place: those from the end of the run before it, or from the
/// prompt's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The fastest tier that has all these blocks; `None` if no tier has any of them.
    pub tier: Option<u8>,
    /// The position after the last of them.
    pub until: u32,
    /// Where a load may end.
    #[serde(default, skip_serializing_if = "Ends::is_default")]
    pub ends: Ends,
}

/// Where in a [`Run`] a load may end. A layer group with a sliding window has some blocks only, and a load must end where the
/// tiers have what the window then covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ends {
    /// After any of its blocks: no layer group has a window.
    #[default]
    Anywhere,
    /// After its last block.
    AtEnd,
    /// Nowhere: it has to go on with the next run.
    Nowhere,
}

impl Ends {
    fn is_default(&self) -> bool {
        *self == Ends::Anywhere
    }
}

impl Run {
    /// Blocks after any of which a load may end.
    pub fn new(tier: Option<u8>, until: u32) -> Run {
        Run { tier, until, ends: Ends::Anywhere }
    }

    /// Whether a load may end at `until`, a position of this run.
    pub(super) fn may_end_at(&self, until: u32) -> bool {
        match self.ends {
            Ends::Anywhere => true,
            Ends::AtEnd => until == self.until,
            Ends::Nowhere => false,
        }
    }
}

/// Why blocks that a tier had, or may have had, were computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLoaded {
    /// Computing was expected to be faster.
    Slower,
    /// Their bytes did not arrive, or were wrong.
    Failed,
    /// Their load took too long.
    Late,
    /// The tiers did not say in time what they have.
    Unanswered,
    /// There was no room for them beside other loads and copies.
    Busy,
}

impl NotLoaded {
    /// The name in answers and recordings.
    pub fn name(self) -> &'static str {
        match self {
            NotLoaded::Slower => "slower",
            NotLoaded::Failed => "failed",
            NotLoaded::Late => "late",
            NotLoaded::Unanswered => "unanswered",
            NotLoaded::Busy => "busy",
        }
    }
}

/// A cached block as an [`Order`] names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedBlock {
    /// Its number in the first layer group that keeps every token.
    pub block: u32,
    /// [`CachedBlock::hash`]. If the cache has other content there by now, that has another one.
    pub hash: u64,
}

impl NamedBlock {
    /// `naming`: the group whose numbers name blocks. `None` if the block has none there.
    pub(super) fn of(block: &CachedBlock, naming: GroupId) -> Option<NamedBlock> {
        Some(NamedBlock { block: block.in_group(naming)?, hash: block.hash })
    }
}

/// Something to do for the tiers.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// Look a prompt up in all tiers, and report [`found`](crate::Scheduler::found).
    Find(FindOrder),
    /// Load blocks, and report [`loaded`](crate::Scheduler::loaded).
    Load(LoadOrder),
    /// These blocks were added to the prefix index. The driver may need to know what they store to name them in a later
    /// [`Order::Store`], where their numbers and hashes are the same. There is nothing to report.
    Cached(CachedTokens),
    /// The cache retains these blocks. Tiers that choose what they drop keep them as long, whenever they get them. There is nothing to
    /// report.
    Keep(KeepOrder),
    /// Copy blocks to the tiers, and report [`stored`](crate::Scheduler::stored).
    Store(StoreOrder),
    /// Forget what the tiers have under a salt: nothing of it may be found again. There is nothing to report.
    Forget {
        /// The salt.
        salt: Arc<str>,
        /// Of it, what the prefix index has dropped now. These blocks can belong to other sequences by now, so the driver removes
        /// what it knew of them.
        blocks: Vec<CachedBlock>,
    },
    /// The result of this load is not needed any more. It must still be reported when nothing is written to its blocks
    /// any more.
    Abandon {
        /// The load.
        load: TransferId,
    },
}

/// A prompt to look up.
#[derive(Clone, Debug, PartialEq)]
pub struct FindOrder {
    /// The request.
    pub request: RequestId,
    /// Its salt.
    pub salt: Arc<str>,
    /// Its prompt.
    pub prompt: Prompt,
    /// Only the blocks before this position matter.
    pub n_tokens: u32,
    /// The KV cache has the blocks before this position now. They matter if it evicts them before the request is admitted.
    pub hit_tokens: u32,
}

/// Blocks to load. They are not readable before [`loaded`](crate::Scheduler::loaded).
#[derive(Clone, Debug, PartialEq)]
pub struct LoadOrder {
    /// Names the load.
    pub id: TransferId,
    /// The request whose prompt it is.
    pub request: RequestId,
    /// The sequence that the tokens are appended to.
    pub seq: SeqId,
    /// The positions to load: whole blocks.
    pub positions: std::ops::Range<u32>,
    /// Where the blocks are, in order, the last one until `positions.end`. Every run has a tier.
    pub runs: Vec<Run>,
    /// By layer group: the blocks to write, in position order. `None` where a sliding window will have moved on, so that
    /// nothing is loaded.
    pub blocks: Vec<Vec<Option<u32>>>,
}

/// What consecutive cached blocks of a text store.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedTokens {
    /// The salt of the text.
    pub salt: Arc<str>,
    /// The block before the first one; `None` at the beginning of a text.
    pub parent: Option<CachedBlock>,
    /// The blocks, in order.
    pub blocks: Vec<CachedBlock>,
    /// The text up to the end of the last one.
    pub tokens: Vec<u32>,
}

/// Blocks to keep before others.
#[derive(Clone, Debug, PartialEq)]
pub struct KeepOrder {
    /// Of the text that they belong to.
    pub salt: Arc<str>,
    /// From now on so long, and how urgently.
    pub retention: Retention,
    /// The blocks, which have been named by [`Order::Cached`].
    pub blocks: Vec<CachedBlock>,
}

/// Blocks to copy. They are pinned until [`stored`](crate::Scheduler::stored).
#[derive(Clone, Debug, PartialEq)]
pub struct StoreOrder {
    /// Names the copy.
    pub id: TransferId,
    /// The request whose prompt or answer they are part of, in order. `None` for victims of
    /// eviction, which can belong to different prompts.
    pub request: Option<RequestId>,
    /// They were in the KV cache when the request came, and no tier said that it has them: it has dropped them, or never got them.
    pub is_again: bool,
    /// The blocks.
    pub blocks: Vec<CachedBlock>,
}
