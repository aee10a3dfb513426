//! Stored rows that leave the pools or enter them, and the f16 rows of recent tokens.
use super::{CpuPools, cells_of};
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
        for (layer, owned) in self.spec.layout.layers.iter().zip(&self.layers) {
            let Some(owned) = owned.as_ref().filter(|_| layer.group == group) else { continue };
            for side in [&owned.keys, &owned.values] {
                let rows =
                    block.split_off_mut(..side.shape.bytes_outside(cells)).expect("the length was checked");
                side.export(&self.slabs, cells, rows);
            }
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
        for (layer, owned) in self.spec.layout.layers.iter().zip(&mut self.layers) {
            let Some(owned) = owned.as_mut().filter(|_| layer.group == group) else { continue };
            for side in [&mut owned.keys, &mut owned.values] {
                let rows =
                    block.split_off(..side.shape.bytes_outside(cells)).expect("the length was checked");
                side.import(&mut self.slabs, cells, rows);
            }
        }
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
