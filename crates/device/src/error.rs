//! Errors of devices and of their KV pools.
use crate::budget::OutOfBudget;
use crate::layout::BadLayout;
use kvist_cache::{LayerError, LayerId, Refused};

#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    OutOfBudget(#[from] OutOfBudget),
    #[error("the system refused to allocate {bytes} bytes for the {what}")]
    OutOfMemory { what: &'static str, bytes: u64 },
    #[error(transparent)]
    Layout(#[from] BadLayout),
    #[error("{what}: {elements} elements cannot hold the shape {expected:?} at the given strides")]
    Shape { what: &'static str, expected: Vec<usize>, elements: usize },
    #[error(
        "{what}: [batch, tokens, heads, elements] is {found:?}, expected {expected:?} tokens, heads and elements"
    )]
    Sizes { what: &'static str, found: [usize; 4], expected: [usize; 3] },
    #[error("{what}: the elements of a row are {stride} apart, expected 1: rows must be contiguous")]
    RowStride { what: &'static str, stride: usize },
    #[error("{what}: rows of [batch, tokens, heads, elements] {sizes:?} overlap at the strides {strides:?}")]
    RowsOverlap { what: &'static str, sizes: [usize; 4], strides: [usize; 4] },
    #[error("layer {layer} does not exist: the model has {n_layers}")]
    UnknownLayer { layer: LayerId, n_layers: usize },
    #[error("{what} {index} does not exist: there are {len}")]
    OutOfRange { what: &'static str, index: usize, len: usize },
    /// An owner layer was written twice or without K and V; a borrowing layer passed K and V or ran before its owner;
    /// or a step was committed before every layer had run.
    #[error("layer {0} is out of order, has K and V although it must not, or lacks K and V that it needs")]
    LayerOrder(LayerId),
    #[error("layer {0} stores V, but the call has none")]
    MissingValues(LayerId),
    #[error("layer {0} has V in the call, but its values are a prefix of its keys")]
    UnexpectedValues(LayerId),
    #[error("a block of {got} bytes: its cells take {expected}")]
    BlockSize { expected: usize, got: usize },
    /// The transfer is of other pools, or its block has been returned already.
    #[error("these pools have no such transfer")]
    UnknownTransfer,
    #[error(
        "the model is on the device `{model}`, and its sessions are planned for the device `{planned}`: use one device for both"
    )]
    OtherDevice { model: &'static str, planned: &'static str },
    #[error("attend without begin of this very step")]
    StalePlan,
    /// Everything that the device has computed since is void. Its sessions must be closed.
    #[error("device {device}: {what}")]
    Failed { device: &'static str, what: String },
    #[error("tensor `{name}`: {what}")]
    Weights { name: String, what: String },
    #[error("{0}")]
    Unsupported(String),
}

impl From<LayerError> for DeviceError {
    fn from(error: LayerError) -> Self {
        match error {
            LayerError::Unknown { layer, n_layers } => DeviceError::UnknownLayer { layer, n_layers },
            LayerError::OutOfOrder(layer) => DeviceError::LayerOrder(layer),
        }
    }
}

/// Why a step did not begin or was not committed: the cache refused it, or the device failed. The cache is as it was.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error(transparent)]
    Device(#[from] DeviceError),
}
