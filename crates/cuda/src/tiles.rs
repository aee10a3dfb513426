//! How blocks of attention go through the cells: in tiles that fit into shared memory.
use crate::kernels::ROWS;
use kvist_gpu::Form;

/// What `attend.cu` has of its cells in shared memory: so many at a time, in one or two buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    pub cells: u32,
    pub stages: u32,
    /// Of dynamic shared memory.
    pub bytes: u32,
}

impl Tile {
    /// The largest that fits into so many bytes of shared memory. Two buffers are worth more than many cells: the next cells
    /// are copied while these are computed. `None` if not even the smallest fits.
    pub fn new(k: Form, v: Form, dim: u32, recent: bool, max_bytes: u32) -> Option<Tile> {
        // As in attend.cu.
        let lane_words = if k.dtype < 3 { 16 } else { 4 };
        let k_stride = (k.words(dim) + 31 - lane_words) / 32 * 32 + lane_words;
        let v_stride = v.words(dim).next_multiple_of(4);
        let copies = if k.needs_plain_queries(recent) { 2 } else { 1 };
        let queries = copies * ROWS * dim.next_multiple_of(8);
        let sizes = [(32, 2), (16, 2), (8, 2), (8, 1)].map(|(cells, stages)| {
            let bytes = 4 * (stages * cells * (k_stride + v_stride) + queries);
            Tile { cells, stages, bytes }
        });
        // What the kernel declares besides: scores, cells, and the state of each row.
        let fixed = |tile: &Tile| 4 * (tile.cells * (ROWS + 7) + 5 * ROWS + 1);
        sizes.into_iter().find(|tile| tile.bytes + fixed(tile) <= max_bytes)
    }
}

/// Stages of the second pass of `attend_mma.cu`, over recent rows.
pub const RECENT_STAGES: u32 = 2;

/// What `attend_mma.cu` has of its cells in shared memory: every warp a ring of groups of 16 cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmaTile {
    /// Groups of a ring.
    pub stages: u32,
    /// Of dynamic shared memory.
    pub bytes: u32,
    /// Blocks that share a multiprocessor.
    pub blocks: u32,
}

impl MmaTile {
    /// The most stages with which two blocks share a multiprocessor, up to four, or else as many as fit. `None` if tensor cores cannot
    /// compute attention over these rows.
    pub fn new((k, v): (Form, Form), dim: u32, rows: u32, recent: bool, max_bytes: u32) -> Option<MmaTile> {
        const WARPS: u32 = 4;
        const GROUP: u32 = 16;
        let takes = |form: Form| {
            let whole = !form.is_packed() || dim.is_multiple_of(form.group);
            (1..=4).contains(&form.dtype) && form.wide == 0 && form.turn <= 1 && whole
        };
        // A warp keeps its sums in registers: 128 of them at most.
        if !takes(k) || !takes(v) || !dim.is_multiple_of(32) || rows * dim > 4096 {
            return None;
        }
        // As in attend_mma.cu.
        let floats = |padding: u32| dim / 2 + padding;
        let stride = |form: Form, padding: u32| match form.is_packed() {
            true => form.words(dim),
            false => floats(padding),
        };
        let stage = WARPS * GROUP * (stride(k, 8) + stride(v, 4));
        let results = rows * (dim + 4);
        let pieces = if k.is_packed() { 1 } else { 2 };
        let operands = rows / 8 * (dim / 16) * 32 * 2 * pieces;
        let recent_stage = WARPS
            * GROUP
            * (if k.is_packed() { floats(8) } else { stride(k, 8) }
                + if v.is_packed() { floats(4) } else { stride(v, 4) });
        let second_pass = if recent { RECENT_STAGES * recent_stage } else { 0 };
        let of_stages = |stages: u32| {
            let ring =
                (stages * stage).max((stages - 1) * stage + results).max(WARPS * results).max(second_pass);
            // What the kernel declares besides: which rows read a cell; scales, maxima and norms of rows.
            let fixed = 4 * (stages * WARPS * GROUP + rows + 2 * WARPS * rows + 4);
            let bytes = 4 * (operands + ring);
            // A block has 1 KiB of its own besides, and a multiprocessor that much more than a block can have. Three blocks make up for the
            // instructions that unpack q4 (27.9 us instead of 32.5 for 32k tokens on an H100, from its L2 cache). With q8 they take longer
            // than two (35.2 and 32.4 us), and with more query rows than eight there are no registers for them.
            let most = if rows == ROWS && k.dtype == 4 && v.dtype == 4 { 3 } else { 2 };
            let blocks = (max_bytes + 1024) / (bytes + fixed + 1024);
            (MmaTile { stages, bytes, blocks: blocks.clamp(1, most) }, fixed)
        };
        let fitting = |bytes: u32| {
            let mut all = [4, 3, 2].map(of_stages).into_iter();
            all.find(|(tile, fixed)| tile.bytes + fixed <= bytes).map(|(tile, _)| tile)
        };
        // A block has 1 KiB of its own besides.
        fitting(max_bytes / 2 - 512).or_else(|| fitting(max_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::STORAGES;
    use kvist_device::Storage;

    /// Every size of heads gets a tile, in two buffers up to 256 elements, on the GPUs with the least shared memory.
    #[test]
    fn every_head_has_a_tile() {
        for text in STORAGES {
            let storage: Storage = text.parse().unwrap();
            for dim in [1, 20, 64, 128, 256, 512] {
                let Ok(form) = Form::new(storage, dim) else { continue };
                let tile =
                    Tile::new(form, form, dim, true, 99 << 10).unwrap_or_else(|| panic!("{text} {dim}"));
                assert!(tile.bytes <= 99 << 10 && 128 % tile.cells == 0, "{text} {dim}: {tile:?}");
                assert!(tile.stages == 2 || dim > 256, "{text} {dim}: {tile:?}");
            }
        }
    }

    /// On the GPUs with the least shared memory and with that of an H100: tensor cores take f16, bf16, q8 and q4 of usual heads.
    #[test]
    fn usual_heads_are_for_tensor_cores() {
        for text in STORAGES {
            let storage: Storage = text.parse().unwrap();
            for (dim, rows) in [(64, 32), (128, 8), (128, 32), (256, 16)] {
                let form = Form::new(storage, dim).unwrap();
                let of = |max_bytes| MmaTile::new((form, form), dim, rows, true, max_bytes);
                assert_eq!(of(227 << 10).is_some(), (1..=4).contains(&form.dtype), "{text} {dim}");
                if let Some(tile) = of(227 << 10) {
                    assert!(
                        tile.bytes <= 113 << 10 || dim == 256,
                        "two blocks: {text} {dim} {rows}: {tile:?}"
                    );
                }
            }
            let form = Form::new(storage, 128).unwrap();
            let small = MmaTile::new((form, form), 128, 32, true, 99 << 10);
            assert_eq!(small.is_some(), (1..=4).contains(&form.dtype), "{text}: {small:?}");
        }
        let f16 = Form::new("f16".parse().unwrap(), 128).unwrap();
        let of_8_rows = |form: Form, recent| MmaTile::new((form, form), 128, 8, recent, 227 << 10).unwrap();
        assert_eq!((of_8_rows(f16, false).stages, of_8_rows(f16, false).blocks), (3, 2));
        let q4 = Form::new("q4".parse().unwrap(), 128).unwrap();
        assert_eq!((of_8_rows(q4, true).stages, of_8_rows(q4, true).blocks), (4, 3));
        assert_eq!(MmaTile::new((f16, f16), 72, 8, false, 227 << 10), None, "no whole blocks of 32");
        assert_eq!(MmaTile::new((f16, f16), 256, 32, false, 227 << 10), None, "too many registers");
    }
}
