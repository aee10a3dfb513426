// Products of a few tokens' inputs and rows of weights (see units.wgsl). UNIT_LANES lanes share ROWS rows, and each takes every
// UNIT_LANES-th unit of them.

const UNIT_LANES: u32 = 64u;
const GROUPS: u32 = 2u; // of lanes, in a workgroup
const THREADS: u32 = UNIT_LANES * GROUPS;
const ALL_ROWS: u32 = ROWS * GROUPS; // as many as MATMUL_OUTPUTS

// Tokens from `token` on.
struct Inputs {
    token: u32,
    last: u32,  // token; the inputs of further ones are its own
    n: u32,     // elements of a token
}

// What this lane has loaded: a unit of each row.
var<private> units: array<Unit, ROWS>;
// Sums of this lane: [ROWS, TOKENS].
var<private> acc: array<f32, ROWS * TOKENS>;
// NORMED: the sum of the squares of its inputs.
var<private> squares: f32;

// Element i of `x` of all tokens, 0 from `end` on.
fn input_of(i: u32, end: u32) -> f32 {
    if (i >= end) { return 0.0; }
    return x[i >> 2u][i & 3u];
}

// Quad c of the inputs of token t.
fn inputs4(inputs: Inputs, t: u32, c: u32) -> vec4<f32> {
    let token = min(inputs.token + t, inputs.last);
    // Rows of floats can have any length: behind the end of one lies another token.
    if (IS_FLOAT && inputs.n % 8u != 0u) {
        let end = (token + 1u) * inputs.n;
        let i = token * inputs.n + 4u * c;
        return vec4(input_of(i, end), input_of(i + 1u, end), input_of(i + 2u, end), input_of(i + 3u, end));
    }
    return x[token * (inputs.n / 4u) + c];
}

// Adds the products of its units, whose quads are those from `first` on, for every token.
fn add_units(inputs: Inputs, first: u32) {
    unroll(j, UNIT_QUADS) {
        var values: array<vec4<f32>, TOKENS>;
        unroll(t, TOKENS) {
            values[t] = inputs4(inputs, t, first + j);
            if (NORMED) {
                squares += dot(values[t], values[t]);
                values[t] *= norm_weights(first + j);
            }
        }
        unroll(r, ROWS) {
            let w = quad_of(units[r], j);
            unroll(t, TOKENS) {
                let v = values[t];
                let i = r * TOKENS + t;
                acc[i] = fma(w.w, v.w, fma(w.z, v.z, fma(w.y, v.y, fma(w.x, v.x, acc[i]))));
            }
        }
    }
}

const SQUARES: u32 = ALL_ROWS * TOKENS; // behind the sums: those of each group of lanes
var<workgroup> sums: array<f32, (SQUARES + select(0u, GROUPS, NORMED)) * UNIT_LANES>;

// Adds up what the lanes of each group have: afterwards `sum_of(i)` is the sum for row i / TOKENS of the workgroup and token
// i % TOKENS. All invocations must call it.
fn add_up(lanes: Lanes) {
    let thread = thread_of(lanes);
    let lane = thread % UNIT_LANES;
    let near = min(width_of(lanes), UNIT_LANES);
    for (var step = 1u; step < near; step *= 2u) {
        unroll(r, ROWS) {
            unroll(t, TOKENS) {
                let i = r * TOKENS + t;
                acc[i] += bitcast<f32>(of_neighbour(bitcast<u32>(acc[i]), step));
            }
        }
        if (NORMED) { squares += bitcast<f32>(of_neighbour(bitcast<u32>(squares), step)); }
    }
    if (lane % near == 0u) {
        let first = thread / UNIT_LANES * ROWS * TOKENS;
        if (NORMED) { sums[(SQUARES + thread / UNIT_LANES) * UNIT_LANES + lane / near] = squares; }
        unroll(r, ROWS) {
            unroll(t, TOKENS) { sums[(first + r * TOKENS + t) * UNIT_LANES + lane / near] = acc[r * TOKENS + t]; }
        }
    }
    workgroupBarrier();
}

fn sum_of(lanes: Lanes, i: u32) -> f32 {
    let left = UNIT_LANES / min(width_of(lanes), UNIT_LANES);
    var sum = sums[i * UNIT_LANES];
    for (var n = 1u; n < left; n++) { sum += sums[i * UNIT_LANES + n]; }
    return sum;
}
