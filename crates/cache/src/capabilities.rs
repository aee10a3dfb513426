//! Operations that only some kinds support. Each capability is a view type. The cache returns it only
//! if every layer group supports it, so a capability is a type and not a flag. All operations are legal only between
//! steps, which the borrow of [`Step`](crate::Step) enforces.
use crate::cache::Cache;
use crate::ids::*;
use crate::kind::*;
use crate::request::Refused;
use std::ops::Range;

const CHECKED: &str = "the cache checked that every group has this capability";

/// Shortens the only sequence.
pub struct Rewind<'c> {
    cache: &'c mut Cache,
}

/// Operations on many sequences: fork, remove positions, keep a range.
pub struct Sequences<'c> {
    cache: &'c mut Cache,
}

/// Accepts or discards speculative nodes that earlier steps added.
pub struct Trees<'c> {
    cache: &'c mut Cache,
}

impl Cache {
    /// The operations of caches whose only sequence can be shortened; `None` for other caches.
    pub fn rewinds(&mut self) -> Option<Rewind<'_>> {
        self.groups.iter_mut().all(|g| g.rewinds().is_some()).then_some(Rewind { cache: self })
    }
    /// The operations of caches for many sequences; `None` for other caches.
    pub fn sequences(&mut self) -> Option<Sequences<'_>> {
        self.groups.iter_mut().all(|g| g.sequences().is_some()).then_some(Sequences { cache: self })
    }
    /// The operations of caches whose speculative nodes outlive their step; `None` for other caches. A cache without them
    /// may still verify trees: see [`verifies_trees`](Self::verifies_trees).
    pub fn trees(&mut self) -> Option<Trees<'_>> {
        self.groups.iter_mut().all(|g| g.trees().is_some()).then_some(Trees { cache: self })
    }

    /// Runs one operation on every group. All groups store the same sequences at the same positions, so if the first
    /// group accepts, the others must too. A later refusal is a broken invariant and panics.
    fn fan_out(
        &mut self,
        mut operation: impl FnMut(&mut dyn Kind) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let (first, others) = self.groups.split_first_mut().expect("a cache has at least one group");
        operation(&mut **first)?;
        for (i, group) in others.iter_mut().enumerate() {
            let done = operation(&mut **group);
            assert!(done.is_ok(), "group 0 accepted what group {} refused: {done:?}", i + 1);
        }
        self.epoch += 1;
        Ok(())
    }
}

impl Rewind<'_> {
    /// Removes positions `len..`. Refused, with nothing changed, if `len` exceeds the current length or is less than the
    /// [shortest cut](Cache::set_shortest_cut).
    pub fn rewind(&mut self, len: u32) -> Result<(), Refused> {
        self.cache.check_cut(SeqId::ONLY, len)?;
        self.cache.fan_out(|g| g.rewinds().expect(CHECKED).rewind(len))?;
        self.cache.drop_shortest_cuts();
        Ok(())
    }
}

impl Sequences<'_> {
    /// Makes an empty sequence.
    pub fn seq_new(&mut self, seq: SeqId) -> Result<(), Refused> {
        self.cache.fan_out(|g| g.sequences().expect(CHECKED).seq_new(seq))?;
        if let Cache { index: Some(index), groups, .. } = &mut *self.cache {
            index.opened_empty(groups, seq, "");
        }
        Ok(())
    }

    /// Shares positions `from..until` of `src` with `dst`, without copying a byte. `dst` is made if it does not
    /// exist, and continues where the range or `src` ends. `dst` must end at or before `from` and have no speculative
    /// nodes; a gap before `from` is allowed. Speculative nodes of `src` are not shared.
    ///
    /// The range is cut at the end of `src`. If nothing is left of it, nothing is copied: an existing `dst` that ends
    /// at `from` or before stays as it is, a missing one is made empty, and one that ends later is refused as usual.
    /// With a prefix index, a `dst` that is made here, or was empty and gets tokens, gets the salt of `src`.
    pub fn seq_cp(&mut self, src: SeqId, dst: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.can_end_at(src, until)?;
        let begins = self.cache.next_position(dst).is_none_or(|next| next == 0);
        self.cache.fan_out(|g| g.sequences().expect(CHECKED).seq_cp(src, dst, from, until))?;
        if from < until.min(self.cache.next_position(src).unwrap_or(0)) {
            self.cache.copy_shortest_cut(src, dst, until);
        }
        if let Cache { index: Some(index), groups, .. } = &mut *self.cache
            && begins
        {
            index.forked(groups, src, dst);
        }
        Ok(())
    }

    /// Makes `dst` a copy of all committed tokens of `src`.
    pub fn fork(&mut self, src: SeqId, dst: SeqId) -> Result<(), Refused> {
        self.seq_cp(src, dst, 0, u32::MAX)
    }

    /// The ranges of positions that `seq` stores in any layer group: disjoint, ascending, and not next to each other.
    pub fn stored(&mut self, seq: SeqId) -> Result<Vec<Range<u32>>, Refused> {
        let mut all: Vec<Range<u32>> = Vec::new();
        for group in &mut self.cache.groups {
            group.sequences().expect(CHECKED).stored(seq, &mut all)?;
        }
        all.sort_unstable_by_key(|range| range.start);
        all.dedup_by(|next, range| {
            let joins = next.start <= range.end;
            range.end = if joins { range.end.max(next.end) } else { range.end };
            joins
        });
        Ok(all)
    }

    /// Removes positions `from..until` of `seq`. Cells that no other sequence uses become free. `paged` removes whole
    /// blocks from the middle, and none if the cache has a prefix index: what is computed after a removal must not be
    /// found under the whole text.
    ///
    /// A range that reaches the next position rolls the sequence back: it continues at `from`, and its speculative
    /// nodes are discarded; if `from` is 0, the sequence is removed. A range that is empty, or begins after the next
    /// position, changes nothing.
    pub fn seq_rm(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        if from < until && self.cache.next_position(seq).is_some_and(|next| from <= next && next <= until) {
            self.can_end_at(seq, from)?;
        }
        let is_middle = self.cache.next_position(seq).is_some_and(|next| from < until && until < next);
        if is_middle && self.cache.index.is_some() {
            return Err(Refused::Unsupported(
                "a cache with a prefix index removes nothing from the middle: make it without an index",
            ));
        }
        self.cache.fan_out(|g| g.sequences().expect(CHECKED).seq_rm(seq, from, until))?;
        self.cache.drop_shortest_cuts();
        if let Cache { index: Some(index), groups, .. } = &mut *self.cache {
            index.shortened(groups, seq);
            index.rank_newly_evictable(groups);
        }
        Ok(())
    }

    /// Removes every other sequence, and the positions of `seq` outside `from..until` as [`seq_rm`](Self::seq_rm)
    /// does. If nothing is kept, `seq` is removed too.
    pub fn seq_keep(&mut self, seq: SeqId, from: u32, until: u32) -> Result<(), Refused> {
        self.can_end_at(seq, if from < until { until } else { 0 })?;
        self.cache.fan_out(|g| g.sequences().expect(CHECKED).seq_keep(seq, from, until))?;
        self.cache.drop_shortest_cuts();
        if let Cache { index: Some(index), groups, .. } = &mut *self.cache {
            index.all_shortened(groups);
            index.rank_newly_evictable(groups);
        }
        Ok(())
    }

    /// Settles drafts: the last `drafted` tokens of `seq` were drafts, the first `accepted` of them are kept, and the
    /// rest are removed. Refused if `accepted` exceeds `drafted`, or if `drafted` exceeds the tokens of the sequence.
    pub fn accept(&mut self, seq: SeqId, drafted: u32, accepted: u32) -> Result<(), Refused> {
        let next = self.cache.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        match (next.checked_sub(drafted), drafted.checked_sub(accepted)) {
            (Some(_), Some(0)) => Ok(()),
            (Some(_), Some(rejected)) => {
                let salt = self.cache.index.as_ref().and_then(|index| index.salt_of(seq)).map(str::to_owned);
                self.seq_rm(seq, next - rejected, u32::MAX)?;
                if rejected < next {
                    return Ok(());
                }
                // The sequence had nothing but drafts: it stays, empty, and keeps its salt.
                self.seq_new(seq)?;
                if let Cache { index: Some(index), groups, .. } = &mut *self.cache {
                    index.opened_empty(groups, seq, salt.as_deref().unwrap_or(""));
                }
                Ok(())
            }
            (None, _) => Err(Refused::DraftsMore { seq, len: next, drafted }),
            (_, None) => Err(Refused::AcceptsMore { seq, drafted, accepted }),
        }
    }

    fn can_end_at(&mut self, seq: SeqId, position: u32) -> Result<(), Refused> {
        if self.cache.next_position(seq).is_some() {
            self.cache.check_cut(seq, position)?; // an unknown sequence is refused below
        }
        self.cache.groups.iter_mut().try_for_each(|g| g.sequences().expect(CHECKED).can_end_at(seq, position))
    }
}

impl Trees<'_> {
    /// See [`Cache::n_nodes`].
    pub fn n_nodes(&self, seq: SeqId) -> Option<u32> {
        self.cache.n_nodes(seq)
    }

    /// Makes this root-to-node chain part of `seq` and frees its other nodes. No bytes move. Refused, with nothing
    /// changed, unless every node's parent is the node before it in the chain.
    pub fn commit_path(&mut self, seq: SeqId, accepted: &[NodeId]) -> Result<(), Refused> {
        self.cache.fan_out(|g| g.trees().expect(CHECKED).commit_path(seq, accepted))
    }

    /// Frees every speculative node of `seq`.
    pub fn discard(&mut self, seq: SeqId) -> Result<(), Refused> {
        self.commit_path(seq, &[])
    }
}
