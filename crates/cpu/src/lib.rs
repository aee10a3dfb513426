//! CPU backend: KV pools, attention and quantised linear layers.
//!
//! Keys and values live in separate pools (`pool.rs`), head-major, in the configured dtypes. Attention (`attention.rs`)
//! reads the packed rows tile by tile with an online softmax and never makes a decoded copy of the cache. K and V meet
//! only through a tile of scores, so any K dtype works with any V dtype.
//!
//! Kernels are written once over the vectors of `arch.rs` and compiled for every instruction set; `KVIST_ISA` chooses
//! one. Results do not depend on the number of threads, and a decode step allocates nothing. Unsafe code is confined to
//! `arch/`.
#![deny(unsafe_code)]
// Kernels index register tiles by row and vector, in loops that the compiler unrolls.
#![allow(clippy::needless_range_loop)]

mod aligned;
#[allow(unsafe_code)]
pub mod arch;
mod attention;
mod device;
mod element;
mod experts;
mod layer;
pub mod linear;
mod pages;
pub mod peak;
mod pool;
mod pools;
mod recent;
pub mod steps;
pub mod stream;

use arch::arena::Arena;
use arch::{Isa, Threads, TileIsa};
use kvist_device::{Backend, DeviceError, FIRST_SEGMENT_CELLS, PoolSpec, Pools, Usage, reserved_cells_from};
use pool::pairs::{Precision, Products};
use pools::CpuPools;
use std::sync::{Arc, LazyLock};

/// Which results this code computes, to the last bit. It is part of
/// [`Footprint::numerics`](kvist_device::Footprint::numerics), and so of the keys under which K and V are stored: another process
/// reuses them only if it would have computed the same ones. Raise it with every change of a kernel that changes a bit of a result on
/// any instruction set. `tests/device/golden.rs` fails if a result has changed without it.
pub const NUMERICS: u32 = 6;

/// The compute resources: an instruction set, a thread pool and the memory of weights. Shared by all work that runs one after the
/// other.
#[derive(Clone, Debug)]
pub struct Compute {
    pub isa: Isa,
    pub threads: Arc<Threads>,
    /// Make each row's arithmetic independent of the rest of its batch. Costs some speed for quantised dtypes.
    pub deterministic: bool,
    /// Compute attention over float caches as products of tiles, if the instruction set has tiles (AMX). Prompts take
    /// less time, and single queries more; all queries take the same path, so that results do not depend on the batch.
    pub tile_attention: bool,
    /// For batches of many tokens, compute with fewer bits. Attention rounds to bf16, if the instruction set has tiles (AMX) or
    /// multiplies pairs of bf16, and to words of 16 bits, if it multiplies those (AVX2). Packed weights become bf16 with tiles, and bytes with
    /// a scale per 256 inputs on other CPUs that multiply bytes. Prompts take less time, but the result of a token then depends on whether its batch was large.
    pub fast_prefill: bool,
    /// Where weights lie. Devices that share it put their models side by side.
    pub weights: Arc<Arena>,
}

impl Compute {
    pub fn new(isa: Isa, threads: usize) -> Self {
        Compute {
            isa,
            threads: Arc::new(Threads::new(threads)),
            deterministic: false,
            tile_attention: false,
            fast_prefill: false,
            weights: Arc::default(),
        }
    }
    pub fn deterministic(self, deterministic: bool) -> Self {
        Compute { deterministic, ..self }
    }
    pub fn tile_attention(self, tile_attention: bool) -> Self {
        Compute { tile_attention, ..self }
    }

    pub fn fast_prefill(self, fast_prefill: bool) -> Self {
        Compute { fast_prefill, ..self }
    }

    /// Whether results may depend on the batch.
    fn is_fast(&self) -> bool {
        self.fast_prefill && !self.deterministic
    }

    /// The tiles that prompts use whose results may depend on the batch, if any.
    pub(crate) fn fast_tiles(&self) -> Option<TileIsa> {
        self.isa.tiles().filter(|_| self.is_fast())
    }

    /// Whether prompts multiply packed weights as bytes with wide scales.
    pub(crate) fn fast_bytes(&self) -> bool {
        self.is_fast() && self.isa.tiles().is_none() && self.isa.multiplies_bytes()
    }

    /// The products of pairs that attention uses for many queries, if any: as fast as they can be, and not exact.
    pub(crate) fn fast_pairs(&self) -> Option<Products> {
        let vectors = self.isa.multiplies_pairs().then_some(Products::Vectors(self.isa));
        let words = self.isa.multiplies_word_pairs().then_some(Products::Words(self.isa));
        let tiles = self.isa.tiles().map(|isa| Products::Tiles(isa, Precision::Rounded));
        tiles.or(vectors).or(words).filter(|_| self.is_fast())
    }

    /// The products of pairs that attention uses for all queries, if any.
    pub(crate) fn exact_pairs(&self) -> Option<Products> {
        let tiles = self.isa.tiles().filter(|_| self.tile_attention)?;
        Some(Products::Tiles(tiles, Precision::Exact))
    }

    /// What `KVIST_TILE_ATTENTION` asks for: `1` or `0`, which is the default.
    pub fn tile_attention_from_env() -> Result<bool, String> {
        match std::env::var("KVIST_TILE_ATTENTION").as_deref() {
            Ok("1") => Ok(true),
            Ok("" | "0") | Err(std::env::VarError::NotPresent) => Ok(false),
            Ok(other) => Err(format!("KVIST_TILE_ATTENTION: `{other}` is neither 0 nor 1")),
            Err(std::env::VarError::NotUnicode(_)) => Err("KVIST_TILE_ATTENTION: not a text".into()),
        }
    }
}

/// The instruction set that `KVIST_ISA` names, or else the best available one; one thread per core. The whole process
/// shares these threads.
impl Default for Compute {
    fn default() -> Self {
        static SHARED: LazyLock<Compute> = LazyLock::new(|| Compute {
            isa: Isa::from_env().unwrap_or_else(|_| Isa::best()),
            threads: Arc::new(Threads::per_core()),
            deterministic: false,
            tile_attention: Compute::tile_attention_from_env().unwrap_or(false),
            fast_prefill: false,
            weights: Arc::default(),
        });
        SHARED.clone()
    }
}

/// How pools grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// Appends segments of doubling size and copies nothing. The first one has `first` cells.
    Segments { first: u32 },
    /// Makes one new allocation per step and copies the existing cells to it.
    Concatenate,
}

impl Default for Growth {
    fn default() -> Self {
        Growth::Segments { first: FIRST_SEGMENT_CELLS }
    }
}

impl Growth {
    fn reserved_cells(self, cells: u32, capacity: u32) -> u32 {
        match self {
            Growth::Segments { first } => reserved_cells_from(first, cells, capacity),
            Growth::Concatenate => cells,
        }
    }
}

/// The CPU: a device for models, and the backend `cpu` for attention.
#[derive(Clone, Debug, Default)]
pub struct Cpu {
    compute: Compute,
    growth: Growth,
}

impl Cpu {
    pub fn new(compute: Compute) -> Self {
        Cpu { compute, growth: Growth::default() }
    }

    /// Pools grow by at least this many cells, rounded up to a power of two and never less than
    /// [`FIRST_SEGMENT_CELLS`]: fewer and larger allocations.
    pub fn growing_by(self, cells: u32) -> Self {
        Cpu { growth: Growth::Segments { first: cells.max(FIRST_SEGMENT_CELLS) }, ..self }
    }

    /// `cpu-concat`: the same kernels over a cache that is concatenated again at every step, as naive decoders do. For
    /// measurements only.
    pub fn concatenating(self) -> Self {
        Cpu { growth: Growth::Concatenate, ..self }
    }
}

impl Backend for Cpu {
    fn id(&self) -> &'static str {
        match self.growth {
            Growth::Segments { .. } => "cpu",
            Growth::Concatenate => "cpu-concat",
        }
    }

    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError> {
        Ok(Box::new(CpuPools::new(self.id(), spec, self.growth, &self.compute)?))
    }

    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage> {
        pools::usage(spec, self.growth, &self.compute, cells)
    }
}
