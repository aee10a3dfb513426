// A linear layer for a few tokens (see product.wgsl and units.wgsl), in sums of another order than `matmul`.

@group(0) @binding(0) var<storage, read> w_words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>; // [tokens, inputs]

// Never called.
fn norm_weights(quad: u32) -> vec4<f32> {
    return vec4(1.0);
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) group: vec3<u32>) {
    let thread = thread_of(lanes);
    let first = group.x * ALL_ROWS;
    let first_token = group.y * TOKENS;
    var expert = 0u;
    if (ROUTED) { expert = routes[first_token]; }
    let work = work_of(expert);
    if (first < work.outputs) {
        let row = work.before + first + thread / UNIT_LANES * ROWS;
        let last = work.before + work.outputs - 1u;
        // Routed rows are computed one by one.
        let last_token = inputs_of(work, select(args.tokens - 1u, first_token, ROUTED));
        let inputs = Inputs(inputs_of(work, first_token), last_token, args.inputs);
        w_add_rows(args.form, row, last, thread % UNIT_LANES, inputs);
    }
    add_up(lanes);
    if (thread < ALL_ROWS * TOKENS) {
        put(work, first + thread / TOKENS, first_token + thread % TOKENS, sum_of(lanes, thread));
    }
}
