//! The KV pools of one cache: growth, writes, attention, moves.
mod mapped;
mod resize;
mod transfers;

use crate::arch::Isa;
use crate::attention::{Layer, Scratch};
use crate::pages::Pages;
use crate::pool::{Geometry, RowStore};
use crate::recent::RecentRows;
use crate::{Compute, Growth};
use kvist_cache::*;
use kvist_device::{Side, *};

/// K and V of one layer that owns its KV.
#[derive(Debug)]
struct Owned {
    keys: RowStore,
    values: RowStore,
}

/// The geometry of K and of V of a layer.
pub fn sides(spec: &PoolSpec, layer: &LayerSpec) -> [Geometry; 2] {
    let side = |half, storage| Geometry::new(half, storage, layer.n_kv_heads, layer.k_dim);
    [side(Side::K, spec.k), side(Side::V, spec.v)]
}

/// See [`Backend::usage`].
pub fn usage(spec: &PoolSpec, growth: Growth, compute: &Compute, cells: &[u32]) -> Option<Usage> {
    if [spec.k, spec.v].iter().any(|storage| storage.group == 0) {
        return None;
    }
    let kv = kv_bytes(spec, growth, cells)?;
    let scratch = Scratch::bytes(spec, compute)?.checked_add(RecentRows::bytes(spec)?)?;
    Some(Usage::default().with(Purpose::KvCache, kv).with(Purpose::Scratch, scratch))
}

/// Bytes of K and V for `cells` cells of each group. `None` on overflow.
fn kv_bytes(spec: &PoolSpec, growth: Growth, cells: &[u32]) -> Option<u64> {
    let mut kv = 0u64;
    for (_, layer) in spec.layout.owners() {
        let group = layer.group.0 as usize;
        let reserved = growth.reserved_cells(*cells.get(group)?, *spec.capacity_cells.get(group)?);
        let layer =
            sides(spec, layer).iter().try_fold(0u64, |sum, side| sum.checked_add(side.bytes(reserved)?))?;
        kv = kv.checked_add(layer)?;
    }
    Some(kv)
}

pub struct CpuPools {
    spec: PoolSpec,
    growth: Growth,
    compute: Compute,
    layers: Vec<Option<Owned>>, // None for layers that share another layer's KV
    /// One allocation per growth for all layers together: many small ones would not fill huge pages.
    slabs: Vec<Pages>,
    ledger: KvLedger,
    scratch: Scratch,
    recent: Option<RecentRows>,
    transformed: Vec<f32>, // buffer for one row, transformed as the pool stores it
    begun: Option<StepId>,
    counters: KvCounters,
    transfers: FinishedTransfers,
}

impl CpuPools {
    pub fn new(
        device: &'static str,
        spec: &PoolSpec,
        growth: Growth,
        compute: &Compute,
    ) -> Result<Self, DeviceError> {
        spec.check_kv_only(device)?;
        for (l, layer) in spec.layout.layers.iter().enumerate() {
            layer.equal_dims().map_err(|what| {
                DeviceError::Unsupported(format!("layer {l}: the CPU has no kernels for {what}"))
            })?;
        }
        for storage in [spec.k, spec.v] {
            if storage.dtype.has_groups() && ![32, 64].contains(&storage.group) {
                let group = storage.group;
                return Err(DeviceError::Unsupported(format!(
                    "groups of {group} elements; there are 32 and 64"
                )));
            }
        }
        if spec.v.outliers || spec.k.outliers && spec.k.dtype != DType::T4 {
            let (k, v) = (spec.k, spec.v);
            return Err(DeviceError::Unsupported(format!(
                "K in {k} and V in {v}: outliers are for keys in t4"
            )));
        }
        if spec.channels.as_ref().is_some_and(|order| !order.fits(&spec.layout)) {
            return Err(DeviceError::Unsupported("an order of channels that is of another model".into()));
        }
        let needed = spec.layout.n_groups();
        if spec.capacity_cells.len() < needed {
            let len = spec.capacity_cells.len();
            return Err(DeviceError::OutOfRange { what: "capacity of layer group", index: needed - 1, len });
        }
        let layers = spec.layout.layers.iter().enumerate().map(|(l, layer)| {
            spec.layout.owns(l).then(|| {
                let order = spec.channels.as_ref().map_or(&[][..], |order| order.layer(l));
                let [keys, values] = sides(spec, layer);
                Owned { keys: RowStore::new(keys, order), values: RowStore::new(values, &[]) }
            })
        });
        let max_tokens = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        Ok(CpuPools {
            growth,
            compute: compute.clone(),
            layers: layers.collect(),
            slabs: Vec::new(),
            ledger: KvLedger::new(&spec.budget, device, max_tokens, spec.layout.owners().count()),
            scratch: Scratch::new(spec, compute, &spec.budget)?,
            recent: RecentRows::new(spec, &spec.budget)?,
            transformed: vec![0.0; spec.layout.max_head_dim() as usize],
            begun: None,
            counters: KvCounters::default(),
            transfers: FinishedTransfers::default(),
            spec: spec.clone(),
        })
    }

    /// Bytes of one row of one KV head of a layer, K and V together.
    fn row_bytes(&self, layer: &LayerSpec) -> u64 {
        layer.cell_bytes(self.spec.k, self.spec.v)
    }

    /// Grows the pools to `cells_end(group)` cells in every group: all layers, or none.
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) -> Result<(), DeviceError> {
        let mut wanted = Vec::new(); // does not allocate while nothing grows
        let mut more = 0;
        for (l, layer) in self.spec.layout.layers.iter().enumerate() {
            let Some(owned) = &self.layers[l] else { continue };
            let (cells, have) = (cells_end(layer.group), owned.keys.cells());
            if cells > have {
                let capacity = self.spec.capacity_cells[layer.group.0 as usize];
                let reserved = self.growth.reserved_cells(cells, capacity);
                let overflow = DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX };
                let bytes = |side: &RowStore| {
                    Some((side.shape.bytes(reserved)?, side.shape.bytes(reserved)? - side.shape.bytes(have)?))
                };
                let (Some(k), Some(v)) = (bytes(&owned.keys), bytes(&owned.values)) else {
                    return Err(overflow);
                };
                more += k.1 + v.1;
                wanted.push(Wanted {
                    layer: l,
                    reserved,
                    bytes: if self.concatenates() { [k.0, v.0] } else { [k.1, v.1] },
                });
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        self.ledger.grow(more)?;
        // A concatenating cache moves layer by layer and frees each old allocation at once.
        let per_slab = if self.concatenates() { 1 } else { wanted.len() };
        let mut slabs = Vec::new();
        for wanted in wanted.chunks(per_slab) {
            let bytes: u64 = wanted.iter().flat_map(|w| w.bytes).map(|b| b.next_multiple_of(64)).sum();
            match usize::try_from(bytes).map_err(|_| bytes).and_then(Pages::new) {
                Ok(slab) => slabs.push(slab),
                Err(refused) => {
                    self.ledger.shrink(more);
                    return Err(DeviceError::OutOfMemory { what: "KV cache", bytes: refused });
                }
            }
        }
        for (wanted, slab) in wanted.chunks(per_slab).zip(slabs) {
            self.slabs.push(slab);
            let new = self.slabs.len() - 1;
            let mut at = 0;
            for Wanted { layer, reserved, bytes } in wanted {
                let owned = self.layers[*layer].as_mut().expect("only owners grow");
                let old = owned.keys.slab();
                for (side, bytes) in [(&mut owned.keys, bytes[0]), (&mut owned.values, bytes[1])] {
                    let segment = side.segment(*reserved, self.growth, new, at);
                    side.adopt(segment, self.growth, &mut self.slabs);
                    at += bytes.next_multiple_of(64) as usize;
                }
                if let (Growth::Concatenate, Some(old)) = (self.growth, old) {
                    // The new slab takes over the old one's index.
                    self.slabs.swap_remove(old);
                    owned.keys.moved_to(old);
                    owned.values.moved_to(old);
                }
            }
        }
        Ok(())
    }

    fn concatenates(&self) -> bool {
        self.growth == Growth::Concatenate
    }

    /// Copies the planned rows of one layer, then writes the new ones.
    fn store(&mut self, owner: usize, group: &GroupPlan, k: Tensor<'_>, v: Tensor<'_>) {
        let layer = self.spec.layout.layers[owner];
        let (head_dim, isa) = (layer.k_dim as usize, self.compute.isa);
        let owned = self.layers[owner].as_mut().expect("the layout was checked: owners own");
        for copy in &group.copies {
            owned.keys.copy(&mut self.slabs, copy.from, copy.to, copy.len);
            owned.values.copy(&mut self.slabs, copy.from, copy.to, copy.len);
        }
        let transformed = &mut self.transformed[..head_dim];
        let cells = group.writes.iter().flat_map(|run| run.cells());
        let mut written = 0;
        for (token, cell) in cells.enumerate() {
            for head in 0..layer.n_kv_heads {
                let (k, v) = (k.row(token, head as usize, head_dim), v.row(token, head as usize, head_dim));
                let at = (head as usize, cell);
                put(isa, &mut owned.keys, &mut self.slabs, at, k, transformed);
                let v = put(isa, &mut owned.values, &mut self.slabs, at, v, transformed);
                if let Some(recent) = &mut self.recent {
                    recent.write(owner, token, head as usize, k, v);
                }
            }
            written += 1;
        }
        if let Some(recent) = &mut self.recent {
            recent.keep(owner, layer.group);
        }
        let heads = u64::from(layer.n_kv_heads);
        let copied: u64 = group.copies.iter().map(|copy| u64::from(copy.len)).sum();
        self.counters.bytes_written += written * heads * self.row_bytes(&layer);
        self.counters.bytes_moved += copied * heads * self.row_bytes(&layer);
    }
}

/// Number of cells that the pools of a layer group have room for.
fn cells_of(layout: &Layout, layers: &[Option<Owned>], group: GroupId) -> u32 {
    let mut owners = layout.layers.iter().zip(layers).filter(|(layer, _)| layer.group == group);
    owners.find_map(|(_, owned)| owned.as_ref()).map_or(0, |owned| owned.keys.cells())
}

/// The growth of one layer.
struct Wanted {
    layer: usize,
    reserved: u32,
    /// Bytes of K and V in the new slab.
    bytes: [u64; 2],
}

/// Stores a row and returns it as it was stored: transformed, if its storage transforms rows.
fn put<'r>(
    isa: Isa,
    side: &mut RowStore,
    slabs: &mut [Pages],
    (head, cell): (usize, u32),
    row: &'r [f32],
    transformed: &'r mut [f32],
) -> &'r [f32] {
    let row = if side.transforms() {
        side.transform(head, row, transformed);
        transformed
    } else {
        row
    };
    side.write(isa, slabs, head, cell, row);
    row
}

impl Pools for CpuPools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.begun = None;
        if plan.n_tokens() > self.spec.max_step_tokens {
            let (got, max) = (plan.n_tokens(), self.spec.max_step_tokens);
            return Err(DeviceError::Unsupported(format!(
                "a step of {got} tokens; the scratch is for {max}"
            )));
        }
        self.spec.check_begin(plan)?;
        self.grow(|group| plan.group(group).cells_end)?;
        if let Some(recent) = &mut self.recent {
            let layers = &self.layers;
            recent.begin(plan, |group| cells_of(&self.spec.layout, layers, group));
        }
        self.begun = Some(plan.id());
        Ok(())
    }

    fn attend(&mut self, plan: &StepPlan, mut call: Attend<'_>) -> Result<(), DeviceError> {
        let layer = self.spec.check_attend(self.begun, plan, &call)?;
        let (owner, heads) = (layer.owner.0 as usize, self.spec.layout.n_heads as usize);
        let (kv_heads, head_dim) = (layer.n_kv_heads as usize, layer.k_dim as usize);
        let group = plan.group(layer.group);
        if let Some((k, v)) = call.kv {
            self.store(owner, group, k, v);
        }
        self.counters.bytes_read += group.reads.cells_read() * kv_heads as u64 * self.row_bytes(&layer);
        let owned = self.layers[owner].as_ref().expect("the layout was checked: owners own");
        let attention = Layer {
            keys: &owned.keys,
            values: &owned.values,
            slabs: &self.slabs,
            reads: &group.reads,
            heads,
            kv_heads,
            head_dim,
            scale: call.scale,
            softcap: call.softcap,
            sinks: call.sinks,
            exact: self.compute.deterministic,
            recent: self.recent.as_ref().and_then(|recent| recent.reads(owner, layer.group)),
        };
        attention.run(
            &self.compute,
            &mut self.scratch,
            &|token, head| call.q.row(token, head, head_dim),
            &mut |token, head, row| call.out.row(token, head, head_dim).copy_from_slice(row),
        );
        Ok(())
    }

    fn store(
        &mut self,
        plan: &StepPlan,
        layer: LayerId,
        k: Tensor<'_>,
        v: Tensor<'_>,
    ) -> Result<(), DeviceError> {
        let layer = self.spec.check_store(self.begun, plan, layer, &k, &v)?;
        CpuPools::store(self, layer.owner.0 as usize, plan.group(layer.group), k, v);
        Ok(())
    }

    fn attention_mass(
        &mut self,
        plan: &StepPlan,
        call: MassOf<'_>,
        mass: &mut AttentionMass,
    ) -> Result<(), DeviceError> {
        let layer = self.spec.check_mass(self.begun, plan, &call)?;
        let (owner, head_dim) = (layer.owner.0 as usize, layer.k_dim as usize);
        let group = plan.group(layer.group);
        let mass = mass.group_mut(layer.group).ok_or(DeviceError::StalePlan)?;
        self.counters.bytes_read +=
            group.reads.cells_read() * u64::from(layer.n_kv_heads) * self.row_bytes(&layer);
        let owned = self.layers[owner].as_ref().expect("the layout was checked: owners own");
        let attention = Layer {
            keys: &owned.keys,
            values: &owned.values,
            slabs: &self.slabs,
            reads: &group.reads,
            heads: self.spec.layout.n_heads as usize,
            kv_heads: layer.n_kv_heads as usize,
            head_dim,
            scale: call.scale,
            softcap: call.softcap,
            sinks: call.sinks,
            exact: self.compute.deterministic,
            recent: self.recent.as_ref().and_then(|recent| recent.reads(owner, layer.group)),
        };
        let query = |token: usize, head: usize| call.q.row(token, head, head_dim);
        attention.mass(&self.compute, &mut self.scratch, &query, mass);
        Ok(())
    }

    fn relocate(&mut self, moves: &MovePlan) -> Result<(), DeviceError> {
        self.grow(|group| moves.cells_end(group))?;
        for (group, copies) in moves.groups() {
            if let Some(recent) = &mut self.recent {
                recent.relocate(*group, copies, cells_of(&self.spec.layout, &self.layers, *group));
            }
            for (l, layer) in self.spec.layout.layers.iter().enumerate() {
                let Some(owned) = &mut self.layers[l] else { continue };
                if layer.group != *group {
                    continue;
                }
                let row = layer.cell_bytes(self.spec.k, self.spec.v);
                for copy in copies {
                    owned.keys.copy(&mut self.slabs, copy.from, copy.to, copy.len);
                    owned.values.copy(&mut self.slabs, copy.from, copy.to, copy.len);
                    self.counters.bytes_moved += u64::from(copy.len) * u64::from(layer.n_kv_heads) * row;
                }
            }
        }
        Ok(())
    }

    fn resize(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        self.change_capacity(capacity_cells)
    }

    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.spec.block_bytes(group, cells)
    }

    fn export(
        &mut self,
        _: Ticket,
        group: GroupId,
        cells: CellRun,
        mut into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let copied = self.copy_out(group, cells, into.bytes_mut());
        self.transfers.add(into, copied)
    }

    fn import(
        &mut self,
        _: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let copied = self.copy_in(group, cells, from.bytes());
        self.transfers.add(from, copied)
    }

    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        self.transfers.take(transfer)
    }

    fn read_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &mut [u8],
    ) -> Result<bool, DeviceError> {
        self.copy_recent_out(group, token, rows)
    }
    fn write_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &[u8],
    ) -> Result<bool, DeviceError> {
        self.copy_recent_in(group, token, rows)
    }

    fn image_layout(&self) -> Option<&'static str> {
        Some(mapped::IMAGE_LAYOUT)
    }
    fn image(&self, layer: LayerId, side: Side, cells: u32) -> Result<Image, DeviceError> {
        self.image_of(layer, side, cells)
    }
    fn image_bytes(&self, layer: LayerId, side: Side, cells: u32) -> Result<u64, DeviceError> {
        self.bytes_of_image(layer, side, cells)
    }
    fn map(&mut self, rows: &MappedRows<'_>) -> Result<(), DeviceError> {
        self.map_rows(rows)
    }

    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), DeviceError> {
        let side_of = |owner: LayerId| {
            let owned = self.layers[usize::from(owner.0)].as_ref();
            owned.map(|owned| match side {
                Side::K => &owned.keys,
                Side::V => &owned.values,
            })
        };
        let cells = |owner| side_of(owner).map_or(0, |side| side.cells() as usize);
        let layer = self.spec.check_inspect(layer, side, (kv_head, cell), row.len(), cells)?;
        let pool = side_of(layer.owner).expect("the layout was checked: owners own");
        pool.read(&self.slabs, kv_head as usize, cell, row);
        pool.restore(kv_head as usize, row);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }
    fn counters(&self) -> KvCounters {
        self.counters
    }
}
