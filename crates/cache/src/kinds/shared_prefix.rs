//! Finds the cells that several sequences read in common, so that they are read once.
//!
//! A cell stores one token, so it has the same position in every sequence that uses it. Two sequences share a cell
//! exactly where their extents, walked together by position, name the same cell. Finding shared prefixes is therefore a
//! merge:
//!
//! ```text
//! put the spans in an order in which those with a common prefix are neighbours
//! open := nothing
//! for each span in that order:
//!     walk `open` and what all queries of the span see, by position:
//!         same cell          stays open, from the span that opened it
//!         only in `open`     becomes an item, up to the span before this one
//!         only in the span   is opened here
//! what is still open becomes items up to the last span
//! ```
//!
//! Every piece is opened and closed once per stretch of consecutive spans, so the items are disjoint, whatever
//! windows, removed prefixes or partial copies the sequences have. Nested shared prefixes need no special case.
use super::draft_tree::DraftTrees;
use super::extents::{Extent, Extents};
use super::stripes::STRIPE;
use super::{ReadScratch, Visibility};
use crate::plan::PlannedSpan;
use crate::reads::{Mask, ReadItem, Reads};
use std::cmp::Ordering;

/// The committed positions that the queries of one span see: all queries see `0..sinks_end` and `all..start`; some
/// also see `some..all`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Horizon {
    pub sinks_end: u32,
    pub some: u32,
    pub all: u32,
    pub start: u32,
}

impl Horizon {
    /// For the queries of `span`.
    pub fn of(visibility: Visibility, span: &PlannedSpan, trees: &DraftTrees) -> Self {
        let start = span.start;
        let (shallowest, deepest) = match span.parents() {
            None => (0, span.n_tokens - 1),
            Some(_) => trees.depths(span).fold((u32::MAX, 0), |(low, high), d| (low.min(d), high.max(d))),
        };
        let sinks_end = visibility.sinks.min(start);
        let first_seen = |query: u32| visibility.window.map_or(0, |w| (query + 1).saturating_sub(w));
        let clamp = |position: u32| position.clamp(sinks_end, start);
        let some = clamp(first_seen(start + shallowest));
        Horizon { sinks_end, some, all: clamp(first_seen(start + deepest)), start }
    }

    /// Position from which the span shares reads with other spans. Under a window, sequences of slightly different
    /// length would cut their shared prefix at just as many places. They cut it at stripe boundaries instead, and
    /// each span reads the cells before that on its own.
    pub fn shared_from(&self, alone: bool) -> u32 {
        if alone || self.all == self.sinks_end {
            self.all
        } else {
            self.all.next_multiple_of(STRIPE).min(self.start)
        }
    }
}

/// Orders sequences so that those with a common prefix of cells are adjacent: lexicographically by (position, cell).
fn by_prefix(a: &[Extent], b: &[Extent]) -> Ordering {
    let first = |extents: &[Extent]| extents.first().map(|e| (e.position, e.cell));
    let differ = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    let (a, b) = (&a[differ..], &b[differ..]);
    // Extents are maximal, so the shorter one does not continue where the longer one does.
    match (a.first(), b.first()) {
        (Some(x), Some(y)) if (x.position, x.cell) == (y.position, y.cell) => {
            let go_on = |longer: &Extent, by: u32| Some((longer.position + by, longer.cell + by));
            if x.len < y.len {
                first(&a[1..]).cmp(&go_on(y, x.len))
            } else {
                go_on(x, y.len).cmp(&first(&b[1..]))
            }
        }
        _ => first(a).cmp(&first(b)),
    }
}

/// Sorts the spans, assigns their query slots, and adds the items that all queries of a span see, each cell once
/// however many spans see it. The caller adds the rest: the cells between `all` and `shared_from` of a span's
/// horizon, the cells that only some of its queries see, and its own tokens. `extents` returns a span's extents by
/// its index.
pub(super) fn share<'e>(
    scratch: &mut ReadScratch,
    reads: &mut Reads,
    spans: &[PlannedSpan],
    extents: &impl Fn(usize) -> &'e Extents,
    horizon: impl Fn(&PlannedSpan) -> Horizon,
) {
    let alone = spans.len() == 1;
    scratch.order.clear();
    scratch.order.extend(0..spans.len() as u32);
    if !alone {
        let list = |i: u32| extents(i as usize).list();
        scratch.order.sort_unstable_by(|&a, &b| by_prefix(list(a), list(b)).then(a.cmp(&b)));
    }
    scratch.first_query.clear();
    scratch.first_query.resize(spans.len(), 0);
    for &i in &scratch.order {
        let span = &spans[i as usize];
        let first_query = reads.order.len() as u32;
        scratch.first_query[i as usize] = first_query;
        reads.order.extend(span.tokens());
        let (committed, see) = (extents(i as usize), horizon(span));
        let shared = committed.within(see.shared_from(alone), span.start);
        for extent in committed.within(0, see.sinks_end).chain(shared) {
            scratch.shared_prefixes.see(extent, first_query, reads);
        }
        scratch.shared_prefixes.end_span(first_query, reads);
    }
    scratch.shared_prefixes.end(reads.order.len() as u32, reads);
}

/// An extent that all spans from query slot `first_query` on see.
#[derive(Clone, Copy, Debug)]
struct Piece {
    extent: Extent,
    first_query: u32,
}

/// The state of the merge over the spans of one step. Reused.
#[derive(Default, Debug)]
pub(super) struct SharedPrefixes {
    open: Vec<Piece>,
    /// Number of pieces in `open` that the current span has already passed.
    n_passed: usize,
    next: Vec<Piece>,
}

impl SharedPrefixes {
    /// Adds `extent` for the span whose slots start at `first_query`. Extents come in position order.
    pub fn see(&mut self, mut extent: Extent, first_query: u32, reads: &mut Reads) {
        while extent.len > 0 {
            let Some(piece) = self.open.get_mut(self.n_passed) else {
                return self.keep(extent, first_query);
            };
            let open = piece.extent;
            if open.end() <= extent.position {
                close(*piece, first_query, reads);
                self.n_passed += 1;
            } else if extent.end() <= open.position {
                return self.keep(extent, first_query);
            } else if open.position < extent.position {
                close(
                    Piece { extent: open.cut(open.position, extent.position), ..*piece },
                    first_query,
                    reads,
                );
                piece.extent = open.cut(extent.position, open.end());
            } else if extent.position < open.position {
                self.keep(extent.cut(extent.position, open.position), first_query);
                extent = extent.cut(open.position, extent.end());
            } else {
                let until = open.end().min(extent.end());
                let (both, since) = (extent.cut(extent.position, until), piece.first_query);
                if open.cell != extent.cell {
                    close(Piece { extent: open.cut(open.position, until), ..*piece }, first_query, reads);
                }
                piece.extent = open.cut(until, open.end());
                if piece.extent.len == 0 {
                    self.n_passed += 1;
                }
                self.keep(both, if open.cell == extent.cell { since } else { first_query });
                extent = extent.cut(until, extent.end());
            }
        }
    }

    /// Ends the span whose slots start at `first_query`.
    pub fn end_span(&mut self, first_query: u32, reads: &mut Reads) {
        for piece in self.open.drain(..).skip(std::mem::take(&mut self.n_passed)) {
            close(piece, first_query, reads);
        }
        std::mem::swap(&mut self.open, &mut self.next);
    }

    /// Ends the walk over all spans, at query slot `end_query`.
    pub fn end(&mut self, end_query: u32, reads: &mut Reads) {
        self.open.drain(..).for_each(|piece| close(piece, end_query, reads));
    }

    fn keep(&mut self, extent: Extent, first_query: u32) {
        match self.next.last_mut() {
            Some(last) if last.first_query == first_query && last.extent.precedes(extent) => {
                last.extent.len += extent.len;
            }
            _ => self.next.push(Piece { extent, first_query }),
        }
    }
}

/// Adds the item for `piece`, whose last query slot is before `end_query`.
fn close(piece: Piece, end_query: u32, reads: &mut Reads) {
    let Piece { extent, first_query } = piece;
    let item = ReadItem {
        first_query,
        n_queries: end_query - first_query,
        run: extent.run(),
        first_index: extent.position,
        mask: Mask::All,
    };
    match reads.items.last_mut() {
        Some(last)
            if (last.first_query, last.n_queries) == (item.first_query, item.n_queries)
                && last.run.end() == item.run.start
                && last.first_index + last.run.len == item.first_index =>
        {
            last.run.len += item.run.len;
        }
        _ => reads.items.push(item),
    }
}
