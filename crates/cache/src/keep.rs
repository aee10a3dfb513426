//! Selective eviction of tokens: keeps the sinks, the recent tokens and the most important ones between them, and
//! removes the rest.
//!
//! Xiao, Tian, Chen, Han, Lewis: *Efficient streaming language models with attention sinks*, 2023, for the sinks;
//! Zhang et al.: *H2O: heavy-hitter oracle for efficient generative inference of large language models*, 2023, for the
//! important ones. The caller provides the importance (in H2O: attention received so far).
//!
//! Deciding and removing are separate: a [`Removal`] is data. Positions do not change, nothing is renumbered, and the
//! sequence continues at the same position. The newest token is never removed, because a removal that reaches the end
//! of a sequence is a rollback. The method is approximate: outputs change.
use crate::cache::Cache;
use crate::ids::SeqId;
use crate::request::Refused;
use std::cmp::Ordering;
use std::ops::Range;

/// Which tokens to keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Number of first positions to keep.
    pub sinks: u32,
    /// Number of newest positions to keep. 0 counts as 1.
    pub recent: u32,
    /// Number of tokens between them to keep, by importance.
    pub top_k: u32,
}

/// One token that a sequence stores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// Its position.
    pub position: u32,
    /// Higher is more important. NaN ranks below every number.
    pub importance: f32,
}

/// Ranges of positions to remove from one sequence. Changes nothing until it is applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Removal {
    next_position: u32,
    n_removed: u32,
    ranges: Vec<Range<u32>>,
}

/// The scores do not belong to the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the field names document themselves
pub enum BadScores {
    /// Positions must be strictly ascending.
    OutOfOrder { position: u32, after: u32 },
    /// A position is at or after the end of the sequence.
    BehindTheEnd { position: u32, next_position: u32 },
}

impl std::fmt::Display for BadScores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BadScores::OutOfOrder { position, after } => {
                write!(f, "position {position} is scored after position {after}: sort by position, each once")
            }
            BadScores::BehindTheEnd { position, next_position } => {
                write!(f, "position {position} is scored, but the sequence ends before {next_position}")
            }
        }
    }
}
impl std::error::Error for BadScores {}

impl Keep {
    /// [`plan`](Self::plan) for a cache that hands out blocks of `block` tokens (`paged`), and removes whole ones: the
    /// blocks of the sinks and of the recent tokens stay, and between them as many blocks as `top_k` tokens fill, rounded
    /// up. The importance of a block is the sum over its tokens. With blocks of one token it is `plan`.
    pub fn plan_blocks(
        &self,
        next_position: u32,
        stored: &[Scored],
        block: u32,
    ) -> Result<Removal, BadScores> {
        let block = block.max(1);
        let tokens = self.plan(next_position, stored)?; // checks the scores
        if block == 1 {
            return Ok(tokens);
        }
        let mut blocks: Vec<Scored> = Vec::new();
        for scored in stored {
            let position = scored.position / block;
            match blocks.last_mut() {
                Some(last) if last.position == position => last.importance += scored.importance,
                _ => blocks.push(Scored { position, ..*scored }),
            }
        }
        let recent_from = next_position.saturating_sub(self.recent.max(1)) / block;
        let next = next_position.div_ceil(block);
        let (sinks, top_k) = (self.sinks.div_ceil(block), self.top_k.div_ceil(block));
        let mut removal = Keep { sinks, recent: next - recent_from, top_k }.plan(next, &blocks)?;
        for range in &mut removal.ranges {
            *range = range.start * block..range.end * block;
        }
        let is_removed = |s: &&Scored| removal.ranges.iter().any(|range| range.contains(&s.position));
        removal.n_removed = stored.iter().filter(is_removed).count() as u32;
        removal.next_position = next_position;
        Ok(removal)
    }

    /// Plans the removal. `stored` lists the tokens that the sequence still stores, ascending by position. A position
    /// that is not listed counts as removed already, and its range may be removed again. Among equally important
    /// tokens the newer one is kept. O(stored).
    pub fn plan(&self, next_position: u32, stored: &[Scored]) -> Result<Removal, BadScores> {
        for pair in stored.windows(2) {
            let [before, after] = [pair[0].position, pair[1].position];
            if after <= before {
                return Err(BadScores::OutOfOrder { position: after, after: before });
            }
        }
        if let Some(last) = stored.last().filter(|last| last.position >= next_position) {
            return Err(BadScores::BehindTheEnd { position: last.position, next_position });
        }
        let recent_from = next_position.saturating_sub(self.recent.max(1));
        let middle = stored.partition_point(|s| s.position < self.sinks)
            ..stored.partition_point(|s| s.position < recent_from);
        let middle = stored.get(middle).unwrap_or(&[]); // the sinks and the recent tokens may overlap
        let top_k = self.top_k as usize;
        let mut removed: Vec<Scored> = middle.to_vec();
        if top_k >= removed.len() {
            removed.clear();
        } else {
            removed.select_nth_unstable_by(top_k, most_important_first);
            removed.drain(..top_k);
        }
        removed.sort_unstable_by_key(|s| s.position);

        let mut ranges: Vec<Range<u32>> = Vec::new();
        let mut dropped = removed.iter().peekable();
        let mut extends = false; // whether the stored token before this one was removed too
        for scored in middle {
            let removes = dropped.next_if(|dropped| dropped.position == scored.position).is_some();
            match ranges.last_mut() {
                Some(range) if removes && extends => range.end = scored.position + 1,
                _ if removes => ranges.push(scored.position..scored.position + 1),
                _ => {}
            }
            extends = removes;
        }
        Ok(Removal { next_position, n_removed: removed.len() as u32, ranges })
    }
}

fn most_important_first(a: &Scored, b: &Scored) -> Ordering {
    let importance = |s: &Scored| if s.importance.is_nan() { f32::NEG_INFINITY } else { s.importance + 0.0 };
    importance(b).total_cmp(&importance(a)).then(b.position.cmp(&a.position))
}

impl Removal {
    /// Disjoint, ascending, not empty, and not at the sequence's end. A range that joins two removed tokens includes
    /// the positions between them that were already removed.
    pub fn ranges(&self) -> &[Range<u32>] {
        &self.ranges
    }
    /// Number of stored tokens that the plan removes.
    pub fn n_removed(&self) -> u32 {
        self.n_removed
    }

    /// Removes the ranges from `seq`, between steps. Refused, with nothing changed, if the cache cannot remove from
    /// the middle, or if the length of `seq` has changed since the plan was made.
    pub fn apply(&self, cache: &mut Cache, seq: SeqId) -> Result<(), Refused> {
        let expected = cache.next_position(seq).ok_or(Refused::UnknownSequence(seq))?;
        if expected != self.next_position {
            return Err(Refused::NotAtEnd { seq, expected, got: self.next_position });
        }
        let no_removal = "this kind of cache removes nothing from the middle: use cells";
        let mut sequences = cache.sequences().ok_or(Refused::Unsupported(no_removal))?;
        self.ranges.iter().try_for_each(|range| sequences.seq_rm(seq, range.start, range.end))
    }
}
