// A linear layer for many tokens (see product.wgsl). A workgroup has a tile of TILE outputs and TILE tokens. For 64 inputs at a
// time, a quad per lane, it decodes the tile's weights once to workgroup memory, beside the tokens' inputs. A thread has
// one lane of eight outputs and eight tokens.

const OUTPUTS: u32 = TILE;
const TOKENS: u32 = TILE;
const THREADS: u32 = 256u;
const EACH: u32 = 8u; // outputs of a thread, and tokens

// Weights [OUTPUTS, LANES], inputs [TOKENS, LANES]; at the end sums [16 groups of threads, LANES, 2].
var<workgroup> tile: array<vec4<f32>, (OUTPUTS + TOKENS) * LANES>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let lane = thread % LANES;
    let first_output = thread / LANES % 4u * EACH;
    let first_token = thread / LANES / 4u * EACH;
    let tile_output = group.x * OUTPUTS;
    let tile_token = group.y * TOKENS;
    let work = work_of(group.z);
    let quads = select(0u, args.form.quads, tile_token < work.tokens && tile_output < work.outputs);
    var acc: array<f32, EACH * EACH>;
    for (var i = 0u; i < EACH * EACH; i++) { acc[i] = 0.0; }
    for (var first = 0u; first < quads; first += LANES) {
        for (var i = thread; i < OUTPUTS * LANES; i += THREADS) {
            let c = first + i % LANES;
            let row = tile_output + i / LANES;
            var weights = vec4(0.0);
            if (c < quads && row < work.outputs) { weights = weights4(args.form, work.before + row, c); }
            tile[i] = weights;
        }
        for (var i = thread; i < TOKENS * LANES; i += THREADS) {
            let c = first + i % LANES;
            var values = vec4(0.0);
            if (c < quads) { values = inputs4(inputs_of(work, tile_token + i / LANES), c); }
            tile[OUTPUTS * LANES + i] = values;
        }
        workgroupBarrier();
        if (first + lane < quads) {
            var weights: array<vec4<f32>, EACH>;
            for (var o = 0u; o < EACH; o++) { weights[o] = tile[(first_output + o) * LANES + lane]; }
            for (var t = 0u; t < EACH; t++) {
                let values = tile[(OUTPUTS + first_token + t) * LANES + lane];
                for (var o = 0u; o < EACH; o++) {
                    var sum = acc[o * EACH + t];
                    sum = fma(weights[o].x, values.x, sum);
                    sum = fma(weights[o].y, values.y, sum);
                    sum = fma(weights[o].z, values.z, sum);
                    sum = fma(weights[o].w, values.w, sum);
                    acc[o * EACH + t] = sum;
                }
            }
        }
        workgroupBarrier();
    }
    // One of the eight outputs of every thread at a time.
    for (var o = 0u; o < EACH; o++) {
        let at = o * EACH;
        tile[2u * thread] = vec4(acc[at], acc[at + 1u], acc[at + 2u], acc[at + 3u]);
        tile[2u * thread + 1u] = vec4(acc[at + 4u], acc[at + 5u], acc[at + 6u], acc[at + 7u]);
        workgroupBarrier();
        if (thread < 16u * EACH) {
            let threads = thread / EACH; // a group of 16, one per lane
            let t = thread % EACH;
            let first = 2u * threads * LANES + t / 4u;
            var sums: array<f32, LANES / 2u>;
            for (var l = 0u; l < LANES / 2u; l++) {
                sums[l] = tile[first + 4u * l][t % 4u] + tile[first + 4u * l + 2u][t % 4u];
            }
            for (var n = LANES / 4u; n > 0u; n /= 2u) {
                for (var l = 0u; l < n; l++) { sums[l] = sums[2u * l] + sums[2u * l + 1u]; }
            }
            put(work, tile_output + threads % 4u * EACH + o, tile_token + threads / 4u * EACH + t, sums[0]);
        }
        workgroupBarrier();
    }
}
