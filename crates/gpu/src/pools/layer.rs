//! One layer of a step: copies of cells, new rows, attention.
use super::{GpuPools, Group, Owned};
use crate::driver::{Args, Driver};
use crate::kernels::{Kernel, RecentForm};
use crate::recents::LayerRecents;
use crate::rotation::Angles;
use crate::side::{PoolSide, copy_cells};
use kvist_cache::{GroupPlan, LayerId, StepPlan};
use kvist_device::*;

/// Rows of one call of attention: buffers with `[n_tokens, heads, dim]`.
pub struct DeviceRows<'a, D: Driver> {
    pub layer: LayerId,
    pub q: &'a D::Buffer,
    pub kv: Option<(&'a D::Buffer, &'a D::Buffer)>,
    /// How queries and keys are rotated before, on layers with [`GpuPools::stores_both`]; `None`: they have been, if at all.
    pub rotation: Option<(&'a D::Buffer, Angles)>,
    pub out: &'a D::Buffer,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sinks: Option<&'a D::Buffer>,
}

/// What recording a layer needs of the pools.
struct LayerOf<'p, D: Driver> {
    gpu: &'p D,
    owned: &'p Owned<D>,
    group: &'p Group<D>,
    recents: Option<LayerRecents<'p, D>>,
    layer: LayerSpec,
    /// Query heads.
    heads: u32,
    states: &'p D::Buffer,
}

impl<D: Driver> GpuPools<D> {
    /// Whether new rows of a layer are written by [`Kernel::StoreBoth`]: each side is one buffer.
    pub fn stores_both(&self, layer: LayerId) -> bool {
        let owned = self.layers.get(usize::from(layer.0)).and_then(Option::as_ref);
        self.gpu.stores_both() && owned.is_some_and(Owned::is_whole)
    }

    /// Records one layer: copies, writes, attention. The rows have been checked.
    pub fn record(
        &mut self,
        recorder: &mut D::Recorder,
        plan: &StepPlan,
        call: &DeviceRows<'_, D>,
    ) -> Result<(), DeviceError> {
        if self.begun != Some(plan.id()) {
            return Err(DeviceError::StalePlan);
        }
        let l = usize::from(call.layer.0);
        let n_layers = self.spec.layout.layers.len();
        let unknown = DeviceError::UnknownLayer { layer: call.layer, n_layers };
        let layer = self.spec.layout.layers.get(l).copied().ok_or(unknown)?;
        if call.kv.is_some() != self.spec.layout.owns(l) {
            return Err(DeviceError::LayerOrder(call.layer));
        }
        self.stale();
        let owner = usize::from(layer.owner.0);
        let of = LayerOf {
            gpu: &*self.gpu,
            owned: self.layers[owner].as_ref().ok_or(DeviceError::LayerOrder(call.layer))?,
            group: &self.groups[usize::from(layer.group.0)],
            recents: self.recents.as_ref().and_then(|recents| recents.of(owner)),
            layer,
            heads: self.spec.layout.n_heads,
            states: &self.states,
        };
        let group = plan.group(layer.group);
        let row_bytes = u64::from(layer.n_kv_heads) * layer.cell_bytes(self.spec.k, self.spec.v);
        if let Some((k, v)) = call.kv {
            let n = plan.n_tokens();
            match self.stores_both(call.layer) {
                true => of.write_both(recorder, group, n, call, (k, v)),
                false => {
                    of.write(recorder, group, n, Side::K, k);
                    of.write(recorder, group, n, Side::V, v);
                }
            }
            let copied: u64 = group.copies.iter().map(|copy| u64::from(copy.len)).sum();
            self.counters.bytes_written += u64::from(plan.n_tokens()) * row_bytes;
            self.counters.bytes_moved += copied * row_bytes;
        }
        self.counters.bytes_read += group.reads.cells_read() * row_bytes;
        of.attend(recorder, call)
    }
}

impl<D: Driver> LayerOf<'_, D> {
    /// Copies cells of one side, then writes new rows.
    fn write(&self, recorder: &mut D::Recorder, group: &GroupPlan, n: u32, side: Side, rows: &D::Buffer) {
        let LayerOf { gpu, owned, group: Group { tables, plan: words, .. }, .. } = *self;
        let keys = side == Side::K;
        let side = if keys { &owned.k } else { &owned.v };
        for copy in &group.copies {
            copy_cells(gpu, recorder, side, copy);
        }
        let recent = self.recents.filter(|_| side.form.is_packed());
        let form = match recent {
            None => RecentForm::No,
            Some(_) if keys => RecentForm::Plain,
            Some(_) => RecentForm::Turned,
        };
        let order = owned.order.as_ref().filter(|_| keys).map(|order| &order.1);
        for (first, heads, buffer) in &side.parts {
            let args = Args::new(&[side.cells, *first, side.heads, tables.written, tables.kept])
                .u32(recent.map_or(0, |recent| recent.n_slots))
                .u32(recent.map_or(0, |recent| recent.row_words))
                .u32(recent.map_or(0, |recent| if keys { 0 } else { recent.first_value }));
            let kernel = Kernel::Store { form: side.form, dim: side.dim, recent: form };
            let recent = recent.map(|recent| recent.rows);
            let buffers = [Some(rows), Some(words), order, Some(buffer), recent];
            gpu.record(recorder, &kernel, &buffers, args, [*heads, n, 1]);
        }
    }

    /// The same for both sides, of which each is one buffer. Rotates queries and keys before, if that is to be done.
    fn write_both(
        &self,
        recorder: &mut D::Recorder,
        group: &GroupPlan,
        n: u32,
        call: &DeviceRows<'_, D>,
        (k, v): (&D::Buffer, &D::Buffer),
    ) {
        let LayerOf { gpu, owned, group: Group { tables, plan: words, .. }, heads, .. } = *self;
        for side in [&owned.k, &owned.v] {
            group.copies.iter().for_each(|copy| copy_cells(gpu, recorder, side, copy));
        }
        let (k_form, v_form, dim) = (owned.k.form, owned.v.form, owned.k.dim);
        let recent = self.recents.filter(|_| k_form.is_packed() || v_form.is_packed());
        let kernel = Kernel::StoreBoth { k: k_form, v: v_form, dim, recent: recent.is_some() };
        let angles = call.rotation.map_or(Angles { pairs: 0, first: 0 }, |rotation| rotation.1);
        let args = Args::new(&[heads, owned.k.heads, angles.pairs, angles.first, n])
            .u32(owned.k.cells)
            .u32(owned.v.cells)
            .u32(tables.written)
            .u32(tables.kept)
            .u32(recent.map_or(0, |recent| recent.n_slots))
            .u32(recent.map_or(0, |recent| recent.row_words))
            .u32(recent.map_or(0, |recent| recent.first_value));
        let buffers = [
            call.rotation.map(|rotation| rotation.0),
            Some(call.q),
            Some(k),
            Some(v),
            Some(words),
            owned.order.as_ref().map(|order| &order.1),
            owned.k.parts.first().map(|part| &part.2),
            owned.v.parts.first().map(|part| &part.2),
            recent.map(|recent| recent.rows),
        ];
        let groups = [2 * owned.k.heads + (heads * angles.pairs).div_ceil(64), n, 1];
        gpu.record(recorder, &kernel, &buffers, args, groups);
    }

    fn attend(&self, recorder: &mut D::Recorder, call: &DeviceRows<'_, D>) -> Result<(), DeviceError> {
        let LayerOf { gpu, owned, group: Group { tables, plan: words, .. }, recents, .. } = *self;
        let (heads, kv_heads, dim, form) =
            (self.heads, self.layer.n_kv_heads, self.layer.k_dim, owned.v.form);
        let scale = match call.softcap {
            Some(cap) => call.scale / cap,
            None => call.scale * std::f32::consts::LOG2_E,
        };
        let (k, recent, wanted) = (owned.k.form, recents.is_some(), tables.max_slots * (heads / kv_heads));
        let rows = gpu.attend_rows(wanted, (k, form), dim, recent);
        let kernel = Kernel::Attend { k, v: form, dim, rows, recent };
        // K and V are split alike if their rows are equally long. If not, the finer split decides.
        let mut first = 0;
        while first < kv_heads {
            let part = |side: &'_ PoolSide<D>| side.parts.iter().rposition(|part| part.0 <= first);
            let (Some(k), Some(v)) = (part(&owned.k), part(&owned.v)) else {
                return Err(DeviceError::StalePlan);
            };
            let (k, v) = (&owned.k.parts[k], &owned.v.parts[v]);
            let end = (k.0 + k.1).min(v.0 + v.1);
            let args = Args::new(&[heads, kv_heads, first, first - k.0, first - v.0, owned.k.cells])
                .u32(tables.order)
                .u32(tables.work)
                .u32(tables.units)
                .u32(tables.entries)
                .u32(tables.bits)
                .f32(scale)
                .f32(call.softcap.unwrap_or(0.0))
                .u32(u32::from(call.sinks.is_some()))
                .u32(tables.recents)
                .u32(recents.map_or(0, |recent| recent.row_words));
            let buffers = [
                Some(call.q),
                Some(&k.2),
                Some(&v.2),
                Some(words),
                call.sinks,
                Some(call.out),
                Some(self.states),
                owned.order.as_ref().map(|order| &order.1),
                recents.map(|recent| recent.rows),
            ];
            gpu.record(
                recorder,
                &kernel,
                &buffers,
                args,
                [tables.n_work, end - first, wanted.div_ceil(rows)],
            );
            first = end;
        }
        if tables.n_merges > 0 {
            let args = Args::new(&[heads, tables.order, tables.merges, tables.lists])
                .u32(u32::from(call.sinks.is_some()));
            let buffers = [Some(self.states), Some(words), call.sinks, Some(call.out)];
            let groups = [tables.n_merges, heads, 1];
            gpu.record(recorder, &Kernel::Merge { v: form, dim }, &buffers, args, groups);
        }
        Ok(())
    }
}
