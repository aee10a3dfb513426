//! What happened to blocks, as data: for a log, a recording, a live map.
//!
//! Off until [`Cache::watch`](crate::Cache::watch): then every change of a block's state is noted until it is
//! [drained](crate::Cache::drain_events). Switched off it costs one test of a flag.
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
    /// The index forgot it, and it is free again.
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
        Change::Idle => "idle", Change::Release => "release",
    }
    Reason {
        Reason::Append => "append", Reason::Fork => "fork", Reason::Open => "open", Reason::Rollback => "rollback",
        Reason::Remove => "remove", Reason::Window => "window", Reason::Duplicate => "duplicate",
        Reason::Store => "store", Reason::MakeRoom => "make_room", Reason::Clear => "clear",
    }
}

/// The events of one cell space since they were last drained.
#[derive(Default)]
pub(crate) struct Events {
    pub group: Option<GroupId>,
    pub step: u64,
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
        if let Some(group) = self.group {
            self.list.push(BlockEvent { step: self.step, group, block, seq, change, reason });
        }
    }
    pub fn drain(&mut self, out: &mut Vec<BlockEvent>) {
        out.append(&mut self.list);
    }
}
