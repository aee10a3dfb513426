// RMS norm.
//
//   out = weight * x / sqrt(mean(x^2) + eps)      for every row, one workgroup each; IN_PLACE: out is x
//
// Lane l adds up the squares l, l + 128, ...; the lanes are added as a binary tree.

struct Args {
    width: u32,
    rows: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> weight: array<f32>;    // [width]
@group(0) @binding(1) var<storage, read_write> out: array<f32>; // [rows, width]
@group(0) @binding(2) var<storage, read> x: array<f32>;         // [rows, width], not bound in place
var<immediate> args: Args;

var<workgroup> sums: array<f32, 128>;

fn at(i: u32) -> f32 {
    if (IN_PLACE) { return out[i]; }
    return x[i];
}

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) lane: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let row = min(group.y * 32768u + group.x, args.rows - 1u);
    let first = row * args.width;
    var sum = 0.0;
    for (var i = lane; i < args.width; i += 128u) {
        let value = at(first + i);
        sum = fma(value, value, sum);
    }
    sums[lane] = sum;
    for (var half = 64u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) { sums[lane] += sums[lane + half]; }
    }
    workgroupBarrier();
    if (group.y * 32768u + group.x >= args.rows) {
        return;
    }
    let scale = 1.0 / sqrt(sums[0] / f32(args.width) + args.eps);
    for (var i = lane; i < args.width; i += 128u) {
        out[first + i] = at(first + i) * scale * weight[i];
    }
}
