//! The traits that a backend implements: it stores the bytes and executes plans.
use crate::budget::{MemoryBudget, Purpose, Usage};
use crate::channels::ChannelOrder;
use crate::error::DeviceError;
use crate::layout::{LayerSpec, Layout};
use crate::mapped::{Image, MappedRows, no_images};
use crate::mass::AttentionMass;
use crate::recent::{CellPosition, Recent};
use crate::step_io::Ticket;
use crate::storage::Storage;
use crate::tensor::{Tensor, TensorMut};
use crate::transfer::{HostArena, HostBlock, Transfer, TransferRefused};
use kvist_cache::{CellRun, GroupId, LayerId, MovePlan, StepPlan};
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
    /// How many of the newest tokens are also kept in f16, in addition to their quantised rows.
    pub recent: Recent,
}

impl PoolSpec {
    /// K and V bytes per token: one cell of every layer group, scales included.
    pub fn bytes_per_token(&self) -> u64 {
        self.layout.owners().map(|(_, l)| u64::from(l.n_kv_heads) * l.cell_bytes(self.k, self.v)).sum()
    }
}

/// One layer of one step.
#[derive(Debug)]
pub struct Attend<'a> {
    pub layer: LayerId,
    pub q: Tensor<'a>, // [n_tokens, n_heads, k_dim]
    /// `None` for a layer that borrows another layer's K and V: it must not write any.
    pub kv: Option<(Tensor<'a>, Tensor<'a>)>, // [n_tokens, n_kv_heads, k_dim] after RoPE, and [n_tokens, n_kv_heads, v_dim]
    pub out: TensorMut<'a>, // [n_tokens, n_heads, v_dim], overwritten completely
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
    pub fn check(&self, n: usize, heads: usize, layer: &LayerSpec) -> Result<(), DeviceError> {
        let (kv_heads, k_dim, v_dim) =
            (layer.n_kv_heads as usize, layer.k_dim as usize, layer.v_dim as usize);
        self.q.check("q", n, heads, k_dim)?;
        self.out.check("out", n, heads, v_dim)?;
        if let Some((k, v)) = &self.kv {
            k.check("k", n, kv_heads, k_dim)?;
            v.check("v", n, kv_heads, v_dim)?;
        }
        match self.sinks {
            Some(sinks) if sinks.len() != heads => {
                Err(DeviceError::Shape { what: "sinks", expected: vec![heads], elements: sinks.len() })
            }
            _ => Ok(()),
        }
    }
}

/// The queries of one layer of one step whose attention is asked for. The fields are those of [`Attend`].
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct MassOf<'a> {
    pub layer: LayerId,
    pub q: Tensor<'a>, // [n_tokens, n_heads, k_dim]
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sinks: Option<&'a [f32]>,
}

/// The error of devices that do not return attention mass.
pub(crate) fn no_mass() -> DeviceError {
    DeviceError::Unsupported("this device does not return attention mass".into())
}

/// K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    K,
    V,
}

/// Bytes that the kernels have moved since the pools were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounters {
    /// Stored bytes read by attention. Bounded by the cells in use, not by the capacity.
    pub bytes_read: u64,
    /// Stored bytes written for new tokens.
    pub bytes_written: u64,
    /// Stored bytes moved by copies, compaction, exports and imports.
    pub bytes_moved: u64,
    /// Of exports and imports of a device with memory of its own: bytes that the host copied between blocks and the memory that the device
    /// copies to and from. None of blocks in a [`HostArena`].
    pub bytes_staged: u64,
}

/// The K and V bytes of one cache. Plans say which cells to read and write.
pub trait Pools: Send {
    /// Starts a step, before any write: grows the pools (all layers or none) and partitions the work. Call it once
    /// per step, with a plan that has its reads. On `Err` nothing visible has changed: larger pools store no tokens.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), DeviceError>;

    /// Makes the copies, writes the new K and V, then attends over exactly the cells that the plan's reads name.
    fn attend(&mut self, plan: &StepPlan, call: Attend<'_>) -> Result<(), DeviceError>;

    /// Makes the copies and writes the new K and V of a layer, as [`attend`](Self::attend) does, and attends to nothing: for
    /// callers with kernels of their own, which read the rows by [`inspect`](Self::inspect).
    ///
    /// # Errors
    /// Those of `attend`; and this backend has no such operation. Nothing visible has changed then.
    fn store(
        &mut self,
        plan: &StepPlan,
        layer: LayerId,
        k: Tensor<'_>,
        v: Tensor<'_>,
    ) -> Result<(), DeviceError> {
        let _ = (plan, layer, k, v);
        Err(DeviceError::Unsupported("this backend writes K and V only while it attends".into()))
    }

    /// Adds the attention that cells receive in one layer to `mass`, which has [begun](AttentionMass::begin) this step. Call
    /// it after the layer's [`attend`](Self::attend), with the same queries.
    ///
    /// # Errors
    /// Those of `attend`; and this backend has no such operation.
    fn attention_mass(
        &mut self,
        plan: &StepPlan,
        call: MassOf<'_>,
        mass: &mut AttentionMass,
    ) -> Result<(), DeviceError> {
        let _ = (plan, call, mass);
        Err(no_mass())
    }

    /// Executes one round of compaction, or the moves of kept paths after a step's last layer, copy by copy. A round
    /// that permutes densely packed cells goes through free cells above them, so it may grow the pools as
    /// [`begin`](Self::begin) does. On `Err` nothing has moved.
    fn relocate(&mut self, moves: &MovePlan) -> Result<(), DeviceError>;

    /// Changes the capacities, one per layer group, between steps. Nothing from the new capacity on is in use: what was there has been
    /// [relocated](Self::relocate). Memory above it goes back to the system; a part that cannot be split off, because the system or the
    /// budget has no room for the copy, stays until these pools end.
    ///
    /// # Errors
    /// This backend cannot change capacities, or a larger one needs scratch memory that is refused. Nothing has changed then. A smaller
    /// capacity is never refused by a backend that accepts the present one.
    fn resize(&mut self, capacity_cells: &[u32]) -> Result<(), DeviceError> {
        let _ = capacity_cells;
        Err(DeviceError::Unsupported("this device cannot change the capacity of a cache".into()))
    }

    /// The length of a [`HostBlock`] for `cells` cells of a layer group. `None` if there is no such group, or on overflow.
    fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize>;

    /// Whether [`pin_host`](Self::pin_host) locks memory.
    fn pins_host(&self) -> bool {
        false
    }

    /// Locks `bytes` of the host's memory in place for blocks of these pools. An export to a block in it, and an import from bytes in it,
    /// are copied by the device alone. `None` if this device gains nothing by such memory, or its API cannot lend any. Blocks in the
    /// memory of an earlier call are ordinary ones from then on.
    ///
    /// # Errors
    /// The system refuses to lock so much. Nothing has changed then.
    fn pin_host(&mut self, bytes: u64) -> Result<Option<Arc<dyn HostArena>>, DeviceError> {
        let _ = bytes;
        Ok(None)
    }

    /// Starts to copy the stored bytes of `cells` into a block, once the submission `after` has finished. The cells must not
    /// be written until the transfer has [`finished`](Self::finished).
    ///
    /// # Errors
    /// There is no such group, the pools have not grown to these cells, or the block has another length than
    /// [`block_bytes`](Self::block_bytes). Nothing has changed then.
    fn export(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused>;

    /// Starts to copy a block into `cells`, once the submission `after` has finished; grows the pools if necessary, as
    /// [`begin`](Self::begin) does. The cells must be neither read nor written until the transfer has
    /// [`finished`](Self::finished). Later steps read imported rows as they are stored: the f16 rows of
    /// [recent](Recent) tokens are not part of a block ([`write_recent`](Self::write_recent) adds them), and those of the
    /// tokens that were in these cells before are dropped.
    ///
    /// # Errors
    /// There is no such group, the cells lie past its capacity, the block has another length than
    /// [`block_bytes`](Self::block_bytes), or the budget or the system refuses the growth. Nothing visible has changed then.
    fn import(
        &mut self,
        after: Ticket,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused>;

    /// Returns the block of a transfer that has ended, once; `None` while it is running. Never blocks.
    ///
    /// # Errors
    /// The device could not copy all bytes: what was imported must not be read. Or these pools have no such transfer.
    fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>>;

    /// Copies the f16 rows of a [recent](Recent) token to `rows`, after everything that was submitted before, and waits. Returns
    /// `false`, and leaves `rows` as they were, if there are none: they were dropped, or these pools keep none.
    ///
    /// The bytes are the same on every device: for every layer of the group that owns K and V, in order of layers, K of all KV
    /// heads, then V; packed sides alone. A row is `k_dim` or `v_dim` little-endian f16 ([`PoolSpec::recent_row_bytes`]): keys as
    /// they came, values rotated if their storage rotates them.
    ///
    /// # Errors
    /// There is no such group, the pools have not grown to this cell, `rows` has another length, or the device has failed.
    fn read_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &mut [u8],
    ) -> Result<bool, DeviceError> {
        let _ = (group, token, rows);
        Ok(false)
    }

    /// Gives a token that was [imported](Self::import) f16 rows from [`read_recent`](Self::read_recent): later queries of its recent group
    /// read them as if the token had been computed here. The rows of the least recently read tokens go if there is no other place.
    /// Returns `false` if these pools keep none. Call it between steps.
    ///
    /// # Errors
    /// As [`read_recent`](Self::read_recent). Nothing has changed then.
    fn write_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &[u8],
    ) -> Result<bool, DeviceError> {
        let _ = (group, token, rows);
        Ok(false)
    }

    /// The layout of [`image`](Self::image)'s bytes; `None` if these pools map no files. Files of one layout can be mapped on
    /// every machine whose pools name the same.
    fn image_layout(&self) -> Option<&'static str> {
        None
    }

    /// Copies the stored bytes of cells `0..cells` of a layer in whole blocks, for a file that other pools [`map`](Self::map). What the
    /// last block stores behind these cells is not copied: it is zero.
    ///
    /// # Errors
    /// These pools map no files, the layer borrows K and V, or the pools have not grown to these cells.
    fn image(&self, layer: LayerId, side: Side, cells: u32) -> Result<Image, DeviceError> {
        let _ = (layer, side, cells);
        Err(no_images())
    }

    /// How many bytes [`image`](Self::image) copies.
    ///
    /// # Errors
    /// These pools map no files, or the layer borrows K and V.
    fn image_bytes(&self, layer: LayerId, side: Side, cells: u32) -> Result<u64, DeviceError> {
        let _ = (layer, side, cells);
        Err(no_images())
    }

    /// Uses K and V of a file as the first cells of some layers, without copying them. Call it before anything is stored in them. The
    /// file must not change while these pools exist. What is written to these cells later stays in this process.
    ///
    /// # Errors
    /// These pools map no files, the layers have cells already, the file is too short, has another alignment or more cells than the
    /// capacity, or cannot be mapped. Nothing has changed then.
    fn map(&mut self, rows: &MappedRows<'_>) -> Result<(), DeviceError> {
        let _ = rows;
        Err(no_images())
    }

    /// Decodes one stored row (and undoes its rotation, if it is stored rotated), for tests and tools. Rows that were
    /// never written are zero.
    fn inspect(
        &self,
        layer: LayerId,
        side: Side,
        kv_head: u32,
        cell: u32,
        row: &mut [f32], // [k_dim] or [v_dim]
    ) -> Result<(), DeviceError>;

    /// KV bytes currently reserved.
    fn bytes(&self) -> u64;
    fn counters(&self) -> KvCounters;
}

/// A backend makes KV pools.
pub trait Backend: Send + Sync {
    fn id(&self) -> &'static str;

    /// Refuses what [`pools`](Self::pools) would refuse however much memory is free: storages, heads and capacities that the device has
    /// no kernels for or cannot bind. Reserves nothing.
    fn check_spec(&self, _spec: &PoolSpec) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes empty pools. Reserves the scratch memory; K and V are reserved as they grow.
    fn pools(&self, spec: &PoolSpec) -> Result<Box<dyn Pools>, DeviceError>;

    /// What pools of this spec reserve when `cells[group]` cells of each group are in use: exactly what the budget
    /// records as [`Purpose::KvCache`] and [`Purpose::Scratch`]. `None` on overflow.
    fn usage(&self, spec: &PoolSpec, cells: &[u32]) -> Option<Usage>;

    /// [`usage`](Self::usage) with every group full: an upper bound that is never exceeded.
    fn bound(&self, spec: &PoolSpec) -> Option<Usage> {
        self.usage(spec, &spec.capacity_cells)
    }

    /// How many bytes of [`bound`](Self::bound) lie in the host's memory, for a device that has its own: what is uploaded
    /// from and read back to. `None` on overflow.
    fn host_bytes(&self, _spec: &PoolSpec) -> Option<u64> {
        Some(0)
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
    reserved_cells_from(FIRST_SEGMENT_CELLS, cells, capacity)
}

/// [`reserved_cells`] with another first segment of `first` cells, rounded up to a power of two. Later segments are as
/// large or larger, so pools grow by at least that many cells, up to the capacity.
pub fn reserved_cells_from(first: u32, cells: u32, capacity: u32) -> u32 {
    if cells == 0 {
        return 0;
    }
    cells.max(first).checked_next_power_of_two().unwrap_or(u32::MAX).min(capacity)
}

/// Cells of a pool's first segment.
pub const FIRST_SEGMENT_CELLS: u32 = 256;
