//! Scratch memory of attention, reserved once for the largest step of the largest layer.
use super::tile_items::TileItems;
use super::{BLOCK_ROWS, LONG_TILE, LONG_TILE_ROWS, SPLIT, TILE, UNIT_ROWS};
use crate::Compute;
use crate::aligned::Aligned;
use crate::arch::LANES;
use crate::pool::pairs::{self, Products};
use crate::pool::{PackedQuery, QUERY_ROWS, Quads};
use kvist_device::{DeviceError, Layout, MemoryBudget, PoolSpec, Purpose, Reservation};
use std::sync::Arc;

/// Floats of a row's state in addition to its sums: a norm per lane, and the maximum, which takes a vector so that with
/// most heads the next row begins at a cache line.
pub const EXTRA: usize = 2 * LANES;
/// Floats before and after a tile in a line of scores.
pub const PAD: usize = LANES;

/// Floats after that. Scores next to a stretch of cells are saved here while a kernel overwrites their places.
pub const SPARE: usize = 2 * PAD;

/// Scratch of one thread.
pub struct ThreadScratch {
    pub row: Aligned<f32>,     // [head_dim]
    pub queries: Aligned<f32>, // [rows of a unit / QUERY_ROWS, head_dim, QUERY_ROWS]
    pub packed: Vec<PackedQuery>,
    pub plain: Aligned<f32>, // [rows of a unit, head_dim in whole vectors], if recent keys are read in f16
    pub partial: Aligned<f32>, // [rows of a unit, head_dim + EXTRA]
    pub lines: Aligned<f32>, // [rows of a block, tile + 2 * PAD + SPARE]
    pub quads: Box<Quads>,
    pub tile_items: TileItems,
    pub weights: Vec<f32>, // of values read in f16: at most [rows of a block × recent tokens]
    // For products of pairs.
    pub split_queries: Aligned<u32>,
    pub packed_tiles: Aligned<u32>,
    pub weight_tiles: Aligned<u32>,
}

/// Scratch of all threads.
pub struct Scratch {
    pub states: Aligned<f32>, // [units][rows of a unit][head_dim + EXTRA]
    pub threads: Vec<ThreadScratch>,
    /// Of [`Layer::mass`](super::Layer::mass): empty until it is asked for, and outside the budget. 4 bytes per KV head and
    /// visible cell of a sequence, eight times that for prompts.
    pub mass: Vec<f32>,
    reservation: Reservation,
}

/// Most splits of a token with a state each, which run in parallel. A longer context processes its splits one after
/// the other.
const MAX_SPLITS: usize = 64;

/// Elements of each buffer.
struct Sizes {
    states: usize,
    queries: usize,
    packed: usize,
    plain: usize,
    weights: usize,
    partial: usize,
    lines: usize,
    split_queries: usize,
    packed_tiles: usize,
    weight_tiles: usize,
    /// Query slots per unit.
    slots: usize,
    head_dim: usize,
    threads: usize,
}

impl Sizes {
    fn of(spec: &PoolSpec, compute: &Compute) -> Option<Self> {
        let threads = compute.threads.n();
        let Layout { n_heads, layers } = &spec.layout;
        let (heads, tokens) = (*n_heads as usize, spec.max_step_tokens as usize);
        let head_dim = spec.layout.max_head_dim() as usize;
        let per_kv = layers.iter().map(|l| heads / l.n_kv_heads.max(1) as usize).max().unwrap_or(1);
        let unit_rows = UNIT_ROWS.max(per_kv).min(per_kv.checked_mul(tokens.max(1))?);
        let state = head_dim.checked_add(EXTRA)?;
        // Units have full size, though the last one of each KV head may be partly used. A single token has one state
        // per split.
        let cells = spec.capacity_cells.iter().copied().max().unwrap_or(0);
        let rows = heads.checked_mul(tokens)?;
        let filled = rows.checked_add(unit_rows.checked_mul(heads)?)?;
        let split = heads.checked_mul((cells.div_ceil(SPLIT) as usize + 1).min(MAX_SPLITS))?;
        let line = |tile: usize| tile + 2 * PAD + SPARE;
        // Both may be in use: exact products of float dtypes and fast ones of packed ones.
        let products = [compute.exact_pairs(), compute.fast_pairs()];
        let precisions = |dtype| {
            let fitting = products.into_iter().flatten().filter(move |products| products.multiply(dtype));
            fitting.map(Products::precision)
        };
        let packed = |dtype| precisions(dtype).map(|by| pairs::packed_len(head_dim, dtype, by)).max();
        let any = packed(spec.k.dtype).max(packed(spec.v.dtype));
        let split_queries =
            precisions(spec.k.dtype).map(|by| pairs::split_len(head_dim, unit_rows, by)).max();
        // Vectors read weights where they are.
        let tiles = products.into_iter().flatten().filter(|products| matches!(products, Products::Tiles(..)));
        let tiles = tiles.filter(|products| products.multiply(spec.v.dtype)).map(Products::precision);
        let weight_tiles = tiles.map(pairs::weights_len).max();
        let block_rows = if any.is_some() { unit_rows } else { BLOCK_ROWS.max(per_kv) };
        let lines = (BLOCK_ROWS.max(per_kv) * line(TILE)).max(LONG_TILE_ROWS * line(LONG_TILE));
        let lines = match any {
            None => lines,
            Some(_) => lines.max(unit_rows * line(LONG_TILE)),
        };
        Some(Sizes {
            states: filled.min(rows.max(1).checked_mul(2)?).max(split).checked_mul(state)?,
            queries: unit_rows.next_multiple_of(QUERY_ROWS).checked_mul(head_dim)?,
            packed: if spec.k.dtype.is_quantised() { unit_rows } else { 0 },
            plain: match spec.k.dtype.is_quantised() && spec.recent.tokens > 0 {
                true => unit_rows.checked_mul(head_dim.checked_next_multiple_of(LANES)?)?,
                false => 0,
            },
            weights: match spec.v.dtype.is_quantised() {
                true => block_rows.checked_mul(spec.recent.tokens as usize)?,
                false => 0,
            },
            partial: unit_rows.checked_mul(state)?,
            lines,
            split_queries: split_queries.unwrap_or(0),
            packed_tiles: any.unwrap_or(0),
            weight_tiles: weight_tiles.unwrap_or(0),
            slots: unit_rows.min(tokens),
            head_dim,
            threads,
        })
    }

    fn bytes(&self) -> Option<u64> {
        let add = |total: usize, n: usize| total.checked_add(Aligned::<f32>::bytes(n)?);
        let floats = [self.head_dim, self.queries, self.plain, self.partial, self.lines];
        let pairs = [self.split_queries, self.packed_tiles, self.weight_tiles];
        let buffers = floats.into_iter().chain(pairs).try_fold(0, add)?;
        let packed = self.packed.checked_mul(size_of::<PackedQuery>() + PackedQuery::bytes(self.head_dim))?;
        let thread = buffers.checked_add(self.weights.checked_mul(4)?)?.checked_add(packed)?;
        let thread = thread.checked_add(size_of::<Quads>() + TileItems::bytes(self.slots))?;
        let all = Aligned::<f32>::bytes(self.states)?.checked_add(thread.checked_mul(self.threads)?)?;
        u64::try_from(all).ok()
    }
}

fn overflow() -> DeviceError {
    DeviceError::Unsupported("a step of that many tokens overflows the scratch".into())
}

impl Scratch {
    pub fn bytes(spec: &PoolSpec, compute: &Compute) -> Option<u64> {
        Sizes::of(spec, compute)?.bytes()
    }

    pub fn new(spec: &PoolSpec, compute: &Compute, budget: &Arc<MemoryBudget>) -> Result<Self, DeviceError> {
        let sizes = Sizes::of(spec, compute).ok_or_else(overflow)?;
        let reservation = budget.reserve(Purpose::Scratch, sizes.bytes().ok_or_else(overflow)?)?;
        Scratch::of(&sizes, reservation)
    }

    /// Becomes as large as `spec` needs. On an error it stays as it is.
    pub fn resize(&mut self, spec: &PoolSpec, compute: &Compute) -> Result<(), DeviceError> {
        let sizes = Sizes::of(spec, compute).ok_or_else(overflow)?;
        let (before, after) = (self.reservation.bytes(), sizes.bytes().ok_or_else(overflow)?);
        if before == after {
            return Ok(());
        }
        self.reservation.grow(after.saturating_sub(before))?;
        // For a moment there are both: a budget that is just large enough for the new one must do.
        let nothing = Reservation::empty(self.reservation.budget(), Purpose::Scratch);
        let resized = Scratch::of(&sizes, nothing)
            .inspect_err(|_| self.reservation.shrink(after.saturating_sub(before)))?;
        (self.states, self.threads) = (resized.states, resized.threads);
        self.reservation.shrink(before.saturating_sub(after));
        Ok(())
    }

    fn of(sizes: &Sizes, reservation: Reservation) -> Result<Self, DeviceError> {
        let bytes = sizes.bytes().ok_or_else(overflow)?;
        let refused = |_| DeviceError::OutOfMemory { what: "scratch", bytes };
        let floats = |n: usize| Aligned::<f32>::new(n).map_err(refused);
        let pairs = |n: usize| Aligned::<u32>::new(n).map_err(refused);
        let thread = |_| {
            Ok(ThreadScratch {
                row: floats(sizes.head_dim)?,
                queries: floats(sizes.queries)?,
                packed: (0..sizes.packed).map(|_| PackedQuery::new(sizes.head_dim)).collect(),
                partial: floats(sizes.partial)?,
                lines: floats(sizes.lines)?,
                plain: floats(sizes.plain)?,
                quads: Box::default(),
                tile_items: TileItems::new(sizes.slots),
                weights: Vec::with_capacity(sizes.weights),
                split_queries: pairs(sizes.split_queries)?,
                packed_tiles: pairs(sizes.packed_tiles)?,
                weight_tiles: pairs(sizes.weight_tiles)?,
            })
        };
        let threads = (0..sizes.threads).map(thread).collect::<Result<Vec<_>, DeviceError>>()?;
        Ok(Scratch { states: floats(sizes.states)?, threads, mass: Vec::new(), reservation })
    }
}
