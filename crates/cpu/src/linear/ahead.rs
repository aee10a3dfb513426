//! What kernels of packed linear layers prefetch.
//!
//! One or two tokens prefetch nothing: the panels of a thread are one stream, which the processor fetches by itself, and at the
//! speed of memory prefetches by hand take up to 40 % of it (Zen 4). With more arithmetic per line the processor looks at too few
//! of the next lines. Then every line must be prefetched, those of scales too: for what is left out the processor, which sees a
//! stream with gaps, does nothing.
use super::{Panels, inputs};
use crate::arch::Simd;

/// Fewest tokens of a tile that prefetches.
const FROM: usize = 4;
/// How far ahead a single tile of tokens prefetches, in bytes, of all panels that it reads side by side. On Zen 4, 4 and 32 KiB
/// were up to 1.3 times slower.
const AHEAD: usize = 8 << 10;

impl Panels<'_> {
    /// What the tile of `T` tokens that starts at token `first` of `n` prefetches. It is one of several whole tiles if there are
    /// `MANY`, and reads `side` panels side by side.
    #[inline(always)]
    pub(super) fn ahead<const T: usize, const MANY: bool>(
        &self,
        n: usize,
        first: usize,
        side: usize,
    ) -> Ahead<T, MANY> {
        if !MANY {
            return Ahead { lines: u8::MAX, bytes: AHEAD / side };
        }
        let tiles = n / inputs::TILE;
        let behind = tiles.checked_sub(1 + first / inputs::TILE);
        let share = (0..8).filter(|line| behind == Some(line % tiles.min(8)));
        Ahead { lines: share.fold(0, |lines, line| lines | 1 << line), bytes: self.panel * side }
    }
}

/// Which cache lines a tile of `T` tokens prefetches, of the codes of a block or the scales of a chunk, and how far ahead.
///
/// A single tile reads each panel once, at the speed of memory: it prefetches every line [`AHEAD`], if it has enough tokens. (So do
/// the tokens that whole tiles leave, which read a unit of panels anew.) Several tiles read a panel one after the other, all but
/// the first from the processor's cache: together the last eight tiles prefetch the next panel, each its share. So memory and
/// arithmetic are busy at the same time. Were they the first eight, the inputs of many more tiles would take the prefetched lines'
/// place in the second-level cache.
#[derive(Clone, Copy)]
pub(super) struct Ahead<const T: usize, const MANY: bool> {
    /// Bit `i` for line `i`, and for every eighth after it.
    lines: u8,
    bytes: usize,
}

impl<const T: usize, const MANY: bool> Ahead<T, MANY> {
    /// Prefetches what lies ahead of some lines, or with `MANY` its share of it.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(self, s: S, bytes: &[u8]) {
        let lines = bytes.as_chunks::<64>().0;
        let mut i = 0;
        while (MANY || T >= FROM) && i < lines.len() {
            if !MANY || self.lines >> (i % 8) & 1 == 1 {
                s.prefetch(&lines[i], self.bytes);
            }
            i += 1;
        }
    }
}

/// Prefetches part `part` of `parts` of the cache lines that lie `ahead` bytes after some.
#[inline(always)]
pub(super) fn prefetch_part<S: Simd>(s: S, lines: &[u8], ahead: usize, part: usize, parts: usize) {
    let lines = lines.as_chunks::<64>().0;
    // In the build of tests `step_by` would be a call.
    let mut i = part;
    while let Some(line) = lines.get(i) {
        s.prefetch(line, ahead);
        i += parts;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tiles_fetch_every_line_once() {
        let panels = Panels { bytes: &[], n: 0, panel: 0, blocks: 0 };
        for n in inputs::TILE + 1..200 {
            let of = |first: usize| panels.ahead::<{ inputs::TILE }, true>(n, first, 1).lines;
            let lines: Vec<u8> = (0..n).step_by(inputs::TILE).map(of).filter(|lines| *lines != 0).collect();
            assert_eq!(lines.iter().map(|lines| lines.count_ones()).sum::<u32>(), 8, "{n} tokens");
            assert_eq!(lines.iter().fold(0, |all, lines| all | lines), u8::MAX, "{n} tokens");
        }
    }
}
