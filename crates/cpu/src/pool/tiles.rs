//! Scores and weighted sums of many queries as products of tiles of bf16.
//!
//! ```text
//! scores:      S[16 queries][16 cells] += Q[queries][32 elements] × K[elements][cells]      per 32 elements of head_dim
//! accumulate:  O[16 queries][16 elements] += W[queries][32 cells] × V[cells][elements]      per 32 places of a sequence
//! ```
//!
//! bf16 has 8 significant bits, so every number is cut into parts of bf16: `x = high + middle + low`, exactly. A query
//! or a weight has three parts, a key or a value of bf16 one, of f16 two, of f32 three. Products whose parts lie
//! further down than the last bit of a f32 are left out: 3, 5 and 6 products remain.
//!
//! A row of a product depends on nothing else than this row, and the 32 places of a step are those of the sequence,
//! wherever their cells lie. So a query has the same result to the bit whichever queries share its tiles and however
//! the cache is cut into tiles, as long as all its products are tile products. One query also takes this path: its
//! tiles are mostly empty, but K and V must be read from memory, which takes longer.
//!
//! Keys and values are cut into parts once per call and all rows of the call use them. Tiles count subnormal numbers
//! as 0: parts below 2⁻¹²⁶, of weights that are no larger than 2⁻¹⁰⁸.
use super::{Block, Blocks, Lines, Sums};
use crate::arch::{Kernel, LANES, Shapes, Simd, TileIsa, TileKernel, Tiles};
use crate::element::Element;
use kvist_device::DType;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements of head_dim, or places of a sequence, that one product of tiles sums up.
pub const STEP: usize = 2 * LANES;
/// Pairs of bf16 in a tile.
const TILE: usize = 16 * LANES;
/// Parts of a query or of a weight.
pub const LEFT_PARTS: usize = 3;
/// Products computed side by side.
const ABREAST: usize = 4;
/// Most places per call.
pub const MAX_PLACES: usize = 256;
const MAX_STEPS: usize = MAX_PLACES / STEP;

/// A dtype whose rows can be cut into parts.
pub trait Parts: 'static {
    /// Parts of a key or of a value.
    const PARTS: usize;
    /// Element `i` of sixteen keys.
    fn key<S: Simd>(s: S, block: &Block<'_>, i: usize) -> S::F;
    /// Elements `16 * vector..` of the value in lane `lane`; 0 past the end.
    fn value<S: Simd>(s: S, codes: &[u8], vector: usize) -> S::F;
    /// Byte of the cache line that begins with element `i` of the keys, if one does.
    fn line_of_keys(i: usize) -> Option<usize>;
}

impl<E: Element> Parts for E {
    const PARTS: usize = E::BF16_PARTS;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, i: usize) -> S::F {
        E::widen(s, &E::vectors(block.codes)[i])
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, codes: &[u8], vector: usize) -> S::F {
        match E::vectors(codes).get(vector) {
            Some(raw) => E::widen(s, raw),
            None => {
                let (mut last, rest) = ([0; 4 * LANES], &codes[vector * LANES * E::BYTES..]);
                last[..rest.len()].copy_from_slice(rest);
                E::widen(s, &E::vectors(&last)[0])
            }
        }
    }
    #[inline(always)]
    fn line_of_keys(i: usize) -> Option<usize> {
        let at = i * LANES * E::BYTES;
        at.is_multiple_of(64).then_some(at)
    }
}

/// Pairs of bf16 that [`split_row`] writes for rows of `head_dim` elements, if `rows` rows are stored.
pub fn split_len(head_dim: usize, rows: usize) -> usize {
    head_dim.div_ceil(STEP) * LEFT_PARTS * plane(rows)
}

/// Pairs from one part of the queries to the next. A tile may extend past the last row.
fn plane(rows: usize) -> usize {
    (rows + 16) * LANES
}

/// Pairs of bf16 that a call needs for keys and values of `head_dim` elements.
pub fn packed_len(head_dim: usize, dtype: DType) -> usize {
    let keys = ABREAST * head_dim.div_ceil(STEP);
    let values = head_dim.div_ceil(LANES) * MAX_STEPS;
    keys.max(values) * parts(dtype).unwrap_or(0) * TILE
}

/// Pairs of bf16 of the weights of a call.
pub const WEIGHTS_LEN: usize = MAX_STEPS * LEFT_PARTS * TILE;

/// Parts of a stored element; `None` if tiles do not multiply the dtype.
pub fn parts(dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => Some(<crate::element::F32 as Parts>::PARTS),
        DType::F16 => Some(<crate::element::F16 as Parts>::PARTS),
        DType::BF16 => Some(<crate::element::BF16 as Parts>::PARTS),
        DType::Q8 | DType::Q4 | DType::T4 => None,
    }
}

/// Cuts row `at` of `rows` query rows into parts. A pair consists of elements that are 16 apart, because sixteen
/// elements are a vector.
pub struct SplitRow<'s> {
    pub row: &'s [f32],
    pub at: usize,
    pub rows: usize,
    /// `[steps, parts, rows + 16, 16]` pairs.
    pub split: &'s mut [u32],
}

impl Kernel for SplitRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let plane = plane(self.rows);
        for (step, row) in self.row.chunks(STEP).enumerate() {
            let mut pair = [0.0; STEP];
            pair[..row.len()].copy_from_slice(row);
            let [even, odd] = halves(s, &pair);
            cut::<S, LEFT_PARTS>(s, even, odd, &mut self.split[step * LEFT_PARTS * plane..], plane, self.at);
        }
    }
}

#[inline(always)]
fn halves<S: Simd>(s: S, pair: &[f32; STEP]) -> [S::F; 2] {
    let vectors = pair.as_chunks::<LANES>().0;
    [s.load(&vectors[0]), s.load(&vectors[1])]
}

/// Writes the parts of a row of pairs, each to row `row` of its plane.
#[inline(always)]
fn cut<S: Simd, const PARTS: usize>(
    s: S,
    mut even: S::F,
    mut odd: S::F,
    out: &mut [u32],
    plane: usize,
    row: usize,
) {
    for part in 0..PARTS {
        if let Some(out) = out[part * plane + row * LANES..].first_chunk_mut() {
            s.store_i(s.cut_pairs(even, odd), out);
        }
        if part + 1 < PARTS {
            (even, odd) = (s.sub(even, s.cut(even)), s.sub(odd, s.cut(odd)));
        }
    }
}

/// Tiles 0 to 3 are sums of `M` rows, 4 to 6 the parts of `M` queries or weights, 7 a part of keys or values.
pub struct Rows<const M: usize>;

impl<const M: usize> Shapes for Rows<M> {
    const ROWS: [usize; 8] = [M, M, M, M, M, M, M, 16];
    const BYTES: [usize; 8] = [64; 8];
}

/// `C[n] += A × B[n]` for the first `count` of four tiles, over `steps` steps. `a` begins at the first row of the first
/// part and has `plane` pairs per part; `b` is `[count, steps, PARTS]` tiles.
#[inline(always)]
fn multiply<const M: usize, const PARTS: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    a: &[u32],
    plane: usize,
    b: &[u32],
    count: usize,
    steps: usize,
) {
    let b = &b[..count * steps * PARTS * TILE];
    for step in 0..steps {
        let a = &a[step * LEFT_PARTS * plane..];
        tiles.load::<4, u32>(a, LANES);
        tiles.load::<5, u32>(&a[plane..], LANES);
        tiles.load::<6, u32>(&a[2 * plane..], LANES);
        macro_rules! product {
            ($n:literal) => {
                if $n < count {
                    let b = &b[($n * steps + step) * PARTS * TILE..];
                    tiles.load::<7, u32>(b, LANES);
                    tiles.dot_bf16::<$n, 6, 7>();
                    tiles.dot_bf16::<$n, 5, 7>();
                    tiles.dot_bf16::<$n, 4, 7>();
                    if PARTS > 1 {
                        tiles.load::<7, u32>(&b[TILE..], LANES);
                        tiles.dot_bf16::<$n, 5, 7>();
                        tiles.dot_bf16::<$n, 4, 7>();
                    }
                    if PARTS > 2 {
                        tiles.load::<7, u32>(&b[2 * TILE..], LANES);
                        tiles.dot_bf16::<$n, 4, 7>();
                    }
                }
            };
        }
        product!(0);
        product!(1);
        product!(2);
        product!(3);
    }
}

/// Runs `$body` with the tile whose number is `$n`, which is below 4.
macro_rules! with_tile {
    ($n:expr, $T:ident => $body:expr) => {
        match $n {
            0 => {
                const $T: usize = 0;
                $body
            }
            1 => {
                const $T: usize = 1;
                $body
            }
            2 => {
                const $T: usize = 2;
                $body
            }
            _ => {
                const $T: usize = 3;
                $body
            }
        }
    };
}

/// Query rows in parts, as [`SplitRow`] cuts them.
pub struct SplitQueries<'q> {
    pub split: &'q [u32],
    /// Rows that are stored.
    pub rows: usize,
    /// The first row of the call, and how many.
    pub first: usize,
    pub n: usize,
}

/// [`Codec::scores`](super::Codec::scores).
struct Scores<'k, C, const M: usize> {
    queries: SplitQueries<'k>,
    blocks: &'k Blocks<'k>,
    lines: Lines<'k>,
    packed: &'k mut [u32],
    codec: PhantomData<C>,
}

impl<C: Parts, const M: usize> TileKernel for Scores<'_, C, M> {
    type Shapes = Rows<M>;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Rows<M>>>(self, s: S, tiles: &mut T) {
        let Scores { queries, blocks, lines, packed, .. } = self;
        let (steps, plane) = (blocks.head_dim.div_ceil(STEP), plane(queries.rows));
        for (i, list) in blocks.list.chunks(ABREAST).enumerate() {
            for (block, out) in list.iter().zip(packed.chunks_mut(steps * C::PARTS * TILE)) {
                pack_keys::<S, C>(s, block, blocks.head_dim, out);
            }
            let at = lines.at + i * ABREAST * LANES;
            for row in (0..queries.n).step_by(M) {
                (tiles.zero::<0>(), tiles.zero::<1>(), tiles.zero::<2>(), tiles.zero::<3>());
                let a = &queries.split[(queries.first + row) * LANES..];
                match C::PARTS {
                    1 => multiply::<M, 1, T>(tiles, a, plane, packed, list.len(), steps),
                    2 => multiply::<M, 2, T>(tiles, a, plane, packed, list.len(), steps),
                    _ => multiply::<M, 3, T>(tiles, a, plane, packed, list.len(), steps),
                }
                let n_rows = M.min(queries.n - row);
                for n in 0..list.len() {
                    let out = &mut lines.data[row * lines.stride + at + n * LANES..];
                    with_tile!(n, N => store::<M, N, T>(tiles, out, lines.stride, n_rows, LANES));
                }
            }
        }
    }
}

/// Cuts the keys of a block into parts: `[steps, PARTS]` tiles.
#[inline(always)]
fn pack_keys<S: Simd, C: Parts>(s: S, block: &Block<'_>, head_dim: usize, out: &mut [u32]) {
    let key = |i: usize| {
        if i >= head_dim {
            return s.splat(0.0);
        }
        if let Some(line) = C::line_of_keys(i) {
            s.prefetch(&block.codes[line], block.ahead);
        }
        C::key(s, block, i)
    };
    for (step, out) in out.chunks_exact_mut(C::PARTS * TILE).enumerate() {
        for row in 0..LANES {
            let i = step * STEP + row;
            let (even, odd) = (key(i), key(i + LANES));
            match C::PARTS {
                1 => cut::<S, 1>(s, even, odd, out, TILE, row),
                2 => cut::<S, 2>(s, even, odd, out, TILE, row),
                _ => cut::<S, 3>(s, even, odd, out, TILE, row),
            }
        }
    }
}

/// Writes `columns` elements of the first `n_rows` rows of tile `N`.
#[inline(always)]
fn store<const M: usize, const N: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    out: &mut [f32],
    stride: usize,
    n_rows: usize,
    columns: usize,
) {
    if n_rows == M && columns == LANES {
        return tiles.store::<N, f32>(out, stride);
    }
    let mut whole = [0.0; TILE];
    tiles.store::<N, f32>(&mut whole, LANES);
    for (out, row) in out.chunks_mut(stride).zip(whole.chunks_exact(LANES)).take(n_rows) {
        out[..columns].copy_from_slice(&row[..columns]);
    }
}

/// The inverse of [`store`]; the rest of the tile becomes 0.
#[inline(always)]
fn load<const M: usize, const N: usize, T: Tiles<Rows<M>>>(
    tiles: &mut T,
    from: &[f32],
    stride: usize,
    n_rows: usize,
    columns: usize,
) {
    if n_rows == M && columns == LANES {
        return tiles.load::<N, f32>(from, stride);
    }
    let mut whole = [0.0; TILE];
    for (from, row) in from.chunks(stride).zip(whole.chunks_exact_mut(LANES)).take(n_rows) {
        row[..columns].copy_from_slice(&from[..columns]);
    }
    tiles.load::<N, f32>(&whole, LANES);
}

/// `lines[query][at + i] = query · key`, as [`Codec::scores`](super::Codec::scores) computes it without tiles.
pub fn scores(
    tiles: TileIsa,
    dtype: DType,
    queries: SplitQueries<'_>,
    blocks: &Blocks<'_>,
    lines: Lines<'_>,
    packed: &mut [u32],
) {
    fn run<C: Parts>(
        tiles: TileIsa,
        queries: SplitQueries<'_>,
        blocks: &Blocks<'_>,
        lines: Lines<'_>,
        packed: &mut [u32],
    ) {
        let codec = PhantomData::<C>;
        match queries.n {
            ..=8 => tiles.run(Scores::<C, 8> { queries, blocks, lines, packed, codec }),
            _ => tiles.run(Scores::<C, 16> { queries, blocks, lines, packed, codec }),
        }
    }
    match dtype {
        DType::F32 => run::<super::F32>(tiles, queries, blocks, lines, packed),
        DType::F16 => run::<super::F16>(tiles, queries, blocks, lines, packed),
        DType::BF16 => run::<super::BF16>(tiles, queries, blocks, lines, packed),
        DType::Q8 | DType::Q4 | DType::T4 => unreachable!("tiles do not multiply packed keys"),
    }
}

/// Values by their place in the sequence, from blocks anywhere in memory.
pub struct Places<'b> {
    blocks: [&'b [u8]; MAX_PLACES],
    n_blocks: usize,
    /// Where the value of each place lies: block × 16 + lane.
    at: [u16; MAX_PLACES],
    /// Places in use: a multiple of [`STEP`].
    n: usize,
}

/// No value at a place.
const EMPTY: u16 = u16::MAX;

impl<'b> Places<'b> {
    pub fn new() -> Self {
        Places { blocks: [&[]; MAX_PLACES], n_blocks: 0, at: [EMPTY; MAX_PLACES], n: 0 }
    }

    /// Starts over with `n` empty places.
    pub fn clear(&mut self, n: usize) {
        (self.n_blocks, self.n) = (0, n.next_multiple_of(STEP));
        self.at[..self.n].fill(EMPTY);
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.n_blocks == 0
    }

    /// Puts the values of `lanes` of a block with these codes to the places from `first` on. Returns `false` if one of
    /// them was taken.
    pub fn add(&mut self, codes: &'b [u8], lanes: Range<usize>, first: usize) -> bool {
        // There are as many blocks as places, and every block takes a place.
        let places = &mut self.at[first..first + lanes.len()];
        let free = places.iter().all(|at| *at == EMPTY);
        if free && !lanes.is_empty() {
            let lane = (self.n_blocks * LANES + lanes.start) as u16;
            places.iter_mut().zip(lane..).for_each(|(at, lane)| *at = lane);
            self.blocks[self.n_blocks] = codes;
            self.n_blocks += 1;
        }
        free
    }

    /// The code bytes of the value at a place, `row` bytes.
    #[inline(always)]
    fn get(&self, place: usize, row: usize) -> Option<&'b [u8]> {
        let at = usize::from(self.at[place]);
        let codes = (at != usize::from(EMPTY)).then(|| self.blocks[at / LANES])?;
        codes.get(at % LANES * row..(at % LANES + 1) * row)
    }
}

/// Weights of the rows: lines whose place 0 is at `at`, zero outside `valid`.
pub struct Weights<'w> {
    pub data: &'w [f32],
    pub stride: usize,
    pub at: usize,
    /// Vectors of the places that contain weights; the others may contain anything.
    pub valid: Range<usize>,
}

/// Shape of the rows of values.
#[derive(Clone, Copy)]
pub struct ValueShape {
    pub head_dim: usize,
    /// Code bytes per cell.
    pub row: usize,
}

struct Accumulate<'k, 'b, C, const M: usize> {
    places: &'k Places<'b>,
    shape: ValueShape,
    weights: Weights<'k>,
    sums: Sums<'k>,
    packed: &'k mut [u32],
    split: &'k mut [u32],
    codec: PhantomData<C>,
}

impl<C: Parts, const M: usize> TileKernel for Accumulate<'_, '_, C, M> {
    type Shapes = Rows<M>;
    type Out = ();
    #[inline(always)]
    fn run<S: Simd, T: Tiles<Rows<M>>>(self, s: S, tiles: &mut T) {
        let Accumulate { places, shape, weights, sums, packed, split, .. } = self;
        let (steps, head_dim) = (places.n / STEP, shape.head_dim);
        pack_values::<S, C>(s, places, shape, packed);
        let per_tile = steps * C::PARTS * TILE;
        let n_tiles = head_dim.div_ceil(LANES);
        for row in (0..sums.n).step_by(M) {
            let n_rows = M.min(sums.n - row);
            for r in 0..n_rows {
                split_weights(s, &weights, row + r, steps, r, split);
            }
            for first in (0..n_tiles).step_by(ABREAST) {
                let count = ABREAST.min(n_tiles - first);
                let from = sums.first + row * sums.stride + first * LANES;
                for n in 0..count {
                    let columns = LANES.min(head_dim - (first + n) * LANES);
                    let from = &sums.data[from + n * LANES..];
                    with_tile!(n, N => load::<M, N, T>(tiles, from, sums.stride, n_rows, columns));
                }
                let b = &packed[first * per_tile..];
                match C::PARTS {
                    1 => multiply::<M, 1, T>(tiles, split, TILE, b, count, steps),
                    2 => multiply::<M, 2, T>(tiles, split, TILE, b, count, steps),
                    _ => multiply::<M, 3, T>(tiles, split, TILE, b, count, steps),
                }
                for n in 0..count {
                    let columns = LANES.min(head_dim - (first + n) * LANES);
                    let to = &mut sums.data[from + n * LANES..];
                    with_tile!(n, N => store::<M, N, T>(tiles, to, sums.stride, n_rows, columns));
                }
            }
        }
    }
}

/// Cuts values into parts: `[head_dim / 16, steps, PARTS]` tiles.
#[inline(always)]
fn pack_values<S: Simd, C: Parts>(s: S, places: &Places<'_>, shape: ValueShape, out: &mut [u32]) {
    let steps = places.n / STEP;
    // Rows ahead whose bytes are prefetched.
    let distance = (super::gather::AHEAD / shape.row.max(1)).max(1);
    let value = |place: usize| {
        let codes = places.get(place, shape.row).unwrap_or_default();
        let next = match place + distance {
            ahead if ahead < places.n => places.get(ahead, shape.row),
            _ => None,
        };
        let ahead = next.map_or(super::gather::AHEAD, |next| {
            (next.as_ptr() as usize).wrapping_sub(codes.as_ptr() as usize)
        });
        for line in codes.iter().step_by(64) {
            s.prefetch(line, ahead);
        }
        codes
    };
    for step in 0..steps {
        for row in 0..LANES {
            let (even, odd) = (value(step * STEP + row), value(step * STEP + LANES + row));
            for n in 0..shape.head_dim.div_ceil(LANES) {
                let vector = |codes: &[u8]| match codes.is_empty() {
                    true => s.splat(0.0),
                    false => C::value(s, codes, n),
                };
                let (even, odd) = (vector(even), vector(odd));
                let out = &mut out[(n * steps + step) * C::PARTS * TILE..];
                match C::PARTS {
                    1 => cut::<S, 1>(s, even, odd, out, TILE, row),
                    2 => cut::<S, 2>(s, even, odd, out, TILE, row),
                    _ => cut::<S, 3>(s, even, odd, out, TILE, row),
                }
            }
        }
    }
}

/// Cuts the weights of line `line` into parts: row `row` of `[steps, parts]` tiles.
#[inline(always)]
fn split_weights<S: Simd>(
    s: S,
    weights: &Weights<'_>,
    line: usize,
    steps: usize,
    row: usize,
    split: &mut [u32],
) {
    let vectors = weights.data[line * weights.stride + weights.at..].as_chunks::<LANES>().0;
    let vector = |v: usize| match weights.valid.contains(&v) {
        true => s.load(&vectors[v]),
        false => s.splat(0.0),
    };
    for (step, split) in split.chunks_exact_mut(LEFT_PARTS * TILE).enumerate().take(steps) {
        cut::<S, LEFT_PARTS>(s, vector(2 * step), vector(2 * step + 1), split, TILE, row);
    }
}

/// Room for values and weights in parts.
pub struct Room<'r> {
    pub packed: &'r mut [u32],
    /// [`WEIGHTS_LEN`] pairs.
    pub split: &'r mut [u32],
}

/// `sums[query] += Σ weight × value` over the values at `places`.
pub fn accumulate(
    tiles: TileIsa,
    dtype: DType,
    places: &Places<'_>,
    shape: ValueShape,
    weights: Weights<'_>,
    sums: Sums<'_>,
    room: Room<'_>,
) {
    fn run<C: Parts>(
        tiles: TileIsa,
        places: &Places<'_>,
        shape: ValueShape,
        weights: Weights<'_>,
        sums: Sums<'_>,
        room: Room<'_>,
    ) {
        let (codec, Room { packed, split }) = (PhantomData::<C>, room);
        match sums.n {
            ..=8 => tiles.run(Accumulate::<C, 8> { places, shape, weights, sums, packed, split, codec }),
            _ => tiles.run(Accumulate::<C, 16> { places, shape, weights, sums, packed, split, codec }),
        }
    }
    match dtype {
        DType::F32 => run::<super::F32>(tiles, places, shape, weights, sums, room),
        DType::F16 => run::<super::F16>(tiles, places, shape, weights, sums, room),
        DType::BF16 => run::<super::BF16>(tiles, places, shape, weights, sums, room),
        DType::Q8 | DType::Q4 | DType::T4 => unreachable!("tiles do not multiply packed values"),
    }
}

#[cfg(test)]
mod tests;
