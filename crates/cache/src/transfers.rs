//! Blocks whose bytes are being copied, to somewhere else (an export) or from there (an import).
//!
//! A transfer runs concurrently with steps and outlives them, so it cannot borrow the cache. Instead, its blocks are in
//! a state of their own:
//!
//! - A *pinned* block is neither written nor free until it is unpinned. Sequences and the prefix index may use it,
//!   leave it and come back; a sequence that appends to it gets a copy.
//! - A *loading* block is neither free nor readable until its bytes have arrived. No sequence, no hit and no pin gets
//!   it. If the import fails, it is free again.
//!
//! Eviction, windows and [`Cache::clear`] leave both alone. The states end with the values [`Pin`] and [`Loading`], which
//! cannot be copied. If such a value is dropped, its blocks stay pinned or loading.
use crate::block_kind::BlockKind;
use crate::cache::Cache;
use crate::ids::*;
use crate::kind::Kind;
use crate::kinds::NONE;
use crate::prefix::{Content, Moment, Prefixes};
use crate::request::Refused;

/// Names one block of one layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// The layer group.
    pub group: GroupId,
    /// The block's number in the group: the cells from `block * block_tokens` on.
    pub block: u32,
}

/// Pinned blocks, from [`Cache::pin`] to [`Cache::unpin`].
#[derive(Debug)]
#[must_use = "blocks stay pinned until `unpin` gets this"]
pub struct Pin {
    cache: u64,
    blocks: Vec<BlockId>,
}

impl Pin {
    /// The pinned blocks, in the order in which they were given.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

/// One cached block of a prompt: its block of every layer group. What a lower tier stores as one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedBlock {
    /// The hash by which prefix events name the prefix up to this block's end. Not secret and not collision-resistant:
    /// a tier must not take it for the content.
    pub hash: u64,
    /// By layer group. Groups that have no block for it (it left their window) are missing.
    pub blocks: Vec<BlockId>,
}

impl CachedBlock {
    /// Its block of `group`; `None` if that group has none for it.
    pub fn in_group(&self, group: GroupId) -> Option<u32> {
        self.blocks.iter().find(|id| id.group == group).map(|id| id.block)
    }
}

/// Blocks that wait for their bytes, from [`Cache::load`] to [`Cache::arrived`].
#[derive(Debug)]
#[must_use = "blocks stay loading until `arrived` gets this"]
pub struct Loading {
    cache: u64,
    seq: SeqId,
    start: u32,
    n_tokens: u32,
    /// The history of the sequence that the import continues.
    lineage: u64,
    /// By group and block of the range; [`NONE`] where no later query sees the block.
    groups: Vec<Vec<u32>>,
}

impl Loading {
    /// The sequence that the import extends.
    pub fn seq(&self) -> SeqId {
        self.seq
    }
    /// The positions whose K and V are imported.
    pub fn positions(&self) -> std::ops::Range<u32> {
        self.start..self.start + self.n_tokens
    }
    /// The blocks of `group` that wait for bytes, in position order: the first one stores positions from
    /// `positions().start` on. `None` where no later query sees the block, so that nothing need be imported.
    pub fn blocks(&self, group: GroupId) -> impl Iterator<Item = Option<u32>> {
        let blocks = self.groups.get(group.0 as usize).into_iter().flatten();
        blocks.map(|&block| (block != NONE).then_some(block))
    }
}

const NO_PART: &str =
    "a part of an import ends where a block ends, and with all blocks that later queries see";
const OTHER_CACHE: &str = "a transfer of another cache";
const NO_BLOCKS: &str = "this kind of cache has no blocks to transfer: use paged";

fn blocks_of(groups: &mut [Box<dyn Kind>], group: usize) -> Option<&mut dyn BlockKind> {
    groups.get_mut(group)?.blocks_mut()
}

impl Prefixes<'_> {
    /// Like [`evict_until_free`](Self::evict_until_free), but the evicted blocks stay pinned so that they can be exported
    /// first. They are in the prefix index no more, and free when the returned [`Pin`] is [unpinned](Cache::unpin). Stops
    /// when `n_tokens` cells are free or will be, after `max_blocks` cached blocks, and where no evictable block is a
    /// leaf of the index. Layer groups with a window are not searched for victims.
    pub fn demote_until_free(
        &mut self,
        n_tokens: u32,
        max_blocks: u32,
        at: Moment,
    ) -> (Pin, Vec<CachedBlock>) {
        let Cache { groups, index, epoch, id, .. } = &mut *self.cache;
        *epoch += 1;
        let index = index.as_mut().expect("this view exists only where there is an index");
        let demoted = index.demote_until_free(groups, n_tokens, max_blocks, at);
        let blocks = demoted.iter().flat_map(|block| block.blocks.iter().copied()).collect();
        (Pin { cache: *id, blocks }, demoted)
    }
}

impl Cache {
    /// The cached blocks of `seq`, from the block that begins at position `from` on: those that the prefix index has
    /// for it. O(blocks returned). Empty without an index, or if there is no such sequence.
    pub fn cached_blocks(&self, seq: SeqId, from: u32) -> Vec<CachedBlock> {
        self.index.as_ref().map_or(Vec::new(), |index| index.cached_blocks(&self.groups, seq, from))
    }

    /// The hash of the prefix that a block ends, as in [`CachedBlock`]; `None` if the prefix index does not have the block.
    pub fn hash_of(&self, block: BlockId) -> Option<u64> {
        self.index.as_ref()?.hash_of(&self.groups, block)
    }

    /// The hashes of the whole blocks of a prompt under `salt`, in order: those by which prefix events and
    /// [`CachedBlock`] name them. Empty without an index, or if the index is for content of another kind.
    pub fn prefix_hashes(&self, salt: &str, content: &Content<'_>) -> Vec<u64> {
        self.index.as_ref().map_or(Vec::new(), |index| index.hashes(salt, content))
    }

    /// Pins blocks for an export: their bytes stay as they are until [`unpin`](Self::unpin). A block may be pinned
    /// several times. Refused, with nothing changed, if one of the blocks is free, is loading or does not exist.
    pub fn pin(&mut self, blocks: &[BlockId]) -> Result<Pin, Refused> {
        for &id in blocks {
            let readable = blocks_of(&mut self.groups, id.group.0 as usize)
                .is_some_and(|kind_blocks| kind_blocks.is_readable(id.block));
            if !readable {
                return Err(Refused::NoSuchBlock(id));
            }
        }
        self.epoch += 1;
        for &BlockId { group, block } in blocks {
            let kind_blocks = blocks_of(&mut self.groups, group.0 as usize).expect("it was found above");
            if kind_blocks.pin(block)
                && let Some(index) = &mut self.index
            {
                index.in_use(group, block);
            }
        }
        Ok(Pin { cache: self.id, blocks: blocks.to_vec() })
    }

    /// Ends an export. Blocks that nothing else uses become free, or evictable if they are cached. Panics if `pin` is
    /// of another cache.
    pub fn unpin(&mut self, pin: Pin) {
        assert_eq!(pin.cache, self.id, "{OTHER_CACHE}");
        self.epoch += 1;
        for BlockId { group, block } in pin.blocks {
            blocks_of(&mut self.groups, group.0 as usize).expect("it has pinned blocks").unpin(block);
        }
        if let Some(index) = &mut self.index {
            index.rank_newly_evictable(&mut self.groups);
        }
    }

    /// Takes free blocks for an import that appends `n_tokens` tokens to `seq`, in all groups. The sequence stays as it
    /// is until the bytes have [arrived](Self::arrived).
    ///
    /// Refused, with nothing changed, if there is no such sequence, if it does not end at the end of a block, and if
    /// too few blocks are free.
    pub fn load(&mut self, seq: SeqId, n_tokens: u32) -> Result<Loading, Refused> {
        let start = self.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        if n_tokens == 0 {
            return Err(Refused::Empty);
        }
        let until = start.checked_add(n_tokens).ok_or(Refused::PositionOverflow { seq })?;
        for (g, kind) in self.groups.iter().enumerate() {
            let kind_blocks = kind.blocks().ok_or(Refused::Unsupported(NO_BLOCKS))?;
            kind_blocks.can_load(seq, until, GroupId(g as u16))?;
        }
        self.epoch += 1;
        let groups = self.groups.iter_mut().filter_map(|kind| Some(kind.blocks_mut()?.load(seq, until)));
        let groups = groups.collect();
        let lineage = self.groups[0].blocks().map_or(0, |kind_blocks| kind_blocks.lineage(seq));
        Ok(Loading { cache: self.id, seq, start, n_tokens, lineage, groups })
    }

    /// Whether the sequence of an import is as it was when that began.
    fn continues(&self, loading: &Loading) -> Result<(), Refused> {
        let &Loading { seq, start, lineage, .. } = loading;
        let expected = self.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        let is_same = self.groups[0].blocks().is_some_and(|kind_blocks| kind_blocks.lineage(seq) == lineage);
        match is_same && expected == start {
            true => Ok(()),
            false => Err(Refused::NotAtEnd { seq, expected, got: start }),
        }
    }

    /// Ends an import of which the first `n_tokens` tokens have arrived, and no more: they become the next tokens of the sequence,
    /// and the blocks of the rest are free.
    ///
    /// Refused as [`arrived`](Self::arrived) is; and if a block of the import ends elsewhere, or a later query would see a block that
    /// was not imported, because a window was to move on. All blocks are then free. Panics if `loading` is of another cache.
    pub fn arrived_in_part(&mut self, mut loading: Loading, n_tokens: u32) -> Result<(), Refused> {
        assert_eq!(loading.cache, self.id, "{OTHER_CACHE}");
        let (seq, start) = (loading.seq, loading.start);
        if n_tokens == loading.n_tokens || self.continues(&loading).is_err() {
            return self.arrived::<()>(loading, Ok(()));
        }
        let kept = (1..loading.n_tokens).contains(&n_tokens).then(|| {
            let kept = self.groups.iter().zip(&loading.groups);
            let kept = kept.map(|(kind, blocks)| kind.blocks()?.part_of_load(seq, start + n_tokens, blocks));
            kept.collect::<Option<Vec<usize>>>()
        });
        let Some(kept) = kept.flatten() else {
            self.arrived(loading, Err(()))?;
            return Err(Refused::Unsupported(NO_PART));
        };
        for ((kind, blocks), n_kept) in self.groups.iter_mut().zip(&mut loading.groups).zip(kept) {
            let rest = blocks.split_off(n_kept);
            kind.blocks_mut().expect("it has loading blocks").abandon_load(seq, &rest);
        }
        loading.n_tokens = n_tokens;
        self.arrived::<()>(loading, Ok(()))
    }

    /// Ends an import. If the bytes have arrived (`Ok`), they become the next tokens of the sequence, which a prefix
    /// index does not cache until they are [stored](crate::Prefixes::store). If they have not (`Err`), the blocks are
    /// free, the sequence stays as it is, and the call succeeds.
    ///
    /// Refused if the sequence has been removed, shortened or extended since the call of [`load`](Self::load); the
    /// blocks are then free as well. Panics if `loading` is of another cache.
    pub fn arrived<E>(&mut self, loading: Loading, result: Result<(), E>) -> Result<(), Refused> {
        assert_eq!(loading.cache, self.id, "{OTHER_CACHE}");
        self.epoch += 1;
        let continues = match result {
            Ok(()) => self.continues(&loading).map(|()| true),
            Err(_) => Ok(false),
        };
        let Loading { seq, start, n_tokens, groups, .. } = loading;
        for (kind, blocks) in self.groups.iter_mut().zip(groups) {
            let kind_blocks = kind.blocks_mut().expect("it has loading blocks");
            match continues {
                Ok(true) => kind_blocks.append_loaded(seq, start + n_tokens, &blocks),
                _ => kind_blocks.abandon_load(seq, &blocks),
            }
        }
        if let Some(index) = &mut self.index {
            index.rank_newly_evictable(&mut self.groups); // cached blocks may have left the window
        }
        continues.map(|_| ())
    }
}
