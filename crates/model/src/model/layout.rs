//! What the cache and the device need to know about an architecture. Layers with the same window form a group and share
//! cell indices.
use crate::config::ModelConfig;
use kvist_cache::{GroupId, LayerId};
use kvist_device::{LayerSpec, Layout, ModelShape};

impl ModelConfig {
    /// The window of each layer group, in order of first appearance.
    pub fn group_windows(&self) -> Vec<Option<u32>> {
        let mut windows = Vec::new();
        for layer in &self.layers {
            if !windows.contains(&layer.window) {
                windows.push(layer.window);
            }
        }
        windows
    }

    pub fn layout(&self) -> Layout {
        let windows = self.group_windows();
        let layers = self.layers.iter().map(|layer| {
            let group = windows.iter().position(|w| *w == layer.window).unwrap_or(0);
            let (group, owner) = (GroupId(group as u16), LayerId(layer.owner as u16));
            LayerSpec::new(group, owner, self.n_kv_heads as u32, self.head_dim as u32)
        });
        Layout { n_heads: self.n_heads as u32, layers: layers.collect() }
    }

    /// The sizes that determine a device's buffers.
    pub fn shape(&self) -> ModelShape {
        let all_routed = self.layers.iter().all(|layer| layer.routed);
        ModelShape {
            hidden: self.hidden,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            intermediate: if all_routed { 0 } else { self.intermediate },
            routing: self.experts.map(|experts| experts.routing),
            rope_pairs: self.ropes.iter().map(|rope| rope.dim / 2).collect(),
            features: self.features,
        }
    }
}
