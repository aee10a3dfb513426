//! What the machine that runs the tests may not have: kernels for GPUs with cooperative matrices are parsed, validated and
//! translated to SPIR-V.
use super::Target;
use kvist_device::Storage;
use kvist_device::weights::Encoding;
use kvist_gpu::{Form, Kernel, Limits, RecentForm, Routed};
use wgpu::naga;

/// Parses and validates a kernel, and translates it as for Vulkan. Returns its bytes of workgroup memory.
fn translate(what: &str, source: &str) -> u32 {
    let module = naga::front::wgsl::parse_str(source).unwrap_or_else(|error| {
        panic!("{what}: {}", error.emit_to_string(source));
    });
    let mut validator =
        naga::valid::Validator::new(naga::valid::ValidationFlags::all(), naga::valid::Capabilities::all());
    let info = validator.validate(&module).unwrap_or_else(|error| panic!("{what}: {error:?}"));
    let options = naga::back::spv::Options { lang_version: (1, 4), ..naga::back::spv::Options::default() };
    let words = naga::back::spv::write_vec(&module, &info, &options, None);
    let words = words.unwrap_or_else(|error| panic!("{what}: {error:?}"));
    assert!(words.len() > 100, "{what}");
    let of_workgroup =
        module.global_variables.iter().filter(|(_, var)| var.space == naga::AddressSpace::WorkGroup);
    of_workgroup.map(|(_, var)| module.types[var.ty].inner.size(module.to_ctx())).sum()
}

const KIB: u32 = 1 << 10;

fn target(cooperative: bool, max_workgroup_bytes: u32) -> Target {
    Target { subgroups: true, fast: true, bindings: 16, cooperative, max_workgroup_bytes }
}

/// On GPUs with little workgroup memory too, down to the least that `missing` asks for.
#[test]
fn kernels_fit_into_workgroup_memory() {
    for (kib, cooperative) in [(16, false), (32, false), (32, true), (48, true)] {
        let target = target(cooperative, kib * KIB);
        let limits = Limits {
            max_binding_bytes: 1 << 30,
            max_part_bytes: 1 << 30,
            max_workgroup_bytes: kib * KIB,
            max_attend_rows: 32,
            batch_invariant: false,
            unified_memory: false,
            adapter: String::new(),
        };
        let mut kernels = Vec::new();
        for encoding in [Encoding::F16, Encoding::Q8_0, Encoding::Q4K] {
            let encoding = kvist_gpu::encoding_number(encoding).unwrap();
            kernels.extend([1, 4, 8].map(|tokens| Kernel::Matmul { encoding, tokens, routed: Routed::No }));
            if target.has_several() {
                kernels.push(Kernel::Several { encoding, gated: true, normed: true, routed: false });
                kernels.push(Kernel::Several { encoding, gated: true, normed: false, routed: true });
            }
            for tokens in [13, 1000, 1 << 20] {
                let tile = target.gemm_tile(encoding, Routed::No, tokens, 1000);
                assert_eq!(tile.halves, kib > 16, "{kib} KiB, {tile:?}");
                kernels.push(Kernel::Gemm { encoding, routed: Routed::Experts, tile });
            }
        }
        for (storage, dim) in
            [("f16", 64), ("f16", 128), ("q8", 128), ("q4-rot", 80), ("t4-o", 128), ("f32", 256)]
        {
            let storage: Storage = storage.parse().unwrap();
            let (k, v) = (Form::new(storage, dim).unwrap(), Form::new(storage.for_values(), dim).unwrap());
            let recent = k.is_packed();
            let rows = target.attend_rows(&limits, 32, (k, v), dim, recent);
            // The invariant kernel has no smaller form.
            if dim < 256 || kib > 16 {
                kernels.push(Kernel::Attend { k, v, dim, rows, recent });
            }
            kernels.push(Kernel::Merge { v, dim });
            kernels.push(Kernel::Store { form: k, dim, recent: RecentForm::No });
            kernels.push(Kernel::StoreBoth { k, v, dim, recent });
        }
        kernels.extend([Kernel::Halves, Kernel::Norm { in_place: false }, Kernel::Top]);
        for kernel in kernels {
            let bytes = translate(&format!("{kernel:?}"), &target.source(&kernel));
            assert!(bytes <= kib * KIB, "{kib} KiB: {kernel:?} takes {bytes} bytes");
        }
    }
}

#[test]
fn cooperative_kernels_are_valid() {
    let target = target(true, 48 * KIB);
    let mut n = 0;
    for (encoding, _) in (0u32..).zip(Encoding::RESIDENT) {
        for tokens in [8, 1000, 1 << 20] {
            let tile = target.gemm_tile(encoding, Routed::No, tokens, 1000);
            if !tile.halves {
                continue;
            }
            let routed = [Routed::No, Routed::Sum, Routed::Experts][(n + n / 3) % 3];
            let kernel = Kernel::Gemm { encoding, routed, tile };
            translate(&format!("{kernel:?}"), &target.source(&kernel));
            n += 1;
        }
    }
    assert_eq!(n, 3 * 17, "all but f32");
}

#[test]
fn tiles_of_experts_are_as_large_as_their_rows() {
    let q8_0 = kvist_gpu::encoding_number(Encoding::Q8_0).unwrap();
    let tokens = |routed, rows| target(true, 48 * KIB).gemm_tile(q8_0, routed, rows, 128 * 768).tokens;
    assert_eq!([3, 16, 33, 64, 200].map(|rows| tokens(Routed::Experts, rows)), [32, 32, 64, 64, 128]);
    assert_eq!(tokens(Routed::No, 16), 128, "one for all");
}
