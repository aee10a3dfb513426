//! What happened to blocks, as data: for a log, a recording, a live map.
//!
//! Off until [`Cache::watch`](crate::Cache::watch), or [`Arena::watch`](crate::arena::Arena::watch): then every change
//! of a block's state is noted until it is [drained](crate::Cache::drain_events). Switched off it costs one test of a
//! flag, and one count ([`BlockCounters`]).
use crate::ids::*;

/// One change of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// Steps that this cache had committed before.
    pub step: u64,
    /// Whose block.
    pub group: GroupId,
    /// Which.
    pub block: u32,
    /// For whom; `None` if it concerns no sequence.
    pub seq: Option<SeqId>,
    /// What.
    pub change: Change,
    /// Why.
    pub reason: Reason,
}

/// What happened to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was free and holds tokens of `seq` now.
    Alloc,
    /// It is free again.
    Free,
    /// Room was made of it: the index forgot it, or its sequence had to go. It is free again.
    Evict,
    /// `seq` holds it too from now on, because it was forked.
    Share,
    /// `seq` wrote into a copy of a block that others read; this is the copy, `from` the original.
    CopyOnWrite {
        /// The original.
        from: u32,
    },
    /// The index knows its content from now on.
    Store,
    /// `seq` holds it because its prompt begins like an indexed one.
    Hit,
    /// `seq` let it go, and it stays for later hits.
    Idle,
    /// `seq` let it go, and others hold it still.
    Release,
    /// It holds what block `from` of `seq` held. What becomes free in the same step is told before: two sequences may
    /// change places.
    Move {
        /// Where that was.
        from: u32,
    },
}

/// Why it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
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
    /// No later query can see it.
    Window,
    /// The index knows the content from another block.
    Duplicate,
    /// Full blocks were handed to the index.
    Store,
    /// Room was made.
    MakeRoom,
    /// Everything was forgotten.
    Clear,
    /// The number of blocks changed.
    Resize,
}

macro_rules! names {
    ($($type:ident { $($variant:pat => $name:literal),* $(,)? })*) => {$(
        impl $type {
            /// In records: lower case, words joined by `_`.
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
        Change::Idle => "idle", Change::Move { .. } => "move", Change::Release => "release",
    }
    Reason {
        Reason::Append => "append", Reason::Fork => "fork", Reason::Open => "open", Reason::Rollback => "rollback",
        Reason::Remove => "remove", Reason::Window => "window", Reason::Duplicate => "duplicate",
        Reason::Store => "store", Reason::MakeRoom => "make_room", Reason::Clear => "clear",
        Reason::Resize => "resize",
    }
}

/// How often blocks changed, since the cache was made. Counted whether somebody watches or not.
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
    /// [`Change::Idle`].
    pub fell_idle: u64,
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
            Change::Idle => &mut self.fell_idle,
            Change::Move { .. } => &mut self.moved,
            Change::Release => &mut self.released,
        };
        *counter += 1;
    }
}

/// The events of one cell space since they were last drained.
#[derive(Default)]
pub(crate) struct Events {
    pub group: Option<GroupId>,
    pub step: u64,
    pub counters: BlockCounters,
    list: Vec<BlockEvent>,
}

impl Events {
    /// On from now on, under the name of `group`, or off.
    pub fn watch(&mut self, group: Option<GroupId>) {
        self.group = group;
        self.list.clear();
    }
    pub fn is_watching(&self) -> bool {
        self.group.is_some()
    }
    #[inline]
    pub fn push(&mut self, block: u32, seq: Option<SeqId>, change: Change, reason: Reason) {
        self.counters.count(change);
        if let Some(group) = self.group {
            self.list.push(BlockEvent { step: self.step, group, block, seq, change, reason });
        }
    }
    pub fn drain(&mut self, out: &mut Vec<BlockEvent>) {
        out.append(&mut self.list);
    }
}
