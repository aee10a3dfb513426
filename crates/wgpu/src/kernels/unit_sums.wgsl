// Products of a few tokens' inputs and rows of weights (see units.wgsl). UNIT_LANES lanes share two rows, and each takes every
// UNIT_LANES-th unit of them.

const UNIT_LANES: u32 = 32u;  // that share a row
const ROWS: u32 = 2u;         // of a lane: both use the inputs that it loads
const GROUPS: u32 = 4u;       // of lanes, in a workgroup
const THREADS: u32 = UNIT_LANES * GROUPS;
const ALL_ROWS: u32 = ROWS * GROUPS; // as many as MATMUL_OUTPUTS

// The inputs of a unit: quads from `first` on, of the tokens from `token` on.
struct Inputs {
    token: u32,
    last: u32,  // token; the inputs of further ones are its own
    quads: u32, // of a token
    first: u32,
}

// Sums of this lane: [ROWS, TOKENS].
var<private> acc: array<f32, ROWS * TOKENS>;

// Adds quad j of a unit of each row, for every token.
fn add_quad(a_unit: Unit, b_unit: Unit, inputs: Inputs, j: u32) {
    let a = quad_of(a_unit, j);
    let b = quad_of(b_unit, j);
    for (var t = 0u; t < TOKENS; t++) {
        let values = x[min(inputs.token + t, inputs.last) * inputs.quads + inputs.first + j];
        acc[t] = fma(a.w, values.w, fma(a.z, values.z, fma(a.y, values.y, fma(a.x, values.x, acc[t]))));
        acc[TOKENS + t] = fma(b.w, values.w, fma(b.z, values.z, fma(b.y, values.y, fma(b.x, values.x, acc[TOKENS + t]))));
    }
}

// The whole unit, quad by quad: compilers that do not unroll a loop would index registers.
fn add_unit(a: Unit, b: Unit, inputs: Inputs) {
    add_quad(a, b, inputs, 0u);
    add_quad(a, b, inputs, 1u);
    add_quad(a, b, inputs, 2u);
    add_quad(a, b, inputs, 3u);
    if (UNIT_QUADS == 8u) {
        add_quad(a, b, inputs, 4u);
        add_quad(a, b, inputs, 5u);
        add_quad(a, b, inputs, 6u);
        add_quad(a, b, inputs, 7u);
    }
}

var<workgroup> sums: array<f32, ALL_ROWS * TOKENS * UNIT_LANES>;

// Adds up what the lanes of each group have: afterwards `sum_of(i)` is the sum for row i / TOKENS of the workgroup and token
// i % TOKENS. All invocations must call it.
fn add_up(lanes: Lanes) {
    let thread = thread_of(lanes);
    let lane = thread % UNIT_LANES;
    let near = min(width_of(lanes), UNIT_LANES);
    for (var step = 1u; step < near; step *= 2u) {
        for (var i = 0u; i < ROWS * TOKENS; i++) { acc[i] += bitcast<f32>(of_neighbour(bitcast<u32>(acc[i]), step)); }
    }
    if (lane % near == 0u) {
        let first = thread / UNIT_LANES * ROWS * TOKENS;
        for (var i = 0u; i < ROWS * TOKENS; i++) { sums[(first + i) * UNIT_LANES + lane / near] = acc[i]; }
    }
    workgroupBarrier();
}

fn sum_of(lanes: Lanes, i: u32) -> f32 {
    let left = UNIT_LANES / min(width_of(lanes), UNIT_LANES);
    var sum = sums[i * UNIT_LANES];
    for (var n = 1u; n < left; n++) { sum += sums[i * UNIT_LANES + n]; }
    return sum;
}
