// A linear layer, or a part of its outputs, as `matmul`, `gemm`, `gemm_fast` and `gemm_warpgroups` compute it.
//
//   for each output row o of this part, for each token t:
//     y = factor * (x[t] . W[o]) + bias[o];  with a softcap: y = cap * tanh(y / cap)
//     out[t, first + o] = y
//   ROUTED: only tokens with a weight for this expert; ADDED: out[t, first + o] += weight * y, or += y if not ROUTED
//
// In `matmul` and `gemm` x[t] . W[o] has 16 lanes. Lane l adds up the quads l, l + 16, ... of the row, one fma after the other; the lanes are
// added as a binary tree. So a token's result is the same in both kernels, and in every batch.
// The fast kernels add up in other orders, which depend on the number of tokens.

struct Args {
    Form form;
    u32 inputs;
    u32 outputs; // of this part
    u32 first;   // output of the layer that is this part's first
    u32 width;   // outputs of the layer
    u32 tokens;
    float factor;
    float cap; // 0: none
    u32 has_bias;
    u32 expert;
    u32 experts;
    float scale; // a power of two that brings every weight into the range of f16, for the fast ones
};

// sum + a . b, one after the other
__device__ __forceinline__ float add_product(float sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
}

// Adds up N sums over 16 lanes. For N <= 16 sum i ends in `acc[0]` of lane i * 16 / N; for more, lane l has sums l * N / 16 and
// those behind it.
template <u32 N>
__device__ __forceinline__ void add_lanes(float* acc, u32 lane) {
    add_up<N, LANES / 2u>(acc, lane);
}

// Whether any of `n` tokens from `first` on uses the expert.
__device__ __forceinline__ bool any_routed(const float* routes, const Args& args, u32 first, u32 n) {
    bool any = false;
    for (u32 t = first; t < min(first + n, args.tokens); t++) {
        any = any || routes[t * args.experts + args.expert] != 0.0f;
    }
    return any;
}

__device__ __forceinline__ float capped(const Args& args, float y) {
    return args.cap * tanh_(y / args.cap);
}

// Finishes output o of this part for a token.
__device__ __forceinline__ void put(
    const Args& args, const float* bias, const float* routes, float* out, u32 o, u32 token, float sum) {
    if (o >= args.outputs || token >= args.tokens) { return; }
    float y = args.has_bias != 0u ? fmaf(sum, args.factor, bias[args.first + o]) : sum * args.factor;
    if (args.cap > 0.0f) { y = capped(args, y); }
    u32 at = token * args.width + args.first + o;
    if (ROUTED) {
        float weight = routes[token * args.experts + args.expert];
        if (weight != 0.0f) { out[at] = ADDED ? fmaf(weight, y, out[at]) : y; }
    } else {
        out[at] = ADDED ? out[at] + y : y;
    }
}
