// A linear layer for a few tokens (see product.wgsl): a workgroup has eight output rows, 16 lanes share one. A decoded
// weight is used for TOKENS tokens.

const THREADS: u32 = LANES * OUTPUTS;

var<workgroup> sums: array<f32, THREADS * TOKENS>;

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let thread = thread_of(lanes);
    let lane = thread % LANES;
    let row = group.x * OUTPUTS + thread / LANES;
    let first_token = group.y * TOKENS;
    var expert = 0u;
    if (ROUTED) { expert = routes[first_token]; }
    let work = work_of(expert);
    let used = row < work.outputs;
    var acc: array<f32, TOKENS>;
    for (var t = 0u; t < TOKENS; t++) { acc[t] = 0.0; }
    if (used) {
        for (var c = lane; c < args.form.quads; c += LANES) {
            let weights = weights4(args.form, work.before + row, c);
            for (var t = 0u; t < TOKENS; t++) {
                let values = inputs4(inputs_of(work, first_token + t), c);
                var sum = acc[t];
                sum = fma(weights.x, values.x, sum);
                sum = fma(weights.y, values.y, sum);
                sum = fma(weights.z, values.z, sum);
                sum = fma(weights.w, values.w, sum);
                acc[t] = sum;
            }
        }
    }
    // Lanes that add up by exchange; sums of so many lanes are left.
    let near = min(width_of(lanes), LANES);
    let left = LANES / near;
    for (var step = 1u; step < near; step *= 2u) {
        for (var t = 0u; t < TOKENS; t++) { acc[t] += bitcast<f32>(of_neighbour(bitcast<u32>(acc[t]), step)); }
    }
    if (left == 1u) {
        for (var t = 0u; t < TOKENS; t++) {
            if (lane == t) { put(work, row, first_token + t, acc[t]); }
        }
    } else {
        if (lane % near == 0u) {
            for (var t = 0u; t < TOKENS; t++) { sums[(t * OUTPUTS + thread / LANES) * LANES + lane / near] = acc[t]; }
        }
        workgroupBarrier();
        if (thread < OUTPUTS * TOKENS) {
            let first = thread * LANES;
            for (var n = left / 2u; n > 0u; n /= 2u) {
                for (var i = 0u; i < n; i++) { sums[first + i] = sums[first + 2u * i] + sums[first + 2u * i + 1u]; }
            }
            put(work, group.x * OUTPUTS + thread % OUTPUTS, first_token + thread / OUTPUTS, sums[first]);
        }
    }
}
