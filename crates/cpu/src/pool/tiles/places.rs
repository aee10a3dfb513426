//! Values in the order of a sequence.
use super::{MAX_PLACES, STEP};
use crate::arch::{LANES, Simd};
use crate::pool::gather::AHEAD;
use std::ops::Range;

/// Values by their place in the sequence, from blocks anywhere in memory.
pub struct Places<'b> {
    blocks: [&'b [u8]; MAX_PLACES],
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

    /// The same, empty if there is none. Prefetches the value some places on, or the bytes that follow in memory.
    #[inline(always)]
    pub fn fetch<S: Simd>(&self, s: S, place: usize, row: usize) -> &'b [u8] {
        let codes = self.get(place, row).unwrap_or_default();
        let ahead = place + (AHEAD / row.max(1)).max(1);
        let next = if ahead < self.n { self.get(ahead, row) } else { None };
        let distance = match next {
            Some(next) => (next.as_ptr() as usize).wrapping_sub(codes.as_ptr() as usize),
            None => AHEAD,
        };
        for line in codes.iter().step_by(64) {
            s.prefetch(line, distance);
        }
        codes
    }
}
