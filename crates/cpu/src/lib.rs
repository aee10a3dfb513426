//! KV bytes and attention on the CPU.
//!
//! Keys and values live in pools of their own (`pool.rs`), head-major, in the dtype that was asked for; attention
//! (`attention.rs`) reads them packed, tile by tile, with an online softmax, and never makes a decoded copy of a
//! cache. K and V meet only in a tile of scores, so that any K dtype goes with any V dtype.
//!
//! It promises results that do not depend on the number of threads, and a decode step that allocates nothing. It
//! refuses unsafe code: kernels for one instruction set will live in `arch/`, beside this portable one.
#![forbid(unsafe_code)]

mod attention;
mod pool;
mod pools;
mod rotation;

use kvist_backend::{Backend, BackendError, PoolSpec, Pools, Purpose, Usage, reserved_cells};
use pools::CpuPools;

/// How pools grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Growth {
    /// By appended segments of doubling size: nothing is copied.
    #[default]
    Segments,
    /// By one new allocation per step, to which the past is copied.
    Concatenate,
}

impl Growth {
    fn reserved_cells(self, cells: u32, capacity: u32) -> u32 {
        match self {
            Growth::Segments => reserved_cells(cells, capacity),
            Growth::Concatenate => cells,
        }
    }
}

/// The CPU backend, `cpu`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cpu {
    growth: Growth,
}

impl Cpu {
    /// `cpu-concat`: the same kernels over a cache that is concatenated anew at every step, as naive decoders do
    /// it. Only measurements want it.
    pub fn concatenating() -> Self {
        Cpu { growth: Growth::Concatenate }
    }
}

impl Backend for Cpu {
    fn id(&self) -> &'static str {
        match self.growth {
            Growth::Segments => "cpu",
            Growth::Concatenate => "cpu-concat",
        }
    }

    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, BackendError> {
        Ok(Box::new(CpuPools::new(self.id(), spec, self.growth)?))
    }

    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        let mut kv = 0u64;
        for (_, layer) in spec.layout.owners() {
            let group = layer.group.0 as usize;
            let reserved = self.growth.reserved_cells(*cells.get(group)?, *spec.capacity_cells.get(group)?);
            let row = spec.k.row_bytes(layer.head_dim).checked_add(spec.v.row_bytes(layer.head_dim))?;
            let layer = row.checked_mul(u64::from(layer.n_kv_heads))?.checked_mul(u64::from(reserved))?;
            kv = kv.checked_add(layer)?;
        }
        let scratch = attention::Scratch::bytes(&spec.layout, spec.max_step_tokens)?;
        Some(Usage::default().with(Purpose::KvCache, kv).with(Purpose::Scratch, scratch))
    }
}
