// Rows of f32 as f16, for `gemm_halves`.
//
//   halves[t] = 2^e x[t] rounded to f16, zeros up to a multiple of 256 elements; behind all rows 2^-e of each as f32, padded to 16 bytes
//
// e is the row's own: it brings the largest magnitude to [2^14, 2^15). So nothing overflows, and an element has all of the 11
// bits of an f16 if it is not smaller than the largest one by 2^28. Infinite and NaN stay what they are, and have no part in e.
// A workgroup has one row.

struct Args {
    inputs: u32,
}

@group(0) @binding(0) var<storage, read> x: array<f32>;              // [tokens, inputs]
@group(0) @binding(1) var<storage, read_write> out: array<vec4<u32>>; // [tokens, inputs rounded up / 8], then [tokens]
var<immediate> args: Args;

const THREADS: u32 = 256u;

var<workgroup> largest: array<u32, THREADS>;

// Elements i and i + 1 of the row that begins at `first`, times `scale`, as f16.
fn pair_of(first: u32, i: u32, scale: f32) -> u32 {
    var pair = vec2(0.0);
    if (i < args.inputs) { pair.x = x[first + i] * scale; }
    if (i + 1u < args.inputs) { pair.y = x[first + i + 1u] * scale; }
    return pack2x16float(pair);
}

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) rows: vec3<u32>) {
    let first = group.x * args.inputs;
    let chunks = (args.inputs + 255u) / 256u * 32u; // of eight elements
    // Magnitudes have the order of their bits.
    var most = 0u;
    for (var i = thread; i < args.inputs; i += THREADS) {
        let bits = bitcast<u32>(x[first + i]) & 0x7fffffffu;
        most = max(most, select(0u, bits, bits < 0x7f800000u));
    }
    largest[thread] = most;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { largest[thread] = max(largest[thread], largest[thread + half]); }
        workgroupBarrier();
    }
    // 2^e, at most 2^126: its bits. The exponent of the largest one plus e is 14.
    let exponent = max(largest[0] >> 23u, 15u);
    let scale = bitcast<f32>((268u - exponent) << 23u);
    let back = (exponent - 14u) << 23u;
    for (var c = thread; c < chunks; c += THREADS) {
        let i = 8u * c;
        out[group.x * chunks + c] =
            vec4(pair_of(first, i, scale), pair_of(first, i + 2u, scale), pair_of(first, i + 4u, scale), pair_of(first, i + 6u, scale));
    }
    if (thread == 0u) { out[rows.x * chunks + group.x] = vec4(back, 0u, 0u, 0u); }
}
