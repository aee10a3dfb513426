// OUTPUTS_EACH outputs of TOKENS_EACH tokens are an invocation's.
const OUTPUT_THREADS: u32 = TILE_OUTPUTS / OUTPUTS_EACH;
const TOKEN_THREADS: u32 = THREADS / OUTPUT_THREADS;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let first_output = group.x * TILE_OUTPUTS;
    let first_token = group.y * TILE_TOKENS;
    // Rows that are OUTPUT_THREADS apart: neighbours read neighbouring rows.
    let output = thread % OUTPUT_THREADS;
    let token = thread / OUTPUT_THREADS;
    var acc: array<f32, OUTPUTS_EACH * TOKENS_EACH>;
    unroll(o, OUTPUTS_EACH) {
        unroll(t, TOKENS_EACH) { acc[o * TOKENS_EACH + t] = 0.0; }
    }
    let work = work_of(group.z);
    let steps = n_steps(work, first_output, first_token);
    if (steps > 0u) { load_step(work, thread, first_output, first_token, 0u); }
    for (var step = 0u; step < steps; step++) {
        workgroupBarrier();
        store_step(thread);
        workgroupBarrier();
        if (step + 1u < steps) { load_step(work, thread, first_output, first_token, step + 1u); }
        for (var c = 0u; c < STEP_QUADS; c++) {
            var weights: array<vec4<f32>, OUTPUTS_EACH>;
            unroll(o, OUTPUTS_EACH) {
                weights[o] = floats(tile_weights[(output + o * OUTPUT_THREADS) * STRIDE + c]);
            }
            unroll(t, TOKENS_EACH) {
                let values = floats(tile_inputs[(token + t * TOKEN_THREADS) * STRIDE + c]);
                unroll(o, OUTPUTS_EACH) {
                    let w = weights[o];
                    let i = o * TOKENS_EACH + t;
                    acc[i] = fma(w.w, values.w, fma(w.z, values.z, fma(w.y, values.y, fma(w.x, values.x, acc[i]))));
                }
            }
        }
    }
    unroll(o, OUTPUTS_EACH) {
        unroll(t, TOKENS_EACH) {
            finish(work, first_output + output + o * OUTPUT_THREADS, first_token + token + t * TOKEN_THREADS, acc[o * TOKENS_EACH + t]);
        }
    }
}
