//! One sequence with a sliding window: old cells are overwritten, no byte is ever copied.
use super::{GroupSpec, Unbuildable, Visibility};
use crate::ids::*;
use crate::kind::Kind;
use crate::plan::*;
use crate::report::*;
use crate::request::Refused;
use crate::run::{CellRun, push_run};

/// Stores one chain of any length in sinks + window + max_step − 1 cells. Position p lies in cell p if it is a sink,
/// and otherwise in cell sinks + (p − sinks) mod (window + max_step − 1).
///
/// The max_step − 1 cells beyond the window allow a chunk to be written before its first query reads: that query
/// still needs window − 1 earlier tokens. A longer step is refused, never shortened.
///
/// A token counts as stored while a later query can see it: a sink, or one of the last window − 1. All other cells
/// count as free, because the next step may overwrite them even if it is abandoned afterwards. A ring therefore
/// cannot rewind.
pub struct Ring {
    visibility: Visibility,
    window: u32,
    max_step_tokens: u32,
    next: u32,
}

impl Ring {
    /// Refused without a window, and if the number of cells exceeds 32 bits. Ignores `capacity_tokens`.
    pub fn new(group: &GroupSpec) -> Result<Self, Unbuildable> {
        let Some(window) = group.visibility.window else {
            return Err(Unbuildable(
                "a ring keeps a sliding window, and this layer group has none: give --window",
            ));
        };
        if window == 0 || group.max_step_tokens == 0 {
            return Err(Unbuildable("a ring needs a window and steps of at least one token"));
        }
        let cells =
            u64::from(group.visibility.sinks) + u64::from(window) + u64::from(group.max_step_tokens) - 1;
        if cells > u64::from(u32::MAX) {
            return Err(Unbuildable(
                "sinks, window and step together exceed 2^32 cells: give a smaller --window",
            ));
        }
        Ok(Ring { visibility: group.visibility, window, max_step_tokens: group.max_step_tokens, next: 0 })
    }

    fn sinks(&self) -> u32 {
        self.visibility.sinks
    }
    /// Number of cells that are reused in rotation.
    fn round(&self) -> u32 {
        self.window + self.max_step_tokens - 1
    }
    /// The first position after the sinks that a query at `position` sees.
    fn first_seen(&self, position: u32) -> u32 {
        (u64::from(position) + 1).saturating_sub(u64::from(self.window)).max(u64::from(self.sinks())) as u32
    }
    /// Calls `each` with the contiguous cells of positions `from..until`, cut where the ring wraps.
    fn runs(&self, mut from: u32, until: u32, mut each: impl FnMut(CellRun, u32)) {
        while from < until {
            let (start, room) = match from.checked_sub(self.sinks()) {
                // The ring begins right after the sinks: its first round continues their run.
                None => (from, self.capacity_cells() - from),
                Some(p) => (self.sinks() + p % self.round(), self.round() - p % self.round()),
            };
            let len = room.min(until - from);
            each(CellRun { start, len }, from);
            from += len;
        }
    }
}

impl Kind for Ring {
    fn visibility(&self) -> Visibility {
        self.visibility
    }
    fn capacity_cells(&self) -> u32 {
        self.sinks() + self.round()
    }
    /// Tokens that the next query will see besides itself: the sinks, and at most window − 1 others.
    fn seq_len(&self, seq: SeqId) -> Option<u32> {
        let in_window = self.next.saturating_sub(self.first_seen(self.next));
        (seq == SeqId::ONLY).then_some(self.next.min(self.sinks()) + in_window)
    }
    /// Total number of tokens ever appended.
    fn next_position(&self, seq: SeqId) -> Option<u32> {
        (seq == SeqId::ONLY).then_some(self.next)
    }

    /// The tokens that count as stored.
    fn stored_cells(&self, seq: SeqId, out: &mut Vec<(u32, CellRun)>) {
        if seq == SeqId::ONLY {
            self.runs(0, self.next.min(self.sinks()), |run, position| out.push((position, run)));
            self.runs(self.first_seen(self.next), self.next, |run, position| out.push((position, run)));
        }
    }

    fn prepare(&self, spans: &Spans, _: GroupId, out: &mut GroupPlan) -> Result<(), Refused> {
        let span = super::only_chain(spans, self.next)?;
        if span.n_tokens > self.max_step_tokens {
            return Err(Refused::StepTooLong { max_step_tokens: self.max_step_tokens, got: span.n_tokens });
        }
        self.runs(span.start, span.start + span.n_tokens, |run, _| push_run(&mut out.writes, run));
        let written_end = out.writes.iter().map(|run| run.end()).max().unwrap_or(0);
        out.cells_end = written_end.max(self.high_water());
        Ok(())
    }

    fn fill_reads(&self, spans: &Spans, out: &mut GroupPlan) {
        let span = &spans.list[0];
        let end = span.start + span.n_tokens;
        out.reads.order.extend(0..span.n_tokens);
        let first_seen = self.first_seen(span.start);
        let mut items = |run, position| {
            super::chain_items(&mut out.reads, 0, span, self.visibility, run, position);
        };
        if first_seen == self.sinks() {
            self.runs(0, end, &mut items); // nothing has left the window: the sinks and the rest are contiguous
        } else {
            self.runs(0, self.sinks(), &mut items);
            self.runs(first_seen, end, &mut items);
        }
    }

    fn apply(&mut self, spans: &Spans, _: &GroupPlan) {
        self.next += spans.list.iter().map(|span| span.n_tokens).sum::<u32>();
    }
    fn clear(&mut self) {
        self.next = 0;
    }
    fn report(&self) -> Report {
        let len = self.seq_len(SeqId::ONLY).unwrap_or(0);
        let mut n_extents = 0;
        let mut previous: Option<(CellRun, u32)> = None;
        let mut count = |run: CellRun, position| {
            n_extents +=
                u32::from(previous.is_none_or(|(r, p)| r.end() != run.start || p + r.len != position));
            previous = Some((run, position));
        };
        self.runs(0, self.next.min(self.sinks()), &mut count);
        self.runs(self.first_seen(self.next), self.next, &mut count);
        let sequence =
            SequenceReport { seq: SeqId::ONLY, len, next_position: self.next, n_nodes: 0, n_extents };
        Report {
            capacity_cells: self.capacity_cells(),
            used_cells: len,
            high_water: self.high_water(),
            sequences: vec![sequence],
            blocks: None,
        }
    }
}

impl Ring {
    fn high_water(&self) -> u32 {
        let mut end = self.next.min(self.sinks());
        self.runs(self.first_seen(self.next), self.next, |run, _| end = end.max(run.end()));
        end
    }
}
