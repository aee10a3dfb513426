//! Forgetting what the tiers have under a salt.
//!
//! No store lists its blocks by salt, and a store may be down when they are to be forgotten. So the keys of blocks contain a number,
//! the generation of their salt, and forgetting begins a new one: blocks of earlier generations have keys that nothing asks for. They
//! are overwritten like all blocks that are not used.
//!
//! Every store keeps a note of the latest generation, as an object like a block, for other processes and for the time after a restart.
//! Before blocks of a tier are used, all tiers have been asked for their notes, at most [`READ_AGAIN`] ago: the deletion may be known
//! to a slower one alone, which other processes share. A tier that gives no note is not used, and others are. A note is written after
//! the blocks that it hides, and read more often: stores that evict what is oldest, or was used longest ago, lose those blocks first. The disk has its notes apart
//! from its blocks.
mod untold;

use super::recent::Recent;
use super::task::{LONGEST_READ, LookupTimes, OneStore, Stores};
use super::writes::LONGEST_WRITE;
use kvist_scheduler::MAX_TIERS;
use kvist_store::{BlockKey, Bytes};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::runtime::Handle;
use tokio::time::Instant;
pub use untold::{UNTOLD_BYTES, Untold};

/// A note is read again after this time, because another process may have written one.
const READ_AGAIN: Duration = Duration::from_secs(10);

/// A tier that did not give a note in time is asked for it again after this time: requests wait for the answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

const READ_NOTE: &str = "read what was deleted";
const WRITE_NOTE: &str = "write that blocks were deleted";

/// The generations of salts, by the keys of their notes, as far as they are known.
#[derive(Default)]
pub struct Generations(Mutex<Recent<Known>>);

/// Of a salt.
#[derive(Clone, Copy, Default)]
struct Known {
    generation: u64,
    /// When each tier was asked for its note, and whether it answered.
    asked: [Option<(Instant, bool)>; MAX_TIERS],
}

/// That are remembered of salts.
pub(super) const GENERATIONS_BYTES: u64 = Recent::<Known>::BYTES;

impl Generations {
    fn get(&self, note: &BlockKey) -> Known {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(note).copied().unwrap_or_default()
    }

    /// Of each of these salts, in order.
    fn all<'a>(&self, notes: impl Iterator<Item = &'a BlockKey>) -> Vec<u64> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        notes.map(|note| known.get(note).map_or(0, |known| known.generation)).collect()
    }

    fn update(&self, note: BlockKey, update: impl FnOnce(&mut Known)) {
        update(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(note));
    }
}

impl Stores {
    /// The latest generation of the salt with this note, as far as it is known.
    pub fn generation(&self, note: &BlockKey) -> u64 {
        self.generations.get(note).generation
    }

    /// The same of several salts.
    pub fn generations<'a>(&self, notes: impl Iterator<Item = &'a BlockKey>) -> Vec<u64> {
        self.generations.all(notes)
    }

    /// Asks a tier for a note, if that was not done lately. Returns whether it is known: a tier that does not answer may have blocks
    /// that are to be forgotten.
    pub async fn read_note(self: &Arc<Self>, tier: usize, note: BlockKey, times: LookupTimes) -> bool {
        let now = Instant::now();
        match self.generations.get(&note).asked.get(tier).copied().flatten() {
            Some((asked, true)) if now.duration_since(asked) < READ_AGAIN => return true,
            Some((asked, false)) if now.duration_since(asked) < ASK_AGAIN => return false,
            _ => {}
        }
        let noted = match self.lookup(tier, &[note], times).await {
            None => None,
            Some(0) => Some(0),
            Some(_) => self.read_number(tier, note, times).await,
        };
        // What it has not been told it cannot say.
        let told = self.untold.generation(tier, &note).unwrap_or_default();
        let (mut before, mut known) = (0, 0);
        self.generations.update(note, |salt| {
            before = salt.generation;
            salt.generation = salt.generation.max(noted.unwrap_or_default()).max(told);
            salt.asked[tier] = Some((now, noted.is_some()));
            known = salt.generation;
        });
        if known > before {
            // Another process has deleted it: what is kept of it here would be in the way of other blocks.
            self.release(&note);
        }
        // It has lost the note, or another process with another clock has written one: others should read what this one knows.
        if noted.is_some_and(|noted| noted < known) {
            self.tell_one(&Handle::current(), tier, note, known);
        }
        noted.is_some()
    }

    /// The generation in a tier's note. `None` if the tier does not answer.
    async fn read_number(&self, tier: usize, note: BlockKey, times: LookupTimes) -> Option<u64> {
        let one = self.one(tier)?;
        let store = one.store.clone();
        // Goes on when this waits no longer: its time limit tells the store that it hangs.
        let read = tokio::spawn(async move { tokio::time::timeout(LONGEST_READ, store.get(&note)).await });
        match tokio::time::timeout_at(times.last(), read).await {
            Ok(read) => Some(number(&one.note(READ_NOTE, read.ok()?.ok()?)?)),
            Err(_) => {
                self.note_late(one, READ_NOTE);
                None
            }
        }
    }

    /// Begins a new generation, and returns it: nothing from before is found from now on by this process, and by others when they
    /// read the note that [`tell`](Self::tell) writes.
    pub fn next_generation(&self, note: BlockKey) -> u64 {
        // The time, so that it is larger than what any other process has begun, unless clocks differ.
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.begin_after(note, u64::try_from(since.as_millis()).unwrap_or(u64::MAX - 1))
    }

    /// Begins a generation after this one, and after the one that is known.
    fn begin_after(&self, note: BlockKey, generation: u64) -> u64 {
        let mut begun = 0;
        self.generations.update(note, |salt| {
            salt.generation = salt.generation.max(generation).saturating_add(1);
            begun = salt.generation;
        });
        begun
    }
}

impl OneStore {
    /// Writes a note, unless there is one of a later generation. Returns the generation that was noted before; `None` if the tier
    /// fails.
    async fn replace(&self, note: BlockKey, generation: u64) -> Option<u64> {
        let before = self.within(LONGEST_READ, READ_NOTE, self.store.get(&note)).await;
        let before = number(&self.note(READ_NOTE, before)?);
        if before <= generation {
            let put = self.store.put(note, written(generation), None);
            let put = self.within(LONGEST_WRITE, WRITE_NOTE, put).await;
            self.note(WRITE_NOTE, put)?;
        }
        Some(before)
    }
}

fn written(generation: u64) -> Bytes {
    Bytes::copy_from_slice(&generation.to_le_bytes())
}

/// The generation in a note; 0 if there is none, because it was damaged or evicted.
fn number(note: &Option<Bytes>) -> u64 {
    let bytes = note.as_ref().and_then(|note| note[..].try_into().ok());
    bytes.map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests;
