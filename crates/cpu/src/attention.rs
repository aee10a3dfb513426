//! Attention over packed rows, portable.
//!
//! ```text
//! for each KV head, on its own:                              (the heads are independent: threads take them)
//!   gather its queries, in slot order, turned if K is stored turned
//!   for each item (queries × a run of cells):
//!     for each tile of 64 cells, cut at fixed indices of the sequence:
//!       for each block of queries that see any of it:        (all query heads of the KV head together)
//!         s = scale · q·k, capped, −∞ where not visible
//!         m' = max(m, max s);  w = exp(s − m');  l = l·exp(m − m') + Σ w;  o = o·exp(m − m') + Σ w·v
//!   out = o / l, turned back if V is stored turned
//! ```
//!
//! (online softmax: Milakov and Gimelshein, 2018; tiling: Dao et al., 2022). Every tile is decoded once per block of
//! [`BLOCK_ROWS`] query rows. Bytes: each stored row of an item once from memory. The order of additions is fixed by
//! the items, so that the number of threads changes nothing.
use crate::pool::{KeyPool, ValuePool};
use crate::rotation::rotate;
use kvist_backend::{BackendError, Layout, MemoryBudget, Purpose, Reservation, Storage};
use kvist_cache::{Mask, ReadItem, Reads, Run};
use rayon::prelude::*;
use std::sync::Arc;

const TILE: u32 = 64;
const BLOCK_ROWS: usize = 32;
/// Steps of fewer tokens than this are not worth waking threads for, and must not allocate.
const PARALLEL_TOKENS: usize = 16;

/// Working memory of the largest step, for the largest layer.
pub struct Scratch {
    q: Vec<f32>,      // [n_kv_heads, slots, heads per KV head, head_dim]
    sums: Vec<f32>,   // the same
    max: Vec<f32>,    // [n_kv_heads, slots, heads per KV head]
    norm: Vec<f32>,   // the same
    scores: Vec<f32>, // [n_kv_heads, block rows, TILE]
    row: Vec<f32>,    // [n_kv_heads, head_dim]
    _held: Reservation,
}

/// Floats of each buffer, in the order of the fields.
fn floats(layout: &Layout, max_step_tokens: u32) -> Option<[usize; 6]> {
    let heads = layout.n_heads as usize;
    let head_dim = layout.max_head_dim() as usize;
    let kv_heads = layout.layers.iter().map(|l| l.n_kv_heads as usize).max().unwrap_or(0);
    let rows = heads.checked_mul(max_step_tokens as usize)?;
    let block =
        layout.layers.iter().map(|l| block_slots(heads, l.n_kv_heads as usize) * heads).max().unwrap_or(0);
    let wide = rows.checked_mul(head_dim)?;
    Some([wide, wide, rows, rows, block.checked_mul(TILE as usize)?, kv_heads.checked_mul(head_dim)?])
}

/// Query slots of one block, whose rows are those of all query heads of a KV head.
fn block_slots(heads: usize, kv_heads: usize) -> usize {
    (BLOCK_ROWS / (heads / kv_heads)).max(1)
}

impl Scratch {
    pub fn bytes(layout: &Layout, max_step_tokens: u32) -> Option<u64> {
        let floats = floats(layout, max_step_tokens)?;
        let all = floats.iter().try_fold(0usize, |sum, n| sum.checked_add(*n))?;
        u64::try_from(all.checked_mul(size_of::<f32>())?).ok()
    }

    pub fn new(
        layout: &Layout,
        max_step_tokens: u32,
        budget: &Arc<MemoryBudget>,
    ) -> Result<Self, BackendError> {
        let overflow =
            || BackendError::Unsupported("a step of that many tokens overflows the scratch".into());
        let sizes = floats(layout, max_step_tokens).ok_or_else(overflow)?;
        let bytes = Self::bytes(layout, max_step_tokens).ok_or_else(overflow)?;
        let held = budget.reserve(Purpose::Scratch, bytes)?;
        let buffer = |n: usize| {
            let mut all = Vec::new();
            let refused = |_| BackendError::OutOfMemory { what: "scratch", bytes };
            all.try_reserve_exact(n).map_err(refused)?;
            all.resize(n, 0f32);
            Ok::<_, BackendError>(all)
        };
        let [q, sums, max, norm, scores, row] = sizes;
        Ok(Scratch {
            q: buffer(q)?,
            sums: buffer(sums)?,
            max: buffer(max)?,
            norm: buffer(norm)?,
            scores: buffer(scores)?,
            row: buffer(row)?,
            _held: held,
        })
    }
}

/// One layer's attention.
pub struct Layer<'l> {
    pub keys: &'l dyn KeyPool,
    pub values: &'l dyn ValuePool,
    pub k: Storage,
    pub v: Storage,
    pub reads: &'l Reads,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// What one KV head works with: its parts of the scratch.
struct Part<'s> {
    head: u32,
    q: &'s mut [f32],
    sums: &'s mut [f32],
    max: &'s mut [f32],
    norm: &'s mut [f32],
    scores: &'s mut [f32],
    row: &'s mut [f32],
}

impl Layer<'_> {
    fn per_kv(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Attend with the queries that `query(token, head)` gives, and hand every output row to `put`.
    pub fn run<'q>(
        &self,
        scratch: &mut Scratch,
        query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync),
        put: &mut dyn FnMut(usize, usize, &[f32]),
    ) {
        let slots = self.reads.order.len();
        let rows = slots * self.per_kv();
        let wide = rows * self.head_dim;
        let block = block_slots(self.heads, self.kv_heads) * self.per_kv() * TILE as usize;
        // Row maxima end where the batch ends, however large the scratch is.
        let mut q = scratch.q.chunks_exact_mut(wide);
        let mut sums = scratch.sums.chunks_exact_mut(wide);
        let mut max = scratch.max.chunks_exact_mut(rows);
        let mut norm = scratch.norm.chunks_exact_mut(rows);
        let mut scores = scratch.scores.chunks_exact_mut(block);
        let mut row = scratch.row.chunks_exact_mut(self.head_dim);
        let mut part = |head: usize| {
            Some(Part {
                head: head as u32,
                q: q.next()?,
                sums: sums.next()?,
                max: max.next()?,
                norm: norm.next()?,
                scores: scores.next()?,
                row: row.next()?,
            })
        };
        if slots >= PARALLEL_TOKENS && self.kv_heads > 1 {
            let parts: Vec<Part<'_>> = (0..self.kv_heads).filter_map(&mut part).collect();
            parts.into_par_iter().for_each(|mut part| self.attend(&mut part, query));
        } else {
            for head in 0..self.kv_heads {
                if let Some(mut part) = part(head) {
                    self.attend(&mut part, query);
                }
            }
        }
        for (kv_head, sums) in scratch.sums.chunks_exact(wide).take(self.kv_heads).enumerate() {
            for (i, row) in sums.chunks_exact(self.head_dim).enumerate() {
                let token = self.reads.order[i / self.per_kv()] as usize;
                put(token, kv_head * self.per_kv() + i % self.per_kv(), row);
            }
        }
    }

    /// One KV head: all its queries over all items.
    fn attend<'q>(&self, part: &mut Part<'_>, query: &(dyn Fn(usize, usize) -> &'q [f32] + Sync)) {
        let (per_kv, head_dim) = (self.per_kv(), self.head_dim);
        for (i, q) in part.q.chunks_exact_mut(head_dim).enumerate() {
            let token = self.reads.order[i / per_kv] as usize;
            q.copy_from_slice(query(token, part.head as usize * per_kv + i % per_kv));
            if self.k.rotate {
                rotate(q);
            }
        }
        part.sums.fill(0.0);
        part.max.fill(f32::NEG_INFINITY);
        part.norm.fill(0.0);
        for item in &self.reads.items {
            let mut done = 0;
            while done < item.run.len {
                // Tiles end at multiples of TILE in the sequence, wherever its cells lie.
                let to_edge = TILE - (item.first_index + done) % TILE;
                let len = to_edge.min(item.run.len - done);
                self.tile(part, item, done, len);
                done += len;
            }
        }
        for (i, sums) in part.sums.chunks_exact_mut(head_dim).enumerate() {
            let inverse = 1.0 / part.norm[i];
            sums.iter_mut().for_each(|x| *x *= inverse);
            if self.v.rotate {
                rotate(sums);
            }
        }
    }

    /// The cells `offset..offset + len` of an item, for all its queries.
    fn tile(&self, part: &mut Part<'_>, item: &ReadItem, offset: u32, len: u32) {
        let slots = block_slots(self.heads, self.kv_heads) as u32;
        let mut first = 0;
        while first < item.n_queries {
            let n = slots.min(item.n_queries - first);
            // What any query of the block sees of the tile: bands move with the query, so the ends bound it.
            let (a, b) = (self.reads.span_of(item, first), self.reads.span_of(item, first + n - 1));
            let from = a.start.min(b.start).max(offset);
            let until = a.end.max(b.end).min(offset + len);
            if from < until {
                self.block(part, item, first, n, from, until);
            }
            first += n;
        }
    }

    /// Query slots `first..first + n` of an item over its cells `from..until`.
    fn block(&self, part: &mut Part<'_>, item: &ReadItem, first: u32, n: u32, from: u32, until: u32) {
        let (per_kv, head_dim, stride) = (self.per_kv(), self.head_dim, TILE as usize);
        let run = Run { start: item.run.start + from, len: until - from };
        let width = run.len as usize;
        let rows = n as usize * per_kv;
        let row0 = (item.first_query + first) as usize * per_kv;
        let scores = &mut part.scores[..rows * stride];
        let q = &part.q[row0 * head_dim..(row0 + rows) * head_dim];
        self.keys.scores(part.head, run, q, scores, stride, part.row);

        for (r, line) in scores.chunks_exact_mut(stride).enumerate() {
            let line = &mut line[..width];
            line.iter_mut().for_each(|s| *s *= self.scale);
            if let Some(cap) = self.softcap {
                line.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
            }
            self.hide(item, first + (r / per_kv) as u32, from, line);
            let (max, norm) = (&mut part.max[row0 + r], &mut part.norm[row0 + r]);
            // `max` would let a NaN disappear; a broken row must stay broken.
            let peak = line.iter().fold(*max, |m, s| if *s > m || s.is_nan() { *s } else { m });
            if peak == f32::NEG_INFINITY {
                line.fill(0.0); // this row sees nothing of the tile
                continue;
            }
            let shrink = (*max - peak).exp();
            if shrink != 1.0 {
                let sums = &mut part.sums[(row0 + r) * head_dim..(row0 + r + 1) * head_dim];
                sums.iter_mut().for_each(|x| *x *= shrink);
            }
            let mut total = 0.0;
            for s in line.iter_mut() {
                *s = (*s - peak).exp();
                total += *s;
            }
            *norm = *norm * shrink + total;
            *max = peak;
        }
        let sums = &mut part.sums[row0 * head_dim..(row0 + rows) * head_dim];
        self.values.accumulate(part.head, run, &part.scores[..rows * stride], stride, sums, part.row);
    }

    /// −∞ where query slot `slot` of the item does not see `line`, the scores of its cells from `from` on.
    fn hide(&self, item: &ReadItem, slot: u32, from: u32, line: &mut [f32]) {
        match item.mask {
            Mask::All => {}
            Mask::Band { .. } => {
                let seen = self.reads.span_of(item, slot);
                let width = line.len();
                let start = (seen.start.saturating_sub(from) as usize).min(width);
                let end = (seen.end.saturating_sub(from) as usize).clamp(start, width);
                line[..start].fill(f32::NEG_INFINITY);
                line[end..].fill(f32::NEG_INFINITY);
            }
            Mask::Bits { .. } => {
                for (i, s) in line.iter_mut().enumerate() {
                    if !self.reads.sees(item, slot, from + i as u32) {
                        *s = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}
