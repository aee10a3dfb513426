//! Linear layers for many tokens, in f16 and in sums of any order, against the kernel whose sums have a fixed order: by cooperative
//! matrices where the adapter has them, and without.
use crate::common::{FAST, device, with};
use crate::gemm_case::{Case, inputs};
use kvist_device::weights::Encoding;
use kvist_gpu::{Driver, GemmTile, Routed};
use kvist_testing::operations::random;
use kvist_wgpu::{OpenOptions, Wgpu, WgpuDevice};

/// With cooperative matrices, if there are some, and without.
fn both() -> Vec<WgpuDevice> {
    if device().is_none() {
        return Vec::new();
    }
    [true, false].map(|cooperative| with(OpenOptions { cooperative, ..FAST })).into()
}

/// The tiles that the adapter's workgroup memory has room for.
fn tiles(gpu: &Wgpu) -> Vec<GemmTile> {
    let number = Encoding::RESIDENT.iter().position(|known| *known == Encoding::Q8_0).unwrap() as u32;
    // The more tokens, the larger the tile.
    let mut tiles: Vec<_> =
        [12, 128 * 33, 1 << 20].map(|tokens| gpu.gemm_tile(number, Routed::No, tokens, 128)).into();
    tiles.extend([64 * 128, 32 * 128].map(|tokens| gpu.gemm_tile(number, Routed::No, tokens, 128)));
    tiles.sort_by_key(|tile| tile.tokens);
    tiles.dedup();
    assert!(tiles.iter().all(|tile| tile.halves), "{tiles:?}");
    tiles
}

fn has_kernel(gpu: &Wgpu, encoding: Encoding) -> bool {
    let number = Encoding::RESIDENT.iter().position(|known| *known == encoding).unwrap() as u32;
    gpu.gemm_tile(number, Routed::No, 100, 100).halves
}

#[test]
fn every_encoding_agrees_with_fixed_sums() {
    for device in both() {
        let gpu = device.driver();
        let tiles = tiles(gpu);
        for (i, encoding) in Encoding::RESIDENT.into_iter().enumerate() {
            if !has_kernel(gpu, encoding) {
                continue;
            }
            let tile = tiles[i % tiles.len()];
            let mut largest = 0f64;
            for (inputs, (outputs, tokens)) in
                inputs(encoding).into_iter().zip([(45, 13), (130, 33), (129, 70)])
            {
                let mut case = Case::new(encoding, outputs, inputs, tokens);
                case.bias = (tokens == 33).then(|| random(5, outputs, 1.0));
                if tokens == 70 {
                    // Of sums of a usual size: most of the others would be at the cap.
                    case.x = random(9, tokens * inputs, 0.1);
                    case.cap = Some(30.0);
                }
                largest = largest.max(case.check(gpu, tile));
            }
            println!("{} {}x{}: {largest:.2e}", encoding.name(), tile.outputs, tile.tokens);
        }
    }
}

#[test]
fn every_tile_and_route_agrees_with_fixed_sums() {
    for device in both() {
        let gpu = device.driver();
        for tile in tiles(gpu) {
            for routed in [Routed::No, Routed::Sum, Routed::Experts] {
                for (outputs, inputs, tokens) in [(300, 608, 200), (33, 96, 13)] {
                    let mut case = Case::new(Encoding::Q8_0, outputs, inputs, tokens);
                    case.routed = routed;
                    case.check(gpu, tile);
                }
                // Of the down layer every row has its own inputs.
                let mut case = Case::new(Encoding::Int8, 150, 96, 150);
                (case.routed, case.share, case.bias) = (Routed::Experts, 1, Some(random(5, 150, 1.0)));
                case.check(gpu, tile);
            }
        }
    }
}
