//! K and V on the device, and attention over them.
//!
//! A side of a layer is `[kv_heads, cells, words]` (`side.rs`). Rows are whole words: f16 and bf16 rows of an odd length have
//! one unused element; packed rows are codes, then scales (`form.rs`). Packed sides may keep the newest rows in f16 as
//! well (`recents.rs`). Pools grow by doubling, as
//! [`reserved_cells`](kvist_device::reserved_cells) says: layer after layer, K and V are replaced by larger buffers, to
//! which the device copies the rows. While it does, both exist; the budget counts what remains.
//!
//! Attention without a model passes rows in host memory: they are uploaded, and the call waits for the result.
mod inspect;
mod layer;
mod memory;
mod owned;
mod recent_rows;
mod resize;
#[cfg(test)]
mod tests;
mod transfers;

use crate::driver::{Driver, Recorder};
use crate::form::Form;
use crate::kernels::{ATTEND_ROWS, attend_workgroup_bytes};
use crate::recents::Recents;
use crate::shared::bytes_of;
use crate::side::{PoolSide, copy_cells};
use crate::tables::{Lowering, Tables};
use crate::unplanned::Unplanned;
use inspect::Mirror;
use kvist_cache::*;
use kvist_device::*;
pub use layer::DeviceRows;
use memory::ScratchBytes;
pub use memory::{host_bytes, usage};
use owned::Owned;
use std::sync::{Arc, Mutex, PoisonError};
use transfers::Transfers;

/// Kernels have a dimension of workgroups for tokens.
const MAX_STEP_TOKENS: u32 = crate::kernels::MAX_GROUPS;

/// Buffers for rows in host memory.
#[derive(Debug)]
struct HostRows<D: Driver> {
    q: D::Buffer,
    k: D::Buffer,
    v: D::Buffer,
    out: D::Buffer,
    sinks: D::Buffer,
}

/// The pools of a cache.
#[derive(Debug)]
pub struct GpuPools<D: Driver> {
    gpu: Arc<D>,
    spec: PoolSpec,
    layers: Vec<Option<Owned<D>>>, // None for layers that borrow
    ledger: KvLedger,
    scratch: Reservation,
    groups: Vec<Group<D>>,
    recents: Option<Recents<D>>,
    states: D::Buffer,
    rows: Arc<HostRows<D>>,
    recorder: D::Recorder,
    begun: Option<StepId>,
    counters: KvCounters,
    transfers: Transfers<D>,
    mirror: Mutex<Mirror>,
    /// Longer plans than [`scratch`](Self::scratch) has.
    long_plans: Unplanned,
}

/// The plan of a layer group on the device.
#[derive(Debug)]
struct Group<D: Driver> {
    tables: Tables,
    plan: D::Buffer,
    capacity_words: u64,
    /// Query heads per KV head: the least of the group's layers.
    per_kv: u32,
    /// Query rows that a workgroup of attention can have: the least of the group's layers.
    rows: u32,
    /// See [`Lowering::units`].
    units: Option<[u32; 3]>,
}

impl<D: Driver> GpuPools<D> {
    pub fn new(gpu: &Arc<D>, spec: &PoolSpec) -> Result<Self, DeviceError> {
        check(&**gpu, spec)?;
        let overflow = || DeviceError::OutOfMemory { what: "scratch of attention", bytes: u64::MAX };
        let bytes = ScratchBytes::new(spec).ok_or_else(overflow)?;
        let total = bytes.total().ok_or_else(overflow)?;
        let scratch = spec.budget.reserve(Purpose::Scratch, total)?;
        let owned = |(l, layer): (usize, &LayerSpec)| {
            let side = |storage| PoolSide::new(storage, layer.n_kv_heads, layer.k_dim);
            let owned = || {
                let order = order_of(spec, l, layer).map(|order| {
                    let bytes: Vec<u8> = order.iter().flat_map(|channel| channel.to_le_bytes()).collect();
                    let buffer = gpu.filled("order of channels", &bytes)?;
                    Ok::<_, DeviceError>((order, buffer))
                });
                Ok(Owned { k: side(spec.k)?, v: side(spec.v)?, order: order.transpose()? })
            };
            spec.layout.owns(l).then(owned).transpose()
        };
        let layers = spec.layout.layers.iter().enumerate().map(owned).collect::<Result<_, DeviceError>>()?;
        let group = |(g, bytes): (usize, &u64)| {
            let plan = gpu.buffer("plan of a step", *bytes)?;
            let layers = || spec.layout.layers.iter().filter(|layer| usize::from(layer.group.0) == g);
            let per_kv = layers().map(|layer| spec.layout.n_heads / layer.n_kv_heads).min().unwrap_or(1);
            let recent = spec.recent.of_storages(spec.k, spec.v).tokens > 0;
            let forms = |layer: &LayerSpec| -> Result<_, DeviceError> {
                Ok((Form::new(spec.k, layer.k_dim)?, Form::new(spec.v.for_values(), layer.v_dim)?))
            };
            let rows =
                layers().map(|layer| Ok(gpu.attend_rows(u32::MAX, forms(layer)?, layer.k_dim, recent)));
            let rows = rows.collect::<Result<Vec<_>, DeviceError>>()?.into_iter().min();
            let rows = rows.unwrap_or(ATTEND_ROWS[0]);
            let least = layers().min_by_key(|layer| layer.n_kv_heads).copied();
            let units = least.map(|layer| {
                let forms = forms(&layer)?;
                let units = ATTEND_ROWS.map(|wanted| {
                    let rows = gpu.attend_rows(wanted, forms, layer.k_dim, recent);
                    let blocks = gpu.attend_blocks(forms, layer.k_dim, rows, recent)?;
                    Some(blocks / layer.n_kv_heads.max(1))
                });
                Ok::<_, DeviceError>(match units {
                    [Some(a), Some(b), Some(c)] => Some([a, b, c]),
                    _ => None,
                })
            });
            let units = units.transpose()?.flatten();
            Ok(Group { tables: Tables::default(), plan, capacity_words: bytes / 4, per_kv, rows, units })
        };
        let groups = bytes.plans.iter().enumerate().map(group).collect::<Result<_, DeviceError>>()?;
        let rows = |bytes| gpu.buffer("rows of attention", bytes);
        let max_tokens = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        Ok(GpuPools {
            layers,
            ledger: KvLedger::new(&spec.budget, D::NAME, max_tokens, spec.layout.owners().count()),
            scratch,
            groups,
            recents: Recents::new(&**gpu, spec)?,
            states: gpu.buffer("partial states of attention", bytes.states)?,
            rows: Arc::new(HostRows {
                q: rows(bytes.q)?,
                k: rows(bytes.kv)?,
                v: rows(bytes.kv)?,
                out: rows(bytes.q)?,
                sinks: rows(bytes.sinks)?,
            }),
            recorder: D::Recorder::default(),
            begun: None,
            counters: KvCounters::default(),
            transfers: Transfers::new(gpu),
            mirror: Mutex::default(),
            long_plans: Unplanned::none(&spec.budget, Purpose::Scratch),
            gpu: gpu.clone(),
            spec: spec.clone(),
        })
    }

    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.spec.budget
    }

    fn cells_of(&self, group: GroupId) -> u32 {
        cells_of(&self.spec.layout, &self.layers, group)
    }

    /// Grows the pools to `cells_end(group)` cells of every group. On `Err` some layers may have more room than before.
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) -> Result<(), DeviceError> {
        let overflow = || DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX };
        let reserved = |spec: &PoolSpec, group: GroupId| {
            let capacity = spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
            reserved_cells(cells_end(group), capacity)
        };
        let mut more = 0u64;
        for (layer, owned) in self.spec.layout.layers.iter().zip(&self.layers) {
            let Some(owned) = owned.as_ref().filter(|owned| cells_end(layer.group) > owned.cells()) else {
                continue;
            };
            let bytes = owned.bytes(reserved(&self.spec, layer.group)).ok_or_else(overflow)?;
            let grown = bytes - owned.bytes(owned.cells()).ok_or_else(overflow)?;
            more = more.checked_add(grown).ok_or_else(overflow)?;
        }
        if more == 0 {
            return Ok(());
        }
        self.ledger.grow(more)?;
        self.replace_buffers();
        for (layer, owned) in self.spec.layout.layers.iter().zip(&mut self.layers) {
            let Some(owned) = owned.as_mut().filter(|owned| cells_end(layer.group) > owned.cells()) else {
                continue;
            };
            let target = reserved(&self.spec, layer.group);
            let bytes = owned.bytes(target).zip(owned.bytes(owned.cells())).map_or(0, |(new, old)| new - old);
            if let Err(error) = owned.resize(&*self.gpu, &mut self.recorder, target) {
                self.ledger.shrink(more);
                return Err(error);
            }
            more -= bytes;
        }
        Ok(())
    }

    /// Lowers the plan and uploads it. A plan that is longer than any before takes more memory.
    fn upload_plan(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        for (g, group) in self.groups.iter_mut().enumerate() {
            let id = GroupId(g as u16);
            group.tables.lower(Lowering {
                group: plan.group(id),
                spans: plan.spans(),
                per_kv: group.per_kv,
                rows: group.rows,
                units: group.units,
                recent: self.recents.as_ref().map(|recents| (&recents.plan, id)),
            });
            let words = group.tables.words.len() as u64;
            if words > group.capacity_words {
                let capacity = words.checked_next_power_of_two().unwrap_or(words);
                let more = 2 * 4 * (capacity - group.capacity_words);
                self.long_plans.grow(more)?;
                match self.gpu.buffer("plan of a step", 4 * capacity) {
                    Ok(buffer) => (group.plan, group.capacity_words) = (buffer, capacity),
                    Err(error) => {
                        self.long_plans.shrink(more);
                        return Err(error);
                    }
                }
            }
            if !group.tables.words.is_empty() {
                self.gpu.write(&group.plan, 0, &bytes_of(&group.tables.words));
            }
        }
        Ok(())
    }

    fn stale(&self) {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner).of = None;
    }
}

/// The sides of the layers of a group that own them, in the order of a block.
fn sides_of<'a, D: Driver>(
    spec: &'a PoolSpec,
    layers: &'a [Option<Owned<D>>],
    group: GroupId,
) -> impl Iterator<Item = &'a PoolSide<D>> {
    let owners = spec.layout.layers.iter().zip(layers).filter(move |(layer, _)| layer.group == group);
    owners.filter_map(|(_, owned)| owned.as_ref()).flat_map(|owned| [&owned.k, &owned.v])
}

/// Refuses what there are no kernels for, before memory is reserved.
pub(crate) fn check<D: Driver>(gpu: &D, spec: &PoolSpec) -> Result<(), DeviceError> {
    spec.check_kv_only(D::NAME)?;
    gpu.check()?;
    for (l, layer) in spec.layout.layers.iter().enumerate() {
        let dim = layer.equal_dims().map_err(|what| {
            DeviceError::Unsupported(format!("layer {l}: the device {} has no kernels for {what}", D::NAME))
        })?;
        let recent = spec.recent.of_storages(spec.k, spec.v).tokens > 0;
        let needed = attend_workgroup_bytes(Form::new(spec.k, dim)?, dim, ATTEND_ROWS[0], recent);
        if needed > u64::from(gpu.limits().max_workgroup_bytes) {
            return Err(DeviceError::Unsupported(format!(
                "layer {l}: heads of {dim} in {} need {needed} bytes of workgroup memory, {} has {}",
                spec.k,
                gpu.limits().adapter,
                gpu.limits().max_workgroup_bytes
            )));
        }
    }
    if spec.max_step_tokens > MAX_STEP_TOKENS {
        let got = spec.max_step_tokens;
        let what =
            format!("steps of {got} tokens; the device {} dispatches at most {MAX_STEP_TOKENS}", D::NAME);
        return Err(DeviceError::Unsupported(what));
    }
    let needed = spec.layout.n_groups();
    if spec.capacity_cells.len() < needed {
        let len = spec.capacity_cells.len();
        return Err(DeviceError::OutOfRange { what: "capacity of layer group", index: needed - 1, len });
    }
    if spec.v.outliers {
        let (k, v) = (spec.k, spec.v);
        let what = format!("K in {k} and V in {v}: outliers are for keys in t4");
        return Err(DeviceError::Unsupported(what));
    }
    if spec.channels.as_ref().is_some_and(|order| !order.fits(&spec.layout)) {
        return Err(DeviceError::Unsupported("an order of channels that is of another model".into()));
    }
    spec.recent.check()?;
    for (_, layer) in spec.layout.owners() {
        for storage in [spec.k, spec.v] {
            let side = PoolSide::<D>::new(storage, layer.n_kv_heads, layer.k_dim)?;
            side.check(gpu, spec.capacity_cells[usize::from(layer.group.0)])?;
        }
    }
    Ok(())
}

/// Cells that every layer of a group has room for.
fn cells_of<D: Driver>(layout: &Layout, layers: &[Option<Owned<D>>], group: GroupId) -> u32 {
    let owners = layout.layers.iter().zip(layers).filter(|(layer, _)| layer.group == group);
    let owners = owners.filter_map(|(_, owned)| owned.as_ref());
    owners.map(Owned::cells).min().unwrap_or(0)
}

/// The channels of a layer's keys in stored order, if they are reordered: their own order, if none is given.
fn order_of(spec: &PoolSpec, l: usize, layer: &LayerSpec) -> Option<Vec<u32>> {
    let given = spec.channels.as_ref().map_or(&[][..], |order| order.layer(l));
    let own = (0..layer.n_kv_heads).flat_map(|_| 0..layer.k_dim);
    spec.k.outliers.then(|| match given.is_empty() {
        true => own.collect(),
        false => given.iter().map(|channel| u32::from(*channel)).collect(),
    })
}

impl<D: Driver> AsRef<dyn Pools> for GpuPools<D> {
    fn as_ref(&self) -> &(dyn Pools + 'static) {
        self
    }
}
impl<D: Driver> AsMut<dyn Pools> for GpuPools<D> {
    fn as_mut(&mut self) -> &mut (dyn Pools + 'static) {
        self
    }
}

/// Rows of a call, dense.
fn dense(rows: &Tensor<'_>, n: usize, heads: usize, dim: usize) -> Vec<u8> {
    let all = (0..n).flat_map(|token| (0..heads).map(move |head| (token, head)));
    all.flat_map(|(token, head)| rows.row(token, head, dim)).flat_map(|x| x.to_le_bytes()).collect()
}

impl<D: Driver> Pools for GpuPools<D> {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.begun = None;
        self.recorder.restart();
        self.gpu.check()?;
        if plan.n_tokens() > self.spec.max_step_tokens {
            let (got, max) = (plan.n_tokens(), self.spec.max_step_tokens);
            return Err(DeviceError::Unsupported(format!(
                "a step of {got} tokens; the scratch is for {max}"
            )));
        }
        self.spec.check_begin(plan)?;
        self.grow(|group| plan.group(group).cells_end)?;
        if let Some(recents) = &mut self.recents {
            let (layout, layers) = (&self.spec.layout, &self.layers);
            recents.plan.begin(plan, |group| cells_of(layout, layers, group));
        }
        self.upload_plan(plan)?;
        self.begun = Some(plan.id());
        Ok(())
    }

    fn attend(&mut self, plan: &StepPlan, mut call: Attend<'_>) -> Result<(), DeviceError> {
        let layer = self.spec.check_attend(self.begun, plan, &call)?;
        let (n, heads) = (plan.n_tokens() as usize, self.spec.layout.n_heads as usize);
        let (kv_heads, dim) = (layer.n_kv_heads as usize, layer.k_dim as usize);
        let write = |gpu: &D, buffer: &D::Buffer, bytes: &[u8]| gpu.write(buffer, 0, bytes);
        write(&self.gpu, &self.rows.q, &dense(&call.q, n, heads, dim));
        if let Some((k, v)) = &call.kv {
            write(&self.gpu, &self.rows.k, &dense(k, n, kv_heads, dim));
            write(&self.gpu, &self.rows.v, &dense(v, n, kv_heads, dim));
        }
        if let Some(sinks) = call.sinks {
            let bytes: Vec<u8> = sinks.iter().flat_map(|x| x.to_le_bytes()).collect();
            write(&self.gpu, &self.rows.sinks, &bytes);
        }
        // Taken out for the call: `record` borrows the pools.
        let mut recorder = std::mem::take(&mut self.recorder);
        let gpu = self.gpu.clone();
        let rows = self.rows.clone();
        let recorded = self.record(
            &mut recorder,
            plan,
            &DeviceRows {
                layer: call.layer,
                q: &rows.q,
                kv: call.kv.is_some().then_some((&rows.k, &rows.v)),
                rotation: None,
                out: &rows.out,
                scale: call.scale,
                softcap: call.softcap,
                sinks: call.sinks.is_some().then_some(&rows.sinks),
            },
        );
        self.recorder = recorder;
        recorded?;
        gpu.submit(&mut self.recorder, &[]);
        gpu.read_back(&[(&self.rows.out, 0, (n * heads * dim * 4) as u64)], |bytes| {
            let mut values = bytes.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x));
            for token in 0..n {
                for head in 0..heads {
                    let row = call.out.row(token, head, dim);
                    row.iter_mut().zip(&mut values).for_each(|(out, x)| *out = x);
                }
            }
        })
    }

    fn relocate(&mut self, moves: &MovePlan) -> Result<(), DeviceError> {
        self.gpu.check()?;
        self.grow(|group| moves.cells_end(group))?;
        self.stale();
        for (group, copies) in moves.groups() {
            let cells = self.cells_of(*group);
            if let Some(recents) = &mut self.recents {
                recents.plan.relocate(*group, copies, cells);
            }
            for (layer, owned) in self.spec.layout.layers.iter().zip(&self.layers) {
                let Some(owned) = owned.as_ref().filter(|_| layer.group == *group) else { continue };
                for copy in copies {
                    copy_cells(&*self.gpu, &mut self.recorder, &owned.k, copy);
                    copy_cells(&*self.gpu, &mut self.recorder, &owned.v, copy);
                    let cell = u64::from(layer.n_kv_heads) * layer.cell_bytes(self.spec.k, self.spec.v);
                    self.counters.bytes_moved += u64::from(copy.len) * cell;
                }
            }
        }
        self.gpu.submit(&mut self.recorder, &[]);
        Ok(())
    }

    fn resize(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        self.change_capacity(capacity_cells)
    }

    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        self.spec.block_bytes(group, cells)
    }

    fn pins_host(&self) -> bool {
        D::HAS_ARENAS
    }

    fn pin_host(&mut self, bytes: u64) -> Result<Option<Arc<dyn HostArena>>, DeviceError> {
        self.transfers.pin_host(bytes)
    }

    fn export(
        &mut self,
        _: Ticket,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.start_export(group, cells, into)
    }

    fn import(
        &mut self,
        _: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        self.start_import(group, cells, from)
    }

    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        self.transfers.finished(transfer)
    }

    fn read_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &mut [u8],
    ) -> Result<bool, DeviceError> {
        self.download_recent(group, token, rows)
    }
    fn write_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &[u8],
    ) -> Result<bool, DeviceError> {
        self.upload_recent(group, token, rows)
    }

    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), DeviceError> {
        self.read_row(layer, side, (kv_head, cell), row)
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }
    fn counters(&self) -> KvCounters {
        self.counters
    }
}
