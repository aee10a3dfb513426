//! What kernels of linear layers prefetch.
//!
//! Up to eight tokens prefetch nothing: the panels of a thread are one stream, which the processor fetches by itself. Prefetches by hand took up to half
//! of the speed of one to four tokens on Zen 4, wherever they reached, and nothing of eight. Float panels are read four at a time: see `float.rs`.
use super::{Panels, inputs};
use crate::arch::Simd;

impl Panels<'_> {
    /// What the tile that starts at token `first` of `n` prefetches, if it is one of `MANY` whole tiles, of which each reads `side` panels side by side.
    #[inline(always)]
    pub(super) fn ahead<const MANY: bool>(&self, n: usize, first: usize, side: usize) -> Ahead<MANY> {
        let tiles = n / inputs::TILE;
        let behind = tiles.checked_sub(1 + first / inputs::TILE);
        let share = (0..8).filter(|line| MANY && behind == Some(line % tiles.min(8)));
        Ahead { lines: share.fold(0, |lines, line| lines | 1 << line), bytes: self.panel * side }
    }
}

/// Which of the cache lines of a block's codes a tile of tokens prefetches, and how far ahead. None, unless there are `MANY` tiles.
///
/// Several tiles read a panel one after the other, all but the first from the processor's cache:
/// together the last eight tiles prefetch the next panel, each its share of every block. So memory and arithmetic are busy at the same
/// time. Were they the first eight, the inputs of many more tiles would take the prefetched lines' place in the second-level cache.
#[derive(Clone, Copy)]
pub(super) struct Ahead<const MANY: bool> {
    /// Bit `i` for line `i`.
    lines: u8,
    bytes: usize,
}

impl<const MANY: bool> Ahead<MANY> {
    /// Prefetches what lies ahead of the codes of a block, at most eight cache lines.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(self, s: S, codes: &[u8]) {
        let lines = codes.as_chunks::<64>().0;
        let mut i = 0;
        while MANY && i < lines.len() {
            if self.lines >> i & 1 == 1 {
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
            let of = |first: usize| panels.ahead::<true>(n, first, 1).lines;
            let lines: Vec<u8> = (0..n).step_by(inputs::TILE).map(of).filter(|lines| *lines != 0).collect();
            assert_eq!(lines.iter().map(|lines| lines.count_ones()).sum::<u32>(), 8, "{n} tokens");
            assert_eq!(lines.iter().fold(0, |all, lines| all | lines), u8::MAX, "{n} tokens");
        }
    }
}
