// A linear layer for a few tokens (see product.wgsl): a workgroup has eight output rows, 16 lanes share one. A decoded
// weight is used for TOKENS tokens.

const OUTPUTS: u32 = 8u;

var<workgroup> sums: array<f32, LANES * OUTPUTS * TOKENS>;

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = thread % LANES;
    let row = group.x * OUTPUTS + thread / LANES;
    let first_token = group.y * TOKENS;
    var used = row < args.outputs;
    if (ROUTED) { used = used && any_routed(first_token, TOKENS); }
    var acc: array<f32, TOKENS>;
    for (var t = 0u; t < TOKENS; t++) { acc[t] = 0.0; }
    if (used) {
        for (var c = lane; c < args.form.quads; c += LANES) {
            let weights = weights4(args.form, row, c);
            for (var t = 0u; t < TOKENS; t++) {
                let values = inputs4(min(first_token + t, args.tokens - 1u), c);
                var sum = acc[t];
                sum = fma(weights.x, values.x, sum);
                sum = fma(weights.y, values.y, sum);
                sum = fma(weights.z, values.z, sum);
                sum = fma(weights.w, values.w, sum);
                acc[t] = sum;
            }
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        sums[(t * OUTPUTS + thread / LANES) * LANES + lane] = acc[t];
    }
    workgroupBarrier();
    if (thread < OUTPUTS * TOKENS) {
        var sum = sums[thread * LANES];
        for (var l = 1u; l < LANES; l++) { sum += sums[thread * LANES + l]; }
        put(group.x * OUTPUTS + thread % OUTPUTS, first_token + thread / OUTPUTS, sum);
    }
}
