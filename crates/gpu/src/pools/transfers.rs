//! Blocks that leave pools or enter them while steps run, by a [`Lane`].
//!
//! A lane's slots have a fixed size, which plans and the budget count. A larger block is moved in parts: some sides of all its cells,
//! which lie together in the block, or where not even a side fits, some cells of all sides. In pinned memory ([`Pools::pin_host`]) those
//! are some cells of one side, so that a part is one piece there, which the device copies alone; others pass through the slot's own.
use super::GpuPools;
use crate::driver::{Arena, Driver, HostMemory};
use crate::lane::{Job, Lane, Pinned, Section, lane_bytes, lane_host_bytes};
use crate::side::PoolSide;
use kvist_cache::{CellRun, GroupId};
use kvist_device::*;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
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
    let bytes = (0..spec.layout.n_groups()).map(|g| {
        let group = GroupId(g as u16);
        (spec.block_bytes(group, part_cells(spec, group)?)? as u64).checked_add(padding)
    });
    let bytes = bytes.collect::<Option<Vec<_>>>()?.into_iter().max()?;
    // Parts of few sides have more cells than those of all.
    Some((bytes, PART_CELLS.min(spec.capacity_cells.iter().copied().max()?).max(1)))
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
    /// Pinned memory of blocks.
    arena: Option<D::Buffer>,
    /// In the order in which they began.
    begun: Vec<(Transfer, HostBlock, State)>,
}

impl<D: Driver> Drop for Transfers<D> {
    /// The device copies from and to the blocks until their transfers have ended: only then do they give their memory back.
    fn drop(&mut self) {
        self.settle_all();
    }
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
    /// Where its rows lie; of downloads that the host copies to the block, alone.
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
        Transfers { gpu: gpu.clone(), lane: None, arena: None, begun: Vec::new() }
    }

    pub fn pin_host(&mut self, bytes: u64) -> Result<Option<Arc<dyn HostArena>>, DeviceError> {
        let Some(Arena { buffer, blocks }) = self.gpu.arena(bytes)? else { return Ok(None) };
        self.arena = Some(buffer);
        Ok(Some(blocks))
    }

    /// Makes the lane, and room for one more part. `block` and `parts` are of the transfer that is about to begin.
    fn make_room(
        &mut self,
        spec: &PoolSpec,
        block: &mut HostBlock,
        parts: &mut VecDeque<Part>,
    ) -> Result<(), DeviceError> {
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
        Ok(())
    }

    /// Waits for a download and copies its bytes to its block. `false` if there is none.
    fn settle_oldest_download(&mut self) -> bool {
        let is_download = |state: &State| match state {
            State::Running(parts) => parts.iter().any(|part| part.places.is_some()),
            State::Ended(_) => false,
        };
        let oldest = self.begun.iter_mut().find(|(_, _, state)| is_download(state));
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

/// Waits for a transfer. `block`, which may be in pinned memory, is empty afterwards if the lane hangs.
fn settle<D: Driver>(mut lane: Option<&mut Lane<D>>, block: &mut HostBlock, state: &mut State) {
    let State::Running(parts) = state else { return };
    let mut ended = Ok(());
    while !parts.is_empty() {
        // The others are waited for after an error, too: their slots become free, and the device is done with the block.
        ended = ended.and(settle_part(lane.as_deref_mut(), block, parts));
        if lane.as_ref().is_some_and(|lane| lane.hangs()) {
            break;
        }
    }
    *state = State::Ended(ended);
    if D::HAS_ARENAS && lane.is_some_and(|lane| lane.hangs()) {
        // The device may still copy from the block or to it, at any time: its memory is never used again.
        std::mem::forget(std::mem::replace(block, HostBlock::shared(Arc::new([]))));
    }
}

/// Waits for the first part of a transfer. Before the host writes to the block, the copies of the device to it have ended.
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
        Some(places) => {
            for pinned in parts.iter().filter(|part| part.places.is_none()) {
                lane.wait(pinned.job)?;
            }
            lane.read(part.job, |bytes| {
                let block = block.bytes_mut();
                for Place { dense, aligned, len } in places {
                    block[dense..dense + len].copy_from_slice(&bytes[aligned..aligned + len]);
                }
            })
        }
    }
}

/// The sections of a part, where they lie, and the bytes of the part with sides at whole words.
struct Sections<'a, D: Driver> {
    all: Vec<Section<'a, D>>,
    places: Vec<Place>,
    bytes: u64,
}

impl<'a, D: Driver> Sections<'a, D> {
    /// Those of a part of a block of `of` cells. `None` if a row is too large for the kernels, which count bytes in 32 bits.
    fn new(sides: impl Iterator<Item = &'a PoolSide<D>>, part: &Split, of: u32) -> Option<Self> {
        let mut sections = Sections { all: Vec::new(), places: Vec::new(), bytes: 0 };
        let mut side_at = 0u64;
        for (i, side) in sides.enumerate().take_while(|(i, _)| *i < part.sides.end) {
            let row_bytes = u32::try_from(side.storage.row_bytes(side.dim)).ok()?;
            let cell = u64::from(row_bytes) * u64::from(side.heads);
            let dense = usize::try_from(side_at + cell * u64::from(part.first)).ok()?;
            side_at += cell * u64::from(of);
            if i < part.sides.start {
                continue;
            }
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
            let len = cell * u64::from(part.n);
            let len_bytes = usize::try_from(len).ok()?;
            sections.places.push(Place { dense, aligned: first_byte as usize, len: len_bytes });
            sections.bytes += len.next_multiple_of(4);
        }
        u32::try_from(sections.bytes).ok()?;
        Some(sections)
    }

    /// The bytes of the block that are those of the part, if they lie there as in the part.
    fn run(&self) -> Option<Range<usize>> {
        let (first, last) = (self.places.first()?.dense, self.places.last()?);
        let len = last.aligned + last.len;
        let alike = self.places.iter().all(|place| place.dense == first + place.aligned);
        (alike && len as u64 == self.bytes).then_some(first..first + len)
    }

    /// The bytes of the part, out of the block.
    fn pack<'b>(&self, block: &'b [u8]) -> Cow<'b, [u8]> {
        if let Some(run) = self.run() {
            return block[run].into();
        }
        let mut part = vec![0; self.bytes as usize];
        for Place { dense, aligned, len } in &self.places {
            part[*aligned..aligned + len].copy_from_slice(&block[*dense..dense + len]);
        }
        part.into()
    }

    /// The part of a block at this byte of pinned memory, if it is one piece there.
    fn pinned<'b>(&self, buffer: &'b D::Buffer, block_at: u64) -> Option<Pinned<'b, D>> {
        let first_byte = block_at + self.run()?.start as u64;
        first_byte.is_multiple_of(4).then_some(Pinned { buffer, first_byte, bytes: self.bytes })
    }
}

/// What is moved at once: `n` cells of some sides, from cell `first` of a block on.
#[derive(Clone, Debug, PartialEq)]
struct Split {
    sides: Range<usize>,
    first: u32,
    n: u32,
}

/// Cells of a part of one side, whose cells have so many bytes, for a slot of `(bytes, cells)`. A multiple of four if it can be, so that
/// the next part begins at a whole word of the block.
fn run_cells(side_cell: u64, slot: (u64, u32)) -> u32 {
    let most = u32::try_from(slot.0 / 4 * 4 / side_cell.max(1)).unwrap_or(u32::MAX).clamp(1, slot.1);
    if most < 4 { most } else { most / 4 * 4 }
}

/// Parts of a block of `cells` cells: of as many whole sides as fit into a slot of `(bytes, cells)`. If a side does not, of all sides and
/// at most `part_cells` cells, which are the fewest parts; of one side each if the block is in pinned memory. `side_cells`: bytes of a cell
/// of each side.
fn split(side_cells: &[u64], cells: u32, slot: (u64, u32), part_cells: u32, is_pinned: bool) -> Vec<Split> {
    let bytes = |cell: &u64| cell.saturating_mul(cells.into()).next_multiple_of(4);
    if cells > slot.1 || side_cells.iter().any(|cell| bytes(cell) > slot.0) {
        let parts = |sides: Range<usize>, most: u32| {
            let part = move |first| Split { sides: sides.clone(), first, n: most.min(cells - first) };
            (0..cells).step_by(most as usize).map(part)
        };
        return match is_pinned {
            false => parts(0..side_cells.len(), part_cells).collect(),
            true => {
                let runs = |(i, cell): (usize, &u64)| parts(i..i + 1, run_cells(*cell, slot));
                side_cells.iter().enumerate().flat_map(runs).collect()
            }
        };
    }
    let (mut parts, mut taken) = (Vec::<Split>::new(), 0);
    for (i, cell) in side_cells.iter().enumerate() {
        match parts.last_mut() {
            Some(part) if taken + bytes(cell) <= slot.0 => {
                part.sides.end = i + 1;
                taken += bytes(cell);
            }
            _ => {
                parts.push(Split { sides: i..i + 1, first: 0, n: cells });
                taken = bytes(cell);
            }
        }
    }
    parts
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

    /// Starts to copy cells to a block, or from it, part by part. After an error nothing of it is on its way, or the block is empty, because
    /// the device hangs.
    fn move_parts(
        &mut self,
        group: GroupId,
        cells: CellRun,
        block: &mut HostBlock,
        out: bool,
    ) -> Result<VecDeque<Part>, DeviceError> {
        let mut parts = VecDeque::new();
        let bytes = block.n_bytes() as u64;
        let moved = self.try_move_parts(group, cells, block, out, &mut parts);
        if let Err(error) = moved {
            settle(self.transfers.lane.as_mut(), block, &mut State::Running(parts));
            return Err(error);
        }
        self.counters.bytes_moved += bytes;
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
        let len = block.n_bytes();
        let too_large = || DeviceError::OutOfMemory { what: "blocks in transfer", bytes: len as u64 };
        let most = part_cells(&self.spec, group).ok_or_else(too_large)?;
        let slot = slot_size(&self.spec).ok_or_else(too_large)?;
        let GpuPools { spec, layers, transfers, counters, .. } = self;
        let cell_bytes = |side: &PoolSide<D>| side.storage.row_bytes(side.dim) * u64::from(side.heads);
        let side_cells: Vec<u64> = super::sides_of(spec, layers, group).map(cell_bytes).collect();
        // Where it lies in pinned memory. Asked before the first part is on its way: from then on the host makes no reference to bytes that
        // the device may be writing.
        let place = transfers.arena.as_ref().and_then(|arena| match out {
            // What others have too is not written to.
            true => transfers.gpu.lease(arena, block),
            false => transfers.gpu.place(arena, block.bytes()),
        });
        // Layers that own nothing have nothing to move.
        let splits =
            if len > 0 { split(&side_cells, cells.len, slot, most, place.is_some()) } else { Vec::new() };
        for part in splits {
            let sides = super::sides_of(spec, layers, group);
            let sections = Sections::new(sides, &part, cells.len).ok_or_else(too_large)?;
            let first = cells.start + part.first;
            let table: Vec<u32> = (first..first + part.n).collect();
            transfers.make_room(spec, block, parts)?;
            let Some(lane) = &mut transfers.lane else { return Err(DeviceError::UnknownTransfer) };
            let arena = transfers.arena.as_ref();
            let pinned = arena.zip(place).and_then(|(arena, at)| sections.pinned(arena, at));
            if pinned.is_none() {
                counters.bytes_staged += sections.bytes;
            }
            let job = match (out, &pinned) {
                (true, Some(pinned)) => lane.download_pinned(pinned, &table, &sections.all)?,
                (true, None) => lane.download(sections.bytes, &table, &sections.all)?,
                (false, Some(pinned)) => lane.upload_pinned(pinned, &table, &sections.all, false)?,
                (false, None) => lane.upload(&sections.pack(block.bytes()), &table, &sections.all, false)?,
            };
            let places = (out && pinned.is_none()).then_some(sections.places);
            parts.push_back(Part { job, places });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte is moved once, no part is larger than a slot, and parts of whole sides are as few as can be in order.
    #[test]
    fn parts_cover_a_block() {
        for (side_cells, cells, slot, part_cells, expected, expected_pinned) in [
            (&[100, 100, 100, 100][..], 16, (3200, 64), 8, 2, 2),
            (&[100, 100, 100], 16, (3200, 64), 8, 2, 2),
            (&[100, 30, 100, 30], 16, (2100, 64), 8, 2, 2),
            // A side that is too large, and too many cells.
            (&[300, 100], 16, (3200, 64), 8, 2, 3),
            (&[300, 100], 16, (300, 64), 1, 16, 22),
            (&[1, 1], 65, (3200, 64), 64, 2, 4),
            (&[66, 66], 130, (1 << 20, 64), 64, 3, 6),
            (&[5, 7, 3], 1, (20, 1), 1, 1, 1),
            (&[5, 7, 3], 1, (15, 1), 1, 2, 2),
            (&[], 16, (100, 64), 8, 0, 0),
        ] {
            for (is_pinned, expected) in [(false, expected), (true, expected_pinned)] {
                let parts = split(side_cells, cells, slot, part_cells, is_pinned);
                assert_eq!(parts.len(), expected, "{side_cells:?} {parts:?}");
                assert!(!is_pinned || cells <= slot.1 || parts.iter().all(|part| part.sides.len() == 1));
                let mut moved = vec![0; side_cells.len() * cells as usize];
                for Split { sides, first, n } in parts {
                    assert!(n <= slot.1 && n > 0);
                    let bytes = |i: usize| (side_cells[i] * u64::from(n)).next_multiple_of(4);
                    assert!(n == part_cells || sides.clone().map(bytes).sum::<u64>() <= slot.0);
                    for side in sides {
                        (first..first + n).for_each(|cell| moved[side * cells as usize + cell as usize] += 1);
                    }
                }
                assert!(moved.iter().all(|times| *times == 1), "{side_cells:?}");
            }
        }
    }
}
