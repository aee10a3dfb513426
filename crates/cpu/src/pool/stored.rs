//! Rows in blocks, for tests of kernels.
use super::rows::param_at;
use super::{Block, Codec, Geometry, with_codec};
use crate::arch::LANES;
use half::f16;
use kvist_device::Side;
use kvist_testing::SplitMix64;

/// Between −1 and 1.
pub fn float(random: &mut SplitMix64) -> f32 {
    (random.unit() * 2.0 - 1.0) as f32
}

/// Blocks of random rows, as one head of a pool stores them.
pub struct Stored {
    pub geometry: Geometry,
    codes: Vec<u8>,
    pub params: Vec<u8>,
    /// What the stored rows are.
    pub rows: Vec<Vec<f32>>,
}

impl Stored {
    pub fn new(side: Side, storage: &str, head_dim: usize, n_blocks: usize, random: &mut SplitMix64) -> Self {
        Self::of(side, storage, head_dim, n_blocks, |_| {
            (0..head_dim).map(|_| float(random) * 2f32.powi(random.below(8) as i32 - 4)).collect()
        })
    }

    /// Of the rows that `row` makes for each cell.
    pub fn of(
        side: Side,
        storage: &str,
        head_dim: usize,
        n_blocks: usize,
        mut row: impl FnMut(usize) -> Vec<f32>,
    ) -> Self {
        let geometry = Geometry::new(side, storage.parse().unwrap(), 1, head_dim as u32);
        let mut stored = Stored {
            geometry,
            codes: vec![0; n_blocks * geometry.block_codes()],
            params: vec![0; n_blocks * geometry.block_params()],
            rows: Vec::new(),
        };
        let (mut codes, mut params) = (vec![0; geometry.row], vec![f16::ZERO; geometry.params]);
        for cell in 0..n_blocks * LANES {
            let row = row(cell);
            let mut decoded = vec![0.0; head_dim];
            with_codec!(geometry.storage.dtype, C => {
                assert!(C::encode(&row, geometry.group, &mut codes, &mut params));
                C::decode(&codes, &params, geometry.group, &mut decoded);
            });
            let (block, lane) = (cell / LANES, cell % LANES);
            geometry.scatter(&mut stored.codes[block * geometry.block_codes()..], lane, &codes);
            for (p, param) in params.iter().enumerate() {
                let at = block * geometry.block_params() + param_at(p, lane).start;
                stored.params[at..at + 2].copy_from_slice(&param.to_le_bytes());
            }
            stored.rows.push(decoded);
        }
        stored
    }

    pub fn block(&self, i: usize) -> Block<'_> {
        let part = |bytes: &'_ [u8], len: usize| i * len..(i + 1) * len.min(bytes.len());
        let codes = &self.codes[part(&self.codes, self.geometry.block_codes())];
        let params = &self.params[part(&self.params, self.geometry.block_params())];
        Block { codes, params, ahead: 64, soon: &[] }
    }
}
