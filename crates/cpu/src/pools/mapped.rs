//! K and V of a file, attended in place.
use super::CpuPools;
use crate::Growth;
use crate::arch::LANES;
use crate::pages::Pages;
use crate::pool::RowStore;
use kvist_cache::LayerId;
use kvist_device::{DeviceError, Image, MappedRows, Side};

/// Names the blocks of sixteen cells of `pool.rs`. To be changed with them, or with the codes of a storage.
pub const IMAGE_LAYOUT: &str = "cpu-16-v1";

fn refused(what: String) -> DeviceError {
    DeviceError::Unsupported(what)
}

impl CpuPools {
    /// K or V of a layer that owns its K and V.
    fn owned_side(&self, layer: LayerId, side: Side) -> Result<&RowStore, DeviceError> {
        let n_layers = self.layers.len();
        let owned =
            self.layers.get(usize::from(layer.0)).ok_or(DeviceError::UnknownLayer { layer, n_layers })?;
        let owned =
            owned.as_ref().ok_or_else(|| refused(format!("layer {layer} has no K and V of its own")))?;
        Ok(match side {
            Side::K => &owned.keys,
            Side::V => &owned.values,
        })
    }

    pub(super) fn bytes_of_image(&self, layer: LayerId, side: Side, cells: u32) -> Result<u64, DeviceError> {
        let bytes = self.owned_side(layer, side)?.shape.bytes(cells);
        bytes.ok_or_else(|| refused(format!("an image of {cells} cells has more bytes than can be counted")))
    }

    pub(super) fn image_of(&self, layer: LayerId, side: Side, cells: u32) -> Result<Image, DeviceError> {
        let rows = self.owned_side(layer, side)?;
        // The last block is there as a whole.
        if cells > rows.cells().next_multiple_of(LANES as u32) {
            let (index, len) = (cells as usize, rows.cells() as usize);
            return Err(DeviceError::OutOfRange { what: "cell", index, len });
        }
        Ok(Image { bytes: rows.image(&self.slabs, cells), finite: rows.is_finite(&self.slabs, cells) })
    }

    pub(super) fn map_rows(&mut self, rows: &MappedRows<'_>) -> Result<(), DeviceError> {
        if self.growth == Growth::Concatenate {
            return Err(refused("pools that are concatenated cannot begin with a file".into()));
        }
        self.check_mapped(rows)?;
        let bytes = rows.len;
        let len =
            usize::try_from(bytes).map_err(|_| refused(format!("{bytes} bytes cannot be mapped here")))?;
        let pages = Pages::of_file(rows.file, len, rows.memory.clone())
            .map_err(|error| refused(format!("the file cannot be mapped into memory: {error}")))?;
        let slab = self.slabs.len();
        self.slabs.push(pages);
        for side in &rows.sides {
            let owned = self.layers[usize::from(side.layer.0)].as_mut().expect("checked");
            let store = match side.side {
                Side::K => &mut owned.keys,
                Side::V => &mut owned.values,
            };
            store.map(rows.cells, slab, side.first as usize, side.finite);
        }
        Ok(())
    }

    /// Checks that every side fits: its place in the file, its layer, and the layer's other side.
    fn check_mapped(&self, rows: &MappedRows<'_>) -> Result<(), DeviceError> {
        if rows.cells == 0 || !rows.cells.is_multiple_of(LANES as u32) {
            return Err(refused(format!("{} cells of a file: expected a multiple of {LANES}", rows.cells)));
        }
        let found = rows.file.metadata().map_or(0, |it| it.len());
        if found < rows.len {
            return Err(refused(format!("the file has {found} bytes, expected {}", rows.len)));
        }
        for (i, side) in rows.sides.iter().enumerate() {
            let layer = usize::from(side.layer.0);
            let Some(owned) = self.layers.get(layer).and_then(Option::as_ref) else {
                return Err(refused(format!("layer {layer} has no K and V of its own")));
            };
            let store = match side.side {
                Side::K => &owned.keys,
                Side::V => &owned.values,
            };
            if store.cells() > 0 {
                return Err(refused(format!(
                    "layer {layer} has cells already: K and V of a file come first"
                )));
            }
            let end = store.shape.bytes(rows.cells).and_then(|bytes| side.first.checked_add(bytes));
            if !side.first.is_multiple_of(MappedRows::ALIGNMENT) || end.is_none_or(|end| end > rows.len) {
                return Err(refused(format!("{:?} of layer {layer} does not lie in the file", side.side)));
            }
            let group = self.spec.layout.layers[layer].group;
            let capacity = self.spec.capacity_cells[usize::from(group.0)].next_multiple_of(LANES as u32);
            if rows.cells > capacity {
                return Err(refused(format!("{} cells of a file, and room for {capacity}", rows.cells)));
            }
            let of_layer = |one: Side| {
                rows.sides.iter().filter(|other| other.layer == side.layer && other.side == one).count()
            };
            if (of_layer(Side::K), of_layer(Side::V)) != (1, 1) {
                return Err(refused(format!("layer {layer} needs one K and one V in the file (side {i})")));
            }
        }
        Ok(())
    }
}
