//! The attention layout that a model's architecture determines: layers, heads, groups. Capacities and dtypes are elsewhere.
use crate::storage::Storage;
use kvist_cache::{GroupId, LayerId};

/// One decoder layer, as a backend needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// The layer group whose cells the layer reads.
    pub group: GroupId,
    /// The layer itself, or the lower layer of the same group whose K and V it borrows.
    pub owner: LayerId,
    pub n_kv_heads: u32,
    /// Elements of a query's or a key's row.
    pub k_dim: u32,
    /// Elements of a value's or an output's row. Equal to `k_dim` in most models.
    pub v_dim: u32,
    pub values: Values,
    pub state: LayerState,
}

/// What a layer stores of earlier tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerState {
    /// K and V of every token, in cells.
    Kv,
    /// One state per sequence, which every token replaces, in slots ([`StateSlots`](kvist_cache::StateSlots)). The layer has
    /// no heads, keys or values.
    Recurrent { bytes_per_sequence: u64 },
}

/// Where the values of a layer are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// In rows of their own.
    Stored,
    /// They are the first `v_dim` elements of the keys, and not stored again (multi-head latent attention: DeepSeek-AI,
    /// 2024).
    PrefixOfK,
}

impl LayerSpec {
    /// A layer with stored values whose rows are as long as those of its keys.
    pub const fn new(group: GroupId, owner: LayerId, n_kv_heads: u32, head_dim: u32) -> Self {
        LayerSpec {
            group,
            owner,
            n_kv_heads,
            k_dim: head_dim,
            v_dim: head_dim,
            values: Values::Stored,
            state: LayerState::Kv,
        }
    }

    /// A recurrent layer.
    pub const fn recurrent(group: GroupId, layer: LayerId, bytes_per_sequence: u64) -> Self {
        let state = LayerState::Recurrent { bytes_per_sequence };
        LayerSpec { state, ..LayerSpec::new(group, layer, 0, 0) }
    }

    /// Bytes of one cell of one KV head with K and V in these storages.
    pub fn cell_bytes(&self, k: Storage, v: Storage) -> u64 {
        match self.values {
            Values::Stored => k.row_bytes(self.k_dim) + v.row_bytes(self.v_dim),
            Values::PrefixOfK => k.row_bytes(self.k_dim),
        }
    }

    /// The dimension of keys and values, for backends that need them to be equal and stored. `Err` says what the layer has
    /// instead.
    pub fn equal_dims(&self) -> Result<u32, String> {
        let LayerSpec { k_dim, v_dim, values, .. } = *self;
        match values {
            Values::Stored if k_dim == v_dim => Ok(k_dim),
            Values::Stored => Err(format!("keys of {k_dim} and values of {v_dim} elements")),
            Values::PrefixOfK => Err(format!("keys of {k_dim} elements whose first {v_dim} are the values")),
        }
    }
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
        self.layers[layer].owner.0 as usize == layer && self.layers[layer].state == LayerState::Kv
    }

    /// The layers that store K and V, with their index.
    pub fn owners(&self) -> impl Iterator<Item = (usize, &LayerSpec)> {
        self.layers.iter().enumerate().filter(|(l, _)| self.owns(*l))
    }

    pub fn n_groups(&self) -> usize {
        self.layers.iter().map(|l| l.group.0 as usize + 1).max().unwrap_or(0)
    }

    /// The longest row of any layer.
    pub fn max_head_dim(&self) -> u32 {
        self.layers.iter().map(|l| l.k_dim.max(l.v_dim)).max().unwrap_or(0)
    }

    /// Checks what every backend relies on: query heads are a multiple of KV heads, and a layer that borrows reads an
    /// owner below it with the same shape and group. A recurrent layer has a state, and no keys or values.
    pub fn check(&self) -> Result<(), BadLayout> {
        for (layer, spec) in self.layers.iter().enumerate() {
            let bad = |what: String| Err(BadLayout { layer, what });
            if let LayerState::Recurrent { bytes_per_sequence } = spec.state {
                let alone = LayerSpec::recurrent(spec.group, LayerId(layer as u16), bytes_per_sequence);
                match *spec == alone && bytes_per_sequence > 0 {
                    true => continue,
                    false => {
                        return bad("a recurrent layer needs a state of its own, and has no K and V".into());
                    }
                }
            }
            if spec.n_kv_heads == 0 || spec.k_dim == 0 || spec.v_dim == 0 || self.n_heads == 0 {
                return bad("heads and head_dim must be at least 1".into());
            }
            if !self.n_heads.is_multiple_of(spec.n_kv_heads) {
                return bad(format!(
                    "{} query heads do not divide into {} KV heads",
                    self.n_heads, spec.n_kv_heads
                ));
            }
            if spec.values == Values::PrefixOfK && spec.v_dim > spec.k_dim {
                return bad(format!(
                    "values of {} elements are not a prefix of keys of {}",
                    spec.v_dim, spec.k_dim
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
