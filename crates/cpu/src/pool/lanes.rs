//! Codes of rows, out of the lanes of a block and into them, as its codes are interleaved.
//!
//! Lanes whose codes fill a vector are transposed together; other lanes, and what is left of a row, are copied unit by unit.
use super::{Geometry, Interleaving};
use crate::arch::{LANES, transpose};
use std::array::from_fn;
use std::ops::Range;

/// Bytes of the vectors that rows are transposed in.
const VECTOR: usize = 16;
/// A vector of bytes.
type Bytes = [u8; VECTOR];

impl Geometry {
    /// Copies the codes of the row in `lane` out of a block; `codes` may end before the row's padding.
    pub(super) fn gather(&self, block: &[u8], lane: usize, codes: &mut [u8]) {
        self.gather_from(block, lane, codes, 0);
    }

    /// The inverse of [`gather`](Self::gather). Padding becomes zero.
    pub(super) fn scatter(&self, block: &mut [u8], lane: usize, codes: &[u8]) {
        self.scatter_from(block, lane, codes, 0);
    }

    /// [`gather`](Self::gather), from code byte `start` on, which begins a unit.
    fn gather_from(&self, block: &[u8], lane: usize, codes: &mut [u8], start: usize) {
        match self.interleaving {
            Interleaving::Values { together: 1 } => {
                let row = &block[lane * self.row..][..codes.len()];
                codes[start..].copy_from_slice(&row[start..]);
            }
            Interleaving::Values { .. } => {
                let cells = block[lane / 4 * 4 * self.row..][..4 * self.row].as_chunks::<4>().0;
                let codes = codes[start..].iter_mut();
                codes.zip(&cells[start..]).for_each(|(code, four)| *code = four[lane % 4]);
            }
            Interleaving::Keys { unit: 2 } => gather_units::<2>(block, lane, codes, start),
            Interleaving::Keys { .. } => gather_units::<4>(block, lane, codes, start),
        }
    }

    /// The inverse of [`gather_from`](Self::gather_from).
    fn scatter_from(&self, block: &mut [u8], lane: usize, codes: &[u8], start: usize) {
        match self.interleaving {
            Interleaving::Values { together: 1 } => {
                block[lane * self.row..][..codes.len()][start..].copy_from_slice(&codes[start..]);
            }
            Interleaving::Values { .. } => {
                let cells = block[lane / 4 * 4 * self.row..][..4 * self.row].as_chunks_mut::<4>().0;
                let codes = codes[start..].iter();
                codes.zip(&mut cells[start..]).for_each(|(code, four)| four[lane % 4] = *code);
            }
            Interleaving::Keys { unit: 2 } => scatter_units::<2>(block, lane, codes, start),
            Interleaving::Keys { .. } => scatter_units::<4>(block, lane, codes, start),
        }
    }

    /// How many lanes are copied together: those whose codes are the units of a vector.
    fn together(&self) -> usize {
        match self.interleaving {
            Interleaving::Values { together } => together,
            Interleaving::Keys { unit } => VECTOR / unit,
        }
    }

    /// The lanes that are copied together: the first of them, and how many.
    fn runs(&self, lanes: Range<usize>) -> impl Iterator<Item = (usize, usize)> {
        let together = self.together();
        let mut lane = lanes.start;
        std::iter::from_fn(move || {
            let first = lane;
            let left = lanes.end.checked_sub(first).filter(|left| *left > 0)?;
            let n = if first.is_multiple_of(together) && left >= together { together } else { 1 };
            lane += n;
            Some((first, n))
        })
    }

    /// Copies the codes of `lanes` out of a block; row `i` goes to byte `i * stride` of `rows`.
    pub(super) fn gather_lanes(&self, block: &[u8], lanes: Range<usize>, rows: &mut [u8], stride: usize) {
        let codes = self.codes();
        for (lane, n) in self.runs(lanes.clone()) {
            let rows = &mut rows[(lane - lanes.start) * stride..];
            let vectors = match self.interleaving {
                _ if n == 1 => 0,
                Interleaving::Keys { unit: 2 } => gather_square::<8>(block, lane, codes, rows, stride),
                Interleaving::Keys { .. } => gather_square::<4>(block, lane, codes, rows, stride),
                Interleaving::Values { .. } => gather_turns(&block[lane * self.row..], codes, rows, stride),
            };
            for i in 0..n {
                self.gather_from(block, lane + i, &mut rows[i * stride..][..codes], vectors * VECTOR);
            }
        }
    }

    /// The inverse of [`gather_lanes`](Self::gather_lanes).
    pub(super) fn scatter_lanes(&self, block: &mut [u8], lanes: Range<usize>, rows: &[u8], stride: usize) {
        let codes = self.codes();
        for (lane, n) in self.runs(lanes.clone()) {
            let rows = &rows[(lane - lanes.start) * stride..];
            let vectors = match self.interleaving {
                _ if n == 1 => 0,
                Interleaving::Keys { unit: 2 } => scatter_square::<8>(block, lane, codes, rows, stride),
                Interleaving::Keys { .. } => scatter_square::<4>(block, lane, codes, rows, stride),
                Interleaving::Values { .. } => {
                    scatter_turns(&mut block[lane * self.row..], codes, rows, stride)
                }
            };
            for i in 0..n {
                self.scatter_from(block, lane + i, &rows[i * stride..][..codes], vectors * VECTOR);
            }
        }
    }
}

fn gather_units<const UNIT: usize>(block: &[u8], lane: usize, codes: &mut [u8], start: usize) {
    let mut lines = block[start * LANES..].as_chunks::<UNIT>().0.as_chunks::<LANES>().0.iter();
    let (whole, rest) = codes[start..].as_chunks_mut::<UNIT>();
    whole.iter_mut().zip(&mut lines).for_each(|(unit, line)| *unit = line[lane]);
    if let Some(line) = lines.next() {
        rest.copy_from_slice(&line[lane][..rest.len()]);
    }
}

fn scatter_units<const UNIT: usize>(block: &mut [u8], lane: usize, codes: &[u8], start: usize) {
    let lines = block[start * LANES..].as_chunks_mut::<UNIT>().0.as_chunks_mut::<LANES>().0;
    let mut lines = lines.iter_mut();
    let (whole, rest) = codes[start..].as_chunks::<UNIT>();
    whole.iter().zip(&mut lines).for_each(|(unit, line)| line[lane] = *unit);
    if let Some(line) = lines.next() {
        let (start, padding) = line[lane].split_at_mut(rest.len());
        start.copy_from_slice(rest);
        padding.fill(0);
    }
}

fn bytes_at(bytes: &[u8], at: usize) -> Bytes {
    *bytes[at..].first_chunk().expect("rows and blocks are whole vectors here")
}

/// Rows of `N` units of a vector each become columns, or columns rows.
#[inline(always)]
fn transposed<const N: usize>(square: [Bytes; N]) -> [Bytes; N] {
    // Both sizes are compiled for each `N`, and the compiler drops the one that it is not.
    let mut out = square;
    if let Ok(square) = <[Bytes; 8]>::try_from(&square[..]) {
        out.copy_from_slice(&transpose::halves(square));
    } else if let Ok(square) = <[Bytes; 4]>::try_from(&square[..]) {
        out.copy_from_slice(&transpose::words(square));
    }
    out
}

/// Gathers the rows of keys of `N` lanes, as many units as a vector has, in squares of `N` by `N` units. Returns how many vectors of
/// each row it has copied; a shorter end is left.
fn gather_square<const N: usize>(
    block: &[u8],
    lane: usize,
    codes: usize,
    rows: &mut [u8],
    stride: usize,
) -> usize {
    let (unit, whole) = (VECTOR / N, codes / VECTOR);
    for vector in 0..whole {
        let lines = &block[vector * VECTOR * LANES..][..VECTOR * LANES];
        let columns = from_fn(|i| bytes_at(lines, (i * LANES + lane) * unit));
        for (i, row) in transposed::<N>(columns).iter().enumerate() {
            rows[i * stride + vector * VECTOR..][..VECTOR].copy_from_slice(row);
        }
    }
    whole
}

/// The inverse of [`gather_square`].
fn scatter_square<const N: usize>(
    block: &mut [u8],
    lane: usize,
    codes: usize,
    rows: &[u8],
    stride: usize,
) -> usize {
    let (unit, whole) = (VECTOR / N, codes / VECTOR);
    for vector in 0..whole {
        let lines = &mut block[vector * VECTOR * LANES..][..VECTOR * LANES];
        let square = from_fn(|i| bytes_at(rows, i * stride + vector * VECTOR));
        for (i, column) in transposed::<N>(square).iter().enumerate() {
            lines[(i * LANES + lane) * unit..][..VECTOR].copy_from_slice(column);
        }
    }
    whole
}

/// Gathers four packed rows of values, which lie in turns. Returns how many vectors of each row it has copied.
fn gather_turns(block: &[u8], codes: usize, rows: &mut [u8], stride: usize) -> usize {
    let whole = codes / VECTOR;
    for (vector, turns) in block.as_chunks::<{ 4 * VECTOR }>().0.iter().take(whole).enumerate() {
        let turns = from_fn(|i| bytes_at(turns, i * VECTOR));
        for (i, row) in transpose::separate(turns).iter().enumerate() {
            rows[i * stride + vector * VECTOR..][..VECTOR].copy_from_slice(row);
        }
    }
    whole
}

/// The inverse of [`gather_turns`].
fn scatter_turns(block: &mut [u8], codes: usize, rows: &[u8], stride: usize) -> usize {
    let whole = codes / VECTOR;
    for (vector, turns) in block.as_chunks_mut::<{ 4 * VECTOR }>().0.iter_mut().take(whole).enumerate() {
        let four = from_fn(|i| bytes_at(rows, i * stride + vector * VECTOR));
        turns.copy_from_slice(transpose::interleave(four).as_flattened());
    }
    whole
}
