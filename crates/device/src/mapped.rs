//! K and V in a file that pools map into memory and attend in place.
use crate::budget::Reservation;
use crate::error::DeviceError;
use crate::pools::Side;
use kvist_cache::LayerId;
use std::fs::File;
use std::sync::Arc;

/// K and V of the first cells of some layers, in a file. Processes that map the same file share its pages.
///
/// The bytes are those of [`Pools::image`](crate::Pools::image), in the layout of the device that made them.
#[derive(Debug)]
pub struct MappedRows<'f> {
    pub file: &'f File,
    /// Bytes of the file.
    pub len: u64,
    /// Cells `0..cells` of every layer here.
    pub cells: u32,
    /// Where K and V of each layer begin in the file: multiples of [`MappedRows::ALIGNMENT`].
    pub sides: Vec<MappedSide>,
    /// What a file that lies in memory takes of the budget. Pools keep it as long as they map the file.
    pub memory: Option<Arc<Reservation>>,
}

/// K or V of a layer that owns its K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedSide {
    pub layer: LayerId,
    pub side: Side,
    /// The first byte in the file.
    pub first: u64,
    /// True if all values are finite.
    pub finite: bool,
}

impl MappedRows<'_> {
    /// Where a side may begin in a file.
    pub const ALIGNMENT: u64 = 64;
}

/// The stored bytes of K or V of a layer, as [`Pools::map`](crate::Pools::map) reads them from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub bytes: Vec<u8>,
    /// True if all values are finite.
    pub finite: bool,
}

pub(crate) fn no_images() -> DeviceError {
    DeviceError::Unsupported(
        "this device does not attend K and V of a file in place: use --backend cpu".into(),
    )
}
