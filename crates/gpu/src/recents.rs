//! The newest rows of packed sides in f16, on the device. `RecentPlan` says where they are and which queries read them.
//!
//! A layer's buffer is `[slots + tokens of a step, keys of all heads, values of all heads]`; only packed sides are there,
//! and rows are whole words. Every token of a step has its row behind the slots, and in a slot if it is kept.
use crate::driver::Driver;
use kvist_cache::GroupId;
use kvist_device::{DeviceError, LayerSpec, Layout, PoolSpec, RecentPlan};

#[derive(Debug)]
pub struct Recents<D: Driver> {
    pub plan: RecentPlan,
    /// Of all buffers. It stays what it is when the capacity changes.
    pub bytes: u64,
    layers: Vec<Option<(D::Buffer, Shape)>>,
}

/// The recent rows of a layer.
#[derive(Debug)]
pub struct LayerRecents<'r, D: Driver> {
    pub rows: &'r D::Buffer,
    pub n_slots: u32,
    /// Words of a row.
    pub row_words: u32,
    /// The first word of values in it.
    pub first_value: u32,
}

impl<D: Driver> Clone for LayerRecents<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Driver> Copy for LayerRecents<'_, D> {}

#[derive(Clone, Copy, Debug)]
struct Shape {
    row_words: u32,
    first_value: u32,
    /// Elements of the row of a head.
    dim: u32,
}

/// The place of a row in a layer's buffer.
#[derive(Debug)]
pub struct RowPlace<'r, D: Driver> {
    pub buffer: &'r D::Buffer,
    pub first_byte: u64,
    pub n_bytes: u64,
    /// Of the row of a head: bytes with its padding, and without.
    pub head_bytes: (usize, usize),
}

impl Shape {
    fn new(spec: &PoolSpec, layer: &LayerSpec) -> Option<Self> {
        let side = layer.n_kv_heads.checked_mul(layer.k_dim.div_ceil(2))?;
        let first_value = if spec.k.dtype.is_quantised() { side } else { 0 };
        let values = if spec.v.dtype.is_quantised() { side } else { 0 };
        Some(Shape { row_words: first_value.checked_add(values)?, first_value, dim: layer.k_dim })
    }
    fn bytes(&self, spec: &PoolSpec, slots: u32) -> Option<u64> {
        let rows = u64::from(slots).checked_add(spec.max_step_tokens.into())?;
        Some(rows.checked_mul(4 * u64::from(self.row_words))?.max(16))
    }
}

/// Bytes of [`Recents::new`]. `None` on overflow.
pub fn bytes(spec: &PoolSpec) -> Option<u64> {
    let Some(slots) = RecentPlan::slots_of(spec) else { return Some(0) };
    let mut owners = spec.layout.owners();
    owners.try_fold(0u64, |sum, (_, layer)| sum.checked_add(Shape::new(spec, layer)?.bytes(spec, slots)?))
}

impl<D: Driver> Recents<D> {
    /// `None` if no recent rows are kept. Their bytes have been reserved.
    ///
    /// # Errors
    /// The device has no memory for them.
    pub fn new(gpu: &D, spec: &PoolSpec) -> Result<Option<Self>, DeviceError> {
        let Some(plan) = RecentPlan::new(spec) else { return Ok(None) };
        let layer = |(l, layer): (usize, &LayerSpec)| {
            let overflow = || DeviceError::OutOfMemory { what: "recent rows", bytes: u64::MAX };
            let make = || {
                let shape = Shape::new(spec, layer).ok_or_else(overflow)?;
                let bytes = shape.bytes(spec, plan.n_slots()).ok_or_else(overflow)?;
                Ok((gpu.buffer("recent rows", bytes)?, shape))
            };
            spec.layout.owns(l).then(make).transpose()
        };
        let layers = spec.layout.layers.iter().enumerate().map(layer).collect::<Result<_, DeviceError>>()?;
        Ok(Some(Recents { plan, layers, bytes: bytes(spec).unwrap_or(0) }))
    }

    /// The recent rows of an owner.
    pub fn of(&self, owner: usize) -> Option<LayerRecents<'_, D>> {
        let (rows, shape) = self.layers.get(owner)?.as_ref()?;
        let Shape { row_words, first_value, .. } = *shape;
        Some(LayerRecents { rows, n_slots: self.plan.n_slots(), row_words, first_value })
    }

    /// Where a slot's rows are, in every layer of a group that owns K and V.
    pub fn places(&self, slot: u32, layout: &Layout, group: GroupId) -> Vec<RowPlace<'_, D>> {
        let owners = layout.layers.iter().zip(&self.layers).filter(|(layer, _)| layer.group == group);
        let places = owners.filter_map(|(_, layer)| layer.as_ref()).map(|(buffer, shape)| {
            let n_bytes = 4 * u64::from(shape.row_words);
            let (padded, dim) = (4 * shape.dim.div_ceil(2) as usize, 2 * shape.dim as usize);
            RowPlace { buffer, first_byte: u64::from(slot) * n_bytes, n_bytes, head_bytes: (padded, dim) }
        });
        places.collect()
    }
}
