//! The pools of one cache: growth, writes, attention, moves.
use crate::Growth;
use crate::attention::{Layer, Scratch};
use crate::pool::{self, KeyPool, RowPool, ValuePool};
use crate::rotation::rotate;
use kvist_backend::*;
use kvist_cache::*;

/// K and V of one owner layer.
struct Owned {
    keys: Box<dyn KeyPool>,
    values: Box<dyn ValuePool>,
}

pub struct CpuPools {
    spec: PoolSpec,
    growth: Growth,
    layers: Vec<Option<Owned>>, // None for layers that borrow
    ledger: KvLedger,
    scratch: Scratch,
    turned: Vec<f32>, // one row on its way into a rotated pool
    begun: Option<StepId>,
    counters: Counters,
}

impl CpuPools {
    pub fn new(device: &'static str, spec: &PoolSpec, growth: Growth) -> Result<Self, BackendError> {
        spec.layout.check()?;
        let needed = spec.layout.n_groups();
        if spec.capacity_cells.len() < needed {
            let len = spec.capacity_cells.len();
            return Err(BackendError::OutOfRange { what: "capacity of layer group", index: needed - 1, len });
        }
        let layers = spec.layout.layers.iter().enumerate().map(|(l, layer)| {
            spec.layout.owns(l).then(|| Owned {
                keys: pool::keys(spec.k, layer.n_kv_heads, layer.head_dim, growth),
                values: pool::values(spec.v, layer.n_kv_heads, layer.head_dim, growth),
            })
        });
        let max_tokens = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        Ok(CpuPools {
            growth,
            layers: layers.collect(),
            ledger: KvLedger::new(&spec.budget, device, max_tokens, spec.layout.owners().count()),
            scratch: Scratch::new(&spec.layout, spec.max_step_tokens, &spec.budget)?,
            turned: vec![0.0; spec.layout.max_head_dim() as usize],
            begun: None,
            counters: Counters::default(),
            spec: spec.clone(),
        })
    }

    /// Both sides of a row of one KV head of a layer.
    fn row_bytes(&self, layer: &LayerSpec) -> u64 {
        self.spec.k.row_bytes(layer.head_dim) + self.spec.v.row_bytes(layer.head_dim)
    }

    /// Make room for `cells_end(group)` cells of every group: all layers or none.
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) -> Result<(), BackendError> {
        let mut bytes = 0;
        let mut wanted = Vec::new(); // stays unallocated while nothing grows
        for (l, layer) in self.spec.layout.layers.iter().enumerate() {
            let Some(owned) = &self.layers[l] else { continue };
            let cells = cells_end(layer.group);
            let have = owned.keys.cells();
            if cells > have {
                let capacity = self.spec.capacity_cells[layer.group.0 as usize];
                let reserved = self.growth.reserved_cells(cells, capacity);
                bytes += u64::from(reserved - have) * u64::from(layer.n_kv_heads) * self.row_bytes(layer);
                wanted.push((l, reserved));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        self.ledger.grow(bytes)?;
        let room = |(l, cells): &(usize, u32)| {
            let owned = self.layers[*l].as_ref().expect("only owners grow");
            Ok((*l, owned.keys.allocate(*cells)?, owned.values.allocate(*cells)?))
        };
        match wanted.iter().map(room).collect::<Result<Vec<_>, u64>>() {
            Ok(rooms) => {
                for (l, keys, values) in rooms {
                    let owned = self.layers[l].as_mut().expect("only owners grow");
                    owned.keys.adopt(keys);
                    owned.values.adopt(values);
                }
                Ok(())
            }
            Err(refused) => {
                self.ledger.shrink(bytes);
                Err(BackendError::OutOfMemory { what: "KV cache", bytes: refused })
            }
        }
    }

    /// Copy rows of one layer, then write the new ones.
    fn store(&mut self, owner: usize, group: &GroupPlan, k: Tensor<'_>, v: Tensor<'_>) {
        let layer = self.spec.layout.layers[owner];
        let head_dim = layer.head_dim as usize;
        let owned = self.layers[owner].as_mut().expect("the layout was checked: owners own");
        for copy in &group.copies {
            owned.keys.copy(copy.from, copy.to, copy.len);
            owned.values.copy(copy.from, copy.to, copy.len);
        }
        let turned = &mut self.turned[..head_dim];
        let cells = group.writes.iter().flat_map(|run| run.cells());
        let mut written = 0;
        for (token, cell) in cells.enumerate() {
            for head in 0..layer.n_kv_heads {
                let (k, v) = (k.row(token, head as usize, head_dim), v.row(token, head as usize, head_dim));
                put(&mut *owned.keys, self.spec.k, head, cell, k, turned);
                put(&mut *owned.values, self.spec.v, head, cell, v, turned);
            }
            written += 1;
        }
        let heads = u64::from(layer.n_kv_heads);
        let copied: u64 = group.copies.iter().map(|copy| u64::from(copy.len)).sum();
        self.counters.bytes_written += written * heads * self.row_bytes(&layer);
        self.counters.bytes_moved += copied * heads * self.row_bytes(&layer);
    }
}

fn put<P: RowPool + ?Sized>(
    pool: &mut P,
    storage: Storage,
    head: u32,
    cell: u32,
    row: &[f32],
    turned: &mut [f32],
) {
    if storage.rotate {
        turned.copy_from_slice(row);
        rotate(turned);
        pool.write(head, cell, turned);
    } else {
        pool.write(head, cell, row);
    }
}

impl Pools for CpuPools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        self.begun = None;
        if plan.n_tokens() > self.spec.max_step_tokens {
            let (got, most) = (plan.n_tokens(), self.spec.max_step_tokens);
            return Err(BackendError::Unsupported(format!(
                "a step of {got} tokens; the scratch is for {most}"
            )));
        }
        if !plan.has_reads() {
            return Err(BackendError::Unsupported(
                "the plan has no reads: begin with Step::with_reads".into(),
            ));
        }
        self.grow(|group| plan.group(group).cells_end)?;
        self.begun = Some(plan.id());
        Ok(())
    }

    fn attend(&mut self, plan: &StepPlan, mut call: Attend<'_>) -> Result<(), BackendError> {
        if self.begun != Some(plan.id()) {
            return Err(BackendError::StalePlan);
        }
        let n_layers = self.layers.len();
        let layer = self.spec.layout.layers.get(call.layer.0 as usize);
        let layer = *layer.ok_or(BackendError::UnknownLayer { layer: call.layer, n_layers })?;
        let (owner, heads) = (layer.owner.0 as usize, self.spec.layout.n_heads as usize);
        let (kv_heads, head_dim) = (layer.n_kv_heads as usize, layer.head_dim as usize);
        let (n, group) = (plan.n_tokens() as usize, plan.group(layer.group));
        if call.kv.is_some() != (owner == call.layer.0 as usize) {
            return Err(BackendError::LayerOrder(call.layer));
        }
        call.q.check("q", n, heads, head_dim)?;
        call.out.check("out", n, heads, head_dim)?;
        if let Some((k, v)) = call.kv {
            k.check("k", n, kv_heads, head_dim)?;
            v.check("v", n, kv_heads, head_dim)?;
            self.store(owner, group, k, v);
        }
        self.counters.bytes_read += group.reads.cells_read() * kv_heads as u64 * self.row_bytes(&layer);
        let owned = self.layers[owner].as_ref().expect("the layout was checked: owners own");
        let attention = Layer {
            keys: &*owned.keys,
            values: &*owned.values,
            k: self.spec.k,
            v: self.spec.v,
            reads: &group.reads,
            heads,
            kv_heads,
            head_dim,
            scale: call.scale,
            softcap: call.softcap,
        };
        attention.run(
            &mut self.scratch,
            &|token, head| call.q.row(token, head, head_dim),
            &mut |token, head, row| call.out.row(token, head, head_dim).copy_from_slice(row),
        );
        Ok(())
    }

    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError> {
        self.grow(|group| moves.cells_end(group))?;
        for (group, copies) in moves.groups() {
            for (l, layer) in self.spec.layout.layers.iter().enumerate() {
                let Some(owned) = &mut self.layers[l] else { continue };
                if layer.group != *group {
                    continue;
                }
                let row = self.spec.k.row_bytes(layer.head_dim) + self.spec.v.row_bytes(layer.head_dim);
                for copy in copies {
                    owned.keys.copy(copy.from, copy.to, copy.len);
                    owned.values.copy(copy.from, copy.to, copy.len);
                    self.counters.bytes_moved += u64::from(copy.len) * u64::from(layer.n_kv_heads) * row;
                }
            }
        }
        Ok(())
    }

    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), BackendError> {
        let n_layers = self.layers.len();
        let spec = self.spec.layout.layers.get(layer.0 as usize);
        let spec = spec.ok_or(BackendError::UnknownLayer { layer, n_layers })?;
        let owned = self.layers[spec.owner.0 as usize].as_ref().expect("the layout was checked: owners own");
        let (pool, storage): (&dyn RowPool, _) = match side {
            Side::K => (&*owned.keys, self.spec.k),
            Side::V => (&*owned.values, self.spec.v),
        };
        let within = |what, index: u32, len: u32| match index < len {
            true => Ok(()),
            false => Err(BackendError::OutOfRange { what, index: index as usize, len: len as usize }),
        };
        within("KV head", kv_head, spec.n_kv_heads)?;
        within("cell", cell, pool.cells())?;
        if row.len() != spec.head_dim as usize {
            let expected = vec![spec.head_dim as usize];
            return Err(BackendError::Shape { what: "row", expected, elements: row.len() });
        }
        pool.read(kv_head, cell, row);
        if storage.rotate {
            rotate(row);
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }
    fn counters(&self) -> Counters {
        self.counters
    }
}
