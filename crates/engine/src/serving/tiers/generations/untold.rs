//! Telling every tier what was deleted: the notes that are still to be written.
//!
//! Each tier has a queue, and one task while there is something in it. A tier that fails is tried again, with one note, until it
//! works; then it gets the others. So a store that is down costs the same however much is deleted meanwhile.
use super::{OneStore, Stores};
use kvist_scheduler::MAX_TIERS;
use kvist_store::BlockKey;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::Instant;

/// A tier that fails is tried again after such a pause, which doubles up to the longest one.
pub(super) const PAUSE: Duration = Duration::from_secs(1);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Notes that wait for a tier. Only a store that is down for a long time, while many salts are deleted, comes near it.
pub(super) const MOST: usize = 1 << 18;

/// That the notes which wait for one tier take at most, in a tree whose nodes are half full.
pub const UNTOLD_BYTES: u64 = 96 * MOST as u64;

/// The notes that tiers have not been told.
#[derive(Default)]
pub struct Untold {
    tiers: [Mutex<Queue>; MAX_TIERS],
    /// Woken when a note was written.
    told: Notify,
}

#[derive(Default)]
struct Queue {
    /// The generation to be written, by the key of the note.
    notes: BTreeMap<BlockKey, u64>,
    /// The one that was tried last: one that always fails is not in the way of the others.
    tried: Option<BlockKey>,
    /// A task writes them.
    is_served: bool,
}

impl Queue {
    /// With so many, some may have been dropped.
    fn is_full(&self) -> bool {
        self.notes.len() >= MOST
    }
}

impl Untold {
    fn queue(&self, tier: usize) -> MutexGuard<'_, Queue> {
        self.tiers[tier].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A note to write, of each in turn. When there is none, the task that asks is over.
    fn next(&self, tier: usize) -> Option<(BlockKey, u64)> {
        let mut queue = self.queue(tier);
        let after = queue.tried.and_then(|tried| queue.notes.range((Excluded(tried), Unbounded)).next());
        let next = after.or_else(|| queue.notes.iter().next()).map(|(note, number)| (*note, *number));
        queue.tried = next.map(|(note, _)| note);
        queue.is_served = next.is_some();
        next
    }

    /// The generation that a tier has not been told.
    pub fn generation(&self, tier: usize, note: &BlockKey) -> Option<u64> {
        self.queue(tier).notes.get(note).copied()
    }

    /// A tier has this note of this generation.
    fn done(&self, tier: usize, note: &BlockKey, generation: u64) {
        let mut queue = self.queue(tier);
        if queue.notes.get(note) == Some(&generation) {
            queue.notes.remove(note);
            self.told.notify_waiters();
        }
    }
}

impl Stores {
    /// Writes the note of a generation to all tiers, on `tasks`, as soon as each of them works and as long as the engine lives. If a tier
    /// has one of a later generation, from a process whose clock is ahead, another generation begins after that.
    pub fn tell(self: &Arc<Self>, tasks: &Handle, note: BlockKey, generation: u64) {
        (0..self.n()).for_each(|tier| self.tell_one(tasks, tier, note, generation));
    }

    /// The same for one tier.
    pub(super) fn tell_one(self: &Arc<Self>, tasks: &Handle, tier: usize, note: BlockKey, generation: u64) {
        let mut queue = self.untold.queue(tier);
        if queue.is_full() && !queue.notes.contains_key(&note) {
            let name = self.one(tier).map_or("", |one| one.store.name());
            tracing::error!(
                target: "kvist::engine",
                "the tier {name} fails, and {MOST} deleted salts wait for it: one more is not noted there. When it works again, and \
                 after a restart, the blocks of that salt may be found: begin with an empty directory or prefix"
            );
            return;
        }
        let noted = queue.notes.entry(note).or_default();
        *noted = generation.max(*noted);
        if !std::mem::replace(&mut queue.is_served, true) {
            tasks.spawn(serve(Arc::downgrade(self), tier));
        }
    }

    /// The tiers that have not been told of a deletion, when all have been or this much time has passed.
    pub async fn untold(&self, note: &BlockKey, within: Duration) -> Vec<&str> {
        let until = Instant::now() + within;
        loop {
            let mut told = std::pin::pin!(self.untold.told.notified());
            told.as_mut().enable();
            let is_missing = |tier: &usize| {
                let queue = self.untold.queue(*tier);
                queue.is_full() || queue.notes.contains_key(note)
            };
            let missing: Vec<usize> = (0..self.n()).filter(is_missing).collect();
            if missing.is_empty() || tokio::time::timeout_at(until, told).await.is_err() {
                return missing.into_iter().filter_map(|tier| Some(self.one(tier)?.store.name())).collect();
            }
        }
    }

    /// Writes what a tier has not been told. Returns false if it fails.
    async fn tell_all(self: &Arc<Self>, tier: usize, one: &OneStore) -> bool {
        while let Some((note, generation)) = self.untold.next(tier) {
            match one.replace(note, generation).await {
                None => return false,
                Some(before) if before > generation => {
                    let later = self.begin_after(note, before);
                    self.tell(&Handle::current(), note, later);
                }
                Some(_) => self.untold.done(tier, &note, generation),
            }
        }
        true
    }
}

/// Says, when it is dropped, that a tier is not served: also if its store has panicked. The next note begins anew.
struct Served {
    engine: Weak<Stores>,
    tier: usize,
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(stores) = self.engine.upgrade() {
            stores.untold.queue(self.tier).is_served = false;
        }
    }
}

/// Tells a tier, again and again, until it has been told everything or the engine has ended.
async fn serve(engine: Weak<Stores>, tier: usize) {
    let mut pause = PAUSE;
    let mut served = Served { engine: engine.clone(), tier };
    while let Some(stores) = engine.upgrade() {
        let Some(one) = stores.one(tier) else { return };
        if stores.tell_all(tier, one).await {
            // The queue says so already, and another task may serve it by now.
            served.engine = Weak::new();
            return;
        }
        drop(stores);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
impl Stores {
    /// As many notes as may wait for the first tier.
    pub fn fill_untold(&self) {
        let mut queue = self.untold.queue(0);
        for i in 0..MOST as u64 {
            let key = kvist_store::BlockKey::of_object("note", &[&i.to_le_bytes()]);
            queue.notes.insert(key, i);
        }
    }
}
