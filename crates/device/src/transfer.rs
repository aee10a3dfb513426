//! Copies of KV bytes out of pools or into them, a block of cells at a time.
use crate::error::DeviceError;
use crate::pools::PoolSpec;
use kvist_cache::{CellRun, GroupId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A buffer in the host's memory for the bytes of a block. It can be used again for any block of its size.
///
/// # Bytes
///
/// A block consists of some cells of one layer group, without a header. Its layout does not depend on the device, on
/// the capacity of the pools, or on where the cells are:
///
/// ```text
/// block    for every layer of the group that owns K and V, in order of layers: K, then V
/// K, V     [cells, n_kv_heads, row]; no V for a layer whose values are a prefix of its keys
/// row      Storage::row_bytes(k_dim or v_dim) bytes: the stored codes, then the stored scales
/// ```
///
/// Numbers are little-endian. A row of `d` elements is
///
/// | storage | codes | scales |
/// |---|---|---|
/// | f32, f16, bf16 | `d` elements | none |
/// | q8 | a byte per element: value + 128 | an f16 scale per group |
/// | q4 | per group a byte per two elements: element `j` in the low half of byte `j`, `j + half` in the high half, `half` the group's length / 2, rounded up | per group an f16 scale, then an f16 minimum |
/// | t4 | the outliers as in q8; then the others as in a single group of q4, with the number of a level, from the lowest of 16 | an f16 scale of the outliers, if there are any; an f16 scale of the others |
///
/// A last byte that has one element has zeros in its high half. Elements are in the order of channels; with outliers in
/// the [`ChannelOrder`](crate::ChannelOrder) of the pools. Rows of a rotated storage are the rotated ones. Nothing is decoded
/// or rounded, so a block that is exported and imported is the same bit for bit, in any pools of the same layout, storages
/// and channel order.
#[derive(Clone)]
pub struct HostBlock {
    memory: Memory,
}

enum Memory {
    Own(Vec<u8>),
    Shared(Arc<dyn AsRef<[u8]> + Send + Sync>),
    Lent(Box<dyn LentMemory>),
}

impl Clone for Memory {
    /// A copy of lent memory is ordinary memory.
    fn clone(&self) -> Self {
        match self {
            Memory::Own(bytes) => Memory::Own(bytes.clone()),
            Memory::Shared(bytes) => Memory::Shared(bytes.clone()),
            Memory::Lent(lent) => Memory::Own((**lent).as_ref().to_vec()),
        }
    }
}

/// Memory of a [`HostArena`] that one block uses. Dropping it gives it back. A device writes to memory of its own type alone
/// ([`HostBlock::lent_memory`]), whatever other types do.
pub trait LentMemory: Any + AsRef<[u8]> + AsMut<[u8]> + Send + Sync {
    /// How many bytes it has. Makes no reference to them, as a device may be writing them.
    fn n_bytes(&self) -> usize;
}

/// Memory of the host that is locked in place (pinned), so that a device copies to and from blocks in it by itself. It lives as long as
/// its blocks, which may outlive the pools.
pub trait HostArena: Send + Sync {
    /// A block in this memory, whose bytes mean nothing yet. `None` if there is no room for it: an ordinary block does as well, and is
    /// copied once more.
    fn block(&self, len: usize) -> Option<HostBlock>;

    fn usage(&self) -> ArenaUsage;
}

/// How much of a [`HostArena`] is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUsage {
    pub bytes: u64,
    /// Of them, those of blocks.
    pub lent_bytes: u64,
    /// How many blocks had no room.
    pub refused_blocks: u64,
}

impl fmt::Debug for HostBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBlock({} bytes)", self.n_bytes())
    }
}

impl PartialEq for HostBlock {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}
impl Eq for HostBlock {}

impl HostBlock {
    /// A block of zeros. [`Pools::block_bytes`](crate::Pools::block_bytes) returns the length that a transfer needs.
    ///
    /// # Errors
    /// The system refuses to allocate so many bytes.
    pub fn new(len: usize) -> Result<Self, DeviceError> {
        let mut bytes = Vec::new();
        let refused = |_| DeviceError::OutOfMemory { what: "block on the host", bytes: len as u64 };
        bytes.try_reserve_exact(len).map_err(refused)?;
        bytes.resize(len, 0);
        Ok(HostBlock { memory: Memory::Own(bytes) })
    }

    /// A block for an import, of bytes that others have too. They are copied if the block is written to.
    pub fn shared(bytes: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        HostBlock { memory: Memory::Shared(bytes) }
    }

    /// A block in lent memory. For implementations of [`HostArena`].
    pub fn lent(memory: Box<dyn LentMemory>) -> Self {
        HostBlock { memory: Memory::Lent(memory) }
    }

    /// The memory of a [`HostArena`] that the block has for itself. A device knows its own by the type, which it alone makes.
    pub fn lent_memory(&self) -> Option<&dyn Any> {
        match &self.memory {
            Memory::Lent(lent) => Some(&**lent),
            Memory::Own(_) | Memory::Shared(_) => None,
        }
    }

    /// Whether it is alone in memory of a [`HostArena`].
    pub fn is_lent(&self) -> bool {
        self.lent_memory().is_some()
    }

    /// How many bytes it has.
    pub fn n_bytes(&self) -> usize {
        match &self.memory {
            Memory::Own(bytes) => bytes.len(),
            Memory::Shared(bytes) => (**bytes).as_ref().len(),
            Memory::Lent(lent) => lent.n_bytes(),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Own(bytes) => bytes,
            Memory::Shared(bytes) => (**bytes).as_ref(),
            Memory::Lent(lent) => (**lent).as_ref(),
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if let Memory::Shared(bytes) = &self.memory {
            self.memory = Memory::Own((**bytes).as_ref().to_vec());
        }
        match &mut self.memory {
            Memory::Own(bytes) => bytes,
            Memory::Lent(lent) => (**lent).as_mut(),
            Memory::Shared(_) => unreachable!("it was copied above"),
        }
    }
}

/// So that a block can be kept as bytes of others ([`shared`](HostBlock::shared), `Bytes::from_owner`), wherever its memory is.
impl AsRef<[u8]> for HostBlock {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// A transfer that has begun. The pools keep its [`HostBlock`] until [`Pools::finished`](crate::Pools::finished)
/// returns it. If a transfer is dropped it still runs to its end, and its block is freed with the pools.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the pools hold the block until `finished` is asked for it"]
pub struct Transfer(u64);

impl Transfer {
    /// A transfer that differs from all others of this process. For implementations of [`Pools`](crate::Pools).
    #[allow(clippy::new_without_default)] // a device makes one for each transfer that it starts
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Transfer(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// A new transfer twice: for the caller, and for the pools to know it by.
    pub fn pair() -> (Self, Self) {
        let transfer = Transfer::new();
        let number = transfer.0;
        (transfer, Transfer(number))
    }
}

/// A transfer that did not begin: nothing has changed.
#[derive(Debug)]
pub struct TransferRefused {
    pub error: DeviceError,
    /// The caller's block, unchanged. Empty if the device hangs while it copies from the block or to it.
    pub block: HostBlock,
}

impl fmt::Display for TransferRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for TransferRefused {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<TransferRefused> for DeviceError {
    fn from(refused: TransferRefused) -> Self {
        refused.error
    }
}

/// The finished transfers of a device that copies at once, with the blocks that have not been collected yet.
#[derive(Debug, Default)]
pub struct FinishedTransfers(Vec<(Transfer, HostBlock)>);

impl FinishedTransfers {
    /// Adds a transfer that copied from or to `block`. `copied` is an error if the device refused it.
    pub fn add(
        &mut self,
        block: HostBlock,
        copied: Result<(), DeviceError>,
    ) -> Result<Transfer, TransferRefused> {
        if let Err(error) = copied {
            return Err(TransferRefused { error, block });
        }
        let (transfer, own) = Transfer::pair();
        self.0.push((own, block));
        Ok(transfer)
    }

    /// The block of a transfer. Never `None`: a transfer that is unknown is an error.
    pub fn take(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        let found = self.0.iter().position(|(finished, _)| finished == transfer);
        Some(found.map(|at| self.0.swap_remove(at).1).ok_or(DeviceError::UnknownTransfer))
    }
}

impl PoolSpec {
    /// Bytes of a [`HostBlock`] with `cells` cells of a layer group, for pools that store K and V in this spec's storages.
    /// `None` if there is no such group, or on overflow.
    pub fn block_bytes(&self, group: GroupId, cells: u32) -> Option<usize> {
        if usize::from(group.0) >= self.layout.n_groups() {
            return None;
        }
        let mut cell = 0u64;
        for (_, layer) in self.layout.owners().filter(|(_, layer)| layer.group == group) {
            let layer = u64::from(layer.n_kv_heads).checked_mul(layer.cell_bytes(self.k, self.v))?;
            cell = cell.checked_add(layer)?;
        }
        usize::try_from(cell.checked_mul(cells.into())?).ok()
    }

    /// Checks a transfer of `cells` of a layer group from or to a block of `len` bytes. `end` is the end of the cells that
    /// may be transferred.
    pub fn check_transfer(
        &self,
        group: GroupId,
        cells: CellRun,
        end: u32,
        len: usize,
    ) -> Result<(), DeviceError> {
        let n_groups = self.layout.n_groups();
        if usize::from(group.0) >= n_groups {
            let index = group.0.into();
            return Err(DeviceError::OutOfRange { what: "layer group", index, len: n_groups });
        }
        if cells.start.checked_add(cells.len).is_none_or(|last| last > end) {
            let index = cells.start.max(end) as usize;
            return Err(DeviceError::OutOfRange { what: "cell", index, len: end as usize });
        }
        match self.block_bytes(group, cells.len) {
            Some(expected) if expected == len => Ok(()),
            expected => Err(DeviceError::BlockSize { expected: expected.unwrap_or(usize::MAX), got: len }),
        }
    }
}
