//! The strongest channels of the keys. They are a property of a model's weights, measured on a sample of its keys.
use crate::layout::Layout;

/// For each KV head of each layer that stores keys: its channels, strongest first.
///
/// RoPE rotates the two channels of a pair into each other, so both count with the pair's combined energy, whatever
/// the position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelOrder {
    layers: Vec<Vec<u16>>, // per layer [n_kv_heads, head_dim]; empty for borrowers
}

impl ChannelOrder {
    /// Sorts channels by their mean square, given per layer as `[n_kv_heads, head_dim]`. Channels `i` and
    /// `i + head_dim / 2` are a RoPE pair. `None` if a layer of `layout` has other sizes.
    pub fn of_energies(layout: &Layout, energies: &[Vec<f64>]) -> Option<Self> {
        let layer = |(l, spec): (usize, &crate::LayerSpec)| {
            if !layout.owns(l) {
                return Some(Vec::new());
            }
            let (d, energies) = (spec.k_dim as usize, energies.get(l)?);
            let fits = energies.len() == spec.n_kv_heads as usize * d && u16::try_from(d).is_ok();
            fits.then(|| energies.chunks_exact(d).flat_map(strongest_first).collect())
        };
        let layers = layout.layers.iter().enumerate().map(layer).collect::<Option<_>>()?;
        (energies.len() == layout.layers.len()).then_some(ChannelOrder { layers })
    }

    /// The channel order of a layer: all KV heads, one after the other.
    pub fn layer(&self, layer: usize) -> &[u16] {
        self.layers.get(layer).map_or(&[], Vec::as_slice)
    }

    /// The order as bytes, for a hash that tells two orders apart: for every layer the number of its channels as a u32, then each as a
    /// u16, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let layer = |order: &Vec<u16>| {
            let channels = order.iter().flat_map(|channel| channel.to_le_bytes());
            (order.len() as u32).to_le_bytes().into_iter().chain(channels).collect::<Vec<_>>()
        };
        self.layers.iter().flat_map(layer).collect()
    }

    /// Whether this orders the channels of every layer of `layout`.
    pub fn fits(&self, layout: &Layout) -> bool {
        let fits = |(l, order): (usize, &Vec<u16>)| {
            let spec = &layout.layers[l];
            let d = spec.k_dim as usize;
            let whole = |head: &[u16]| {
                let mut seen = vec![false; d];
                head.iter()
                    .all(|c| seen.get_mut(*c as usize).is_some_and(|seen| !std::mem::replace(seen, true)))
            };
            match layout.owns(l) {
                true => order.len() == spec.n_kv_heads as usize * d && order.chunks_exact(d).all(whole),
                false => order.is_empty(),
            }
        };
        self.layers.len() == layout.layers.len() && self.layers.iter().enumerate().all(fits)
    }
}

/// The channels of one head by the energy of their pair, ties by channel number.
fn strongest_first(energies: &[f64]) -> Vec<u16> {
    let half = energies.len() / 2;
    let pair =
        |c: usize| energies[c] + energies.get(if c < half { c + half } else { c - half }).unwrap_or(&0.0);
    let mut order: Vec<u16> = (0..energies.len() as u16).collect();
    order.sort_by(|a, b| pair(usize::from(*b)).total_cmp(&pair(usize::from(*a))));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LayerSpec;
    use kvist_cache::{GroupId, LayerId};

    fn layout(head_dim: u32) -> Layout {
        let layer = |owner| LayerSpec::new(GroupId(0), LayerId(owner), 2, head_dim);
        Layout { n_heads: 4, layers: vec![layer(0), layer(0), layer(2)] }
    }

    #[test]
    fn pairs_stay_together_and_the_strongest_stand_first() {
        let energies = vec![vec![1.0, 2.0, 0.0, 5.0, 9.0, 0.0, 0.0, 0.0], vec![], vec![0.0; 8]];
        let order = ChannelOrder::of_energies(&layout(4), &energies).unwrap();
        assert_eq!(order.layer(0), [1, 3, 0, 2, 0, 2, 1, 3]);
        assert_eq!((order.layer(1), order.layer(2)), (&[][..], &[0, 1, 2, 3, 0, 1, 2, 3][..]));
        assert!(order.fits(&layout(4)) && !order.fits(&layout(8)));
        let bytes = order.to_bytes();
        assert_eq!((bytes.len(), &bytes[..8]), (3 * 4 + 2 * 16, &[8, 0, 0, 0, 1, 0, 3, 0][..]));
    }

    #[test]
    fn odd_heads_and_nan_have_an_order() {
        let energies = vec![vec![1.0, f64::NAN, 3.0, 1.0, 2.0, 3.0], vec![], vec![0.0; 6]];
        let order = ChannelOrder::of_energies(&layout(3), &energies).unwrap();
        assert!(order.fits(&layout(3)));
    }

    #[test]
    fn what_does_not_fit_is_none() {
        assert_eq!(ChannelOrder::of_energies(&layout(4), &[vec![0.0; 8], vec![]]), None);
        assert_eq!(ChannelOrder::of_energies(&layout(4), &[vec![0.0; 8], vec![], vec![0.0; 7]]), None);
    }
}
