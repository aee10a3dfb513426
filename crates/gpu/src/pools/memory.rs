//! The bytes that pools reserve: exactly what they allocate.
use super::transfers;
use crate::form::Form;
use crate::recents;
use crate::tables::{PARTIAL_SLOTS, usual_words};
use kvist_device::*;

/// Scratch bytes.
pub struct ScratchBytes {
    pub plans: Vec<u64>,  // by layer group
    pub orders: Vec<u64>, // by owner layer, if keys are reordered
    pub recents: u64,
    pub transfers: u64,
    pub states: u64,
    pub q: u64,
    pub kv: u64,
    pub sinks: u64,
}

impl ScratchBytes {
    pub fn new(spec: &PoolSpec) -> Option<Self> {
        let plan = |g: usize| {
            let capacity = spec.capacity_cells.get(g)?;
            let recent = spec.recent.of_storages(spec.k, spec.v).tokens;
            usual_words(*capacity, spec.max_step_tokens, recent).checked_mul(4)
        };
        let (heads, tokens) = (u64::from(spec.layout.n_heads), u64::from(spec.max_step_tokens));
        let dim = u64::from(spec.layout.max_head_dim());
        let kv = spec
            .layout
            .layers
            .iter()
            .map(|layer| u64::from(layer.n_kv_heads) * u64::from(layer.k_dim))
            .max()?;
        let states = u64::from(PARTIAL_SLOTS).checked_mul(heads)?.checked_mul(dim.checked_add(2)?)?;
        Some(ScratchBytes {
            plans: (0..spec.layout.n_groups()).map(plan).collect::<Option<_>>()?,
            orders: spec
                .layout
                .owners()
                .filter(|_| spec.k.outliers)
                .map(|(_, layer)| order_bytes(layer))
                .collect(),
            recents: recents::bytes(spec)?,
            transfers: transfers::bytes(spec)?,
            states: states.checked_mul(4)?,
            q: tokens.checked_mul(heads)?.checked_mul(dim)?.checked_mul(4)?.max(16),
            kv: tokens.checked_mul(kv)?.checked_mul(4)?.max(16),
            sinks: (heads * 4).max(16),
        })
    }
    pub fn total(&self) -> Option<u64> {
        let rest = [self.recents, self.transfers, self.states, self.q, self.q, self.kv, self.kv, self.sinks];
        // Plans twice: once more where they are uploaded from.
        self.plans
            .iter()
            .chain(&self.plans)
            .chain(&self.orders)
            .chain(&rest)
            .try_fold(0u64, |sum, bytes| sum.checked_add(*bytes))
    }
}

/// Scratch bytes in the host's memory: what plans are uploaded from, and what blocks are uploaded from and read back to.
pub fn host_bytes(spec: &PoolSpec) -> Option<u64> {
    let plans = ScratchBytes::new(spec)?.plans;
    plans.iter().try_fold(transfers::host_bytes(spec)?, |sum, bytes| sum.checked_add(*bytes))
}

fn order_bytes(layer: &LayerSpec) -> u64 {
    4 * u64::from(layer.n_kv_heads) * u64::from(layer.k_dim)
}

/// KV and scratch bytes of pools with so many cells in use. `None` on overflow.
pub fn usage(spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
    let mut kv = 0u64;
    for (_, layer) in spec.layout.owners() {
        let group = layer.group.0 as usize;
        let reserved = reserved_cells(*cells.get(group)?, *spec.capacity_cells.get(group)?);
        let words = |storage, dim| Some(u64::from(Form::new(storage, dim).ok()?.words(dim)));
        let words = words(spec.k, layer.k_dim)? + words(spec.v, layer.v_dim)?;
        let bytes = words.checked_mul(4 * u64::from(layer.n_kv_heads))?.checked_mul(reserved.into())?;
        kv = kv.checked_add(bytes)?;
    }
    Some(
        Usage::default().with(Purpose::KvCache, kv).with(Purpose::Scratch, ScratchBytes::new(spec)?.total()?),
    )
}
