//! The inputs of linear layers, converted to the formats that kernels read. Layers with the same input share the
//! conversions.
use super::room::Room;
use super::wide;
use crate::Compute;
use crate::arch::{Kernel, LANES, Simd, Uses};
use std::ops::Range;

/// Most tokens per tile.
pub const TILE: usize = 8;
/// Inputs per scale.
pub const GROUP: usize = 32;

/// Input formats of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// f32.
    Rows,
    /// bf16 pairs.
    Pairs,
    /// 8 bits, with a scale per 32.
    Codes,
    /// 8 bits, with a scale per 256.
    WideCodes,
    /// bf16 pairs and 8 bits for products of tiles: every token's inputs are neighbours.
    TilePairs,
    TileCodes,
}

impl InputFormat {
    pub fn is_tiles(self) -> bool {
        matches!(self, InputFormat::TilePairs | InputFormat::TileCodes)
    }
}

/// Buffers for one batch, reused. Tokens are grouped into tiles of 8, 4, 2 and 1, as kernels process them. The tokens
/// of a tile are interleaved: `[tile][…][tokens of the tile]`. So a kernel needs one address for all of them, and the
/// data of a single token is dense. Matrix registers have tiles of 16 tokens, see `tiles.rs`.
#[derive(Debug, Default)]
pub struct Inputs {
    pub n: usize,
    pub width: usize,
    /// `[tile][width][tokens]`.
    rows: Buffer<f32>,
    /// `[tile][width / 2][tokens]`, or [`TilePairs`](InputFormat::TilePairs).
    pairs: Buffer<i32>,
    /// `[tile][width / 32][13][tokens]`: the data of 32 inputs, see [`Group`], or [`TileCodes`](InputFormat::TileCodes), or
    /// [`WideCodes`](InputFormat::WideCodes).
    groups: Buffer<i32>,
    /// For each thread.
    rooms: Vec<Room>,
}

/// The batch in one format.
#[derive(Debug, Default)]
struct Buffer<T> {
    data: Vec<T>,
    format: Option<InputFormat>,
}

impl<T: Copy + Default> Buffer<T> {
    /// Room for `len` elements in `format`, from a cache line on; `None` if they are there already.
    fn begin(&mut self, format: InputFormat, len: usize) -> Option<&mut [T]> {
        if self.format.replace(format) == Some(format) {
            return None;
        }
        // It does not shrink: growing again would fill it again.
        if let Some(more) = (len + LANES).checked_sub(self.data.len()) {
            self.data.reserve_exact(more);
            self.data.resize(len + LANES, T::default());
        }
        let first = self.first();
        Some(&mut self.data[first..first + len])
    }
    fn first(&self) -> usize {
        self.data.as_ptr().align_offset(64).min(LANES)
    }
    #[inline(always)]
    fn get(&self) -> &[T] {
        &self.data[self.first()..]
    }
}

/// 32 inputs of `T` tokens: eight quads of signed codes; the negative sum of the codes; −32 times the sums of
/// their halves, for codes whose zero is 32; as the bits of f32s, the scale, and the sum of the inputs.
pub type Group<const T: usize> = [[i32; T]; GROUP_ROWS];
const GROUP_ROWS: usize = 13;
pub const NEGATIVE_SUM: usize = 8;
pub const MINUS_32_SUMS: usize = 9;
pub const SCALE: usize = 11;
pub const SUM: usize = 12;

/// Tokens of a tile of a matrix register.
pub const TILE_TOKENS: usize = LANES;
/// Steps of 32 inputs in a chunk of bf16 pairs, and of codes.
pub const PAIR_STEPS: usize = 8;
pub const CODE_STEPS: usize = 8;
/// bf16 pairs of 32 inputs of a tile: `[token][16]`.
pub const TILE_PAIRS: usize = TILE_TOKENS * LANES;

/// 32 inputs of sixteen tokens for products of tiles: their codes, `[token][8 quads]`; then as f32, for every token: the
/// scale, and the sum of the inputs.
pub type TileGroup = [[i32; TILE_TOKENS]; TILE_ROWS];
const TILE_ROWS: usize = 10;
/// Rows that contain codes.
pub const TILE_CODE_ROWS: usize = 8;
pub const TILE_SCALES: usize = 8;
pub const TILE_SUMS: usize = 9;

/// The scale of token `t`.
#[inline(always)]
pub fn scale_of<const T: usize>(group: &Group<T>, t: usize) -> f32 {
    f32::from_bits(group[SCALE][t].cast_unsigned())
}

/// The sum of the inputs of token `t`.
#[inline(always)]
pub fn sum_of<const T: usize>(group: &Group<T>, t: usize) -> f32 {
    f32::from_bits(group[SUM][t].cast_unsigned())
}

/// The tile that contains token `token` of `n`: its first token, and its width.
fn tile_of(n: usize, token: usize) -> (usize, usize) {
    let (mut first, mut width) = (token / TILE * TILE, TILE);
    while first + width > n || first + width <= token {
        if first + width <= n {
            first += width;
        }
        width /= 2;
    }
    (first, width)
}

impl Inputs {
    /// The tile of `T` tokens from `first` on.
    #[inline(always)]
    pub fn rows_of<const T: usize>(&self, first: usize) -> &[[f32; T]] {
        &self.rows.get()[first * self.width..].as_chunks().0[..self.width]
    }
    #[inline(always)]
    pub fn pairs_of<const T: usize>(&self, first: usize) -> &[[i32; T]] {
        let half = self.width / 2;
        &self.pairs.get()[first * half..].as_chunks().0[..half]
    }
    #[inline(always)]
    pub fn groups_of<const T: usize>(&self, first: usize) -> &[Group<T>] {
        let groups = self.width / GROUP;
        &self.groups.get()[first * groups * GROUP_ROWS..].as_chunks().0.as_chunks().0[..groups]
    }
    /// The tile of `T` tokens from `first` on, with a scale per 256 inputs: see `wide.rs`.
    #[inline(always)]
    pub fn wide_of<const T: usize>(&self, first: usize) -> &[[i32; T]] {
        let rows = wide::input_rows(self.width);
        &self.groups.get()[first * rows..].as_chunks().0[..rows]
    }
    /// Tile `tile` of sixteen tokens, chunk `chunk` of `PAIR_STEPS` steps: every 32 inputs' pairs, a row per token.
    #[inline(always)]
    pub fn tile_pairs(&self, tile: usize, chunk: usize) -> &[[i32; TILE_PAIRS]] {
        let place = self.place(PAIR_STEPS, tile, chunk);
        &self.pairs.get().as_chunks().0[place]
    }
    /// Tile `tile` of sixteen tokens, chunk `chunk` of `CODE_STEPS` steps: the data of every 32 inputs.
    #[inline(always)]
    pub fn tile_codes(&self, tile: usize, chunk: usize) -> &[TileGroup] {
        let place = self.place(CODE_STEPS, tile, chunk);
        &self.groups.get().as_chunks().0.as_chunks().0[place]
    }
    /// Formats of tiles are `[chunk][tile][steps of the chunk]`: a kernel that multiplies a chunk with many tiles reads
    /// memory that is dense, and so does not fill a few sets of a cache only.
    #[inline(always)]
    fn place(&self, per_chunk: usize, tile: usize, chunk: usize) -> Range<usize> {
        let (steps, n_tiles) = (self.width.div_ceil(GROUP), self.n.div_ceil(TILE_TOKENS));
        let len = per_chunk.min(steps - chunk * per_chunk);
        let first = chunk * per_chunk * n_tiles + tile * len;
        first..first + len
    }
}

/// A batch of rows, and the buffers for its conversions.
pub struct Input<'x> {
    x: &'x [f32],
    inputs: &'x mut Inputs,
}

impl Inputs {
    /// `x: [n, width]`.
    pub fn of<'x>(&'x mut self, x: &'x [f32], width: usize) -> Input<'x> {
        (self.n, self.width) = (x.len() / width.max(1), width);
        (self.rows.format, self.pairs.format, self.groups.format) = (None, None, None);
        Input { x, inputs: self }
    }

    /// Maximum bytes of the buffers for `n` rows of at most `width`. `None` on overflow.
    pub fn bytes(compute: &Compute, n: usize, width: usize) -> Option<usize> {
        let wide = width.checked_next_multiple_of(GROUP)?;
        // f32 rows; bf16 pairs and groups of codes, whole tiles of them; each begins on a cache line.
        let pairs_and_codes = wide.checked_mul(2)?.checked_add(wide / GROUP * GROUP_ROWS * 4)?;
        let tiles = n.checked_next_multiple_of(TILE_TOKENS)?.checked_mul(pairs_and_codes)?;
        let rooms = compute.threads.n() * Room::bytes(compute, n, wide);
        n.checked_mul(wide.checked_mul(4)?)?
            .checked_add(tiles)?
            .checked_add(3 * 4 * LANES)?
            .checked_add(rooms)
    }
}

impl Input<'_> {
    pub fn n(&self) -> usize {
        self.inputs.n
    }
    pub fn width(&self) -> usize {
        self.inputs.width
    }

    /// A buffer for each thread, until [`put_rooms`](Self::put_rooms). They take memory only when tiles use them.
    pub(super) fn take_rooms(&mut self, compute: &Compute) -> Vec<Room> {
        let mut rooms = std::mem::take(&mut self.inputs.rooms);
        rooms.resize_with(compute.threads.n(), || Room::new(compute));
        rooms
    }
    pub(super) fn put_rooms(&mut self, rooms: Vec<Room>) {
        self.inputs.rooms = rooms;
    }

    /// Converts the batch to `format` unless it already is.
    pub(super) fn prepare(&mut self, compute: &Compute, format: InputFormat) -> &Inputs {
        let Inputs { n, width, rows, pairs, groups, .. } = &mut *self.inputs;
        let (n, width, x) = (*n, *width, self.x);
        match format {
            InputFormat::Rows => {
                if let Some(rows) = rows.begin(format, n * width) {
                    each_tile(compute, n, rows, width, |first, tile, rows| {
                        for (t, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            rows.iter_mut().skip(t).step_by(tile).zip(x).for_each(|(y, x)| *y = *x);
                        }
                    });
                }
            }
            InputFormat::Pairs => {
                if let Some(pairs) = pairs.begin(format, n * (width / 2)) {
                    each_tile(compute, n, pairs, width / 2, |first, tile, pairs| {
                        for (t, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            let column = pairs.iter_mut().skip(t).step_by(tile);
                            column.zip(x.as_chunks().0).for_each(|(pair, x)| *pair = bf16_pair(*x));
                        }
                    });
                }
            }
            InputFormat::Codes => {
                let per_token = width / GROUP * GROUP_ROWS;
                if let Some(groups) = groups.begin(format, n * per_token) {
                    each_tile(compute, n, groups, per_token, |first, tile, groups| {
                        for (at, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            compute
                                .isa
                                .run(Quantise { x, put: Interleaved { groups: &mut *groups, at, tile } });
                        }
                    });
                }
            }
            InputFormat::WideCodes => {
                let per_token = wide::input_rows(width);
                if let Some(groups) = groups.begin(format, n * per_token) {
                    each_tile(compute, n, groups, per_token, |first, tile, groups| {
                        for (at, x) in x[first * width..].chunks_exact(width).take(tile).enumerate() {
                            compute.isa.run(wide::Quantise { x, rows: &mut *groups, at, tile });
                        }
                    });
                }
            }
            InputFormat::TilePairs => {
                let per_tile = width.div_ceil(GROUP) * TILE_PAIRS;
                if let Some(pairs) = pairs.begin(format, n.div_ceil(TILE_TOKENS) * per_tile) {
                    each_chunk(compute, (x, width), pairs, TILE_PAIRS, PAIR_STEPS, |at, x, pairs| {
                        compute.isa.run(RoundPairs { x, pairs, at });
                    });
                }
            }
            InputFormat::TileCodes => {
                let per_tile = width / GROUP * TILE_ROWS * TILE_TOKENS;
                if let Some(groups) = groups.begin(format, n.div_ceil(TILE_TOKENS) * per_tile) {
                    each_chunk(
                        compute,
                        (x, width),
                        groups,
                        TILE_ROWS * TILE_TOKENS,
                        CODE_STEPS,
                        |at, x, groups| {
                            compute.isa.run(Quantise { x, put: InTile { groups, at } });
                        },
                    );
                }
            }
        }
        self.inputs
    }
}

/// Rounds to the nearest, ties to even, without branches, so that a loop of it vectorises.
#[inline(always)]
fn bf16_pair(x: [f32; 2]) -> i32 {
    let bits = |x: f32| {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        if x.is_nan() { bits | 0x40_0000 } else { rounded }
    };
    (bits(x[0]) >> 16 | bits(x[1]) & 0xffff_0000).cast_signed()
}

/// Calls `f(token of a tile, its inputs of a chunk, the chunk of the tile)` for every row of `x: [n, width]`, on several
/// threads. A step has `step` elements of `data`, and a chunk `per_chunk` steps. Tokens that are missing in the last tile
/// are 0.
fn each_chunk(
    compute: &Compute,
    (x, width): (&[f32], usize),
    data: &mut [i32],
    step: usize,
    per_chunk: usize,
    f: impl Fn(usize, &[f32], &mut [i32]) + Sync,
) {
    let (steps, n_tiles) = (width.div_ceil(GROUP), (x.len() / width).div_ceil(TILE_TOKENS));
    let mut no_scratch = vec![(); compute.threads.n()]; // takes no memory
    let (whole, last) = data.split_at_mut(steps / per_chunk * per_chunk * n_tiles * step);
    let last_steps = steps % per_chunk;
    for (data, first, len) in [(whole, 0, per_chunk), (last, steps - last_steps, last_steps)] {
        if data.is_empty() {
            continue;
        }
        compute.threads.parts(data, len * step, &mut no_scratch, |i, data, ()| {
            let (chunk, tile) = (i / n_tiles, i % n_tiles);
            let inputs = (first + chunk * len) * GROUP..width.min((first + (chunk + 1) * len) * GROUP);
            data.fill(0);
            let rows = x[tile * TILE_TOKENS * width..].chunks_exact(width).take(TILE_TOKENS);
            for (at, row) in rows.enumerate() {
                f(at, &row[inputs.clone()], data);
            }
        });
    }
}

/// Rounds inputs to bf16: row `at` of a tile's steps.
struct RoundPairs<'r> {
    x: &'r [f32],
    pairs: &'r mut [i32],
    at: usize,
}

impl Kernel for RoundPairs<'_> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, step) in self.x.chunks(GROUP).zip(self.pairs.as_chunks_mut::<TILE_PAIRS>().0) {
            let row = &mut step.as_chunks_mut::<LANES>().0[self.at];
            for (pair, x) in row.iter_mut().zip(x.as_chunks::<2>().0) {
                *pair = bf16_pair(*x);
            }
        }
    }
}

/// Calls `f(first token, tokens, their part)` for every tile, on several threads if there is enough work. A token has
/// `width` elements of `data`.
fn each_tile<T: Send>(
    compute: &Compute,
    n: usize,
    data: &mut [T],
    width: usize,
    f: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let (whole, rest) = data.split_at_mut(n / TILE * TILE * width);
    let mut no_scratch = vec![(); compute.threads.n()]; // takes no memory
    compute.threads.parts(whole, TILE * width, &mut no_scratch, |i, data, ()| f(i * TILE, TILE, data));
    let (mut first, mut rest) = (n / TILE * TILE, rest);
    while first < n {
        let (_, tile) = tile_of(n, first);
        let (data, others) = rest.split_at_mut(tile * width);
        f(first, tile, data);
        (first, rest) = (first + tile, others);
    }
}

/// Quantises one row: `x ≈ scale × code`, code in −127..=127. A group with a value that is not finite gets the scale
/// NaN.
struct Quantise<'q, P> {
    x: &'q [f32],
    put: P,
}

/// 32 inputs of a token: codes, the sums of their halves, and the scale.
struct Quantised {
    codes: [u8; GROUP],
    halves: [i32; 2],
    scale: f32,
}

/// Where quantised inputs go.
trait Put {
    fn put(&mut self, group: usize, quantised: &Quantised);
}

/// [`Group`]s; the row is number `at` in a tile of `tile` tokens.
struct Interleaved<'g> {
    groups: &'g mut [i32],
    at: usize,
    tile: usize,
}

impl Put for Interleaved<'_> {
    #[inline(always)]
    fn put(&mut self, group: usize, x: &Quantised) {
        let size = GROUP_ROWS * self.tile;
        let group = &mut self.groups[group * size..(group + 1) * size];
        let mut put = |row: usize, x: i32| group[row * self.tile + self.at] = x;
        let [low, high] = x.halves;
        put(NEGATIVE_SUM, -(low + high));
        put(MINUS_32_SUMS, -32 * low);
        put(MINUS_32_SUMS + 1, -32 * high);
        put(SCALE, x.scale.to_bits().cast_signed());
        put(SUM, ((low + high) as f32 * x.scale).to_bits().cast_signed());
        for (quad, bytes) in x.codes.as_chunks::<4>().0.iter().enumerate() {
            put(quad, i32::from_le_bytes(*bytes));
        }
    }
}

/// [`TileGroup`]s; the row is number `at`. The float rows are what the kernels of vectors compute from their sums.
struct InTile<'g> {
    groups: &'g mut [i32],
    at: usize,
}

impl Put for InTile<'_> {
    #[inline(always)]
    fn put(&mut self, group: usize, x: &Quantised) {
        let groups = self.groups.as_chunks_mut::<TILE_TOKENS>().0.as_chunks_mut::<TILE_ROWS>().0;
        let group = &mut groups[group];
        let row = &mut group[..TILE_CODE_ROWS].as_flattened_mut()[8 * self.at..8 * self.at + 8];
        row.iter_mut().zip(x.codes.as_chunks().0).for_each(|(to, quad)| *to = i32::from_le_bytes(*quad));
        let [low, high] = x.halves;
        let mut put = |row: usize, x: f32| group[row][self.at] = x.to_bits().cast_signed();
        put(TILE_SCALES, x.scale);
        put(TILE_SUMS, (low + high) as f32 * x.scale);
    }
}

impl<P: Put> Kernel for Quantise<'_, P> {
    type Out = ();
    const USES: Uses = Uses::Floats;
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let zero = s.splat(0.0);
        for (group, x) in self.x.as_chunks::<GROUP>().0.iter().enumerate() {
            let [a, b] = [&x.as_chunks::<LANES>().0[0], &x.as_chunks::<LANES>().0[1]];
            let (a, b) = (s.load(a), s.load(b));
            let (size_a, size_b) = (s.max(a, s.sub(zero, a)), s.max(b, s.sub(zero, b)));
            let largest = s.largest(s.max(size_a, size_b));
            // NaN and infinities survive a sum; `max` may drop NaN.
            let finite = s.sum(s.add(s.mul(a, zero), s.mul(b, zero))) == 0.0;
            let inverse = if largest > 0.0 && finite { 127.0 / largest } else { 0.0 };
            let inverse = if inverse.is_finite() { inverse } else { 0.0 }; // a subnormal group is 0
            let mut codes = [0u8; GROUP];
            let (out, _) = codes.as_chunks_mut::<LANES>();
            let mut halves = [0, 0];
            if finite {
                let (a, b) = (s.to_i32(s.mul(a, s.splat(inverse))), s.to_i32(s.mul(b, s.splat(inverse))));
                s.store_low_bytes(a, &mut out[0]);
                s.store_low_bytes(b, &mut out[1]);
                halves = [s.sum(s.to_f32(a)) as i32, s.sum(s.to_f32(b)) as i32];
            }
            let scale = if finite { largest / 127.0 } else { f32::NAN };
            self.put.put(group, &Quantised { codes, halves, scale });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_follow_each_other() {
        for n in 1..40 {
            let mut token = 0;
            while token < n {
                let (first, width) = tile_of(n, token);
                assert_eq!(first, token, "{n} tokens");
                assert!((first..first + width).all(|token| tile_of(n, token) == (first, width)));
                let left = n - first;
                assert_eq!(width, [8, 4, 2, 1].into_iter().find(|width| *width <= left).unwrap());
                token += width;
            }
            assert_eq!(token, n);
        }
    }
}
