//! The trait a backend implements: bytes behind a plan.
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
    /// Cells each layer group may come to hold, in group order.
    pub capacity_cells: Vec<u32>,
    /// Tokens of the largest step: the scratch is reserved for it once.
    pub max_step_tokens: u32,
    pub budget: Arc<MemoryBudget>,
    /// The order in which storages with outliers take the channels of the keys; without it they take them as they come.
    pub channels: Option<Arc<ChannelOrder>>,
    /// The newest tokens, in f16 beside their packed rows.
    pub recent: Recent,
}

impl PoolSpec {
    /// K and V bytes that one cell of every group costs together, scales included: the honest bytes per token.
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
    /// `None` for a layer that borrows: it has no K and V, and must not be able to write any.
    pub kv: Option<(Tensor<'a>, Tensor<'a>)>, // [n_tokens, n_kv_heads, head_dim] each, K after RoPE
    pub out: TensorMut<'a>, // [n_tokens, n_heads, head_dim], wholly overwritten
    /// Multiplies every score; usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// A score of nothing for each query head: it takes its share of the weights, and adds nothing (the learned sinks
    /// of gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

impl Attend<'_> {
    /// Is everything there for `n` tokens?
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

/// Which half of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    K,
    V,
}

/// Bytes the kernels have moved since the pools were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Stored bytes read by attention: bounded by occupancy, whatever the capacity.
    pub bytes_read: u64,
    /// Stored bytes written for new tokens.
    pub bytes_written: u64,
    /// Stored bytes moved by copies and compaction.
    pub bytes_moved: u64,
}

/// The bytes of one cache. Integers arrive as a plan.
pub trait Pools: Send {
    /// Once per step, before any write: grow (all layers or none), cut the work. On `Err` nothing is visible:
    /// larger pools hold no token. The plan has its reads.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError>;

    /// Copy, write, then attend over exactly the cells the plan's reads name.
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), BackendError>;

    /// One round of compaction. A round that permutes densely packed cells goes through free ones above them, so
    /// it may grow the pools as [`begin`](Self::begin) does. On `Err` nothing has moved.
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), BackendError>;

    /// One stored row, decoded (and turned back, if it is stored rotated): for tests and tools. Rows never
    /// written are zero.
    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32], // [head_dim]
    ) -> Result<(), BackendError>;

    /// KV bytes reserved now.
    fn bytes(&self) -> u64;
    fn counters(&self) -> Counters;
}

/// A maker of pools.
pub trait Backend: Send + Sync {
    fn id(&self) -> &'static str;

    /// Empty pools. Reserves the scratch; K and V are reserved as they grow.
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, BackendError>;

    /// What pools of this spec reserve when `cells[group]` cells of each group are in use: exactly what the
    /// budget will record as [`Purpose::KvCache`] and [`Purpose::Scratch`]. `None` if it overflows.
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage>;

    /// [`usage`](Self::usage) with every group full: the bound that is never exceeded.
    fn bound(&self, spec: &PoolSpec) -> Option<Usage> {
        self.usage(spec, &spec.capacity_cells)
    }

    /// KV bytes of [`bound`](Self::bound).
    fn kv_bound(&self, spec: &PoolSpec) -> Option<u64> {
        self.bound(spec).map(|usage| usage.of(Purpose::KvCache))
    }
}

/// Cells reserved when `cells` of at most `capacity` are in use: pools grow by appended segments of doubling
/// size, the last one clamped to the capacity, so that nothing is copied and no transient exceeds the bound.
pub fn reserved_cells(cells: u32, capacity: u32) -> u32 {
    if cells == 0 {
        return 0;
    }
    cells.max(FIRST_SEGMENT_CELLS).checked_next_power_of_two().unwrap_or(u32::MAX).min(capacity)
}

/// Cells of a pool's first segment.
pub const FIRST_SEGMENT_CELLS: u32 = 256;
