//! Blocks on their way to the stores.
//!
//! Each tier has a bound of its own for what waits to be written to it, and each block a task of its own for every tier. So a tier that is
//! slow delays no other one, and loses only its own blocks: what exceeds the bound is not written, and counted. The blocks that follow
//! such a block in its text would be found by no lookup, so they are not written to that tier either. The scheduler hears of what was not
//! written, and has it copied once more when the cache is about to evict it.
use super::pinned::PINNED_TIER;
use super::recent::Recent;
use super::task::{Stores, Wanted};
use super::{Object, Pending, Report, TierDriver};
use crate::serving::thread::Command;
use kvist_scheduler::{MAX_TIERS, NamedBlock};
use kvist_store::{BlockKey, Bytes, StoreError};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::task::JoinSet;

/// A write that a store never ends ends here.
pub(super) const LONGEST_WRITE: Duration = Duration::from_secs(60);

/// What the task that writes an object takes at most, and its key among those that are on their way; without the object's bytes.
pub(super) const WRITE_BYTES: u64 = 4096;

/// What waits to be written, and what was not written because too much waited.
pub struct Writes {
    /// That may wait for each tier.
    max_bytes: u64,
    tiers: [Waiting; MAX_TIERS],
    /// The tiers that each key is on its way to, a bit for each. As many as fit into `max_bytes` of every tier.
    keys: Mutex<HashMap<BlockKey, u8>>,
    /// The tiers that lack a block because it was dropped, a bit for each, as far as it is remembered.
    dropped: Mutex<Recent<u8>>,
}

#[derive(Default)]
struct Waiting {
    bytes: AtomicU64,
    n_dropped: AtomicU64,
}

/// Where a block stands in its text.
#[derive(Clone, Copy)]
pub struct InText {
    /// The block itself, and the one before it; `None` at the beginning.
    pub block: BlockKey,
    pub parent: Option<BlockKey>,
}

/// Something that waits to be written to a tier, until this is dropped.
pub struct Writing {
    stores: Arc<Stores>,
    tier: usize,
    key: BlockKey,
    bytes: u64,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let writes = &self.stores.writes;
        writes.tiers[self.tier].bytes.fetch_sub(self.bytes, Relaxed);
        let mut keys = writes.keys();
        if let Some(tiers) = keys.get_mut(&self.key) {
            *tiers &= !(1 << self.tier);
            if *tiers == 0 {
                keys.remove(&self.key);
            }
        }
    }
}

impl Writes {
    pub fn new(max_bytes: u64) -> Writes {
        Writes { max_bytes, tiers: Default::default(), keys: Mutex::default(), dropped: Mutex::default() }
    }

    /// No method leaves it half changed, so a panic elsewhere does no harm. So for `dropped`.
    fn keys(&self) -> MutexGuard<'_, HashMap<BlockKey, u8>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dropped(&self) -> MutexGuard<'_, Recent<u8>> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a key is on its way to a tier.
    pub fn has(&self, key: &BlockKey, tier: usize) -> bool {
        self.keys().get(key).is_some_and(|tiers| tiers & (1 << tier) != 0)
    }

    /// Bytes on their way, over all tiers: a block that is written to two of them counts twice.
    pub fn bytes(&self) -> u64 {
        self.tiers.iter().map(|tier| tier.bytes.load(Relaxed)).sum()
    }

    /// How many objects were not written to a tier because too much waited for it.
    pub fn n_dropped(&self, tier: usize) -> u64 {
        self.tiers.get(tier).map_or(0, |tier| tier.n_dropped.load(Relaxed))
    }

    /// The tiers that lack this block because it was dropped.
    fn lack(&self, key: &BlockKey) -> u8 {
        self.dropped().get(key).copied().unwrap_or_default()
    }

    /// A tier has a block now.
    pub fn note_written(&self, key: &BlockKey, tier: usize) {
        if let Some(tiers) = self.dropped().get_mut(key) {
            *tiers &= !(1 << tier);
        }
    }
}

impl Stores {
    /// Lets an object wait to be written to a tier, if that does not exceed the bound.
    pub fn may_write(self: &Arc<Self>, tier: usize, key: BlockKey, bytes: u64) -> Option<Writing> {
        let waiting = self.writes.tiers.get(tier)?;
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= self.writes.max_bytes);
        waiting.bytes.fetch_update(Relaxed, Relaxed, more).ok()?;
        *self.writes.keys().entry(key).or_default() |= 1 << tier;
        Some(Writing { stores: self.clone(), tier, key, bytes })
    }

    /// The same for each tier of `tiers` that lacks the object. `at`: a part of which text it is, if blocks come in their order; what is
    /// dropped then takes the blocks after it with it.
    pub fn may_write_to(
        self: &Arc<Self>,
        tiers: impl Iterator<Item = usize>,
        key: BlockKey,
        bytes: u64,
        at: Option<InText>,
    ) -> Vec<Writing> {
        // The part of a window is of no use without the block.
        let needed = at.map(|at| if key == at.block { at.parent } else { Some(at.block) });
        let lacked = needed.flatten().map_or(0, |needed| self.writes.lack(&needed));
        let (mut writings, mut dropped) = (Vec::new(), 0);
        for tier in tiers {
            let follows_a_gap = lacked & (1 << tier) != 0;
            let writing = if follows_a_gap { None } else { self.may_write(tier, key, bytes) };
            match writing {
                Some(writing) => writings.push(writing),
                None => {
                    dropped |= 1 << tier;
                    self.note_dropped(tier);
                }
            }
        }
        // Without its part of a window a load ends elsewhere.
        if dropped != 0
            && let Some(at) = at.filter(|at| at.block == key)
        {
            *self.writes.dropped().entry(at.block) |= dropped;
        }
        writings
    }

    fn note_dropped(&self, tier: usize) {
        let Some(one) = self.one(tier) else { return };
        if self.writes.tiers[tier].n_dropped.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(
                target: "kvist::engine",
                "the tier {} is slower than blocks are computed, so some are not written to it; kvist_tier_unwritten_blocks_total \
                 counts them",
                one.store.name()
            );
        }
    }

    /// Returns whether another attempt may be of use.
    async fn put(&self, tier: usize, key: BlockKey, bytes: Bytes) -> bool {
        const WRITE: &str = "write a block";
        let Some(one) = self.one(tier) else { return false };
        let length = bytes.len() as u64;
        let put = one.within(LONGEST_WRITE, WRITE, one.store.put(key, bytes, None)).await;
        let is_too_large = matches!(put, Err(StoreError::TooLarge { .. }));
        if is_too_large {
            one.note_too_large(length); // another attempt does not make it smaller
        }
        let is_written = one.note(WRITE, put).is_some();
        if is_written {
            one.note_room();
            self.remember(key, tier);
            self.keep_written(one, &key);
        }
        !is_written && !is_too_large
    }
}

/// Writes an object to a tier. Returns whether it failed and another attempt may be of use.
pub async fn put(writing: Writing, bytes: Bytes) -> bool {
    writing.stores.put(writing.tier, writing.key, bytes).await
}

/// The end of a load: faster tiers get what was read from slower ones, and then this returns. The bytes count as those of the load until
/// its end is reported, and then as bytes to write: what has no room there is not kept, nor what follows it in the text.
pub(super) async fn copy_up(
    stores: Arc<Stores>,
    read: impl Iterator<Item = (Wanted, Bytes)>,
    report: impl FnOnce(),
) {
    let mut copies: [Vec<(Writing, Bytes)>; MAX_TIERS] = Default::default();
    let mut has_room = [true; MAX_TIERS];
    for (from, bytes) in read {
        let length = bytes.len() as u64;
        for tier in (0..from.tier).filter(|&tier| stores.lacks(tier, &from.key, length)) {
            let writing = if has_room[tier] { stores.may_write(tier, from.key, length) } else { None };
            has_room[tier] = writing.is_some();
            copies[tier].extend(writing.map(|writing| (writing, bytes.clone())));
        }
    }
    report();
    let of_tier = |copies: Vec<(Writing, Bytes)>| async move {
        // From the text's end, because what was written first goes first.
        for (writing, bytes) in copies.into_iter().rev() {
            let memory = &writing.stores.memory;
            let bytes = if writing.tier == PINNED_TIER { memory.pinned(bytes) } else { bytes };
            put(writing, bytes).await;
        }
    };
    let tasks: JoinSet<()> = copies.into_iter().filter(|copies| !copies.is_empty()).map(of_tier).collect();
    tasks.join_all().await;
}

impl TierDriver {
    /// Writes exported blocks to the stores. Returns those that some tier is not given; of writes that fail later a task reports.
    pub(super) fn put(&self, objects: Vec<Object>) -> Vec<NamedBlock> {
        // What was deleted meanwhile is not written again.
        let is_current =
            |Object { of: (note, generation), .. }: &Object| *generation >= self.stores.generation(note);
        let (mut writes, mut unwritten) = (Vec::new(), Vec::new());
        for object in objects.into_iter().filter(is_current) {
            let is_part = |part: &Pending| matches!(part, Pending::Done(_));
            if !object.parts.iter().all(is_part) {
                continue;
            }
            let length = object.bytes as u64;
            let lacks = |tier: &usize| self.stores.lacks(*tier, &object.key, length);
            let tiers: Vec<usize> = (0..self.stores.n()).filter(lacks).collect();
            let n_tiers = tiers.len();
            let writings = self.stores.may_write_to(tiers.into_iter(), object.key, length, object.at);
            if writings.len() < n_tiers {
                unwritten.push(object.block);
            }
            if writings.is_empty() {
                continue;
            }
            let done = |part| if let Pending::Done(host) = part { Some(host) } else { None };
            let is_for_pinned_tier = writings.iter().any(|writing| writing.tier == PINNED_TIER);
            let parts = object.parts.into_iter().filter_map(done).collect();
            let Ok(bytes) = self.stores.memory.joined(parts, is_for_pinned_tier) else {
                unwritten.push(object.block);
                continue;
            };
            let of_object = |writing| (writing, bytes.clone(), object.block, object.told.clone());
            writes.extend(writings.into_iter().map(of_object));
        }
        // A text's end first: a full tier drops what was written longest ago.
        for (writing, bytes, block, told) in writes.into_iter().rev() {
            let reports = self.reports.clone();
            self.tasks.spawn(async move {
                if writing.stores.put(writing.tier, writing.key, bytes).await {
                    let _ = reports.send(Command::Tier(Report::Unwritten(block)));
                }
                // Only now: when nothing is on its way any more, the scheduler knows what has failed.
                drop(writing);
                drop(told);
            });
        }
        unwritten
    }
}

#[cfg(test)]
mod tests;
