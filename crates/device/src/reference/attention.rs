//! Scalar attention over an explicit mask, simple enough to verify by reading: for every query, take the cells that
//! its row of the mask names, compute the softmax over their scores, and add up their values. Inputs and stored rows
//! are f32; all arithmetic is f64.
//!
//! It stores f32 whatever storage is requested (and its [`usage`](Backend::usage) says so). The loss of a dtype is
//! defined by the tolerances of the `kvist_testing::conformance` suite.
use super::Reference;
use crate::*;
use kvist_cache::{GroupId, GroupPlan, LayerId, MovePlan, StepId, StepPlan};

impl Backend for Reference {
    fn id(&self) -> &'static str {
        "reference"
    }

    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, BackendError> {
        spec.layout.check()?;
        let max_tokens = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        Ok(Box::new(ReferencePools {
            layers: vec![Rows::default(); spec.layout.layers.len()],
            ledger: KvLedger::new(&spec.budget, "reference", max_tokens, spec.layout.owners().count()),
            masks: Vec::new(),
            begun: None,
            counters: Counters::default(),
            spec: spec.clone(),
        }))
    }

    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        let mut kv = 0u64;
        for (_, layer) in spec.layout.owners() {
            let cells = u64::from(*cells.get(layer.group.0 as usize)?);
            let heads = cells.checked_mul(2 * 4)?.checked_mul(layer.n_kv_heads.into())?;
            kv = kv.checked_add(heads.checked_mul(layer.head_dim.into())?)?;
        }
        Some(Usage::default().with(Purpose::KvCache, kv))
    }
}

/// Bytes of one cell of a layer, K and V together.
fn row_bytes(layer: &LayerSpec) -> u64 {
    2 * 4 * u64::from(layer.n_kv_heads) * u64::from(layer.head_dim)
}

/// K and V rows, `[cells, n_kv_heads, head_dim]` each.
#[derive(Clone, Debug, Default)]
struct Rows {
    k: Vec<f32>,
    v: Vec<f32>,
}

struct ReferencePools {
    spec: PoolSpec,
    layers: Vec<Rows>,
    ledger: KvLedger,
    masks: Vec<Vec<bool>>, // per group: [n_tokens, cells]
    begun: Option<StepId>,
    counters: Counters,
}

impl ReferencePools {
    /// Elements of one cell of a layer, K or V.
    fn cell(&self, layer: usize) -> usize {
        let layer = &self.spec.layout.layers[layer];
        (layer.n_kv_heads * layer.head_dim) as usize
    }

    /// Grows the pools to `cells_end(group)` cells of every group: all layers or none.
    fn grow(&mut self, cells_end: impl Fn(GroupId) -> u32) -> Result<(), BackendError> {
        let mut sizes = Vec::new();
        let mut more = 0;
        for (l, layer) in self.spec.layout.owners() {
            let needed = cells_end(layer.group) as usize * self.cell(l);
            more += needed.saturating_sub(self.layers[l].k.len()) as u64 * 8;
            sizes.push((l, needed));
        }
        if more > 0 {
            self.ledger.grow(more)?;
        }
        for (l, needed) in sizes {
            let rows = &mut self.layers[l];
            let needed = needed.max(rows.k.len());
            rows.k.resize(needed, 0.0);
            rows.v.resize(needed, 0.0);
        }
        Ok(())
    }

    fn copy(&mut self, group: GroupId, only: Option<usize>, from: u32, to: u32, len: u32) {
        for l in 0..self.layers.len() {
            let layer = self.spec.layout.layers[l];
            if layer.group == group && self.spec.layout.owns(l) && only.is_none_or(|only| only == l) {
                let cell = self.cell(l);
                let source = from as usize * cell..(from + len) as usize * cell;
                self.layers[l].k.copy_within(source.clone(), to as usize * cell);
                self.layers[l].v.copy_within(source, to as usize * cell);
                self.counters.bytes_moved += u64::from(len) * row_bytes(&layer);
            }
        }
    }

    fn write(&mut self, owner: usize, group: &GroupPlan, k: Tensor<'_>, v: Tensor<'_>) {
        let layer = self.spec.layout.layers[owner];
        let (cell_len, d) = (self.cell(owner), layer.head_dim as usize);
        for (token, cell) in group.writes.iter().flat_map(|run| run.cells()).enumerate() {
            for head in 0..layer.n_kv_heads as usize {
                let at = cell as usize * cell_len + head * d;
                self.layers[owner].k[at..at + d].copy_from_slice(k.row(token, head, d));
                self.layers[owner].v[at..at + d].copy_from_slice(v.row(token, head, d));
            }
            self.counters.bytes_written += row_bytes(&layer);
        }
    }
}

impl Pools for ReferencePools {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        self.begun = None;
        if !plan.has_reads() {
            return Err(BackendError::Unsupported(
                "the plan has no reads: begin with Step::with_reads".into(),
            ));
        }
        self.grow(|group| plan.group(group).cells_end)?;
        self.masks.resize(plan.n_groups(), Vec::new());
        for (g, mask) in self.masks.iter_mut().enumerate() {
            let group = plan.group(GroupId(g as u16));
            group.reads.explicit(plan.n_tokens(), group.cells_end, mask);
        }
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
        let owner = layer.owner.0 as usize;
        let (n, heads) = (plan.n_tokens() as usize, self.spec.layout.n_heads as usize);
        let (kv_heads, d) = (layer.n_kv_heads as usize, layer.head_dim as usize);
        let group = plan.group(layer.group);
        if call.kv.is_some() != (owner == call.layer.0 as usize) {
            return Err(BackendError::LayerOrder(call.layer));
        }
        call.check(n, heads, kv_heads, d)?;
        if let Some((k, v)) = call.kv {
            for copy in &group.copies {
                self.copy(layer.group, Some(owner), copy.from, copy.to, copy.len);
            }
            self.write(owner, group, k, v);
        }
        self.counters.bytes_read += group.reads.cells_read() * row_bytes(&layer);

        let (rows, cell, cells) = (&self.layers[owner], self.cell(owner), group.cells_end as usize);
        let mask = &self.masks[layer.group.0 as usize];
        for token in 0..n {
            let sees = &mask[token * cells..(token + 1) * cells];
            let seen: Vec<usize> = (0..cells).filter(|c| sees[*c]).collect();
            for head in 0..heads {
                let at = |c: usize| c * cell + head / (heads / kv_heads) * d;
                let q = call.q.row(token, head, d);
                let score = |c: &usize| {
                    let k = &rows.k[at(*c)..at(*c) + d];
                    let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let scaled = dot * f64::from(call.scale);
                    call.softcap.map_or(scaled, |cap| f64::from(cap) * (scaled / f64::from(cap)).tanh())
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let sink = call.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum = weights.iter().sum::<f64>() + (sink - max).exp();
                for (i, out) in call.out.row(token, head, d).iter_mut().enumerate() {
                    let value = |(c, w): (&usize, &f64)| w * f64::from(rows.v[at(*c) + i]);
                    *out = (seen.iter().zip(&weights).map(value).sum::<f64>() / sum) as f32;
                }
            }
        }
        Ok(())
    }

    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError> {
        self.grow(|group| moves.cells_end(group))?;
        for (group, copies) in moves.groups() {
            for copy in copies {
                self.copy(*group, None, copy.from, copy.to, copy.len);
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
        let spec = *spec.ok_or(BackendError::UnknownLayer { layer, n_layers })?;
        let owner = spec.owner.0 as usize;
        let (d, cells) = (spec.head_dim as usize, self.layers[owner].k.len() / self.cell(owner));
        if kv_head >= spec.n_kv_heads {
            let (index, len) = (kv_head as usize, spec.n_kv_heads as usize);
            return Err(BackendError::OutOfRange { what: "KV head", index, len });
        }
        if cell as usize >= cells {
            return Err(BackendError::OutOfRange { what: "cell", index: cell as usize, len: cells });
        }
        if row.len() != d {
            return Err(BackendError::Shape { what: "row", expected: vec![d], elements: row.len() });
        }
        let at = cell as usize * self.cell(owner) + kv_head as usize * d;
        let rows = &self.layers[owner];
        row.copy_from_slice(
            &match side {
                Side::K => &rows.k,
                Side::V => &rows.v,
            }[at..at + d],
        );
        Ok(())
    }

    fn bytes(&self) -> u64 {
        self.ledger.bytes()
    }
    fn counters(&self) -> Counters {
        self.counters
    }
}
