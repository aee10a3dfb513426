//! KV bytes, attention and packed linear layers on the CPU.
//!
//! Keys and values live in pools of their own (`pool.rs`), head-major, in the dtype that was asked for; attention
//! (`attention.rs`) reads them packed, tile by tile, with an online softmax, and never makes a decoded copy of a
//! cache. K and V meet only in a tile of scores, so that any K dtype goes with any V dtype.
//!
//! Kernels are written once over the vectors of `arch.rs`, and compiled for every instruction set; `KVIST_ISA`
//! chooses one. It promises results that do not depend on the number of threads, and a decode step that allocates
//! nothing. Unsafe code stands in `arch/` alone.
#![deny(unsafe_code)]
// Register tiles are named by row and vector, in loops that the compiler unrolls.
#![allow(clippy::needless_range_loop)]

#[allow(unsafe_code)]
pub mod arch;
mod attention;
mod element;
pub mod linear;
mod pages;
pub mod peak;
mod pool;
mod pools;
mod recent;
mod rotation;
pub mod steps;
pub mod stream;

use arch::{Isa, Threads};
use kvist_backend::{Backend, BackendError, PoolSpec, Pools, Purpose, Usage, reserved_cells};
use pools::CpuPools;
use std::sync::{Arc, LazyLock};

/// What computes: an instruction set and threads. Shared by whatever runs one after the other.
#[derive(Clone, Debug)]
pub struct Compute {
    pub isa: Isa,
    pub threads: Arc<Threads>,
    /// Make every row's arithmetic independent of what else is in its batch, at some cost for packed dtypes.
    pub deterministic: bool,
}

impl Compute {
    pub fn new(isa: Isa, threads: usize) -> Self {
        Compute { isa, threads: Arc::new(Threads::new(threads)), deterministic: false }
    }
    pub fn deterministic(self, deterministic: bool) -> Self {
        Compute { deterministic, ..self }
    }
}

/// The instruction set `KVIST_ISA` names, or the best; a thread per core, the same ones for the whole process.
impl Default for Compute {
    fn default() -> Self {
        static SHARED: LazyLock<Compute> = LazyLock::new(|| Compute {
            isa: Isa::from_env().unwrap_or_else(|_| Isa::best()),
            threads: Arc::new(Threads::per_core()),
            deterministic: false,
        });
        SHARED.clone()
    }
}

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
#[derive(Clone, Debug, Default)]
pub struct Cpu {
    compute: Compute,
    growth: Growth,
}

impl Cpu {
    pub fn new(compute: Compute) -> Self {
        Cpu { compute, growth: Growth::Segments }
    }

    /// `cpu-concat`: the same kernels over a cache that is concatenated anew at every step, as naive decoders do
    /// it. Only measurements want it.
    pub fn concatenating(self) -> Self {
        Cpu { growth: Growth::Concatenate, ..self }
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
        Ok(Box::new(CpuPools::new(self.id(), spec, self.growth, &self.compute)?))
    }

    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        if [spec.k, spec.v].iter().any(|storage| storage.group == 0) {
            return None;
        }
        let mut kv = 0u64;
        for (_, layer) in spec.layout.owners() {
            let group = layer.group.0 as usize;
            let reserved = self.growth.reserved_cells(*cells.get(group)?, *spec.capacity_cells.get(group)?);
            let layer = pools::sides(spec, layer)
                .iter()
                .try_fold(0u64, |sum, side| sum.checked_add(side.bytes(reserved)?))?;
            kv = kv.checked_add(layer)?;
        }
        let scratch = attention::Scratch::bytes(spec, self.compute.threads.n())?;
        let scratch = scratch.checked_add(recent::RecentRows::bytes(spec)?)?;
        Some(Usage::default().with(Purpose::KvCache, kv).with(Purpose::Scratch, scratch))
    }
}
