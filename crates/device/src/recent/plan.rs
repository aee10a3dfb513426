//! Which rows of recent tokens a step keeps, and which ones its queries read. Devices store the bytes.
//!
//! A row is written once, when its token is new. It is kept in a slot if later steps may read it. Cells refer to slots,
//! so forks and copies share them. A slot is free once all its cells have been overwritten. If none is free, slots of
//! full groups are reused first, then the least recently read slots. A cell that lost its slot is read from the pool.
use super::CellPosition;
use super::slots::{Bounds, Group, Slot, StepTokens};
use crate::pools::PoolSpec;
use kvist_cache::{CellCopy, CellRun, GroupId, SpanKind, StepPlan};

/// One read of a query from a recent row instead of the pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecentRead {
    /// Its position, as in [`kvist_cache::ReadItem::first_index`].
    pub index: u32,
    /// Its row: a slot number, or the number of slots plus the index of a token of this step.
    pub row: u32,
}

/// The reads of a step from recent rows, in one layer group.
#[derive(Clone, Copy, Debug)]
pub struct RecentReads<'p> {
    reads: &'p [RecentRead],
    counts: &'p [u8],
    /// The lowest sequence index that any token reads from a recent row.
    pub lowest: u32,
    tokens: usize,
}

impl<'p> RecentReads<'p> {
    /// The rows that `token` reads, in sequence order.
    pub fn of(&self, token: usize) -> &'p [RecentRead] {
        &self.reads[token * self.tokens..][..usize::from(self.counts[token])]
    }
}

/// The slots of recent rows of all layer groups. Integers only.
#[derive(Debug)]
pub struct RecentPlan {
    /// Tokens per recent group (a range of positions).
    tokens: u32,
    slots: u32,
    groups: Vec<Group>,
    positions: Vec<u32>,
    bounds: Vec<Bounds>,
}

/// Sizes that follow from a spec.
struct Sizes {
    tokens: u32,
    slots: u32,
    /// Per layer group: most reads of the tokens of a step.
    max_reads: usize,
    groups: usize,
}

impl Sizes {
    fn of(spec: &PoolSpec) -> Option<Self> {
        let tokens = spec.recent.of_storages(spec.k, spec.v).tokens;
        let max_reads = (tokens as usize).saturating_mul(spec.max_step_tokens as usize);
        // No more rows than cells.
        let cells = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        let slots = spec.recent.rows().min(cells);
        (tokens > 0).then(|| Sizes { tokens, slots, max_reads, groups: spec.layout.n_groups() })
    }
}

impl RecentPlan {
    /// Slots of pools of this spec; `None` if no recent rows are kept.
    pub fn slots_of(spec: &PoolSpec) -> Option<u32> {
        Sizes::of(spec).map(|sizes| sizes.slots)
    }

    /// Bytes of the tables whose size depends on the slots and on the largest step; `None` on overflow.
    pub fn table_bytes(spec: &PoolSpec) -> Option<usize> {
        let Some(sizes) = Sizes::of(spec) else { return Some(0) };
        let reads = sizes.max_reads.checked_mul(size_of::<RecentRead>())?;
        let slots = (sizes.slots as usize).checked_mul(size_of::<Slot>())?;
        reads.checked_add(slots)?.checked_mul(sizes.groups)
    }

    /// `None` if no recent rows are kept: neither side is packed, or the feature is off.
    pub fn new(spec: &PoolSpec) -> Option<Self> {
        let Sizes { tokens, slots, max_reads, groups } = Sizes::of(spec)?;
        let groups = (0..groups).map(|_| Group::new(slots as usize, max_reads)).collect();
        Some(RecentPlan { tokens, slots, groups, positions: Vec::new(), bounds: Vec::new() })
    }

    /// Number of slots: the row of this step's token `t` has the number `n_slots() + t`.
    pub fn n_slots(&self) -> u32 {
        self.slots
    }

    /// Finds the recent rows that the queries of a step read, and chooses the rows that are kept. `cells` is the current
    /// capacity of each group's pools.
    pub fn begin(&mut self, plan: &StepPlan, cells: impl Fn(GroupId) -> u32) {
        plan.positions(&mut self.positions);
        self.bounds.clear();
        for span in plan.spans() {
            let end = span.start + span.n_tokens;
            let started = end - end % self.tokens;
            let kept = started.saturating_sub(self.tokens);
            let positions = &self.positions[span.tokens().start as usize..span.tokens().end as usize];
            self.bounds.extend(positions.iter().map(|&position| {
                let group = position - position % self.tokens;
                match span.kind {
                    SpanKind::Chain => Bounds {
                        low: group,
                        high: position + 1,
                        incomplete: position >= started,
                        kept: position >= kept,
                    },
                    // It is not known yet which nodes later steps read.
                    SpanKind::Tree { .. } => {
                        Bounds { low: group, high: position + 1, incomplete: true, kept: true }
                    }
                }
            }));
        }
        let step = StepTokens { tokens: self.tokens, positions: &self.positions, bounds: &self.bounds };
        for (g, group) in self.groups.iter_mut().enumerate() {
            let id = GroupId(g as u16);
            group.begin(plan.group(id), &step, cells(id));
        }
    }

    /// Updates the slots after cells have moved.
    pub fn relocate(&mut self, group: GroupId, copies: &[CellCopy], cells: u32) {
        let group = &mut self.groups[usize::from(group.0)];
        group.reach(cells);
        group.copy(copies);
    }

    /// Drops the rows of `cells`: other tokens are in these cells from now on.
    pub fn forget(&mut self, group: GroupId, cells: CellRun) {
        self.groups[usize::from(group.0)].forget(cells);
    }

    /// The slot that keeps the row of this token, if one does.
    pub fn slot_of(&self, group: GroupId, token: CellPosition) -> Option<u32> {
        let (slot, position) = self.groups[usize::from(group.0)].slot_of(token.cell)?;
        (position == token.position).then_some(slot)
    }

    /// Chooses a slot for the row of a token that no step here has written. `None` if there are no slots. `cells` is the
    /// current capacity of the group's pools.
    pub fn adopt(&mut self, group: GroupId, token: CellPosition, cells: u32) -> Option<u32> {
        let group = &mut self.groups[usize::from(group.0)];
        group.reach(cells);
        group.adopt(token.cell, token.position)
    }

    /// The tokens of the step whose rows are kept, with their slots.
    pub fn kept(&self, group: GroupId) -> &[(u32, u32)] {
        &self.groups[usize::from(group.0)].kept
    }

    /// What the step's tokens read from recent rows.
    pub fn reads(&self, group: GroupId) -> RecentReads<'_> {
        let Group { recent_reads, counts, lowest, .. } = &self.groups[usize::from(group.0)];
        RecentReads { reads: recent_reads, counts, lowest: *lowest, tokens: self.tokens as usize }
    }

    /// The row of a cell, if it has one, and the number of its token's recent group. A query that sees the cell reads the
    /// row if its own token is in the same group ([`group_of`](Self::group_of)).
    pub fn row_of(&self, group: GroupId, cell: u32) -> Option<(u32, u32)> {
        let (row, position) = self.groups[usize::from(group.0)].row_of(cell, &self.positions)?;
        Some((row, position / self.tokens))
    }

    /// The lowest position that a token of the step may read from a recent row.
    pub fn low_of(&self, token: u32) -> u32 {
        self.positions[token as usize] / self.tokens * self.tokens
    }

    /// The recent group of a token of the step.
    pub fn group_of(&self, token: u32) -> u32 {
        self.positions[token as usize] / self.tokens
    }
}
