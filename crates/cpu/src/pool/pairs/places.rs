//! Values in the order of a sequence.
use super::{MAX_PLACES, STEP};
use crate::arch::{LANES, Simd};
use crate::pool::Block;
use crate::pool::gather::AHEAD;
use std::ops::Range;

/// A cell: a lane of a block.
#[derive(Clone, Copy)]
pub struct Cell<'b> {
    pub block: Block<'b>,
    pub lane: usize,
}

/// Values by their place in the sequence, from blocks anywhere in memory.
pub struct Places<'b> {
    blocks: [Block<'b>; MAX_PLACES],
    n_blocks: usize,
    /// Where the value of each place lies: block × 16 + lane.
    at: [u16; MAX_PLACES],
    /// Places in use: a multiple of [`STEP`].
    pub n: usize,
}

/// No value at a place.
const EMPTY: u16 = u16::MAX;

impl<'b> Places<'b> {
    pub fn new() -> Self {
        Places { blocks: [Block::default(); MAX_PLACES], n_blocks: 0, at: [EMPTY; MAX_PLACES], n: 0 }
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

    /// Puts the values of `lanes` of a block to the places from `first` on. Returns `false` if one of them was taken.
    pub fn add(&mut self, block: Block<'b>, lanes: Range<usize>, first: usize) -> bool {
        // There are as many blocks as places, and every block takes a place.
        let places = &mut self.at[first..first + lanes.len()];
        let free = places.iter().all(|at| *at == EMPTY);
        if free && !lanes.is_empty() {
            let lane = (self.n_blocks * LANES + lanes.start) as u16;
            places.iter_mut().zip(lane..).for_each(|(at, lane)| *at = lane);
            self.blocks[self.n_blocks] = block;
            self.n_blocks += 1;
        }
        free
    }

    /// The value at a place.
    #[inline(always)]
    fn get(&self, place: usize) -> Option<Cell<'b>> {
        let at = usize::from(self.at[place]);
        (at != usize::from(EMPTY)).then(|| Cell { block: self.blocks[at / LANES], lane: at % LANES })
    }

    /// The same. Prefetches the codes, of `row` bytes, of the value some places on, or the bytes that follow in memory.
    #[inline(always)]
    pub fn fetch<S: Simd>(&self, s: S, place: usize, row: usize) -> Option<Cell<'b>> {
        let cell = self.get(place)?;
        // Where cells are interleaved, the bytes of four cells lie where those of four rows would.
        let codes = |cell: &Cell<'b>| cell.block.codes.get(cell.lane * row..).unwrap_or_default();
        let ahead = place + (AHEAD / row.max(1)).max(1);
        let next = if ahead < self.n { self.get(ahead) } else { None };
        let distance = match next {
            Some(next) => (codes(&next).as_ptr() as usize).wrapping_sub(codes(&cell).as_ptr() as usize),
            None => AHEAD,
        };
        for line in codes(&cell).iter().take(row).step_by(64) {
            s.prefetch(line, distance);
        }
        Some(cell)
    }
}
