//! K and V of a layer that owns them.
use crate::driver::Driver;
use crate::side::PoolSide;
use kvist_device::DeviceError;

#[derive(Debug)]
pub struct Owned<D: Driver> {
    pub k: PoolSide<D>,
    pub v: PoolSide<D>,
    /// The channels of keys in stored order, `[kv_heads, dim]`, if they are reordered: on the host and on the device.
    pub order: Option<(Vec<u32>, D::Buffer)>,
}

impl<D: Driver> Owned<D> {
    /// Whether each side is one buffer.
    pub fn is_whole(&self) -> bool {
        self.k.parts.len() == 1 && self.v.parts.len() == 1
    }

    /// Cells of both sides, which are alike at any time: kernels of attention are told one number.
    pub fn cells(&self) -> u32 {
        self.k.cells
    }

    /// Bytes of so many cells. `None` on overflow.
    pub fn bytes(&self, cells: u32) -> Option<u64> {
        self.k.bytes(cells)?.checked_add(self.v.bytes(cells)?)
    }

    /// Replaces the buffers of both sides by larger or smaller ones, with the cells that both have. On `Err` nothing has changed.
    pub fn resize(&mut self, gpu: &D, recorder: &mut D::Recorder, cells: u32) -> Result<(), DeviceError> {
        // Both before either is replaced: the second may be refused.
        let (k, v) = (self.k.parts_for(gpu, cells)?, self.v.parts_for(gpu, cells)?);
        let mut copies = self.k.copies_to(&k, cells);
        copies.extend(self.v.copies_to(&v, cells));
        if !copies.is_empty() {
            let done = gpu.submit(recorder, &copies);
            // The old buffers are free only then.
            gpu.wait(&done)?;
        }
        drop(copies);
        for (side, parts) in [(&mut self.k, k), (&mut self.v, v)] {
            (side.parts, side.cells) = (parts, cells);
        }
        Ok(())
    }
}
