//! The texts in a drafter's own cache.
use crate::session::ModelSession;
use kvist_cache::{Refused, SeqId, Sequences, Trees};
use kvist_device::StepError;
use kvist_model::Error;
use std::collections::HashMap;

/// A session whose cache has a sequence for each text of the target.
pub struct CachedTexts<T> {
    pub session: ModelSession,
    texts: HashMap<u64, CachedText<T>>,
    next_seq: u32,
    clock: u64,
}

/// What the cache contains of a text, and what its drafter needs to know of it.
pub struct CachedText<T> {
    pub seq: SeqId,
    pub state: T,
    used: u64,
}

const NO_TREES: &str = "a drafter's cache needs sequences and draft trees";

impl<T> CachedTexts<T> {
    /// The cache of `session` must be of kind `tree`.
    pub fn new(session: ModelSession) -> Self {
        CachedTexts { session, texts: HashMap::new(), next_seq: 1, clock: 0 }
    }

    pub fn get(&self, id: u64) -> Option<&CachedText<T>> {
        self.texts.get(&id)
    }

    /// The session, and the text.
    pub fn split(&mut self, id: u64) -> (&mut ModelSession, Option<&mut CachedText<T>>) {
        (&mut self.session, self.texts.get_mut(&id))
    }

    /// Uses the text `id`. If the cache does not have it, it begins with what it shares with another text: `shared` gives, for
    /// the state of such a text, how many of its tokens the new one begins with, and the new one's state. The text with
    /// the most is chosen; the tokens are not copied. Without any, the new text gets an empty sequence and the state `new`.
    pub fn open(
        &mut self,
        id: u64,
        shared: impl Fn(&T) -> Option<(u32, T)>,
        new: impl FnOnce() -> T,
    ) -> Result<&mut CachedText<T>, Error> {
        self.clock += 1;
        let used = self.clock;
        if !self.texts.contains_key(&id) {
            let seq = SeqId(self.next_seq);
            let sharing = self.texts.values().filter_map(|text| Some((text.seq, shared(&text.state)?)));
            // Sequences have different numbers, so the choice does not depend on the order of the map.
            let best = sharing.max_by_key(|(from, (n, _))| (*n, std::cmp::Reverse(from.0)));
            let mut sequences = self.sequences()?;
            let begun = best.and_then(|(from, (n, state))| {
                // Layers with a window may have dropped what the new text needs: then it begins empty.
                sequences.seq_cp(from, seq, 0, n).ok().map(|()| state)
            });
            let state = match begun {
                Some(state) => state,
                None => {
                    sequences.seq_new(seq)?;
                    new()
                }
            };
            self.next_seq += 1;
            self.texts.insert(id, CachedText { seq, state, used });
        }
        let text = self.texts.get_mut(&id).ok_or(Refused::Unsupported(NO_TREES))?;
        text.used = used;
        Ok(text)
    }

    /// Removes the tokens of a text from position `from` on. Its sequence stays, even if it is empty.
    pub fn shorten(&mut self, seq: SeqId, from: u32) -> Result<(), Error> {
        let mut sequences = self.sequences()?;
        sequences.seq_rm(seq, from, u32::MAX)?;
        if from == 0 {
            sequences.seq_new(seq)?; // removing all tokens removes the sequence
        }
        Ok(())
    }

    /// Forgets a text.
    pub fn remove(&mut self, id: u64) {
        if let (Some(text), Some(mut sequences)) = (self.texts.remove(&id), self.session.cache().sequences())
        {
            // The sequence exists: it was made with the text.
            let _ = sequences.seq_rm(text.seq, 0, u32::MAX);
        }
    }

    fn sequences(&mut self) -> Result<Sequences<'_>, Error> {
        Ok(self.session.cache().sequences().ok_or(Refused::Unsupported(NO_TREES))?)
    }
    pub fn trees(&mut self) -> Result<Trees<'_>, Error> {
        Ok(self.session.cache().trees().ok_or(Refused::Unsupported(NO_TREES))?)
    }

    /// Tokens that the cache has of a text.
    fn n_tokens(&mut self, id: u64) -> u32 {
        let seq = self.texts.get(&id).map(|text| text.seq);
        seq.and_then(|seq| self.session.cache().next_position(seq)).unwrap_or(0)
    }

    /// Forgets the text, not one of `busy`, that was used longest ago. False if there is none.
    fn forget_oldest(&mut self, busy: &[u64]) -> bool {
        let idle = self.texts.iter().filter(|(id, _)| !busy.contains(id));
        let oldest = idle.min_by_key(|(_, text)| text.used).map(|(id, _)| *id);
        oldest.map(|oldest| self.remove(oldest)).is_some()
    }
}

/// Runs `attempt` for the texts `busy`. While the drafter's cache is full, forgets a text and tries again: first the one
/// that was used longest ago, then the longest of `busy`. Returns those of `busy` that were forgotten; `attempt` gets the others,
/// and is not called again once there are none.
pub fn make_room<D, T>(
    drafter: &mut D,
    texts: impl Fn(&mut D) -> &mut CachedTexts<T>,
    busy: &[u64],
    mut attempt: impl FnMut(&mut D, &[u64]) -> Result<(), Error>,
) -> Result<Vec<u64>, Error> {
    let (mut left, mut forgotten) = (busy.to_vec(), Vec::new());
    while !left.is_empty() {
        match attempt(drafter, &left) {
            Err(Error::Step(StepError::Refused(Refused::NoSpace { .. }))) => {}
            other => return other.map(|()| forgotten),
        }
        let texts = texts(drafter);
        if texts.forget_oldest(busy) {
            continue;
        }
        if let Some(longest) = left.iter().copied().max_by_key(|id| (texts.n_tokens(*id), *id)) {
            texts.remove(longest);
            left.retain(|id| *id != longest);
            forgotten.push(longest);
        }
    }
    Ok(forgotten)
}
