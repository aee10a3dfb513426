//! Scalar attention over an explicit mask, simple enough to verify by reading: for every query, take the cells that
//! its row of the mask names, compute the softmax over their scores, and add up their values. Inputs and stored rows
//! are f32; all arithmetic is f64.
//!
//! It stores f32 whatever storage is requested (and its [`usage`](Backend::usage) says so). The loss of a dtype is
//! defined by the tolerances of the `kvist_testing::conformance` suite. The blocks that it exports and imports have
//! f32 rows, too.
use super::Reference;
use crate::*;
use kvist_cache::{CellCopy, CellRun, GroupId, GroupPlan, LayerId, MovePlan, StepId, StepPlan};

impl Backend for Reference {
    fn id(&self) -> &'static str {
        "reference"
    }

    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        spec.check_kv_only("reference")?;
        let max_tokens = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        let owned = |l: usize| spec.layout.owns(l).then(|| Owned::new(&spec.layout.layers[l]));
        Ok(Box::new(ReferencePools {
            layers: (0..spec.layout.layers.len()).map(owned).collect(),
            ledger: KvLedger::new(&spec.budget, "reference", max_tokens, spec.layout.owners().count()),
            masks: Vec::new(),
            begun: None,
            counters: KvCounters::default(),
            transfers: FinishedTransfers::default(),
            spec: PoolSpec { k: Storage::F32, v: Storage::F32, ..spec.clone() },
        }))
    }

    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        let mut kv = 0u64;
        for (_, layer) in spec.layout.owners() {
            let cells = u64::from(*cells.get(layer.group.0 as usize)?);
            let cell = layer.cell_bytes(Storage::F32, Storage::F32).checked_mul(layer.n_kv_heads.into())?;
            kv = kv.checked_add(cells.checked_mul(cell)?)?;
        }
        Some(Usage::default().with(Purpose::KvCache, kv))
    }
}

/// Bytes of one cell of a layer, K and V together.
fn row_bytes(layer: &LayerSpec) -> u64 {
    u64::from(layer.n_kv_heads) * layer.cell_bytes(Storage::F32, Storage::F32)
}

/// `[cells, n_kv_heads, dim]`
#[derive(Clone, Debug)]
struct Rows {
    n_kv_heads: usize,
    dim: usize,
    data: Vec<f32>,
}

impl Rows {
    fn at(&self, cell: u32, head: usize) -> std::ops::Range<usize> {
        let first = (cell as usize * self.n_kv_heads + head) * self.dim;
        first..first + self.dim
    }
    fn get(&self, cell: u32, head: usize) -> &[f32] {
        &self.data[self.at(cell, head)]
    }
    fn cells(&self) -> usize {
        self.data.len() / (self.n_kv_heads * self.dim)
    }
    fn shrink(&mut self, cells: u32) {
        self.data.truncate(cells as usize * self.n_kv_heads * self.dim);
        self.data.shrink_to_fit();
    }
    fn grow(&mut self, cells: u32) {
        let len = (cells as usize * self.n_kv_heads * self.dim).max(self.data.len());
        self.data.resize(len, 0.0);
    }
    fn copy(&mut self, from: u32, to: u32, len: u32) {
        let source = self.at(from, 0).start..self.at(from + len, 0).start;
        let to = self.at(to, 0).start;
        self.data.copy_within(source, to);
    }
}

/// The rows of a layer that owns them. `v` is `None` if values are a prefix of the keys.
#[derive(Clone, Debug)]
struct Owned {
    k: Rows,
    v: Option<Rows>,
}

impl Owned {
    fn new(layer: &LayerSpec) -> Self {
        let rows =
            |dim: u32| Rows { n_kv_heads: layer.n_kv_heads as usize, dim: dim as usize, data: Vec::new() };
        let stored = layer.values == Values::Stored;
        Owned { k: rows(layer.k_dim), v: stored.then(|| rows(layer.v_dim)) }
    }
    /// The value of a cell, `[v_dim]`; more elements of the key if values are a prefix of it.
    fn value(&self, cell: u32, head: usize) -> &[f32] {
        self.v.as_ref().unwrap_or(&self.k).get(cell, head)
    }
}

struct ReferencePools {
    spec: PoolSpec,             // in f32
    layers: Vec<Option<Owned>>, // None for layers that borrow
    ledger: KvLedger,
    masks: Vec<Vec<bool>>, // per group: [n_tokens, cells]
    begun: Option<StepId>,
    counters: KvCounters,
    transfers: FinishedTransfers,
}

impl ReferencePools {
    fn owner(&mut self, layer: usize) -> &mut Owned {
        self.layers[layer].as_mut().expect("the layout was checked: owners own")
    }

    /// Grows the pools to `cells_end(group)` cells of every group: all layers or none.
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) -> Result<(), DeviceError> {
        let owners = self.spec.layout.owners().zip(self.layers.iter().flatten());
        let more = owners.map(|((_, layer), owned)| {
            let more = u64::from(cells_end(layer.group)).saturating_sub(owned.k.cells() as u64);
            more * row_bytes(layer)
        });
        let more = more.sum();
        if more > 0 {
            self.ledger.grow(more)?;
        }
        for ((_, layer), owned) in self.spec.layout.owners().zip(self.layers.iter_mut().flatten()) {
            owned.k.grow(cells_end(layer.group));
            owned.v.iter_mut().for_each(|v| v.grow(cells_end(layer.group)));
        }
        Ok(())
    }

    fn copy(&mut self, group: GroupId, only: Option<usize>, copy: &CellCopy) {
        for ((l, layer), owned) in self.spec.layout.owners().zip(self.layers.iter_mut().flatten()) {
            if layer.group == group && only.is_none_or(|only| only == l) {
                owned.k.copy(copy.from, copy.to, copy.len);
                owned.v.iter_mut().for_each(|v| v.copy(copy.from, copy.to, copy.len));
                self.counters.bytes_moved += u64::from(copy.len) * row_bytes(layer);
            }
        }
    }

    /// K and V of the layers of a group that own them, in the order of a block.
    fn rows_of(&mut self, group: GroupId) -> impl Iterator<Item = &mut Rows> {
        let owners = self.spec.layout.owners().zip(self.layers.iter_mut().flatten());
        let of_group = owners.filter(move |((_, layer), _)| layer.group == group);
        of_group.flat_map(|(_, owned)| std::iter::once(&mut owned.k).chain(owned.v.as_mut()))
    }

    fn copy_out(&mut self, group: GroupId, cells: CellRun, block: &mut [u8]) -> Result<(), DeviceError> {
        let have = self.rows_of(group).next().map_or(0, |rows| rows.cells() as u32);
        self.spec.check_transfer(group, cells, have, block.len())?;
        let mut bytes = block.as_chunks_mut::<4>().0.iter_mut();
        for rows in self.rows_of(group) {
            let elements = &rows.data[rows.at(cells.start, 0).start..rows.at(cells.end(), 0).start];
            elements.iter().zip(&mut bytes).for_each(|(x, bytes)| *bytes = x.to_le_bytes());
        }
        self.counters.bytes_moved += block.len() as u64;
        Ok(())
    }

    fn copy_in(&mut self, group: GroupId, cells: CellRun, block: &[u8]) -> Result<(), DeviceError> {
        let capacity = self.spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
        self.spec.check_transfer(group, cells, capacity, block.len())?;
        self.grow(|grown| if grown == group { cells.end() } else { 0 })?;
        let mut bytes = block.as_chunks::<4>().0.iter();
        for rows in self.rows_of(group) {
            let elements = rows.at(cells.start, 0).start..rows.at(cells.end(), 0).start;
            rows.data[elements]
                .iter_mut()
                .zip(&mut bytes)
                .for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
        }
        self.counters.bytes_moved += block.len() as u64;
        Ok(())
    }

    fn write(&mut self, owner: usize, group: &GroupPlan, k: Tensor<'_>, v: Tensor<'_>) {
        let layer = self.spec.layout.layers[owner];
        for (token, cell) in group.writes.iter().flat_map(|run| run.cells()).enumerate() {
            let owned = self.owner(owner);
            for head in 0..layer.n_kv_heads as usize {
                for (rows, new) in [(Some(&mut owned.k), k), (owned.v.as_mut(), v)] {
                    let Some(rows) = rows else { continue };
                    let at = rows.at(cell, head);
                    rows.data[at].copy_from_slice(new.row(token, head, rows.dim));
                }
            }
            self.counters.bytes_written += row_bytes(&layer);
        }
    }
}

impl Pools for ReferencePools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        self.begun = None;
        self.spec.check_begin(plan)?;
        self.grow(|group| plan.group(group).cells_end)?;
        self.masks.resize(plan.n_groups(), Vec::new());
        for (g, mask) in self.masks.iter_mut().enumerate() {
            let group = plan.group(GroupId(g as u16));
            group.reads.explicit(plan.n_tokens(), group.cells_end, mask);
        }
        self.begun = Some(plan.id());
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
        let (owner, group) = (layer.owner.0 as usize, plan.group(layer.group));
        for copy in &group.copies {
            self.copy(layer.group, Some(owner), copy);
        }
        self.write(owner, group, k, v);
        Ok(())
    }

    fn attend(&mut self, plan: &StepPlan, mut call: Attend<'_>) -> Result<(), DeviceError> {
        let layer = self.spec.check_attend(self.begun, plan, &call)?;
        let owner = layer.owner.0 as usize;
        let (n, heads) = (plan.n_tokens() as usize, self.spec.layout.n_heads as usize);
        let group = plan.group(layer.group);
        if let Some((k, v)) = call.kv {
            for copy in &group.copies {
                self.copy(layer.group, Some(owner), copy);
            }
            self.write(owner, group, k, v);
        }
        self.counters.bytes_read += group.reads.cells_read() * row_bytes(&layer);

        let owned = self.layers[owner].as_ref().expect("the layout was checked: owners own");
        let (k_dim, v_dim, cells) = (layer.k_dim as usize, layer.v_dim as usize, group.cells_end as usize);
        let mask = &self.masks[layer.group.0 as usize];
        for token in 0..n {
            let sees = &mask[token * cells..(token + 1) * cells];
            let seen: Vec<u32> = (0..group.cells_end).filter(|cell| sees[*cell as usize]).collect();
            for head in 0..heads {
                let kv_head = head / (heads / layer.n_kv_heads as usize);
                let q = call.q.row(token, head, k_dim);
                let score = |cell: &u32| {
                    let k = owned.k.get(*cell, kv_head);
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let scaled = dot * f64::from(call.scale);
                    call.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = call.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum = weights.iter().sum::<f64>() + (sink - max).exp();
                for (i, out) in call.out.row(token, head, v_dim).iter_mut().enumerate() {
                    let value = |(cell, w): (&u32, &f64)| w * f64::from(owned.value(*cell, kv_head)[i]);
                    *out = (seen.iter().zip(&weights).map(value).sum::<f64>() / sum) as f32;
                }
            }
        }
        Ok(())
    }

    fn attention_mass(
        &mut self,
        plan: &StepPlan,
        call: MassOf<'_>,
        mass: &mut AttentionMass,
    ) -> Result<(), DeviceError> {
        let layer = self.spec.check_mass(self.begun, plan, &call)?;
        let heads = self.spec.layout.n_heads as usize;
        let keys =
            &self.layers[layer.owner.0 as usize].as_ref().expect("the layout was checked: owners own").k;
        let reads = &plan.group(layer.group).reads;
        let mass = mass.group_mut(layer.group).ok_or(DeviceError::StalePlan)?;
        for slot in mass.counted().to_vec().into_iter().flatten() {
            let token = reads.order[slot as usize] as usize;
            // The cells that the query sees, with the place of each cell's value.
            let mut seen: Vec<(u32, usize)> = Vec::new();
            for (i, item) in reads.items.iter().enumerate() {
                if let Some(query) = slot.checked_sub(item.first_query).filter(|q| *q < item.n_queries) {
                    let cells = (0..item.run.len).filter(|cell| reads.sees(item, query, *cell));
                    let first = mass.at(i, item, slot);
                    seen.extend(cells.map(|cell| (item.run.start + cell, first + cell as usize)));
                }
            }
            for head in 0..heads {
                let q = call.q.row(token, head, layer.k_dim as usize);
                let score = |&(cell, _): &(u32, usize)| {
                    let scaled = super::dot(q, keys.get(cell, head / (heads / layer.n_kv_heads as usize)))
                        * f64::from(call.scale);
                    call.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = call.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().fold(sink, f64::max);
                let sum = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (sink - max).exp();
                for ((_, at), score) in seen.iter().zip(scores) {
                    mass.values_mut()[*at] += ((score - max).exp() / sum) as f32;
                }
            }
        }
        Ok(())
    }

    fn relocate(&mut self, moves: &MovePlan) -> Result<(), DeviceError> {
        self.grow(|group| moves.cells_end(group))?;
        for (group, copies) in moves.groups() {
            for copy in copies {
                self.copy(*group, None, copy);
            }
        }
        Ok(())
    }

    fn resize(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        let needed = self.spec.layout.n_groups();
        if capacity_cells.len() < needed {
            let len = capacity_cells.len();
            return Err(DeviceError::OutOfRange { what: "capacity of layer group", index: needed - 1, len });
        }
        self.spec.capacity_cells = capacity_cells.to_vec();
        self.ledger.resize(capacity_cells.iter().copied().max().unwrap_or(0));
        for ((_, layer), owned) in self.spec.layout.owners().zip(self.layers.iter_mut().flatten()) {
            let (have, capacity) = (owned.k.cells() as u32, capacity_cells[usize::from(layer.group.0)]);
            if capacity < have {
                owned.k.shrink(capacity);
                owned.v.iter_mut().for_each(|v| v.shrink(capacity));
                self.ledger.release(u64::from(have - capacity) * row_bytes(layer));
            }
        }
        Ok(())
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

    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), DeviceError> {
        let cells =
            |owner: LayerId| self.layers[usize::from(owner.0)].as_ref().map_or(0, |owned| owned.k.cells());
        let layer = self.spec.check_inspect(layer, side, (kv_head, cell), row.len(), cells)?;
        let owned =
            self.layers[usize::from(layer.owner.0)].as_ref().expect("the layout was checked: owners own");
        let stored = match side {
            Side::K => owned.k.get(cell, kv_head as usize),
            Side::V => owned.value(cell, kv_head as usize),
        };
        row.copy_from_slice(&stored[..row.len()]);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }
    fn counters(&self) -> KvCounters {
        self.counters
    }
}
