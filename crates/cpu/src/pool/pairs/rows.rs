//! Rows of any dtype, as pairs of bf16 or of words.
//!
//! A key of sixteen cells is read element by element, a value sixteen elements at a time. Packed codes are decoded on the
//! way, once for all rows of a call.
use super::{Cell, Left, Places, Precision, STEP, TILE, right};
use crate::arch::{LANES, Simd};
use crate::element::Element;
use crate::pool::quantised::byte_of;
use crate::pool::{Block, Blocks, Q4, Q8, T4, t4};
use kvist_device::DType;

/// Shape of the rows of one side.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub head_dim: usize,
    /// Code bytes per cell.
    pub row: usize,
    /// As in [`Codec`](crate::pool::Codec).
    pub group: usize,
}

impl Shape {
    /// That of the rows of some blocks.
    pub fn of(blocks: &Blocks<'_>) -> Self {
        Shape { head_dim: blocks.head_dim, row: blocks.row, group: blocks.group }
    }
}

/// A dtype whose rows can become pairs.
pub trait Parts: Sized + 'static {
    /// Parts of a key or of a value, if they are not rounded.
    const PARTS: usize;
    /// Element `i` of sixteen keys.
    fn key<S: Simd>(s: S, block: &Block<'_>, shape: Shape, i: usize) -> S::F;
    /// Elements `16 * vector..` of a value; anything finite past the end, unless the row is not.
    fn value<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape, vector: usize) -> S::F;
    /// Byte of the cache line that begins with element `i` of the keys, if one does.
    fn line_of_keys(i: usize) -> Option<usize>;
    /// At least the squares of all elements of sixteen keys: for packed rows what their parameters say.
    #[inline(always)]
    fn squares_of_keys<S: Simd>(s: S, block: &Block<'_>, shape: Shape) -> S::F {
        let mut squares = s.splat(0.0);
        for i in 0..shape.head_dim {
            let x = key::<S, Self>(s, block, shape, i);
            squares = s.fma(x, x, squares);
        }
        squares
    }
    /// At least the largest magnitude of a value that is finite: for packed rows what their parameters say.
    #[inline(always)]
    fn largest<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape) -> f32 {
        let mut largest = s.splat(0.0);
        for vector in 0..shape.head_dim.div_ceil(LANES) {
            largest = s.max(magnitude(s, Self::value(s, cell, shape, vector)), largest);
        }
        s.largest(largest)
    }
}

/// Parts of a stored element; `None` if they cannot be multiplied in that precision.
pub fn parts(dtype: DType, precision: Precision) -> Option<usize> {
    match (precision, dtype) {
        (Precision::Rounded | Precision::Words, _) => Some(1),
        (Precision::Exact, DType::F32) => Some(<crate::element::F32 as Parts>::PARTS),
        (Precision::Exact, DType::F16) => Some(<crate::element::F16 as Parts>::PARTS),
        (Precision::Exact, DType::BF16) => Some(<crate::element::BF16 as Parts>::PARTS),
        (Precision::Exact, DType::Q8 | DType::Q4 | DType::T4) => None,
    }
}

impl<E: Element> Parts for E {
    const PARTS: usize = E::BF16_PARTS;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, _: Shape, i: usize) -> S::F {
        E::widen(s, &E::vectors(block.codes)[i])
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape, vector: usize) -> S::F {
        let codes = &cell.block.codes[cell.lane * shape.row..(cell.lane + 1) * shape.row];
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

/// Where an element of a row lies: its byte of the row, and which half of it, if it has half a byte.
struct Place {
    byte: usize,
    high: bool,
}

impl Place {
    /// Element `i` of a group whose codes begin at byte `first`, two to a byte: `j` and `j + half`.
    #[inline(always)]
    fn in_halves(first: usize, i: usize, half: usize) -> Self {
        Place { byte: first + if i < half { i } else { i - half }, high: i >= half }
    }

    /// Whether the fifteen elements behind element `i`, a multiple of 16, lie in the bytes behind it.
    #[inline(always)]
    fn begins_vector(i: usize, half: usize) -> bool {
        half.is_multiple_of(LANES) || i + LANES <= half
    }

    /// The half of its byte.
    #[inline(always)]
    fn nibble(&self, byte: u8) -> u8 {
        if self.high { byte >> 4 } else { byte & 15 }
    }

    /// The same, for every byte of a vector.
    #[inline(always)]
    fn nibbles<S: Simd>(&self, s: S, bytes: S::I) -> S::I {
        if self.high { s.high_nibbles(bytes) } else { s.low_nibbles(bytes) }
    }
}

/// Bytes `4 * (byte / 4)..` of sixteen keys: byte `byte % 4` of a lane is that of its key.
#[inline(always)]
fn quad_of_keys<S: Simd>(s: S, block: &Block<'_>, byte: usize) -> S::I {
    s.load_bytes(&block.codes.as_chunks().0[byte / 4])
}

/// Sixteen code bytes of a cell from `byte` on, in byte `lane % 4` of each lane. The values of four cells are interleaved.
#[inline(always)]
fn bytes_of_values<S: Simd>(s: S, cell: &Cell<'_>, row: usize, byte: usize) -> S::I {
    let cells = &cell.block.codes[cell.lane / 4 * 4 * row..][..4 * row];
    match cells[4 * byte..].first_chunk() {
        Some(bytes) => s.load_bytes(bytes),
        None => {
            let mut last = [0; 64];
            last[..4 * (row - byte)].copy_from_slice(&cells[4 * byte..]);
            s.load_bytes(&last)
        }
    }
}

/// Parameter `p` of sixteen keys.
#[inline(always)]
fn params<S: Simd>(s: S, block: &Block<'_>, p: usize) -> S::F {
    s.load_f16(&block.params.as_chunks().0[p])
}

/// Parameter `p` of a cell.
#[inline(always)]
fn param<S: Simd>(s: S, cell: &Cell<'_>, p: usize) -> S::F {
    // In all lanes before it is converted: converting one alone takes several instructions more.
    let at = 2 * (p * LANES + cell.lane);
    let mut lanes = [0; 2 * LANES];
    lanes.as_chunks_mut::<2>().0.fill([cell.block.params[at], cell.block.params[at + 1]]);
    s.load_f16(&lanes)
}

/// Sixteen elements, one after the other: where a vector is not a piece of a row's codes. Past the end they are 0.
#[inline(always)]
fn gathered<S: Simd>(s: S, head_dim: usize, vector: usize, element: impl Fn(usize) -> f32) -> S::F {
    let mut all = [0.0; LANES];
    let first = vector * LANES;
    for (i, x) in (first..head_dim).zip(&mut all) {
        *x = element(i);
    }
    s.load(&all)
}

/// The code byte of a cell.
#[inline(always)]
fn byte_of_value(cell: &Cell<'_>, row: usize, byte: usize) -> u8 {
    cell.block.codes[cell.lane / 4 * 4 * row + 4 * byte + cell.lane % 4]
}

/// `(code − 128) × scale`.
#[inline(always)]
fn signed<S: Simd>(s: S, code: S::I, scale: S::F) -> S::F {
    s.mul(s.to_f32(s.sub_i(code, s.splat_i(128))), scale)
}

impl Parts for Q8 {
    const PARTS: usize = 1;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, shape: Shape, i: usize) -> S::F {
        signed(s, byte_of(s, quad_of_keys(s, block, i), i % 4), params(s, block, i / shape.group))
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape, vector: usize) -> S::F {
        let first = vector * LANES;
        let codes = byte_of(s, bytes_of_values(s, cell, shape.row, first), cell.lane % 4);
        signed(s, codes, param(s, cell, first / shape.group))
    }
    #[inline(always)]
    fn line_of_keys(i: usize) -> Option<usize> {
        i.is_multiple_of(4).then_some(16 * i)
    }
    #[inline(always)]
    fn squares_of_keys<S: Simd>(s: S, block: &Block<'_>, shape: Shape) -> S::F {
        let mut squares = s.splat(0.0);
        for (group, len) in groups(shape) {
            squares = add_largest(s, params(s, block, group), len, squares);
        }
        squares
    }
    #[inline(always)]
    fn largest<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape) -> f32 {
        let mut scale = s.splat(0.0);
        for (group, _) in groups(shape) {
            scale = s.max(magnitude(s, param(s, cell, group)), scale);
        }
        LARGEST_CODE * s.largest(scale)
    }
}

/// The largest magnitude of a code of 8 bits.
const LARGEST_CODE: f32 = 128.0;

#[inline(always)]
fn magnitude<S: Simd>(s: S, x: S::F) -> S::F {
    s.max(x, s.sub(s.splat(0.0), x))
}

/// Adds the squares of `n` codes of 8 bits with this scale, the largest that there may be.
#[inline(always)]
fn add_largest<S: Simd>(s: S, scale: S::F, n: usize, squares: S::F) -> S::F {
    s.fma(s.mul(scale, scale), s.splat(n as f32 * LARGEST_CODE * LARGEST_CODE), squares)
}

/// The least element that codes of 4 bits may stand for, and the greatest.
#[inline(always)]
fn ends<S: Simd>(s: S, scale: S::F, least: S::F) -> [S::F; 2] {
    [least, s.fma(scale, s.splat(15.0), least)]
}

/// Adds the squares of `n` elements between two ends. One of these is the largest: it adds the squares of both.
#[inline(always)]
fn add_ends<S: Simd>(s: S, [a, b]: [S::F; 2], n: usize, squares: S::F) -> S::F {
    s.fma(s.fma(a, a, s.mul(b, b)), s.splat(n as f32), squares)
}

/// The groups of a row, and the length of each.
#[inline(always)]
fn groups(Shape { head_dim, group, .. }: Shape) -> impl Iterator<Item = (usize, usize)> {
    (0..head_dim).step_by(group).map(move |first| group.min(head_dim - first)).enumerate()
}

/// The group that contains element `i`: its number, its first element and its length.
#[inline(always)]
fn group_of(shape: Shape, i: usize) -> (usize, usize, usize) {
    let (group, first) = (i / shape.group, i / shape.group * shape.group);
    (group, first, shape.group.min(shape.head_dim - first))
}

impl Parts for Q4 {
    const PARTS: usize = 1;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, shape: Shape, i: usize) -> S::F {
        let (group, first, len) = group_of(shape, i);
        let place = Place::in_halves(first / 2, i - first, len.div_ceil(2));
        let codes = place.nibbles(s, quad_of_keys(s, block, place.byte));
        let code = s.to_f32(byte_of(s, codes, place.byte % 4));
        s.fma(code, params(s, block, 2 * group), params(s, block, 2 * group + 1))
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape, vector: usize) -> S::F {
        let (group, first, len) = group_of(shape, vector * LANES);
        let (i, half) = (vector * LANES - first, len.div_ceil(2));
        let place = Place::in_halves(first / 2, i, half);
        if Place::begins_vector(i, half) {
            let codes = place.nibbles(s, bytes_of_values(s, cell, shape.row, place.byte));
            let code = s.to_f32(byte_of(s, codes, cell.lane % 4));
            return s.fma(code, param(s, cell, 2 * group), param(s, cell, 2 * group + 1));
        }
        gathered(s, shape.head_dim, vector, |i| {
            let place = Place::in_halves(first / 2, i - first, half);
            let code = place.nibble(byte_of_value(cell, shape.row, place.byte));
            f32::from(code)
                .mul_add(cell.block.param(2 * group, cell.lane), cell.block.param(2 * group + 1, cell.lane))
        })
    }
    #[inline(always)]
    fn line_of_keys(i: usize) -> Option<usize> {
        i.is_multiple_of(8).then_some(8 * i)
    }
    #[inline(always)]
    fn squares_of_keys<S: Simd>(s: S, block: &Block<'_>, shape: Shape) -> S::F {
        let mut squares = s.splat(0.0);
        for (group, len) in groups(shape) {
            let ends = ends(s, params(s, block, 2 * group), params(s, block, 2 * group + 1));
            squares = add_ends(s, ends, len, squares);
        }
        squares
    }
    #[inline(always)]
    fn largest<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape) -> f32 {
        let mut largest = s.splat(0.0);
        for (group, _) in groups(shape) {
            for end in ends(s, param(s, cell, 2 * group), param(s, cell, 2 * group + 1)) {
                largest = s.max(magnitude(s, end), largest);
            }
        }
        s.largest(largest)
    }
}

/// Number of parameters before that of the elements that are not outliers.
#[inline(always)]
fn others(shape: Shape) -> usize {
    usize::from(shape.group > 0)
}

impl Parts for T4 {
    const PARTS: usize = 1;
    #[inline(always)]
    fn key<S: Simd>(s: S, block: &Block<'_>, shape: Shape, i: usize) -> S::F {
        let outliers = shape.group;
        if i < outliers {
            return signed(s, byte_of(s, quad_of_keys(s, block, i), i % 4), params(s, block, 0));
        }
        let half = (shape.head_dim - outliers).div_ceil(2);
        let place = Place::in_halves(outliers, i - outliers, half);
        let codes = place.nibbles(s, quad_of_keys(s, block, place.byte));
        let level = byte_of(s, s.lookup(&t4::LEVELS, codes), place.byte % 4);
        signed(s, level, params(s, block, others(shape)))
    }
    #[inline(always)]
    fn value<S: Simd>(s: S, cell: &Cell<'_>, shape: Shape, vector: usize) -> S::F {
        // Values have no outliers.
        let (first, half) = (vector * LANES, shape.head_dim.div_ceil(2));
        if Place::begins_vector(first, half) {
            let place = Place::in_halves(0, first, half);
            let codes = place.nibbles(s, bytes_of_values(s, cell, shape.row, place.byte));
            let level = byte_of(s, s.lookup(&t4::LEVELS, codes), cell.lane % 4);
            return signed(s, level, param(s, cell, 0));
        }
        gathered(s, shape.head_dim, vector, |i| {
            let place = Place::in_halves(0, i, half);
            let code = place.nibble(byte_of_value(cell, shape.row, place.byte));
            (f32::from(t4::LEVELS[usize::from(code)]) - 128.0) * cell.block.param(0, cell.lane)
        })
    }
    #[inline(always)]
    fn line_of_keys(i: usize) -> Option<usize> {
        i.is_multiple_of(8).then_some(8 * i)
    }
    #[inline(always)]
    fn squares_of_keys<S: Simd>(s: S, block: &Block<'_>, shape: Shape) -> S::F {
        let (outliers, mut squares) = (shape.group, s.splat(0.0));
        if outliers > 0 {
            squares = add_largest(s, params(s, block, 0), outliers, squares);
        }
        add_largest(s, params(s, block, others(shape)), shape.head_dim - outliers, squares)
    }
    #[inline(always)]
    fn largest<S: Simd>(s: S, cell: &Cell<'_>, _: Shape) -> f32 {
        // Values have no outliers.
        LARGEST_CODE * s.largest(magnitude(s, param(s, cell, 0)))
    }
}

/// Element `i` of the keys of a block; 0 past the end.
#[inline(always)]
pub(super) fn key<S: Simd, C: Parts>(s: S, block: &Block<'_>, shape: Shape, i: usize) -> S::F {
    if i >= shape.head_dim {
        return s.splat(0.0);
    }
    if let Some(line) = C::line_of_keys(i).and_then(|at| block.codes.get(at)) {
        s.prefetch(line, block.ahead);
    }
    C::key(s, block, shape, i)
}

/// Cuts the keys of a block into parts: `[steps, parts]` tiles.
#[inline(always)]
pub(super) fn pack_keys<S: Simd, C: Parts, L: Left>(s: S, block: &Block<'_>, shape: Shape, out: &mut [u32]) {
    for (step, out) in out.chunks_exact_mut(L::right::<C>() * TILE).enumerate() {
        for row in 0..LANES {
            let i = step * STEP + row;
            let even = key::<S, C>(s, block, shape, i);
            let odd = key::<S, C>(s, block, shape, i + LANES);
            right::<S, C, L>(s, even, odd, out, row);
        }
    }
}

/// Cuts values into parts: `[head_dim / 16, steps, parts]` tiles.
#[inline(always)]
pub(super) fn pack_values<S: Simd, C: Parts, L: Left>(
    s: S,
    places: &Places<'_>,
    shape: Shape,
    out: &mut [u32],
) {
    let steps = places.n / STEP;
    for step in 0..steps {
        for row in 0..LANES {
            let place = step * STEP + row;
            let (even, odd) = (places.fetch(s, place, shape.row), places.fetch(s, place + LANES, shape.row));
            for n in 0..shape.head_dim.div_ceil(LANES) {
                let (even, odd) = (value::<S, C>(s, &even, shape, n), value::<S, C>(s, &odd, shape, n));
                let out = &mut out[(n * steps + step) * L::right::<C>() * TILE..];
                right::<S, C, L>(s, even, odd, out, row);
            }
        }
    }
}

/// Elements `16 * vector..` of a value; 0 if there is none.
#[inline(always)]
pub(super) fn value<S: Simd, C: Parts>(s: S, cell: &Option<Cell<'_>>, shape: Shape, vector: usize) -> S::F {
    match cell {
        Some(cell) => C::value(s, cell, shape, vector),
        None => s.splat(0.0),
    }
}
