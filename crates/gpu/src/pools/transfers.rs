//! Blocks that leave pools or enter them while steps run, by a [`Lane`].
use super::GpuPools;
use crate::driver::{Driver, HostMemory};
use crate::lane::{Job, Lane, Section, lane_bytes};
use crate::side::PoolSide;
use kvist_cache::{CellRun, GroupId};
use kvist_device::*;
use std::borrow::Cow;
use std::sync::Arc;

/// Transfers that are on their way at once. Further ones wait for the oldest.
const SLOTS: u32 = 4;

/// The transfers of a cache's pools.
#[derive(Debug)]
pub struct Transfers<D: Driver> {
    gpu: Arc<D>,
    /// Made by the first transfer, and again by one that is larger than all before.
    lane: Option<Lane<D>>,
    block_bytes: u64,
    max_cells: u32,
    /// In the order in which they began.
    begun: Vec<(Transfer, HostBlock, State)>,
}

#[derive(Debug)]
enum State {
    Upload(Job),
    Download(Job, Vec<Place>),
    Ended(Result<(), DeviceError>),
}

/// Where the rows of a side lie in a block, and in a block whose sides begin at whole words.
#[derive(Clone, Copy, Debug)]
struct Place {
    dense: usize,
    aligned: usize,
    len: usize,
}

impl<D: Driver> Transfers<D> {
    pub fn new(gpu: &Arc<D>) -> Self {
        Transfers { gpu: gpu.clone(), lane: None, block_bytes: 0, max_cells: 0, begun: Vec::new() }
    }

    /// A lane with room for one more transfer.
    fn lane(
        &mut self,
        bytes: u64,
        cells: u32,
        scratch: &mut Reservation,
    ) -> Result<&mut Lane<D>, DeviceError> {
        if self.lane.is_none() || bytes > self.block_bytes || cells > self.max_cells {
            self.settle_all();
            let (bytes, cells) = (bytes.max(self.block_bytes), cells.max(self.max_cells));
            let overflow = DeviceError::OutOfMemory { what: "blocks in transfer", bytes: u64::MAX };
            let total = lane_bytes(SLOTS, bytes, cells).ok_or(overflow)?;
            if self.lane.take().is_some() {
                scratch.shrink(lane_bytes(SLOTS, self.block_bytes, self.max_cells).unwrap_or(0));
            }
            scratch.grow(total)?;
            match Lane::new(&self.gpu, HostMemory::Pinned, SLOTS, bytes, cells) {
                Ok(lane) => (self.lane, self.block_bytes, self.max_cells) = (Some(lane), bytes, cells),
                Err(error) => {
                    scratch.shrink(total);
                    return Err(error);
                }
            }
        }
        while self.lane.as_mut().is_some_and(|lane| lane.is_full()) {
            self.settle_oldest_download();
        }
        self.lane.as_mut().ok_or(DeviceError::UnknownTransfer)
    }

    /// Waits for a download and copies its bytes to its block.
    fn settle_oldest_download(&mut self) {
        let downloads = |(_, _, state): &&mut (_, _, State)| matches!(state, State::Download(..));
        if let Some((_, block, state)) = self.begun.iter_mut().find(downloads) {
            settle(self.lane.as_mut(), block, state);
        }
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

    pub fn finished(&mut self, transfer: &Transfer) -> Option<Result<HostBlock, DeviceError>> {
        let Some(at) = self.begun.iter().position(|(begun, ..)| begun == transfer) else {
            return Some(Err(DeviceError::UnknownTransfer));
        };
        let (_, block, state) = &mut self.begun[at];
        let job = match state {
            State::Upload(job) | State::Download(job, _) => Some(*job),
            State::Ended(_) => None,
        };
        if let (Some(job), Some(lane)) = (job, &self.lane)
            && !lane.is_done(job)
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

    fn begin(&mut self, block: HostBlock, state: State) -> Transfer {
        let (transfer, own) = Transfer::pair();
        self.begun.push((own, block, state));
        transfer
    }
}

/// Waits for a transfer.
fn settle<D: Driver>(lane: Option<&mut Lane<D>>, block: &mut HostBlock, state: &mut State) {
    let Some(lane) = lane else { return };
    let ended = match &*state {
        State::Ended(_) => return,
        State::Upload(job) => lane.wait(*job).map(|_| ()),
        State::Download(job, places) => lane.read(*job, |bytes| {
            for Place { dense, aligned, len } in places {
                block.bytes_mut()[*dense..dense + len].copy_from_slice(&bytes[*aligned..aligned + len]);
            }
        }),
    };
    *state = State::Ended(ended);
}

/// The sections of a block, where they lie, and the bytes of the block with sides at whole words.
struct Blocks<'a, D: Driver> {
    sections: Vec<Section<'a, D>>,
    places: Vec<Place>,
    bytes: u64,
}

impl<'a, D: Driver> Blocks<'a, D> {
    /// `None` if the block is too large for the kernels, which count bytes in 32 bits.
    fn new(sides: impl Iterator<Item = &'a PoolSide<D>>, cells: CellRun) -> Option<Self> {
        let mut blocks = Blocks { sections: Vec::new(), places: Vec::new(), bytes: 0 };
        let mut dense = 0usize;
        for side in sides {
            let row_bytes = u32::try_from(side.storage.row_bytes(side.dim)).ok()?;
            let len = u64::from(row_bytes) * u64::from(side.heads) * u64::from(cells.len);
            let first_byte = u32::try_from(blocks.bytes).ok()?;
            blocks.sections.extend(side.parts.iter().map(|(first_head, heads, pool)| Section {
                first_byte,
                row_bytes,
                block_heads: side.heads,
                first_head: *first_head,
                heads: *heads,
                words: side.words,
                cells: side.cells,
                pool,
            }));
            let len = usize::try_from(len).ok()?;
            blocks.places.push(Place { dense, aligned: first_byte as usize, len });
            dense += len;
            blocks.bytes += (len as u64).next_multiple_of(4);
        }
        u32::try_from(blocks.bytes).ok()?;
        Some(blocks)
    }
}

fn too_large(bytes: usize) -> DeviceError {
    DeviceError::Unsupported(format!(
        "a block of {bytes} bytes; the device transfers less than 4 GiB at once"
    ))
}

impl<D: Driver> GpuPools<D> {
    pub(super) fn start_export(
        &mut self,
        group: GroupId,
        cells: CellRun,
        into: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        match self.try_export(group, cells, &into) {
            Ok(state) => Ok(self.transfers.begin(into, state)),
            Err(error) => Err(TransferRefused { error, block: into }),
        }
    }

    fn try_export(&mut self, group: GroupId, cells: CellRun, into: &HostBlock) -> Result<State, DeviceError> {
        let len = into.bytes().len();
        self.spec.check_transfer(group, cells, self.cells_of(group), len)?;
        self.gpu.check()?;
        let GpuPools { spec, layers, transfers, scratch, .. } = self;
        let blocks =
            Blocks::new(super::sides_of(spec, layers, group), cells).ok_or_else(|| too_large(len))?;
        self.counters.bytes_moved += len as u64;
        if len == 0 {
            return Ok(State::Ended(Ok(())));
        }
        let table: Vec<u32> = cells.cells().collect();
        let lane = transfers.lane(blocks.bytes, cells.len, scratch)?;
        let job = lane.download(blocks.bytes, &table, &blocks.sections)?;
        Ok(State::Download(job, blocks.places))
    }

    pub(super) fn start_import(
        &mut self,
        group: GroupId,
        cells: CellRun,
        from: HostBlock,
    ) -> Result<Transfer, TransferRefused> {
        match self.try_import(group, cells, from.bytes()) {
            Ok(state) => Ok(self.transfers.begin(from, state)),
            Err(error) => Err(TransferRefused { error, block: from }),
        }
    }

    fn try_import(&mut self, group: GroupId, cells: CellRun, from: &[u8]) -> Result<State, DeviceError> {
        let capacity = self.spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
        self.spec.check_transfer(group, cells, capacity, from.len())?;
        self.gpu.check()?;
        self.grow(|grown| if grown == group { cells.end() } else { 0 })?;
        self.stale();
        let GpuPools { spec, layers, transfers, scratch, .. } = self;
        let blocks =
            Blocks::new(super::sides_of(spec, layers, group), cells).ok_or_else(|| too_large(from.len()))?;
        if !from.is_empty() {
            let mut aligned = Cow::Borrowed(from);
            if blocks.bytes != from.len() as u64 {
                // Some side is not whole words.
                let mut padded = vec![0; blocks.bytes as usize];
                for place in &blocks.places {
                    let row = &from[place.dense..place.dense + place.len];
                    padded[place.aligned..place.aligned + place.len].copy_from_slice(row);
                }
                aligned = padded.into();
            }
            let table: Vec<u32> = cells.cells().collect();
            let lane = transfers.lane(blocks.bytes, cells.len, scratch)?;
            let job = lane.upload(&aligned, &table, &blocks.sections, false)?;
            self.imported(group, cells, from.len());
            return Ok(State::Upload(job));
        }
        self.imported(group, cells, 0);
        Ok(State::Ended(Ok(())))
    }

    fn imported(&mut self, group: GroupId, cells: CellRun, bytes: usize) {
        if let Some(recents) = &mut self.recents {
            recents.plan.forget(group, cells);
        }
        self.counters.bytes_moved += bytes as u64;
    }
}
