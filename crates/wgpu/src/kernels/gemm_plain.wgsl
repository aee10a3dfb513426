const EACH: u32 = 8u; // outputs of an invocation
const OUTPUT_THREADS: u32 = TILE_OUTPUTS / EACH;
const EACH_TOKENS: u32 = TILE_TOKENS * OUTPUT_THREADS / THREADS;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let first_output = group.x * TILE_OUTPUTS;
    let first_token = group.y * TILE_TOKENS;
    // Rows that are OUTPUT_THREADS apart: neighbours read neighbouring rows.
    let output = thread % OUTPUT_THREADS;
    let token = thread / OUTPUT_THREADS;
    const TOKEN_THREADS: u32 = THREADS / OUTPUT_THREADS;
    var acc: array<f32, EACH * EACH_TOKENS>;
    for (var i = 0u; i < EACH * EACH_TOKENS; i++) { acc[i] = 0.0; }
    let steps = n_steps(thread, first_token);
    if (steps > 0u) { load_step(thread, first_output, first_token, 0u); }
    for (var step = 0u; step < steps; step++) {
        workgroupBarrier();
        store_step(thread);
        workgroupBarrier();
        if (step + 1u < steps) { load_step(thread, first_output, first_token, step + 1u); }
        for (var c = 0u; c < STEP_QUADS; c++) {
            var weights: array<vec4<f32>, EACH>;
            for (var o = 0u; o < EACH; o++) {
                weights[o] = floats(tile_weights[(output + o * OUTPUT_THREADS) * STRIDE + c]);
            }
            for (var t = 0u; t < EACH_TOKENS; t++) {
                let values = floats(tile_inputs[(token + t * TOKEN_THREADS) * STRIDE + c]);
                for (var o = 0u; o < EACH; o++) {
                    let w = weights[o];
                    let i = o * EACH_TOKENS + t;
                    acc[i] = fma(w.w, values.w, fma(w.z, values.z, fma(w.y, values.y, fma(w.x, values.x, acc[i]))));
                }
            }
        }
    }
    for (var o = 0u; o < EACH; o++) {
        for (var t = 0u; t < EACH_TOKENS; t++) {
            finish(first_output + output + o * OUTPUT_THREADS, first_token + token + t * TOKEN_THREADS, acc[o * EACH_TOKENS + t]);
        }
    }
}
