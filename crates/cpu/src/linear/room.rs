//! Buffers of a thread for kernels that decode weights.
use super::inputs::TILE_TOKENS;
use super::pair_tiles::{MOST_TOKENS, MOST_TOKENS_OF_PAIRS, SUMS, WEIGHTS};
use super::wide;
use crate::Compute;
use crate::arch::LANES;

/// Four codes of sixteen rows.
pub type Line = [u8; 4 * LANES];

/// They take memory only when a kernel uses them.
#[derive(Debug)]
pub struct Room {
    /// Most tokens that tiles take at once.
    pub most_tokens: usize,
    /// `[tokens][panels][outputs]`.
    sums: Vec<f32>,
    /// `[2 panels][steps][16 pairs][outputs]`: weights as pairs of bf16.
    weights: Vec<u32>,
    /// [`wide`] weights: lines of codes, and scales.
    codes: Vec<u8>,
    scales: Vec<[f32; LANES]>,
}

impl Room {
    pub fn new(compute: &Compute) -> Self {
        let most_tokens = if compute.fast_tiles().is_some() { MOST_TOKENS } else { MOST_TOKENS_OF_PAIRS };
        let (codes, scales) = (Vec::new(), Vec::new());
        Room { most_tokens, sums: Vec::new(), weights: Vec::new(), codes, scales }
    }
    /// Most bytes for `n` tokens of `width` inputs.
    pub fn bytes(compute: &Compute, n: usize, width: usize) -> usize {
        match compute.isa.tiles() {
            Some(_) => 4 * (Self::new(compute).sums(n) + WEIGHTS + 2 * LANES),
            None if wide::is_used(compute, n) => 64 * (wide::lines(width) + 1 + wide::scales(width)),
            None => 0,
        }
    }
    fn sums(&self, n: usize) -> usize {
        SUMS * n.min(self.most_tokens).next_multiple_of(TILE_TOKENS)
    }
    /// The sums and the weights of tiles; both begin on cache lines.
    pub fn of_tiles(&mut self, n: usize) -> (&mut [f32], &mut [u32]) {
        let len = self.sums.len().max(self.sums(n) + LANES);
        let Room { sums, weights, .. } = self;
        sums.reserve_exact(len - sums.len());
        sums.resize(len, 0.0);
        weights.reserve_exact(WEIGHTS + LANES - weights.len());
        weights.resize(WEIGHTS + LANES, 0);
        let (first, second) = (sums.as_ptr().align_offset(64), weights.as_ptr().align_offset(64));
        (&mut sums[first.min(LANES)..], &mut weights[second.min(LANES)..])
    }

    /// Lines of codes, which are cache lines (a vector that lies in two takes two reads), and scales of the wide weights of a
    /// few panels with rows of `width` inputs.
    pub fn of_bytes(&mut self, width: usize) -> (&mut [Line], &mut [[f32; LANES]]) {
        let (n_lines, n_scales) = (wide::lines(width), wide::scales(width));
        let n_bytes = (n_lines + 1) * size_of::<Line>();
        let Room { codes, scales, .. } = self;
        if codes.len() < n_bytes {
            // Never both buffers at a time: the plan counts one.
            (*codes, *scales) = (Vec::new(), Vec::new());
            codes.reserve_exact(n_bytes);
            codes.resize(n_bytes, 0);
            scales.reserve_exact(n_scales);
            scales.resize(n_scales, [0.0; LANES]);
        }
        let first = codes.as_ptr().align_offset(64).min(64);
        let (lines, _) = codes[first..].as_chunks_mut();
        (&mut lines[..n_lines], &mut scales[..n_scales])
    }
}
