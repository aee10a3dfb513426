// A linear layer, or a part of its outputs, as `matmul` and `gemm` compute it.
//
//   for each output row o of this part, for each token t:
//     y = factor * (x[t] . W[o]) + bias[o];  with a softcap: y = cap * tanh(y / cap)
//     out[t, first + o] = y
//   ROUTED: only tokens with a weight for this expert; ADDED: out[t, first + o] += weight * y, or += y if not ROUTED
//
// In `matmul` and `gemm` x[t] . W[o] has LANES lanes. Lane l adds up the quads l, l + LANES, ... of the row, one fma after the other; the
// lanes are added as a binary tree of neighbours. So a token's result is the same in both kernels, and in every batch. The fast kernels
// add up in other orders.

struct Args {
    form: Form,
    inputs: u32,
    outputs: u32, // of this part
    first: u32,   // output of the layer that is this part's first
    width: u32,   // outputs of the layer
    tokens: u32,
    factor: f32,
    cap: f32,     // 0: none
    has_bias: u32,
    expert: u32,
    experts: u32,
    scale: f32,   // a power of two that brings every weight into the range of f16, for `gemm_halves`
}

@group(0) @binding(2) var<storage, read> bias: array<f32>;       // [width]
@group(0) @binding(3) var<storage, read_write> out: array<f32>;  // [tokens, width]
@group(0) @binding(4) var<storage, read> routes: array<f32>;     // [tokens, experts], 0: not routed
var<immediate> args: Args;

// Whether any of `n` tokens from `first` on uses the expert.
fn any_routed(first: u32, n: u32) -> bool {
    var any = false;
    for (var t = first; t < min(first + n, args.tokens); t++) {
        any = any || routes[t * args.experts + args.expert] != 0.0;
    }
    return any;
}

// Finishes output o of this part for a token.
fn put(o: u32, token: u32, sum: f32) {
    if (o >= args.outputs || token >= args.tokens) { return; }
    var y = sum * args.factor;
    if (args.has_bias != 0u) { y = fma(sum, args.factor, bias[args.first + o]); }
    if (args.cap > 0.0) { y = args.cap * tanh_(y / args.cap); }
    let at = token * args.width + args.first + o;
    if (ROUTED) {
        let weight = routes[token * args.experts + args.expert];
        if (weight != 0.0) {
            if (ADDED) { out[at] = fma(weight, y, out[at]); } else { out[at] = y; }
        }
    } else if (ADDED) {
        out[at] += y;
    } else {
        out[at] = y;
    }
}
