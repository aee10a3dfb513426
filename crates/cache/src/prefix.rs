//! What earlier requests computed, found again: the prefix index of a paged cache.
//!
//! Full blocks only, keyed by (salt, all tokens before, tokens of the block); keys are compared, never trusted to a
//! hash. At least the last token of a prompt is always computed, because its logits are wanted. With windows, a hit
//! is the largest L such that full groups hold `[0, L)` and every window group holds the blocks of the positions that
//! a query at L sees.
//!
//! A block that the index knows and no sequence holds is *idle*: it stays until [`Prefixes::make_room`] evicts it, in
//! full groups leaves before parents. A step never evicts.
mod as_is;
mod content;
mod ghosts;
mod hits;
mod index;
mod tree;

pub use content::{Content, Vocabulary};
pub use hits::{HitCounts, RECENT_PROMPTS};
pub(crate) use index::Index;

use crate::cache::Cache;
use crate::evict::{self, Parameters, PolicyError};
use crate::ids::*;
use crate::kind::Kind;
use crate::kinds::{GroupSpec, Paged, Unbuildable};
use crate::request::Refused;
use content::Keying;

/// When a verb is called. Time comes in as an argument.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The caller's clock, in nanoseconds.
    pub now_ns: u64,
}

/// A paged cache.
#[derive(Clone, Debug)]
pub struct PagedSpec {
    /// Tokens of a block, at least 1. Powers of two are faster.
    pub block_tokens: u32,
    /// One cell space each. `capacity_tokens` is rounded down to whole blocks, of which there has to be one; `u32::MAX` is as good as endless, and
    /// such a group never evicts.
    pub groups: Vec<GroupSpec>,
    /// Tokens that rollbacks can take back although the window has moved past what the next query needs, counted from
    /// the furthest position that the sequence has reached. So rollbacks one after the other share them, and they are
    /// whole again when the sequence has grown past that position.
    pub rollback_tokens: u32,
    /// With an index over its full blocks?
    pub prefix: Option<PrefixSpec>,
}

/// A prefix index.
#[derive(Clone, Debug)]
pub struct PrefixSpec {
    /// What prompts are made of.
    pub vocabulary: Vocabulary,
    /// Name of the eviction policy, of [`POLICIES`](evict::POLICIES).
    pub policy: String,
    /// The policy's parameters.
    pub parameters: Parameters,
    /// Evicted blocks to remember, for explanations. 12 to 40 bytes each.
    pub n_ghosts: u32,
    /// Bytes of a block in each group, for policies that weigh them; 1 where missing.
    pub block_bytes: Vec<u64>,
    /// What computing a block anew costs.
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

/// What computing one token anew costs, in any unit: linear layers per token, attention per token and token seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecomputeCost {
    /// Of the linear layers.
    pub per_token: f64,
    /// Of attention, for each position that the token sees.
    pub per_pair: f64,
}

impl RecomputeCost {
    /// Of the `depth`-th block of a prompt, from 0: its tokens see all before them and, on average, half of their own
    /// block. O(1).
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
#[allow(missing_docs)] // the fields' names are what there is to say
pub enum PagedError {
    /// No group, or one that cannot be.
    Unbuildable(Unbuildable),
    /// Not such a policy.
    Policy(PolicyError),
    /// Blocks and ids do not fit into each other.
    Vocabulary { block_tokens: u32, tokens_per_id: u32 },
}

impl std::fmt::Display for PagedError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PagedError::Unbuildable(why) => why.fmt(f),
            PagedError::Policy(why) => why.fmt(f),
            PagedError::Vocabulary { block_tokens, tokens_per_id } => write!(
                f,
                "blocks of {block_tokens} tokens and ids of {tokens_per_id} tokens do not fit into each other: take a block size that divides {tokens_per_id} or is a multiple of it"
            ),
        }
    }
}
impl std::error::Error for PagedError {}
impl From<PolicyError> for PagedError {
    fn from(why: PolicyError) -> Self {
        PagedError::Policy(why)
    }
}
impl From<Unbuildable> for PagedError {
    fn from(why: Unbuildable) -> Self {
        PagedError::Unbuildable(why)
    }
}

/// What a prompt finds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Tokens that need not be computed: whole blocks, and never the last token.
    pub hit_tokens: u32,
    /// Of these, tokens in blocks that nobody holds: holding them takes them from what room can be made of. The most over
    /// all groups.
    pub idle_tokens: u32,
}

/// Why a prompt was not found beyond `position`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields' names are what there is to say
pub enum MissReason {
    /// Everything that can be shared was: what is left is less than a block, or the token that is always computed.
    UnalignedTail { position: u32 },
    /// Others went on from here, but not with the token at `position`. Of contents without tokens, the block.
    Diverged { position: u32 },
    /// It was here, and room was made of it.
    Evicted { position: u32 },
    /// Nobody has asked this before.
    NeverSeen { position: u32 },
    /// The full groups hold more, but a window group has lost what a query behind it would see.
    WindowGone { position: u32 },
    /// A prompt under another salt begins so, and none under this one. Told to operators only: a tenant would learn what others ask.
    OtherSalt { position: u32 },
}

impl MissReason {
    /// In records: lower case, words joined by `_`.
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
    /// What a tenant may hear of what an operator knows: nothing of other salts.
    pub fn for_tenant(self) -> MissReason {
        match self {
            MissReason::OtherSalt { position } => MissReason::NeverSeen { position },
            told => told,
        }
    }
    /// Where the hit ended, or the first token that differs.
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

/// Who is told why a prompt missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Whoever sent the prompt: what lies under other salts does not exist.
    Tenant,
    /// Whoever runs the cache.
    Operator,
}

/// What an index learned and forgot, for routers and tiers that keep a copy of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the fields' names are what there is to say
pub enum PrefixEvent {
    /// `block` of `group` holds the tokens of the prefix `hash`, which `parent_hash` precedes. `key` is the tokens, or
    /// what stands for them.
    Stored { group: GroupId, block: u32, hash: u64, parent_hash: u64, key: Box<[u32]> },
    /// It does no longer.
    Removed { group: GroupId, block: u32, hash: u64 },
    /// Nothing is known any more.
    Cleared,
}

/// What [`Prefixes::store`] found: `n_new + n_known` is the number of full blocks that were handed over and are
/// committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    /// Blocks of content that the index did not know.
    pub n_new: u32,
    /// Blocks of content that it knew already, from this sequence or from another one.
    pub n_known: u32,
}

/// The state of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Blocks of content that were new when they were stored, since the beginning.
    pub n_stored: u64,
    /// Blocks that were evicted, of all groups.
    pub n_evicted: u64,
    /// Salts in use.
    pub n_salts: u32,
    /// The eviction policy; `None` where nothing is ever evicted.
    pub policy: Option<&'static str>,
    /// Every [`Prefixes::open`] since the beginning.
    pub opened: HitCounts,
    /// The last [`RECENT_PROMPTS`] of them.
    pub recent: HitCounts,
}

/// The face of a paged cache with a prefix index.
pub struct Prefixes<'c> {
    cache: &'c mut Cache,
}

impl Cache {
    /// A paged cache. Sequences are opened through [`Cache::prefixes`] if it has an index, and through
    /// [`Cache::sequences`] otherwise.
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

    /// The face of caches with a prefix index.
    pub fn prefixes(&mut self) -> Option<Prefixes<'_>> {
        self.index.is_some().then_some(Prefixes { cache: self })
    }

    /// Does content of this kind belong into the index? Without an index, any does.
    pub fn accepts(&self, content: &Content<'_>) -> bool {
        self.index.as_ref().is_none_or(|index| index.accepts(content))
    }

    /// What `open` would find. Pure. Nothing without an index.
    pub fn lookup(&self, salt: &str, content: &Content<'_>) -> Lookup {
        match &self.index {
            Some(index) => index.lookup(&self.groups, salt, content),
            None => Lookup::default(),
        }
    }

    /// The blocks of `group` that `open` would find, in the order of their positions; `None` for those that it would not
    /// hold, because the window has left them behind. Pure. Empty without an index, or where `group` does not exist.
    pub fn lookup_blocks(&self, group: GroupId, salt: &str, content: &Content<'_>) -> Vec<Option<u32>> {
        match &self.index {
            Some(index) => index.lookup_blocks(&self.groups, group, salt, content),
            None => Vec::new(),
        }
    }

    /// Positions that a query of `group` sees, its own included; `None` if it sees all, or there are no blocks.
    pub fn window(&self, group: GroupId) -> Option<u32> {
        self.groups.get(group.0 as usize)?.paged()?.window()
    }

    /// While this number stays the same, the index knows the same blocks by the same tokens: of a prompt, `lookup` finds as
    /// many `hit_tokens` as before, and `lookup_blocks` the same blocks. 0 without an index.
    pub fn prefix_version(&self) -> u64 {
        self.index.as_ref().map_or(0, |index| index.version)
    }

    /// Blocks of `seq` in `group`, in the order of its positions; `None` for those that have left the window. `None` if
    /// the kind has no blocks, or there is no such sequence.
    pub fn block_table(&self, group: GroupId, seq: SeqId) -> Option<Vec<Option<u32>>> {
        Some(self.groups.get(group.0 as usize)?.paged()?.block_table(seq)?.collect())
    }

    /// By what [`PrefixEvent`]s name the prefix `tokens` under `salt`, cut to whole blocks; of `seq`s that never named
    /// a salt it is the empty one. 0 without an index.
    pub fn prefix_hash(&self, salt: &str, tokens: &[u32]) -> u64 {
        self.index.as_ref().map_or(0, |index| index.hash(salt, &Content::Tokens(tokens)))
    }

    /// Why `lookup` finds no more. Without an index nothing was ever seen.
    pub fn explain(&self, salt: &str, content: &Content<'_>, audience: Audience) -> MissReason {
        match &self.index {
            Some(index) => index.explain(&self.groups, salt, content, audience),
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
    pub fn explain(&self, salt: &str, content: &Content<'_>, audience: Audience) -> MissReason {
        self.cache.explain(salt, content, audience)
    }

    /// Make `seq`, and let it hold what the index knows of the prompt `content` under `salt`, without copying a byte:
    /// it continues at the lookup's `hit_tokens`. Refused if it exists, or if `content` is of another kind than the
    /// index; then nothing changes. Never for lack of space: it takes none.
    pub fn open(
        &mut self,
        seq: SeqId,
        salt: &str,
        content: &Content<'_>,
        at: Moment,
    ) -> Result<Lookup, Refused> {
        self.open_counted(seq, salt, content, at, true)
    }

    /// [`open`](Self::open), for a prompt that was opened before, and removed: it finds what was stored of itself, and is
    /// not counted again in [`PrefixReport::opened`].
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

    /// Let the index know the full blocks of `seq`, whose tokens from the first on are `content` (as far as it goes).
    /// Where it knows a block from elsewhere, `seq` holds that one from now on.
    ///
    /// All of `content` is compared with what is stored for `seq` already, in O(its length): content that differs is
    /// refused as [`Refused::OtherContent`], and nothing changes. A caller that stores at every step hands over what
    /// is new with [`store_from`](Self::store_from).
    pub fn store(&mut self, seq: SeqId, content: &Content<'_>, at: Moment) -> Result<Stored, Refused> {
        self.store_from(seq, 0, content, at)
    }

    /// [`store`](Self::store), for a caller that has stored what lies before position `from`: blocks of `seq` that are
    /// stored and begin before it are neither compared again nor counted. `content` still begins with the first token
    /// of `seq`. O(blocks behind `from`).
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

    /// Evict idle blocks until `n_tokens` cells are free in every group, or nothing idle is left. Returns the number of
    /// blocks evicted, of all groups.
    pub fn make_room(&mut self, n_tokens: u32, at: Moment) -> u32 {
        let Cache { groups, index, epoch, .. } = &mut *self.cache;
        *epoch += 1;
        index.as_mut().expect(CHECKED).make_room(groups, n_tokens, at)
    }

    /// Its figures.
    pub fn report(&self) -> PrefixReport {
        self.cache.index.as_ref().expect(CHECKED).report()
    }
}

const CHECKED: &str = "this face exists only where there is an index";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{GroupSpec, Visibility};
    use crate::{Span, StepPlan, StepRequest};

    /// What was planned before blocks were evicted may write to cells that are another's by now. Borrows rule it out; if
    /// they ever do not, it is found.
    #[test]
    #[should_panic(expected = "a plan of epoch 1 met a cache of 2")]
    fn no_plan_outlives_an_eviction() {
        let groups =
            vec![GroupSpec { capacity_tokens: 16, visibility: Visibility::FULL, max_step_tokens: 16 }];
        let prefix = Some(PrefixSpec::default());
        let spec = PagedSpec { block_tokens: 4, groups, rollback_tokens: 0, prefix };
        let mut cache = Cache::paged(&spec).unwrap();
        cache.sequences().unwrap().seq_new(SeqId(1)).unwrap();
        let mut plan = StepPlan::default();
        cache.prepare(&StepRequest { spans: &[Span::chain(SeqId(1), 0, 3)] }, &mut plan).unwrap();
        cache.prefixes().unwrap().make_room(4, Moment { now_ns: 0 });
        cache.apply(&plan);
    }
}
