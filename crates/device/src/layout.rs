//! What the model's architecture fixes: layers, heads, groups. Configuration (capacity, dtype) is elsewhere.
use kvist_cache::{GroupId, LayerId};

/// One decoder layer, as a backend needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// The layer group whose cells the layer reads.
    pub group: GroupId,
    /// The layer itself, or the lower layer of the same group whose K and V it borrows.
    pub owner: LayerId,
    pub n_kv_heads: u32,
    pub head_dim: u32,
}

/// The attention layout of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub n_heads: u32,
    pub layers: Vec<LayerSpec>,
}

/// An invalid layout.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("layer {layer}: {what}")]
pub struct BadLayout {
    pub layer: usize,
    pub what: String,
}

impl Layout {
    /// Whether layer `layer` stores K and V itself instead of borrowing them.
    pub fn owns(&self, layer: usize) -> bool {
        self.layers[layer].owner.0 as usize == layer
    }

    /// The layers that store K and V, with their index.
    pub fn owners(&self) -> impl Iterator<Item = (usize, &LayerSpec)> {
        self.layers.iter().enumerate().filter(|(l, spec)| spec.owner.0 as usize == *l)
    }

    pub fn n_groups(&self) -> usize {
        self.layers.iter().map(|l| l.group.0 as usize + 1).max().unwrap_or(0)
    }

    /// Largest head_dim of any layer.
    pub fn max_head_dim(&self) -> u32 {
        self.layers.iter().map(|l| l.head_dim).max().unwrap_or(0)
    }

    /// Checks what every backend relies on: query heads are a multiple of KV heads, and a layer that borrows reads an
    /// owner below it with the same shape and group.
    pub fn check(&self) -> Result<(), BadLayout> {
        for (layer, spec) in self.layers.iter().enumerate() {
            let bad = |what: String| Err(BadLayout { layer, what });
            if spec.n_kv_heads == 0 || spec.head_dim == 0 || self.n_heads == 0 {
                return bad("heads and head_dim must be at least 1".into());
            }
            if !self.n_heads.is_multiple_of(spec.n_kv_heads) {
                return bad(format!(
                    "{} query heads do not divide into {} KV heads",
                    self.n_heads, spec.n_kv_heads
                ));
            }
            let owner = spec.owner.0 as usize;
            if owner > layer || !self.owns(owner) {
                return bad(format!("borrows from layer {owner}, which is not an owner below it"));
            }
            let lender = LayerSpec { owner: spec.owner, ..self.layers[owner] };
            if lender != *spec {
                return bad(format!("borrows from layer {owner}, which has another shape or window"));
            }
        }
        Ok(())
    }
}
