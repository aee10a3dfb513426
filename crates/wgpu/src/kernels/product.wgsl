// A linear layer, or a part of its outputs, as `matmul` and `gemm` compute it.
//
//   for each output row o of this part, for each token t:
//     y = factor * (x[t] . W[o]) + bias[o];  with a softcap: y = cap * tanh(y / cap)
//     out[t, first + o] = y
//   ADDED: out[t, first + o] += y
//   ROUTED: the same layer of every expert, one behind the other. A row of `out` is a routed row (see routes.wgsl): `out[r]` is what its
//   expert makes of x[r / share]. Biases
//   are [experts, width] and inputs [tokens / share, inputs]. TILED: rows are those that `sort` lists, otherwise any.
//
// In `matmul` and `gemm` x[t] . W[o] has LANES lanes. Lane l adds up the quads l, l + LANES, ... of the row, one fma after the other; the
// lanes are added as a binary tree of neighbours. So a token's result is the same in both kernels, and in every batch. The fast kernels
// add up in other orders.

struct Args {
    form: Form,
    inputs: u32,
    outputs: u32, // of this part
    first: u32,   // output of the layer, or ROUTED of all experts' layers, that is this part's first
    width: u32,   // outputs of the layer
    tokens: u32,  // rows of `out`
    factor: f32,
    cap: f32,     // 0: none
    has_bias: u32,
    experts: u32,
    share: u32,   // rows of `out` for each row of `x`, one behind the other
    scale: f32,   // a power of two that brings every weight into the range of f16, for `gemm_halves`
}

@group(0) @binding(2) var<storage, read> bias: array<f32>;       // [width]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;  // [tokens, width]
@group(0) @binding(4) var<storage, read> routes: array<u32>;     // as routes.wgsl says
var<immediate> args: Args;

// What a workgroup computes: outputs of a layer, for tokens.
struct Work {
    before: u32,  // rows of this part that belong to earlier experts
    outputs: u32, // of the layer that are in this part
    first: u32,   // the first one of them
    bias: u32,    // where the layer's biases begin
    sorted: u32,  // where `sort` has listed the expert's rows
    tokens: u32,  // how many
}

// For tiles: there is nothing to do if the first token of one is not below `tokens`.
fn work_of(expert: u32) -> Work {
    if (!ROUTED) { return Work(0u, args.outputs, args.first, 0u, 0u, args.tokens); }
    let begin = expert * args.width;
    let low = max(begin, args.first);
    let outputs = max(low, min(begin + args.width, args.first + args.outputs)) - low;
    if (!TILED) { return Work(low - args.first, outputs, low - begin, begin, 0u, args.tokens); }
    let first = routes[begin_at(args.tokens, expert)];
    let n = routes[begin_at(args.tokens, expert + 1u)] - first;
    return Work(low - args.first, outputs, low - begin, begin, sorted_at(args.tokens, args.experts, first), n);
}

// The row of `out` of a token, which is one of those that there are.
fn row_of(work: Work, token: u32) -> u32 {
    if (ROUTED && TILED) { return routes[work.sorted + token]; }
    return token;
}

// The row of `x`.
fn inputs_of(work: Work, token: u32) -> u32 {
    let row = row_of(work, min(token, work.tokens - 1u));
    if (ROUTED) { return row / args.share; }
    return row;
}

// Finishes output o for a token.
fn put(work: Work, o: u32, token: u32, sum: f32) {
    if (o >= work.outputs || token >= work.tokens) { return; }
    var y = sum * args.factor;
    if (args.has_bias != 0u) { y = fma(sum, args.factor, bias[work.bias + work.first + o]); }
    if (args.cap > 0.0) { y = args.cap * tanh_(y / args.cap); }
    let at = row_of(work, token) * args.width + work.first + o;
    if (ADDED) {
        out[at] += y;
    } else {
        out[at] = y;
    }
}
