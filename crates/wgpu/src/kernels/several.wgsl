// Up to three linear layers for one token that share their inputs and the encoding of their weights, each as `matmul_units` computes it.
// Fewer dispatches, and the workgroups of small layers fill the GPU together.
//
//   for each layer i, for each of its outputs o:  out_i[o] = factor_i * (x . W_i[o]) + bias_i[o]
//   GATED, of two layers:  out_0[o] = activation(out_0[o], out_1[o]), and out_1 is not written
//   ROUTED, of two gated layers of all experts:  the same for every routed row, with its expert's layers and the inputs of its token (see
//            product.wgsl). Binding 2 has the routes
//   NORMED:  x * norm / sqrt(mean(x^2) + eps) instead of x. Every workgroup adds up the squares of the inputs that it reads anyway,
//            which costs less than a dispatch.

// Of layers that are not there, outputs is 0.
struct Args {
    quads: u32,
    biases: u32,   // bit i: layer i has one
    outputs0: u32,
    outputs1: u32, // ROUTED: routed rows of a token
    outputs2: u32, // GATED: the activation
    b0: u32,       // as in Form
    b1: u32,
    b2: u32,
    s0: u32,
    s1: u32,
    s2: u32,
    factor0: f32,
    factor1: f32,
    factor2: f32,  // GATED: its limit
    eps: f32,
}

@group(0) @binding(0) var<storage, read> w0_words: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> w1_words: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> w2_words: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>; // [inputs]
@group(0) @binding(4) var<storage, read> norm: array<vec4<f32>>; // [inputs]
@group(0) @binding(5) var<storage, read> bias0: array<f32>;
@group(0) @binding(6) var<storage, read> bias1: array<f32>;
@group(0) @binding(7) var<storage, read> bias2: array<f32>;
@group(0) @binding(8) var<storage, read_write> out0: array<f32>;
@group(0) @binding(9) var<storage, read_write> out1: array<f32>;
@group(0) @binding(10) var<storage, read_write> out2: array<f32>;
var<immediate> args: Args;

// Rows of floats are whole units here, too.
fn inputs_of_token(token: u32) -> Inputs {
    return Inputs(token, token, 4u * args.quads);
}

fn norm_weights(quad: u32) -> vec4<f32> {
    return norm[quad];
}

// The sum for row i of the workgroup.
fn row_sum(lanes: Lanes, i: u32) -> f32 {
    if (!NORMED) { return sum_of(lanes, i); }
    let mean = sum_of(lanes, SQUARES + i / ROWS) / f32(4u * args.quads);
    return sum_of(lanes, i) / sqrt(mean + args.eps);
}

// An output, whose bias is number `o`.
fn finished(layer: u32, sum: f32, o: u32) -> f32 {
    let has_bias = ((args.biases >> layer) & 1u) != 0u;
    if (layer == 0u) {
        if (has_bias) { return fma(sum, args.factor0, bias0[o]); }
        return sum * args.factor0;
    }
    if (layer == 1u) {
        if (has_bias) { return fma(sum, args.factor1, bias1[o]); }
        return sum * args.factor1;
    }
    if (has_bias) { return fma(sum, args.factor2, bias2[o]); }
    return sum * args.factor2;
}

// Two layers side by side: groups of lanes with even numbers have rows of the first one, the others of the second. `routed`: the row of
// `out0`, 0 without ROUTED.
fn gate_rows(lanes: Lanes, workgroup: u32, routed: u32) {
    let thread = thread_of(lanes);
    let group = thread / UNIT_LANES;
    let first = workgroup * (ALL_ROWS / 2u);
    var before = 0u; // rows of other experts
    var inputs = inputs_of_token(0u);
    if (ROUTED) {
        before = w2_word(routed) * args.outputs0;
        inputs = inputs_of_token(routed / args.outputs1);
    }
    let row = before + first + group / 2u * ROWS;
    let last = before + args.outputs0 - 1u;
    if (group % 2u == 0u) {
        w0_add_rows(Form(args.quads, args.b0, args.s0), row, last, thread % UNIT_LANES, inputs);
    } else {
        w1_add_rows(Form(args.quads, args.b1, args.s1), row, last, thread % UNIT_LANES, inputs);
    }
    add_up(lanes);
    let o = first + thread;
    if (thread < ALL_ROWS / 2u && o < args.outputs0) {
        let at = thread / ROWS * 2u * ROWS + thread % ROWS;
        let g = finished(0u, row_sum(lanes, at), before + o);
        let u = finished(1u, row_sum(lanes, at + ROWS), before + o);
        out0[routed * args.outputs0 + o] = gated_(g, u, args.outputs2, args.factor2);
    }
}

@compute @workgroup_size(THREADS)
fn main(lanes: Lanes, @builtin(workgroup_id) id: vec3<u32>) {
    if (GATED) {
        gate_rows(lanes, id.x, id.y);
        return;
    }
    // Which layer this workgroup has rows of.
    let blocks0 = (args.outputs0 + ALL_ROWS - 1u) / ALL_ROWS;
    let blocks1 = (args.outputs1 + ALL_ROWS - 1u) / ALL_ROWS;
    var layer = 0u;
    var block = id.x;
    if (block >= blocks0) {
        layer = 1u;
        block -= blocks0;
        if (block >= blocks1) {
            layer = 2u;
            block -= blocks1;
        }
    }
    let thread = thread_of(lanes);
    let lane = thread % UNIT_LANES;
    let first = block * ALL_ROWS;
    let row = first + thread / UNIT_LANES * ROWS;
    var outputs = args.outputs0;
    if (layer == 0u) {
        w0_add_rows(Form(args.quads, args.b0, args.s0), row, outputs - 1u, lane, inputs_of_token(0u));
    } else if (layer == 1u) {
        outputs = args.outputs1;
        w1_add_rows(Form(args.quads, args.b1, args.s1), row, outputs - 1u, lane, inputs_of_token(0u));
    } else {
        outputs = args.outputs2;
        w2_add_rows(Form(args.quads, args.b2, args.s2), row, outputs - 1u, lane, inputs_of_token(0u));
    }
    add_up(lanes);
    let o = first + thread;
    if (thread < ALL_ROWS && o < outputs) {
        let y = finished(layer, row_sum(lanes, thread), o);
        if (layer == 0u) { out0[o] = y; } else if (layer == 1u) { out1[o] = y; } else { out2[o] = y; }
    }
}
