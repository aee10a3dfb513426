//! Which slot keeps the row of which cell, and which rows each token of a step reads. Integers only.
use super::RecentRead;
use kvist_cache::{CellCopy, CellRun, GroupPlan};
use std::collections::VecDeque;

/// Bounds in the sequence for the recent group of a token's position.
#[derive(Debug)]
pub struct Bounds {
    pub low: u32,
    pub high: u32,
    /// True if the group is still incomplete after the step.
    pub incomplete: bool,
    /// True if the token's row is kept.
    pub kept: bool,
}

/// The tokens of a step.
pub struct StepTokens<'s> {
    pub tokens: u32,
    pub positions: &'s [u32],
    pub bounds: &'s [Bounds],
}

impl StepTokens<'_> {
    fn in_same_group(&self, token: usize, position: u32) -> bool {
        self.positions[token] / self.tokens == position / self.tokens
    }
}

/// Cells, slots and reads of one layer group.
#[derive(Debug)]
pub struct Group {
    pub slots: Vec<Slot>,
    /// Slots that no cell refers to.
    pub free: Vec<u32>,
    /// Slots of full groups. Entries may be stale: the slot may be free or in use again.
    pub filled: VecDeque<u32>,
    /// By cell: the slot of its row. Stale if the slot's generation has changed.
    pub places: Vec<Place>,
    /// By cell: 1 + index of the step's token that is written to it, or 0.
    pub token_of_cell: Vec<u32>,
    /// Cells with a nonzero entry in `token_of_cell`.
    pub written: Vec<u32>,
    pub step: u64,
    pub read: Vec<u32>,
    /// Tokens of the step whose rows are kept, with their slots.
    pub kept: Vec<(u32, u32)>,
    /// Reads of each token, with room for as many as a group has tokens; `counts` has the number used.
    pub recent_reads: Vec<RecentRead>,
    pub counts: Vec<u8>,
    /// The lowest sequence index that any token reads from here.
    pub lowest: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Slot {
    position: u32,
    /// Incremented every time the slot is taken.
    generation: u32,
    /// Number of cells that refer to it.
    cells: u32,
    /// The last step that used it.
    used: u64,
    /// The last step in which an incomplete group read it.
    incomplete: u64,
    /// True if its group is full.
    filled: bool,
    /// True if it is in the `filled` queue.
    queued: bool,
}

/// A slot and its generation when it was taken. Generation 0 means no slot.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    slot: u32,
    generation: u32,
}

impl Group {
    pub fn new(slots: usize, max_reads: usize) -> Self {
        Group {
            slots: vec![Slot::default(); slots],
            free: (0..slots as u32).rev().collect(),
            filled: VecDeque::with_capacity(slots),
            places: Vec::new(),
            token_of_cell: Vec::new(),
            written: Vec::new(),
            step: 0,
            read: Vec::with_capacity(slots),
            kept: Vec::with_capacity(slots),
            recent_reads: vec![RecentRead::default(); max_reads],
            counts: Vec::new(),
            lowest: u32::MAX,
        }
    }

    /// Drops the rows of a run of cells.
    pub fn forget(&mut self, cells: CellRun) {
        for cell in cells.start..cells.end().min(self.places.len() as u32) {
            self.set(cell, Place::default());
        }
    }

    /// Grows the per-cell tables to `cells` cells.
    pub fn reach(&mut self, cells: u32) {
        let cells = (cells as usize).max(self.places.len());
        self.places.resize(cells, Place::default());
        self.token_of_cell.resize(cells, 0);
    }

    pub fn copy(&mut self, copies: &[CellCopy]) {
        for copy in copies {
            for i in 0..copy.len {
                let place = self.places[(copy.from + i) as usize];
                self.set(copy.to + i, place);
            }
        }
    }

    /// Makes `cell` refer to `place`. Frees the cell's old slot if this was the slot's last cell.
    pub fn set(&mut self, cell: u32, place: Place) {
        if let Some(slot) = self.slot(place) {
            slot.cells += 1;
        }
        let before = std::mem::replace(&mut self.places[cell as usize], place);
        if let Some(slot) = self.slot(before) {
            slot.cells -= 1;
            if slot.cells == 0 {
                slot.filled = false;
                self.free.push(before.slot);
            }
        }
    }

    /// The slot of a place, unless it has been taken again since.
    pub fn slot(&mut self, Place { slot, generation }: Place) -> Option<&mut Slot> {
        self.slots.get_mut(slot as usize).filter(|slot| generation > 0 && slot.generation == generation)
    }

    pub fn begin(&mut self, plan: &GroupPlan, step: &StepTokens<'_>, cells: u32) {
        self.step += 1;
        self.reach(cells.max(plan.cells_end));
        for cell in self.written.drain(..) {
            self.token_of_cell[cell as usize] = 0;
        }
        self.copy(&plan.copies);
        for (token, cell) in plan.writes.iter().flat_map(|run| run.cells()).enumerate() {
            self.set(cell, Place::default());
            self.token_of_cell[cell as usize] = token as u32 + 1;
            self.written.push(cell);
        }
        self.find(plan, step);
        self.keep(step);
    }

    /// Finds the rows that each token reads.
    pub fn find(&mut self, plan: &GroupPlan, step: &StepTokens<'_>) {
        let (n, max) = (step.positions.len(), step.tokens as usize);
        self.counts.clear();
        self.counts.resize(n, 0);
        self.read.clear();
        self.lowest = u32::MAX;
        let lowest = step.bounds.iter().map(|bounds| bounds.low).min().unwrap_or(0);
        let reads = &plan.reads;
        for item in &reads.items {
            let end = item.first_index.saturating_add(item.run.len);
            if end <= lowest {
                continue;
            }
            for query in 0..item.n_queries {
                let token = reads.order[(item.first_query + query) as usize] as usize;
                let bounds = &step.bounds[token];
                let offset = |index: u32| index.clamp(item.first_index, end) - item.first_index;
                let seen = reads.span_of(item, query);
                let seen = seen.start.max(offset(bounds.low))..seen.end.min(offset(bounds.high));
                for at in seen {
                    let row = self.row(item.run.start + at, token, step);
                    let count = usize::from(self.counts[token]);
                    if let Some(row) = row.filter(|_| count < max && reads.sees(item, query, at)) {
                        self.lowest = self.lowest.min(item.first_index + at);
                        self.recent_reads[token * max + count] =
                            RecentRead { index: item.first_index + at, row };
                        self.counts[token] += 1;
                        self.note(row, bounds.incomplete);
                    }
                }
            }
        }
    }

    /// The row of a cell that `token` sees, if it has one and its position is in the token's group.
    pub fn row(&self, cell: u32, token: usize, step: &StepTokens<'_>) -> Option<u32> {
        let (row, position) = self.row_of(cell, step.positions)?;
        step.in_same_group(token, position).then_some(row)
    }

    /// The row of a cell, if it has one, and the position of its token.
    pub fn row_of(&self, cell: u32, positions: &[u32]) -> Option<(u32, u32)> {
        if let Some(writer) = self.token_of_cell.get(cell as usize)?.checked_sub(1) {
            return Some((self.slots.len() as u32 + writer, *positions.get(writer as usize)?));
        }
        self.slot_of(cell)
    }

    /// The slot of a cell, if it has one, and the position of its token.
    pub fn slot_of(&self, cell: u32) -> Option<(u32, u32)> {
        let Place { slot, generation } = *self.places.get(cell as usize)?;
        let found = self.slots.get(slot as usize)?;
        (generation > 0 && found.generation == generation).then_some((slot, found.position))
    }

    /// Gives `cell` a slot for the row of a token that no step has written. `None` if there are no slots.
    pub fn adopt(&mut self, cell: u32, position: u32) -> Option<u32> {
        // As a step would: what it does not read makes room.
        self.step += 1;
        self.set(cell, Place::default());
        let slot = self.take_free().or_else(|| self.take_oldest())?;
        let place = self.occupy(slot, position);
        self.set(cell, place);
        Some(slot)
    }

    /// Makes a slot that was taken the place of a row of this step.
    fn occupy(&mut self, slot: u32, position: u32) -> Place {
        let Slot { generation, queued, .. } = self.slots[slot as usize];
        let generation = generation.wrapping_add(1).max(1);
        let (used, incomplete) = (self.step, self.step);
        self.slots[slot as usize] =
            Slot { position, generation, used, incomplete, queued, ..Slot::default() };
        Place { slot, generation }
    }

    /// Records that this step reads `row`.
    pub fn note(&mut self, row: u32, incomplete: bool) {
        let Some(slot) = self.slots.get_mut(row as usize) else { return };
        if slot.used != self.step {
            slot.used = self.step;
            slot.filled = false;
            self.read.push(row);
        }
        if incomplete {
            slot.incomplete = self.step;
        }
    }

    /// Assigns slots to the new rows that later steps read. Rows of the last full group are kept too, in case the
    /// sequence is truncated there, but only in slots that are left: the slots that this step reads cannot be taken.
    pub fn keep(&mut self, step: &StepTokens<'_>) {
        self.kept.clear();
        let kept = |incomplete| {
            let all = step.bounds.iter().enumerate();
            all.filter(move |(_, bounds)| bounds.kept && bounds.incomplete == incomplete)
        };
        for (token, bounds) in kept(true).chain(kept(false)) {
            let position = step.positions[token];
            let slot = self.take_free().or_else(|| if bounds.incomplete { self.take_oldest() } else { None });
            let Some(slot) = slot else { continue };
            let place = self.occupy(slot, position);
            if !bounds.incomplete {
                self.fill(slot);
            }
            self.set(self.written[token], place);
            self.kept.push((token as u32, slot));
        }
        for i in 0..self.read.len() {
            let row = self.read[i];
            if self.slots[row as usize].incomplete != self.step {
                self.fill(row);
            }
        }
    }

    /// Marks the row's group as full.
    pub fn fill(&mut self, row: u32) {
        let slot = &mut self.slots[row as usize];
        slot.filled = true;
        if !std::mem::replace(&mut slot.queued, true) {
            self.filled.push_back(row);
        }
    }

    /// A free slot, or one of a full group that this step does not read.
    pub fn take_free(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        for _ in 0..self.filled.len() {
            let slot = self.filled.pop_front()?;
            let is = &mut self.slots[slot as usize];
            // The entry may be stale: read again since, freed, or taken by `take_oldest`.
            if is.filled && is.used == self.step {
                self.filled.push_back(slot);
                continue;
            }
            is.queued = false;
            if is.filled {
                return Some(slot);
            }
        }
        None
    }

    /// The least recently read slot that this step does not read.
    pub fn take_oldest(&self) -> Option<u32> {
        let old = self.slots.iter().enumerate().filter(|(_, slot)| slot.used != self.step);
        old.min_by_key(|(_, slot)| slot.used).map(|(i, _)| i as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two slots and four cells. The first two cells have rows of incomplete groups.
    fn two() -> Group {
        let mut group = Group::new(2, 0);
        group.reach(4);
        [0, 1].into_iter().for_each(|cell| put(&mut group, cell, true));
        group.step += 1;
        group
    }

    /// A step that writes the token at that position to `cell`.
    fn put(group: &mut Group, cell: u32, incomplete: bool) {
        group.step += 1;
        again(group, cell, incomplete);
    }
    fn again(group: &mut Group, cell: u32, incomplete: bool) {
        let bounds = [Bounds { low: 0, high: 1, incomplete, kept: true }];
        group.written = vec![cell];
        group.keep(&StepTokens { tokens: 16, positions: &[cell], bounds: &bounds });
    }

    /// Positions of the cells that have rows.
    fn rows(group: &Group) -> Vec<u32> {
        let step = StepTokens { tokens: 16, positions: &[0], bounds: &[] };
        let row = |cell| Some(group.slots[group.row(cell, 0, &step)? as usize].position);
        (0..4).filter_map(row).collect()
    }

    #[test]
    fn rows_that_were_read_longest_ago_go_first() {
        let mut group = two();
        assert_eq!(rows(&group), [0, 1]);
        again(&mut group, 2, true);
        assert_eq!(rows(&group), [1, 2]);
        let mut group = two();
        group.note(0, true);
        let read = group.slots[0].position;
        again(&mut group, 2, true);
        assert_eq!(rows(&group), [read, 2]);
    }

    #[test]
    fn rows_of_a_full_group_go_before_older_ones_and_push_none_out() {
        let mut group = Group::new(2, 0);
        group.reach(4);
        put(&mut group, 0, true);
        put(&mut group, 1, false);
        put(&mut group, 2, true);
        assert_eq!(rows(&group), [0, 2]);
        put(&mut group, 3, false);
        assert_eq!(rows(&group), [0, 2], "both grow");
    }

    #[test]
    fn what_the_step_reads_is_never_taken() {
        let mut group = two();
        [0, 1].into_iter().for_each(|row| group.note(row, true));
        again(&mut group, 2, true);
        assert_eq!(rows(&group), [0, 1]);
    }

    /// Regression: a step that ended a group took its slots first for the group before, and none was left for its newest tokens. So
    /// what they were read as depended on the chunks of a text.
    #[test]
    fn rows_of_the_newest_tokens_come_before_those_of_the_full_group() {
        let mut group = Group::new(2, 0);
        group.reach(4);
        group.written = vec![0, 1, 2];
        let bounds =
            [false, false, true].map(|incomplete| Bounds { low: 0, high: 1, incomplete, kept: true });
        group.keep(&StepTokens { tokens: 16, positions: &[0, 1, 2], bounds: &bounds });
        assert_eq!(rows(&group), [0, 2]);
    }

    #[test]
    fn a_slot_is_free_once_all_its_cells_were_filled_anew() {
        let mut group = two();
        group.copy(&[CellCopy { from: 1, to: 3, len: 1 }]);
        group.set(1, Place::default());
        assert_eq!((rows(&group), group.free.len()), (vec![0, 1], 0));
        group.set(3, Place::default());
        assert_eq!((rows(&group), group.free.len()), (vec![0], 1));
        put(&mut group, 2, true);
        assert_eq!(rows(&group), [0, 2]);
    }

    #[test]
    fn an_adopted_row_takes_a_slot_as_a_step_would() {
        let mut group = two();
        // Cell 0 was read longest ago.
        group.note(1, true);
        let adopted = group.adopt(3, 9);
        assert_eq!(adopted.map(|slot| group.slots[slot as usize].position), Some(9));
        assert_eq!(group.slot_of(3), adopted.map(|slot| (slot, 9)));
        assert_eq!((group.slot_of(0), group.slot_of(1).is_some()), (None, true));
        // Its own slot is free, and the first one that it gets back.
        assert_eq!(group.adopt(3, 10), adopted);
        let mut without_slots = Group::new(0, 0);
        without_slots.reach(4);
        assert_eq!(without_slots.adopt(3, 9), None);
    }

    #[test]
    fn rows_of_another_group_of_positions_are_not_read() {
        let group = two();
        let step = StepTokens { tokens: 16, positions: &[16], bounds: &[] };
        assert_eq!(group.row(0, 0, &step), None);
    }
}
