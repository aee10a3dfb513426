//! Linear layers on tensor cores against the kernel whose sums have a fixed order.
use crate::common::{self, FAST};
use crate::gemm_case::{Case, inputs};
use kvist_cuda::{CudaDriver, Options, kernels::gemm};
use kvist_device::weights::Encoding;
use kvist_gpu::{Driver, GemmTile, Routed};
use kvist_testing::operations::random;

/// With the shared memory of a large GPU.
fn large_driver(warpgroups: bool) -> Option<CudaDriver> {
    let options = Options { warpgroups, ..FAST };
    let (installation, index) = match common::index() {
        Some(_) => common::installation()?,
        None => (common::emulation(&[("KVIST_EMULATION_SHARED", "232448")])?, None),
    };
    Some(CudaDriver::open(&installation, index, options).unwrap())
}

/// Those that fit into the GPU's shared memory.
fn tiles(gpu: &CudaDriver) -> Vec<GemmTile> {
    let tile = |(outputs, tokens)| GemmTile { outputs, tokens, halves: true };
    let all = gemm::TILES.into_iter().map(tile);
    let fits = |tile: &GemmTile| gemm::Plan::new(*tile, gpu.limits().max_workgroup_bytes).is_some();
    all.filter(fits).collect()
}

/// With the kernels that every GPU has.
fn usual_driver() -> Option<CudaDriver> {
    common::open(Options { warpgroups: false, ..FAST })
}

#[test]
fn every_encoding_agrees_with_fixed_sums() {
    let Some(gpu) = usual_driver() else { return };
    let tiles = tiles(&gpu);
    for (i, encoding) in common::some(1, Encoding::RESIDENT.into_iter().enumerate()) {
        if encoding == Encoding::F32 {
            continue;
        }
        let tile = tiles[i * 5 % tiles.len()];
        let mut largest = 0f64;
        for (inputs, (outputs, tokens)) in inputs(encoding).into_iter().zip([(45, 5), (130, 33), (129, 70)]) {
            let mut case = Case::new(encoding, outputs, inputs, tokens);
            case.bias = (tokens == 33).then(|| random(5, outputs, 1.0));
            if tokens == 70 {
                // Of sums of a usual size: most of the others would be at the cap.
                case.x = random(9, tokens * inputs, 0.1);
                case.cap = Some(30.0);
            }
            largest = largest.max(case.check(&gpu, tile));
        }
        println!("{} {}x{}: {largest:.2e}", encoding.name(), tile.outputs, tile.tokens);
    }
}

#[test]
fn every_tile_agrees_with_fixed_sums() {
    let Some(gpu) = large_driver(false) else { return };
    println!("{} bytes of shared memory", gpu.limits().max_workgroup_bytes);
    for tile in tiles(&gpu) {
        let largest = [(300, 608, 200), (33, 96, 13)]
            .map(|(outputs, inputs, tokens)| {
                Case::new(Encoding::Q8_0, outputs, inputs, tokens).check(&gpu, tile)
            })
            .into_iter()
            .fold(0.0, f64::max);
        println!("{}x{}: {largest:.2e}", tile.outputs, tile.tokens);
    }
}

/// The large tiles on the tensor cores of warpgroups, of which the emulation has some; another GPU computes them as in the test before.
#[test]
fn warpgroups_agree_with_fixed_sums() {
    let Some(gpu) = large_driver(true) else { return };
    let tiles: Vec<_> = tiles(&gpu)
        .into_iter()
        .filter(|tile| gemm::WARPGROUP_TILES.contains(&(tile.outputs, tile.tokens)))
        .collect();
    let check = |mut case: Case, tile: GemmTile, routed: Routed| {
        case.routed = routed;
        let is_used = gpu.target().uses_warpgroups(&case.kernel(tile));
        assert!(is_used || common::index().is_some(), "{tile:?} {routed:?}");
        case.check(&gpu, tile)
    };
    for (i, encoding) in common::some(2, Encoding::RESIDENT.into_iter().enumerate()) {
        if encoding == Encoding::F32 {
            continue;
        }
        let (tile, routed) = (tiles[i / 6 % tiles.len()], [Routed::No, Routed::Sum][i / 2 % 2]);
        let mut largest = 0f64;
        for (inputs, (outputs, tokens)) in inputs(encoding).into_iter().zip([(45, 5), (130, 133), (129, 70)])
        {
            let mut case = Case::new(encoding, outputs, inputs, tokens);
            case.bias = (tokens == 133).then(|| random(5, outputs, 1.0));
            if tokens == 70 {
                case.x = random(9, tokens * inputs, 0.1);
                case.cap = Some(30.0);
            }
            largest = largest.max(check(case, tile, routed));
        }
        println!("{} {}x{} {routed:?}: {largest:.2e}", encoding.name(), tile.outputs, tile.tokens);
    }
    for tile in tiles {
        // Two tiles each way, many steps; and more tiles of tokens than are computed at the same time.
        let many = 8 * tile.tokens as usize + 3;
        for (outputs, inputs, tokens) in [(150, 1376, 260), (5, 32, many)] {
            let error = check(Case::new(Encoding::Q8_0, outputs, inputs, tokens), tile, Routed::No);
            println!("{}x{}: {error:.2e}", tile.outputs, tile.tokens);
        }
    }
}

/// More tiles of tokens than are computed at the same time, and experts: their tokens lie scattered, over several tiles.
#[test]
fn tiles_find_their_tokens() {
    let Some(gpu) = usual_driver() else { return };
    let tile = GemmTile { outputs: 32, tokens: 16, halves: true };
    Case::new(Encoding::Q8_0, 70, 64, 200).check(&gpu, tile);
    for tokens in [9, 290] {
        for tile in [tile, GemmTile { outputs: 64, tokens: 64, halves: true }] {
            let mut case = Case::new(Encoding::Q8_0, 70, 96, tokens);
            case.routed = Routed::Experts;
            case.check(&gpu, tile);
        }
    }
    // Of the down layer every row has its own inputs.
    for tile in [tile, GemmTile { outputs: 128, tokens: 128, halves: true }] {
        let mut case = Case::new(Encoding::Int8, 150, 96, 600);
        (case.routed, case.share, case.bias) = (Routed::Experts, 1, Some(random(5, 150, 1.0)));
        case.check(&gpu, tile);
    }
}

/// Weights far from 1, which f16 does not have.
#[test]
fn weights_of_every_size() {
    let Some(gpu) = usual_driver() else { return };
    for size in [1e-20, 1e-7, 1e7, 1e14] {
        let mut case = Case::new(Encoding::BF16, 40, 64, 12);
        case.weights = random(3, 40 * 64, size)
            .iter()
            .flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        case.check(&gpu, GemmTile { outputs: 32, tokens: 16, halves: true });
    }
}
