//! The axes, and a sample of their product in which any two values of any two axes occur together.
use super::shapes::{SHAPES, Shape};
use crate::reference::Choices;
use kvist_cache::{GroupId, LayerId};
use kvist_device::{ChannelOrder, DType, LayerSpec, Layout, Side, Storage};
use std::fmt;

/// Query heads and KV heads: MHA, GQA 2, 4 and 8, MQA.
const HEADS: [(u32, u32); 6] = [(2, 2), (4, 2), (8, 2), (16, 2), (5, 1), (3, 3)];
const HEAD_DIMS: [u32; 7] = [24, 32, 64, 80, 96, 128, 256];
const LENGTHS: [u32; 16] = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 258];
const RECENT: [u32; 4] = [0, 1, 16, 64];
const SOFTCAPS: [Option<f32>; 3] = [None, Some(3.0), Some(50.0)];

/// How the layers of a case relate to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// One layer.
    Alone,
    /// Two owners with two borrowing layers, one of them not adjacent to its owner.
    Borrowed,
    /// Two layer groups with different windows.
    Windows,
    /// Two layer groups, each with a borrowing layer, interleaved.
    WindowsBorrowed,
    /// Two layers with different head_dim and KV heads in one group; 40 is not a multiple of the vector width.
    Uneven,
}

const SHARINGS: [Sharing; 5] =
    [Sharing::Alone, Sharing::Borrowed, Sharing::Windows, Sharing::WindowsBorrowed, Sharing::Uneven];

/// Memory layout of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strides {
    Dense,
    /// q, k and v of a token next to each other in one buffer.
    Fused,
    HeadMajor,
    /// NaN between all rows.
    Padded,
}

const STRIDES: [Strides; 4] = [Strides::Dense, Strides::Fused, Strides::HeadMajor, Strides::Padded];

/// Every dtype, both group sizes where there are groups, with and without rotation; for keys also with outliers.
fn storages(side: Side, has: fn(Storage) -> bool) -> Vec<Storage> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        for group in if dtype.has_groups() { &[32, 64][..] } else { &[32] } {
            for rotate in [false, true] {
                all.push(Storage { group: *group, rotate, ..Storage::new(dtype) });
            }
        }
    }
    // `T4` always rotates.
    all.retain(|storage| *storage != Storage { rotate: true, ..Storage::T4 });
    all.extend((side == Side::K).then_some(Storage::T4_O));
    all.retain(|storage| has(*storage));
    all
}

/// One point of the product of all axes.
#[derive(Clone)]
pub struct Case {
    pub shape: &'static Shape,
    pub k: Storage,
    pub v: Storage,
    pub heads: (u32, u32),
    pub head_dim: u32,
    pub length: u32,
    pub sharing: Sharing,
    pub strides: Strides,
    pub softcap: Option<f32>,
    /// Sink scores per head: far below, close to and far above the other scores.
    pub sinks: bool,
    /// Tokens per group that is read in f16.
    pub recent: u32,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { shape, k, v, heads, head_dim, length, sharing, strides, softcap, sinks, recent } = self;
        write!(
            f,
            "{} · {} | k {k} v {v} | {}:{} heads of {head_dim} | length {length} | {sharing:?} {strides:?} softcap {softcap:?} sinks {sinks} recent {recent}",
            shape.kind, shape.name, heads.0, heads.1
        )
    }
}

impl Case {
    pub fn sinks(&self) -> Option<Vec<f32>> {
        let scores = |head: u32| [0.5, -2.0, 30.0, -30.0][head as usize % 4];
        self.sinks.then(|| (0..self.heads.0).map(scores).collect())
    }

    pub fn n_groups(&self) -> usize {
        1 + usize::from(matches!(self.sharing, Sharing::Windows | Sharing::WindowsBorrowed))
    }

    /// A channel order for every head, for storages that use it.
    pub fn channels(&self) -> Option<ChannelOrder> {
        let layout = self.layout();
        let energy = |layer: &LayerSpec| {
            let channels = 0..layer.n_kv_heads * layer.k_dim;
            channels.map(|c| f64::from(c.wrapping_mul(2_654_435_761) >> 20)).collect()
        };
        let energies: Vec<Vec<f64>> = layout.layers.iter().map(energy).collect();
        ChannelOrder::of_energies(&layout, &energies)
    }

    pub fn layout(&self) -> Layout {
        let layer = |group: u16, owner: u16| {
            LayerSpec::new(GroupId(group), LayerId(owner), self.heads.1, self.head_dim)
        };
        let layers = match self.sharing {
            Sharing::Alone => vec![layer(0, 0)],
            Sharing::Borrowed => vec![layer(0, 0), layer(0, 1), layer(0, 0), layer(0, 1)],
            Sharing::Windows => vec![layer(0, 0), layer(1, 1)],
            Sharing::WindowsBorrowed => vec![layer(1, 0), layer(0, 1), layer(1, 0), layer(0, 1)],
            Sharing::Uneven => {
                vec![layer(0, 0), LayerSpec::new(GroupId(0), LayerId(1), self.heads.0, 40)]
            }
        };
        Layout { n_heads: self.heads.0, layers }
    }
}

const N_AXES: usize = 11;

/// Samples cases in which any two values of any two axes occur together: take a pair that has not occurred yet, and
/// give every other axis the value that adds the most new pairs (after AETG: Cohen et al., 1997). `has` says which storages
/// there are.
pub fn sample(seed: u64, has: fn(Storage) -> bool) -> Vec<Case> {
    let (keys, values) = (storages(Side::K, has), storages(Side::V, has));
    let sizes: [usize; N_AXES] = [
        SHAPES.len(),
        keys.len(),
        values.len(),
        HEADS.len(),
        HEAD_DIMS.len(),
        LENGTHS.len(),
        SHARINGS.len(),
        STRIDES.len(),
        SOFTCAPS.len(),
        2,
        RECENT.len(),
    ];
    let mut choices = Choices::from_seed(seed, u64::MAX);
    let widest = sizes.iter().copied().max().unwrap_or(0);
    let at = |(a, x): (usize, usize), (b, y): (usize, usize)| ((a * widest + x) * N_AXES + b) * widest + y;
    let mut met = vec![false; N_AXES * widest * N_AXES * widest];
    let mut cases = Vec::new();
    for a in 0..N_AXES {
        for b in a + 1..N_AXES {
            for pair in 0..sizes[a] * sizes[b] {
                let (x, y) = (pair / sizes[b], pair % sizes[b]);
                if met[at((a, x), (b, y))] {
                    continue;
                }
                let mut row = [None; N_AXES];
                (row[a], row[b]) = (Some(x), Some(y));
                let first = choices.below(N_AXES as u32) as usize;
                for axis in (0..N_AXES).map(|i| (first + i) % N_AXES) {
                    if row[axis].is_some() {
                        continue;
                    }
                    let start = choices.below(sizes[axis] as u32) as usize;
                    let gain = |value: usize| {
                        let set = row.iter().enumerate().filter_map(|(b, y)| y.map(|y| (b, y)));
                        set.filter(|other| !met[at((axis, value), *other)]).count()
                    };
                    row[axis] =
                        (0..sizes[axis]).map(|i| (start + i) % sizes[axis]).max_by_key(|value| gain(*value));
                }
                let row = row.map(|value| value.unwrap_or(0));
                for (a, x) in row.into_iter().enumerate() {
                    for (b, y) in row.into_iter().enumerate() {
                        met[at((a, x), (b, y))] = true;
                    }
                }
                cases.push(Case {
                    shape: &SHAPES[row[0]],
                    k: keys[row[1]],
                    v: values[row[2]],
                    heads: HEADS[row[3]],
                    head_dim: HEAD_DIMS[row[4]],
                    length: LENGTHS[row[5]],
                    sharing: SHARINGS[row[6]],
                    strides: STRIDES[row[7]],
                    softcap: SOFTCAPS[row[8]],
                    sinks: row[9] == 1,
                    recent: RECENT[row[10]],
                });
            }
        }
    }
    cases
}
