//! Stored rows that leave the pools or enter them, and the f16 rows of recent tokens.
use super::{CpuPools, cells_of};
use crate::arch::Threads;
use crate::arch::uncached::Uncached;
use crate::pages::disjoint;
use crate::pool::Incoming;
use kvist_cache::{CellRun, GroupId};
use kvist_device::{CellPosition, DeviceError};

/// Rows on their way to blocks of one side.
struct Copy<'c, 's> {
    side: usize,
    rows: Incoming<'c>,
    to: &'c mut [&'s mut [u8]],
    finite: bool,
}

/// Parts that each thread takes of a transfer, so that none has to wait long for another at its end.
const TURNS: usize = 4;

/// Works on all of a transfer, in parts of what is next to each other. Every thread has an `S` of its own.
fn in_turns<T: Send, S: Send + Default>(
    threads: &Threads,
    transfer: &mut [T],
    work: impl Fn(&mut [T], &mut S) + Sync,
) {
    let part = transfer.len().div_ceil(TURNS * threads.n());
    let mut scratch: Vec<S> = (0..threads.n()).map(|_| S::default()).collect();
    threads.parts(transfer, part, &mut scratch, |_, part, scratch| work(part, scratch));
}

impl CpuPools {
    /// Copies the stored rows of `cells` to a block, layer by layer, on all threads.
    pub(super) fn copy_out(
        &mut self,
        group: GroupId,
        cells: CellRun,
        mut block: &mut [u8],
    ) -> Result<(), DeviceError> {
        let have = cells_of(&self.spec.layout, &self.layers, group);
        self.spec.check_transfer(group, cells, have, block.len())?;
        self.counters.bytes_moved += block.len() as u64;
        let layers = self.spec.layout.layers.iter().zip(&self.layers);
        let layers = layers.filter(|(layer, _)| layer.group == group).filter_map(|(_, owned)| owned.as_ref());
        let mut sides = layers.flat_map(|owned| [&owned.keys, &owned.values]).peekable();
        let mut outgoing = Vec::new();
        while let Some(side) = sides.next() {
            let rows =
                block.split_off_mut(..side.shape.bytes_outside(cells)).expect("the length was checked");
            outgoing.push((side, sides.peek().copied(), rows));
        }
        let slabs = &self.slabs;
        in_turns(&self.compute.threads, &mut outgoing, |outgoing, ()| {
            outgoing.iter_mut().for_each(|(side, next, rows)| side.export(slabs, cells, rows, *next));
        });
        Ok(())
    }

    /// Copies the rows of a block to `cells`, after growing to them, on all threads.
    pub(super) fn copy_in(
        &mut self,
        group: GroupId,
        cells: CellRun,
        mut block: &[u8],
    ) -> Result<(), DeviceError> {
        let capacity = self.spec.capacity_cells.get(usize::from(group.0)).copied().unwrap_or(0);
        self.spec.check_transfer(group, cells, capacity, block.len())?;
        self.grow(|grown| if grown == group { cells.end() } else { 0 })?;
        self.counters.bytes_moved += block.len() as u64;
        let layers = self.spec.layout.layers.iter().zip(&mut self.layers);
        let layers = layers.filter(|(layer, _)| layer.group == group).filter_map(|(_, owned)| owned.as_mut());
        let mut sides: Vec<_> = layers.flat_map(|owned| [&mut owned.keys, &mut owned.values]).collect();
        let (mut incoming, mut places) = (Vec::new(), Vec::new());
        for (s, side) in sides.iter().enumerate() {
            incoming.extend(side.incoming(cells, block, &mut places).map(|rows| (s, rows)));
            block.split_off(..side.shape.bytes_outside(cells)).expect("the length was checked");
        }
        let mut places = disjoint(&mut self.slabs, &places);
        let (mut places, mut copies) = (&mut places[..], Vec::with_capacity(incoming.len()));
        for (side, rows) in incoming {
            let to = places.split_off_mut(..rows.n_places()).expect("places for all rows");
            copies.push(Copy { side, rows, to, finite: true });
        }
        in_turns(&self.compute.threads, &mut copies, |copies, buffer| {
            Uncached::run(|uncached| {
                copies.iter_mut().for_each(|copy| copy.finite = copy.rows.write(copy.to, uncached, buffer));
            });
        });
        copies.iter().filter(|copy| !copy.finite).for_each(|copy| sides[copy.side].note_broken());
        if let Some(recent) = &mut self.recent {
            recent.forget(group, cells);
        }
        Ok(())
    }

    /// See [`read_recent`](kvist_device::Pools::read_recent).
    pub(super) fn copy_recent_out(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &mut [u8],
    ) -> Result<bool, DeviceError> {
        let have = cells_of(&self.spec.layout, &self.layers, group);
        self.spec.check_recent(group, token.cell, have, rows.len())?;
        let Some(recent) = &self.recent else { return Ok(false) };
        let found = recent.read(group, token, &self.spec.layout, rows);
        self.counters.bytes_moved += if found { rows.len() as u64 } else { 0 };
        Ok(found)
    }

    /// See [`write_recent`](kvist_device::Pools::write_recent).
    pub(super) fn copy_recent_in(
        &mut self,
        group: GroupId,
        token: CellPosition,
        rows: &[u8],
    ) -> Result<bool, DeviceError> {
        let have = cells_of(&self.spec.layout, &self.layers, group);
        self.spec.check_recent(group, token.cell, have, rows.len())?;
        let Some(recent) = &mut self.recent else { return Ok(false) };
        let written = recent.adopt(group, token, have, &self.spec.layout, rows);
        self.counters.bytes_moved += if written { rows.len() as u64 } else { 0 };
        Ok(written)
    }
}
