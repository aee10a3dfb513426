//! The emulation finds what it promises to find: a barrier that not every thread reaches, an exchange that a lane leaves out,
//! shared memory that is read before it is written.
use crate::common::emulation;
use std::process::Command;

/// What a kernel of 64 threads prints, with so many bytes of dynamic shared memory: its 64 results, or what went wrong. It is
/// compiled with the header of the emulation and runs in a process of its own.
fn run(kernel: &str) -> Option<String> {
    emulation(&[])?; // says if there is no compiler
    Some(run_with(kernel, &[], 0).expect("it compiles"))
}

/// The same, compiled with more flags. `None` if the compiler has no such flags.
fn run_with(kernel: &str, flags: &[&str], shared_bytes: u32) -> Option<String> {
    run_behind("", kernel, flags, shared_bytes)
}

/// The same, with functions in front of the kernel.
fn run_behind(functions: &str, kernel: &str, flags: &[&str], shared_bytes: u32) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("kernel.cpp");
    let header = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/emulation/cuda.h");
    let main = format!(
        "int main() {{\n\
         float out[64] = {{0}};\n\
         float* at = out;\n\
         void* params[] = {{&at}};\n\
         unsigned grid[] = {{1, 1, 1}}, block[] = {{64, 1, 1}};\n\
         const char* what = kvist_launch(params, grid, block, {shared_bytes});\n\
         if (what) {{ puts(what); return 0; }}\n\
         for (float x : out) {{ printf(\"%g \", x); }}\n}}"
    );
    let text = format!(
        "{functions}extern \"C\" __global__ void kernel(float* out) {{\n{kernel}\n}}\nKVIST_ENTRY(kernel)\n{main}\n"
    );
    std::fs::write(&source, text).unwrap();
    let program = folder.path().join("kernel");
    let compiler = std::env::var("KVIST_CXX").unwrap_or_else(|_| "c++".into());
    let mut built = Command::new(compiler);
    built.args(["-std=c++17", "-O2", "-w", "-include", header, "-o"]);
    if !built.arg(&program).arg(&source).args(flags).output().unwrap().status.success() {
        return None;
    }
    let output = Command::new(program).output().unwrap();
    Some(format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn barriers_and_exchanges_are_checked() {
    let sum = "float x = threadIdx.x;\n\
               for (unsigned half = 16; half > 0; half /= 2) { x += __shfl_xor_sync(0xffffffffu, x, half); }\n\
               __shared__ float sums[2];\n\
               if (threadIdx.x % 32 == 0) { sums[threadIdx.x / 32] = x; }\n\
               __syncthreads();\n\
               out[threadIdx.x] = sums[0] + sums[1];";
    let Some(right) = run(sum) else { return };
    assert_eq!(right, "2016 ".repeat(64));
    let any = "out[threadIdx.x] = __any_sync(0xffffffffu, threadIdx.x == 40);";
    assert_eq!(run(any).unwrap(), format!("{}{}", "0 ".repeat(32), "1 ".repeat(32)));
    let largest = "out[threadIdx.x] = __reduce_max_sync(0xffffffffu, threadIdx.x * 3u);";
    assert_eq!(run(largest).unwrap(), format!("{}{}", "93 ".repeat(32), "189 ".repeat(32)));
    let met = "__shared__ float x[64];\nx[threadIdx.x] = threadIdx.x;\nkvist::meet(3u, 64u, __LINE__);\n\
               out[threadIdx.x] = x[63u - threadIdx.x] + threadIdx.x;";
    assert_eq!(run(met).unwrap(), "63 ".repeat(64));
    for (kernel, expected) in [
        (
            "if (threadIdx.x < 32) { kvist::meet(1u, 64u, 7); }",
            "line 7: not all of 64 threads come to barrier 1",
        ),
        ("if (threadIdx.x == 5) { return; }\n__syncthreads();", "63 threads wait at a barrier, 1 have ended"),
        (
            "if (threadIdx.x < 32) { __syncthreads(); } else {\n__syncthreads(); }",
            "wait at the barriers of lines 2 and 3",
        ),
        (
            "if (threadIdx.x != 7) { out[0] = __shfl_xor_sync(0xffffffffu, 1.0f, 1u); }",
            "not every lane of the mask ffffffff",
        ),
        ("__shared__ float x[64];\nout[threadIdx.x] = x[threadIdx.x];", "nan"),
    ] {
        let found = run(kernel).unwrap();
        assert!(found.contains(expected), "{kernel}: {found}");
    }
}

/// With AddressSanitizer, accesses behind shared memory are found, on the stacks of fibers too.
#[test]
fn a_sanitizer_sees_shared_memory() {
    if emulation(&[]).is_none() {
        return;
    }
    let asan = ["-fsanitize=address"];
    let right = "DYNAMIC_SHARED(x);\nx[threadIdx.x].x = 1;\n__syncthreads();\nout[threadIdx.x] = x[63 - threadIdx.x].x;";
    let Some(found) = run_with(right, &asan, 64 * 16) else {
        println!("SKIPPED: the C++ compiler has no AddressSanitizer");
        return;
    };
    assert_eq!(found, "1 ".repeat(64));
    let behind = "DYNAMIC_SHARED(x);\nx[threadIdx.x].x = 1;\n__syncthreads();\nout[threadIdx.x] = x[64 - threadIdx.x].x;";
    let found = run_with(behind, &asan, 64 * 16).unwrap();
    assert!(found.contains("heap-buffer-overflow"), "{found}");
    let behind = "__shared__ float x[64];\nx[threadIdx.x] = 1;\n__syncthreads();\nout[threadIdx.x] = x[threadIdx.x + 1];";
    let found = run_with(behind, &asan, 0).unwrap();
    assert!(found.contains("global-buffer-overflow"), "{found}");
    let behind = "float x[4] = {1, 2, 3, 4};\nfloat* at = x + threadIdx.x / 8;\n__syncthreads();\nout[threadIdx.x] = *at;";
    let found = run_with(behind, &asan, 0).unwrap();
    assert!(found.contains("stack-buffer-overflow"), "{found}");
}

/// The functions of mma.cu against plain loops: both ways to load B, both formats, and how values are packed.
#[test]
fn tensor_cores_multiply_matrices() {
    if emulation(&[]).is_none() {
        return;
    }
    let functions = [
        include_str!("../../src/kernels/prelude.cu"),
        include_str!("../../src/kernels/math.cu"),
        include_str!("../../src/kernels/mma.cu"),
    ]
    .join("\n");
    for (mma, pack) in [("mma_f16_16816", "pack_half2"), ("mma_bf16_16816", "pack_bf162")] {
        // Small whole numbers: every product and sum is exact in either format. Both warps compute the same from copies of their own.
        let kernel = format!(
            "__shared__ uint4 a[2][16][2], b[2][16][2], across[2][16][2]; // A; B transposed, B: 16 columns\n\
             u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;\n\
             auto left = [](u32 i, u32 k) {{ return (float)(int)(i * 5 + k * 3) - 40.0f; }};\n\
             auto right = [](u32 k, u32 j) {{ return (float)(int)(k * k % 7 + j) - 9.0f; }};\n\
             if (lane < 16) {{\n\
               for (u32 k = 0; k < 16; k += 2) {{\n\
                 reinterpret_cast<u32*>(a[warp][lane])[k / 2] = {pack}(left(lane, k), left(lane, k + 1));\n\
                 reinterpret_cast<u32*>(b[warp][lane])[k / 2] = {pack}(right(k, lane), right(k + 1, lane));\n\
                 reinterpret_cast<u32*>(across[warp][lane])[k / 2] = {pack}(right(lane, k), right(lane, k + 1));\n\
               }}\n\
             }}\n\
             __syncthreads();\n\
             u32 fa[4], fb[4], fc[4];\n\
             ldmatrix_x4(fa, &a[warp][lane % 16][lane / 16]);\n\
             ldmatrix_x4(fb, &b[warp][lane % 8 + lane / 16 * 8][lane / 8 % 2]);\n\
             ldmatrix_x4_trans(fc, &across[warp][lane % 16][lane / 16]);\n\
             u32 g = lane / 4, t = lane % 4, wrong = 0;\n\
             for (u32 half = 0; half < 2; half++) {{\n\
               float d[4] = {{1, 2, 3, 4}}, e[4] = {{1, 2, 3, 4}};\n\
               {mma}(d, fa, {{fb[2 * half], fb[2 * half + 1]}});\n\
               {mma}(e, fa, {{fc[2 * half], fc[2 * half + 1]}});\n\
               for (u32 i = 0; i < 4; i++) {{\n\
                 float sum = i + 1;\n\
                 for (u32 k = 0; k < 16; k++) {{\n\
                   sum += left(g + 8 * (i / 2), k) * right(k, 8 * half + 2 * t + i % 2);\n\
                 }}\n\
                 wrong += (d[i] != sum) + (e[i] != sum);\n\
               }}\n\
             }}\n\
             float passed = __shfl_sync(0xffffffffu, (float)lane, (lane + 5) % 32);\n\
             out[threadIdx.x] = wrong + (passed != (float)((lane + 5) % 32));"
        );
        assert_eq!(run_behind(&functions, &kernel, &[], 0).unwrap(), "0 ".repeat(64), "{mma}");
    }
    let packed = "u32 half = pack_half2(1.5f, 1e6f), wide = pack_bf162(-2.0f, 1.00390625f);\n\
                  out[threadIdx.x] = half == 0x7c003e00u && wide == 0x3f80c000u;";
    assert_eq!(run_behind(&functions, packed, &[], 0).unwrap(), "1 ".repeat(64));
}
