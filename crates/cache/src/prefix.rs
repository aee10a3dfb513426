//! The prefix index of a paged cache: it finds blocks that earlier requests have computed.
//!
//! It indexes full blocks only, keyed by (salt, all tokens before the block, tokens of the block). Keys are compared
//! in full; a matching hash alone is never trusted. At least the last token of a prompt is always computed, because
//! its logits are needed. With sliding windows, a hit is the largest L such that the full-attention groups store
//! `[0, L)` and every window group still has the blocks of the positions that a query at L sees.
//!
//! A cached block that no sequence and no transfer uses is *evictable*. It stays until
//! [`Prefixes::evict_until_free`] evicts it, leaves before parents in full-attention groups. A step never evicts.
mod as_is;
mod content;
mod ghosts;
mod hits;
mod index;
mod prompt;
mod tree;

pub use content::{Content, Vocabulary};
pub use hits::{HitCounts, RECENT_PROMPTS};
pub(crate) use index::Index;
pub use prompt::Prompt;

use crate::cache::Cache;
use crate::evict::{self, Parameters, PolicyError};
use crate::ids::*;
use crate::kind::Kind;
use crate::kinds::{GroupSpec, Paged, Unbuildable};
use crate::report::Occupancy;
use crate::request::Refused;
use crate::transfers::CachedBlock;
use content::Keying;

/// The time of a call. The index reads no clock; the caller passes the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The caller's clock, in nanoseconds.
    pub now_ns: u64,
}

/// How to build a paged cache.
#[derive(Clone, Debug)]
pub struct PagedSpec {
    /// Tokens per block, at least 1. Powers of two are faster.
    pub block_tokens: u32,
    /// The layer groups; each gets its own cell space. `capacity_tokens` is rounded down to whole blocks and must be
    /// at least one block. `u32::MAX` means practically unlimited; such a group never evicts.
    pub groups: Vec<GroupSpec>,
    /// How many tokens rollbacks can remove even though the window has already moved past what the next query then
    /// needs. Counted from the furthest position that the sequence has reached, so consecutive rollbacks share the
    /// budget. It is restored when the sequence has grown past that position.
    pub rollback_tokens: u32,
    /// The prefix index over full blocks; `None` for a cache without one.
    pub prefix: Option<PrefixSpec>,
}

/// How to build a prefix index.
#[derive(Clone, Debug)]
pub struct PrefixSpec {
    /// What prompts consist of.
    pub vocabulary: Vocabulary,
    /// Name of the eviction policy, one of [`POLICIES`](evict::POLICIES).
    pub policy: String,
    /// The policy's parameters.
    pub parameters: Parameters,
    /// Number of evicted blocks to remember, so that a miss can be explained. 12 to 40 bytes each.
    pub n_ghosts: u32,
    /// Bytes per block in each group, for policies that use them; 1 where missing.
    pub block_bytes: Vec<u64>,
    /// The cost of recomputing a block.
    pub cost: RecomputeCost,
}

impl Default for PrefixSpec {
    fn default() -> Self {
        PrefixSpec {
            vocabulary: Vocabulary::Tokens,
            policy: "lru".to_owned(),
            parameters: Parameters::default(),
            n_ghosts: 65_536,
            block_bytes: Vec::new(),
            cost: RecomputeCost::default(),
        }
    }
}

/// The cost of recomputing one token, in any unit: the linear layers per token, and attention per (token, visible
/// position) pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecomputeCost {
    /// Cost of the linear layers, per token.
    pub per_token: f64,
    /// Cost of attention, per position that the token sees.
    pub per_pair: f64,
}

impl RecomputeCost {
    /// Cost of the `depth`-th block of a prompt, from 0. Its tokens see all tokens before the block and, on average,
    /// half of their own block. O(1).
    pub fn of_block(&self, depth: u32, block_tokens: u32) -> f64 {
        let (before, tokens) = (f64::from(depth) * f64::from(block_tokens), f64::from(block_tokens));
        tokens * (self.per_token + self.per_pair * (before + (tokens + 1.0) / 2.0))
    }
}

impl Default for RecomputeCost {
    fn default() -> Self {
        RecomputeCost { per_token: 1.0, per_pair: 0.0 }
    }
}

/// Why a paged cache cannot be built.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum PagedError {
    /// There is no group, or a group cannot be built.
    Unbuildable(Unbuildable),
    /// The eviction policy or its parameters are invalid.
    EvictionPolicy(PolicyError),
    /// Block size and id size do not divide one another.
    Vocabulary { block_tokens: u32, tokens_per_id: u32 },
}

impl std::fmt::Display for PagedError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PagedError::Unbuildable(why) => why.fmt(f),
            PagedError::EvictionPolicy(why) => why.fmt(f),
            PagedError::Vocabulary { block_tokens, tokens_per_id } => write!(
                f,
                "blocks of {block_tokens} tokens and ids of {tokens_per_id} tokens do not fit into each other: use a block size that divides {tokens_per_id} or is a multiple of it"
            ),
        }
    }
}
impl std::error::Error for PagedError {}
impl From<PolicyError> for PagedError {
    fn from(why: PolicyError) -> Self {
        PagedError::EvictionPolicy(why)
    }
}
impl From<Unbuildable> for PagedError {
    fn from(why: Unbuildable) -> Self {
        PagedError::Unbuildable(why)
    }
}

/// The prefix hit of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Tokens that need not be computed: whole blocks, never the last token.
    pub hit_tokens: u32,
    /// The part of `hit_tokens` in cached blocks that no sequence uses. Using them makes them unavailable for
    /// eviction. The maximum over all groups.
    pub evictable_tokens: u32,
}

/// Why a prefix hit ends at `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum MissReason {
    /// The hit is as long as possible: what is left is less than a block, or the token that is always computed.
    UnalignedTail { position: u32 },
    /// Cached prompts continue here with another token than the one at `position`. For content without tokens, with
    /// another block.
    Diverged { position: u32 },
    /// The next block was cached here, but has been evicted.
    Evicted { position: u32 },
    /// No earlier prompt contained this.
    NeverSeen { position: u32 },
    /// The full-attention groups store more, but a window group has dropped blocks that the next query would see.
    WindowGone { position: u32 },
    /// A prompt under another salt begins like this, and none under this salt. Only operators may see this: it would
    /// reveal to a tenant what other tenants ask.
    OtherSalt { position: u32 },
}

impl MissReason {
    /// The name in recordings: lower case, words joined by `_`.
    pub fn name(self) -> &'static str {
        match self {
            MissReason::UnalignedTail { .. } => "unaligned_tail",
            MissReason::Diverged { .. } => "diverged",
            MissReason::Evicted { .. } => "evicted",
            MissReason::NeverSeen { .. } => "never_seen",
            MissReason::WindowGone { .. } => "window_gone",
            MissReason::OtherSalt { .. } => "other_salt",
        }
    }
    /// The reason as a tenant may see it: hides what is stored under other salts.
    pub fn for_tenant(self) -> MissReason {
        match self {
            MissReason::OtherSalt { position } => MissReason::NeverSeen { position },
            reason => reason,
        }
    }
    /// Where the hit ends, or the position of the first token that differs.
    pub fn position(self) -> u32 {
        match self {
            MissReason::UnalignedTail { position }
            | MissReason::Diverged { position }
            | MissReason::Evicted { position }
            | MissReason::NeverSeen { position }
            | MissReason::WindowGone { position }
            | MissReason::OtherSalt { position } => position,
        }
    }
}

/// The recipient of an explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Viewer {
    /// The sender of the prompt. Nothing under other salts is revealed.
    Tenant,
    /// The operator of the cache.
    Operator,
}

/// Blocks that the index stored or removed, for routers and cache tiers that mirror it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum PrefixEvent {
    /// `block` of `group` stores the last block of the prefix `hash`, which extends the prefix `parent_hash`. `key` is
    /// the block's tokens, or the ids that stand for them.
    Stored { group: GroupId, block: u32, hash: u64, parent_hash: u64, key: Box<[u32]> },
    /// The block no longer contains that prefix.
    Removed { group: GroupId, block: u32, hash: u64 },
    /// Block `to` stores that prefix now, and `from` no longer does.
    Moved { group: GroupId, from: u32, to: u32, hash: u64 },
    /// The index is empty.
    Cleared,
}

/// The result of [`Prefixes::store`]. `n_new + n_known` is the number of full, committed blocks that the caller
/// passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Blocks whose content was new to the index.
    pub n_new: u32,
    /// Blocks whose content was cached already, from this sequence or from another one.
    pub n_known: u32,
}

/// The state of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Blocks stored with new content so far.
    pub n_stored: u64,
    /// Blocks evicted so far, in all groups.
    pub n_evicted: u64,
    /// Number of salts in use.
    pub n_salts: u32,
    /// The eviction policy; `None` if no group ever evicts.
    pub policy: Option<&'static str>,
    /// All [`Prefixes::open`] calls so far.
    pub opened: HitCounts,
    /// The last [`RECENT_PROMPTS`] of them.
    pub recent: HitCounts,
}

/// The prefix-index operations of a paged cache.
pub struct Prefixes<'c> {
    pub(crate) cache: &'c mut Cache,
}

impl Cache {
    /// Builds a paged cache. If it has a prefix index, open sequences through [`Cache::prefixes`], otherwise through
    /// [`Cache::sequences`].
    pub fn paged(spec: &PagedSpec) -> Result<Cache, PagedError> {
        if spec.groups.is_empty() {
            return Err(Unbuildable("a cache needs at least one layer group").into());
        }
        let mut groups: Vec<Box<dyn Kind>> = Vec::new();
        for group in &spec.groups {
            groups.push(Box::new(Paged::new(group, spec.block_tokens, spec.rollback_tokens)?));
        }
        let index = match &spec.prefix {
            None => None,
            Some(prefix) => {
                let keying = Keying::new(spec.block_tokens, prefix.vocabulary).ok_or_else(|| {
                    let tokens_per_id = match prefix.vocabulary {
                        Vocabulary::Tokens => 1,
                        Vocabulary::Ids { tokens_per_id } => tokens_per_id,
                    };
                    PagedError::Vocabulary { block_tokens: spec.block_tokens, tokens_per_id }
                })?;
                let policies: Result<_, _> = groups
                    .iter()
                    .map(|_| evict::build_for_serving(&prefix.policy, &prefix.parameters))
                    .collect();
                Some(Index::new(keying, prefix, &groups, policies?))
            }
        };
        let mut cache = Cache::new(groups);
        cache.index = index;
        cache.spec = Some(spec.clone());
        Ok(cache)
    }

    /// The prefix-index operations; `None` if the cache has no prefix index.
    pub fn prefixes(&mut self) -> Option<Prefixes<'_>> {
        self.index.is_some().then_some(Prefixes { cache: self })
    }

    /// Whether the index accepts content of this kind. Always true without an index.
    pub fn accepts(&self, content: &Content<'_>) -> bool {
        self.index.as_ref().is_none_or(|index| index.accepts(content))
    }

    /// The prefix hit that `open` would find. Pure. Empty without an index.
    pub fn lookup(&self, salt: &str, content: &Content<'_>) -> Lookup {
        match &self.index {
            Some(index) => index.lookup(&self.groups, salt, content),
            None => Lookup::default(),
        }
    }

    /// The blocks of `group` that `open` would find, in position order; `None` for blocks that it would not use
    /// because they lie outside the window. Pure. Empty without an index, or if `group` does not exist.
    pub fn lookup_blocks(&self, group: GroupId, salt: &str, content: &Content<'_>) -> Vec<Option<u32>> {
        match &self.index {
            Some(index) => index.lookup_blocks(&self.groups, group, salt, content),
            None => Vec::new(),
        }
    }

    /// Sliding window of `group`: the positions that a query sees, its own included. `None` if a query sees all, or
    /// if the kind has no blocks.
    pub fn window(&self, group: GroupId) -> Option<u32> {
        self.groups.get(group.0 as usize)?.blocks()?.window()
    }

    /// Version of the index. While it does not change, the index caches the same blocks under the same tokens: for a
    /// given prompt, `lookup` returns the same `hit_tokens` and `lookup_blocks` the same blocks. 0 without an index.
    pub fn prefix_version(&self) -> u64 {
        self.index.as_ref().map_or(0, |index| index.version)
    }

    /// Block table of `seq` in `group`, in position order; `None` entries have left the window. Returns `None` if the
    /// kind has no blocks, or if there is no such sequence.
    pub fn block_table(&self, group: GroupId, seq: SeqId) -> Option<Vec<Option<u32>>> {
        let table = self.groups.get(group.0 as usize)?.blocks()?.block_table(seq)?;
        Some(table.iter().map(|&block| (block != crate::kinds::NONE).then_some(block)).collect())
    }

    /// The hash by which [`PrefixEvent`]s name the prefix `tokens` under `salt`, cut to whole blocks. Sequences that
    /// were opened without a salt have the empty one. 0 without an index.
    pub fn prefix_hash(&self, salt: &str, tokens: &[u32]) -> u64 {
        self.index.as_ref().map_or(0, |index| index.hash(salt, &Content::Tokens(tokens)))
    }

    /// Explains why `lookup` finds no more. Without an index the answer is always `NeverSeen`.
    pub fn explain(&self, salt: &str, content: &Content<'_>, viewer: Viewer) -> MissReason {
        match &self.index {
            Some(index) => index.explain(&self.groups, salt, content, viewer),
            None => MissReason::NeverSeen { position: 0 },
        }
    }
}

impl Prefixes<'_> {
    /// See [`Cache::lookup`].
    pub fn lookup(&self, salt: &str, content: &Content<'_>) -> Lookup {
        self.cache.lookup(salt, content)
    }

    /// See [`Cache::explain`].
    pub fn explain(&self, salt: &str, content: &Content<'_>, viewer: Viewer) -> MissReason {
        self.cache.explain(salt, content, viewer)
    }

    /// Makes the sequence `seq` and gives it the cached blocks of the prompt `content` under `salt`, without copying
    /// a byte. It continues at the lookup's `hit_tokens`. Refused, with nothing changed, if `seq` exists or if
    /// `content` is of another kind than the index. Never refused for lack of space, because it takes no free cells.
    pub fn open(
        &mut self,
        seq: SeqId,
        salt: &str,
        content: &Content<'_>,
        at: Moment,
    ) -> Result<Lookup, Refused> {
        self.open_counted(seq, salt, content, at, true)
    }

    /// Like [`open`](Self::open), for a prompt that was opened before and then removed, as after a preemption. It may
    /// hit its own stored blocks, and is not counted again in [`PrefixReport::opened`].
    pub fn open_again(
        &mut self,
        seq: SeqId,
        salt: &str,
        content: &Content<'_>,
        at: Moment,
    ) -> Result<Lookup, Refused> {
        self.open_counted(seq, salt, content, at, false)
    }

    fn open_counted(
        &mut self,
        seq: SeqId,
        salt: &str,
        content: &Content<'_>,
        at: Moment,
        is_first: bool,
    ) -> Result<Lookup, Refused> {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        let found = index.as_mut().expect(CHECKED).open(groups, seq, salt, content, at, is_first)?;
        *epoch += 1;
        Ok(found)
    }

    /// Adds the full blocks of `seq` to the index. `content` is the tokens of `seq` from the first on, as far as it
    /// goes. If the index already caches a block with the same content, `seq` uses that one from now on.
    ///
    /// All of `content` is compared with what is already stored for `seq`, in O(its length). If it differs, the call
    /// is refused as [`Refused::OtherContent`] and nothing changes. A caller that stores at every step can limit the
    /// comparison to the new part with [`store_from`](Self::store_from).
    pub fn store(&mut self, seq: SeqId, content: &Content<'_>, at: Moment) -> Result<Stored, Refused> {
        self.store_from(seq, 0, content, at)
    }

    /// Like [`store`](Self::store), for a caller that has already stored everything before position `from`. Stored
    /// blocks of `seq` that begin before it are neither compared again nor counted. `content` still begins with the
    /// first token of `seq`. O(blocks after `from`).
    pub fn store_from(
        &mut self,
        seq: SeqId,
        from: u32,
        content: &Content<'_>,
        at: Moment,
    ) -> Result<Stored, Refused> {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        let stored = index.as_mut().expect(CHECKED).store(groups, seq, from, content, at)?;
        *epoch += 1;
        Ok(stored)
    }

    /// Evicts cached blocks that no sequence uses, until `n_tokens` cells are free in every group or nothing is left
    /// to evict. Returns the number of evicted blocks, over all groups.
    pub fn evict_until_free(&mut self, n_tokens: u32, at: Moment) -> u32 {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        *epoch += 1;
        index.as_mut().expect(CHECKED).evict_until_free(groups, |_| n_tokens, at)
    }

    /// Evicts as [`evict_until_free`](Self::evict_until_free) does, until every layer group would have room in these capacities: see
    /// [`Cache::plan_resize`].
    pub fn evict_down_to(&mut self, capacity_tokens: &[u32], at: Moment) -> u32 {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        *epoch += 1;
        let occupied: Vec<Occupancy> = groups.iter().map(|kind| kind.occupancy()).collect();
        let n_free = |g: usize| {
            let to = capacity_tokens.get(g).copied().unwrap_or(u32::MAX);
            occupied[g].capacity_cells.saturating_sub(to - to % occupied[g].block_tokens)
        };
        index.as_mut().expect(CHECKED).evict_until_free(groups, n_free, at)
    }

    /// Drops what is cached under a salt, as far as no sequence, pin or import uses it, and returns the dropped blocks: those
    /// after their children in the index. Blocks in use stay cached, with those that they follow.
    pub fn forget(&mut self, salt: &str, at: Moment) -> Vec<CachedBlock> {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        *epoch += 1;
        index.as_mut().expect(CHECKED).forget(groups, salt, at)
    }

    /// Statistics of the index.
    pub fn report(&self) -> PrefixReport {
        self.cache.index.as_ref().expect(CHECKED).report()
    }
}

const CHECKED: &str = "this view exists only where there is an index";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{GroupSpec, Visibility};
    use crate::{Span, StepPlan, StepRequest};

    /// A plan made before an eviction may write to cells that now belong to another sequence. The borrow rules
    /// prevent it; should they fail to, the epoch check catches it.
    #[test]
    #[should_panic(expected = "a plan of epoch 1 was applied to a cache of 2")]
    fn no_plan_outlives_an_eviction() {
        let groups =
            vec![GroupSpec { capacity_tokens: 16, visibility: Visibility::FULL, max_step_tokens: 16 }];
        let prefix = Some(PrefixSpec::default());
        let spec = PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix };
        let mut cache = Cache::paged(&spec).unwrap();
        cache.sequences().unwrap().seq_new(SeqId(1)).unwrap();
        let mut plan = StepPlan::default();
        cache.prepare(&StepRequest { spans: &[Span::chain(SeqId(1), 0, 3)] }, &mut plan).unwrap();
        cache.prefixes().unwrap().evict_until_free(4, Moment { now_ns: 0 });
        cache.apply(&plan);
    }
}
