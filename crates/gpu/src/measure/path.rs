//! The way of a step's rows, in parts.
use super::{Epoch, PartSpans, RowsFrom, Span, TransferCase};
use crate::driver::{Arena, Driver, HostMemory};
use crate::lane::{Job, Lane, Pinned, Section};
use half::slice::HalfFloatSliceExt;
use kvist_device::{DeviceError, HostBlock, f16};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Cells of the pool that steps write to, at least.
const CELLS: u32 = 1024;
/// Bytes of a part, unless one side of a layer has more: the host packs a part while the device copies the one before.
const PART_BYTES: u32 = 4 << 20;

pub struct Path<D: Driver> {
    case: TransferCase,
    lane: Lane<D>,
    /// K and V of each layer: `[heads, cells, row]`.
    pools: Vec<D::Buffer>,
    cells: u32,
    /// First cell of each block of the page table, in the order of positions: no two neighbours lie beside each other.
    blocks: Vec<u32>,
    /// Bytes of one side of a layer, whole words.
    side_bytes: u32,
    rows: Vec<f32>, // [tokens, heads, dim]: what the host computed for one side of a layer
    /// The rows of all sides, if they are not packed.
    resident: Option<Resident<D>>,
}

/// A block in pinned memory that the device copies from.
struct Resident<D: Driver> {
    arena: D::Buffer,
    first_byte: u64,
    /// Keeps the memory.
    _block: HostBlock,
}

impl<D: Driver> Resident<D> {
    fn new(gpu: &Arc<D>, sides: u32, side_bytes: u32, rows: &[f32]) -> Result<Self, DeviceError> {
        let none = || {
            DeviceError::Unsupported(format!("{} has no memory of blocks that it copies by itself", D::NAME))
        };
        let bytes = u64::from(sides) * u64::from(side_bytes);
        // Room for what an arena rounds up.
        let Arena { buffer: arena, blocks } = gpu.arena(bytes + 4096)?.ok_or_else(none)?;
        let mut block = blocks.block(bytes as usize).ok_or_else(none)?;
        block.bytes_mut().chunks_mut(side_bytes as usize).for_each(|side| pack(rows, side));
        let first_byte = gpu.lease(&arena, &block).ok_or_else(none)?;
        Ok(Resident { arena, first_byte, _block: block })
    }
}

/// Writes numbers as f16. Bytes behind them become 0.
fn pack(rows: &[f32], to: &mut [u8]) {
    // Pieces that stay in the processor's nearest cache.
    let mut halves = [f16::ZERO; 512];
    let (numbers, rest) = to.split_at_mut(2 * rows.len());
    for (rows, to) in rows.chunks(halves.len()).zip(numbers.chunks_mut(2 * halves.len())) {
        let halves = &mut halves[..rows.len()];
        halves.convert_from_f32_slice(rows);
        for (to, x) in to.chunks_exact_mut(2).zip(halves) {
            to.copy_from_slice(&x.to_le_bytes());
        }
    }
    rest.fill(0);
}

/// Writes sides of so many bytes, on a thread for each MiB: starting one takes a small part of the time that it packs.
fn pack_sides(rows: &[f32], side_bytes: usize, to: &mut [u8]) {
    let sides = to.len() / side_bytes.max(1);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let each = sides.div_ceil((to.len() >> 20).clamp(1, cores)).max(1) * side_bytes.max(1);
    let pack_some = |to: &mut [u8]| to.chunks_mut(side_bytes.max(1)).for_each(|side| pack(rows, side));
    thread::scope(|scope| {
        let mut chunks = to.chunks_mut(each);
        let own = chunks.next();
        chunks.for_each(|chunk| drop(scope.spawn(|| pack_some(chunk))));
        own.into_iter().for_each(pack_some);
    });
}

/// Sides of each part.
fn parts(sides: u32, side_bytes: u32) -> impl Iterator<Item = Range<u32>> {
    let most = (PART_BYTES / side_bytes.max(1)).max(1);
    (0..sides).step_by(most as usize).map(move |first| first..sides.min(first + most))
}

impl<D: Driver> Path<D> {
    pub fn new(gpu: &Arc<D>, case: &TransferCase) -> Result<Self, DeviceError> {
        let too_much = || DeviceError::OutOfMemory { what: "KV cache", bytes: u64::MAX };
        let blocks = CELLS.max(2 * case.tokens).div_ceil(case.block_tokens).next_power_of_two().max(4);
        let cells = blocks.checked_mul(case.block_tokens).ok_or_else(too_much)?;
        // Kernels count bytes of a part in 32 bits.
        let bytes = case.bytes();
        if bytes > u64::from(u32::MAX / 2) {
            return Err(DeviceError::Unsupported(format!(
                "{bytes} bytes in a step: less than 2 GiB are possible"
            )));
        }
        let row_words = case.head_dim.div_ceil(2);
        let words = [case.kv_heads, cells, row_words];
        let words =
            words.iter().try_fold(1u64, |n, by| n.checked_mul(u64::from(*by))).ok_or_else(too_much)?;
        // Odd numbers are coprime to a power of two, so every block is named once.
        let order = |i: u32| {
            (u64::from(i) * u64::from(blocks / 2 + 1) % u64::from(blocks)) as u32 * case.block_tokens
        };
        let rows = vec![0.5; (case.tokens * case.kv_heads * case.head_dim) as usize];
        let (sides, side_bytes) = (2 * case.layers, (2 * rows.len() as u32).next_multiple_of(4));
        // Behind a step that computes nothing is scattered before it ends, so every part of the next one has a slot.
        let slots = parts(sides, side_bytes).count() as u32;
        let part_bytes =
            u64::from(side_bytes) * u64::from(parts(sides, side_bytes).next().map_or(0, |part| part.end));
        let (memory, resident) = match case.from {
            RowsFrom::Host(memory) => (memory, None),
            RowsFrom::Blocks => (HostMemory::Pageable, Some(Resident::new(gpu, sides, side_bytes, &rows)?)),
        };
        Ok(Path {
            lane: Lane::new(gpu, memory, slots, part_bytes, case.tokens)?,
            pools: (0..sides).map(|_| gpu.buffer("KV cache", words * 4)).collect::<Result<_, _>>()?,
            cells,
            blocks: (0..blocks).map(order).collect(),
            side_bytes,
            rows,
            resident,
            case: *case,
        })
    }

    /// Packs, stages and submits the rows of a step, part by part.
    pub fn transfer(&mut self, epoch: &Epoch, step: u32) -> Result<Vec<(PartSpans, Job)>, DeviceError> {
        let case = self.case;
        let cell = |token: u32| {
            let position = u64::from(step) * u64::from(case.tokens) + u64::from(token);
            let position = (position % u64::from(self.cells)) as u32;
            self.blocks[(position / case.block_tokens) as usize] + position % case.block_tokens
        };
        let cells: Vec<u32> = (0..case.tokens).map(cell).collect();
        parts(2 * case.layers, self.side_bytes).map(|sides| self.part(epoch, &cells, sides)).collect()
    }

    fn part(
        &mut self,
        epoch: &Epoch,
        cells: &[u32],
        sides: Range<u32>,
    ) -> Result<(PartSpans, Job), DeviceError> {
        let (case, side_bytes) = (self.case, self.side_bytes);
        let row_bytes = 2 * case.head_dim;
        let section = |(i, pool)| Section {
            first_byte: i * side_bytes,
            row_bytes,
            block_heads: case.kv_heads,
            first_head: 0,
            heads: case.kv_heads,
            words: row_bytes.div_ceil(4),
            cells: self.cells,
            pool,
        };
        let pools = &self.pools[sides.start as usize..sides.end as usize];
        let sections: Vec<_> = (0u32..).zip(pools).map(section).collect();
        let bytes = side_bytes * sides.len() as u32;
        let began = Instant::now();
        let mut packed = (began, began);
        let job = match &self.resident {
            Some(Resident { arena, first_byte, .. }) => {
                let first_byte = first_byte + u64::from(sides.start) * u64::from(side_bytes);
                let rows = Pinned { buffer: arena, first_byte, bytes: bytes.into() };
                self.lane.upload_pinned(&rows, cells, &sections, true)?
            }
            None => {
                let rows = &self.rows;
                let mut pack_part = |to: &mut [u8]| {
                    let began = Instant::now();
                    pack_sides(rows, side_bytes as usize, to);
                    packed = (began, Instant::now());
                };
                self.lane.upload_packed(bytes as usize, &mut pack_part, cells, &sections, true)?
            }
        };
        let span = |(from, to)| -> Span { epoch.host(from, to) };
        let stage = span((packed.1, Instant::now()));
        Ok((PartSpans { pack: span(packed), stage, ..PartSpans::default() }, job))
    }

    /// Waits for a part, and returns when the device copied and scattered it.
    pub fn wait(&mut self, job: Job) -> Result<Vec<f64>, DeviceError> {
        self.lane.wait(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_packed_as_f16() {
        for n in [0, 1, 2, 33, 511, 512, 513, 2000] {
            let rows: Vec<f32> = (0..n).map(|i| (i as f32 - 7.0) * 0.37).collect();
            let mut packed = vec![0xee; (2 * n as usize).next_multiple_of(4)];
            pack(&rows, &mut packed);
            let mut expected: Vec<u8> = rows.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
            expected.resize(packed.len(), 0);
            assert_eq!(packed, expected, "{n}");
        }
    }

    #[test]
    fn sides_are_packed_by_several_threads() {
        for (n, sides) in [(3, 1), (3, 5), (1 << 18, 1), (1 << 18, 9), (300_001, 7)] {
            let rows: Vec<f32> = (0..n).map(|i| (i % 2000) as f32).collect();
            let side_bytes = (2 * n as usize).next_multiple_of(4);
            let mut side = vec![0xee; side_bytes];
            pack(&rows, &mut side);
            let mut packed = vec![0xee; sides * side_bytes];
            pack_sides(&rows, side_bytes, &mut packed);
            assert!(packed.chunks(side_bytes).all(|packed| packed == side), "{n} {sides}");
        }
    }

    #[test]
    fn parts_cover_all_sides_once() {
        for (sides, side_bytes) in [(1, 4), (6, 132), (64, 1 << 20), (64, 3 << 20), (8, 5 << 20), (64, 16384)]
        {
            let all: Vec<_> = parts(sides, side_bytes).collect();
            assert!(all.iter().cloned().flatten().eq(0..sides), "{all:?}");
            let bytes = |part: &Range<u32>| part.len() as u32 * side_bytes;
            assert!(all.iter().all(|part| part.len() == 1 || bytes(part) <= PART_BYTES), "{all:?}");
            assert!(all.windows(2).all(|pair| bytes(&pair[0]) + side_bytes > PART_BYTES), "{all:?}");
        }
    }
}
