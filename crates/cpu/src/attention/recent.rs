//! Recent tokens of a tile: computes their scores and weighted values from f16 rows instead of the pool.
use crate::arch::{Kernel, LANES, Simd, Uses};
use crate::recent::RecentReads;
use kvist_device::RecentRead;
use std::ops::Range;

/// The recent rows that one token reads in a tile, for all query heads of a KV head.
#[derive(Clone, Copy)]
pub struct TileReads<'o> {
    layer: RecentReads<'o>,
    /// The rows inside the tile.
    reads: &'o [RecentRead],
    head: usize,
    /// The sequence index at the start of the tile, and its place in a line.
    first: (u32, usize),
}

impl<'o> TileReads<'o> {
    /// The recent rows that `token` reads of the sequence indices `indices`. The first index is at place `first` in a
    /// line.
    pub fn new(
        layer: RecentReads<'o>,
        token: usize,
        head: usize,
        indices: &Range<u32>,
        first: usize,
    ) -> Self {
        let all = layer.of(token);
        let below = |index: u32| all.partition_point(|read| read.index < index);
        let reads = &all[below(indices.start)..below(indices.end)];
        TileReads { layer, reads, head, first: (indices.start, first) }
    }

    /// Number of rows read.
    pub fn len(&self) -> usize {
        self.reads.len()
    }

    /// The rows and their places in a line.
    fn rows(&self) -> impl Iterator<Item = (&'o RecentRead, usize)> + use<'o> {
        let (index, place) = self.first;
        self.reads.iter().map(move |read| (read, place + (read.index - index) as usize))
    }

    /// Moves the weights of these rows out of the lines, row by row, and leaves zeros.
    pub fn take_weights(&self, lines: &mut [f32], stride: usize, weights: &mut Vec<f32>) {
        for (_, at) in self.rows() {
            weights.extend(lines.chunks_exact_mut(stride).map(|line| std::mem::take(&mut line[at])));
        }
    }
}

/// Scores, one line per query: `lines[query][place] = q · k`.
pub struct RecentScores<'k> {
    pub reads: TileReads<'k>,
    /// One row per query, scaled and padded to whole vectors.
    pub queries: &'k [f32],
    pub lines: &'k mut [f32],
    pub stride: usize,
}

impl Kernel for RecentScores<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_rows = self.lines.len() / self.stride;
        let width = self.queries.len() / n_rows;
        for (read, at) in self.reads.rows() {
            let key = self.reads.layer.key(read, self.reads.head);
            let lines = self.lines.chunks_exact_mut(self.stride);
            for (line, query) in lines.zip(self.queries.chunks_exact(width)) {
                let mut sum = s.splat(0.0);
                for (k, q) in key.iter().zip(query.as_chunks::<LANES>().0) {
                    sum = s.fma(s.load_f16(k), s.load(q), sum);
                }
                line[at] = s.sum(sum);
            }
        }
    }
}

/// Weighted sums, one state per query: `sums[query] += Σ weight · v`.
pub struct RecentSums<'k> {
    pub reads: TileReads<'k>,
    /// For every row the weights of all queries, row by row.
    pub weights: &'k [f32],
    pub states: &'k mut [f32],
    pub state: usize,
    pub head_dim: usize,
}

impl Kernel for RecentSums<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_rows = self.states.len() / self.state;
        for ((read, _), weights) in self.reads.rows().zip(self.weights.chunks_exact(n_rows)) {
            let value = self.reads.layer.value(read, self.reads.head);
            for (state, weight) in self.states.chunks_exact_mut(self.state).zip(weights) {
                let weight = s.splat(*weight);
                let (sums, rest) = state[..self.head_dim].as_chunks_mut::<LANES>();
                let mut value = value.iter();
                for (sum, v) in sums.iter_mut().zip(&mut value) {
                    s.store(s.fma(s.load_f16(v), weight, s.load(sum)), sum);
                }
                if let Some(v) = value.next() {
                    let mut last = [0.0; LANES];
                    last[..rest.len()].copy_from_slice(rest);
                    s.store(s.fma(s.load_f16(v), weight, s.load(&last)), &mut last);
                    rest.copy_from_slice(&last[..rest.len()]);
                }
            }
        }
    }
}
