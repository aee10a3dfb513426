//! What kernels of linear layers prefetch.
use super::{Panels, inputs};
use crate::arch::Simd;

/// Prefetch distance of a tile of tokens in bytes, of all panels that it reads side by side. Hardware prefetching stops at
/// every 4 KiB page, and a few bytes keep a core busy. A thread's parts are adjacent, so it later uses what it prefetched past
/// the end of one. With one or two tokens, float weights are streams that the hardware prefetcher follows.
/// On Zen 4, 32 KiB were up to 1.1 times as fast as 16 for weights of four bits, and equal for others.
pub(super) const AHEAD: usize = 32 << 10;

impl Panels<'_> {
    /// What the tile that starts at token `first` of `n` prefetches. `MANY` if it is one of several whole tiles.
    #[inline(always)]
    pub(super) fn ahead<const MANY: bool>(&self, n: usize, first: usize) -> Ahead {
        if !MANY {
            return Ahead::all(AHEAD);
        }
        let tiles = n / inputs::TILE;
        let behind = tiles.checked_sub(1 + first / inputs::TILE);
        let share = (0..8).filter(|line| behind == Some(line % tiles.min(8)));
        Ahead { lines: share.fold(0, |lines, line| lines | 1 << line), bytes: self.panel }
    }
}

/// Which of the cache lines of a block's codes a tile of tokens prefetches, and how far ahead.
///
/// A single tile reads each panel once, at the speed of memory: it prefetches every line [`AHEAD`]. (So do the tokens that whole tiles leave,
/// which read a unit of panels anew.) Several tiles read a panel one after the other, all but the first from the processor's cache:
/// together the last eight tiles prefetch the next panel, each its share of every block. So memory and arithmetic are busy at the same
/// time. Were they the first eight, the inputs of many more tiles would take the prefetched lines' place in the second-level cache.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// Bit `i` for line `i`.
    lines: u8,
    pub(super) bytes: usize,
}

impl Ahead {
    /// Every line, `bytes` ahead.
    #[inline(always)]
    pub(super) fn all(bytes: usize) -> Self {
        Ahead { lines: u8::MAX, bytes }
    }

    /// Prefetches part `part` of `parts` of what lies ahead of the codes of a block, with `MANY` at most eight cache lines. A core can
    /// have few misses outstanding, and a burst of them delays the arithmetic that follows: a tile with much arithmetic per line
    /// spreads them over it.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd, const MANY: bool>(self, s: S, codes: &[u8], part: usize, parts: usize) {
        let lines = codes.as_chunks::<64>().0;
        // In the build of tests `step_by` would be a call, which took a sixth of the time of a token.
        let mut i = part;
        while let Some(line) = lines.get(i) {
            if !MANY || self.lines >> i & 1 == 1 {
                s.prefetch(line, self.bytes);
            }
            i += parts;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_tiles_fetch_every_line_once() {
        let panels = Panels { bytes: &[], n: 0, panel: 0, blocks: 0 };
        for n in inputs::TILE + 1..200 {
            let of = |first: usize| panels.ahead::<true>(n, first).lines;
            let lines: Vec<u8> = (0..n).step_by(inputs::TILE).map(of).filter(|lines| *lines != 0).collect();
            assert_eq!(lines.iter().map(|lines| lines.count_ones()).sum::<u32>(), 8, "{n} tokens");
            assert_eq!(lines.iter().fold(0, |all, lines| all | lines), u8::MAX, "{n} tokens");
        }
    }
}
