//! Rows as they are stored, for tests and for `inspect`.
use super::GpuPools;
use crate::driver::Driver;
use kvist_cache::LayerId;
use kvist_device::*;
use std::sync::PoisonError;

/// What `inspect` has read last: a layer. Reading row by row would wait for the device each time.
#[derive(Debug, Default)]
pub struct Mirror {
    pub of: Option<usize>,
    bytes: Vec<u8>, // of K [heads, cells, words], then of V
    v: usize,       // where V begins
}

impl<D: Driver> GpuPools<D> {
    pub(super) fn read_row(
        &self,
        layer: LayerId,
        side: Side,
        (kv_head, cell): (u32, u32),
        row: &mut [f32],
    ) -> Result<(), DeviceError> {
        let cells = |owner: LayerId| {
            let owned = self.layers[usize::from(owner.0)].as_ref();
            owned.map_or(0, |owned| owned.k.cells.min(owned.v.cells) as usize)
        };
        let layer = self.spec.check_inspect(layer, side, (kv_head, cell), row.len(), cells)?;
        let owner = usize::from(layer.owner.0);
        let owned = self.layers[owner].as_ref().ok_or(DeviceError::LayerOrder(layer.owner))?;
        let mut mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner);
        if mirror.of != Some(owner) {
            mirror.of = None;
            let mut ranges = Vec::new();
            let mut ends = [0; 2];
            for (side, end) in [&owned.k, &owned.v].into_iter().zip(&mut ends) {
                let head = u64::from(side.cells) * u64::from(side.words) * 4;
                ranges.extend(
                    side.parts.iter().map(|(_, heads, buffer)| (buffer, 0, u64::from(*heads) * head)),
                );
                *end = (u64::from(side.heads) * head) as usize;
            }
            self.gpu.read_back(&ranges, |bytes| {
                mirror.bytes.clear();
                mirror.bytes.extend_from_slice(bytes);
            })?;
            (mirror.of, mirror.v) = (Some(owner), ends[0]);
        }
        let (stored, first) = match side {
            Side::K => (&owned.k, 0),
            Side::V => (&owned.v, mirror.v),
        };
        let len = 4 * stored.words as usize;
        let at = first + (kv_head as usize * stored.cells as usize + cell as usize) * len;
        let dim = stored.dim as usize;
        let order = owned.order.as_ref().filter(|_| side == Side::K);
        let order = order.and_then(|(order, _)| order.get(kv_head as usize * dim..)?.get(..dim));
        stored.form.decode(&mirror.bytes[at..at + len], order, row);
        Ok(())
    }
}
