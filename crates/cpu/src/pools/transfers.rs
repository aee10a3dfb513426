//! Stored rows that leave the pools or enter them, and the f16 rows of recent tokens.
use super::{CpuPools, cells_of};
use crate::arch::uncached::Uncached;
use kvist_cache::{CellRun, GroupId};
use kvist_device::{CellPosition, DeviceError};

impl CpuPools {
    /// Copies the stored rows of `cells` to a block, layer by layer.
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
        while let Some(side) = sides.next() {
            let rows =
                block.split_off_mut(..side.shape.bytes_outside(cells)).expect("the length was checked");
            side.export(&self.slabs, cells, rows, sides.peek().copied());
        }
        Ok(())
    }

    /// Copies the rows of a block to `cells`, after growing to them.
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
        let mut scratch = Vec::new();
        Uncached::run(|uncached| {
            for side in layers.flat_map(|owned| [&mut owned.keys, &mut owned.values]) {
                let rows =
                    block.split_off(..side.shape.bytes_outside(cells)).expect("the length was checked");
                side.import(&mut self.slabs, cells, rows, (uncached, &mut scratch));
            }
        });
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
