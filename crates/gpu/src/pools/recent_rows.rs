//! The f16 rows of a recent token, out of the device and into it.
use super::GpuPools;
use crate::driver::Driver;
use kvist_cache::GroupId;
use kvist_device::{CellPosition, DeviceError};

impl<D: Driver> GpuPools<D> {
    /// See [`read_recent`](kvist_device::Pools::read_recent).
    pub(super) fn download_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        mut rows: &mut [u8],
    ) -> Result<bool, DeviceError> {
        self.spec.check_recent(group, token.cell, self.cells_of(group), rows.len())?;
        let Some(recents) = &self.recents else { return Ok(false) };
        let Some(slot) = recents.plan.slot_of(group, token) else { return Ok(false) };
        let places = recents.places(slot, &self.spec.layout, group);
        let ranges: Vec<_> = places.iter().map(|at| (at.buffer, at.first_byte, at.n_bytes)).collect();
        self.counters.bytes_moved += rows.len() as u64;
        self.gpu.read_back(&ranges, |mut bytes| {
            for place in &places {
                let (padded, dim) = place.head_bytes;
                let layer = bytes.split_off(..place.n_bytes as usize).expect("all ranges were read");
                for head in layer.chunks_exact(padded) {
                    rows.split_off_mut(..dim).expect("the length was checked").copy_from_slice(&head[..dim]);
                }
            }
        })?;
        Ok(true)
    }

    /// See [`write_recent`](kvist_device::Pools::write_recent).
    pub(super) fn upload_recent(
        &mut self,
        group: GroupId,
        token: CellPosition,
        mut rows: &[u8],
    ) -> Result<bool, DeviceError> {
        let cells = self.cells_of(group);
        self.spec.check_recent(group, token.cell, cells, rows.len())?;
        self.gpu.check()?;
        let Some(recents) = &mut self.recents else { return Ok(false) };
        let Some(slot) = recents.plan.adopt(group, token, cells) else { return Ok(false) };
        self.counters.bytes_moved += rows.len() as u64;
        for place in recents.places(slot, &self.spec.layout, group) {
            let (padded, dim) = place.head_bytes;
            let mut layer = vec![0; place.n_bytes as usize];
            for head in layer.chunks_exact_mut(padded) {
                head[..dim].copy_from_slice(rows.split_off(..dim).expect("the length was checked"));
            }
            self.gpu.write(place.buffer, place.first_byte, &layer);
        }
        Ok(true)
    }
}
