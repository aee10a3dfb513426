//! The traits that a backend implements: it stores the bytes and executes plans.
use crate::budget::{MemoryBudget, Purpose, Usage};
use crate::channels::ChannelOrder;
use crate::error::BackendError;
use crate::layout::Layout;
use crate::recent::Recent;
use crate::storage::Storage;
use crate::tensor::{Tensor, TensorMut};
use kvist_cache::{LayerId, MovePlan, StepPlan};
use std::sync::Arc;

/// Everything [`Backend::pools`] needs.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    pub layout: Layout,
    pub k: Storage,
    pub v: Storage,
    /// Maximum number of cells of each layer group, in group order.
    pub capacity_cells: Vec<u32>,
    /// Tokens of the largest step. Scratch memory is reserved for it once.
    pub max_step_tokens: u32,
    pub budget: Arc<MemoryBudget>,
    /// The channel order of the keys, for storages with outliers. Without it they use the natural order.
    pub channels: Option<Arc<ChannelOrder>>,
    /// How many of the newest tokens are also kept in f16, beside their quantised rows.
    pub recent: Recent,
}

impl PoolSpec {
    /// K and V bytes per token: one cell of every layer group, scales included.
    pub fn bytes_per_token(&self) -> u64 {
        self.layout
            .owners()
            .map(|(_, l)| {
                u64::from(l.n_kv_heads) * (self.k.row_bytes(l.head_dim) + self.v.row_bytes(l.head_dim))
            })
            .sum()
    }
}

/// One layer of one step.
#[derive(Debug)]
pub struct Attend<'a> {
    pub layer: LayerId,
    pub q: Tensor<'a>, // [n_tokens, n_heads, head_dim]
    /// `None` for a layer that borrows another layer's K and V: it must not write any.
    pub kv: Option<(Tensor<'a>, Tensor<'a>)>, // [n_tokens, n_kv_heads, head_dim] each, K after RoPE
    pub out: TensorMut<'a>, // [n_tokens, n_heads, head_dim], overwritten completely
    /// Multiplies every score; usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One sink score per query head, without a value: it takes part in the softmax and adds nothing to the output
    /// (the learned sinks of gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

impl Attend<'_> {
    /// Checks that all tensors have the right sizes for `n` tokens.
    pub fn check(
        &self,
        n: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<(), BackendError> {
        self.q.check("q", n, heads, head_dim)?;
        self.out.check("out", n, heads, head_dim)?;
        if let Some((k, v)) = &self.kv {
            k.check("k", n, kv_heads, head_dim)?;
            v.check("v", n, kv_heads, head_dim)?;
        }
        match self.sinks {
            Some(sinks) if sinks.len() != heads => {
                Err(BackendError::Shape { what: "sinks", expected: vec![heads], elements: sinks.len() })
            }
            _ => Ok(()),
        }
    }
}

/// One side of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    K,
    V,
}

/// Bytes that the kernels have moved since the pools were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Stored bytes read by attention. Bounded by the cells in use, not by the capacity.
    pub bytes_read: u64,
    /// Stored bytes written for new tokens.
    pub bytes_written: u64,
    /// Stored bytes moved by copies and compaction.
    pub bytes_moved: u64,
}

/// The K and V bytes of one cache. They are addressed by plans.
pub trait Pools: Send {
    /// Starts a step, before any write: grows the pools (all layers or none) and partitions the work. Call it once
    /// per step, with a plan that has its reads. On `Err` nothing visible has changed: larger pools hold no tokens.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError>;

    /// Makes the copies, writes the new K and V, then attends over exactly the cells that the plan's reads name.
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), BackendError>;

    /// Executes one round of compaction. A round that permutes densely packed cells goes through free cells above
    /// them, so it may grow the pools as [`begin`](Self::begin) does. On `Err` nothing has moved.
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError>;

    /// Decodes one stored row (and undoes its rotation, if it is stored rotated), for tests and tools. Rows that were
    /// never written are zero.
    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32], // [head_dim]
    ) -> Result<(), BackendError>;

    /// KV bytes currently reserved.
    fn bytes(&self) -> u64;
    fn counters(&self) -> Counters;
}

impl Pools for Box<dyn Pools> {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        (**self).begin(plan)
    }
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), BackendError> {
        (**self).attend(plan, call)
    }
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError> {
        (**self).relocate(moves)
    }
    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32],
    ) -> Result<(), BackendError> {
        (**self).inspect(layer, side, kv_head, cell, row)
    }
    fn bytes(&self) -> u64 {
        (**self).bytes()
    }
    fn counters(&self) -> Counters {
        (**self).counters()
    }
}

/// A backend: it makes pools.
pub trait Backend: Send + Sync {
    fn id(&self) -> &'static str;

    /// Makes empty pools. Reserves the scratch memory; K and V are reserved as they grow.
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, BackendError>;

    /// What pools of this spec reserve when `cells[group]` cells of each group are in use: exactly what the budget
    /// records as [`Purpose::KvCache`] and [`Purpose::Scratch`]. `None` on overflow.
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage>;

    /// [`usage`](Self::usage) with every group full: an upper bound that is never exceeded.
    fn bound(&self, spec: &PoolSpec) -> Option<Usage> {
        self.usage(spec, &spec.capacity_cells)
    }

    /// KV bytes of [`bound`](Self::bound).
    fn kv_bound(&self, spec: &PoolSpec) -> Option<u64> {
        self.bound(spec).map(|usage| usage.of(Purpose::KvCache))
    }
}

/// Cells reserved when `cells` of at most `capacity` are in use. Pools grow by appending segments of doubling size,
/// the last one clamped to the capacity. Growth therefore copies nothing, and memory never exceeds the bound, not
/// even temporarily.
pub fn reserved_cells(cells: u32, capacity: u32) -> u32 {
    if cells == 0 {
        return 0;
    }
    cells.max(FIRST_SEGMENT_CELLS).checked_next_power_of_two().unwrap_or(u32::MAX).min(capacity)
}

/// Cells of a pool's first segment.
pub const FIRST_SEGMENT_CELLS: u32 = 256;
