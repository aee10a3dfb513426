//! Slots for the states of recurrent layers. No kind has such layers yet: this is the bookkeeping that they will need.
//!
//! A recurrent layer (Mamba: Gu and Dao, 2023) keeps one state per sequence and replaces it with every token. A step that
//! fails must leave that state as it was. So a step reads the slot of a sequence and writes a free one, and only the commit
//! makes the new slot the sequence's own. A step keeps all of its tokens or none, because the states in between are not stored.
use crate::ids::{GroupId, SeqId};
use crate::request::Refused;
use std::collections::BTreeMap;

/// One sequence's share of a step: the device reads the state in `from` and writes the new one to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateMove {
    /// The sequence that the step extends.
    pub seq: SeqId,
    /// The slot of its state; `None` if it has none, so that it starts from zeros.
    pub from: Option<u32>,
    /// A free slot. No other move of the step uses it.
    pub to: u32,
}

/// The slots of one group of recurrent layers. A fork shares a slot until either sequence is extended.
#[derive(Clone, Debug)]
pub struct StateSlots {
    group: GroupId,
    slots: BTreeMap<SeqId, u32>,
    /// Number of sequences that use each slot.
    ref_counts: Vec<u32>,
}

impl StateSlots {
    /// Makes free slots. A step needs one for each of its sequences, in addition to those in use.
    pub fn new(group: GroupId, n_slots: u32) -> Self {
        StateSlots { group, slots: BTreeMap::new(), ref_counts: vec![0; n_slots as usize] }
    }

    /// The slot of a sequence's state; `None` before its first step.
    pub fn slot(&self, seq: SeqId) -> Option<u32> {
        self.slots.get(&seq).copied()
    }

    /// Slots that no sequence uses.
    pub fn n_free(&self) -> u32 {
        self.free().count() as u32
    }

    fn free(&self) -> impl Iterator<Item = u32> {
        (0u32..).zip(&self.ref_counts).filter(|(_, count)| **count == 0).map(|(slot, _)| slot)
    }

    /// Lists the moves of a step that extends these sequences, in their order. Changes nothing else.
    ///
    /// # Errors
    /// A sequence is named twice, or too few slots are free. `moves` is then empty.
    pub fn prepare(&self, seqs: &[SeqId], moves: &mut Vec<StateMove>) -> Result<(), Refused> {
        moves.clear();
        if let Some((_, twice)) = seqs.iter().enumerate().find(|(i, seq)| seqs[..*i].contains(seq)) {
            return Err(Refused::TwoSpansOfOneSequence(*twice));
        }
        let step = seqs.iter().zip(self.free());
        moves.extend(step.map(|(seq, to)| StateMove { seq: *seq, from: self.slot(*seq), to }));
        if moves.len() < seqs.len() {
            moves.clear();
            let (needed, free) = (seqs.len() as u32, self.n_free());
            return Err(Refused::NoSpace { group: self.group, needed, free, reclaimable: 0 });
        }
        Ok(())
    }

    /// Makes the new slots of a step the sequences' own. The moves must be those of [`prepare`](Self::prepare), with no
    /// other call in between; panics if one of their slots is not free.
    pub fn commit(&mut self, moves: &[StateMove]) {
        for StateMove { seq, to, .. } in moves {
            let count = &mut self.ref_counts[*to as usize];
            assert_eq!(*count, 0, "the moves of an earlier step");
            *count = 1;
            if let Some(old) = self.slots.insert(*seq, *to) {
                self.ref_counts[old as usize] -= 1;
            }
        }
    }

    /// Gives `dst` the state of `src`. Copies nothing.
    ///
    /// # Errors
    /// `src` has no state, or `dst` has one. Nothing has changed then.
    pub fn fork(&mut self, src: SeqId, dst: SeqId) -> Result<(), Refused> {
        let slot = self.slot(src).ok_or(Refused::UnknownSequence(src))?;
        if self.slots.contains_key(&dst) {
            return Err(Refused::SequenceExists(dst));
        }
        self.slots.insert(dst, slot);
        self.ref_counts[slot as usize] += 1;
        Ok(())
    }

    /// Removes a sequence's state, if it has one.
    pub fn remove(&mut self, seq: SeqId) {
        if let Some(slot) = self.slots.remove(&seq) {
            self.ref_counts[slot as usize] -= 1;
        }
    }
}
