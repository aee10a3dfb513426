//! Block events as data, for logs, recordings and live displays.
//!
//! Recording is off until [`Cache::watch_blocks`](crate::Cache::watch_blocks) or
//! [`Arena::watch`](crate::arena::Arena::watch). Then every change of a block's state is recorded until it is
//! [drained](crate::Cache::drain_block_events). While it is off, a change costs one test of a flag and one counter
//! update ([`BlockCounters`]).
use crate::ids::*;

/// One change of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Number of steps that the cache had committed before.
    pub step: u64,
    /// The block's layer group.
    pub group: GroupId,
    /// The block.
    pub block: u32,
    /// The sequence concerned; `None` if there is none.
    pub seq: Option<SeqId>,
    /// What happened.
    pub change: Change,
    /// Why it happened.
    pub reason: ChangeReason,
}

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The block was free and now stores tokens of `seq`.
    Alloc,
    /// The block became free.
    Free,
    /// The block was evicted and is free: the prefix index dropped it, or its sequence was removed to make space.
    Evict,
    /// `seq` also uses the block now, because it was forked.
    Share,
    /// `seq` wrote to a copy of a block that others read. `block` is the copy, `from` the original.
    CopyOnWrite {
        /// The original block.
        from: u32,
    },
    /// The prefix index now caches the block.
    Store,
    /// Prefix hit: `seq` uses the block because its prompt begins like a cached one.
    Hit,
    /// `seq` no longer uses the block, nor does any other sequence. It stays cached for later hits.
    Evictable,
    /// `seq` no longer uses the block, but other sequences still do.
    Release,
    /// The block now stores what block `from` of `seq` stored. Blocks that become free in the same step are reported
    /// before, because two sequences may swap places.
    Move {
        /// The previous block.
        from: u32,
    },
}

/// Why a block changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeReason {
    /// A step added tokens.
    Append,
    /// A sequence was forked.
    Fork,
    /// A sequence was opened.
    Open,
    /// A sequence was shortened.
    Rollback,
    /// A sequence was removed.
    Remove,
    /// No later query can see it: it left the sliding window.
    Window,
    /// The index already cached the same content in another block.
    Duplicate,
    /// Full blocks were stored in the prefix index.
    Store,
    /// Space was needed.
    SpaceNeeded,
    /// The whole cache was cleared.
    Clear,
    /// The number of blocks changed.
    Resize,
    /// An export has ended.
    Unpin,
    /// An import took blocks, or has failed.
    Load,
}

macro_rules! names {
    ($($type:ident { $($variant:pat => $name:literal),* $(,)? })*) => {$(
        impl $type {
            /// The name in recordings: lower case, words joined by `_`.
            pub fn name(self) -> &'static str {
                match self { $($variant => $name),* }
            }
        }
    )*};
}
names! {
    Change {
        Change::Alloc => "alloc", Change::Free => "free", Change::Evict => "evict", Change::Share => "share",
        Change::CopyOnWrite { .. } => "copy_on_write", Change::Store => "store", Change::Hit => "hit",
        Change::Evictable => "idle", Change::Move { .. } => "move", Change::Release => "release",
    }
    ChangeReason {
        ChangeReason::Append => "append", ChangeReason::Fork => "fork", ChangeReason::Open => "open", ChangeReason::Rollback => "rollback",
        ChangeReason::Remove => "remove", ChangeReason::Window => "window", ChangeReason::Duplicate => "duplicate",
        ChangeReason::Store => "store", ChangeReason::SpaceNeeded => "make_room", ChangeReason::Clear => "clear",
        ChangeReason::Resize => "resize", ChangeReason::Unpin => "unpin", ChangeReason::Load => "load",
    }
}

/// How often blocks changed since the cache was made. Counted whether events are recorded or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounters {
    /// [`Change::Alloc`].
    pub allocated: u64,
    /// [`Change::Free`].
    pub freed: u64,
    /// [`Change::Evict`].
    pub evicted: u64,
    /// [`Change::Share`].
    pub shared: u64,
    /// [`Change::CopyOnWrite`].
    pub copied_on_write: u64,
    /// [`Change::Store`].
    pub stored: u64,
    /// [`Change::Hit`].
    pub hit: u64,
    /// [`Change::Evictable`].
    pub became_evictable: u64,
    /// [`Change::Move`].
    pub moved: u64,
    /// [`Change::Release`].
    pub released: u64,
}

impl BlockCounters {
    #[inline]
    fn count(&mut self, change: Change) {
        let counter = match change {
            Change::Alloc => &mut self.allocated,
            Change::Free => &mut self.freed,
            Change::Evict => &mut self.evicted,
            Change::Share => &mut self.shared,
            Change::CopyOnWrite { .. } => &mut self.copied_on_write,
            Change::Store => &mut self.stored,
            Change::Hit => &mut self.hit,
            Change::Evictable => &mut self.became_evictable,
            Change::Move { .. } => &mut self.moved,
            Change::Release => &mut self.released,
        };
        *counter += 1;
    }
}

/// The events of one cell space since they were last drained.
#[derive(Default)]
pub struct Events {
    pub group: Option<GroupId>,
    pub step: u64,
    pub counters: BlockCounters,
    list: Vec<BlockEvent>,
}

impl Events {
    /// Turns recording on, for `group`, or off.
    pub fn watch(&mut self, group: Option<GroupId>) {
        self.group = group;
        self.list.clear();
    }
    pub fn is_watching(&self) -> bool {
        self.group.is_some()
    }
    #[inline]
    pub fn push(&mut self, block: u32, seq: Option<SeqId>, change: Change, reason: ChangeReason) {
        self.counters.count(change);
        if let Some(group) = self.group {
            self.list.push(BlockEvent { step: self.step, group, block, seq, change, reason });
        }
    }
    pub fn drain(&mut self, out: &mut Vec<BlockEvent>) {
        out.append(&mut self.list);
    }
}
