//! How `gemm_fast` and `gemm_warpgroups` divide a linear layer among blocks, warps and shared memory.
use kvist_gpu::{GemmTile, Routed};

/// Outputs and tokens that a block can have.
pub const TILES: [(u32, u32); 13] = [
    (128, 256),
    (128, 128),
    (64, 128),
    (32, 128),
    (128, 64),
    (64, 64),
    (32, 64),
    (128, 32),
    (64, 32),
    (32, 32),
    (128, 16),
    (64, 16),
    (32, 16),
];
/// Those of them that warpgroups can have.
pub const WARPGROUP_TILES: [(u32, u32); 2] = [(128, 256), (128, 128)];
/// Blocks that occupy a GPU.
const ENOUGH_BLOCKS: u32 = 128;
/// Shared memory that the kernel declares itself, and what a block costs besides, rounded up.
const FIXED_BYTES: u32 = 2 << 10;

/// Multiprocessors of an H100 (SXM) and an H200. Other GPUs with warpgroups have fewer, and get a tile that is not always the best.
const MULTIPROCESSORS: u32 = 132;
/// Inputs in shared memory for warpgroups.
const STAGED_BYTES: u32 = 128 << 10;

/// What a tile is compiled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    tile: GemmTile,
    /// Parts of the outputs, of the tokens, and of the inputs of a step that warps have.
    warps: [u32; 3],
    /// Buffers for the inputs of steps.
    stages: u32,
    /// That run on a multiprocessor at the same time.
    blocks: u32,
    /// Of dynamic shared memory.
    pub bytes: u32,
}

impl Plan {
    /// `None` if not even the smallest buffers fit.
    pub fn new(tile: GemmTile, max_shared_bytes: u32) -> Option<Plan> {
        let most = max_shared_bytes.checked_sub(FIXED_BYTES)?;
        let two = max_shared_bytes / 2 - FIXED_BYTES.min(max_shared_bytes / 2);
        // 128 sums per thread take all of the registers that a thread can have, and 64 with four tiles of outputs more than half of them.
        let sums = Plan::smallest(tile).sums();
        let blocks = if sums >= 128 || (sums >= 64 && tile.outputs == 128) { [1, 1] } else { [2, 1] };
        let plans = blocks.into_iter().flat_map(|blocks| [4, 3, 2].map(|stages| (blocks, stages)));
        let plans = plans.map(|(blocks, stages)| Plan::with(tile, stages, blocks));
        plans.into_iter().find(|plan| plan.bytes <= if plan.blocks == 2 { two } else { most })
    }

    /// With the smallest buffers.
    pub fn smallest(tile: GemmTile) -> Plan {
        Plan::with(tile, 2, 1)
    }

    fn with(tile: GemmTile, stages: u32, blocks: u32) -> Plan {
        // A warp has 32 or 64 outputs and up to 64 tokens, or shared memory would be read too often.
        let (m, n) = (if tile.outputs > 32 { 2 } else { 1 }, tile.tokens.div_ceil(64));
        let plan = Plan { tile, warps: [m, n, 8 / (m * n)], stages, blocks, bytes: 0 };
        // Weights of two steps of 8,192 and inputs, in f16. At the end half of the sums of every thread, and then the tile's.
        let steps = 2 * (2 * 8192 + stages * tile.tokens * (8192 / tile.outputs));
        let sums = 4 * (256 * plan.sums() / 2).max(tile.tokens * (tile.outputs + 4));
        Plan { bytes: steps.max(sums), ..plan }
    }

    /// Sums of a thread.
    fn sums(&self) -> u32 {
        let [m, n, _] = self.warps;
        self.tile.outputs * self.tile.tokens / (m * n) / 32
    }

    pub fn constants(&self) -> [(&'static str, u32); 7] {
        let [m, n, k] = self.warps;
        [
            ("TILE_OUTPUTS", self.tile.outputs),
            ("TILE_TOKENS", self.tile.tokens),
            ("WARPS_M", m),
            ("WARPS_N", n),
            ("WARPS_K", k),
            ("STAGES", self.stages),
            ("BLOCKS_PER_SM", self.blocks),
        ]
    }
}

/// What a tile of warpgroups is compiled with. One block runs on a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpgroupPlan {
    tile: GemmTile,
    /// Buffers for the inputs of steps.
    stages: u32,
    /// Of dynamic shared memory.
    pub bytes: u32,
}

impl WarpgroupPlan {
    /// `None` if warpgroups have no such tile, or it does not fit.
    pub fn new(tile: GemmTile, routed: Routed, max_shared_bytes: u32) -> Option<WarpgroupPlan> {
        if routed == Routed::Experts
            || !tile.halves
            || !WARPGROUP_TILES.contains(&(tile.outputs, tile.tokens))
        {
            return None;
        }
        // Weights of three steps of 64 inputs and inputs of some, in f16, more than the sums at the end; a word per token and one.
        let stages = STAGED_BYTES / (tile.tokens * 64 * 2);
        let bytes = 3 * tile.outputs * 64 * 2 + STAGED_BYTES + tile.tokens * 4 + 16;
        (bytes <= max_shared_bytes).then_some(WarpgroupPlan { tile, stages, bytes })
    }

    pub fn constants(&self) -> [(&'static str, u32); 3] {
        [("TILE_OUTPUTS", self.tile.outputs), ("TILE_TOKENS", self.tile.tokens), ("STAGES", self.stages)]
    }
}

/// The tile for so many tokens and outputs, where large ones are computed by `warpgroups` if that is faster than without.
/// `None` if none fits into a block's shared memory.
pub fn tile(
    (max_shared_bytes, warpgroups): (u32, bool),
    routed: Routed,
    tokens: u32,
    outputs: u32,
) -> Option<GemmTile> {
    let usual = usual_tile(max_shared_bytes, tokens, outputs)?;
    let large = WARPGROUP_TILES.map(|(outputs, tokens)| GemmTile { outputs, tokens, halves: true });
    // With fewer tokens most of such a tile would have none.
    let large = large.into_iter().filter(|tile| warpgroups && tokens > tile.tokens / 2);
    let large = large.filter(|tile| WarpgroupPlan::new(*tile, routed, max_shared_bytes).is_some());
    // The time of the busiest multiprocessor: that of its blocks, one after the other.
    let time = |tile: &GemmTile, speed: u64| {
        let blocks = u64::from(outputs.div_ceil(tile.outputs)) * u64::from(tokens.div_ceil(tile.tokens));
        blocks.div_ceil(u64::from(MULTIPROCESSORS)) * u64::from(tile.outputs * tile.tokens) * 24 / speed
    };
    // How fast one multiprocessor is with a tile. Only the ratios matter.
    let warpgroup_time = |tile: &GemmTile| time(tile, if tile.tokens > 128 { 8 } else { 6 });
    let usual_time = time(&usual, if usual.outputs > 32 { 3 } else { 2 });
    Some(large.filter(|tile| warpgroup_time(tile) < usual_time).min_by_key(warpgroup_time).unwrap_or(usual))
}

/// The tile of `gemm_fast`: as many tokens as there are, so that weights are decoded once for all, and as many outputs as leave
/// work for the whole GPU.
fn usual_tile(max_shared_bytes: u32, tokens: u32, outputs: u32) -> Option<GemmTile> {
    let least = tokens.min(128).next_power_of_two().max(16);
    // The widest one where it has no more idle tokens than two of the next one.
    let pairs = tokens > 1024 || tokens.div_ceil(128).is_multiple_of(2);
    let wide = |tile: &GemmTile| tile.tokens == least || least == 128 && tile.tokens == 256 && pairs;
    let tiles = TILES.map(|(outputs, tokens)| GemmTile { outputs, tokens, halves: true });
    let tiles = tiles.into_iter().filter(wide);
    let fit = || tiles.clone().filter(|tile| Plan::new(*tile, max_shared_bytes).is_some());
    let n_blocks =
        |tile: &GemmTile| outputs.div_ceil(tile.outputs).saturating_mul(tokens.div_ceil(tile.tokens));
    fit().find(|tile| n_blocks(tile) >= ENOUGH_BLOCKS).or_else(|| fit().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_tiles() {
        for bytes in [99 << 10, 163 << 10, 227 << 10] {
            for tokens in [12, 16, 17, 64, 100, 128, 129, 5000] {
                for outputs in [1, 4096, 14336, 128_000] {
                    let tile = tile((bytes, false), Routed::No, tokens, outputs).unwrap();
                    let plan = Plan::new(tile, bytes).unwrap();
                    assert!(plan.blocks * (plan.bytes + FIXED_BYTES) <= bytes, "{plan:?}");
                    assert!(tile.tokens >= tokens.min(128), "{plan:?}");
                    let [m, n, k] = plan.warps;
                    assert_eq!(m * n * k, 8, "{plan:?}");
                }
            }
        }
        let tile = |tokens, outputs| tile((227 << 10, false), Routed::No, tokens, outputs).unwrap();
        assert_eq!((tile(2048, 4096).outputs, tile(2048, 4096).tokens), (128, 256));
        assert_eq!((tile(300, 14336).outputs, tile(300, 14336).tokens), (128, 128));
        assert_eq!((tile(512, 4096).outputs, tile(512, 4096).tokens), (128, 128));
        assert_eq!((tile(16, 4096).outputs, tile(16, 4096).tokens), (32, 16));
    }

    #[test]
    fn warpgroups_compute_what_is_large_enough() {
        let chosen = |routed, tokens, outputs| {
            let bytes = 227 << 10;
            let tile = tile((bytes, true), routed, tokens, outputs).unwrap();
            let plan = WarpgroupPlan::new(tile, routed, bytes);
            plan.map(|plan| (tile.outputs, tile.tokens, plan.stages))
        };
        let (widest, wide) = (Some((128, 256, 4)), Some((128, 128, 8)));
        for routed in [Routed::No, Routed::Sum] {
            assert_eq!(chosen(routed, 2048, 4096), widest);
            assert_eq!(chosen(routed, 2048, 14336), widest);
            assert_eq!(chosen(routed, 512, 14336), widest);
            // The widest tiles would leave half of the GPU idle.
            assert_eq!(chosen(routed, 512, 4096), wide);
            assert_eq!(chosen(routed, 2048, 1024), wide);
            // Or have fewer tokens than half of a tile.
            assert_eq!(chosen(routed, 128, 14336), wide);
            // Small tiles occupy more of the GPU.
            assert_eq!(chosen(routed, 512, 1024), None);
            assert_eq!(chosen(routed, 256, 4096), None, "no faster");
            assert_eq!(chosen(routed, 64, 14336), None);
        }
        assert_eq!(chosen(Routed::Experts, 2048, 14336), None);
        // Without the shared memory.
        let tile = GemmTile { outputs: 128, tokens: 128, halves: true };
        assert_eq!(WarpgroupPlan::new(tile, Routed::No, 163 << 10), None);
    }
}
