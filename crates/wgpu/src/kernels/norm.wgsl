// RMS norm.
//
//   out = weight * x / sqrt(mean(x^2) + eps)      for every row, one workgroup each; IN_PLACE: out is x
//
// Lane l adds up the squares l, l + 256, ...; the lanes are added as a binary tree of neighbours (lanes.wgsl). A decode step has one
// long row per norm, whose time is that of its loads one after the other: so the first KEPT elements of a lane are loaded at once, and
// stay.

struct Args {
    width: u32,
    rows: u32,
    eps: f32,
}

@group(0) @binding(0) var<storage, read> weight: array<f32>;    // [width]
@group(0) @binding(1) var<storage, read_write> out: array<f32>; // [rows, width]
@group(0) @binding(2) var<storage, read> x: array<f32>;         // [rows, width], not bound in place
var<immediate> args: Args;

const THREADS: u32 = 256u;

var<workgroup> sums: array<f32, THREADS>;

fn at(i: u32) -> f32 {
    if (IN_PLACE) { return out[i]; }
    return x[i];
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = thread_of(lanes);
    let width = width_of(lanes);
    let row = min(group.y * ROWS + group.x, args.rows - 1u);
    let first = row * args.width;
    var kept: array<f32, KEPT>;
    var weights: array<f32, KEPT>;
    unroll(j, KEPT) {
        kept[j] = 0.0;
        if (lane + j * THREADS < args.width) {
            kept[j] = at(first + lane + j * THREADS);
            weights[j] = weight[lane + j * THREADS];
        }
    }
    var sum = 0.0;
    unroll(j, KEPT) { sum = fma(kept[j], kept[j], sum); }
    for (var i = lane + KEPT * THREADS; i < args.width; i += THREADS) {
        let value = at(first + i);
        sum = fma(value, value, sum);
    }
    for (var step = 1u; step < width; step *= 2u) { sum += bitcast<f32>(of_neighbour(bitcast<u32>(sum), step)); }
    if (lane % width == 0u) { sums[lane / width] = sum; }
    let n = THREADS / width;
    for (var step = 1u; step < n; step *= 2u) {
        workgroupBarrier();
        if (lane < n && lane % (2u * step) == 0u) { sums[lane] += sums[lane + step]; }
    }
    workgroupBarrier();
    if (group.y * ROWS + group.x >= args.rows) {
        return;
    }
    let scale = 1.0 / sqrt(sums[0] / f32(args.width) + args.eps);
    unroll(j, KEPT) {
        let i = lane + j * THREADS;
        if (i < args.width) { out[first + i] = kept[j] * scale * weights[j]; }
    }
    for (var i = lane + KEPT * THREADS; i < args.width; i += THREADS) {
        out[first + i] = at(first + i) * scale * weight[i];
    }
}
