// A linear layer for many tokens (see product.wgsl and units.wgsl), in sums of another order than `gemm`. A workgroup has a tile of
// TILE_OUTPUTS outputs and TILE_TOKENS tokens. For STEP inputs at a time it decodes the tile's weights to f16 in workgroup memory, beside
// the tokens' inputs (halves.wgsl), and multiplies them: `products_*.wgsl` say how. The next step's weights and inputs are on their way
// meanwhile.
//
// Inputs have a power of two per row, the matrix has one, too (`args.scale`), and both are undone in the sums. int8 has one scale
// per row, so its codes stay whole numbers, and the scale is for their sums.

@group(0) @binding(0) var<storage, read> w_words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>; // as `halves` writes it

const THREADS: u32 = 256u;
const STEP: u32 = 64u;              // inputs
const STEP_QUADS: u32 = STEP / 4u;
const STRIDE: u32 = STEP_QUADS + 2u; // quads of a row in workgroup memory: rows begin in different banks
const ROW_UNITS: u32 = STEP_QUADS / UNIT_QUADS;

// All that lies in workgroup memory is multiples of 16 bytes: a driver may place one behind the other, and cooperative matrices are loaded
// from multiples of 16 bytes. Behind four bytes NVIDIA's driver loaded them from eight bytes too early.
var<workgroup> tile_weights: array<Quad, TILE_OUTPUTS * STRIDE>;
var<workgroup> tile_inputs: array<Quad, TILE_TOKENS * STRIDE>;

// What an invocation has loaded for the next step: UNITS_EACH units, and CHUNKS_EACH chunks of eight inputs.
var<private> units: array<Unit, UNITS_EACH>;
var<private> chunks: array<vec4<u32>, CHUNKS_EACH>;

// Chunks of a row of `x`.
fn row_chunks() -> u32 {
    return (args.inputs + 255u) / 256u * 32u;
}

fn load_step(work: Work, thread: u32, first_output: u32, first_token: u32, step: u32) {
    unroll(i, UNITS_EACH) {
        let n = thread + i * THREADS;
        let unit = step * ROW_UNITS + n % ROW_UNITS;
        let row = work.before + min(first_output + n / ROW_UNITS, work.outputs - 1u);
        let all = w_units(args.form);
        units[i] = w_fetch(args.form, row, min(unit, all - 1u));
        if (ENCODING == INT8) { units[i].scales.x = 1.0; }
        // Behind the end of a row of inputs are zeros.
        if (unit >= all) {
            units[i].scales = vec4(0.0);
            if (IS_FLOAT) { units[i].a = vec4(0u); }
        }
    }
    unroll(i, CHUNKS_EACH) {
        let n = thread + i * THREADS;
        let token = inputs_of(work, first_token + n / (STEP / 8u));
        chunks[i] = x[token * row_chunks() + step * (STEP / 8u) + n % (STEP / 8u)];
    }
}

fn store_step(thread: u32) {
    unroll(i, UNITS_EACH) {
        let n = thread + i * THREADS;
        let to = n / ROW_UNITS * STRIDE + n % ROW_UNITS * UNIT_QUADS;
        let unit = units[i];
        unroll(j, UNIT_QUADS) { tile_weights[to + j] = rounded(quad_of(unit, j) * args.scale); }
    }
    unroll(i, CHUNKS_EACH) {
        let n = thread + i * THREADS;
        let to = n / (STEP / 8u) * STRIDE + n % (STEP / 8u) * 2u;
        tile_inputs[to] = quad_from(chunks[i].xy);
        tile_inputs[to + 1u] = quad_from(chunks[i].zw);
    }
}

// Finishes output `o` of this part for a token of this tile.
fn finish(work: Work, o: u32, token: u32, sum: f32) {
    if (o >= work.outputs || token >= work.tokens) { return; }
    var rows = args.tokens; // of `x`
    if (ROUTED) { rows /= args.share; }
    var y = sum * (bitcast<f32>(x[rows * row_chunks() + inputs_of(work, token)].x) / args.scale);
    if (ENCODING == INT8) { y *= bitcast<f32>(w_word(args.form.s + (work.before + o) * (args.form.quads / 8u))); }
    put(work, o, token, y);
}

// Steps of the tile: none if there is nothing to do.
fn n_steps(work: Work, first_output: u32, first_token: u32) -> u32 {
    let steps = (args.form.quads + STEP_QUADS - 1u) / STEP_QUADS;
    return select(0u, steps, first_token < work.tokens && first_output < work.outputs);
}
