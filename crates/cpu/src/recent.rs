//! The newest tokens in f16, beside their packed rows: which of them a step's queries read, and where they lie.
//!
//! A row is written once, when its token is new. If its group of positions is still to grow, it is kept in a slot; cells know
//! their slots, so forks and copies share them. The slots of a group that was filled are the first to be taken again, then
//! those that were read longest ago: rows of sequences that have ended, unless there are more sequences than slots are for.
//! A cell whose slot was taken is read as it is stored.
use crate::arch::LANES;
use half::f16;
use kvist_backend::{BackendError, Layout, MemoryBudget, PoolSpec, Purpose, Reservation};
use kvist_cache::{CellCopy, GroupId, GroupPlan, SpanKind, StepPlan};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Sixteen elements in f16.
type Vector = [u8; 2 * LANES];

/// A key and value that a query reads from here and not from the pool.
#[derive(Clone, Copy, Debug, Default)]
pub struct Own {
    /// Its place in the sequence: what [`kvist_cache::ReadItem::first_index`] counts.
    pub index: u32,
    /// Its row: a slot, or behind all slots a token of the step.
    pub row: u32,
}

/// The rows of all layers.
pub struct RecentRows {
    /// Tokens of a group of positions.
    tokens: u32,
    slots: usize,
    groups: Vec<Group>,
    layers: Vec<Option<Layer>>,
    /// Rows of the step's tokens: of one layer after the other, or of every layer if some read the rows of others.
    fresh: Vec<Vec<Vector>>,
    positions: Vec<u32>,
    bounds: Vec<Bounds>,
    _held: Reservation,
}

/// What is kept of one layer: of every row the keys of all heads, then the values, if both are packed.
struct Layer {
    shape: Shape,
    slots: Vec<Vector>,
    /// Which of the fresh buffers is this layer's.
    fresh: usize,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    /// Vectors of a row of one head.
    vectors: usize,
    keys: bool,
    values: bool,
}

impl Shape {
    fn row(&self) -> usize {
        self.heads * self.vectors * (usize::from(self.keys) + usize::from(self.values))
    }
    fn keys(&self, head: usize) -> Range<usize> {
        head * self.vectors..(head + 1) * self.vectors
    }
    fn values(&self, head: usize) -> Range<usize> {
        let first = if self.keys { self.heads } else { 0 };
        (first + head) * self.vectors..(first + head + 1) * self.vectors
    }
}

/// What there is to be allocated.
struct Sizes {
    slots: usize,
    /// By layer; `None` for borrowers.
    shapes: Vec<Option<Shape>>,
    /// Vectors of each fresh buffer.
    fresh: Vec<usize>,
}

impl Sizes {
    /// `None` if nothing is kept.
    fn of(spec: &PoolSpec) -> Option<Self> {
        let (keys, values) = (spec.k.dtype.is_quantised(), spec.v.dtype.is_quantised());
        if spec.recent.tokens == 0 || !(keys || values) {
            return None;
        }
        let Layout { layers, .. } = &spec.layout;
        let shape = |(l, layer): (usize, &kvist_backend::LayerSpec)| {
            let (heads, vectors) = (layer.n_kv_heads as usize, (layer.head_dim as usize).div_ceil(LANES));
            spec.layout.owns(l).then_some(Shape { heads, vectors, keys, values })
        };
        let shapes: Vec<Option<Shape>> = layers.iter().enumerate().map(shape).collect();
        let tokens = spec.max_step_tokens as usize;
        let rows = shapes.iter().flatten().map(|shape| shape.row().saturating_mul(tokens));
        let fresh = match shapes.iter().all(Option::is_some) {
            true => vec![rows.max().unwrap_or(0)],
            false => rows.collect(),
        };
        Some(Sizes { slots: spec.recent.rows() as usize, shapes, fresh })
    }

    fn bytes(&self) -> Option<u64> {
        let kept = self.shapes.iter().flatten().map(|shape| shape.row().checked_mul(self.slots));
        let vectors = kept
            .chain(self.fresh.iter().copied().map(Some))
            .try_fold(0usize, |sum, n| sum.checked_add(n?))?;
        u64::try_from(vectors.checked_mul(size_of::<Vector>())?).ok()
    }
}

impl RecentRows {
    /// Bytes that they take; `None` if it overflows.
    pub fn bytes(spec: &PoolSpec) -> Option<u64> {
        Sizes::of(spec).map_or(Some(0), |sizes| sizes.bytes())
    }

    /// `None` if nothing is kept: no packed side, or turned off.
    pub fn new(spec: &PoolSpec, budget: &Arc<MemoryBudget>) -> Result<Option<Self>, BackendError> {
        spec.recent.check()?;
        let Some(sizes) = Sizes::of(spec) else { return Ok(None) };
        let overflow = || BackendError::Unsupported("recent rows for that many sequences overflow".into());
        let bytes = sizes.bytes().ok_or_else(overflow)?;
        let held = budget.reserve(Purpose::Scratch, bytes)?;
        let buffer = |n: usize| {
            let mut all = Vec::new();
            let refused = |_| BackendError::OutOfMemory { what: "recent rows", bytes };
            all.try_reserve_exact(n).map_err(refused)?;
            all.resize(n, Vector::default());
            Ok::<_, BackendError>(all)
        };
        let mut n_owners = 0;
        let layers = sizes.shapes.iter().map(|shape| {
            let Some(shape) = *shape else { return Ok(None) };
            let fresh = n_owners.min(sizes.fresh.len() - 1);
            n_owners += 1;
            Ok(Some(Layer { shape, slots: buffer(shape.row() * sizes.slots)?, fresh }))
        });
        Ok(Some(RecentRows {
            tokens: spec.recent.tokens,
            slots: sizes.slots,
            groups: (0..spec.layout.n_groups()).map(|_| Group::new(sizes.slots)).collect(),
            layers: layers.collect::<Result<_, BackendError>>()?,
            fresh: sizes.fresh.iter().map(|n| buffer(*n)).collect::<Result<_, _>>()?,
            positions: Vec::new(),
            bounds: Vec::new(),
            _held: held,
        }))
    }

    /// Find what the queries of a step read from here. `cells` is the room that each group's pools have now.
    pub fn begin(&mut self, plan: &StepPlan, cells: impl Fn(GroupId) -> u32) {
        plan.positions(&mut self.positions);
        self.bounds.clear();
        for span in plan.spans() {
            let end = span.start + span.n_tokens;
            let started = end - end % self.tokens;
            let positions = &self.positions[span.tokens().start as usize..span.tokens().end as usize];
            self.bounds.extend(positions.iter().map(|&position| {
                let group = position - position % self.tokens;
                match span.kind {
                    SpanKind::Chain => Bounds { low: group, high: position + 1, stays: position >= started },
                    // Nodes follow the committed tokens in any order of positions.
                    SpanKind::Frontier { .. } => {
                        Bounds { low: group.min(span.start), high: u32::MAX, stays: true }
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

    /// Cells have moved.
    pub fn relocate(&mut self, group: GroupId, copies: &[CellCopy], cells: u32) {
        let group = &mut self.groups[group.0 as usize];
        group.reach(cells);
        group.copy(copies);
    }

    /// A row of `head` of the `token`-th token of the step, as the pool would read it back if nothing were lost but f16's
    /// rounding: keys as they came, values turned as the pool turns them.
    pub fn write(&mut self, owner: usize, token: usize, head: usize, key: &[f32], value: &[f32]) {
        let Some(layer) = &self.layers[owner] else { return };
        let shape = layer.shape;
        let row = &mut self.fresh[layer.fresh][token * shape.row()..(token + 1) * shape.row()];
        if shape.keys {
            round(key, &mut row[shape.keys(head)]);
        }
        if shape.values {
            round(value, &mut row[shape.values(head)]);
        }
    }

    /// All rows of the step are written: keep those that later steps read.
    pub fn keep(&mut self, owner: usize, group: GroupId) {
        let Some(layer) = &mut self.layers[owner] else { return };
        let (row, fresh) = (layer.shape.row(), &self.fresh[layer.fresh]);
        for (token, slot) in &self.groups[group.0 as usize].kept {
            let (from, to) = (*token as usize * row, *slot as usize * row);
            layer.slots[to..to + row].copy_from_slice(&fresh[from..from + row]);
        }
    }

    /// What the queries of the step read of a layer.
    pub fn reads(&self, owner: usize, group: GroupId) -> Option<RecentReads<'_>> {
        let layer = self.layers[owner].as_ref()?;
        let Group { own, counts, .. } = &self.groups[group.0 as usize];
        Some(RecentReads {
            own,
            counts,
            tokens: self.tokens as usize,
            shape: layer.shape,
            n_slots: self.slots,
            slots: &layer.slots,
            fresh: &self.fresh[layer.fresh],
        })
    }
}

/// Elements in f16, and zeros up to the next whole vector. Numbers that do not fit saturate; what is no number stays none, so
/// that it is seen.
fn round(row: &[f32], out: &mut [Vector]) {
    let largest = f16::MAX.to_f32();
    out.last_mut().into_iter().for_each(|last| *last = Vector::default());
    for (x, out) in row.iter().zip(out.as_flattened_mut().chunks_exact_mut(2)) {
        let x = if x.is_finite() { x.clamp(-largest, largest) } else { *x };
        out.copy_from_slice(&f16::from_f32(x).to_le_bytes());
    }
}

/// One layer's rows, and which of them each token of the step reads.
#[derive(Clone, Copy)]
pub struct RecentReads<'r> {
    own: &'r [Own],
    counts: &'r [u8],
    tokens: usize,
    shape: Shape,
    n_slots: usize,
    slots: &'r [Vector],
    fresh: &'r [Vector],
}

impl<'r> RecentReads<'r> {
    /// What `token` reads from here, in the order of the sequence.
    pub fn of(&self, token: usize) -> &'r [Own] {
        &self.own[token * self.tokens..][..usize::from(self.counts[token])]
    }
    pub fn has_keys(&self) -> bool {
        self.shape.keys
    }
    pub fn has_values(&self) -> bool {
        self.shape.values
    }
    pub fn key(&self, own: &Own, head: usize) -> &'r [Vector] {
        &self.row(own)[self.shape.keys(head)]
    }
    pub fn value(&self, own: &Own, head: usize) -> &'r [Vector] {
        &self.row(own)[self.shape.values(head)]
    }
    fn row(&self, own: &Own) -> &'r [Vector] {
        let (row, n) = (own.row as usize, self.shape.row());
        match row.checked_sub(self.n_slots) {
            None => &self.slots[row * n..(row + 1) * n],
            Some(token) => &self.fresh[token * n..(token + 1) * n],
        }
    }
}

/// Where in its sequence the group of a token's position may lie.
struct Bounds {
    low: u32,
    high: u32,
    /// Is the group still to grow when the step is done?
    stays: bool,
}

/// The tokens of a step.
struct StepTokens<'s> {
    tokens: u32,
    positions: &'s [u32],
    bounds: &'s [Bounds],
}

impl StepTokens<'_> {
    fn is_own(&self, token: usize, position: u32) -> bool {
        self.positions[token] / self.tokens == position / self.tokens
    }
}

/// One layer group's cells, slots and reads.
struct Group {
    slots: Vec<Slot>,
    /// Slots that were never taken: those from here on.
    unused: usize,
    /// Slots of groups that are full; some may be in use again.
    filled: VecDeque<u32>,
    /// By cell: the slot of its row, if it is still the cell's.
    places: Vec<Place>,
    /// By cell: one more than the token of the step that fills it.
    fresh: Vec<u32>,
    /// Cells of which `fresh` says something.
    written: Vec<u32>,
    step: u64,
    read: Vec<u32>,
    /// Tokens of the step whose rows are kept, with their slots.
    kept: Vec<(u32, u32)>,
    /// As many places for each token as a group has tokens, and how many of them are filled.
    own: Vec<Own>,
    counts: Vec<u8>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    position: u32,
    /// Counts how often it was taken.
    generation: u32,
    /// The step that used it last.
    used: u64,
    /// The last step in which a group that is still to grow read it.
    stays: u64,
    filled: bool,
}

/// A slot, and which of its uses. None was taken 0 times.
#[derive(Clone, Copy, Default)]
struct Place {
    slot: u32,
    generation: u32,
}

impl Group {
    fn new(slots: usize) -> Self {
        Group {
            slots: vec![Slot::default(); slots],
            unused: 0,
            filled: VecDeque::with_capacity(slots),
            places: Vec::new(),
            fresh: Vec::new(),
            written: Vec::new(),
            step: 0,
            read: Vec::new(),
            kept: Vec::new(),
            own: Vec::new(),
            counts: Vec::new(),
        }
    }

    /// Keep books for `cells` cells.
    fn reach(&mut self, cells: u32) {
        let cells = (cells as usize).max(self.places.len());
        self.places.resize(cells, Place::default());
        self.fresh.resize(cells, 0);
    }

    fn copy(&mut self, copies: &[CellCopy]) {
        for copy in copies {
            let from = copy.from as usize;
            self.places.copy_within(from..from + copy.len as usize, copy.to as usize);
        }
    }

    fn begin(&mut self, plan: &GroupPlan, step: &StepTokens<'_>, cells: u32) {
        self.step += 1;
        self.reach(cells);
        for cell in self.written.drain(..) {
            self.fresh[cell as usize] = 0;
        }
        self.copy(&plan.copies);
        for (token, cell) in plan.writes.iter().flat_map(|run| run.cells()).enumerate() {
            self.places[cell as usize] = Place::default();
            self.fresh[cell as usize] = token as u32 + 1;
            self.written.push(cell);
        }
        self.find(plan, step);
        self.keep(step);
    }

    /// Which rows each token reads.
    fn find(&mut self, plan: &GroupPlan, step: &StepTokens<'_>) {
        let (n, most) = (step.positions.len(), step.tokens as usize);
        self.own.resize((n * most).max(self.own.len()), Own::default());
        self.counts.clear();
        self.counts.resize(n, 0);
        self.read.clear();
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
                    if let Some(row) = row.filter(|_| count < most && reads.sees(item, query, at)) {
                        self.own[token * most + count] = Own { index: item.first_index + at, row };
                        self.counts[token] += 1;
                        self.note(row, bounds.stays);
                    }
                }
            }
        }
    }

    /// The row of a cell that `token` sees, if its position is in the token's group.
    fn row(&self, cell: u32, token: usize, step: &StepTokens<'_>) -> Option<u32> {
        if let Some(fresh) = self.fresh[cell as usize].checked_sub(1) {
            return step
                .is_own(token, step.positions[fresh as usize])
                .then_some(self.slots.len() as u32 + fresh);
        }
        let Place { slot, generation } = self.places[cell as usize];
        let found = self.slots.get(slot as usize)?;
        (generation > 0 && found.generation == generation && step.is_own(token, found.position))
            .then_some(slot)
    }

    /// This step reads `row`.
    fn note(&mut self, row: u32, stays: bool) {
        let Some(slot) = self.slots.get_mut(row as usize) else { return };
        if slot.used != self.step {
            slot.used = self.step;
            slot.filled = false;
            self.read.push(row);
        }
        if stays {
            slot.stays = self.step;
        }
    }

    /// Slots for the new rows that later steps read.
    fn keep(&mut self, step: &StepTokens<'_>) {
        self.kept.clear();
        for (token, bounds) in step.bounds.iter().enumerate().filter(|(_, bounds)| bounds.stays) {
            debug_assert!(bounds.low < bounds.high);
            if let Some(slot) = self.take(step.positions[token]) {
                let generation = self.slots[slot as usize].generation;
                self.places[self.written[token] as usize] = Place { slot, generation };
                self.kept.push((token as u32, slot));
            }
        }
        for &row in &self.read {
            let slot = &mut self.slots[row as usize];
            if slot.stays != self.step {
                slot.filled = true;
                self.filled.push_back(row);
            }
        }
    }

    /// A slot for a row; `None` if this step uses them all.
    fn take(&mut self, position: u32) -> Option<u32> {
        let slot = if self.unused < self.slots.len() {
            self.unused += 1;
            self.unused - 1
        } else {
            self.take_filled().or_else(|| self.take_oldest())?
        };
        let taken = &mut self.slots[slot];
        *taken = Slot {
            position,
            generation: taken.generation.wrapping_add(1).max(1),
            used: self.step,
            stays: self.step,
            filled: false,
        };
        Some(slot as u32)
    }

    fn take_filled(&mut self) -> Option<usize> {
        while let Some(slot) = self.filled.pop_front() {
            // It may have been read again since, or taken as the oldest.
            if std::mem::take(&mut self.slots[slot as usize].filled) {
                return Some(slot as usize);
            }
        }
        None
    }

    fn take_oldest(&self) -> Option<usize> {
        let old = self.slots.iter().enumerate().filter(|(_, slot)| slot.used != self.step);
        old.min_by_key(|(_, slot)| slot.used).map(|(i, _)| i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A group of two slots, both taken by a step each, and what a third step takes after `between`.
    fn after_two(mut between: impl FnMut(&mut Group)) -> (Group, Option<u32>) {
        let mut group = Group::new(2);
        for position in [0, 1] {
            group.step += 1;
            group.take(position);
        }
        group.step += 1;
        between(&mut group);
        let taken = group.take(2);
        (group, taken)
    }

    #[test]
    fn rows_that_were_read_longest_ago_go_first() {
        let (group, taken) = after_two(|_| ());
        assert_eq!((taken, group.slots[0].position, group.slots[0].generation), (Some(0), 2, 2));
        assert_eq!(after_two(|group| group.note(0, true)).1, Some(1));
    }

    #[test]
    fn rows_of_a_full_group_go_before_older_ones() {
        let fill = |group: &mut Group| {
            group.slots[1].filled = true;
            group.filled.push_back(1);
        };
        assert_eq!(after_two(fill).1, Some(1));
        // Unless another sequence reads them.
        let (_, taken) = after_two(|group| {
            fill(group);
            group.note(1, true);
        });
        assert_eq!(taken, Some(0));
    }

    #[test]
    fn what_the_step_reads_is_never_taken() {
        let (group, taken) = after_two(|group| [0, 1].into_iter().for_each(|row| group.note(row, true)));
        assert_eq!(taken, None);
        assert!(group.slots.iter().all(|slot| slot.generation == 1));
    }

    #[test]
    fn a_cell_whose_slot_was_taken_has_no_row() {
        let (mut group, _) = after_two(|group| {
            group.reach(2);
            group.places[0] = Place { slot: 0, generation: 1 };
            group.places[1] = Place { slot: 1, generation: 1 };
        });
        group.read.clear();
        let step = StepTokens { tokens: 16, positions: &[3], bounds: &[] };
        assert_eq!([group.row(0, 0, &step), group.row(1, 0, &step)], [None, Some(1)]);
        // Nor one of another group of positions.
        let step = StepTokens { tokens: 16, positions: &[16], bounds: &[] };
        assert_eq!(group.row(1, 0, &step), None);
    }

    #[test]
    fn what_is_no_number_stays_none_and_what_is_too_large_saturates() {
        let mut out = [[7; 2 * LANES]];
        round(&[f32::NAN, f32::INFINITY, -1e9, 0.1], &mut out);
        let (values, _) = out.as_flattened().as_chunks::<2>();
        let value = |i: usize| f16::from_le_bytes(values[i]).to_f32();
        assert!(value(0).is_nan());
        assert_eq!([value(1), value(2), value(4)], [f32::INFINITY, -65504.0, 0.0]);
    }
}
