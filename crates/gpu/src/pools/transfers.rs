//! Blocks that leave pools or enter them while steps run, by a [`Lane`].
//!
//! A lane's slots have a fixed size, which plans and the budget count. A larger block is moved in parts of whole cells.
use super::GpuPools;
use crate::driver::{Driver, HostMemory};
use crate::lane::{Job, Lane, Section, lane_bytes, lane_host_bytes};
use crate::side::PoolSide;
use kvist_cache::{CellRun, GroupId};
use kvist_device::*;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

/// Parts that are on their way at once. Further ones wait for the oldest.
const SLOTS: u32 = 4;
/// Bytes of a part, unless one cell has more.
const PART_BYTES: u64 = 2 << 20;
/// Most cells of a part.
const PART_CELLS: u32 = 64;

/// Cells that are moved at once.
fn part_cells(spec: &PoolSpec, group: GroupId) -> Option<u32> {
    let cell = (spec.block_bytes(group, 1)? as u64).max(1);
    let most = PART_CELLS.min(*spec.capacity_cells.get(usize::from(group.0))?).max(1);
    Some(u32::try_from(PART_BYTES / cell).unwrap_or(u32::MAX).clamp(1, most))
}

/// Bytes and cells of a slot, for every layer group. `None` on overflow.
fn slot_size(spec: &PoolSpec) -> Option<(u64, u32)> {
    // Every side of a part begins at a whole word.
    let padding = 8 * spec.layout.layers.len() as u64;
    let groups = (0..spec.layout.n_groups()).map(|g| {
        let group = GroupId(g as u16);
        let cells = part_cells(spec, group)?;
        Some(((spec.block_bytes(group, cells)? as u64).checked_add(padding)?, cells))
    });
    let groups = groups.collect::<Option<Vec<_>>>()?;
    Some((groups.iter().map(|group| group.0).max()?, groups.iter().map(|group| group.1).max()?))
}

/// Bytes of the buffers that transfers use. `None` on overflow.
pub fn bytes(spec: &PoolSpec) -> Option<u64> {
    let (bytes, cells) = slot_size(spec)?;
    lane_bytes(SLOTS, bytes, cells)
}

/// How many of these [`bytes`] lie in the host's memory.
pub fn host_bytes(spec: &PoolSpec) -> Option<u64> {
    lane_host_bytes(SLOTS, slot_size(spec)?.0)
}

/// The transfers of a cache's pools.
#[derive(Debug)]
pub struct Transfers<D: Driver> {
    gpu: Arc<D>,
    /// Made by the first transfer, of memory that was reserved with the pools.
    lane: Option<Lane<D>>,
    /// In the order in which they began.
    begun: Vec<(Transfer, HostBlock, State)>,
}

#[derive(Debug)]
enum State {
    /// The parts that have not ended, in order.
    Running(VecDeque<Part>),
    Ended(Result<(), DeviceError>),
}

/// A part of a block that is on its way.
#[derive(Debug)]
struct Part {
    job: Job,
    /// Where its rows lie; of downloads alone.
    places: Option<Vec<Place>>,
}

/// Where the rows of a side lie in the block, and in a part whose sides begin at whole words.
#[derive(Clone, Copy, Debug)]
struct Place {
    dense: usize,
    aligned: usize,
    len: usize,
}

impl<D: Driver> Transfers<D> {
    pub fn new(gpu: &Arc<D>) -> Self {
        Transfers { gpu: gpu.clone(), lane: None, begun: Vec::new() }
    }

    /// The lane, with a slot for one more part. `block` and `parts` are of the transfer that is about to begin.
    fn lane(
        &mut self,
        spec: &PoolSpec,
        block: &mut HostBlock,
        parts: &mut VecDeque<Part>,
    ) -> Result<&mut Lane<D>, DeviceError> {
        if self.lane.is_none() {
            let overflow = DeviceError::OutOfMemory { what: "blocks in transfer", bytes: u64::MAX };
            let (bytes, cells) = slot_size(spec).ok_or(overflow)?;
            self.lane = Some(Lane::new(&self.gpu, HostMemory::Pinned, SLOTS, bytes, cells)?);
        }
        while self.lane.as_mut().is_some_and(Lane::is_full) {
            if !self.settle_oldest_download() {
                settle_part(self.lane.as_mut(), block, parts)?;
            }
        }
        self.lane.as_mut().ok_or(DeviceError::UnknownTransfer)
    }

    /// Waits for a download and copies its bytes to its block. `false` if there is none.
    fn settle_oldest_download(&mut self) -> bool {
        let downloads = |(_, _, state): &&mut (_, _, State)| matches!(state, State::Running(parts) if parts.iter().any(|part| part.places.is_some()));
        let oldest = self.begun.iter_mut().find(downloads);
        let found = oldest.is_some();
        if let Some((_, block, state)) = oldest {
            settle(self.lane.as_mut(), block, state);
        }
        found
    }

    /// Waits for all transfers: before buffers are replaced.
    pub fn settle_all(&mut self) {
        for (_, block, state) in &mut self.begun {
            settle(self.lane.as_mut(), block, state);
        }
        if let Some(lane) = &mut self.lane {
            let _ = lane.wait_all(); // transfers whose pools were dropped report nothing; an error stays with the device
        }
    }

    /// The next transfer makes a lane for other sizes of blocks. Call it after [`settle_all`](Self::settle_all).
    pub fn drop_lane(&mut self) {
        self.lane = None;
    }

    pub fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        let Some(at) = self.begun.iter().position(|(begun, ..)| begun == transfer) else {
            return Some(Err(DeviceError::UnknownTransfer));
        };
        let (_, block, state) = &mut self.begun[at];
        if let (State::Running(parts), Some(lane)) = (&*state, &self.lane)
            && !parts.iter().all(|part| lane.is_done(part.job))
            && self.gpu.check().is_ok()
        {
            return None;
        }
        settle(self.lane.as_mut(), block, state);
        let (_, block, state) = self.begun.remove(at);
        match state {
            State::Ended(Err(error)) => Some(Err(error)),
            _ => Some(Ok(block)),
        }
    }

    fn begin(&mut self, block: HostBlock, parts: VecDeque<Part>) -> Transfer {
        let (transfer, own) = Transfer::pair();
        self.begun.push((own, block, State::Running(parts)));
        transfer
    }
}

/// Waits for a transfer.
fn settle<D: Driver>(mut lane: Option<&mut Lane<D>>, block: &mut HostBlock, state: &mut State) {
    let State::Running(parts) = state else { return };
    let mut ended = Ok(());
    while !parts.is_empty() {
        // The others are waited for after an error, too: their slots become free.
        ended = ended.and(settle_part(lane.as_deref_mut(), block, parts));
    }
    *state = State::Ended(ended);
}

/// Waits for the first part of a transfer.
fn settle_part<D: Driver>(
    lane: Option<&mut Lane<D>>,
    block: &mut HostBlock,
    parts: &mut VecDeque<Part>,
) -> Result<(), DeviceError> {
    let (Some(part), Some(lane)) = (parts.pop_front(), lane) else {
        return Err(DeviceError::UnknownTransfer);
    };
    match part.places {
        None => lane.wait(part.job).map(|_| ()),
        Some(places) => lane.read(part.job, |bytes| {
            for Place { dense, aligned, len } in places {
                block.bytes_mut()[dense..dense + len].copy_from_slice(&bytes[aligned..aligned + len]);
            }
        }),
    }
}

/// The sections of a part, where they lie, and the bytes of the part with sides at whole words.
struct Sections<'a, D: Driver> {
    all: Vec<Section<'a, D>>,
    places: Vec<Place>,
    bytes: u64,
}

impl<'a, D: Driver> Sections<'a, D> {
    /// Those of `n` cells from cell `first` on of a block of `of` cells. `None` if a row is too large for the kernels, which
    /// count bytes in 32 bits.
    fn new(sides: impl Iterator<Item = &'a PoolSide<D>>, (first, n, of): (u32, u32, u32)) -> Option<Self> {
        let mut sections = Sections { all: Vec::new(), places: Vec::new(), bytes: 0 };
        let mut side_at = 0u64;
        for side in sides {
            let row_bytes = u32::try_from(side.storage.row_bytes(side.dim)).ok()?;
            let cell = u64::from(row_bytes) * u64::from(side.heads);
            let first_byte = u32::try_from(sections.bytes).ok()?;
            sections.all.extend(side.parts.iter().map(|(first_head, heads, pool)| Section {
                first_byte,
                row_bytes,
                block_heads: side.heads,
                first_head: *first_head,
                heads: *heads,
                words: side.words,
                cells: side.cells,
                pool,
            }));
            let len = cell * u64::from(n);
            let dense = usize::try_from(side_at + cell * u64::from(first)).ok()?;
            let len_bytes = usize::try_from(len).ok()?;
            sections.places.push(Place { dense, aligned: first_byte as usize, len: len_bytes });
            side_at += cell * u64::from(of);
            sections.bytes += len.next_multiple_of(4);
        }
        u32::try_from(sections.bytes).ok()?;
        Some(sections)
    }

    /// The bytes of the part, out of the block.
    fn pack<'b>(&self, block: &'b [u8]) -> Cow<'b, [u8]> {
        if self.bytes == block.len() as u64 {
            return block.into(); // the whole block, and every side is whole words
        }
        let mut part = vec![0; self.bytes as usize];
        for Place { dense, aligned, len } in &self.places {
            part[*aligned..aligned + len].copy_from_slice(&block[*dense..dense + len]);
        }
        part.into()
    }
}

/// A run of cells in parts of `most`: the first cell of the run, and how many.
fn split(cells: CellRun, most: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..cells.len).step_by(most as usize).map(move |first| (first, most.min(cells.len - first)))
}

impl<D: Driver> GpuPools<D> {
    pub(super) fn start_export(
        &mut self,
        group: GroupId,
        cells: CellRun,
        mut into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let end = self.cells_of(group);
        let begun = self.spec.check_transfer(group, cells, end, into.bytes().len());
        let begun = begun.and_then(|()| self.gpu.check());
        match begun.and_then(|()| self.move_parts(group, cells, &mut into, true)) {
            Ok(parts) => Ok(self.transfers.begin(into, parts)),
            Err(error) => Err(TransferRefused { error, block: into }),
        }
    }

    pub(super) fn start_import(
        &mut self,
        group: GroupId,
        cells: CellRun,
        mut from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        let capacity = self.spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
        let begun = self.spec.check_transfer(group, cells, capacity, from.bytes().len());
        let begun = begun.and_then(|()| self.gpu.check());
        let begun = begun.and_then(|()| self.grow(|grown| if grown == group { cells.end() } else { 0 }));
        self.stale();
        match begun.and_then(|()| self.move_parts(group, cells, &mut from, false)) {
            Ok(parts) => {
                if let Some(recents) = &mut self.recents {
                    recents.plan.forget(group, cells);
                }
                Ok(self.transfers.begin(from, parts))
            }
            Err(error) => Err(TransferRefused { error, block: from }),
        }
    }

    /// Starts to copy cells to a block, or from it, part by part. After an error nothing of it is on its way.
    fn move_parts(
        &mut self,
        group: GroupId,
        cells: CellRun,
        block: &mut HostBlock,
        out: bool,
    ) -> Result<VecDeque<Part>, DeviceError> {
        let mut parts = VecDeque::new();
        let moved = self.try_move_parts(group, cells, block, out, &mut parts);
        if let Err(error) = moved {
            settle(self.transfers.lane.as_mut(), block, &mut State::Running(parts));
            return Err(error);
        }
        self.counters.bytes_moved += block.bytes().len() as u64;
        Ok(parts)
    }

    fn try_move_parts(
        &mut self,
        group: GroupId,
        cells: CellRun,
        block: &mut HostBlock,
        out: bool,
        parts: &mut VecDeque<Part>,
    ) -> Result<(), DeviceError> {
        let len = block.bytes().len();
        let too_large = || DeviceError::OutOfMemory { what: "blocks in transfer", bytes: len as u64 };
        let most = part_cells(&self.spec, group).ok_or_else(too_large)?;
        let GpuPools { spec, layers, transfers, .. } = self;
        // Layers that own nothing have nothing to move.
        for (first, n) in split(cells, most).filter(|_| len > 0) {
            let sides = super::sides_of(spec, layers, group);
            let sections = Sections::new(sides, (first, n, cells.len)).ok_or_else(too_large)?;
            let table: Vec<u32> = (cells.start + first..cells.start + first + n).collect();
            let lane = transfers.lane(spec, block, parts)?;
            parts.push_back(match out {
                true => {
                    let job = lane.download(sections.bytes, &table, &sections.all)?;
                    Part { job, places: Some(sections.places) }
                }
                false => {
                    let bytes = sections.pack(block.bytes());
                    Part { job: lane.upload(&bytes, &table, &sections.all, false)?, places: None }
                }
            });
        }
        Ok(())
    }
}
