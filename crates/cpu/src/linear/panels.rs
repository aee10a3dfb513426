//! How sixteen rows of weights lie in memory.
//!
//! ```text
//! panel    [scales of whole rows] chunk chunk …
//! chunk    [scales of its blocks, filled up to cache lines] [codes of its blocks]
//! ```
//!
//! A chunk is one block, or two if the scales of one fill half a cache line. So a kernel reads the panels of a thread as one stream,
//! which the processor prefetches by itself. When the scales lay behind all codes of their panel, a core of Zen 4 read q4_0 at no
//! more than 20 GB/s, with prefetches by hand. As one stream, without them, it reads 30 of the 31 that reading alone reaches
//! (bench/RESULTS.md, "Panels as one stream").
use super::Format;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::Chunks;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Where the parts of a panel are.
pub struct Layout<F>(PhantomData<F>);

impl<F: Format> Layout<F> {
    /// Blocks of a chunk.
    pub const BLOCKS: usize = if F::SCALES == LINE / 2 { 2 } else { 1 };
    /// Bytes of the scales of a chunk.
    pub const SCALES: usize = (Self::BLOCKS * F::SCALES).next_multiple_of(LINE);
    /// Bytes of a chunk.
    pub const CHUNK: usize = Self::SCALES + Self::BLOCKS * F::CODES;

    /// Bytes of a panel with that many blocks per row: whole cache lines. `None` on overflow.
    pub fn bytes(blocks: usize) -> Option<usize> {
        let scales = blocks.div_ceil(Self::BLOCKS).checked_mul(Self::SCALES)?.checked_add(F::ROW_SCALES)?;
        blocks.checked_mul(F::CODES)?.checked_add(scales)?.checked_next_multiple_of(LINE)
    }

    /// The codes of a block.
    #[inline(always)]
    pub fn codes(block: usize) -> Range<usize> {
        let chunk = F::ROW_SCALES + block / Self::BLOCKS * Self::CHUNK;
        let start = chunk + Self::SCALES + block % Self::BLOCKS * F::CODES;
        start..start + F::CODES
    }

    /// The scales of a block, or those of whole rows.
    #[inline(always)]
    pub fn scales(block: usize) -> Range<usize> {
        const { assert!(F::ROW_SCALES == 0 || F::SCALES == 0, "one kind of scales") };
        if F::ROW_SCALES > 0 {
            return 0..F::ROW_SCALES;
        }
        let start = block / Self::BLOCKS * Self::CHUNK + block % Self::BLOCKS * F::SCALES;
        start..start + F::SCALES
    }

    /// The codes and the scales of block `i` of a chunk.
    #[inline(always)]
    pub fn of_chunk(chunk: &[u8], i: usize) -> (&[u8], &[u8]) {
        (&chunk[Self::SCALES + i * F::CODES..][..F::CODES], &chunk[i * F::SCALES..][..F::SCALES])
    }

    /// Everything from the first of some blocks to the last one, without the scales of whole rows.
    #[inline(always)]
    pub fn span(blocks: Range<usize>) -> Range<usize> {
        match blocks.end.checked_sub(1) {
            Some(last) if blocks.start <= last => {
                F::ROW_SCALES + blocks.start / Self::BLOCKS * Self::CHUNK..Self::codes(last).end
            }
            _ => 0..0,
        }
    }
}

/// Adjacent panels.
pub struct Panels<'p> {
    pub bytes: &'p [u8],
    pub n: usize,
    /// Bytes of a panel.
    pub panel: usize,
    /// Blocks per row.
    pub blocks: usize,
}

impl Panels<'_> {
    /// Panel `i`.
    #[inline(always)]
    pub fn get(&self, i: usize) -> &[u8] {
        &self.bytes[i * self.panel..(i + 1) * self.panel]
    }
    /// The chunks of panel `i`, see [`Layout::of_chunk`].
    #[inline(always)]
    pub fn chunks<F: Format>(&self, i: usize) -> Chunks<'_, u8> {
        self.get(i)[Layout::<F>::span(0..self.blocks)].chunks(Layout::<F>::CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use super::super::*;
    use super::*;

    /// Every byte of a panel belongs to one part, except what fills up scales; codes beside scales are whole cache lines.
    fn parts_are_disjoint<F: Format>(blocks: usize) {
        let mut owners = vec![0; Layout::<F>::bytes(blocks).unwrap()];
        let mut claim = |range: Range<usize>| owners[range].iter_mut().for_each(|n| *n += 1);
        for block in 0..blocks {
            let (codes, scales) = (Layout::<F>::codes(block), Layout::<F>::scales(block));
            assert!(F::SCALES + F::ROW_SCALES == 0 || codes.start.is_multiple_of(LINE));
            assert_eq!(Layout::<F>::span(block..block + 1).end, codes.end);
            assert!(F::ROW_SCALES > 0 || Layout::<F>::span(block..blocks).start <= scales.start);
            claim(codes);
            if F::ROW_SCALES == 0 || block == 0 {
                claim(scales);
            }
        }
        let parts = blocks * (F::CODES + F::SCALES) + F::ROW_SCALES;
        assert!(owners.iter().all(|n| *n <= 1), "{blocks} blocks");
        assert_eq!(owners.iter().sum::<usize>(), parts, "{blocks} blocks");
    }

    #[test]
    fn the_parts_of_panels_are_disjoint() {
        for encoding in ENCODINGS {
            for blocks in 1..8 {
                with_format!(encoding, F => parts_are_disjoint::<F>(blocks));
            }
        }
    }

    #[test]
    fn sizes_that_overflow_are_none() {
        assert_eq!(Layout::<float::F32>::bytes(usize::MAX / 64 + 1), None);
        assert_eq!(Layout::<int8::Int8>::bytes(usize::MAX / 512 + 1), None);
    }
}
