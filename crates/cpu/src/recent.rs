//! Keeps the newest tokens in f16 in addition to their packed rows. [`RecentPlan`] says where the rows are and which ones
//! a step's queries read.
use crate::arch::LANES;
use half::f16;
use half::slice::HalfFloatSliceExt;
use kvist_cache::{CellCopy, CellRun, GroupId, StepPlan};
use kvist_device::{
    CellPosition, DeviceError, Layout, MemoryBudget, PoolSpec, Purpose, RecentPlan, RecentRead, Reservation,
};
use std::ops::Range;
use std::sync::Arc;

/// Sixteen elements in f16.
type Vector = [u8; 2 * LANES];

/// The recent rows of all layers.
pub struct RecentRows {
    plan: RecentPlan,
    layers: Vec<Option<Layer>>,
    /// Rows of the step's tokens. One buffer shared by all layers, or one per layer if some layers read another layer's
    /// KV.
    new_rows: Vec<Vec<Vector>>,
    _reservation: Reservation,
}

/// The rows of one layer. A row contains the keys of all heads, then the values; only the packed sides are present.
struct Layer {
    shape: Shape,
    slots: Vec<Vector>,
    /// Index of this layer's buffer in `new_rows`.
    buffer: usize,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    /// Elements of a row, and the vectors that they fill.
    dim: usize,
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

/// Sizes of the allocations.
struct Sizes {
    slots: usize,
    /// By layer; `None` for layers that share another layer's KV.
    shapes: Vec<Option<Shape>>,
    /// Vectors of each buffer of new rows.
    new_rows: Vec<usize>,
    /// Bytes of the plan's tables.
    tables: usize,
}

impl Sizes {
    /// `None` if no recent rows are kept.
    fn of(spec: &PoolSpec) -> Option<Self> {
        let (keys, values) = (spec.k.dtype.is_quantised(), spec.v.dtype.is_quantised());
        let slots = RecentPlan::slots_of(spec)? as usize;
        let Layout { layers, .. } = &spec.layout;
        let shape = |(l, layer): (usize, &kvist_device::LayerSpec)| {
            let (heads, dim) = (layer.n_kv_heads as usize, layer.k_dim as usize);
            spec.layout.owns(l).then_some(Shape { heads, dim, vectors: dim.div_ceil(LANES), keys, values })
        };
        let shapes: Vec<Option<Shape>> = layers.iter().enumerate().map(shape).collect();
        let tokens = spec.max_step_tokens as usize;
        let rows = shapes.iter().flatten().map(|shape| shape.row().saturating_mul(tokens));
        let new_rows = match shapes.iter().all(Option::is_some) {
            true => vec![rows.max().unwrap_or(0)],
            false => rows.collect(),
        };
        Some(Sizes { slots, shapes, new_rows, tables: RecentPlan::table_bytes(spec)? })
    }

    fn bytes(&self) -> Option<u64> {
        let kept = self.shapes.iter().flatten().map(|shape| shape.row().checked_mul(self.slots));
        let vectors = kept
            .chain(self.new_rows.iter().copied().map(Some))
            .try_fold(0usize, |sum, n| sum.checked_add(n?))?;
        let bytes = vectors.checked_mul(size_of::<Vector>())?;
        u64::try_from(bytes.checked_add(self.tables)?).ok()
    }
}

impl RecentRows {
    /// Bytes of all allocations; `None` on overflow.
    pub fn bytes(spec: &PoolSpec) -> Option<u64> {
        match RecentPlan::slots_of(spec) {
            None => Some(0),
            Some(_) => Sizes::of(spec)?.bytes(),
        }
    }

    /// `None` if no recent rows are kept: neither side is packed, or the feature is off.
    pub fn new(spec: &PoolSpec, budget: &Arc<MemoryBudget>) -> Result<Option<Self>, DeviceError> {
        spec.recent.check()?;
        if RecentPlan::slots_of(spec).is_none() {
            return Ok(None);
        }
        let overflow = || DeviceError::Unsupported("recent rows for that many sequences overflow".into());
        let sizes = Sizes::of(spec).ok_or_else(overflow)?;
        let bytes = sizes.bytes().ok_or_else(overflow)?;
        let reservation = budget.reserve(Purpose::Scratch, bytes)?;
        let buffer = |n: usize| {
            let mut all = Vec::new();
            let refused = |_| DeviceError::OutOfMemory { what: "recent rows", bytes };
            all.try_reserve_exact(n).map_err(refused)?;
            all.resize(n, Vector::default());
            Ok::<_, DeviceError>(all)
        };
        let mut n_owners = 0;
        let layers = sizes.shapes.iter().map(|shape| {
            let Some(shape) = *shape else { return Ok(None) };
            let index = n_owners.min(sizes.new_rows.len() - 1);
            n_owners += 1;
            Ok(Some(Layer { shape, slots: buffer(shape.row() * sizes.slots)?, buffer: index }))
        });
        Ok(Some(RecentRows {
            plan: RecentPlan::new(spec).ok_or_else(overflow)?,
            layers: layers.collect::<Result<_, DeviceError>>()?,
            new_rows: sizes.new_rows.iter().map(|n| buffer(*n)).collect::<Result<_, _>>()?,
            _reservation: reservation,
        }))
    }

    /// Finds the recent rows that the queries of a step read. `cells` is the current capacity of each group's pools.
    pub fn begin(&mut self, plan: &StepPlan, cells: impl Fn(GroupId) -> u32) {
        self.plan.begin(plan, cells);
    }

    /// Updates the slots after cells have moved.
    pub fn relocate(&mut self, group: GroupId, copies: &[CellCopy], cells: u32) {
        self.plan.relocate(group, copies, cells);
    }

    /// Drops the rows of `cells`: other tokens are in these cells from now on.
    pub fn forget(&mut self, group: GroupId, cells: CellRun) {
        self.plan.forget(group, cells);
    }

    /// Copies the rows of a token to `rows`, as [`kvist_device::Pools::read_recent`] describes them: those that a slot keeps.
    /// `false` if none does.
    pub fn read(&self, group: GroupId, token: CellPosition, layout: &Layout, mut rows: &mut [u8]) -> bool {
        let Some(slot) = self.plan.slot_of(group, token) else { return false };
        for (layer, kept) in layout.layers.iter().zip(&self.layers) {
            let Some(Layer { shape, slots, .. }) = kept.as_ref().filter(|_| layer.group == group) else {
                continue;
            };
            let first = slot as usize * shape.row();
            for row in slots[first..first + shape.row()].chunks_exact(shape.vectors) {
                let out = rows.split_off_mut(..2 * shape.dim).expect("the length was checked");
                out.copy_from_slice(&row.as_flattened()[..2 * shape.dim]);
            }
        }
        true
    }

    /// Keeps rows from [`read`](Self::read) for a token that was imported. `cells` is the capacity of its group's pools.
    /// `false` if there are no slots.
    pub fn adopt(
        &mut self,
        group: GroupId,
        token: CellPosition,
        cells: u32,
        layout: &Layout,
        mut rows: &[u8],
    ) -> bool {
        let Some(slot) = self.plan.adopt(group, token, cells) else { return false };
        for (layer, kept) in layout.layers.iter().zip(&mut self.layers) {
            let Some(Layer { shape, slots, .. }) = kept.as_mut().filter(|_| layer.group == group) else {
                continue;
            };
            let (first, shape) = (slot as usize * shape.row(), *shape);
            // What fills the last vector of a row up stays zero.
            for row in slots[first..first + shape.row()].chunks_exact_mut(shape.vectors) {
                let from = rows.split_off(..2 * shape.dim).expect("the length was checked");
                row.as_flattened_mut()[..2 * shape.dim].copy_from_slice(from);
            }
        }
        true
    }

    /// Writes the row of `head` for the step's `token`-th token in f16: keys in their original form, values transformed
    /// as the pool transforms them.
    pub fn write(&mut self, owner: usize, token: usize, head: usize, key: &[f32], value: &[f32]) {
        let Some(layer) = &self.layers[owner] else { return };
        let shape = layer.shape;
        let row = &mut self.new_rows[layer.buffer][token * shape.row()..(token + 1) * shape.row()];
        if shape.keys {
            round(key, &mut row[shape.keys(head)]);
        }
        if shape.values {
            round(value, &mut row[shape.values(head)]);
        }
    }

    /// Call after all rows of the step are written. Copies the rows that later steps may read into their slots.
    pub fn keep(&mut self, owner: usize, group: GroupId) {
        let Some(layer) = &mut self.layers[owner] else { return };
        let (row, new_rows) = (layer.shape.row(), &self.new_rows[layer.buffer]);
        for (token, slot) in self.plan.kept(group) {
            let (from, to) = (*token as usize * row, *slot as usize * row);
            layer.slots[to..to + row].copy_from_slice(&new_rows[from..from + row]);
        }
    }

    /// The recent rows of a layer that the step's queries read.
    pub fn reads(&self, owner: usize, group: GroupId) -> Option<RecentReads<'_>> {
        let layer = self.layers[owner].as_ref()?;
        Some(RecentReads {
            reads: self.plan.reads(group),
            shape: layer.shape,
            n_slots: self.plan.n_slots() as usize,
            slots: &layer.slots,
            new_rows: &self.new_rows[layer.buffer],
        })
    }
}

/// Converts elements to f16 and pads with zeros to whole vectors. Finite numbers out of range saturate. NaN and
/// infinities stay as they are, so that the error remains visible.
fn round(row: &[f32], out: &mut [Vector]) {
    let largest = f16::MAX.to_f32();
    for (row, out) in row.chunks(LANES).zip(out) {
        let (mut wide, mut narrow) = ([0.0; LANES], [f16::ZERO; LANES]);
        for (wide, x) in wide.iter_mut().zip(row) {
            *wide = if x.is_finite() { x.clamp(-largest, largest) } else { *x };
        }
        narrow.convert_from_f32_slice(&wide);
        for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(narrow) {
            *out = x.to_le_bytes();
        }
    }
}

/// The rows of one layer, and which of them each token of the step reads.
#[derive(Clone, Copy)]
pub struct RecentReads<'r> {
    reads: kvist_device::RecentReads<'r>,
    shape: Shape,
    n_slots: usize,
    slots: &'r [Vector],
    new_rows: &'r [Vector],
}

impl<'r> RecentReads<'r> {
    /// The lowest sequence index that any token reads from here.
    pub fn lowest(&self) -> u32 {
        self.reads.lowest
    }
    /// The rows that `token` reads from here, in sequence order.
    pub fn of(&self, token: usize) -> &'r [RecentRead] {
        self.reads.of(token)
    }
    pub fn has_keys(&self) -> bool {
        self.shape.keys
    }
    pub fn has_values(&self) -> bool {
        self.shape.values
    }
    pub fn key(&self, read: &RecentRead, head: usize) -> &'r [Vector] {
        &self.row(read)[self.shape.keys(head)]
    }
    pub fn value(&self, read: &RecentRead, head: usize) -> &'r [Vector] {
        &self.row(read)[self.shape.values(head)]
    }
    fn row(&self, read: &RecentRead) -> &'r [Vector] {
        let (row, n) = (read.row as usize, self.shape.row());
        match row.checked_sub(self.n_slots) {
            None => &self.slots[row * n..(row + 1) * n],
            Some(token) => &self.new_rows[token * n..(token + 1) * n],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
