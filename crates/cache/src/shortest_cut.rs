//! How far sequences can be shortened that were filled with K and V from elsewhere.
use crate::cache::Cache;
use crate::ids::SeqId;
use crate::request::Refused;
use std::collections::BTreeMap;

/// The fewest tokens that a sequence can be cut to, for those that cannot be cut anywhere.
pub(crate) type ShortestCuts = BTreeMap<SeqId, u32>;

impl Cache {
    /// Notes that `seq` was filled with K and V from elsewhere, which lack tokens that windows had left behind: from now on it cannot
    /// end before position `len`, unless all of it is removed, and neither can its copies. Other sequences can.
    pub fn set_shortest_cut(&mut self, seq: SeqId, len: u32) {
        if len > 0 {
            self.shortest_cuts.insert(seq, len);
        }
    }

    /// Whether `seq`, or a copy of it, can end at position `len` as far as [`set_shortest_cut`](Self::set_shortest_cut) says. Kinds
    /// that drop what has left a window may still refuse it.
    ///
    /// # Errors
    /// [`Refused::WindowGone`]; or there is no such sequence.
    pub fn check_cut(&self, seq: SeqId, len: u32) -> Result<(), Refused> {
        let held = self.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        let shortest = self.shortest_cuts.get(&seq).copied().unwrap_or(0);
        match len == 0 || len >= shortest.min(held) {
            true => Ok(()),
            false => Err(Refused::WindowGone { seq, position: len }),
        }
    }

    /// Notes that `dst` has tokens of `src` now, up to position `until`.
    pub(crate) fn copy_shortest_cut(&mut self, src: SeqId, dst: SeqId, until: u32) {
        if let Some(len) = self.shortest_cuts.get(&src).map(|len| (*len).min(until)) {
            let shortest = self.shortest_cuts.entry(dst).or_insert(0);
            *shortest = len.max(*shortest);
        }
    }

    /// Forgets the notes of sequences that have no tokens any more.
    pub(crate) fn drop_shortest_cuts(&mut self) {
        let mut cuts = std::mem::take(&mut self.shortest_cuts);
        cuts.retain(|seq, _| self.next_position(*seq).is_some_and(|next| next > 0));
        self.shortest_cuts = cuts;
    }
}
