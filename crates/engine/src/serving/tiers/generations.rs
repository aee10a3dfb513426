//! Forgetting what the tiers have under a salt.
//!
//! No store lists its blocks by salt, and a store may be down when they are to be forgotten. So the keys of blocks contain a number,
//! the generation of their salt, and forgetting begins a new one: blocks of earlier generations have keys that nothing asks for. They
//! are overwritten like all blocks that are not used.
//!
//! Every store keeps a note of the latest generation, as an object like a block, for other processes and for the time after a restart.
//! A tier is asked for blocks only after it has been asked for the note, at most [`READ_AGAIN`] ago. A note is written after the blocks
//! that it hides, and read more often: stores that evict what is oldest, or was used longest ago, lose those blocks first.
mod untold;

use super::recent::Recent;
use super::task::{LookupTimes, OneStore, Stores};
use kvist_scheduler::MAX_TIERS;
use kvist_store::{BlockKey, Bytes};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
pub use untold::Untold;

/// A note is read again after this time, because another process may have written one.
const READ_AGAIN: Duration = Duration::from_secs(10);

const READ_NOTE: &str = "read what was deleted";

/// The generations of salts, by the keys of their notes, as far as they are known.
#[derive(Default)]
pub struct Generations(Mutex<Recent<Salt>>);

#[derive(Clone, Copy, Default)]
struct Salt {
    generation: u64,
    /// When the note of each tier was read.
    read: [Option<Instant>; MAX_TIERS],
}

impl Generations {
    fn get(&self, note: &BlockKey) -> Salt {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(note).copied().unwrap_or_default()
    }

    fn update(&self, note: BlockKey, update: impl FnOnce(&mut Salt)) {
        update(self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(note));
    }
}

impl Stores {
    /// The latest generation of the salt with this note, as far as it is known.
    pub fn generation(&self, note: &BlockKey) -> u64 {
        self.generations.get(note).generation
    }

    /// Asks a tier for a note, if that was not done lately. Returns whether it has been: a tier that does not answer may have blocks
    /// that are to be forgotten.
    pub async fn read_note(&self, tier: usize, note: BlockKey, times: LookupTimes) -> bool {
        let now = Instant::now();
        let read = self.generations.get(&note).read.get(tier).copied().flatten();
        if read.is_some_and(|read| now.duration_since(read) < READ_AGAIN) {
            return true;
        }
        let noted = match self.lookup(tier, &[note], times).await {
            None => return false,
            Some(0) => 0,
            Some(_) => match self.read_number(tier, note, times).await {
                Some(number) => number,
                None => return false,
            },
        };
        let mut known = 0;
        self.generations.update(note, |salt| {
            salt.generation = salt.generation.max(noted);
            salt.read[tier] = Some(now);
            known = salt.generation;
        });
        // It has lost the note, or another process with another clock has written one: others should read what this one knows.
        if noted < known
            && let Some(one) = self.one(tier)
        {
            let store = one.store.clone();
            tokio::spawn(async move { store.put(note, written(known), None).await });
        }
        true
    }

    /// The generation in a tier's note. `None` if the tier does not answer.
    async fn read_number(&self, tier: usize, note: BlockKey, times: LookupTimes) -> Option<u64> {
        let one = self.one(tier)?;
        let store = one.store.clone();
        // Goes on when this waits no longer: its time limit tells the store that it hangs.
        let read = tokio::spawn(async move { store.get(&note).await });
        match tokio::time::timeout_at(times.last(), read).await {
            Ok(read) => Some(number(&one.note(READ_NOTE, read.ok()?)?)),
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
        let before = self.note(READ_NOTE, self.store.get(&note).await)?;
        let before = number(&before);
        if before <= generation {
            let put = self.store.put(note, written(generation), None).await;
            self.note("write that blocks were deleted", put)?;
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
