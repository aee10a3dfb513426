//! What the machine that runs the tests may not have: kernels for GPUs with cooperative matrices are parsed, validated and
//! translated to SPIR-V.
use super::Target;
use kvist_device::weights::Encoding;
use kvist_gpu::{Kernel, Routed};
use wgpu::naga;

/// Parses and validates a kernel, and translates it as for Vulkan.
fn translate(what: &str, source: &str) {
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
}

#[test]
fn cooperative_kernels_are_valid() {
    let target = Target {
        subgroups: true,
        fast: true,
        bindings: 16,
        cooperative: true,
        max_workgroup_bytes: 48 << 10,
    };
    let mut n = 0;
    for (encoding, _) in (0u32..).zip(Encoding::RESIDENT) {
        for tokens in [8, 1000, 1 << 20] {
            let tile = target.gemm_tile(encoding, tokens, 1000);
            if !tile.halves {
                continue;
            }
            let routed = [Routed::No, Routed::Sum, Routed::Only, Routed::Added][n % 4];
            let kernel = Kernel::Gemm { encoding, routed, tile };
            translate(&format!("{kernel:?}"), &target.source(&kernel));
            n += 1;
        }
    }
    assert_eq!(n, 33);
}
