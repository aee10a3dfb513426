//! The order of a step's layers, for callers that run the layers one by one.
use crate::ids::LayerId;
use std::fmt;

/// Which layers of a step have run. A layer that owns K and V passes them, once per step; a layer that borrows runs
/// after its owner and passes none; a step commits only after every layer has run.
#[derive(Clone, Debug)]
pub struct LayerOrder {
    /// Per layer: the layer whose K and V it reads, itself or another one.
    owners: Vec<LayerId>,
    ran: Vec<bool>,
}

/// A layer that may not run now, or has not run. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerError {
    Unknown {
        layer: LayerId,
        n_layers: usize,
    },
    /// An owner ran twice or without K and V; a borrowing layer passed K and V or ran before its owner; or a step was
    /// committed before this layer had run.
    OutOfOrder(LayerId),
}

impl fmt::Display for LayerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LayerError::Unknown { layer, n_layers } => {
                write!(f, "layer {layer} does not exist: the model has {n_layers}")
            }
            LayerError::OutOfOrder(layer) => write!(
                f,
                "layer {layer} is out of order, has K and V although it must not, or lacks K and V that it needs"
            ),
        }
    }
}
impl std::error::Error for LayerError {}

impl LayerOrder {
    /// `owners` names, for every layer, the layer whose K and V it reads: itself, or the one that it borrows from.
    pub fn new(owners: impl IntoIterator<Item = LayerId>) -> Self {
        let owners: Vec<LayerId> = owners.into_iter().collect();
        LayerOrder { ran: vec![false; owners.len()], owners }
    }

    /// Begins a step: no layer has run.
    pub fn begin(&mut self) {
        self.ran.fill(false);
    }

    /// Checks that `layer` may run now. `has_kv` says whether K and V are passed to it.
    pub fn check(&self, layer: LayerId, has_kv: bool) -> Result<(), LayerError> {
        let l = usize::from(layer.0);
        let n_layers = self.owners.len();
        let owner = *self.owners.get(l).ok_or(LayerError::Unknown { layer, n_layers })?;
        let owner_ran = self.ran.get(usize::from(owner.0)).is_some_and(|ran| *ran);
        let in_order = if owner == layer { has_kv } else { !has_kv && owner_ran };
        if in_order && !self.ran[l] { Ok(()) } else { Err(LayerError::OutOfOrder(layer)) }
    }

    /// Records that `layer` has run. Call it only after [`check`](Self::check) has accepted the layer.
    pub fn ran(&mut self, layer: LayerId) {
        if let Some(ran) = self.ran.get_mut(usize::from(layer.0)) {
            *ran = true;
        }
    }

    /// Checks that every layer has run. The error names the first one that has not.
    pub fn complete(&self) -> Result<(), LayerError> {
        match self.ran.iter().position(|ran| !ran) {
            None => Ok(()),
            Some(l) => Err(LayerError::OutOfOrder(LayerId(l as u16))),
        }
    }
}
